"""Seconds per epoch of every method (appendix B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok
from manydg.experiments.study import PlannedRun

EPOCHS, DROPPED = 23, 3


class Runtime(Experiment):
    """23 epochs of each method, the first three dropped.

    An epoch shows every method every training sample once, MLDG's episodes included, so that its time needs no
    conversion: it is the paper's equivalent time.
    """

    title = "Running time"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("runtime", request.config.replace(algorithm=name, seed=0, epochs=EPOCHS), {"purpose": "timing"})
            for name in request.algorithms
            if name != "boosting"
        ]

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        rows = []
        for record in ok(records):
            seconds = [entry["seconds"] for entry in record["history"][DROPPED:]]
            rows.append(
                [record["algorithm"], float(np.mean(seconds)), float(np.std(seconds, ddof=1)), record["device"]]
            )
        data = {"columns": ["algorithm", "seconds per epoch", "sd", "device"], "rows": rows}
        return {"runtime": {"kind": "table", "experiment": "runtime", "title": self.title, "data": data}}
