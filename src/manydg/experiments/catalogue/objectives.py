"""Which of the four objectives earns its place (appendix B.6, first part)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok
from manydg.experiments._fold import curve, mean_curves
from manydg.experiments.study import PlannedRun

CASES: dict[str, dict[str, float]] = {
    "L_sup (case 1)": {"mmd": 0.0, "reconstruction": 0.0, "similarity": 0.0},
    "L_sup + L_MMD (case 2)": {"reconstruction": 0.0, "similarity": 0.0},
    "L_sup + L_rec (case 3)": {"mmd": 0.0, "similarity": 0.0},
    "L_sup + L_MMD + L_rec (case 4)": {"similarity": 0.0},
    "all four": {},
}


def _term(name: str, entry: Mapping[str, Any]) -> float | None:
    value: float | None = entry["losses"].get(name)
    return value


class Objectives(Experiment):
    """Cases 1 to 4 of the paper and the full loss: final metrics, and the learning curve of every term."""

    title = "Objectives switched on one by one"

    def plan(self, request: Request) -> list[PlannedRun]:
        config = request.config.replace(algorithm="manydg")
        cases = {name: {**config.settings, **off} for name, off in CASES.items()}
        return [
            PlannedRun("objectives", config.replace(settings=settings, seed=seed), {"objectives": name})
            for seed in range(request.seeds)
            for name, settings in cases.items()
        ]

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        done = ok(records)
        terms = list(dict.fromkeys(term for record in done for entry in record["history"] for term in entry["losses"]))
        figures = {}
        for term in terms:
            series = mean_curves(
                [record for record in done if term in record["history"][0]["losses"]],
                lambda record: str(record["variant"]["objectives"]),
                partial(_term, term),
            )
            figures[f"objectives-{term}"] = curve(
                "objectives", f"The {term} term while training", "epoch", f"{term} loss (weighted)", series
            )
        return figures
