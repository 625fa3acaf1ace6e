"""One night of Sleep-EDF: which files belong together, and which of its epochs are samples.

This module imports neither torch nor polars, so that worker processes start quickly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError, DataError
from manydg.sources._edf import (
    EdfHeader,
    microvolts_per_unit,
    read_header,
    require_rate,
)
from manydg.sources._edf_annotations import Annotation, read_annotations
from manydg.sources._provenance import describe_files

CHANNELS = ("EEG Fpz-Cz", "EEG Pz-Oz")
RATE = 100.0
EPOCH_SECONDS = 30
EPOCH_SAMPLES = 3000
STAGES = ("W", "N1", "N2", "N3", "REM")
UNSCORED, MOVEMENT = -1, -2

_CODES = {
    "sleep stage w": 0,
    "sleep stage 1": 1,
    "sleep stage n1": 1,
    "sleep stage 2": 2,
    "sleep stage n2": 2,
    "sleep stage 3": 3,
    "sleep stage 4": 3,
    "sleep stage n3": 3,
    "sleep stage r": 4,
    "sleep stage ?": UNSCORED,
    "movement time": MOVEMENT,
}
_NAME = re.compile(r"(?P<study>SC4|ST7)(?P<subject>\d\d)(?P<night>\d)\w\w-(?P<part>PSG|Hypnogram)\.edf", re.IGNORECASE)
_STUDIES = {"cassette": ("SC4",), "telemetry": ("ST7",), "both": ("SC4", "ST7")}


@dataclass(frozen=True)
class Night:
    """A recording and its hypnogram; ``patient`` is the same for both nights of a person."""

    name: str
    patient: str
    number: int
    psg: Path
    hypnogram: Path


@dataclass(frozen=True)
class Found:
    """What a folder of raw files holds."""

    nights: tuple[Night, ...]
    unpaired: tuple[Path, ...]


def find_nights(raw: Path, study: str) -> Found:
    """Pair the PSG and Hypnogram files of a folder and its subfolders, sorted by person and night."""
    if study not in _STUDIES:
        raise ConfigError(f"unknown study '{study}'; known: {', '.join(_STUDIES)}")
    parts: dict[str, dict[str, Path]] = {}
    for path in sorted(raw.rglob("*")) if raw.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None or match["study"].upper() not in _STUDIES[study]:
            continue
        name = (match["study"] + match["subject"] + match["night"]).upper()
        files = parts.setdefault(name, {})
        part = match["part"].lower()
        if part in files:
            raise DataError(
                f"two {match['part']} files for one night in {raw}: "
                f"{files[part].relative_to(raw)} and {path.relative_to(raw)}. Keep one of them"
            )
        files[part] = path
    nights = [
        Night(name, name[:5], int(name[5]), files["psg"], files["hypnogram"])
        for name, files in sorted(parts.items())
        if len(files) == 2
    ]
    unpaired = [path for files in parts.values() if len(files) == 1 for path in files.values()]
    return Found(tuple(nights), tuple(sorted(unpaired)))


def stages_from_annotations(annotations: Iterable[Annotation], path: Path) -> npt.NDArray[np.int8]:
    """The stage of each 30 s epoch of a hypnogram, from the recording's start to the end of the last annotation.

    An epoch gets a stage if one annotation covers all of it; others are unscored.

    Returns
    -------
    array ``(epochs,)`` int8
        Codes into ``STAGES``, or ``UNSCORED``, or ``MOVEMENT``.
    """
    known = [(note, _CODES[note.text.lower()]) for note in annotations if note.text.lower() in _CODES]
    if not known:
        raise DataError(f"{path} names no sleep stages: it is not a hypnogram of this dataset")
    spans = [(_ceil(note.onset), _floor(note.onset + note.duration), code) for note, code in known]
    end = max(stop for _, stop, _ in spans)
    if end > 100_000 or min(start for start, _, _ in spans) < 0:
        raise DataError(f"{path} is damaged: it scores epochs {min(s for s, _, _ in spans)} to {end} of a night")
    stages = np.full(max(end, 0), UNSCORED, np.int8)
    scored = np.zeros(max(end, 0), bool)
    for start, stop, code in spans:
        if start < stop and bool((scored[start:stop] & (stages[start:stop] != code)).any()):
            raise DataError(f"{path} gives two stages to one epoch, near {start * EPOCH_SECONDS} s: it is damaged")
        stages[start:stop] = code
        scored[start:stop] = True
    return stages


def _ceil(seconds: float) -> int:
    return math.ceil(seconds / EPOCH_SECONDS - 1e-6)


def _floor(seconds: float) -> int:
    return math.floor(seconds / EPOCH_SECONDS + 1e-6)


def check_recording(psg: Path) -> EdfHeader:
    """The header of a PSG that has the channels, rate and units of Sleep-EDF, or an error that says what it lacks."""
    header = read_header(psg)
    channels = [header.find(label) for label in CHANNELS]
    require_rate(header, channels, RATE)
    for channel in channels:
        microvolts_per_unit(header, channel)
    return header


def plan_night(argument: tuple[Night, float | None]) -> dict[str, Any]:
    """Check one night and choose its epochs.

    Returns
    -------
    dict of JSON values
        ``epochs`` (indices of the samples), ``stages`` (their codes), ``start`` (ISO time or ``None``), ``seconds`` of
        signal, and ``counts`` of what was left out for which reason.
    """
    night, wake_margin = argument
    header = check_recording(night.psg)
    hypnogram = read_header(night.hypnogram)
    if header.start and hypnogram.start and header.start != hypnogram.start:
        raise DataError(
            f"{night.psg.name} starts at {header.start:%d.%m.%Y %H:%M:%S}, its hypnogram {night.hypnogram.name} at "
            f"{hypnogram.start:%d.%m.%Y %H:%M:%S}: they do not belong together"
        )
    scored = stages_from_annotations(read_annotations(night.hypnogram), night.hypnogram)
    in_signal = int((header.seconds + 1e-6) // EPOCH_SECONDS)
    stages = scored[:in_signal]
    if not len(stages):
        raise DataError(f"{night.psg.name} and {night.hypnogram.name} do not overlap by a single epoch of 30 s")
    kept, counts = choose_epochs(stages, wake_margin)
    beyond = scored[in_signal:]
    counts |= {
        "signal_without_hypnogram": in_signal - len(stages),
        "stages_without_signal": int((beyond >= 0).sum()),
    }
    return {
        "epochs": kept.tolist(),
        "stages": stages[kept].tolist(),
        "start": header.start.isoformat() if header.start else None,
        "seconds": header.seconds,
        "counts": counts,
    }


def describe_night(night: Night) -> list[dict[str, Any]]:
    """Name, size and checksum of a night's two files."""
    return describe_files([night.psg, night.hypnogram])


def choose_epochs(
    stages: npt.NDArray[np.int8], wake_margin: float | None
) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
    """Indices of the epochs to keep, ``(kept,)``, and how many each filter leaves out."""
    staged = stages >= 0
    within = np.ones(len(stages), bool)
    if wake_margin is not None:
        asleep = np.nonzero(stages > 0)[0]
        margin = int(wake_margin * 60 // EPOCH_SECONDS)
        within[:] = False
        if len(asleep):
            within[max(asleep[0] - margin, 0) : asleep[-1] + margin + 1] = True
    counts = {
        "overlap": len(stages),
        "movement": int((stages == MOVEMENT).sum()),
        "unscored": int((stages == UNSCORED).sum()),
        "outside_margin": int((staged & ~within).sum()),
    }
    return np.nonzero(staged & within)[0], counts


def night_offsets(nights: Sequence[Night], plans: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds to add to each night's clock, in whole days, so that a person's nights follow one another."""
    offsets, clock, person = [], 0.0, ""
    for night, plan in zip(nights, plans, strict=True):
        clock = 0.0 if night.patient != person else clock
        offsets.append(clock)
        clock += 86_400.0 * math.ceil(max(plan["seconds"], 1.0) / 86_400.0)
        person = night.patient
    return offsets
