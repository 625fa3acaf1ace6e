"""Epochs by windows of blocks: the same samples and pairs, read in long stretches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.training.execution import memory as ordering
from manydg.training.execution.memory import (
    cut_into_blocks,
    memory_of_machine,
    plan_in_blocks,
    read_ahead,
    rows_of_window,
)
from manydg.training.run import train


def dataset_of(counts: list[int], seed: int = 0) -> DomainDataset:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(len(counts)), counts)
    label = rng.integers(0, 3, len(who))
    return from_arrays(rng.normal(size=(len(who), 4)) + label[:, None], label, who, kind="classes")


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=4, max_size=40),
    window=st.integers(8, 200),
    sampling=st.sampled_from(["samples", "pairs", "episodes"]),
    epoch=st.integers(1, 3),
)
def test_every_sample_occurs_and_pairs_are_of_one_patient(
    counts: list[int], window: int, sampling: str, epoch: int
) -> None:
    data = dataset_of(counts)
    found = plan_in_blocks(sampling, data, 4, 5, epoch, window)
    plan, who = found.plan, data.domains
    assert set(plan.indices.tolist()) == set(range(len(data)))
    if sampling != "pairs":
        assert len(plan.indices) == len(data)
    for rows, pairs in plan:
        assert torch.equal(who[rows[:pairs]], who[rows[pairs : 2 * pairs]])
        assert bool((rows[:pairs] != rows[pairs : 2 * pairs]).all())
    assert sorted(np.concatenate(found.windows).tolist()) == list(range(len(data)))
    # Whole patients: who is in one window is in no other.
    patients = [set(who[torch.from_numpy(window)].tolist()) for window in found.windows]
    assert sum(map(len, patients)) == len(counts)
    for start, stop, rows in zip(found.first_steps, [*found.first_steps[1:], len(plan)], found.windows, strict=True):
        assert set(plan.indices[plan.bounds[start] : plan.bounds[stop]].tolist()) == set(rows.tolist())


def test_a_block_is_one_stretch_of_the_disk_and_windows_change_with_the_epoch() -> None:
    data = dataset_of([5] * 60)
    blocks = cut_into_blocks(data, 20)
    assert all((np.diff(block) == 1).all() for block in blocks)
    assert {len(block) for block in blocks[:-1]} == {20}
    first, second = (plan_in_blocks("samples", data, 8, 0, epoch, 80) for epoch in (1, 2))
    assert len(first.windows) == 4
    assert {tuple(window) for window in first.windows} != {tuple(window) for window in second.windows}
    again = plan_in_blocks("samples", data, 8, 0, 1, 80)
    assert torch.equal(again.plan.indices, first.plan.indices)


def test_reading_ahead_looks_at_exactly_the_rows_of_a_window(tmp_path: Path) -> None:
    data = open_dataset(dataset_of([6] * 20).save(tmp_path / "data"))
    assert read_ahead(data, np.array([3, 4, 5, 60, 61])) == 5 * 4 * 4
    view = data.select(torch.arange(50, 100))
    assert read_ahead(view, np.array([0, 1, 49])) == 3 * 4 * 4


def test_a_dataset_that_fits_is_shuffled_as_a_whole(small_dataset: DomainDataset) -> None:
    assert rows_of_window(small_dataset) is None
    assert memory_of_machine() > 2**20


def test_training_by_windows_learns_as_well_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = open_dataset(dataset_of([7] * 60).save(tmp_path / "data"))
    whole = train(data, epochs=6, batch_size=32, lr=0.01, device="cpu")
    monkeypatch.setattr(ordering, "rows_of_window", lambda train: 100)
    windows = train(data, epochs=6, batch_size=32, lr=0.01, device="cpu")
    assert whole.record.history[0].order is None
    assert windows.record.history[0].order.startswith("windows of about 100 rows")
    assert windows.record.val["accuracy"] == pytest.approx(whole.record.val["accuracy"], abs=0.1)
