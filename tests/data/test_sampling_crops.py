"""Plans of crops: runs of consecutive samples of one session, alone and in pairs of one patient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.context import add_order
from manydg.data.dataset import from_arrays
from manydg.data.sampling import Crops, EpochPlan, plan_epoch
from manydg.data.timeline import ORDER, PAUSE, SequenceOptions
from manydg.errors import DataError

Sessions = list[list[int]]
"""The number of samples of each session of each patient."""


def rows_of(sessions: Sessions, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Patient and number in order of every row; rows are shuffled."""
    who, order, number = [], [], 0
    for patient, lengths in enumerate(sessions):
        for length in lengths:
            number += 1
            who += [patient] * length
            order += range(number, number + length)
            number += length
    shuffled = np.random.default_rng(seed).permutation(len(who))
    return np.array(who)[shuffled], np.array(order)[shuffled]


def plan_of(sampling: str, sessions: Sessions, length: int, size: int, epoch: int = 1) -> tuple[EpochPlan, ...]:
    who, order = rows_of(sessions)
    return plan_epoch(sampling, torch.from_numpy(who), size, 0, epoch, crops=Crops(order, length)), who, order  # type: ignore[return-value]


some_sessions = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(some_sessions, st.sampled_from([2, 5, 16]), st.sampled_from(["samples", "episodes", "pairs", "random-pairs"]))
def test_every_sample_occurs_and_no_step_has_a_single_row(sessions: Sessions, length: int, sampling: str) -> None:
    plan, who, _ = plan_of(sampling, sessions, length, 20)
    counts = np.bincount(plan.indices.numpy(), minlength=len(who))
    assert counts.min() >= 1
    if sampling in ("samples", "episodes"):
        assert counts.max() == 1
    if len(who) > 1:
        assert min(len(rows) for rows, _ in plan) >= 2


@settings(max_examples=60, deadline=None)
@given(some_sessions, st.sampled_from([2, 5, 16]))
def test_pairs_are_two_samples_of_one_patient(sessions: Sessions, length: int) -> None:
    plan, who, _ = plan_of("pairs", sessions, length, 20)
    for rows, pairs in plan:
        first, second = rows[:pairs].numpy(), rows[pairs : 2 * pairs].numpy()
        assert (who[first] == who[second]).all()
        assert (first != second).all()
    assert sum(plan.pairs) > 0 or max(sum(lengths) for lengths in sessions) == 1


def test_crops_are_runs_of_consecutive_samples_whose_borders_move_from_epoch_to_epoch() -> None:
    borders = []
    for epoch in (1, 2):
        plan, _, order = plan_of("samples", [[100], [100, 30]], 20, 60, epoch)
        numbers = order[plan.indices.numpy()]
        starts = np.flatnonzero(np.r_[True, np.diff(numbers) != 1])
        # Of 230 samples, 23 crops at most; a step may cut one.
        assert len(starts) <= 23 + len(plan)
        borders.append(set(numbers[starts].tolist()))
    assert borders[0] != borders[1]


@pytest.mark.parametrize("sampling", ["samples", "pairs"])
def test_steps_of_crops_have_one_size_but_for_the_last_two(sampling: str) -> None:
    plan, _, _ = plan_of(sampling, [[300, 200], [250], [400, 100]], 20, 200)
    sizes = [len(rows) for rows, _ in plan]
    assert sizes[:-2] == [200] * (len(sizes) - 2)
    assert len(sizes) > 4


def test_a_session_shorter_than_a_crop_stays_whole_and_crops_have_half_to_two_lengths() -> None:
    _, order = rows_of([[7], [500]])
    rows, bounds = Crops(order, 40).cut(np.random.default_rng(0))
    sizes = np.diff(bounds)
    assert sizes[0] == 7
    assert sizes[1:].min() >= 20
    assert sizes[1:].max() <= 80
    assert (np.diff(order[rows])[np.setdiff1d(np.arange(len(rows) - 1), bounds[1:-1] - 1)] == 1).all()


def test_a_patient_with_a_single_crop_has_its_halves_paired() -> None:
    plan, _, order = plan_of("pairs", [[9], [8]], 64, 256)
    assert plan.pairs == (8,)
    rows = order[plan.indices.numpy()]
    assert (np.abs(rows[8:16] - rows[:8]) == 4).all()


def test_the_order_numbers_sessions_apart_and_pauses_are_in_units_of_the_usual_one() -> None:
    data = from_arrays(
        torch.zeros(6, 1), [0, 1, 0, 1, 0, 1], ["b", "a", "b", "a", "b", "b"], times=[4, 1, 2, 2, 100, 6]
    )
    ordered = add_order(data, SequenceOptions(gap=10.0))
    assert ordered.columns[ORDER].tolist() == [5, 1, 4, 2, 8, 6]  # type: ignore[union-attr]
    pauses = ordered.columns[PAUSE].flatten().expm1()  # type: ignore[union-attr]
    np.testing.assert_allclose(pauses.tolist(), [1, 0, 0, 0.5, 0, 1], atol=1e-6)
    assert ordered.info.settings["sequence"]["pause"] == 2.0  # type: ignore[index,call-overload]


def test_without_times_there_is_no_order() -> None:
    data = from_arrays(torch.zeros(4, 1), [0, 1, 0, 1], [1, 1, 2, 2])
    with pytest.raises(DataError, match="time of every sample"):
        add_order(data, SequenceOptions())
