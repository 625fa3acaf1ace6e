"""Rows of steps: every way of running over them gives what each row gives alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manydg.backbones._records import pooled_sum
from manydg.backbones._sequences import ByLength, Layout, last_steps
from manydg.data.columns import offsets_from_lengths

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


def layout_of(lengths: list[int]) -> tuple[Layout, torch.Tensor]:
    vectors = torch.randn(sum(lengths), 3)
    return Layout(offsets_from_lengths(torch.tensor(lengths))), vectors


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_a_recurrent_network_gives_each_row_its_own_states(lengths: list[int]) -> None:
    layout, vectors = layout_of(lengths)
    network = torch.nn.GRU(3, 4, batch_first=True)
    forwards, backwards = layout.run(network, vectors), layout.run_backwards(network, vectors)
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), lengths, strict=False)):
        own = vectors[start : start + length]
        if not length:
            assert not layout.last(forwards)[row].any()
            continue
        expected = network(own.unsqueeze(0))[0][0]
        torch.testing.assert_close(forwards[start : start + length], expected)
        torch.testing.assert_close(layout.last(forwards)[row], expected[-1])
        reverse = network(own.flip(0).unsqueeze(0))[0][0].flip(0)
        torch.testing.assert_close(backwards[start : start + length], reverse)


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_groups_hold_every_row_once_with_little_padding(lengths: list[int]) -> None:
    layout, vectors = layout_of(lengths)
    order = ByLength.of(layout)
    sorted_vectors = vectors[order.steps]
    totals = torch.cat([group.layout.total(sorted_vectors[group.steps]) for group in order.groups])
    torch.testing.assert_close(totals[order.back], layout.total(vectors))
    assert sum(group.layout.rows for group in order.groups) == len(lengths)
    for group in order.groups:
        assert min(group.layout.host_lengths) >= 2 * group.layout.longest // 3 or group.layout.longest <= 16


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_weights_add_up_to_one_in_each_row(lengths: list[int]) -> None:
    layout, vectors = layout_of(lengths)
    totals = layout.total(layout.softmax(vectors[:, 0]).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(totals, (torch.tensor(lengths) > 0).float())


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 12))
def test_the_last_steps_of_each_row_are_kept_in_order(lengths: list[int], limit: int) -> None:
    offsets = offsets_from_lengths(torch.tensor(lengths))
    kept, new_offsets = last_steps(offsets, limit)
    expected = [list(range(max(start, stop - limit), stop)) for start, stop in itertools.pairwise(offsets.tolist())]
    assert kept.tolist() == [step for row in expected for step in row]
    assert new_offsets.diff().tolist() == [len(row) for row in expected]


def test_pooled_sums_and_both_their_derivatives_are_right() -> None:
    table, weighted = (torch.randn(5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    codes, offsets = torch.tensor([1, 3, 3, 0, 4]), torch.tensor([0, 2, 2, 5])
    weights = torch.randn(5, dtype=torch.float64)

    def alone(given: torch.Tensor) -> torch.Tensor:
        return pooled_sum(given, codes, offsets).tanh()

    def both(given: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return pooled_sum(given, codes, offsets, other, weights).tanh()

    def expected(items: torch.Tensor) -> torch.Tensor:
        return torch.stack([items[a:b].sum(0) for a, b in ((0, 2), (2, 2), (2, 5))]).tanh()

    torch.testing.assert_close(alone(table), expected(table[codes]))
    torch.testing.assert_close(both(table, weighted), expected(table[codes] + weighted[codes] * weights[:, None]))
    for pooled, tables in ((alone, (table,)), (both, (table, weighted))):
        assert torch.autograd.gradcheck(pooled, tables)
        assert torch.autograd.gradgradcheck(pooled, tables)


def test_no_codes_at_all_pool_to_zero() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert pooled_sum(torch.randn(4, 3), empty, torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("layers", "both"), [(1, False), (1, True), (2, True)])
def test_rectangles_and_packed_sequences_give_the_same_states_and_gradients(layers: int, both: bool) -> None:
    torch.manual_seed(0)
    network, layout = nn.GRU(3, 4, layers, bidirectional=both), Layout(torch.tensor([0, 5, 5, 6, 14]))
    vectors = torch.randn(14, 3, requires_grad=True)
    sides = []
    for states in (layout.run(network, vectors), layout.run_padded(network, vectors)):
        gradients = torch.autograd.grad(states.square().sum(), [vectors, *network.parameters()])
        sides.append([states, *gradients])
    for packed, padded in zip(*sides, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_rectangles_but_not_where_most_of_them_would_be_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.GRU(3, 4, bidirectional=True).cuda()
    read = []
    monkeypatch.setattr(Layout, "run_padded", lambda *_: read.append("padded"))
    for lengths in ([5, 4, 5], [1] * 50 + [50]):
        offsets = torch.tensor([0, *lengths]).cumsum(0).cuda()
        Layout(offsets).run(network, torch.randn(sum(lengths), 3).cuda())
    assert read == ["padded"]
