"""Context of signals: what is usual for the patient at each channel and frequency."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manydg.data._timeline import Timeline, running
from manydg.data.schema import TRUST

Spectrum = Callable[[Tensor], Tensor]
_ROWS_AT_ONCE = 256
_COLUMNS_AT_ONCE = 64


def spectral_context(
    signal: Tensor, timeline: Timeline, mode: str, strength: float, spectrum: Spectrum
) -> dict[str, Tensor]:
    """Mean and scale of the patient's log spectrogram per channel and frequency, and how far to trust them.

    Parameters
    ----------
    signal : Tensor ``(rows, channels, samples)``, or spectrograms ``(rows, channels, frequencies, frames)``
    spectrum : callable
        From signals to log spectrograms.

    Returns
    -------
    dict of str to Tensor
        ``context_mean`` and ``context_scale`` ``(rows, channels, frequencies)``, the latter one over the standard
        deviation, and ``context_weight`` ``(rows, 1)``; all are 0 where nothing is known.
    """
    firsts, seconds, shape = _moments(signal, spectrum)
    mean, square = (_usual(moment, timeline, mode) for moment in (firsts, seconds))
    variance = square - mean.square()
    varies = variance > 1e-9 * square.clamp_min(1.0)
    weight = timeline.trust(mode, strength)
    scale = torch.where(varies, variance.clamp_min(1e-12).rsqrt(), 0.0)
    known = weight > 0
    return {
        "context_mean": torch.where(known, mean, 0.0).to(torch.float32).reshape(shape),
        "context_scale": torch.where(known, scale, 0.0).to(torch.float32).reshape(shape),
        TRUST: weight,
    }


def usual_level(signal: Tensor, spectrum: Spectrum) -> Tensor:
    """Mean over time of each sample's log spectrogram, ``(rows, channels * frequencies)``."""
    return _moments(signal, spectrum)[0]


def _moments(signal: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Mean and mean square over the frames of each sample's spectrogram, ``(rows, channels * frequencies)`` each."""
    firsts, seconds, shape = [], [], signal.shape[1:3]
    with torch.no_grad():
        for piece in torch.split(signal, _ROWS_AT_ONCE):
            found = spectrum(piece) if piece.ndim == 3 else piece
            shape = found.shape[1:3]
            exact = found.to(torch.float64)
            firsts.append(exact.mean(dim=-1).flatten(1))
            seconds.append(exact.square().mean(dim=-1).flatten(1))
    return torch.cat(firsts), torch.cat(seconds), (len(signal), *shape)


def _usual(moments: Tensor, timeline: Timeline, mode: str) -> Tensor:
    """Mean of a moment over the samples in each row's context, itself included, in the order of the dataset."""
    found = torch.empty_like(moments)
    for start in range(0, moments.shape[1], _COLUMNS_AT_ONCE):
        own = moments[:, start : start + _COLUMNS_AT_ONCE][timeline.order]
        total = running(own, timeline.patient)
        if mode == "offline":
            total, count = total[timeline.last], timeline.last - timeline.patient + 1
        else:
            total, count = timeline.earlier(total, timeline.patient) + own, timeline.before - timeline.patient + 2
        piece = torch.empty_like(own)
        piece[timeline.order] = total / count.unsqueeze(-1)
        found[:, start : start + _COLUMNS_AT_ONCE] = piece
    return found
