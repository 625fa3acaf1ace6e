"""Write PSG and Hypnogram pairs of synthetic people.

A synthetic twin of Sleep-EDF: real EDF and EDF+ files, one night in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError
from manydg.files import disk_errors, write_json
from manydg.sources import Options, Twin, option
from manydg.sources._edf import write_annotations
from manydg.sources._preparing import Progress
from manydg.synthetic._twins import PatientFactors, check_request, draw_factors, draw_signals, spectra, synthetic_folder

_EPOCH, _RATE, _SAMPLES = 30, 100, 3000
_WORDS = ("W", "1", "2", "3", "4", "R", "?")
_MOVEMENT, _UNKNOWN = 7, 6
_STUDIES = {"cassette": ("SC4", "E0", "EC"), "telemetry": ("ST7", "J0", "JP")}

# Delta, theta, alpha, spindles, beta: centre and width in hertz.
_BANDS = ((1.5, 0.8), (5.5, 1.2), (10.0, 1.0), (13.5, 0.7), (21.0, 3.5))
# Rows: W, 1, 2, 3, 4, R. Channels: Fpz-Cz, Pz-Oz, EOG.
_BACKGROUND = np.array([[30, 24, 40], [30, 22, 34], [38, 28, 26], [55, 40, 30], [70, 50, 34], [28, 20, 60]], float)
_RHYTHMS = np.array(
    [
        [[3, 4, 14, 1, 7], [2, 4, 30, 1, 7], [4, 2, 4, 0, 4]],
        [[6, 14, 5, 1, 4], [4, 12, 8, 1, 4], [20, 4, 2, 0, 2]],
        [[25, 10, 3, 18, 2], [18, 9, 3, 12, 2], [6, 3, 1, 2, 1]],
        [[90, 14, 3, 6, 1], [60, 11, 3, 5, 1], [9, 3, 1, 1, 1]],
        [[150, 16, 2, 2, 1], [100, 12, 2, 2, 1], [12, 3, 1, 1, 1]],
        [[8, 17, 4, 1, 5], [5, 14, 4, 1, 5], [60, 12, 2, 0, 3]],
    ],
    float,
)
# Log-odds of going from a stage (row) to a stage (column) in the next epoch of the night.
_NEXT = np.log(
    np.array(
        [
            [0.86, 0.10, 0.02, 0.005, 0.005, 0.01],
            [0.06, 0.70, 0.20, 0.005, 0.005, 0.03],
            [0.02, 0.03, 0.91, 0.012, 0.002, 0.026],
            [0.01, 0.01, 0.12, 0.74, 0.11, 0.01],
            [0.01, 0.005, 0.035, 0.15, 0.79, 0.01],
            [0.025, 0.04, 0.03, 0.0025, 0.0025, 0.90],
        ]
    )
)


@dataclass(frozen=True)
class SleepEdfTwinOptions(Options):
    """How many people and nights, and how long."""

    patients: int = option(help="Number of synthetic people.")
    seed: int = option(0, help="The same seed writes the same files.")
    hours: float = option(20.0, help="Length of a recording.")
    nights: int = option(2, help="Nights of each person.")
    study: str = option("cassette", help="cassette or telemetry.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_request(self.patients, 100, "Sleep-EDF")
        if self.study not in _STUDIES:
            raise ConfigError(f"unknown study '{self.study}'; known: {', '.join(_STUDIES)}")
        if not 0.25 <= self.hours <= 24 or not 1 <= self.nights <= 9:
            raise ConfigError(
                f"a recording lasts 0.25 to 24 hours and a person has 1 to 9 nights; not {self.hours:g}, {self.nights}"
            )


class SleepEdfTwin(Twin[SleepEdfTwinOptions]):
    """PSG and Hypnogram pairs that ``prepare`` reads as if they came from PhysioNet.

    There are at most 100 people, because the files' names have two digits for the person; every 26th has one night
    fewer, as in the original. ``truth.json`` among the files holds every patient's factors.
    """

    name = "sleep-edf"
    options_class = SleepEdfTwinOptions
    scales: ClassVar = {
        "full": SleepEdfTwinOptions(78, nights=1),
        "small": SleepEdfTwinOptions(40, hours=4.0, nights=1),
        "smoke": SleepEdfTwinOptions(20, hours=0.25, nights=1),
    }

    def write(self, out: Path, options: SleepEdfTwinOptions) -> Path:
        names, truth = _STUDIES[options.study], {}
        with synthetic_folder(out) as folder, Progress("writing nights", total=options.patients) as progress:
            for person in range(options.patients):
                rng = np.random.default_rng([options.seed, person])
                factors = draw_factors(rng, 3, 6, (15.0, 24.0))
                count = max(1, options.nights - 1) if person % 26 == 13 else options.nights
                for night in range(1, count + 1):
                    _write_night(folder, names, person, night, factors, int(options.hours * 120), rng)
                truth[f"{names[0]}{person:02d}"] = factors.to_json()
                progress.advance()
            about = {"source": self.name, "seed": options.seed, "hours": options.hours, "patients": truth}
            write_json(folder / "truth.json", about)
        return out

    def describe(self, out: Path, options: SleepEdfTwinOptions) -> str:
        return f"wrote {len(list(out.glob('*-PSG.edf')))} nights of {options.patients} people to {out}"


def _write_night(
    out: Path, names: tuple[str, str, str], person: int, night: int, factors: PatientFactors, epochs: int,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    study, psg, hypnogram = names
    stem = f"{study}{person:02d}{night}"
    start = datetime(1990, 3, 1, 15, 0) + timedelta(days=person * 7 + night, minutes=int(rng.integers(0, 180)))
    stages = draw_stages(rng, epochs, np.asarray(factors.preferences))
    digital = _draw_recording(rng, stages, factors)
    scored = _as_scored(rng, stages)
    with disk_errors(out):
        _write_psg(out / f"{stem}{psg}-PSG.edf", digital, start, rng)
        texts = [*(f"Sleep stage {word}" for word in _WORDS), "Movement time"]
        words = [texts[code] for code in scored]
        write_annotations(out / f"{stem}{hypnogram}-Hypnogram.edf", words, start, _EPOCH)


def draw_stages(rng: np.random.Generator, epochs: int, preferences: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """A day and a night: awake, a Markov chain of sleep stages that the person's preferences bend, awake again."""
    chances = np.exp(_NEXT + preferences * (1 - np.eye(6)))
    cumulative = np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)
    begin = int(epochs * rng.uniform(0.25, 0.38))
    end = int(epochs * rng.uniform(0.72, 0.82))
    stages = np.zeros(epochs, np.int64)
    stage = 1
    for epoch, chance in zip(range(begin, end), rng.random(end - begin), strict=True):
        stages[epoch] = stage
        stage = min(int(np.searchsorted(cumulative[stage], chance)), 5)
    return stages


def _draw_recording(
    rng: np.random.Generator, stages: npt.NDArray[np.int64], factors: PatientFactors
) -> npt.NDArray[np.int16]:
    """Digital values of the three fast channels, ``(3, epochs * 3000)``; an epoch may lean towards another stage."""
    table = spectra(factors, _BACKGROUND, _RHYTHMS, _BANDS, _SAMPLES, _RATE)
    other = np.where(rng.random(len(stages)) < 0.5, np.roll(stages, -1), rng.integers(0, 6, len(stages)))
    weight = rng.beta(1.0, 5.0, len(stages)).astype(np.float32)
    loudness = np.exp(rng.normal(0, 0.15, len(stages))).astype(np.float32)
    digital = np.empty((3, len(stages), _SAMPLES), np.int16)
    for first in range(0, len(stages), 128):
        part = slice(first, first + 128)
        mix = weight[part, None, None]
        amplitude = (table[stages[part]] * (1 - mix) + table[other[part]] * mix) * loudness[part, None, None]
        signals = draw_signals(rng, amplitude, _SAMPLES)
        # 4095 steps over 500 microvolts, as a 12-bit converter gives.
        steps = np.clip(np.rint((signals + 250.0) * (4095 / 500.0)) - 2048, -2048, 2047)
        digital[:, part] = steps.astype(np.int16).transpose(1, 0, 2)
    return digital.reshape(3, -1)


def _as_scored(rng: np.random.Generator, stages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What a technician left: movement in some epochs, gaps, and a hypnogram shorter or longer than the signal."""
    scored = stages.copy()
    asleep = np.nonzero(stages)[0]
    if len(asleep):
        scored[rng.choice(asleep, size=min(len(asleep), int(rng.integers(0, 4))), replace=False)] = _MOVEMENT
    if rng.random() < 0.3:
        gap = int(rng.integers(0, len(scored)))
        scored[gap : gap + int(rng.integers(1, 5))] = _UNKNOWN
    if rng.random() < 0.2:
        return scored[: len(scored) - int(rng.integers(1, 1 + len(scored) // 40 + 1))]
    return np.concatenate([scored, np.full(int(rng.integers(0, 60)), _UNKNOWN)])


def _write_psg(path: Path, digital: npt.NDArray[np.int16], start: datetime, rng: np.random.Generator) -> None:
    from edfio import Edf, EdfSignal, Patient, Recording

    def signal(values: npt.NDArray[np.int16], rate: float, label: str, unit: str, reach: float) -> EdfSignal:
        return EdfSignal.from_digital(
            values, rate, label=label, physical_dimension=unit, physical_range=(-reach, reach),
            digital_range=(-2048, 2047),
        )  # fmt: skip

    fast = ("EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal")
    slow = (("Resp oro-nasal", "", 2048.0), ("EMG submental", "uV", 5.0), ("Temp rectal", "DegC", 40.0))
    seconds = digital.shape[1] // _RATE
    signals = [signal(values, _RATE, label, "uV", 250.0) for values, label in zip(digital, fast, strict=True)]
    signals += [
        signal(rng.integers(-600, 600, seconds).astype(np.int16), 1, label, unit, reach) for label, unit, reach in slow
    ]
    recording = Recording(startdate=start.date())
    edf = Edf(signals, patient=Patient(), recording=recording, starttime=start.time(), data_record_duration=_EPOCH)
    edf.write(path)
