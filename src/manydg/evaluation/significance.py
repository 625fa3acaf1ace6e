"""Two-sided paired tests over seeds, their correction for several rivals, and effect sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy import special, stats

_EXACT_PAIRS = 14
"""Signed ranks are enumerated up to this many pairs (16,384 sign patterns)."""


@dataclass(frozen=True)
class PairedComparison:
    """Two models over the same seeds; every p-value is two-sided and NaN where the test cannot be made.

    Attributes
    ----------
    pairs : int
        Seeds at which both have a value.
    difference : float
        Mean of first minus second.
    t_p, wilcoxon_p : float
        Paired t-test; Wilcoxon signed-rank test (exact for few pairs, ties by mid-ranks, zeros left out).
    corrected_p : float
        Corrected resampled t-test of Nadeau and Bengio: seeds share training patients, so that the plain t-test
        underestimates the variance. NaN when the share of test patients was not given.
    cohens_d, hedges_g : float
        Mean difference over the standard deviation of the differences; g corrects the small-sample bias.
    note : str
        Why something is missing.
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
    """Compare two models' metric over seeds that share their splits.

    Parameters
    ----------
    first, second : (seeds,) array
        Values at the same seeds; a pair with a NaN is left out.
    test_train_ratio : float, optional
        Test patients over training patients, for the corrected resampled t-test.

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
    return float(2 * stats.t.sf(abs(t), freedom))


def _hedges_correction(freedom: int) -> float:
    """The exact factor J by which Cohen's d overestimates; undefined for one degree of freedom."""
    if freedom < 2:
        return math.nan
    return float(np.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(freedom / 2))


def wilcoxon_p(gaps: npt.ArrayLike) -> float:
    """Two-sided Wilcoxon signed-rank p of paired differences; zeros are left out, tied sizes share their mean rank.

    With five differences of one sign it is 0.0625: five seeds can never reach 0.05.

    Examples
    --------
    >>> wilcoxon_p([1, 2, 3, 4, 5])
    0.0625
    """
    values = np.asarray(gaps, float)
    values = values[np.abs(values) > 1e-12]
    n = len(values)
    if n == 0:
        return 1.0
    if n > _EXACT_PAIRS:
        return float(stats.wilcoxon(values, method="approx").pvalue)
    ranks = stats.rankdata(np.round(np.abs(values), 12))
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
