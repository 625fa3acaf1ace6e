"""The exponential linear unit in half the time that torch's own takes on a CPU."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from manydg.backbones._convolution import runs_on_cpu

_AT_ONCE = 1 << 19
_EXACT = (torch.float32, torch.float64)


def elu_(values: Tensor) -> Tensor:
    """``x`` where it is positive, else ``exp(x) - 1``, in the values' own memory."""
    if not runs_on_cpu(values) or values.dtype not in _EXACT or not _is_dense(values):
        return functional.elu(values, inplace=True)
    return cast("Tensor", _Elu.apply(values))  # type: ignore[no-untyped-call]


def _is_dense(values: Tensor) -> bool:
    return values.is_contiguous() or (values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last))


class _Elu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        line = values.as_strided((values.numel(),), (1,))
        room = line.new_empty(min(_AT_ONCE, len(line)))
        # Piece by piece, so that what one pass writes is in the cache for the next. Powers of two are torch's fastest.
        for piece in torch.split(line, _AT_ONCE):
            below = torch.mul(piece, math.log2(math.e), out=room[: len(piece)])
            below.clamp_max_(0.0).exp2_().sub_(1.0)
            # exp(x) - 1 is never less than x.
            torch.maximum(piece, below, out=piece)
        ctx.mark_dirty(values)
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return cast("Tensor", torch.ops.aten.elu_backward(slopes[0], 1.0, 1.0, 1.0, True, found))
