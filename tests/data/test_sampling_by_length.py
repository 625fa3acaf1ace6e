"""Steps of samples of one length, and the shapes that steps have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manydg.data.sampling import plan_epoch


@pytest.mark.parametrize("kind", ["samples", "pairs", "random-pairs"])
def test_steps_of_one_length_hold_every_sample_and_little_padding(kind: str) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.geometric(0.02, 4000).clip(max=300)
    domains = torch.from_numpy(np.sort(rng.integers(0, 1500, 4000)))
    plans = [plan_epoch(kind, domains, 64, 0, epoch, lengths) for epoch in (1, 2)]
    plain = plan_epoch(kind, domains, 64, 0, 1)
    for plan in plans:
        assert set(plan.indices.tolist()) == set(range(4000))
    padded, loose = (_padding(plan, lengths) for plan in (plans[0], plain))
    # A pair is as long as its longer half, and lone samples fill steps up, so that pairs are padded more.
    assert padded < (1.4 if kind == "samples" else 2.2) < loose
    assert plans[0].indices.tolist() != plans[1].indices.tolist()
    together = [{frozenset(rows.tolist()) for rows, _ in plan} for plan in plans]
    assert not together[0] & together[1]


def _padding(plan: Any, lengths: Any) -> float:
    """Padded length over true length."""
    return float(
        sum(len(rows) * lengths[rows.numpy()].max() for rows, _ in plan)
        / sum(lengths[rows.numpy()].sum() for rows, _ in plan)
    )


def test_pairs_stay_pairs_in_steps_of_one_length() -> None:
    rng = np.random.default_rng(1)
    domains = torch.from_numpy(rng.integers(0, 300, 1000))
    for rows, pairs in plan_epoch("pairs", domains, 32, 0, 1, rng.integers(1, 90, 1000)):
        assert torch.equal(domains[rows[:pairs]], domains[rows[pairs : 2 * pairs]])
        assert bool((rows[:pairs] != rows[pairs : 2 * pairs]).all())


@pytest.mark.parametrize("lone", [0, 200])
def test_pair_steps_have_few_shapes(lone: int) -> None:
    domains = torch.cat([torch.arange(400).repeat_interleave(5), torch.arange(400, 400 + lone)])
    plan = plan_epoch("pairs", domains, 64, 0, 1)
    shapes = {(len(rows), pairs) for rows, pairs in list(plan)[:-2]}
    assert {rows for rows, _ in shapes} == {64}
    assert len(shapes) <= (2 if lone else 1)
