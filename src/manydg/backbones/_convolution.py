"""Convolutional blocks of the spectrogram networks, in the form that the machine at hand computes fastest.

On a CPU the kernels for six channels are several times slower than those for eight, so the stem of the sleep network is
filled up with zero channels in training (18% of its epoch), and a dropout mask takes one random bit for each value. In
a step compiled for a GPU, neighbouring columns of maps of few channels become further channels, which its matrix units
need (more than half of the sleep network's epoch), and the two strided convolutions of a block are one.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_FOLDED_CHANNELS = 64
_MOST_COLUMNS = 8
_MOST_INPUTS_FOLDED = 16
_LEAST_CPU_CHANNELS = 8


class Convolution(nn.Conv2d):
    """A 3x3 convolution with padding 1, before a batch norm.

    It has a bias, as the paper's networks have, which is counted but never added: the batch norm takes off whatever is
    the same at every position. Maps may have more channels than it has inputs; the last ones are ignored.

    - ``inputs``, ``outputs``: Channels.
    - ``stride`` {1, 2}
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1)
        # The layout of the maps: otherwise every step converts the weights and their gradients.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, maps: Tensor) -> Tensor:
        return convolve(maps, self.weight, self.stride[0])


def convolve(maps: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Maps ``(batch, outputs, height, width)`` of maps ``(batch, inputs or more, height, width)``, without a bias.

    In a step compiled for a GPU, maps of few channels are folded (see :func:`folded_convolution`).
    """
    more = maps.shape[1] - weight.shape[1]
    weight = functional.pad(weight, (0, 0, 0, 0, 0, more)) if more else weight
    if compiled_for_gpu(maps):
        columns = columns_to_fold(weight, maps.shape[3])
        if columns > 1:
            return folded_convolution(maps, weight, stride, columns)
    return functional.conv2d(maps, weight, None, stride, 1)


def compiled_for_gpu(maps: Tensor) -> bool:
    """Whether an operation on the maps is being compiled for a GPU."""
    return maps.is_cuda and torch.compiler.is_compiling()


def runs_on_cpu(maps: Tensor) -> bool:
    """Whether an operation on the maps is done now and on a CPU, rather than compiled or exported."""
    return maps.device.type == "cpu" and not torch.compiler.is_compiling()


class BatchNorm(nn.BatchNorm2d):
    """Torch's batch norm, which also takes maps with further channels after its own that are zero and stay zero."""

    def forward(self, maps: Tensor) -> Tensor:
        more = maps.shape[1] - self.num_features
        if not more:
            return super().forward(maps)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        mean, variance, weight, bias = (
            functional.pad(part, (0, more)) for part in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        momentum = cast("float", self.momentum)
        normalised = functional.batch_norm(maps, mean, variance, weight, bias, self.training, momentum, self.eps)
        if self.training:
            self.num_batches_tracked.add_(1)
            self.running_mean.copy_(mean[: self.num_features])
            self.running_var.copy_(variance[: self.num_features])
        return normalised


class Stem(nn.Sequential):
    """A convolution, a batch norm and an ELU.

    In training on a CPU it gives maps of eight channels at least, the last ones zero.

    - ``inputs``, ``outputs``: Channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(Convolution(inputs, outputs), BatchNorm(outputs), nn.ELU(inplace=True))

    def forward(self, maps: Tensor) -> Tensor:
        """Maps of the same height and width."""
        convolution, norm = cast("Convolution", self[0]), self[1]
        more = _LEAST_CPU_CHANNELS - convolution.out_channels
        # A norm that several processes share takes its own channels alone.
        if more <= 0 or not (self.training and runs_on_cpu(maps) and isinstance(norm, BatchNorm)):
            return cast("Tensor", super().forward(maps))  # type: ignore[no-untyped-call]
        weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, 0, 0, more))
        return functional.elu(norm(convolve(maps, weight, 1)), inplace=True)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a strided one, their sum pooled and dropped out.

    - ``inputs``, ``outputs``: Channels; height and width are halved by the stride, then again by the pool if there is
      one.
    """

    def __init__(self, inputs: int, outputs: int, pool: nn.Module, dropout: float) -> None:
        super().__init__()
        self.path = nn.Sequential(
            Convolution(inputs, outputs, stride=2),
            BatchNorm(outputs),
            nn.ELU(inplace=True),
            Convolution(outputs, outputs),
            BatchNorm(outputs),
        )
        self.shortcut = nn.Sequential(Convolution(inputs, outputs, stride=2), BatchNorm(outputs))
        self.pool, self.dropout = pool, Dropout(dropout)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps ``(batch, outputs, ...)`` of maps ``(batch, inputs, height, width)``."""
        main, shortcut = self._strided(maps)
        total = self.path[1:](main).add_(self.shortcut[1](shortcut))
        reduced: Tensor = self.dropout(self.pool(total))
        return reduced

    def _strided(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """The two strided convolutions of the maps, as one where they are compiled for a GPU."""
        main, shortcut = cast("Convolution", self.path[0]), cast("Convolution", self.shortcut[0])
        if not compiled_for_gpu(maps):
            return main(maps), shortcut(maps)
        both = convolve(maps, torch.cat([main.weight, shortcut.weight]), 2)
        first, second = both.tensor_split(2, dim=1)
        return first, second


def columns_to_fold(weight: Tensor, width: int) -> int:
    """How many neighbouring columns to take as channels of one: a power of two, or 1 where it would not pay."""
    inputs = weight.shape[1]
    columns = 1
    while inputs <= _MOST_INPUTS_FOLDED and columns < _MOST_COLUMNS and 2 * columns * inputs <= _FOLDED_CHANNELS:
        columns *= 2
    return columns if width >= 2 * columns else 1


def folded_convolution(maps: Tensor, weight: Tensor, stride: int, columns: int) -> Tensor:
    """The same convolution with some neighbouring columns as channels of one column.

    A GPU's matrix units want tens of channels, where the sleep network has two to sixteen. With the channels last in
    memory, folding columns into channels is only another view; the weights are laid out with zeros between them, and
    the additional products cost nothing beside their being computed by those units.

    - ``maps``: Tensor ``(batch, inputs, height, width)``
    - ``weight``: Tensor ``(outputs, inputs, 3, 3)``
    - ``stride`` {1, 2}
    - ``columns``: Even, for a stride of 2.
    """
    width = -(-maps.shape[3] // stride)
    padded = functional.pad(maps, (0, -maps.shape[3] % columns))
    folded = functional.conv2d(_fold(padded, columns), _folded_weight(weight, stride, columns), None, (stride, 1), 1)
    return _unfold(folded, columns // stride)[..., :width]


def _folded_weight(weight: Tensor, stride: int, columns: int) -> Tensor:
    """The weights between folded columns, ``(columns / stride * outputs, columns * inputs, 3, blocks)``.

    An output column meets three neighbouring ones among the columns of the block before, its own and, for a stride of
    1, the one after.
    """
    outputs, inputs = weight.shape[:2]
    blocks = 4 - stride
    before = [columns - 1 + stride * column for column in range(columns // stride)]
    rows = torch.stack([functional.pad(weight, (first, blocks * columns - 3 - first)) for first in before])
    met = rows.reshape(-1, outputs, inputs, 3, blocks, columns).permute(0, 1, 5, 2, 3, 4)
    return met.reshape(-1, columns * inputs, 3, blocks)


def _fold(maps: Tensor, columns: int) -> Tensor:
    batch, channels, height, width = maps.shape
    last = maps.permute(0, 2, 3, 1).reshape(batch, height, width // columns, columns * channels)
    return last.permute(0, 3, 1, 2)


def _unfold(maps: Tensor, columns: int) -> Tensor:
    batch, channels, height, width = maps.shape
    last = maps.permute(0, 2, 3, 1).reshape(batch, height, width * columns, channels // columns)
    return last.permute(0, 3, 1, 2)


_BYTES, _BIT_POSITIONS = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
_BITS = (_BYTES[:, None] >> _BIT_POSITIONS & 1).to(torch.float32)


class Dropout(nn.Dropout):
    """Sets values to zero with probability ``p`` in training and scales the others by ``1 / (1 - p)``.

    The same as torch's, whose mask takes longer than a convolution on a CPU: there a probability of one half takes one
    random bit for each value.
    """

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p in (0.0, 1.0) or not runs_on_cpu(values):
            return super().forward(values)
        return values * mask_like(values, self.p)


def mask_like(values: Tensor, p: float) -> Tensor:
    """A mask of 0 and ``1 / (1 - p)``, independent for each value, of the shape and memory layout of the values."""
    count = values.numel()
    mask = _random_bits(count) * 2.0 if p == 0.5 else (torch.rand(count) >= p) * (1 / (1 - p))
    strides = torch.empty_like(values, device="meta").stride()
    return mask.to(values.dtype)[:count].as_strided(values.shape, strides)


def _random_bits(count: int) -> Tensor:
    """At least ``count`` random bits as 0.0 or 1.0, eight for each byte of random numbers."""
    words = torch.empty(-(-count // 64), dtype=torch.int64).random_(-(2**63), None)
    return _BITS.index_select(0, words.view(torch.uint8).to(torch.int32)).flatten()
