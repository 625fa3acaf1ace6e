"""Attention without padding against attention in rectangles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manydg.backbones._sequences import FixedLayout
from manydg.backbones.event_transformer import PackedAttention, RectangleAttention, _EncoderLayer
from manydg.data.columns import offsets_from_lengths

LENGTHS, SPARE, HEADS, WIDTH = [3, 0, 5, 1, 5, 2], 7, 2, 16


def layout(device: str = "cpu", lengths: list[int] | None = None, spare: int = SPARE) -> FixedLayout:
    sizes = torch.tensor(LENGTHS if lengths is None else lengths)
    return FixedLayout(offsets_from_lengths(sizes).to(device), int(sizes.max()), int(sizes.sum()) + spare)


class InALoop(PackedAttention):
    """The kernel's task done row by row, as it is defined."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, bounds: Tensor, most: int) -> Tensor:
        own = self._bounds.tolist()
        rows = list(zip(own[:-1], own[1:], bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        assert sum(to - start for _, _, start, to in rows) == len(query), "every query belongs to a row"
        parts = []
        for key_start, key_end, start, end in rows:
            assert end - start <= most
            assert key_end - key_start <= self._longest
            q, k, v = query[start:end], key[key_start:key_end], value[key_start:key_end]
            weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)


@pytest.mark.parametrize("spare", [1, 4, 23])
def test_steps_one_row_after_the_other_attend_to_what_they_attend_to_in_rectangles(spare: int) -> None:
    torch.manual_seed(0)
    rows = layout(spare=spare)
    vectors = torch.randn(rows.steps, 3, HEADS, WIDTH)
    packed = InALoop(rows)(*vectors.unbind(1), 0.0)
    assert torch.isfinite(packed).all(), "leftovers hold numbers too"
    spread = rows.spread(vectors.flatten(1)).unflatten(-1, (3, HEADS, WIDTH))
    rectangles = RectangleAttention(rows)(*spread.unbind(2), 0.0)
    torch.testing.assert_close(packed[: sum(LENGTHS)], rectangles[rows.present])


def test_one_query_a_row_attends_to_that_row() -> None:
    torch.manual_seed(0)
    rows = layout()
    query, vectors = torch.randn(rows.rows, HEADS, WIDTH), torch.randn(rows.steps, 2, HEADS, WIDTH)
    packed = InALoop(rows).last_queries(query, *vectors.unbind(1), 0.0)
    spread = rows.spread(vectors.flatten(1)).unflatten(-1, (2, HEADS, WIDTH))
    rectangles = RectangleAttention(rows)(query.unsqueeze(1), *spread.unbind(2), 0.0).squeeze(1)
    known = rows.lengths > 0
    torch.testing.assert_close(packed[known], rectangles[known])


def test_without_a_gpu_or_16_bits_nothing_is_packed() -> None:
    assert not PackedAttention.suits(layout(), torch.zeros(3, WIDTH, dtype=torch.bfloat16), WIDTH)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 4], [300, 17, 0, 128]])
def test_the_kernel_gives_what_rectangles_give_forward_and_backward(lengths: list[int]) -> None:
    torch.manual_seed(0)
    rows = layout("cuda", lengths, 70)
    layer = _EncoderLayer(64, 4, 32, 0.0).cuda()
    vectors = torch.randn(rows.steps, 64, device="cuda", requires_grad=True)
    weights = torch.randn(sum(lengths), 64, device="cuda")

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        vectors.grad = None
        output = run()
        (output.float() * weights).sum().backward()
        assert vectors.grad is not None
        return [output.detach(), vectors.grad[: sum(lengths)], *(p.grad.clone() for p in layer.parameters())]

    def packed() -> Tensor:
        assert PackedAttention.suits(rows, vectors, 16)
        return layer(vectors, vectors, PackedAttention(rows))[: sum(lengths)]

    def in_rectangles() -> Tensor:
        spread = rows.spread(vectors)
        return layer(spread, spread, RectangleAttention(rows))[rows.present]

    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, of_16_bits = gradients(packed), gradients(in_rectangles)
    for mine, rounded, exact in zip(found, of_16_bits, gradients(in_rectangles), strict=True):
        assert torch.isfinite(mine).all()
        usual = functional.mse_loss(rounded.float(), exact)
        assert functional.mse_loss(mine.float(), exact) <= 2 * usual + 1e-5 * exact.square().mean() + 1e-9
