"""Signals from the paper's two-stage generative model: a patient's factor z first, then samples given z and the label.

A label decides a spectrum; a patient bends every spectrum in the same way (tilt, shift of the rhythms, gain of each
channel, noise floor, a humming device) and has a taste for some labels. The factors are known, so that a method's
claims about them can be checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import fft

from manydg.errors import ConfigError, StorageError
from manydg.files import Json, new_folder
from manydg.sources._preparing import mark_synthetic

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PatientFactors:
    """What is particular to a patient and has nothing to do with the label, and the patient's label preferences."""

    tilt: float
    shift: float
    noise: float
    hum_frequency: float
    hum: float
    gains: tuple[float, ...]
    preferences: tuple[float, ...]

    def to_json(self) -> dict[str, Json]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def draw_factors(
    rng: np.random.Generator, channels: int, labels: int, hum_range: tuple[float, float]
) -> PatientFactors:
    """One patient's factors, from their prior."""
    return PatientFactors(
        tilt=float(rng.normal(0.0, 0.25)),
        shift=float(np.exp(rng.normal(0.0, 0.06))),
        noise=float(np.exp(rng.normal(0.5, 0.5))),
        hum_frequency=float(rng.uniform(*hum_range)),
        hum=float(np.exp(rng.normal(1.5, 0.7))),
        gains=tuple(float(gain) for gain in np.exp(rng.normal(0.0, 0.35, channels))),
        preferences=tuple(float(value) for value in rng.normal(0.0, 0.5, labels)),
    )


def spectra(
    factors: PatientFactors,
    background: npt.NDArray[np.float64],
    rhythms: npt.NDArray[np.float64],
    centres: tuple[tuple[float, float], ...],
    samples: int,
    rate: float,
) -> Array:
    """A patient's amplitude spectrum for each label.

    Parameters
    ----------
    factors : PatientFactors
    background : array ``(labels, channels)``
        Strength of the falling background.
    rhythms : array ``(labels, channels, bands)``
        Strength of each rhythm.
    centres : tuple of (frequency, width)
        One for each band, in hertz.

    Returns
    -------
    array ``(labels, channels, samples // 2 + 1)`` float32
    """
    frequency = np.fft.rfftfreq(samples, 1 / rate)
    falling = (1.0 + frequency) ** (-0.9 - factors.tilt)
    bands = np.stack([np.exp(-0.5 * ((frequency / factors.shift - centre) / width) ** 2) for centre, width in centres])
    shape = background[..., None] * falling + rhythms @ bands
    hum = factors.hum * np.exp(-0.5 * ((frequency - factors.hum_frequency) / 0.3) ** 2)
    amplitude = shape * np.asarray(factors.gains)[:, None] + factors.noise + hum
    amplitude[..., 0] = 0.0
    as_single: Array = amplitude.astype(np.float32)
    return as_single


def draw_signals(rng: np.random.Generator, amplitude: Array, samples: int) -> Array:
    """Gaussian signals of given amplitude spectra: ``(rows, channels, frequencies)`` to ``(rows, channels, samples)``.

    A flat spectrum of height a gives white noise of standard deviation a.
    """
    noise = rng.standard_normal((*amplitude.shape, 2), dtype=np.float32).view(np.complex64)[..., 0]
    noise *= amplitude * np.float32(np.sqrt(samples / 2))
    signals: Array = fft.irfft(noise, n=samples, axis=-1)
    return signals


def check_request(patients: int, most: int, what: str) -> None:
    """Raise if no patient, or more than the ids can name, are asked for."""
    if patients < 1:
        raise ConfigError(f"the number of patients must be 1 or more, not {patients}")
    if patients > most:
        raise ConfigError(f"{what} has names for at most {most} patients; {patients} were asked for")


@contextmanager
def recordings_folder(out: Path) -> Iterator[Path]:
    """A folder for synthetic recordings, new or empty, that is filled only once they are complete."""
    if out.exists() and any(out.iterdir()):
        raise StorageError(f"{out} is not empty: name another folder")
    with new_folder(out) as folder:
        mark_synthetic(folder)
        yield folder
        if out.exists():
            out.rmdir()
