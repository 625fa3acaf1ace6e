"""Dropout with a mask of random bits does what torch's own does."""

from __future__ import annotations

import pytest
import torch

from manydg.backbones._convolution import Dropout, mask_like


@pytest.mark.parametrize("p", [0.5, 0.3, 0.05])
def test_values_are_kept_with_their_probability_and_scaled_so_that_the_mean_stays(p: float) -> None:
    torch.manual_seed(0)
    mask = mask_like(torch.zeros(200, 7, 31, 11), p)
    assert sorted(mask.unique().tolist()) == [0.0, pytest.approx(1 / (1 - p))]
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert float((mask == 0).float().mean()) == pytest.approx(p, abs=4 * deviation)


def test_neighbours_rows_and_repeated_draws_have_nothing_to_do_with_one_another() -> None:
    torch.manual_seed(0)
    first, second = (mask_like(torch.zeros(400, 640), 0.5).flatten() - 1 for _ in range(2))
    bound = 5 / first.numel() ** 0.5
    for distance in (1, 2, 7, 8, 9, 31, 32, 63, 64, 65, 640):
        assert abs(float((first[distance:] * first[:-distance]).mean())) < bound
    assert abs(float((first * second).mean())) < bound
    for bit in range(64):
        assert abs(float(first[bit::64].mean())) < 8 * bound


def test_the_mask_has_the_memory_layout_of_the_values_and_counts_each_once() -> None:
    values = torch.randn(3, 5, 4, 7).to(memory_format=torch.channels_last)
    assert mask_like(values, 0.5).stride() == values.stride()
    part = torch.randn(6, 10)[:, ::2]
    dropped = Dropout(0.5)(part)
    assert dropped.shape == part.shape
    assert bool(((dropped == 0) | (dropped == 2 * part)).all())
    assert mask_like(torch.zeros(0, 4), 0.5).shape == (0, 4)
    assert mask_like(torch.zeros(3, 3, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


def test_gradients_are_dropped_where_values_are() -> None:
    values = torch.randn(40, 9, requires_grad=True)
    dropped = Dropout(0.5)(values)
    (slope,) = torch.autograd.grad(dropped.sum(), values)
    assert torch.equal(slope, torch.where(dropped == 0, 0.0, 2.0))


def test_the_same_seed_gives_the_same_mask() -> None:
    masks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        masks.append(mask_like(torch.zeros(1000), 0.5))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_nothing_is_dropped_in_prediction_or_with_a_probability_of_zero() -> None:
    values = torch.randn(8, 8)
    assert torch.equal(Dropout(0.5).eval()(values), values)
    assert torch.equal(Dropout(0.0)(values), values)
    assert torch.equal(Dropout(1.0)(values), torch.zeros_like(values))
