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
from manydg.evaluation._weighted import Predictions, WeightedMetrics, mean_over_runs

__all__ = [
    "Interval",
    "PatientResampling",
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
JACKKNIFE_GROUPS = 200


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


class PatientResampling:
    """One set of resampled patients, used for every run, so that runs can be averaged and compared draw by draw.

    Test patients of different seeds may be the same people: a person has one weight in all runs.

    Parameters
    ----------
    names : array
        All patients, sorted and distinct.
    resamples : int
    seed : int

    Notes
    -----
    ``weights`` has a first row of ones (the estimate), then ``resamples`` rows of bootstrap counts, then rows that
    leave patients out for the jackknife: one patient each, or one of 200 groups where there are more patients.
    """

    def __init__(self, names: npt.NDArray[Any], *, resamples: int = 1000, seed: int = 0) -> None:
        patients = len(names)
        if patients < 1 or resamples < 1:
            raise DataError(f"a bootstrap needs patients and resamples; got {patients} and {resamples}")
        self.names, self.resamples = names, resamples
        left_out = np.ones((min(patients, JACKKNIFE_GROUPS), patients), np.int64)
        order = np.random.default_rng(seed).permutation(patients)
        left_out[order % len(left_out), np.arange(patients)] = 0
        ones = np.ones((1, patients), np.int64)
        self.weights = np.concatenate([ones, patient_weights(patients, resamples, seed), left_out])

    def evaluate(self, run: Predictions) -> dict[str, FloatArray]:
        """Each metric of a run under every row of ``weights``."""
        return WeightedMetrics(run)(self.weights[:, np.searchsorted(self.names, run.names)])

    def interval(self, values: FloatArray, level: float = 0.95) -> Interval:
        """BCa interval from one statistic's value under every row of ``weights``."""
        estimate, patients = float(values[0]), len(self.names)
        if patients < MIN_PATIENTS:
            note = f"no interval: {patients} patient{'s' if patients > 1 else ''}"
            return Interval(estimate, math.nan, math.nan, level, note)
        return bca_interval(values[1 : 1 + self.resamples], estimate, values[1 + self.resamples :], level)


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
    plan = PatientResampling(np.arange(patients), resamples=resamples, seed=seed)
    return {name: plan.interval(values, level) for name, values in statistic(plan.weights).items()}


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
    # Values that differ in the last bit alone have no skewness to speak of.
    varies = np.abs(spread).max() > 1e-12 * max(1.0, abs(estimate))
    acceleration = float((spread**3).sum() / (6 * (spread**2).sum() ** 1.5)) if varies else 0.0
    tail = special.ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    shifted = special.ndtr(bias + (bias + tail) / (1 - acceleration * (bias + tail)))
    low, high = np.quantile(values, shifted)
    return Interval(estimate, float(low), float(high), level)


def patient_intervals(
    runs: Sequence[Predictions], *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """Interval of each metric's mean over runs (seeds), resampling the people of all the runs' test sets together."""
    plan = PatientResampling(_people(runs), resamples=resamples, seed=seed)
    means = mean_over_runs([plan.evaluate(run) for run in runs])
    return {name: plan.interval(values, level) for name, values in means.items()}


def patient_difference(
    runs: Sequence[Predictions],
    others: Sequence[Predictions],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Interval]:
    """Interval of the mean difference of two models' metrics, both on the same resampled patients (paired)."""
    plan = PatientResampling(_people([*runs, *others]), resamples=resamples, seed=seed)
    ours, theirs = (mean_over_runs([plan.evaluate(run) for run in each]) for each in (runs, others))
    return {name: plan.interval(ours[name] - theirs[name], level) for name in ours}


def _people(runs: Sequence[Predictions]) -> npt.NDArray[Any]:
    return np.unique(np.concatenate([run.names for run in runs]))


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
