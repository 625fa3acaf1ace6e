"""Paired tests against scipy and hand-worked examples."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from manydg.evaluation.statistics import compare_paired, compare_ranks, holm, wilcoxon_p


def test_the_paired_t_test_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=5), rng.normal(size=5)
    found = compare_paired(first, second)
    assert found.t_p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert found.difference == pytest.approx((first - second).mean())
    assert compare_paired(second, first).t_p == pytest.approx(found.t_p)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique_by=abs).filter(lambda v: 0 not in v))
def test_the_exact_wilcoxon_test_is_that_of_scipy(gaps: list[int]) -> None:
    assert wilcoxon_p(gaps) == pytest.approx(stats.wilcoxon(gaps, method="exact").pvalue)


def test_many_pairs_use_scipys_approximation() -> None:
    gaps = np.random.default_rng(0).normal(0.3, 1, 40)
    assert wilcoxon_p(gaps) == pytest.approx(stats.wilcoxon(gaps, method="approx").pvalue)


def test_tied_ranks_are_enumerated_exactly() -> None:
    """Gaps 1, 1, -1, 2: mid-ranks 2, 2, 2, 4; W+ = 8 of 10. |W - 5| >= 3 in 8 of the 16 sign patterns."""
    assert wilcoxon_p([1.0, 1.0, -1.0, 2.0]) == 0.5
    assert wilcoxon_p([0.0, 1.0, 1.0, -1.0, 2.0]) == 0.5


def test_five_seeds_never_reach_the_five_percent_level_by_signed_ranks() -> None:
    assert compare_paired([1, 2, 3, 4, 5.5], [0, 0, 0, 0, 0]).wilcoxon_p == 0.0625


def test_holm_multiplies_the_smallest_most_and_never_falls() -> None:
    assert holm([0.01, 0.02, 0.03, 0.5]) == pytest.approx([0.04, 0.06, 0.06, 0.5])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_does_not_count_a_test_that_was_not_made() -> None:
    adjusted = holm([0.02, math.nan, 0.03])
    assert adjusted[0] == pytest.approx(0.04)
    assert math.isnan(adjusted[1])
    assert adjusted[2] == pytest.approx(0.04)


def test_effect_sizes_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, sd 1, so d = 2; with 2 degrees of freedom J = gamma(1) / (gamma(1/2) * 1)."""
    found = compare_paired([1, 2, 3], [0, 0, 0])
    assert found.cohens_d == pytest.approx(2.0)
    assert found.hedges_g == pytest.approx(2.0 / math.sqrt(math.pi))


def test_the_corrected_resampled_t_test_by_hand() -> None:
    """Mean 2, variance 1, J = 3, test/train 1/8: t = 2 / sqrt(1/3 + 1/8)."""
    found = compare_paired([1, 2, 3], [0, 0, 0], test_train_ratio=1 / 8)
    t = 2 / math.sqrt(1 / 3 + 1 / 8)
    assert found.corrected_p == pytest.approx(2 * stats.t.sf(t, 2))
    assert found.corrected_p > found.t_p
    # Twice as many test patients for each training patient: less certain.
    assert compare_paired([1, 2, 3], [0, 0, 0], test_train_ratio=1 / 4).corrected_p == pytest.approx(
        2 * stats.t.sf(2 / math.sqrt(1 / 3 + 1 / 4), 2)
    )
    assert math.isnan(compare_paired([1, 2, 3], [0, 0, 0]).corrected_p)


def test_equal_models_are_not_different() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare_paired([0.7, 0.8, 0.9], [0.7, 0.8, 0.9], 0.1)
    assert (found.t_p, found.wilcoxon_p, found.corrected_p, found.cohens_d) == (1.0, 1.0, 1.0, 0.0)
    assert found.note == "the same at every seed"


def test_the_same_difference_at_every_seed_has_no_t_test() -> None:
    found = compare_paired([0.3, 0.4, 0.5], [0.1, 0.2, 0.3])
    assert math.isnan(found.t_p)
    assert found.wilcoxon_p == 0.25
    assert "same difference at every seed" in found.note


def test_one_seed_has_no_test() -> None:
    found = compare_paired([0.7], [0.6], 0.1)
    assert found.difference == pytest.approx(0.1)
    assert math.isnan(found.t_p)
    assert "fewer than two seeds" in found.note


def test_a_seed_without_a_value_is_left_out_and_counted() -> None:
    found = compare_paired([0.7, math.nan, 0.8, 0.9], [0.6, 0.5, 0.75, 0.7])
    assert found.pairs == 3
    assert found.note == "1 seed without a value left out"


def _equal_models(rng: np.random.Generator, splits: int) -> list[float]:
    """Differences in error of two equally good linear models over random 48/12 splits of one pool of 60 patients."""
    inputs = rng.normal(size=(60, 2, 3))
    wanted = inputs.sum(axis=(1, 2)) + rng.normal(size=60)
    gaps = []
    for _ in range(splits):
        order = rng.permutation(60)
        train, test = order[:48], order[48:]
        weights = [np.linalg.lstsq(inputs[train, k], wanted[train], rcond=None)[0] for k in (0, 1)]
        errors = [np.square(inputs[test, k] @ weights[k] - wanted[test]).mean() for k in (0, 1)]
        gaps.append(float(errors[0] - errors[1]))
    return gaps


def test_over_splits_of_one_pool_the_plain_t_test_is_optimistic_and_the_corrected_one_is_not() -> None:
    rng = np.random.default_rng(3)
    found = [compare_paired(_equal_models(rng, 10), np.zeros(10), test_train_ratio=12 / 48) for _ in range(400)]
    assert np.mean([each.t_p < 0.05 for each in found]) > 0.2
    assert 0.02 < np.mean([each.corrected_p < 0.05 for each in found]) < 0.09


def test_mean_ranks_count_ties_half_and_join_only_neighbours_that_no_pair_separates() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=40)
    values = {"far": base - 5, "near": base + 0.001 * rng.normal(size=40), "first": base + 3, "same": base.copy()}
    ranks = compare_ranks(values)
    assert ranks is not None
    assert ranks.names[0] == "first"
    assert ranks.names[-1] == "far"
    assert ranks.ranks[0] == 1.0
    assert ranks.ranks[-1] == 4.0
    assert [set(group) for group in ranks.groups] == [{"near", "same"}]
    assert ranks.friedman_p < 1e-6
    assert ranks.adjusted["first", "far"] < 0.05
    tie = compare_ranks({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    assert tie is not None
    assert tie.ranks == (1.5, 1.5)
    assert math.isnan(tie.friedman_p)
    assert compare_ranks({"a": [1.0, 2.0]}) is None


def test_mean_ranks_agree_with_scipy_and_holm() -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(loc=shift, size=20) for name, shift in (("a", 0.0), ("b", 0.4), ("c", 0.9))}
    ranks = compare_ranks(values)
    assert ranks is not None
    assert ranks.friedman_p == pytest.approx(stats.friedmanchisquare(*values.values()).pvalue)
    pairs = [tuple(pair) for pair in ranks.adjusted]
    plain = [stats.wilcoxon(values[one] - values[two], method="approx").pvalue for one, two in pairs]
    assert list(ranks.adjusted.values()) == pytest.approx(holm(plain))


def test_sizes_that_differ_in_their_last_bits_alone_are_ties_of_many_pairs_too() -> None:
    gaps = [0.3, 0.1 + 0.2, -0.3, 0.2] * 8
    assert len(set(map(abs, gaps))) == 3
    assert wilcoxon_p(gaps) == stats.wilcoxon([3, 3, -3, 2] * 8, method="approx").pvalue


def test_models_that_are_alike_everywhere_have_a_friedman_p_of_one() -> None:
    ranks = compare_ranks({"a": [0.3, 0.0, 0.5], "b": [0.1 + 0.2, 0.0, 0.5], "c": [0.3, 0.0, 0.5]})
    assert ranks is not None
    assert ranks.friedman_p == 1.0
    assert ranks.ranks == (2.0, 2.0, 2.0)
