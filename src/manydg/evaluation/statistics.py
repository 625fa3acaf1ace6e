"""What can be said beyond a mean: intervals over patients, paired tests over seeds, effect sizes, the worst patients.

The bootstrap resamples patients, never samples: samples of one patient are not independent. See ``docs/statistics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from manydg.errors import DataError
from manydg.evaluation._weighted import MeanOverRuns, Predictions, WeightedMetrics

__all__ = [
    "Interval",
    "Predictions",
    "WeightedMetrics",
    "bca_interval",
    "bootstrap",
    "patient_difference",
    "patient_intervals",
    "patient_percentile",
    "patient_weights",
    "percentile_interval",
]

FloatArray = npt.NDArray[np.float64]
Statistic = Callable[[npt.NDArray[Any]], dict[str, FloatArray]]
MIN_PATIENTS = 3


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; the bounds are NaN where none can be given, and ``note`` says why."""

    estimate: float
    low: float
    high: float
    level: float = 0.95
    note: str = ""


def patient_weights(patients: int, resamples: int, seed: int) -> npt.NDArray[np.int64]:
    """How often each patient is drawn in each resample ``(resamples, patients)``; every row sums to ``patients``."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(patients, np.full(patients, 1.0 / patients), size=resamples)


def bootstrap(
    statistic: Statistic, patients: int, *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """Bias-corrected and accelerated (BCa) intervals of statistics, resampling patients.

    Parameters
    ----------
    statistic : callable
        From patient weights ``(rows, patients)`` to named values ``(rows,)``.
    patients : int
    resamples : int
    seed : int
    level : float

    Returns
    -------
    dict of str to Interval
    """
    if patients < 1 or resamples < 1:
        raise DataError(f"a bootstrap needs patients and resamples; got {patients} and {resamples}")
    estimate = statistic(np.ones((1, patients)))
    if patients < MIN_PATIENTS:
        note = f"no interval: {patients} patient{'s' if patients > 1 else ''}"
        return {name: Interval(float(value[0]), math.nan, math.nan, level, note) for name, value in estimate.items()}
    draws = statistic(patient_weights(patients, resamples, seed))
    left_out = statistic(1.0 - np.eye(patients))
    return {name: bca_interval(draws[name], float(estimate[name][0]), left_out[name], level) for name in estimate}


def percentile_interval(draws: npt.ArrayLike, estimate: float, level: float = 0.95) -> Interval:
    """The middle ``level`` of the bootstrap draws; undefined draws are left out."""
    values = np.asarray(draws, float)
    values = values[~np.isnan(values)]
    if math.isnan(estimate) or len(values) == 0:
        return Interval(estimate, math.nan, math.nan, level, "no interval: the metric is undefined")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high), level)


def bca_interval(draws: npt.ArrayLike, estimate: float, left_out: npt.ArrayLike, level: float = 0.95) -> Interval:
    """BCa interval from bootstrap draws, the estimate and its leave-one-patient-out values.

    Falls back to the percentile interval, and says so, where bias or acceleration cannot be estimated.
    """
    values, jackknife = np.asarray(draws, float), np.asarray(left_out, float)
    values, jackknife = values[~np.isnan(values)], jackknife[~np.isnan(jackknife)]
    plain = percentile_interval(values, estimate, level)
    if plain.note or values.min() == values.max():
        return plain
    below = (np.mean(values < estimate) + np.mean(values <= estimate)) / 2
    if not 0 < below < 1 or len(jackknife) < MIN_PATIENTS:
        return Interval(estimate, plain.low, plain.high, level, "percentile interval: the bias cannot be estimated")
    bias = special.ndtri(below)
    spread = jackknife.mean() - jackknife
    scale = float((spread**2).sum()) ** 1.5
    acceleration = float((spread**3).sum()) / (6 * scale) if scale > 0 else 0.0
    tail = special.ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    shifted = special.ndtr(bias + (bias + tail) / (1 - acceleration * (bias + tail)))
    low, high = np.quantile(values, shifted)
    return Interval(estimate, float(low), float(high), level)


def patient_intervals(
    runs: Sequence[Predictions], *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """Interval of each metric's mean over runs (seeds), resampling the people of all the runs' test sets together."""
    mean = MeanOverRuns(runs)
    return bootstrap(mean, len(mean.names), resamples=resamples, seed=seed, level=level)


def patient_difference(
    runs: Sequence[Predictions],
    others: Sequence[Predictions],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Interval]:
    """Interval of the mean difference of two models' metrics, both on the same resampled patients (paired)."""
    names = np.unique(np.concatenate([run.names for run in (*runs, *others)]))
    ours, theirs = MeanOverRuns(runs, names), MeanOverRuns(others, names)

    def difference(weights: npt.NDArray[Any]) -> dict[str, FloatArray]:
        first, second = ours(weights), theirs(weights)
        return {name: first[name] - second[name] for name in first}

    return bootstrap(difference, len(names), resamples=resamples, seed=seed, level=level)


def patient_percentile(
    runs: Sequence[Mapping[str, Mapping[str, float | None]]], metric: str, percent: float = 10.0
) -> tuple[float, int]:
    """A low percentile of a metric over patients, each counted once by the mean of the runs that tested them.

    Parameters
    ----------
    runs : sequence of mappings
        Patient to metrics, one mapping per run (``per_patient`` of a record).
    metric : str
    percent : float

    Returns
    -------
    value : float
        NaN if the metric is defined for no patient.
    patients : int
        How many patients it rests on; those for whom the metric is undefined are left out.
    """
    values: dict[str, list[float]] = {}
    for run in runs:
        for patient, metrics in run.items():
            value = metrics.get(metric)
            if value is not None and not math.isnan(value):
                values.setdefault(patient, []).append(value)
    if not values:
        return math.nan, 0
    means = [float(np.mean(each)) for each in values.values()]
    return float(np.percentile(means, percent)), len(means)
