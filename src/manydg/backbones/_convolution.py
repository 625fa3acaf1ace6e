"""3x3 convolutions that a batch norm follows, in the form that the machine at hand does fastest."""

from __future__ import annotations

from typing import Any, cast

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
        # As the maps are: otherwise every step lays the weights and their gradients out anew.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

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


def convolve_in_training(maps: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """The same with a bias, for a training step on a CPU: its backward pass is faster than the library's.

    The bias's gradient is a sum, for which the library goes over the maps slowly; and the gradient of maps of few
    channels that are strided over is worked out with two neighbouring columns as one of twice the channels.
    """
    if torch.is_autocast_enabled("cpu"):
        return functional.conv2d(maps, weight, bias, stride, 1)
    return cast("Tensor", _Convolve.apply(maps, weight, bias, stride))  # type: ignore[no-untyped-call]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.save_for_backward(maps, weight)
        ctx.stride = stride
        return functional.conv2d(maps, weight, bias, stride, 1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (maps, weight), slope, stride = ctx.saved_tensors, slopes[0], ctx.stride
        of_maps, of_weight, of_bias, _ = ctx.needs_input_grad
        columnwise = of_maps and stride == 2 and maps.shape[1] <= FEW_CHANNELS
        found, weights, _ = torch.ops.aten.convolution_backward(
            slope, maps, weight, None, (stride, stride), (1, 1), (1, 1), False, (0, 0), 1,
            [of_maps and not columnwise, of_weight, False],
        )  # fmt: skip
        if columnwise:
            found = _strided_slope(slope, weight, maps.shape[2], maps.shape[3])
        return found, weights, slope.sum(dim=(0, 2, 3)) if of_bias else None, None


def _strided_slope(slope: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """The gradient ``(batch, inputs, height, width)`` of maps that a convolution of stride 2 was done on.

    An output column meets the second column of the pair before its own and both of its own; there is one pair before
    the first.
    """
    rest = height - (2 * slope.shape[2] - 1)
    pairs = functional.conv_transpose2d(slope, _wide(weight, 2, 2), None, (2, 1), (1, 0), (rest, 0))
    return _unfold(pairs, 2)[..., 2 : 2 + width]


def runs_on_cpu(maps: Tensor) -> bool:
    """Whether an operation on the maps is done now and on a CPU, rather than compiled or exported."""
    return maps.device.type == "cpu" and not torch.compiler.is_compiling()


def with_more_inputs(weight: Tensor, inputs: int) -> Tensor:
    """The weights ``(outputs, inputs, 3, 3)`` for maps with more channels than they are for, all zero."""
    return functional.pad(weight, (0, 0, 0, 0, 0, inputs - weight.shape[1]))


def is_alone(norm: nn.BatchNorm2d, maps: Tensor) -> bool:
    """Whether a batch norm may be left out, for what does the same, of a step in training on a CPU."""
    # Processes that share a step put a forward of their own in the norm's place.
    return norm.training and runs_on_cpu(maps) and "forward" not in vars(norm) and norm.momentum is not None


def normalised(maps: Tensor, norms: list[nn.BatchNorm2d]) -> Tensor:
    """What batch norms in training give for maps that have the channels of each, one norm's behind another's.

    Channels behind the last norm's must be zero, and stay so.
    """
    channels = [norm.num_features for norm in norms]
    more = maps.shape[1] - sum(channels)
    parts = [(norm.running_mean, norm.running_var, norm.weight, norm.bias) for norm in norms]
    mean, variance, weight, bias = (
        functional.pad(torch.cat(cast("list[Tensor]", list(part))), (0, more)) for part in zip(*parts, strict=True)
    )
    normal = functional.batch_norm(
        maps, mean, variance, weight, bias, True, cast("float", norms[0].momentum), norms[0].eps
    )
    means, variances = (torch.split(part, [*channels, more]) for part in (mean, variance))
    for norm, own_mean, own_variance in zip(norms, means, variances, strict=False):
        cast("Tensor", norm.num_batches_tracked).add_(1)
        cast("Tensor", norm.running_mean).copy_(own_mean)
        cast("Tensor", norm.running_var).copy_(own_variance)
    return normal


def halves(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last half of the channels, each laid out for itself, channels last."""
    return cast("tuple[Tensor, Tensor]", _Halves.apply(maps))  # type: ignore[no-untyped-call]


class _Halves(torch.autograd.Function):
    """Torch's own backward pass fills, copies and adds maps of all channels for each half."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> tuple[Tensor, ...]:
        return tuple(half.contiguous(memory_format=torch.channels_last) for half in maps.tensor_split(2, dim=1))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return torch.cat(slopes, dim=1)


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
