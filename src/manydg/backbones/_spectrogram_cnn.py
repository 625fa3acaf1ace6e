"""What the two spectrogram networks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Backbone, Inputs
from manydg.backbones._convolution import FEW_CHANNELS, Convolution, convolve, runs_on_cpu, with_more_inputs
from manydg.backbones._dropout import Dropout
from manydg.backbones._spectrogram import LogSpectrogram, SpectrogramScale, check_not_floored, sample_pieces
from manydg.data.columns import take_dense
from manydg.data.dataset import DomainDataset
from manydg.data.schema import TRUST, InputSchema
from manydg.errors import ConfigError

_ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}
_SCALED = "scaled_spectrogram"


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

    def forward(self, maps: Tensor) -> Tensor:
        found, short = self._strided(maps)
        reduced: Tensor = self.dropout(self.pool(self.path[1:](found) + self.shortcut[1](short)))
        return reduced

    def _strided(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """The two strided convolutions of the maps, as one where it pays that the maps are read once.

        That is so in a step compiled for a GPU and, for maps of few channels, in training on a CPU, where both halves
        are then laid out anew: a batch norm that skips every other channel is slow.
        """
        path, shortcut = cast("Convolution", self.path[0]), cast("Convolution", self.shortcut[0])
        on_gpu = maps.is_cuda and torch.compiler.is_compiling()
        on_cpu = self.training and maps.shape[1] <= FEW_CHANNELS and runs_on_cpu(maps)
        if not on_gpu and not on_cpu:
            return path(maps), shortcut(maps)
        weight = with_more_inputs(torch.cat([path.weight, shortcut.weight]), maps.shape[1])
        found, short = convolve(maps, weight, 2).tensor_split(2, dim=1)
        if on_gpu:
            return found, short
        return found.contiguous(memory_format=torch.channels_last), short.contiguous(memory_format=torch.channels_last)


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
            ready: Tensor = self.early(inputs[_SCALED])
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
        """The spectrograms instead of the signals, channels last, where they fit; scaled, if nothing else is to be."""
        signal = dataset.columns.get(self.column)
        needed = 4 * len(dataset) * math.prod(self.shape)
        if not isinstance(signal, Tensor) or signal.ndim != 3 or "spectrogram" in dataset.columns or needed > budget:
            return dataset
        finish: Callable[[Tensor], Tensor]
        name, finish = ("spectrogram", self.spectrogram)
        if TRUST not in dataset.columns:
            name, finish = _SCALED, lambda piece: self._scaled(self.spectrogram(piece), {})
        channels, frequencies, frames = self.shape
        made = torch.empty(len(dataset), frequencies, frames, channels, device=device).permute(0, 3, 1, 2)
        with torch.no_grad():
            for rows in torch.split(torch.arange(len(dataset), device=dataset.device), _ROWS_AT_ONCE[device.type]):
                stored = rows if dataset.rows is None else dataset.rows[rows]
                made[int(rows[0]) : int(rows[-1]) + 1] = finish(take_dense(signal, stored).to(device))
        rest = {other: dataset.column(other).to(device) for other in dataset.columns if other != self.column}
        return replace(
            dataset,
            columns={name: made, **rest},
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
    given = {name: column for name, column in schema.columns.items() if not name.startswith("context")}
    if len(given) == 1:
        ((name, column),) = given.items()
        if not column.nesting and len(column.shape) in (2, 3):
            return name, column.shape
    found = {name: column.shape for name, column in schema.columns.items()}
    raise ConfigError(
        f"a spectrogram network takes a column 'signal' of shape (channels, samples); the dataset has {found}"
    )
