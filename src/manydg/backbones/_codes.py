"""Embeddings of codes, pooled over the items that hold them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from manydg.data.columns import Ragged
from manydg.errors import DataError

_CODES_AT_ONCE = 1 << 22


class KnownCodes(nn.Module):
    """Turns codes that no training patient has, or that lie outside the vocabulary, into code 0, unknown.

    Parameters
    ----------
    size : int
        Size of the vocabulary, code 0 included.
    """

    known: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # One place more than there are codes, never known, for whatever lies outside.
        known = torch.ones(size + 1, dtype=torch.bool)
        known[size] = False
        self.register_buffer("known", known)

    def forward(self, codes: Tensor) -> Tensor:
        inside = torch.where(codes < 0, self.size, codes.clamp_max(self.size))
        return torch.where(self.known[inside], inside, 0)

    def fit(self, codes: Tensor) -> None:
        """Learn from all codes of the training patients, ``(items,)``."""
        seen = torch.zeros_like(self.known)
        for piece in torch.split(codes, _CODES_AT_ONCE):
            seen[piece[(piece >= 0) & (piece < self.size)].to(seen.device)] = True
        self.known.copy_(seen)


class _PooledSum(torch.autograd.Function):
    """``embedding_bag`` whose gradient can be differentiated again, which torch's own cannot."""

    @staticmethod
    def forward(table: Tensor, codes: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        return functional.embedding_bag(
            codes, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        table, codes, offsets, weights = inputs
        ctx.save_for_backward(codes, offsets, weights)  # type: ignore[arg-type]
        ctx.size = table.shape[0]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, offsets, weights = ctx.saved_tensors  # type: ignore[attr-defined]
        items = grad.index_select(0, Ragged(codes, offsets).row_of_item())
        if weights is not None:
            items = items * weights.unsqueeze(-1)
        size: int = ctx.size  # type: ignore[attr-defined]
        return torch.ops.aten.embedding_dense_backward(items, codes, size, -1, False), None, None, None


def pooled_sum(table: Tensor, codes: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of the codes' vectors in each bag, each times its weight; zero for an empty bag.

    Parameters
    ----------
    table : Tensor ``(codes, width)``
    codes, weights : Tensor ``(items,)``
        No gradient reaches the weights.
    offsets : Tensor ``(bags + 1,)``

    Returns
    -------
    Tensor ``(bags, width)``
    """
    weights = None if weights is None else weights.to(table.dtype)
    pooled: Tensor = _PooledSum.apply(table, codes, offsets, weights)  # type: ignore[no-untyped-call]
    return pooled


class CodeMeans(nn.Module):
    """Mean embedding of the codes of each item (a visit); zero for an item without any.

    Parameters
    ----------
    size, width : int
    reach : float
        The embeddings start between minus and plus this number.
    """

    def __init__(self, size: int, width: int, reach: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(size, width).uniform_(-reach, reach))

    def forward(self, codes: Tensor, offsets: Tensor) -> Tensor:
        """Pooled vectors ``(items, width)``."""
        counts = (offsets[1:] - offsets[:-1]).clamp_min(1).unsqueeze(-1)
        return pooled_sum(self.table, codes, offsets) / counts


def two_levels(name: str, column: object) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of a column of nesting 2: codes ``(codes,)``, offsets over items, and offsets over codes."""
    if not isinstance(column, Ragged) or not isinstance(column.values, Ragged):
        raise DataError(f"input '{name}' must hold a list of code sets for every sample")
    inner = column.values
    if not isinstance(inner.values, Tensor):
        raise DataError(f"input '{name}' is nested more than twice")
    return inner.values, column.offsets, inner.offsets
