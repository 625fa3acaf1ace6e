"""Write EEG recordings with sleep scorings, of another laboratory's montage.

A synthetic twin of anybody's recordings: a BIDS dataset, or EDF files with a CSV file of stages beside each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError
from manydg.files import disk_errors, write_json
from manydg.sources import Options, Twin, option
from manydg.sources._preparing import Progress
from manydg.synthetic._twins import PatientFactors, check_request, draw_factors, draw_signals, spectra, synthetic_folder

_EPOCH = 30
_STAGES = ("W", "N1", "N2", "N3", "R")
_NAMES = ("EEG C4", "EEG C3", "EEG M1", "EEG M2", "EOG E1", "EMG Chin")
_REACH = 800.0
# Delta, theta, alpha, spindles, beta: centre and width in hertz.
_BANDS = ((1.5, 0.8), (5.5, 1.2), (10.0, 1.0), (13.5, 0.7), (21.0, 3.5))
# What each stage (row) adds to the scalp, to the eyes and to the chin; references record little of it.
_SCALP = np.array([[3, 4, 22, 1, 8], [6, 14, 6, 1, 4], [25, 10, 3, 18, 2], [95, 15, 3, 4, 1], [7, 17, 4, 1, 5]], float)
_EYES = np.array([[30, 2, 4, 0, 4], [22, 4, 2, 0, 2], [6, 3, 1, 2, 1], [10, 3, 1, 1, 1], [60, 12, 2, 0, 3]], float)
_CHIN = np.array([[1, 1, 2, 2, 25], [1, 1, 2, 2, 16], [1, 1, 1, 1, 10], [1, 1, 1, 1, 8], [0, 0, 0, 0, 2]], float)
_SHARE = {"M": 0.15, "E": 1.0}
_STAY = 0.75


@dataclass(frozen=True)
class EdfTwinOptions(Options):
    """How many people and recordings, how long, and with how many channels."""

    patients: int = option(help="Number of synthetic people.")
    seed: int = option(0, help="The same seed writes the same files.")
    recordings: int = option(2, help="Recordings of each person.", low=1)
    minutes: float = option(6.0, help="Length of a recording.", low=1)
    channels: int = option(len(_NAMES), help="Number of channels.", low=1)
    rate: int = option(256, help="Samples per second.", low=64)
    layout: str = option("bids", help="bids, or files: EDF and CSV pairs in one folder.", choices=("bids", "files"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_request(self.patients, 999, "the twin")
        if self.recordings > 9 or self.minutes > 1440 or self.channels > 256:
            raise ConfigError("a person has at most 9 recordings of at most 1440 minutes and 256 channels")


class EdfTwin(Twin[EdfTwinOptions]):
    """Recordings that ``prepare edf`` reads as if they came from a sleep laboratory.

    Each has C4, C3, both mastoids, an eye and the chin, and more scalp channels where more are asked for; every fifth
    person's recordings are in millivolts. Scorings have movement, unscored epochs, and end before the signal does.
    ``truth.json`` among the files holds every patient's factors.
    """

    name = "edf"
    options_class = EdfTwinOptions

    def write(self, out: Path, options: EdfTwinOptions) -> Path:
        truth = {}
        with synthetic_folder(out) as folder, Progress("writing recordings", total=options.patients) as progress:
            for person in range(1, options.patients + 1):
                rng = np.random.default_rng([options.seed, person])
                factors = draw_factors(rng, options.channels, len(_STAGES), (15.0, 24.0))
                for number in range(1, options.recordings + 1):
                    _write_recording(folder, options, person, number, factors, rng)
                truth[_person(person, options.layout)] = factors.to_json()
                progress.advance()
            if options.layout == "bids":
                _describe(folder, list(truth))
            write_json(folder / "truth.json", {"source": self.name, "seed": options.seed, "patients": truth})
        return out

    def describe(self, out: Path, options: EdfTwinOptions) -> str:
        return f"wrote {len(list(out.rglob('*.edf')))} recordings of {options.patients} people to {out}"


def _person(number: int, layout: str) -> str:
    return f"sub-{number:03d}" if layout == "bids" else f"P{number:03d}"


def _describe(folder: Path, people: list[str]) -> None:
    write_json(folder / "dataset_description.json", {"Name": "Synthetic recordings", "BIDSVersion": "1.9.0"})
    (folder / "participants.tsv").write_text("\n".join(["participant_id", *people, ""]), encoding="utf-8")


def channel_names(count: int) -> list[str]:
    """The montage: the laboratory's six channels, then further ones of the scalp."""
    return [*_NAMES[:count], *(f"EEG X{number}" for number in range(1, count - len(_NAMES) + 1))]


def _write_recording(
    out: Path, options: EdfTwinOptions, person: int, number: int, factors: PatientFactors, rng: np.random.Generator
) -> None:
    epochs = int(options.minutes * 60 // _EPOCH)
    stages = _draw_stages(rng, epochs, np.asarray(factors.preferences))
    digital = _draw_recording(rng, stages, factors, options)
    start = datetime(2021, 5, 3, 22, 0) + timedelta(days=7 * person + number, minutes=int(rng.integers(0, 90)))
    scored = _as_scored(rng, stages)
    name = _person(person, options.layout)
    with disk_errors(out):
        if options.layout == "files":
            stem = out / f"{name}-N{number}"
            _write_table(stem.with_suffix(".csv"), scored)
        else:
            folder = out / name / f"ses-{number}" / "eeg"
            folder.mkdir(parents=True)
            stem = folder / f"{name}_ses-{number}_task-sleep_eeg"
            _write_events(folder / f"{name}_ses-{number}_task-sleep_events.tsv", scored)
            _write_channels(folder / f"{name}_ses-{number}_task-sleep_channels.tsv", options.channels)
        _write_edf(stem.with_suffix(".edf"), digital, start, options, "mV" if person % 5 == 0 else "uV")


def _draw_stages(rng: np.random.Generator, epochs: int, preferences: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """A Markov chain that begins awake, and that the person's preferences bend."""
    chances = np.exp(preferences) / np.exp(preferences).sum()
    moves = rng.random(epochs) > _STAY
    others = rng.choice(len(_STAGES), size=epochs, p=chances)
    stages = np.zeros(epochs, np.int64)
    for epoch in range(1, epochs):
        stages[epoch] = others[epoch] if moves[epoch] else stages[epoch - 1]
    return stages


def _draw_recording(
    rng: np.random.Generator, stages: npt.NDArray[np.int64], factors: PatientFactors, options: EdfTwinOptions
) -> npt.NDArray[np.int16]:
    """Digital values ``(channels, samples)``, 16 bits over 1.6 millivolts."""
    names, samples = channel_names(options.channels), _EPOCH * options.rate
    kinds = [_CHIN if "Chin" in name else _EYES if "EOG" in name else _SCALP for name in names]
    share = np.array([_SHARE.get(name.split()[-1][0], 1.0) for name in names])
    rhythms = np.stack(kinds, axis=1) * share[:, None]
    background = np.full((len(_STAGES), len(names)), 30.0) * share
    table = spectra(factors, background, rhythms, _BANDS, samples, options.rate)
    digital = np.empty((len(names), len(stages), samples), np.int16)
    for epoch, stage in enumerate(stages):
        signal = draw_signals(rng, table[stage][None], samples)[0]
        digital[:, epoch] = np.clip(np.rint(signal * (32767 / _REACH)), -32768, 32767).astype(np.int16)
    return digital.reshape(len(names), -1)


def _as_scored(rng: np.random.Generator, stages: npt.NDArray[np.int64]) -> list[str]:
    """What a technician left: movement, epochs without a stage, and sometimes an end before that of the signal."""
    scored = [f"Sleep stage {_STAGES[stage]}" for stage in stages]
    for epoch in np.flatnonzero(rng.random(len(scored)) < 0.04):
        scored[epoch] = "Movement time" if rng.random() < 0.5 else "Sleep stage ?"
    return scored[:-1] if rng.random() < 0.3 and len(scored) > 1 else scored


def _write_events(path: Path, scored: list[str]) -> None:
    lines, epoch = ["onset\tduration\ttrial_type"], 0
    for text, run in itertools.groupby(scored):
        count = len(list(run))
        lines.append(f"{epoch * _EPOCH}\t{count * _EPOCH}\t{text}")
        epoch += count
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _write_channels(path: Path, channels: int) -> None:
    rows = [f"{name}\t{name.split()[0]}\tuV\tgood" for name in channel_names(channels)]
    path.write_text("\n".join(["name\ttype\tunits\tstatus", *rows, ""]), encoding="utf-8")


def _write_table(path: Path, scored: list[str]) -> None:
    rows = [f"{epoch},{text}" for epoch, text in enumerate(scored, start=1)]
    path.write_text("\n".join(["epoch,stage", *rows, ""]), encoding="utf-8")


def _write_edf(path: Path, digital: npt.NDArray[np.int16], start: datetime, options: EdfTwinOptions, unit: str) -> None:
    from edfio import Edf, EdfSignal, Patient, Recording

    reach = _REACH if unit == "uV" else _REACH / 1000
    signals = [
        EdfSignal.from_digital(
            values, options.rate, label=name, physical_dimension=unit, physical_range=(-reach, reach),
            digital_range=(-32768, 32767),
        )
        for values, name in zip(digital, channel_names(options.channels), strict=True)
    ]  # fmt: skip
    recording = Recording(startdate=start.date())
    Edf(signals, patient=Patient(), recording=recording, starttime=start.time(), data_record_duration=1).write(path)
