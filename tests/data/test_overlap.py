"""Identical samples on two sides of a split are found, exactly."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data import splits as module
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.splits import SIDES, Split, find_overlap, split_patients, warn_of_overlap
from manydg.errors import ManyDGWarning

few = settings(max_examples=20, deadline=None)
values = st.sampled_from([0.0, -0.0, 1.0, np.nan])
nested = st.lists(st.lists(st.integers(0, 1), max_size=2), max_size=2)
samples = st.lists(st.tuples(values, values, nested), min_size=3, max_size=14)


def dataset_of(rows: list[tuple[float, float, list[list[int]]]]) -> DomainDataset:
    inner = [codes for row in rows for codes in row[2]]
    items = torch.tensor([code for codes in inner for code in codes], dtype=torch.int64)
    bounds = [
        torch.tensor(np.cumsum([0, *map(len, each)]), dtype=torch.int64) for each in (inner, [r[2] for r in rows])
    ]
    inputs = {"x": np.array([row[:2] for row in rows]), "codes": Ragged(Ragged(items, bounds[0]), bounds[1])}
    patients = [f"name {row}" for row in range(len(rows))]
    return from_arrays(inputs, np.arange(len(rows)) % 2, patients, names=("a", "b"), missing=True)


def in_plain_python(rows: list[Any], split: Split) -> set[int]:
    """Rows whose content occurs on another side, by comparing every sample with every other."""
    content = [str((row[0] + 0.0, row[1] + 0.0, row[2])) for row in rows]
    side_of = {int(row): side for side in SIDES for row in getattr(split, side)}
    return {a for a in side_of for b in side_of if content[a] == content[b] and side_of[a] != side_of[b]}


@few
@given(samples, st.integers(0, 5))
def test_what_is_found_is_what_comparing_all_with_all_finds(rows: list[Any], seed: int) -> None:
    dataset = dataset_of(rows)
    split = split_patients(dataset, (0.4, 0.3, 0.3), seed=seed)
    expected = in_plain_python(rows, split)
    found = find_overlap(dataset, split)
    assert found.samples == len(expected)
    assert set(found.patients) == {dataset.pseudonyms()[int(dataset.domains[row])] for row in expected}
    for left, right in found.examples:
        assert left.side != right.side
        assert {left.row, right.row} <= expected
        assert str(rows[left.row]).replace("-0.0", "0.0") == str(rows[right.row]).replace("-0.0", "0.0")


def test_hashes_tell_different_samples_apart() -> None:
    # Few values, many places: what a weak hash would confuse.
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (20_000, 48)).astype(np.float32)
    dataset = from_arrays(x, np.arange(len(x)) % 2, np.arange(len(x)))
    assert len(np.unique(module._hash_samples(dataset, np.arange(len(x))))) == len(np.unique(x, axis=0))


def test_one_shared_sample_among_many_is_found_and_said_without_names() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 8)).astype(np.float32)
    patients = np.repeat([f"Jane Doe {number}" for number in range(100)], 30)
    split = split_patients(patients)
    here, there = int(split.train[17]), int(split.test[4])
    x[there] = x[here]
    dataset = from_arrays(x, np.arange(3000) % 3, patients)
    found = find_overlap(dataset, split)
    assert (found.samples, found.contents) == (2, 1)
    assert [(each.side, each.row) for each in found.examples[0]] == [("train", here), ("test", there)]
    assert "Jane" not in str(found)
    with pytest.warns(ManyDGWarning, match=rf"2 samples of 2 patients .*row {here} of P-\w+ .train. = row {there}"):
        warn_of_overlap(dataset, split)


def test_identical_samples_on_one_side_are_nobodys_business() -> None:
    x = np.zeros((6, 2))
    x[4:] = [[1, 1], [2, 2]]
    dataset = from_arrays(x, [0, 1] * 3, ["a", "a", "b", "b", "c", "d"])
    split = Split(np.arange(4), np.array([4]), np.array([5]), dataset.domains.numpy(), dataset.patients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_of_overlap(dataset, split)
    assert str(find_overlap(dataset, split)) == "no sample occurs on two sides of the split"


def test_a_selection_is_searched_by_its_own_rows() -> None:
    x = np.arange(10.0)[:, None].repeat(2, axis=1)
    x[9] = x[0]
    whole = from_arrays(x, np.arange(10) % 2, np.arange(10))
    view = whole.select(np.array([9, 3, 0]))
    split = Split(np.array([0]), np.array([1]), np.array([2]), view.domains.numpy(), view.patients)
    (pair,) = find_overlap(view, split).examples
    assert [occurrence.row for occurrence in pair] == [0, 2]
