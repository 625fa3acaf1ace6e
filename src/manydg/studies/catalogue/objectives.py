"""Which of the four objectives earns its place (appendix B.6, first part)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from manydg.studies.experiment import Experiment, Record, Request, curve, mean_curves
from manydg.studies.figure_data import FigureData
from manydg.studies.study import PlannedRun
from manydg.training.record import EpochEntry

CASES: dict[str, dict[str, float]] = {
    "case 1: supervised": {"mmd": 0.0, "reconstruction": 0.0, "similarity": 0.0},
    "case 2: supervised, MMD": {"reconstruction": 0.0, "similarity": 0.0},
    "case 3: supervised, reconstruction": {"mmd": 0.0, "similarity": 0.0},
    "case 4: supervised, MMD, reconstruction": {"similarity": 0.0},
    "all four objectives": {},
}
TERMS = {
    "supervised": "Supervised loss, L_sup",
    "mmd": "Discrepancy of v and z, L_MMD (best: 0)",
    "reconstruction": "Mutual reconstruction, L_rec (best: -2)",
    "similarity": "Agreement of domain factors, L_sim (best: -1)",
}
_NOTE = (
    "Measured on the validation patients after every epoch, unweighted. A term that is switched off is computed for "
    "this curve alone and takes no part in training."
)


class Objectives(Experiment):
    """Cases 1 to 4 of the paper and the full loss: final metrics, and the learning curve of every term."""

    title = "Objectives switched on one by one"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("objectives", request.options.of("manydg", seed, **off), {"objectives": name})
            for seed in range(request.seeds)
            for name, off in CASES.items()
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        figures = {}
        for place, (term, words) in enumerate(TERMS.items(), start=1):
            series = mean_curves(records, _case, partial(_term, term))
            if series:
                figures[f"objectives-{place}-{term}"] = curve("objectives", words, "epoch", term, series, note=_NOTE)
        return figures


def _case(record: Record) -> str:
    return str(record.variant["objectives"])


def _term(name: str, entry: EpochEntry) -> float | None:
    return (entry.val_terms or {}).get(name)
