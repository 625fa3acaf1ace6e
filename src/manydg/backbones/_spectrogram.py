"""Log spectrograms, standardised with statistics of training patients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.data.columns import take
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, DataError

TAPERS = ("rectangular", "hann")
_ROWS_FOR_STATISTICS = 20_000
_ROWS_AT_ONCE = 256
_FLOORED_SHARE = 0.9


class LogSpectrogram(nn.Module):
    """Short-time Fourier transform of each channel, as the logarithm of the energy.

    Equal to ``torch.stft``, one-sided, but as a product with a fixed Fourier basis: no complex numbers, and only
    operations that every exporter knows. The energy is divided by that of the taper, so that white noise of variance s
    has energy s in every frequency whatever the window, and is floored before the logarithm.

    Parameters
    ----------
    window, hop : int
        Length of a frame and distance between frames, in samples.
    centred : bool
        Whether the signal is extended by half a window at both ends, by reflection.
    taper : {"rectangular", "hann"}
    floor : float
        Lowest energy, in squared units of the signal (microvolts).
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
        count = 0
        total = torch.zeros_like(self.mean, dtype=torch.float64)
        squares = torch.zeros_like(total)
        for piece in pieces:
            exact = piece.to(total)
            count += exact.shape[0] * exact.shape[-1]
            total += exact.sum(dim=(0, 3)).unsqueeze(-1)
            squares += exact.square().sum(dim=(0, 3)).unsqueeze(-1)
        mean = total / max(count, 1)
        variance = squares / max(count, 1) - mean.square()
        constant = variance <= 1e-9 * mean.square().clamp_min(1.0)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-12).rsqrt()))


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
