"""Attention over the steps of rows of different length, laid out in rectangles or one row after the other."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from manydg.backbones._fixed_layout import FixedLayout
from manydg.backbones._layout import Layout

_LARGEST_PACKED_HEAD = 256


class Attention(Protocol):
    """Attention of queries to the steps of their own row, heads apart.

    Queries, keys and values come as ``(..., heads, width of a head)`` in the shape in which the attention lays steps
    out; what it gives has the shape of the queries.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor: ...


class RectangleAttention:
    """Attention in rectangles: steps ``(rows, longest, ...)``, of which those behind a row's end are not seen.

    A row without steps attends to its first place, to avoid 0 / 0; what comes of it is of no use.
    """

    def __init__(self, layout: Layout) -> None:
        first = torch.arange(layout.longest, device=layout.offsets.device) == 0
        self._mask = (layout.present | first)[:, None, None, :]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, self._mask, dropout)
        return attended.transpose(1, 2)


class PackedAttention:
    """Attention without padding: steps ``(steps, ...)`` stand one row after the other.

    Leftovers behind the last row are cut into rows of their own, so that every step holds numbers and every gradient
    is defined. The kernel is the one behind torch's own attention over nested tensors.
    """

    def __init__(self, layout: FixedLayout) -> None:
        self._longest, self._rows = layout.longest, layout.rows
        leftovers = -(-layout.steps // layout.longest)
        cuts = torch.arange(1, leftovers + 1, device=layout.offsets.device) * layout.longest
        behind = (layout.offsets[-1] + cuts).clamp_max(layout.steps)
        self._bounds = torch.cat([layout.offsets, behind]).to(torch.int32)

    @staticmethod
    def suits(layout: Layout, steps: Tensor, head: int) -> bool:
        """Whether there is a kernel for these steps: of 16 bits, on a GPU, with heads of a width that it knows."""
        if not steps.is_cuda or not isinstance(layout, FixedLayout):
            return False
        half = torch.is_autocast_enabled("cuda") or steps.element_size() == 2
        return half and head % 8 == 0 and head <= _LARGEST_PACKED_HEAD

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        return self._attend(query, key, value, dropout, self._bounds, self._longest)

    def last_queries(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attention of one query a row, ``(rows, ...)``."""
        bounds = torch.arange(len(self._bounds), device=query.device, dtype=torch.int32).clamp_max(self._rows)
        return self._attend(query, key, value, dropout, bounds, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, bounds: Tensor, most: int) -> Tensor:
        """Attention of queries that stand between these bounds, at most so many of a row."""
        attended: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, bounds, self._bounds, most, self._longest, dropout, False, False
        )[0]
        return attended
