"""What the two spectrogram networks share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.backbones._backbone import Backbone, Inputs
from manydg.backbones._convolution import (
    FEW_CHANNELS,
    Convolution,
    Dropout,
    convolve,
    convolve_in_training,
    elu_,
    halves,
    is_alone,
    normalised,
    normalised_convolutions,
    number_of_moments,
    patch_moments,
    with_more_inputs,
)
from manydg.backbones._spectrogram import LogSpectrogram, SpectrogramScale, check_not_floored, sample_pieces
from manydg.data.columns import Column, take_dense
from manydg.data.dataset import DomainDataset
from manydg.data.schema import TRUST, InputSchema
from manydg.errors import ConfigError

_ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}
_SCALED, _MOMENTS = "scaled_spectrogram", "patch_moments"
_MOST_MOMENTS = 0.5


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a strided one, their sum pooled and dropped out.

    Parameters
    ----------
    inputs, outputs : int
        Channels; height and width are halved by the stride, then again by the pool if there is one.
    pool : nn.Module
    dropout : float
    """

    def __init__(self, inputs: int, outputs: int, pool: nn.Module, dropout: float) -> None:
        super().__init__()
        self.path = nn.Sequential(
            Convolution(inputs, outputs, stride=2),
            nn.BatchNorm2d(outputs),
            nn.ELU(inplace=True),
            Convolution(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(Convolution(inputs, outputs, stride=2), nn.BatchNorm2d(outputs))
        self.pool, self.dropout = pool, Dropout(dropout)

    def forward(self, maps: Tensor, moments: Tensor | None = None) -> Tensor:
        """Maps ``(batch, outputs, ...)``.

        Parameters
        ----------
        maps : Tensor ``(batch, inputs, height, width)``
        moments : Tensor ``(batch, number_of_moments(inputs))``, optional
            Of the maps, with a stride of 2; the first norms then need no pass over what the convolutions give.
        """
        found, short = self._strided(maps, moments)
        total = self.path[3:](elu_(found)).add_(short)
        reduced: Tensor = self.dropout(self.pool(total))
        return reduced

    def _strided(self, maps: Tensor, moments: Tensor | None) -> tuple[Tensor, Tensor]:
        """The two strided convolutions of the maps, normalised.

        They are done as one where it pays that the maps are read once: in a step compiled for a GPU and, for maps of
        few channels, in training on a CPU.
        """
        path, shortcut = cast("Convolution", self.path[0]), cast("Convolution", self.shortcut[0])
        norm, short_norm = cast("nn.BatchNorm2d", self.path[1]), cast("nn.BatchNorm2d", self.shortcut[1])
        alone = is_alone(norm, maps)
        if alone and moments is not None:
            places = -(-maps.shape[2] // 2) * -(-maps.shape[3] // 2)
            known = normalised_convolutions([(path.weight, norm), (shortcut.weight, short_norm)], moments, places)
            found, short = (convolve_in_training(maps, weight, bias, 2) for weight, bias in known)
            return found, short
        on_gpu = maps.is_cuda and torch.compiler.is_compiling()
        if not on_gpu and not (alone and maps.shape[1] <= FEW_CHANNELS):
            return norm(path(maps)), short_norm(shortcut(maps))
        weight = with_more_inputs(torch.cat([path.weight, shortcut.weight]), maps.shape[1])
        if not on_gpu:
            return halves(normalised(convolve_in_training(maps, weight, None, 2), [norm, short_norm]))
        found, short = convolve(maps, weight, 2).tensor_split(2, dim=1)
        return norm(found), short_norm(short)


class Stages(nn.Sequential):
    """One stage after another, the first of which may be told the moments of its input."""

    def forward(self, maps: Tensor, moments: Tensor | None = None) -> Tensor:
        for number, stage in enumerate(self):
            maps = stage(maps) if number else stage(maps, moments)
        return maps


class SpectrogramCNN(Backbone):
    """Log spectrogram, standardised, through convolutions in two stages.

    The input is the column ``signal`` ``(rows, channels, samples)`` or, where the spectrograms were made beforehand by
    :meth:`spectrogram`, the column ``spectrogram`` ``(rows, channels, frequencies, frames)``, which is used as it is. A
    dataset with a single column of such a shape may call it what it likes. ``forward`` is
    ``features_of(maps(inputs))``, for methods that work on feature maps between the two.

    Parameters
    ----------
    schema : InputSchema
    transform : LogSpectrogram
    """

    early: nn.Module
    late: nn.Module
    first_stride: int
    """Stride of the first convolutions."""
    compiles: bool = True
    compiled_precision: str = "bf16"

    def __init__(self, schema: InputSchema, transform: LogSpectrogram) -> None:
        super().__init__()
        self.column, shape = _input_of(schema)
        self.transform = transform
        if len(shape) == 2:
            shape = (shape[0], transform.frequencies, transform.frames(shape[1]))
        self.shape = shape
        self.scale = SpectrogramScale(shape[0], shape[1])

    def assemble(self, early: nn.Module, late: nn.Module) -> None:
        """Set the two stages and find the width of the features, which is that of the last maps laid flat."""
        self.early, self.late = early, late
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with torch.no_grad():
                width = self.features_of(early(torch.zeros(1, *self.shape))).shape[1]
        except RuntimeError:
            width = 0
        for module, mode in modes:
            module.training = mode
        if width == 0:
            raise ConfigError(
                f"{type(self).__name__} needs a larger spectrogram than {self.shape[1]} frequencies by "
                f"{self.shape[2]} frames: give longer signals, or a shorter 'window' or 'hop'"
            )
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        return self.features_of(self.maps(inputs))

    def maps(self, inputs: Inputs) -> Tensor:
        """Feature maps before the last block, ``(batch, channels, height, width)``."""
        if _SCALED in inputs:
            ready: Tensor = self.early(inputs[_SCALED], inputs.get(_MOMENTS))
            return ready
        given = inputs["spectrogram"] if "spectrogram" in inputs else inputs[self.column]
        if not isinstance(given, Tensor):
            raise ConfigError(f"{type(self).__name__} takes dense signals; '{self.column}' is ragged")
        maps: Tensor = self.early(self._scaled(self.spectrogram(given) if given.ndim == 3 else given, inputs))
        return maps

    def _scaled(self, spectrogram: Tensor, inputs: Inputs) -> Tensor:
        """Standardised by training patients and, as far as its context is known, by what is usual for the patient."""
        scaled: Tensor = self.scale(spectrogram)
        if TRUST not in inputs:
            return scaled
        mean, scale, weight = (cast("Tensor", inputs[f"context_{name}"]) for name in ("mean", "scale", "weight"))
        own = (spectrogram - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        return torch.lerp(scaled, own, weight[:, :, None, None])

    def features_of(self, maps: Tensor) -> Tensor:
        """Features ``(batch, output_size)`` of feature maps."""
        features: Tensor = self.late(maps).flatten(1)
        return features

    def spectrogram(self, signal: Tensor) -> Tensor:
        """Log energies ``(batch, channels, frequencies, frames)``; they depend on no training patient."""
        found: Tensor = self.transform(signal)
        return found

    def fit_inputs(self, dataset: DomainDataset) -> None:
        column = "spectrogram" if "spectrogram" in dataset.columns else self.column
        self.scale.fit(self._spectrograms(sample_pieces(dataset, column)))

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        """The spectrograms instead of the signals, channels last, where they fit; scaled, if nothing else is to be.

        Scaled ones come with the moments of their patches on a CPU, where these fit too and are no more than half of
        them.
        """
        signal = dataset.columns.get(self.column)
        values, room = math.prod(self.shape), budget // (4 * max(1, len(dataset)))
        if not isinstance(signal, Tensor) or signal.ndim != 3 or "spectrogram" in dataset.columns or values > room:
            return dataset
        scaled, numbers = TRUST not in dataset.columns, number_of_moments(self.shape[0])
        told = scaled and device.type == "cpu" and numbers <= min(room - values, _MOST_MOMENTS * values)
        channels, frequencies, frames = self.shape
        made = torch.empty(len(dataset), frequencies, frames, channels, device=device).permute(0, 3, 1, 2)
        moments = torch.empty(len(dataset), numbers if told else 0)
        with torch.no_grad():
            for rows in torch.split(torch.arange(len(dataset), device=dataset.device), _ROWS_AT_ONCE[device.type]):
                stored = rows if dataset.rows is None else dataset.rows[rows]
                piece = self.spectrogram(take_dense(signal, stored).to(device))
                place = slice(int(rows[0]), int(rows[-1]) + 1)
                made[place] = self._scaled(piece, {}) if scaled else piece
                if told:
                    moments[place] = patch_moments(made[place], self.first_stride)
        columns: dict[str, Column] = {_SCALED if scaled else "spectrogram": made}
        columns |= {_MOMENTS: moments} if told else {}
        rest = {other: dataset.column(other).to(device) for other in dataset.columns if other != self.column}
        return replace(
            dataset,
            columns={**columns, **rest},
            targets=dataset.targets.to(device),
            domains=dataset.domains.to(device),
            times=None if dataset.times is None else dataset.times.to(device),
            rows=None,
        )

    def _spectrograms(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        for place, piece in enumerate(pieces):
            given = piece.to(self.scale.mean.device)
            found = self.spectrogram(given) if given.ndim == 3 else given
            if place == 0:
                check_not_floored(found, self.transform.floor)
            yield found


def _input_of(schema: InputSchema) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the column that holds the signals."""
    for name, dimensions in (("spectrogram", 3), ("signal", 2)):
        column = schema.columns.get(name)
        if column is not None and not column.nesting and len(column.shape) == dimensions:
            return name, column.shape
    given = schema.without_context().columns
    if len(given) == 1:
        ((name, column),) = given.items()
        if not column.nesting and len(column.shape) in (2, 3):
            return name, column.shape
    found = {name: column.shape for name, column in schema.columns.items()}
    raise ConfigError(
        f"a spectrogram network takes a column 'signal' of shape (channels, samples); the dataset has {found}"
    )


# The convolution before the first block.


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
