"""Do stated probabilities, prediction sets and the sign of strange patients hold on unseen patients?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset
from manydg.data.info import CLASSES
from manydg.data.splits import load_split
from manydg.errors import StorageError
from manydg.evaluation.metrics import Predictions, read_predictions
from manydg.evaluation.trust import (
    Reliability,
    SetRule,
    brier_score,
    class_coverage,
    patient_calibration,
    patient_coverage,
    reliability,
    scale_temperature,
)
from manydg.studies.figure_data import CellTable, FigureData
from manydg.studies.study import Experiment, Record, Request, Series, curve, mean_and_sd
from manydg.training.inference import CALIBRATION, Calibration, patient_embeddings, read_calibration
from manydg.training.record import RunRecord
from manydg.training.run import Run, open_run

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KeptPromises:
    """A run's calibration, and what became of it on test patients.

    - ``before``, ``after``: Of the probabilities as they are, and after temperature scaling.
    - ``brier``: Brier score before and after.
    - ``patient_error``, ``patient_brier`` ``(patients,)``: Calibration error and Brier score within each patient,
      after.
    - ``coverage``, ``size`` ``(patients,)``: Share of each patient's samples whose set holds the truth, and mean size
      of the sets; the rule on average.
    - ``most_coverage``, ``most_size`` ``(patients,)``: The same for the rule that is to hold for most patients.
    - ``worst_class``: The same rule on average: lowest mean coverage of a class, over the patients who have it; for
      multi-label, of the label with the lowest mean coverage over patients.
    - ``unlike`` ``(patients,)``: Which are called unlike the training patients.
    """

    calibration: Calibration
    before: Reliability
    after: Reliability
    brier: tuple[float, float]
    patient_error: FloatArray
    patient_brier: FloatArray
    coverage: FloatArray
    size: FloatArray
    most_coverage: FloatArray
    most_size: FloatArray
    worst_class: float
    unlike: npt.NDArray[np.bool_]

    @property
    def enough(self) -> float:
        """Share of the test patients of whom the promised share of samples is covered, by the rule for most."""
        return float((self.most_coverage >= self.calibration.for_most.level - 1e-9).mean())


def check_promises(dataset: DomainDataset, record: RunRecord, folder: Path) -> KeptPromises:
    """Hold the calibration of a finished run against its test patients."""
    run_folder = folder / record.folder
    run, calibration = open_run(run_folder), read_calibration(run_folder)
    if calibration is None:
        raise StorageError(f"{run_folder} has no {CALIBRATION}: delete the folder and run the same command again")
    target = run.algorithm.target
    test = read_predictions(run_folder / "predictions.npz", "test", target).scored()
    part = dataset.select(load_split(run_folder / "split.json", dataset).test)
    truth, given, patients = test.truth, test.probabilities, _codes(test, part)
    mended = scale_temperature(target, given, calibration.temperature)
    within = patient_calibration(target, truth, mended, patients)

    def sets(rule: SetRule) -> tuple[FloatArray, FloatArray]:
        entries = patient_coverage(target, truth, given, patients, rule).values()
        return np.array([one["coverage"] for one in entries]), np.array([one["size"] for one in entries])

    return KeptPromises(
        calibration,
        reliability(target, truth, given),
        reliability(target, truth, mended),
        (brier_score(target, truth, given), brier_score(target, truth, mended)),
        np.array([one["ece"] for one in within.values()]),
        np.array([one["brier"] for one in within.values()]),
        *sets(calibration.on_average),
        *sets(calibration.for_most),
        min(class_coverage(target, truth, given, patients, calibration.on_average)),
        _unlike(run, part, calibration),
    )


def _codes(test: Predictions, part: DomainDataset) -> npt.NDArray[np.int64]:
    """The patient of each row, by the code it has in the dataset."""
    code_of = {name: code for code, name in enumerate(part.pseudonyms())}
    return np.array([code_of[str(name)] for name in test.names], np.int64)[test.groups]


def _unlike(run: Run, part: DomainDataset, calibration: Calibration) -> npt.NDArray[np.bool_]:
    if calibration.reference is None:
        return np.zeros(part.n_patients, bool)
    _, distances = calibration.reference.distances(*patient_embeddings(run.algorithm, run.prepare(part).scored()))
    return np.asarray(distances > calibration.limit, bool)


NAME = "calibration"
SHARES = tuple(round(0.05 * step, 2) for step in range(21))
COLUMNS = (
    "model", "ECE as given", "ECE calibrated", "Brier as given", "Brier calibrated", "ECE within a patient",
    "Brier within a patient", "promised coverage", "coverage", "coverage of the worst class", "size of sets",
    "promised share of patients", "share of patients covered", "size of their sets", "promised false alarms",
    "called unlike",
)  # fmt: skip


class CalibrationOfUnseen(Experiment):
    """Temperature, prediction sets and novelty limits from validation patients, checked on test patients."""

    name = "calibration"
    title = "Knowing when not to know"
    kinds = CLASSES

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        by_model: dict[str, list[KeptPromises]] = {}
        for record in records:
            by_model.setdefault(record.algorithm, []).append(check_promises(request.dataset, record, folder))
        figures = {f"{NAME}-{name}": _reliability(name, results) for name, results in by_model.items()}
        figures[f"{NAME}-coverage"] = _coverage(by_model)
        figures[f"{NAME}-table"] = _table(by_model)
        return figures


def _reliability(name: str, results: Sequence[KeptPromises]) -> FigureData:
    """Share that came true against stated probability, before and after temperature scaling."""
    series: Series = {"as given": {}, "calibrated": {}, "ideal": {0.0: [0.0], 1.0: [1.0]}}
    diagrams = [pair for one in results for pair in (("as given", one.before), ("calibrated", one.after))]
    for which, diagram in diagrams:
        for index, (observed, count) in enumerate(zip(diagram.observed, diagram.counts, strict=True)):
            middle = round((index + 0.5) / len(diagram.counts), 4)
            series["ideal"][middle] = [middle]
            if count:
                series[which].setdefault(middle, []).append(float(observed))
    figure = curve(
        NAME, f"Stated and observed, {name}", "stated probability", "share that came true", series,
        note="Test patients; the temperature is from validation patients.",
    )  # fmt: skip
    return replace(figure, algorithm=name)


def _coverage(by_model: dict[str, list[KeptPromises]]) -> FigureData:
    """Coverage of each test patient, from the worst to the best."""
    series: Series = {}
    for name, results in by_model.items():
        each = np.concatenate([one.coverage for one in results])
        series[name] = {share: [float(np.quantile(each, share))] for share in SHARES}
    level = max(one.calibration.on_average.level for results in by_model.values() for one in results)
    series["promised on average"] = {share: [level] for share in SHARES}
    return curve(
        NAME, "How many of a patient’s prediction sets hold the truth", "share of test patients, worst first",
        "coverage within the patient", series,
        note="The promise is for the average over new patients: the mean of a line is to reach it, not every point.",
    )  # fmt: skip


def _table(by_model: dict[str, list[KeptPromises]]) -> FigureData:
    rows = [[name, *(mean_and_sd(column)[0] for column in zip(*map(_cells, results), strict=True))]
            for name, results in by_model.items()]  # fmt: skip
    note = (
        "Means over splits; within a patient, the mean over patients. Promises hold for new patients of the same "
        "population, but for the epoch having been chosen on the patients they come from."
    )
    return FigureData("Promised and kept", CellTable(COLUMNS, rows), NAME, note=note)


def _cells(one: KeptPromises) -> tuple[float, ...]:
    rules = one.calibration
    return (
        one.before.error, one.after.error, *one.brier, float(one.patient_error.mean()),
        float(one.patient_brier.mean()), rules.on_average.level, float(one.coverage.mean()), one.worst_class,
        float(one.size.mean()),
        rules.for_most.share, one.enough, float(one.most_size.mean()), rules.false_alarms, float(one.unlike.mean()),
    )  # fmt: skip
