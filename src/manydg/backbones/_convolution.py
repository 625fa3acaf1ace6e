"""3x3 convolutions that a batch norm follows, in the form that the machine at hand does fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
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


# Dropout with a mask that costs little on a CPU, where torch's own takes longer than a convolution.


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


# The exponential linear unit in half the time that torch's own takes on a CPU.


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


# A batch norm without a pass over its maps: statistics of a convolution's outputs from those of its inputs.
#
# What a convolution gives is linear in the 3x3 patches that it sees. Its mean and variance over a batch follow from
# the mean and the second moments of the patches, which depend on no weight: where the maps are the network's input,
# they are worked out once for every sample. The norm is then a factor and a bias of the convolution's own.


_ROWS_AT_ONCE = 4


def number_of_moments(channels: int) -> int:
    """How many numbers describe the 3x3 patches of maps with some channels."""
    size = 9 * channels + 1
    return size * (size + 1) // 2


def patch_moments(maps: Tensor, stride: int) -> Tensor:
    """Mean products of each two of the values of a 3x3 patch and 1, over the places of each sample.

    Parameters
    ----------
    maps : Tensor ``(rows, channels, height, width)``
    stride : {1, 2}

    Returns
    -------
    Tensor ``(rows, number_of_moments(channels))``
        The upper triangle of a symmetric matrix, row by row.
    """
    size = 9 * maps.shape[1] + 1
    first, second = torch.triu_indices(size, size, device=maps.device)
    found = maps.new_empty(len(maps), len(first))
    for start in range(0, len(maps), _ROWS_AT_ONCE):
        patches = _patches(maps[start : start + _ROWS_AT_ONCE], stride)
        products = (patches @ patches.mT).flatten(1) / patches.shape[2]
        found[start : start + _ROWS_AT_ONCE] = products.index_select(1, size * first + second)
    return found


def _patches(maps: Tensor, stride: int) -> Tensor:
    """The values of every 3x3 patch and 1, ``(rows, 9 * channels + 1, places)``, in the order of a weight's."""
    rows, channels, height, width = maps.shape
    down, across = -(-height // stride), -(-width // stride)
    padded = functional.pad(maps.contiguous(), (1, 1, 1, 1))
    found = maps.new_ones(rows, 9 * channels + 1, down, across)
    for tap in range(9):
        seen = padded[:, :, tap // 3 :: stride, tap % 3 :: stride]
        found[:, tap:-1:9] = seen[:, :, :down, :across]
    return found.flatten(2)


def normalised_convolutions(
    parts: Sequence[tuple[Tensor, nn.BatchNorm2d]], moments: Tensor, places: int
) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of convolutions that do what others with a batch norm in training behind them do.

    The norms' running statistics are updated as they would do it.

    Parameters
    ----------
    parts : sequence of weights ``(outputs, inputs, 3, 3)`` and nn.BatchNorm2d
        The convolutions of the same maps.
    moments : Tensor ``(rows, number_of_moments(inputs))``
    places : int
        Number of places of a map that a convolution gives.

    Returns
    -------
    list of weights ``(outputs, inputs, 3, 3)`` and biases ``(outputs,)``
    """
    # In double precision, which costs nothing for so few numbers: a variance is a difference.
    products = moments.mean(dim=0).double()[_place_in_triangle(9 * parts[0][0].shape[1] + 1)]
    usual = products[-1, :-1]
    spread = products[:-1, :-1] - usual.outer(usual)
    count = len(moments) * places
    found = []
    for weight, norm in parts:
        taps = weight.flatten(1).double()
        mean, variance = taps @ usual, ((taps @ spread) * taps).sum(dim=1).clamp_min(0.0)
        factor = norm.weight * (variance + norm.eps).rsqrt()
        bias = norm.bias - mean * factor
        _track(norm, mean.detach(), variance.detach() * (count / max(1, count - 1)))
        found.append(((weight * factor[:, None, None, None]).to(weight.dtype), bias.to(weight.dtype)))
    return found


def _track(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), norm.momentum)


@cache
def _place_in_triangle(size: int) -> Tensor:
    """Where the entries of a symmetric matrix stand in its upper triangle, ``(size, size)``."""
    first, second = torch.triu_indices(size, size, device="cpu")
    places = torch.empty(size, size, dtype=torch.int64, device="cpu")
    places[first, second] = places[second, first] = torch.arange(len(first), device="cpu")
    return places
