"""Dropout with a mask that costs little on a CPU, where torch's own takes longer than a convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manydg.backbones._convolution import runs_on_cpu

_BYTES, _PLACES = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
_BITS = (_BYTES[:, None] >> _PLACES & 1).to(torch.float32)


class Dropout(nn.Dropout):
    """Sets values to zero with probability ``p`` in training and scales the others by ``1 / (1 - p)``.

    The same as torch's, with other draws: on a CPU a probability of one half takes one random bit for each value.
    """

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p in (0.0, 1.0) or not runs_on_cpu(values):
            return super().forward(values)
        return values * mask_like(values, self.p)


def mask_like(values: Tensor, p: float) -> Tensor:
    """A mask of 0 and ``1 / (1 - p)``, each value drawn on its own, of the shape and memory layout of the values."""
    count = values.numel()
    drawn = _coins(count) * 2.0 if p == 0.5 else (torch.rand(count) >= p) * (1 / (1 - p))
    strides = torch.empty_like(values, device="meta").stride()
    return drawn.to(values.dtype)[:count].as_strided(values.shape, strides)


def _coins(count: int) -> Tensor:
    """At least ``count`` draws of 0 or 1, eight for each byte of random numbers."""
    words = torch.empty(-(-count // 64), dtype=torch.int64).random_(-(2**63), None)
    return _BITS.index_select(0, words.view(torch.uint8).to(torch.int32)).flatten()
