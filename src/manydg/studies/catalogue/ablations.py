"""What each objective of ManyDG is worth, and how much it should weigh (appendix B.6)."""

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

    name = "objectives"
    title = "Objectives switched on one by one"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("objectives", request.options.of("manydg", seed, **off), {"objectives": name})
            for seed in range(request.seeds)
            for name, off in CASES.items()
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        figures = {}
        for number, (term, words) in enumerate(TERMS.items(), start=1):
            series = mean_curves(records, _case, partial(_term, term))
            if series:
                figures[f"objectives-{number}-{term}"] = curve("objectives", words, "epoch", term, series, note=_NOTE)
        return figures


def _case(record: Record) -> str:
    return str(record.variant["objectives"])


def _term(name: str, entry: EpochEntry) -> float | None:
    return (entry.val_terms or {}).get(name)


VALUES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WEIGHTS = ("mmd", "reconstruction", "similarity")
ALIKE = dict.fromkeys(WEIGHTS, 1.0)
GREEDY = {"mmd": 0.2, "reconstruction": 0.2, "similarity": 2.0}


class Weights(Experiment):
    """Each weight over 0.1 to 10 with the others at 1, and the paper's greedy combination."""

    name = "weights"
    title = "Weights of the objectives"

    def plan(self, request: Request) -> list[PlannedRun]:
        runs = []
        for seed in range(request.seeds):
            for weight in WEIGHTS:
                runs += [
                    PlannedRun(
                        "weights",
                        request.options.of("manydg", seed, **{**ALIKE, weight: value}),
                        {"changed": weight, "weight": value},
                    )
                    for value in VALUES
                ]
            combination = ", ".join(f"{name} {value:g}" for name, value in GREEDY.items())
            greedy = request.options.of("manydg", seed, **GREEDY)
            runs.append(PlannedRun("weights", greedy, {"changed": f"greedy combination: {combination}"}))
        return runs
