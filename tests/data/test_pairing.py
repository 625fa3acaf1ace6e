"""Pairs within patients: every clause of the rule, and its randomness."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from manydg.data.sampling import fold_pairs, lone_samples
from manydg.errors import ConfigError, DataError

some_domains = st.lists(st.integers(-3, 12), max_size=60).map(lambda ids: np.array(ids, dtype=np.int64))
seeds = st.integers(0, 2**32)
few = settings(max_examples=60, deadline=None)


@few
@given(some_domains, seeds)
def test_no_pair_crosses_patients_or_meets_itself(domains: np.ndarray, seed: int) -> None:
    first, second = fold_pairs(domains, seed)
    assert (domains[first] == domains[second]).all()
    assert (first != second).all()


@few
@given(some_domains, seeds)
def test_every_sample_with_a_partner_occurs_and_lone_samples_do_not(domains: np.ndarray, seed: int) -> None:
    first, second = fold_pairs(domains, seed)
    sizes = Counter(domains.tolist())
    partnered = {row for row, patient in enumerate(domains.tolist()) if sizes[patient] > 1}
    assert {*first.tolist(), *second.tolist()} == partnered
    assert set(lone_samples(domains).tolist()) == set(range(len(domains))) - partnered


@few
@given(some_domains, seeds)
def test_only_one_sample_of_an_odd_patient_occurs_twice(domains: np.ndarray, seed: int) -> None:
    first, second = fold_pairs(domains, seed)
    seen = Counter([*first.tolist(), *second.tolist()])
    for patient, size in Counter(domains.tolist()).items():
        repeats = sorted(seen[row] for row in np.flatnonzero(domains == patient).tolist())
        expected = [0] if size == 1 else [1] * (size - size % 2) + [2] * (size % 2)
        assert repeats == expected


@few
@given(some_domains, seeds)
def test_pairs_come_out_grouped_by_patient(domains: np.ndarray, seed: int) -> None:
    first, _ = fold_pairs(domains, seed)
    owners = domains[first]
    assert (np.diff(owners) >= 0).all()


@few
@given(some_domains, seeds)
def test_a_seed_gives_the_same_pairs_for_arrays_and_tensors(domains: np.ndarray, seed: int) -> None:
    first, second = fold_pairs(domains, seed)
    first_tensor, second_tensor = fold_pairs(torch.from_numpy(domains), seed)
    assert isinstance(first_tensor, torch.Tensor)
    assert first_tensor.dtype == torch.int64
    assert isinstance(first, np.ndarray)
    assert first.dtype == np.int64
    assert first_tensor.tolist() == first.tolist()
    assert second_tensor.tolist() == second.tolist()


def test_another_seed_and_another_epoch_give_other_pairs() -> None:
    domains = np.repeat(np.arange(20), 10)
    plans = [fold_pairs(domains, seed) for seed in (0, 1, (3, 0), (3, 1))]
    assert len({plan[0].tobytes() + plan[1].tobytes() for plan in plans}) == 4


def test_text_patients_are_paired_as_numbers_are() -> None:
    names = np.array(["b", "a", "b", "a", "c"])
    first, second = fold_pairs(names, 3)
    assert {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    assert lone_samples(names).tolist() == [4]
    assert lone_samples(names.astype(object)).tolist() == [4]


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_each_pair_within_a_patient_is_equally_likely(size: int) -> None:
    # Many patients of one size at once, each an independent draw; sample r of patient p is row r * patients + p.
    patients = 6000
    first, second = fold_pairs(np.tile(np.arange(patients), size), seed=20 + size)
    first, second = (side.reshape(patients, -1) // patients for side in (first, second))
    possible = list(combinations(range(size), 2))
    # The pairs of one patient exclude one another, so that each place in the plan is tested by itself.
    for place in range(first.shape[1]):
        found = Counter(zip(*np.sort([first[:, place], second[:, place]], axis=0).tolist(), strict=True))
        assert chisquare([found[pair] for pair in possible]).pvalue > 1e-3


@pytest.mark.parametrize("size", [3, 5])
def test_the_one_left_over_and_its_partner_are_each_any_sample_equally_often(size: int) -> None:
    patients = 6000
    domains = np.tile(np.arange(patients), size)
    first, second = fold_pairs(domains, seed=size)
    seen = np.bincount(np.concatenate([first, second]), minlength=len(domains))
    twice = np.flatnonzero(seen == 2) // patients
    assert len(twice) == patients
    assert chisquare(np.bincount(twice, minlength=size)).pvalue > 1e-3


def test_the_two_places_of_a_pair_are_interchangeable() -> None:
    patients = 4000
    first, _ = fold_pairs(np.tile(np.arange(patients), 4), seed=5)
    assert chisquare(np.bincount(first // patients, minlength=4)).pvalue > 1e-3


def test_no_samples_make_no_pairs() -> None:
    first, second = fold_pairs(np.array([], dtype=np.int64), 0)
    assert len(first) == len(second) == len(lone_samples(np.array([], dtype=np.int64))) == 0


def test_a_matrix_of_patients_and_a_bad_seed_are_refused() -> None:
    with pytest.raises(DataError, match=r"one patient per sample.*\(2, 2\)"):
        fold_pairs(np.zeros((2, 2)), 0)
    with pytest.raises(ConfigError, match="seed is a whole number"):
        fold_pairs(np.zeros(4), -1)
