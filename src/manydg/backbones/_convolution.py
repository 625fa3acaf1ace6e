"""3x3 convolutions that a batch norm follows, in the form that the machine at hand does fastest."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_FOLDED_CHANNELS = 64
_MOST_COLUMNS = 8
_MOST_INPUTS_FOLDED = 16
FEW_CHANNELS = 8
"""As many channels as a CPU's kernels like to have at least."""


class Convolution(nn.Conv2d):
    """A 3x3 convolution with padding 1, before a batch norm.

    It has a bias, as the paper's networks have, which is counted but never added: the batch norm takes off whatever
    is the same in every place.

    Parameters
    ----------
    inputs, outputs : int
        Channels.
    stride : {1, 2}
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        return convolve(maps, self.weight, self.stride[0])


def convolve(maps: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Maps ``(batch, outputs, height, width)`` of maps ``(batch, inputs, height, width)``, without a bias.

    In a step compiled for a GPU, maps of few channels are folded (see :func:`folded_convolution`).
    """
    if maps.is_cuda and torch.compiler.is_compiling():
        columns = columns_to_fold(weight, maps.shape[3])
        if columns > 1:
            return folded_convolution(maps, weight, stride, columns)
    return functional.conv2d(maps, weight, None, stride, 1)


def runs_on_cpu(maps: Tensor) -> bool:
    """Whether an operation on the maps is done now and on a CPU, rather than compiled or exported."""
    return maps.device.type == "cpu" and not torch.compiler.is_compiling()


def with_more_inputs(weight: Tensor, inputs: int) -> Tensor:
    """The weights ``(outputs, inputs, 3, 3)`` for maps with more channels than they are for, all zero."""
    return functional.pad(weight, (0, 0, 0, 0, 0, inputs - weight.shape[1]))


class Stem(nn.Sequential):
    """A convolution, a batch norm and an ELU.

    In training on a CPU it gives maps of eight channels at least, the last ones zero: kernels for six channels are
    several times slower than those for eight.

    Parameters
    ----------
    inputs, outputs : int
        Channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(Convolution(inputs, outputs), nn.BatchNorm2d(outputs), nn.ELU(inplace=True))

    def forward(self, maps: Tensor) -> Tensor:
        convolution, norm = cast("Convolution", self[0]), cast("nn.BatchNorm2d", self[1])
        more = FEW_CHANNELS - convolution.out_channels
        # Processes that share a step put a forward of their own in the norm's place.
        if more <= 0 or not runs_on_cpu(maps) or not norm.training or "forward" in vars(norm):
            return cast("Tensor", super().forward(maps))  # type: ignore[no-untyped-call]
        weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, 0, 0, more))
        return functional.elu(_normalised(convolve(maps, weight, 1), norm, more), inplace=True)


def _normalised(maps: Tensor, norm: nn.BatchNorm2d, more: int) -> Tensor:
    """What a batch norm in training gives for maps with some more channels, which are zero and stay so."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    mean, variance, weight, bias = (
        functional.pad(part, (0, more)) for part in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    normal = functional.batch_norm(maps, mean, variance, weight, bias, True, norm.momentum, norm.eps)
    norm.running_mean.copy_(mean[: norm.num_features])
    norm.running_var.copy_(variance[: norm.num_features])
    return normal


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
    that there are more products to add is as nothing beside their being done by those units.

    Parameters
    ----------
    maps : Tensor ``(batch, inputs, height, width)``
    weight : Tensor ``(outputs, inputs, 3, 3)``
    stride : {1, 2}
    columns : int
        Even, for a stride of 2.
    """
    width = -(-maps.shape[3] // stride)
    padded = functional.pad(maps, (0, -maps.shape[3] % columns))
    found = functional.conv2d(_fold(padded, columns), _wide(weight, stride, columns), None, (stride, 1), 1)
    return _unfold(found, columns // stride)[..., :width]


def _wide(weight: Tensor, stride: int, columns: int) -> Tensor:
    """The weights between folded columns, ``(columns / stride * outputs, columns * inputs, 3, blocks)``.

    An output column meets three neighbouring ones, in a row of all columns of the block before, its own and, for a
    stride of 1, the one after.
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
