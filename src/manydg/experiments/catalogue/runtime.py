"""Seconds per epoch of every method (appendix B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.experiments._experiment import Experiment, Figure, Record, Request
from manydg.experiments._fold import mean_and_sd
from manydg.experiments.study import PlannedRun

PAPER_EPOCHS, DROPPED = 23, 3
NAMES = {"mldg": "MLDG (equivalent)"}


class Runtime(Experiment):
    """23 epochs of each method one after the other, the first three dropped.

    The paper's MLDG draws episodes, so that its time per sample is multiplied by the number of training samples to get
    an equivalent epoch. Here an epoch of episodes holds every training sample once: the product is the epoch's time.
    """

    title = "Running time"
    workers = 1

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("runtime", request.options.of(name, 0).replace(epochs=request.timed_epochs), procedure="timing")
            for name in request.stepwise
        ]

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        rows = []
        for record in records:
            seconds = [float(entry["seconds"]) for entry in record["history"]]
            mean, sd = mean_and_sd(seconds[min(DROPPED, len(seconds) - 1) :])
            rows.append([NAMES.get(record["algorithm"], record["algorithm"]), mean, sd, record["device"]])
        columns = ["algorithm", "seconds per epoch", "sd over epochs", "device"]
        note = "MLDG's episodes of an epoch hold every training sample once, so that its time is the equivalent time."
        return {
            "runtime": {
                "kind": "table",
                "experiment": "runtime",
                "title": self.title,
                "data": {"columns": columns, "rows": rows},
                "note": note,
            }
        }

    def scaled(self, request: Request) -> str:
        if request.timed_epochs == PAPER_EPOCHS:
            return ""
        return f"The paper times {PAPER_EPOCHS} epochs; here it is {request.timed_epochs}."
