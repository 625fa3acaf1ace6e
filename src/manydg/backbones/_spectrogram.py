"""Networks on log spectrograms: the transform, its scaling by training patients, and convolutions in two stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.backbones import Backbone, Inputs, RunningMoments
from manydg.data.columns import take, take_dense
from manydg.data.dataset import TRUST, DomainDataset, InputSchema
from manydg.errors import ConfigError, DataError

TAPERS = ("rectangular", "hann")
_SCALED = "scaled_spectrogram"
_ROWS_FOR_STATISTICS = 20_000
_ROWS_AT_ONCE = 256
_ROWS_PRECOMPUTED_AT_ONCE = {"cpu": 64, "cuda": 1024}
_FLOORED_SHARE = 0.9


class LogSpectrogram(nn.Module):
    """Short-time Fourier transform of each channel, as the logarithm of the energy.

    Equal to ``torch.stft``, one-sided, but as a product with a fixed Fourier basis: no complex numbers, and only
    operations that every exporter knows. The energy is divided by that of the taper, so that white noise of variance s
    has energy s in every frequency whatever the window, and is floored before the logarithm.

    - ``window``, ``hop``: Length of a frame and distance between frames, in samples.
    - ``centred``: Whether the signal is extended by half a window at both ends, by reflection.
    - ``taper`` {"rectangular", "hann"}
    - ``floor``: Lowest energy, in squared units of the signal (microvolts).
    """

    basis: Tensor

    def __init__(self, window: int, hop: int, centred: bool, taper: str, floor: float) -> None:
        super().__init__()
        if taper not in TAPERS:
            raise ConfigError(f"unknown taper '{taper}': known are {', '.join(TAPERS)}")
        if window < 2 or hop < 1 or floor <= 0:
            raise ConfigError(
                f"a spectrogram needs a window of 2 or more, a hop of 1 or more and a floor above 0; "
                f"got {window}, {hop} and {floor}"
            )
        self.window, self.hop, self.centred, self.floor = window, hop, centred, floor
        self.register_buffer("basis", _fourier_basis(window, taper), persistent=False)

    @property
    def frequencies(self) -> int:
        return self.window // 2 + 1

    def frames(self, samples: int) -> int:
        """Number of frames of a signal of this many samples."""
        half = self.window // 2
        extended = samples if not self.centred else samples + 2 * half if samples > half else 0
        return max(0, (extended - self.window) // self.hop + 1)

    def forward(self, signal: Tensor) -> Tensor:
        """Log energies ``(batch, channels, frequencies, frames)`` of signals ``(batch, channels, samples)``."""
        # Half precision would drown weak frequencies in the rounding error of strong ones.
        with torch.autocast(signal.device.type, enabled=False):
            signal = signal.to(self.basis.dtype)
            if self.centred:
                half = self.window // 2
                signal = functional.pad(signal, (half, half), mode="reflect")
            parts = signal.unfold(-1, self.window, self.hop) @ self.basis
            real, imaginary = parts.square().chunk(2, dim=-1)
            return (real + imaginary).clamp_min(self.floor).log().transpose(-1, -2)


def _fourier_basis(window: int, taper: str) -> Tensor:
    """Cosines and sines of the one-sided frequencies times the taper, ``(window, 2 * frequencies)``."""
    time = torch.arange(window, dtype=torch.float64)
    angles = 2 * math.pi / window * time[:, None] * torch.arange(window // 2 + 1, dtype=torch.float64)
    shape = torch.ones_like(time) if taper == "rectangular" else 0.5 - 0.5 * torch.cos(2 * math.pi * time / window)
    weights = shape / shape.square().sum().sqrt()
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * weights[:, None]).to(torch.float32)


class SpectrogramScale(nn.Module):
    """Standardises a spectrogram per channel and frequency, with mean and deviation over training samples and time.

    A channel and frequency that never changes there (a filtered-out band, a dead electrode) is set to zero.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, frequencies: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels, frequencies, 1))
        self.register_buffer("scale", torch.ones(channels, frequencies, 1))

    def forward(self, spectrogram: Tensor) -> Tensor:
        return (spectrogram - self.mean) * self.scale

    def fit(self, pieces: Iterator[Tensor]) -> None:
        """Learn from spectrograms that come in pieces, ``(rows, channels, frequencies, frames)`` each."""
        moments = RunningMoments(self.mean)
        for piece in pieces:
            variance, mean = torch.var_mean(piece.to(moments.mean), dim=(0, 3), correction=0)
            count = torch.full_like(mean, piece.shape[0] * piece.shape[-1])
            moments.add(count.unsqueeze(-1), mean.unsqueeze(-1), (count * variance).unsqueeze(-1))
        mean, variance = moments.mean, moments.variance
        constant = variance <= 1e-9 * mean.square().clamp_min(1.0)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-12).rsqrt()))


class SpectrogramCNN(Backbone):
    """Log spectrogram, standardised, through convolutions in two stages.

    The input is the column ``signal`` ``(rows, channels, samples)`` or, where the spectrograms were made beforehand by
    :meth:`spectrogram`, the column ``spectrogram`` ``(rows, channels, frequencies, frames)``, which is used as it is. A
    dataset with a single column of such a shape may call it what it likes. ``forward`` is
    ``features_of(maps(inputs))``, for methods that work on feature maps between the two.
    """

    early: nn.Module
    late: nn.Module
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
            early: Tensor = self.early(inputs[_SCALED])
            return early
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
        energies: Tensor = self.transform(signal)
        return energies

    def fit_inputs(self, dataset: DomainDataset) -> None:
        column = "spectrogram" if "spectrogram" in dataset.columns else self.column
        # Where the data are: thousands of spectrograms of data on a GPU took 14 s on the CPU.
        device = self.scale.mean.device
        self.to(dataset.device)
        self.scale.fit(self._spectrograms(sample_pieces(dataset, column)))
        self.to(device)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        """The spectrograms instead of the signals, channels last, where they fit; scaled, unless a context is."""
        signal, values = dataset.columns.get(self.column), math.prod(self.shape)
        fits = 4 * values * len(dataset) <= budget
        if not isinstance(signal, Tensor) or signal.ndim != 3 or "spectrogram" in dataset.columns or not fits:
            return dataset
        scaled = TRUST not in dataset.columns
        channels, frequencies, frames = self.shape
        spectrograms = torch.empty(len(dataset), frequencies, frames, channels, device=device).permute(0, 3, 1, 2)
        positions = torch.arange(len(dataset), device=dataset.device)
        with torch.no_grad():
            for rows in torch.split(positions, _ROWS_PRECOMPUTED_AT_ONCE[device.type]):
                stored = rows if dataset.rows is None else dataset.rows[rows]
                piece = self.spectrogram(take_dense(signal, stored).to(device))
                spectrograms[int(rows[0]) : int(rows[-1]) + 1] = self._scaled(piece, {}) if scaled else piece
        rest = {other: dataset.column(other).to(device) for other in dataset.columns if other != self.column}
        return replace(
            dataset,
            columns={_SCALED if scaled else "spectrogram": spectrograms, **rest},
            targets=dataset.targets.to(device),
            domains=dataset.domains.to(device),
            times=None if dataset.times is None else dataset.times.to(device),
            rows=None,
        )

    def _spectrograms(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        for number, piece in enumerate(pieces):
            given = piece.to(self.scale.mean.device)
            spectrogram = self.spectrogram(given) if given.ndim == 3 else given
            if number == 0:
                check_not_floored(spectrogram, self.transform.floor)
            yield spectrogram


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
    shapes = {name: column.shape for name, column in schema.columns.items()}
    raise ConfigError(
        f"a spectrogram network takes a column 'signal' of shape (channels, samples); the dataset has {shapes}"
    )


def sample_pieces(dataset: DomainDataset, column: str) -> Iterator[Tensor]:
    """Rows of a dense column spread evenly over a dataset, at most 20,000, a few hundred at a time."""
    count = len(dataset)
    used = min(count, _ROWS_FOR_STATISTICS)
    positions = torch.arange(used, device=dataset.device) * count // max(used, 1)
    stored = positions if dataset.rows is None else dataset.rows[positions]
    for rows in torch.split(stored, _ROWS_AT_ONCE):
        piece = take(dataset.columns[column], rows)
        if isinstance(piece, Tensor):
            yield piece


def check_not_floored(spectrogram: Tensor, floor: float) -> None:
    """Raise where nearly all energy lies below the floor: the signal is in volts, or flat."""
    share = float((spectrogram <= math.log(floor) + 1e-6).to(torch.float32).mean())
    if share > _FLOORED_SHARE:
        raise DataError(
            f"{share:.0%} of the signal's energy lies below the floor of {floor:g} square microvolts: give the signal "
            "in microvolts (volts times 1,000,000), or set the backbone's option 'floor' to suit its unit"
        )
