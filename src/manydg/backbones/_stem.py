"""The convolution before the first block."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from manydg.backbones._convolution import (
    FEW_CHANNELS,
    Convolution,
    convolve,
    convolve_in_training,
    is_alone,
    normalised,
)
from manydg.backbones._elu import elu_
from manydg.backbones._moments import normalised_convolutions


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

    def forward(self, maps: Tensor, moments: Tensor | None = None) -> Tensor:
        """Maps of the same height and width.

        Parameters
        ----------
        maps : Tensor ``(batch, inputs, height, width)``
        moments : Tensor ``(batch, number_of_moments(inputs))``, optional
            Of the maps, with a stride of 1; the norm then needs no pass over what the convolution gives.
        """
        convolution, norm = cast("Convolution", self[0]), cast("nn.BatchNorm2d", self[1])
        if not is_alone(norm, maps):
            return cast("Tensor", super().forward(maps))  # type: ignore[no-untyped-call]
        more = max(0, FEW_CHANNELS - convolution.out_channels)
        if moments is None:
            weight = functional.pad(convolution.weight, (0, 0, 0, 0, 0, 0, 0, more))
            return elu_(normalised(convolve(maps, weight, 1), [norm]))
        places = maps.shape[2] * maps.shape[3]
        ((weight, bias),) = normalised_convolutions([(convolution.weight, norm)], moments, places)
        weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, more))
        return elu_(convolve_in_training(maps, weight, functional.pad(bias, (0, more)), 1))
