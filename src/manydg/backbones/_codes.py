"""Codes of clinical records: which are known, their embeddings pooled by item, and values measured with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from manydg.backbones._tables import RunningMoments
from manydg.data.columns import Ragged
from manydg.errors import DataError

_CODES_AT_ONCE = 1 << 22
_LARGEST_VALUE = 10.0


def two_levels(name: str, column: object) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of a column of nesting 2: codes ``(codes,)``, offsets over items, and offsets over codes."""
    if not isinstance(column, Ragged) or not isinstance(column.values, Ragged):
        raise DataError(f"input '{name}' must hold a list of code sets for every sample")
    inner = column.values
    if not isinstance(inner.values, Tensor):
        raise DataError(f"input '{name}' is nested more than twice")
    return inner.values, column.offsets, inner.offsets


class KnownCodes(nn.Module):
    """Maps codes that no training patient has, or that are outside the vocabulary, to code 0, unknown.

    Parameters
    ----------
    size : int
        Size of the vocabulary, code 0 included.
    """

    known: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # One entry more than there are codes, never known, for codes outside the vocabulary.
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


class CodeValues(nn.Module):
    """Standardises measured values per code, with mean and deviation of the training patients.

    A value that is missing, of a code that never varies there, or of the unknown code, becomes 0; one further than ten
    deviations from the mean counts as ten, since most such are typing errors.

    Parameters
    ----------
    size : int
        Size of the vocabulary.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        scaled = (values - self.mean[codes]) * self.scale[codes]
        return torch.nan_to_num(scaled, nan=0.0).clamp(-_LARGEST_VALUE, _LARGEST_VALUE)

    def fit(self, values: Tensor, codes: Tensor) -> None:
        """Learn from all values and codes of the training patients, ``(items,)`` each."""
        moments = RunningMoments(self.mean)
        for piece, owner in self._pieces(values, codes):
            count, total, squares = (torch.zeros_like(moments.mean) for _ in range(3))
            count.index_add_(0, owner, torch.ones_like(piece))
            total.index_add_(0, owner, piece)
            mean = total / count.clamp_min(1)
            squares.index_add_(0, owner, (piece - mean[owner]).square())
            moments.add(count, mean, squares)
        mean, variance = moments.mean, moments.variance
        constant = (moments.count < 2) | (variance <= 1e-13 * mean.square().clamp_min(1e-13))
        constant[0] = True
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-300).rsqrt()))

    def _pieces(self, values: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for piece, owner in zip(torch.split(values, _CODES_AT_ONCE), torch.split(codes, _CODES_AT_ONCE), strict=True):
            usable = torch.isfinite(piece) & (owner >= 0) & (owner < len(self.mean))
            yield piece[usable].to(self.mean.device, torch.float64), owner[usable].to(self.mean.device)


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
