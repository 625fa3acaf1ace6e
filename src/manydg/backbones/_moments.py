"""A batch norm without a pass over its maps: statistics of a convolution's outputs from those of its inputs.

What a convolution gives is linear in the 3x3 patches that it sees. Its mean and variance over a batch follow from the
mean and the second moments of the patches, which depend on no weight: where the maps are the network's input, they are
worked out once for every sample. The norm is then a factor and a bias of the convolution's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

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
