"""Write EEG and expert votes of synthetic people.

A synthetic twin of the IIIC arrays: signals, expert votes and patient keys, written as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from manydg.data.storage import NpyStream
from manydg.errors import ConfigError
from manydg.files import Json, write_json
from manydg.sources import Options, Twin, option
from manydg.sources._preparing import Progress
from manydg.synthetic._twins import PatientFactors, check_request, draw_factors, draw_signals, spectra, synthetic_folder

_CHANNELS, _SAMPLES, _RATE, _CLASSES = 16, 2000, 200, 6
_LEFT = np.isin(np.arange(16) % 8, (0, 1, 2, 3))
_SHARES = np.array([0.264, 0.037, 0.197, 0.242, 0.144, 0.117])
# Delta, theta, alpha, beta: centre and width in hertz. Rows: OTHER, ESZ, LPD, GPD, LRDA, GRDA.
_BANDS = ((2.0, 0.5), (5.5, 1.3), (9.5, 1.2), (20.0, 4.0))
_BACKGROUND = np.array([45.0, 35.0, 40.0, 40.0, 38.0, 38.0])
_RHYTHMS = np.array(
    [[3, 4, 8, 4], [10, 42, 12, 6], [5, 5, 3, 3], [5, 4, 3, 3], [10, 4, 3, 2], [10, 4, 3, 2]], dtype=float
)


@dataclass(frozen=True)
class IiicTwinOptions(Options):
    """How many patients and samples, and in which files."""

    patients: int = option(help="Number of synthetic people.")
    seed: int = option(0, help="The same seed writes the same files.")
    samples_per_patient: int = option(61, help="Samples of each person, on average.")
    layout: str = option("array", help="array: one large file; patients: a folder each.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_request(self.patients, 1_000_000, "IIIC")
        if self.layout not in ("array", "patients"):
            raise ConfigError(f"unknown layout '{self.layout}'; known: array, patients")
        if self.samples_per_patient < 1:
            raise ConfigError(f"the samples per patient must be 1 or more, not {self.samples_per_patient}")


class IiicTwin(Twin[IiicTwinOptions]):
    """Arrays that ``prepare`` reads as if they came from the IIIC team.

    ``truth.json`` among them holds every patient's factors and every sample's true class. People differ widely in how
    many samples they have; some have a single one.
    """

    name = "iiic"
    options_class = IiicTwinOptions
    scales: ClassVar = {
        "full": IiicTwinOptions(500),
        "small": IiicTwinOptions(150, samples_per_patient=20),
        "smoke": IiicTwinOptions(30, samples_per_patient=6),
    }

    def write(self, out: Path, options: IiicTwinOptions) -> Path:
        patients, mean = options.patients, options.samples_per_patient
        rng = np.random.default_rng([options.seed, patients])
        counts = 1 + rng.negative_binomial(1, 1 / mean, patients) if mean > 1 else None
        sizes = np.ones(patients, np.int64) if counts is None else np.minimum(counts, 20 * mean)
        with synthetic_folder(out) as folder:
            truth = _write(folder, sizes, options.seed, options.layout)
            about = {"source": self.name, "seed": options.seed, "patients": truth}
            write_json(folder / "truth.json", about, indent=None)
        return out

    def describe(self, out: Path, options: IiicTwinOptions) -> str:
        return f"wrote the samples of {options.patients} people to {out}"


def _write(out: Path, sizes: npt.NDArray[np.int64], seed: int, layout: str) -> dict[str, Json]:
    names = [f"IIIC{person:05d}" for person in range(len(sizes))]
    truth: dict[str, Json] = {}
    votes: list[npt.NDArray[np.int64]] = []
    whole = _open(out) if layout == "array" else None
    with Progress("writing patients", total=len(sizes)) as progress:
        for person, size in enumerate(sizes.tolist()):
            rng = np.random.default_rng([seed, person])
            factors = draw_factors(rng, _CHANNELS, _CLASSES, (40.0, 70.0))
            labels = _draw_labels(rng, size, factors)
            votes.append(_draw_votes(rng, labels))
            stream = whole or _open(out / names[person])
            for first in range(0, size, 64):
                stream.append(_draw_samples(rng, labels[first : first + 64], factors))
            if whole is None:
                stream.close()
                np.save(out / names[person] / "votes.npy", votes[-1])
            truth[names[person]] = factors.to_json() | {"labels": labels.tolist()}
            progress.advance()
    if whole is not None:
        whole.close()
        np.save(out / "votes.npy", np.concatenate(votes))
        np.save(out / "patients.npy", np.repeat(names, sizes))
    return truth


def _open(folder: Path) -> NpyStream:
    folder.mkdir(exist_ok=True)
    return NpyStream(folder / "signals.npy", np.dtype(np.float32), (_CHANNELS, _SAMPLES))


def _draw_labels(rng: np.random.Generator, size: int, factors: PatientFactors) -> npt.NDArray[np.int64]:
    """Runs of one class, with the patient's own taste for some classes."""
    odds = _SHARES * np.exp(2.0 * np.asarray(factors.preferences))
    runs = rng.choice(_CLASSES, size=size, p=odds / odds.sum())
    follows = rng.random(size) < 0.6
    start = np.maximum.accumulate(np.where(follows, 0, np.arange(size)))
    return np.asarray(runs[start], np.int64)


def _draw_votes(rng: np.random.Generator, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Counts over six classes: experts mostly see the true class, and in some samples too few of them looked."""
    agreement = rng.beta(5.0, 1.5, len(labels))[:, None]
    doubt = rng.dirichlet(np.full(_CLASSES, 0.5), len(labels))
    chances = agreement * np.eye(_CLASSES)[labels] + (1 - agreement) * doubt
    voters = np.where(rng.random(len(labels)) < 0.08, rng.integers(1, 5, len(labels)), 5 + rng.poisson(7, len(labels)))
    return rng.multinomial(voters, chances / chances.sum(axis=1, keepdims=True))


def _draw_samples(
    rng: np.random.Generator, labels: npt.NDArray[np.int64], factors: PatientFactors
) -> npt.NDArray[np.float32]:
    """Samples in microvolts, ``(rows, 16, 2000)``: coloured noise and, by class, discharges or rhythms on some side."""
    everywhere = np.ones((1, _CHANNELS))
    table = spectra(
        factors,
        _BACKGROUND[:, None] * everywhere,
        _RHYTHMS[:, None, :] * everywhere[..., None],
        _BANDS,
        _SAMPLES,
        _RATE,
    )
    loudness = np.exp(rng.normal(0, 0.2, (len(labels), 1, 1))).astype(np.float32)
    signals = draw_signals(rng, table[labels] * loudness, _SAMPLES)
    time = np.arange(_SAMPLES) / _RATE
    gains = np.asarray(factors.gains, np.float32)[:, None]
    for row, label in enumerate(labels.tolist()):
        side = _LEFT if rng.random() < 0.5 else ~_LEFT
        reach = np.where(side, 1.0, 0.2 if label in (2, 4) else 1.0)[:, None]
        signals[row] += gains * (reach * _pattern(rng, label, time, factors.shift)).astype(np.float32)
    _spoil(rng, signals)
    return signals


def _pattern(
    rng: np.random.Generator, label: int, time: npt.NDArray[np.float64], shift: float
) -> npt.NDArray[np.float64]:
    phase = rng.uniform(0, 1)
    height = rng.uniform(30, 70)
    if label in (2, 3):
        beat = (time * rng.uniform(0.8, 1.6) * shift + phase) % 1.0
        return np.asarray(height * (np.exp(-0.5 * ((beat - 0.5) / 0.03) ** 2) - 0.3 * (beat > 0.55) * (beat < 0.8)))
    if label in (4, 5):
        return np.asarray(height * np.sin(2 * np.pi * (time * rng.uniform(1.5, 2.5) * shift + phase)))
    if label == 1:
        speed = np.linspace(rng.uniform(6, 8), rng.uniform(3, 4), len(time)) * shift
        return np.asarray(1.4 * height * np.sin(2 * np.pi * (np.cumsum(speed) / _RATE + phase)))
    return np.zeros(len(time))


def _spoil(rng: np.random.Generator, signals: npt.NDArray[np.float32]) -> None:
    """What electrodes do: now and then a channel is dead, or jumps by millivolts."""
    fate = rng.random(len(signals))
    for row in np.nonzero(fate < 0.015)[0]:
        signals[row, rng.integers(_CHANNELS)] = 0.0
    for row in np.nonzero(fate > 0.985)[0]:
        signals[row, rng.integers(_CHANNELS), int(rng.integers(_SAMPLES)) :] += 3000.0
