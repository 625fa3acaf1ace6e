"""Do stated probabilities, prediction sets and the sign of strange patients hold on unseen patients?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manydg.experiments._experiment import Experiment, Figure, Record, Request
from manydg.experiments._fold import Series, curve, mean_and_sd
from manydg.experiments._judged import Judged, judge
from manydg.experiments.study import PlannedRun, grid

NAME = "calibration"
SHARES = tuple(round(0.05 * step, 2) for step in range(21))
COLUMNS = (
    "model", "ECE as given", "ECE calibrated", "Brier as given", "Brier calibrated", "ECE within a patient",
    "Brier within a patient", "promised coverage", "coverage", "coverage of the worst class", "size of sets",
    "promised share of patients", "share of patients covered", "size of their sets", "promised false alarms",
    "called unlike",
)  # fmt: skip


class CalibrationOfUnseen(Experiment):
    """Temperature, prediction sets and novelty limits from validation patients, held against test patients."""

    title = "Knowing when not to know"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", request.algorithms, range(request.seeds), request.options)

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        judged: dict[str, list[Judged]] = {}
        for record in records:
            judged.setdefault(record["algorithm"], []).append(judge(request.dataset, record, folder))
        figures = {f"{NAME}-{name}": _reliability(name, found) for name, found in judged.items()}
        figures[f"{NAME}-coverage"] = _coverage(judged)
        figures[f"{NAME}-table"] = _table(judged)
        return figures


def _reliability(name: str, judged: Sequence[Judged]) -> Figure:
    """Share that came true against stated probability, before and after temperature scaling."""
    series: Series = {"as given": {}, "calibrated": {}, "ideal": {0.0: [0.0], 1.0: [1.0]}}
    for one in judged:
        for which, found in (("as given", one.before), ("calibrated", one.after)):
            bins = len(found.counts)
            for place, (observed, count) in enumerate(zip(found.observed, found.counts, strict=True)):
                middle = round((place + 0.5) / bins, 4)
                series["ideal"][middle] = [middle]
                if count:
                    series[which].setdefault(middle, []).append(float(observed))
    figure = curve(
        NAME, f"Stated and observed, {name}", "stated probability", "share that came true", series,
        note="Test patients; the temperature is from validation patients.",
    )  # fmt: skip
    return {**figure, "algorithm": name}


def _coverage(judged: dict[str, list[Judged]]) -> Figure:
    """Coverage of each test patient, from the worst to the best."""
    series: Series = {}
    for name, found in judged.items():
        each = np.concatenate([one.coverage for one in found])
        series[name] = {share: [float(np.quantile(each, share))] for share in SHARES}
    level = max(one.calibration.on_average.level for found in judged.values() for one in found)
    series["promised on average"] = {share: [level] for share in SHARES}
    return curve(
        NAME, "How many of a patient’s prediction sets hold the truth", "share of test patients, worst first",
        "coverage within the patient", series,
        note="The promise is for the average over new patients: the mean of a line is to reach it, not every point.",
    )  # fmt: skip


def _table(judged: dict[str, list[Judged]]) -> Figure:
    rows = [[name, *(mean_and_sd(column)[0] for column in zip(*map(_cells, found), strict=True))]
            for name, found in judged.items()]  # fmt: skip
    note = (
        "Means over splits; within a patient, the mean over patients. Promises hold for new patients of the same "
        "population, but for the epoch having been chosen on the patients they come from."
    )
    data = {"columns": list(COLUMNS), "rows": rows}
    return {"kind": "table", "experiment": NAME, "title": "Promised and kept", "data": data, "note": note}


def _cells(one: Judged) -> tuple[float, ...]:
    rules = one.calibration
    return (
        one.before.error, one.after.error, *one.brier, float(one.patient_error.mean()),
        float(one.patient_brier.mean()), rules.on_average.level, float(one.coverage.mean()), one.worst_class,
        float(one.size.mean()),
        rules.for_most.share, one.enough, float(one.most_size.mean()), rules.false_alarms, float(one.unlike.mean()),
    )  # fmt: skip
