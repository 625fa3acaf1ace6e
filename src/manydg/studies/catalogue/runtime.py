"""Seconds per epoch of every method (appendix B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from manydg.studies import patient_cost
from manydg.studies.experiment import Experiment, Record, Request, mean_and_sd
from manydg.studies.figure_data import FIGURES, CellTable, Curve, FigureData, read_figure
from manydg.studies.patient_cost import costs_by_patients, figures_of
from manydg.studies.study import PlannedRun

PAPER_EPOCHS, DROPPED = 23, 3
NAMES = {"mldg": "MLDG (equivalent)"}


class Runtime(Experiment):
    """23 epochs of each method one after the other, the first three dropped; and a step against the number of patients.

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

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        rows = []
        for record in records:
            seconds = [entry.seconds for entry in record.history]
            mean, sd = mean_and_sd(seconds[min(DROPPED, len(seconds) - 1) :])
            rows.append([NAMES.get(record.algorithm, record.algorithm), mean, sd, record.device])
        columns = ["algorithm", "seconds per epoch", "sd over epochs", "device"]
        note = "MLDG's episodes of an epoch hold every training sample once, so that its time is the equivalent time."
        table = FigureData(self.title, CellTable(columns, rows), "runtime", note=note)
        # A study that is only to be tried out need not wait for a million patients.
        patients = patient_cost.PATIENTS[: None if request.timed_epochs >= PAPER_EPOCHS else 3]
        names = [record.algorithm for record in records]
        return {"runtime": table, **_against_patients(names, patients, folder)}

    def scaled(self, request: Request) -> str:
        if request.timed_epochs == PAPER_EPOCHS:
            return ""
        return f"The paper times {PAPER_EPOCHS} epochs; here it is {request.timed_epochs}."


def _against_patients(algorithms: Sequence[str], patients: Sequence[int], folder: Path) -> dict[str, FigureData]:
    """Cost of a step against the number of patients, which no dataset changes: measured once for a folder."""
    blank = figures_of({}, patients)
    made: dict[str, FigureData] = {}
    for name, figure in blank.items():
        for place in sorted((folder / FIGURES).glob(f"*{name}.json")):
            data = read_figure(place).data
            if not isinstance(data, Curve):
                continue
            measured = {line.name for line in data.series}
            if set(algorithms) <= measured and set(patients) <= set(data.x.values):
                made[name] = replace(figure, data=data)
    if len(made) == len(blank):
        return made
    return figures_of(costs_by_patients(algorithms, patients), patients)
