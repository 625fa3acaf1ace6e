"""Continual learning on new patients (section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok, training_patients
from manydg.experiments._fold import Series, curve
from manydg.experiments.continual import SAMPLES_KEPT, STEPS
from manydg.experiments.study import PlannedRun

PAPER_FIRST, PAPER_EACH = 1000, 100


class Continual(Experiment):
    """Pre-train on the first 1,000 patients by id, then ten steps of 100 new ones, with and without replay."""

    title = "Continual learning on new patients"

    def plan(self, request: Request) -> list[PlannedRun]:
        first, each = self.sizes(request)
        return [
            PlannedRun(
                "continual",
                request.config.replace(algorithm=algorithm, seed=seed),
                {"replay": replay, "first": first, "each": each},
                procedure="continual",
            )
            for seed in range(request.seeds)
            for replay in (SAMPLES_KEPT, 0)
            for algorithm in request.algorithms
            if algorithm != "boosting"
        ]

    def sizes(self, request: Request) -> tuple[int, int]:
        """Patients at the start and in each step; half of all and a tenth of the rest where there are too few."""
        available = training_patients(request)
        if available >= PAPER_FIRST + STEPS * PAPER_EACH:
            return PAPER_FIRST, PAPER_EACH
        each = max(1, available // (2 * STEPS))
        return max(2, available - STEPS * each), each

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        done, figures = ok(records), {}
        for metric in request_metrics(done):
            for replay, words in ((SAMPLES_KEPT, "with four samples of each earlier patient"), (0, "without replay")):
                series: Series = {}
                for record in (record for record in done if record["variant"]["replay"] == replay):
                    for point in record["curve"]:
                        values = series.setdefault(record["algorithm"], {}).setdefault(point["patients seen"], [])
                        values += [] if point["test"][metric] is None else [point["test"][metric]]
                figures[f"continual-{metric}-{replay}"] = curve(
                    "continual", f"New patients step by step, {words}", "patients seen", metric, series
                )
        return figures

    def scaled(self, request: Request) -> str:
        first, each = self.sizes(request)
        if (first, each) == (PAPER_FIRST, PAPER_EACH):
            return ""
        return (
            f"The paper starts with {PAPER_FIRST} patients and adds {PAPER_EACH} in each of {STEPS} steps; here "
            f"{training_patients(request)} can train, so it starts with {first} and adds {each}."
        )


def request_metrics(records: Sequence[Record]) -> list[str]:
    """The test metrics that the records have."""
    return list(records[0]["test"]) if records else []
