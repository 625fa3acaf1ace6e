"""How sure a result is: bootstrap intervals over patients, the worst patients, and paired tests over seeds.

The bootstrap resamples patients, never samples: samples of one patient are not independent. Two models are compared in
two ways: on the same resampled patients (:func:`patient_difference`), and by tests over seeds that share their splits
(:func:`compare_paired`), corrected for several comparisons (:func:`holm`). See ``docs/statistics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from manydg.errors import DataError
from manydg.evaluation.metrics import PatientMetrics, Predictions, divide
from manydg.files import Json

FloatArray = npt.NDArray[np.float64]
MIN_PATIENTS = 3
JACKKNIFE_GROUPS = 200
ALPHA = 0.05
_EXACT_PAIRS = 14
"""Signed ranks are enumerated up to this many pairs (16,384 sign patterns)."""


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


def site_weights(sites: npt.NDArray[Any], resamples: int, seed: int) -> npt.NDArray[np.int64]:
    """How often each patient is drawn where sites are drawn first and then patients within them.

    A site of ``n`` patients that is drawn ``c`` times gives ``c * n`` draws of its patients.

    - ``sites`` ``(patients,)``: The site of each patient.
    - returns ``(resamples, patients)``
    """
    rng = np.random.default_rng(seed)
    names, codes = np.unique(sites, return_inverse=True)
    drawn = rng.multinomial(len(names), np.full(len(names), 1.0 / len(names)), size=resamples)
    weights = np.zeros((resamples, len(sites)), np.int64)
    for site in range(len(names)):
        members = np.flatnonzero(codes == site)
        weights[:, members] = rng.multinomial(drawn[:, site] * len(members), np.full(len(members), 1 / len(members)))
    return weights


class PatientResampling:
    """One set of bootstrap draws of the patients, shared by all runs, so that runs are compared draw by draw.

    Test patients of different seeds may be the same people: a person has one weight in all runs.

    - ``names``: All patients, sorted and distinct.
    - ``sites``: The site of each patient: then sites are drawn first, and patients within them (:func:`site_weights`),
      so that intervals are for patients of new sites.

    Notes
    -----
    ``weights`` has a first row of ones (the estimate), then ``resamples`` rows of bootstrap counts, then rows that
    leave patients (or sites) out for the jackknife: one each, or one of 200 groups where there are more.
    """

    def __init__(
        self, names: npt.NDArray[Any], *, resamples: int = 1000, seed: int = 0, sites: npt.NDArray[Any] | None = None
    ) -> None:
        patients = len(names)
        if patients < 1 or resamples < 1:
            raise DataError(f"a bootstrap needs patients and resamples; got {patients} and {resamples}")
        self.names, self.resamples, self.unit = names, resamples, "patient" if sites is None else "site"
        units = np.arange(patients) if sites is None else np.unique(sites, return_inverse=True)[1]
        self.units, self._unit_of = int(units.max()) + 1, units
        jackknife = np.ones((min(self.units, JACKKNIFE_GROUPS), patients), np.int64)
        order = np.random.default_rng(seed).permutation(self.units)
        jackknife[order[units] % len(jackknife), np.arange(patients)] = 0
        ones = np.ones((1, patients), np.int64)
        draws = patient_weights(patients, resamples, seed) if sites is None else site_weights(sites, resamples, seed)
        self.weights = np.concatenate([ones, draws, jackknife])

    @staticmethod
    def of(names: npt.NDArray[Any], site_of: Mapping[str, Json] | None, *, resamples: int = 1000) -> PatientResampling:
        """Draws of some patients, and of their sites first where the site of each is known.

        - ``names``: In any order, each once or more often.
        - ``site_of``: Name of a patient to the patient's site.
        """
        people, known = np.unique(names), site_of or {}
        everywhere = all(str(name) in known for name in people)
        sites = np.array([str(known[str(name)]) for name in people]) if everywhere else None
        return PatientResampling(people, resamples=resamples, sites=sites)

    @property
    def drawn(self) -> str:
        """What intervals are over, in words."""
        return "sites, then patients" if self.unit == "site" else "patients"

    def units_of(self, names: npt.NDArray[Any]) -> int:
        """How many patients, or sites of them, these are."""
        return len(np.unique(self._unit_of[np.searchsorted(self.names, names)]))

    def evaluate(self, run: Predictions) -> dict[str, FloatArray]:
        """Each metric of a run under every row of ``weights``; undefined where the run has no sample."""
        if not len(run.truth):
            return {name: np.full(len(self.weights), math.nan) for name in run.target.metrics}
        return PatientMetrics(run).weighted(self.weights[:, np.searchsorted(self.names, run.names)])

    def interval(self, values: FloatArray, units: int | None = None) -> Interval:
        """BCa interval from one statistic's value under every row of ``weights``.

        - ``units``: How many of the patients (sites) the statistic is of; all of them by default.
        """
        estimate, number = float(values[0]), self.units if units is None else units
        if number < MIN_PATIENTS:
            note = f"no interval: {number} {self.unit}{'s' if number > 1 else ''}"
            return Interval(estimate, math.nan, math.nan, note=note)
        return bca_interval(values[1 : 1 + self.resamples], estimate, values[1 + self.resamples :])


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
    # Other patients with the same sum may differ from the estimate in the last bits: they equal it.
    alike = 1e-12 * max(1.0, abs(estimate))
    below = (np.mean(values < estimate - alike) + np.mean(values <= estimate + alike)) / 2
    if not 0 < below < 1 or len(jackknife) < MIN_PATIENTS:
        return Interval(estimate, plain.low, plain.high, level, "percentile interval: the bias cannot be estimated")
    bias = scipy.special.ndtri(below)
    spread = jackknife.mean() - jackknife
    # Values that differ in the last bit alone have no skewness to speak of.
    varies = np.abs(spread).max() > alike
    acceleration = float((spread**3).sum() / (6 * (spread**2).sum() ** 1.5)) if varies else 0.0
    tail = scipy.special.ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    shifted = scipy.special.ndtr(bias + (bias + tail) / (1 - acceleration * (bias + tail)))
    low, high = np.quantile(values, shifted)
    return Interval(estimate, float(low), float(high), level)


def patient_intervals(
    runs: Sequence[Predictions],
    *,
    resamples: int = 1000,
    site_of: Mapping[str, Json] | None = None,
) -> dict[str, Interval]:
    """Interval of each metric's mean over runs (seeds), resampling the people of all the runs' test sets together.

    - ``site_of``: The site of each patient: then sites are drawn first.
    """
    plan = PatientResampling.of(_people(runs), site_of, resamples=resamples)
    means = mean_over_runs([plan.evaluate(run) for run in runs])
    return {name: plan.interval(values) for name, values in means.items()}


def patient_difference(
    runs: Sequence[Predictions],
    others: Sequence[Predictions],
    *,
    resamples: int = 1000,
) -> dict[str, Interval]:
    """Interval of the mean difference of two models' metrics, run by run and both on the same resampled patients."""
    plan = PatientResampling(_people([*runs, *others]), resamples=resamples)
    ours, theirs = ([plan.evaluate(run) for run in each] for each in (runs, others))
    return {name: plan.interval(values) for name, values in mean_difference(ours, theirs).items()}


def mean_over_runs(runs: Sequence[Mapping[str, FloatArray]]) -> dict[str, FloatArray]:
    """Mean of each metric over several runs' values ``(resamples,)``; runs without a value are left out."""
    return {name: _mean_of_known(np.stack([values[name] for values in runs])) for name in runs[0]}


def mean_difference(
    runs: Sequence[Mapping[str, FloatArray]], others: Sequence[Mapping[str, FloatArray]]
) -> dict[str, FloatArray]:
    """Mean over runs of each metric's difference from another model's run, ``(resamples,)``.

    A run in which either has no value is left out of the draw: two means over different runs are not paired.
    """
    pairs = list(zip(runs, others, strict=True))
    return mean_over_runs([{name: one[name] - other[name] for name in one} for one, other in pairs])


def _mean_of_known(values: FloatArray) -> FloatArray:
    known = ~np.isnan(values)
    return divide(np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0))


def _people(runs: Sequence[Predictions]) -> npt.NDArray[Any]:
    return np.unique(np.concatenate([run.names for run in runs]))


def shared_patient_values(
    models: Mapping[str, Mapping[int, Mapping[str, Mapping[str, float | None]]]], metric: str
) -> dict[str, dict[str, float]]:
    """Each patient's metric under several models, on the same patients and runs for all of them.

    Whether a metric exists for a patient may depend on what a model predicts, and a model may lack seeds; what does not
    exist for every model is left out for all.

    - ``models``: Model to seed to ``per_patient`` of the run's record (patient to metrics).
    - returns: Model to patient to the mean over the runs that tested the patient. Every model has the same patients,
      except one for which the metric exists nowhere, which has none and does not count.

    Examples
    --------
    >>> ours = {0: {"P-1": {"kappa": 0.2}, "P-2": {"kappa": 0.8}}}
    >>> theirs = {0: {"P-1": {"kappa": None}, "P-2": {"kappa": 0.6}}}
    >>> shared_patient_values({"ours": ours, "theirs": theirs}, "kappa")
    {'ours': {'P-2': 0.8}, 'theirs': {'P-2': 0.6}}
    """
    known = {
        model: {
            (patient, seed): float(value)
            for seed, patients in runs.items()
            for patient, metrics in patients.items()
            if (value := metrics.get(metric)) is not None and math.isfinite(value)
        }
        for model, runs in models.items()
    }
    defined = [values.keys() for values in known.values() if values]
    shared = sorted(set.intersection(*map(set, defined))) if defined else []
    return {model: _patient_means(values, shared) for model, values in known.items()}


def _patient_means(values: Mapping[tuple[str, int], float], shared: Sequence[tuple[str, int]]) -> dict[str, float]:
    by_patient: dict[str, list[float]] = {}
    for key in shared if values else ():
        by_patient.setdefault(key[0], []).append(values[key])
    return {patient: float(np.mean(each)) for patient, each in by_patient.items()}


@dataclass(frozen=True)
class PairedComparison:
    """Two models over the same seeds; every p-value is two-sided and NaN where the test cannot be made.

    - ``pairs``: Seeds at which both have a value.
    - ``difference``: Mean of first minus second.
    - ``t_p``, ``wilcoxon_p``: Paired t-test; Wilcoxon signed-rank test (exact for few pairs, ties by mid-ranks, zeros
      left out).
    - ``corrected_p``: Corrected resampled t-test of Nadeau and Bengio: seeds share training patients, so that the plain
      t-test underestimates the variance. NaN when the share of test patients was not given.
    - ``cohens_d``, ``hedges_g``: Mean difference over the standard deviation of the differences; g corrects the
      small-sample bias.
    - ``note``: Why something is missing.
    """

    pairs: int
    difference: float
    t_p: float
    wilcoxon_p: float
    corrected_p: float
    cohens_d: float
    hedges_g: float
    note: str = ""


def compare_paired(
    first: npt.ArrayLike, second: npt.ArrayLike, test_train_ratio: float | None = None
) -> PairedComparison:
    """Test the difference of two models' metric over seeds that share their splits.

    - ``first``, ``second`` (seeds,): Values at the same seeds; a pair with a NaN is left out.
    - ``test_train_ratio``: Test patients over training patients, for the corrected resampled t-test.

    Examples
    --------
    >>> round(compare_paired([0.71, 0.74, 0.73], [0.70, 0.71, 0.71]).t_p, 4)
    0.0742
    """
    gaps = np.asarray(first, float) - np.asarray(second, float)
    missing = int(np.isnan(gaps).sum())
    gaps = gaps[~np.isnan(gaps)]
    notes = [f"{missing} seed{'s' if missing > 1 else ''} without a value left out"] if missing else []
    nan, n = math.nan, len(gaps)
    mean = float(gaps.mean()) if n else nan
    if n < 2:
        return PairedComparison(n, mean, nan, nan, nan, nan, nan, "; ".join([*notes, "no test: fewer than two seeds"]))
    # Differences of equal numbers may differ in the last bit: call that no spread at all.
    spread = float(gaps.std(ddof=1))
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return _without_spread(n, mean, gaps, notes)
    d = mean / spread
    t = d * math.sqrt(n)
    corrected = nan if test_train_ratio is None else mean / (spread * math.sqrt(1 / n + test_train_ratio))
    return PairedComparison(
        pairs=n,
        difference=mean,
        t_p=_two_sided(t, n - 1),
        wilcoxon_p=wilcoxon_p(gaps),
        corrected_p=nan if math.isnan(corrected) else _two_sided(corrected, n - 1),
        cohens_d=d,
        hedges_g=d * _hedges_correction(n - 1),
        note="; ".join(notes),
    )


def _without_spread(n: int, mean: float, gaps: npt.NDArray[np.float64], notes: list[str]) -> PairedComparison:
    if abs(mean) <= 1e-12:
        return PairedComparison(n, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, "; ".join([*notes, "the same at every seed"]))
    nan, note = math.nan, "no t-test: the same difference at every seed"
    return PairedComparison(n, mean, nan, wilcoxon_p(gaps), nan, nan, nan, "; ".join([*notes, note]))


def _two_sided(t: float, freedom: int) -> float:
    return float(2 * scipy.stats.t.sf(abs(t), freedom))


def _hedges_correction(freedom: int) -> float:
    """The exact factor J by which Cohen's d overestimates; undefined for one degree of freedom."""
    if freedom < 2:
        return math.nan
    return float(
        np.exp(scipy.special.gammaln(freedom / 2) - scipy.special.gammaln((freedom - 1) / 2)) / math.sqrt(freedom / 2)
    )


def wilcoxon_p(gaps: npt.ArrayLike) -> float:
    """Two-sided Wilcoxon signed-rank p of paired differences; zeros are left out, tied sizes share their mean rank.

    With five differences of one sign it is 0.0625: five seeds can never reach 0.05.

    Examples
    --------
    >>> wilcoxon_p([1, 2, 3, 4, 5])
    0.0625
    """
    # Sizes that are equal may differ in their last bits.
    values = np.round(np.asarray(gaps, float), 12)
    values = values[values != 0]
    n = len(values)
    if n == 0:
        return 1.0
    if n > _EXACT_PAIRS:
        return float(scipy.stats.wilcoxon(values, method="approx").pvalue)
    ranks = scipy.stats.rankdata(np.abs(values))
    signs = np.array(list(product((0, 1), repeat=n)))
    centre = ranks.sum() / 2
    extreme = np.abs(signs @ ranks - centre) >= abs(ranks[values > 0].sum() - centre) - 1e-9
    return float(extreme.mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction; a NaN (no test was made) stays NaN and does not count.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [math.nan] * len(p_values)
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    highest = 0.0
    for rank, (p, i) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - rank)))
        adjusted[i] = highest
    return adjusted


@dataclass(frozen=True)
class RankComparison:
    """Several models ranked within each block, a patient or a split, and which of them differ.

    - ``names``: Best mean rank first.
    - ``ranks``: Mean rank of each, 1 being best.
    - ``friedman_p``: That all models are alike, 1 where they are so in every block; NaN for two models, which the one
      pair tests.
    - ``adjusted``: Wilcoxon signed-rank p of each pair of names over the blocks, Holm-corrected over all pairs.
    - ``groups``: Largest runs of neighbours in rank of which no pair differs.
    """

    names: tuple[str, ...]
    ranks: tuple[float, ...]
    blocks: int
    friedman_p: float
    adjusted: Mapping[tuple[str, str], float]
    groups: tuple[tuple[str, ...], ...]


def compare_ranks(values: Mapping[str, npt.ArrayLike]) -> RankComparison | None:
    """Rank models by a metric, higher being better, within blocks that they share; None for fewer than two of either.

    Pairs are tested by Wilcoxon's test and not by the distance of mean ranks (Nemenyi), which depends on the other
    models in the comparison (Benavoli, Corani and Mangili 2016).

    - ``values``: mapping of str to array ``(blocks,)``

    Examples
    --------
    >>> compare_ranks({"a": [3, 3, 4], "b": [1, 2, 2]}).ranks
    (1.0, 2.0)
    """
    table = np.round([np.asarray(each, float) for each in values.values()], 12)
    if len(table) < 2 or table.shape[1] < 2:
        return None
    means = scipy.stats.rankdata(-table, axis=0).mean(axis=1)
    order = [int(i) for i in np.argsort(means, kind="stable")]
    names = tuple(list(values)[i] for i in order)
    pairs = [(i, j) for i in range(len(order)) for j in range(i + 1, len(order))]
    p = holm([wilcoxon_p(table[order[i]] - table[order[j]]) for i, j in pairs])
    adjusted = {(names[i], names[j]): value for (i, j), value in zip(pairs, p, strict=True)}
    friedman = math.nan
    if len(table) > 2:
        friedman = 1.0 if (table == table[0]).all() else float(scipy.stats.friedmanchisquare(*table).pvalue)
    return RankComparison(
        names, tuple(float(means[i]) for i in order), table.shape[1], friedman, adjusted, _alike(names, adjusted)
    )


def _alike(names: Sequence[str], adjusted: Mapping[tuple[str, str], float]) -> tuple[tuple[str, ...], ...]:
    """Largest runs of names of which no pair differs significantly."""
    runs: list[tuple[int, int]] = []
    for start in range(len(names)):
        end = start
        while end + 1 < len(names) and all(adjusted[names[i], names[end + 1]] >= ALPHA for i in range(start, end + 1)):
            end += 1
        if end > start and (not runs or end > runs[-1][1]):
            runs.append((start, end))
    return tuple(tuple(names[start : end + 1]) for start, end in runs)
