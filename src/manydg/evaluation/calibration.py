"""Calibration of probabilities: reliability curves, calibration error, Brier score, temperature scaling.

A *statement* is one probability that can turn out true. Exclusive classes make one statement a sample (the most
probable class is right), a binary target one (the second class is present), a multi-label target one for each label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from manydg.errors import DataError
from manydg.evaluation.metrics import divide, group_means
from manydg.targets import Target

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
BINS = 15
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability curve: ``(bins,)`` each; NaN where a bin is empty.

    Attributes
    ----------
    stated : mean probability of the statements in each bin
    observed : share of them that came true
    counts : number of statements
    error : expected calibration error (ECE), the mean gap between the two, weighted by the counts; NaN without samples
    """

    stated: FloatArray
    observed: FloatArray
    counts: npt.NDArray[np.int64]
    error: float


def statements(target: Target, truth: Array, probabilities: Array) -> tuple[FloatArray, FloatArray]:
    """Each sample's stated probabilities and whether they came true, both ``(rows, statements)``."""
    stated = np.asarray(probabilities, float)
    if target.kind == "multilabel":
        return stated, np.asarray(truth, float)
    if target.kind == "binary":
        return stated[:, 1:2], np.asarray(truth, float)[:, None]
    right = np.asarray(stated.argmax(axis=1) == np.asarray(truth), float)
    return stated.max(axis=1, keepdims=True), right[:, None]


def reliability(target: Target, truth: Array, probabilities: Array, bins: int = BINS) -> Reliability:
    """Reliability curve over ``bins`` bins of equal width from 0 to 1."""
    if bins < 1:
        raise DataError(f"a reliability curve needs at least one bin; got {bins}")
    stated, true = (values.ravel() for values in statements(target, truth, probabilities))
    cell = np.clip((stated * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(cell, minlength=bins).astype(np.int64)
    mean = divide(np.bincount(cell, weights=stated, minlength=bins), counts)
    share = divide(np.bincount(cell, weights=true, minlength=bins), counts)
    gap = np.nan_to_num(np.abs(mean - share))
    error = float((gap * counts).sum() / counts.sum()) if counts.sum() else math.nan
    return Reliability(mean, share, counts, error)


def brier_score(target: Target, truth: Array, probabilities: Array) -> float:
    """Mean squared distance of probabilities and outcome; NaN without samples.

    Binary: of the second class's probability. Exclusive classes: summed over the classes (0 to 2). Multi-label: the
    mean over the labels.
    """
    each = _brier_of_samples(target, truth, probabilities)
    return float(each.mean()) if len(each) else math.nan


def _brier_of_samples(target: Target, truth: Array, probabilities: Array) -> FloatArray:
    values = np.asarray(probabilities, float)
    if target.kind == "multilabel":
        return np.asarray(((values - truth) ** 2).mean(axis=1), float)
    if target.kind == "binary":
        return np.asarray((values[:, 1] - truth) ** 2, float)
    return np.asarray(((values - np.eye(target.size)[np.asarray(truth, np.int64)]) ** 2).sum(axis=1), float)


def patient_calibration(
    target: Target, truth: Array, probabilities: Array, patients: npt.NDArray[np.integer]
) -> dict[int, dict[str, float]]:
    """Within each patient: mean stated probability, share that came true, Brier score, calibration error (``ece``) and
    number of samples.

    The two means of all patients, plotted against one another, are the reliability curve of patients: a model may be
    well calibrated on the whole and too sure of itself for some. A calibration error within few samples is too large
    by chance, so compare it between models and not with zero.
    """
    codes, groups = np.unique(patients, return_inverse=True)
    stated, true = (values.mean(axis=1) for values in statements(target, truth, probabilities))
    brier = _brier_of_samples(target, truth, probabilities)
    columns = {"samples": np.bincount(groups, minlength=len(codes)).astype(float)}
    for name, values in (("stated", stated), ("observed", true), ("brier", brier)):
        columns[name] = group_means(values, groups, len(codes))
    columns["ece"] = _errors_within(*statements(target, truth, probabilities), groups, len(codes))
    return {int(code): {name: float(values[i]) for name, values in columns.items()} for i, code in enumerate(codes)}


def _errors_within(stated: FloatArray, true: FloatArray, groups: Array, count: int) -> FloatArray:
    """Calibration error of each group, ``(groups,)``; statements and outcomes are ``(rows, statements)``."""
    cell = np.clip((stated * BINS).astype(np.int64), 0, BINS - 1) + BINS * np.asarray(groups, np.int64)[:, None]
    # The gap of a bin times its number of statements is the absolute sum of the differences in it.
    sums = np.bincount(cell.ravel(), weights=(stated - true).ravel(), minlength=count * BINS).reshape(count, BINS)
    return divide(np.abs(sums).sum(axis=1), np.bincount(groups, minlength=count) * stated.shape[1])


def log_loss(target: Target, truth: Array, probabilities: Array) -> float:
    """Mean negative log likelihood of the truth; of all labels for multi-label."""
    values = np.clip(np.asarray(probabilities, float), _TINY, 1.0)
    if target.exclusive:
        codes = np.asarray(truth, np.int64)
        return float(-np.log(values[np.arange(len(values)), codes]).mean())
    rest = np.clip(1.0 - np.asarray(probabilities, float), _TINY, 1.0)
    return float(-np.where(np.asarray(truth) != 0, np.log(values), np.log(rest)).mean())


def scale_temperature(target: Target, probabilities: Array, temperature: float) -> FloatArray:
    """Probabilities whose logits are divided by a temperature: above 1 less sure, below 1 surer.

    The order of classes or labels does not change, so neither does any metric of ranking or of the top class.
    """
    if not temperature > 0:
        raise DataError(f"a temperature is above zero; got {temperature}")
    values = np.clip(np.asarray(probabilities, float), _TINY, 1.0)
    if target.exclusive:
        return np.asarray(special.softmax(np.log(values) / temperature, axis=1), float)
    return np.asarray(special.expit(special.logit(np.clip(values, _TINY, 1 - _TINY)) / temperature), float)


def fit_temperature(target: Target, truth: Array, probabilities: Array) -> float:
    """The temperature with the lowest log loss; give it validation patients, and apply it to new ones.

    Returns
    -------
    float
        Between 0.05 and 20; 1.0 (leave as is) without samples.
    """
    if len(np.asarray(truth)) == 0:
        return 1.0

    def loss(log_temperature: float) -> float:
        return log_loss(target, truth, scale_temperature(target, probabilities, math.exp(log_temperature)))

    fitted = optimize.minimize_scalar(loss, bounds=(math.log(0.05), math.log(20.0)), method="bounded")
    return math.exp(float(fitted.x))
