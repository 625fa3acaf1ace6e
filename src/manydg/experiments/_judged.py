"""How far a finished run's statements about its test patients turned out to be true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.errors import StorageError
from manydg.evaluation.calibration import (
    Reliability,
    brier_score,
    patient_calibration,
    reliability,
    scale_temperature,
)
from manydg.evaluation.conformal import SetRule, class_coverage, patient_coverage
from manydg.training.calibration import CALIBRATION, Calibration, patient_embeddings, read_calibration
from manydg.training.record import TEST, Predictions
from manydg.training.run import Run, open_run

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Judged:
    """A run's calibration, and what became of it on test patients.

    Attributes
    ----------
    before, after : Reliability
        Of the probabilities as they are, and after temperature scaling.
    brier : tuple of float
        Brier score before and after.
    patient_error, patient_brier : array ``(patients,)``
        Calibration error and Brier score within each patient, after.
    coverage, size : array ``(patients,)``
        Share of each patient's samples whose set holds the truth, and mean size of the sets; the rule on average.
    most_coverage, most_size : array ``(patients,)``
        The same for the rule that is to hold for most patients.
    worst_class : float
        The same rule on average: lowest mean coverage of a class, over the patients who have it; for multi-label, of
        the label with the lowest mean coverage over patients.
    unlike : array ``(patients,)`` of bool
        Which are called unlike the training patients.
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


def judge(dataset: DomainDataset, record: Mapping[str, Any], folder: Path) -> Judged:
    """Hold the calibration of a finished run against its test patients."""
    place = folder / record["folder"]
    run, calibration = open_run(place), read_calibration(place)
    if calibration is None:
        raise StorageError(f"{place} has no {CALIBRATION}: delete the folder and run the same command again")
    target = run.algorithm.target
    truth, given, patients = Predictions.read(place / "predictions.npz").side(TEST)
    mended = scale_temperature(target, given, calibration.temperature)
    within = patient_calibration(target, truth, mended, patients)

    def sets(rule: SetRule) -> tuple[FloatArray, FloatArray]:
        found = patient_coverage(target, truth, given, patients, rule).values()
        return np.array([one["coverage"] for one in found]), np.array([one["size"] for one in found])

    return Judged(
        calibration,
        reliability(target, truth, given),
        reliability(target, truth, mended),
        (brier_score(target, truth, given), brier_score(target, truth, mended)),
        np.array([one["ece"] for one in within.values()]),
        np.array([one["brier"] for one in within.values()]),
        *sets(calibration.on_average),
        *sets(calibration.for_most),
        min(class_coverage(target, truth, given, patients, calibration.on_average)),
        _unlike(run, dataset.select(load_split(place / "split.json", dataset).test), calibration),
    )


def _unlike(run: Run, part: DomainDataset, calibration: Calibration) -> npt.NDArray[np.bool_]:
    if calibration.reference is None:
        return np.zeros(part.n_patients, bool)
    _, distances = calibration.reference.distances(*patient_embeddings(run.algorithm, run.prepare(part)))
    return np.asarray(distances > calibration.limit, bool)
