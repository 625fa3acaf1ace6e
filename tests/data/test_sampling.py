"""Plans of epochs: who meets whom in which step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.errors import ConfigError

KINDS = ("samples", "pairs", "random-pairs", "episodes", "environments")
patients = st.lists(st.integers(0, 9), min_size=2, max_size=120).map(torch.tensor)
batch_sizes = st.integers(2, 40)


def sizes(plan: EpochPlan) -> list[int]:
    return [len(rows) for rows, _ in plan]


@settings(max_examples=60, deadline=None)
@given(patients, batch_sizes, st.sampled_from(KINDS), st.integers(0, 5))
def test_every_sample_occurs_in_every_epoch(domains: torch.Tensor, batch: int, kind: str, epoch: int) -> None:
    plan = plan_epoch(kind, domains, batch, 3, epoch)
    seen = torch.cat([rows for rows, _ in plan])
    assert torch.equal(torch.unique(seen), torch.arange(len(domains)))
    if kind in ("samples", "episodes", "environments"):
        assert len(seen) == len(domains)


@settings(max_examples=60, deadline=None)
@given(patients, batch_sizes, st.sampled_from(KINDS))
@example(torch.tensor([0] * 6 + [1]), 2, "pairs")
@example(torch.tensor([*[0] * 10, 1, 2, 3]), 4, "pairs")
def test_no_step_has_a_single_row(domains: torch.Tensor, batch: int, kind: str) -> None:
    # Batch normalisation cannot take one.
    assert min(sizes(plan_epoch(kind, domains, batch, 0, 1))) >= 2


@settings(max_examples=60, deadline=None)
@given(patients, batch_sizes, st.sampled_from(("samples", "pairs", "random-pairs", "environments")))
@example(torch.tensor([0] * 25 + [1]), 14, "pairs")
def test_steps_are_of_nearly_the_same_size(domains: torch.Tensor, batch: int, kind: str) -> None:
    found = sizes(plan_epoch(kind, domains, batch, 0, 1))
    # The last two may share what is left.
    whole = found[:-2] or found
    assert max(whole) - min(whole) <= 3
    assert max(found) <= max(batch + 2, 3)
    assert len(found) < 3 or min(found[-2:]) >= min(batch // 4, 2)


@settings(max_examples=60, deadline=None)
@given(patients, batch_sizes)
def test_a_pair_is_two_samples_of_one_patient_and_lone_samples_come_last(domains: torch.Tensor, batch: int) -> None:
    counts = torch.bincount(domains, minlength=10)
    for rows, pairs in plan_epoch("pairs", domains, batch, 1, 2):
        first, second, lone = rows[:pairs], rows[pairs : 2 * pairs], rows[2 * pairs :]
        assert torch.equal(domains[first], domains[second])
        assert bool((first != second).all())
        assert bool((counts[domains[lone]] == 1).all())


def test_the_pairs_of_a_patient_are_spread_over_the_steps() -> None:
    """Ten pairs of each of forty patients, twenty pairs a step: in the order of patients a step would hold two."""
    domains = torch.arange(40).repeat_interleave(20)
    patients = [len(torch.unique(domains[rows])) for rows, _ in plan_epoch("pairs", domains, 40, 0, 1)]
    assert len(patients) == 20
    assert min(patients) >= 10


def test_random_pairs_mostly_join_different_patients() -> None:
    domains = torch.arange(40).repeat_interleave(5)
    ((rows, pairs),) = plan_epoch("random-pairs", domains, 400, 0, 1)
    assert pairs == 100
    apart = (domains[rows[:pairs]] != domains[rows[pairs : 2 * pairs]]).float().mean()
    assert apart > 0.9


@pytest.mark.parametrize("batch", [64, 100])
def test_an_episode_holds_several_samples_of_each_of_several_patients(batch: int) -> None:
    domains = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(50), 20)))
    for rows, pairs in plan_epoch("episodes", domains, batch, 0, 1):
        _, counts = torch.unique(domains[rows], return_counts=True)
        assert pairs == 0
        assert len(counts) >= 5
        assert counts.float().mean() >= 4
        assert abs(len(rows) - batch) <= batch // 5


@pytest.mark.parametrize("batch", [64, 100])
def test_a_step_of_environments_holds_several_samples_of_each_and_is_of_the_common_size(batch: int) -> None:
    rng = np.random.default_rng(0)
    domains = torch.from_numpy(rng.permutation(np.repeat(np.arange(50), rng.integers(15, 60, 50))))
    plan = plan_epoch("environments", domains, batch, 0, 1)
    assert sizes(plan)[:-2] == [batch] * (len(plan) - 2)
    held = [torch.unique(domains[rows], return_counts=True)[1].float() for rows, _ in plan]
    # Ten of them in a step of complete runs; shorter runs make more, of fewer samples.
    assert np.median([len(counts) for counts in held]) == pytest.approx(10, abs=1)
    assert np.median([float(counts.mean()) for counts in held]) >= 0.9 * (batch // 10)
    assert min(len(counts) for counts in held) >= 5


def test_the_runs_of_an_environment_are_spread_over_the_epoch() -> None:
    domains = torch.arange(40).repeat_interleave(60)
    plan = plan_epoch("environments", domains, 60, 0, 1)
    different = [len(torch.unique(domains[rows])) for rows, _ in plan]
    # Runs in a plainly random order would meet their like more often: 10 runs of 40 environments, 8.9 different ones.
    assert np.mean(different) > 9.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_depends_on_seed_and_epoch_alone(kind: str) -> None:
    domains = torch.arange(12).repeat_interleave(7)
    first, same, epoch, seed = (
        plan_epoch(kind, domains, 16, *key).indices.tolist() for key in ((1, 4), (1, 4), (1, 5), (2, 4))
    )
    assert first == same
    assert first != epoch
    assert first != seed


@pytest.mark.parametrize(("kind", "batch"), [("quadruples", 8), ("samples", 1)])
def test_impossible_plans_are_refused(kind: str, batch: int) -> None:
    with pytest.raises(ConfigError):
        plan_epoch(kind, torch.zeros(4, dtype=torch.int64), batch, 0, 1)
