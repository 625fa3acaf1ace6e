"""IIIC: ten seconds of EEG with expert votes.

The seizure patterns of the ictal-interictal-injury continuum: 16 bipolar channels at 200 Hz, each sample classified by
several experts. The arrays are handed out by the authors on request. Jing et al., "Interrater reliability of expert
electroencephalographers identifying seizures and rhythmic and periodic patterns in EEGs", Neurology 100(17), 2023;
Yang, Westover and Sun, "ManyDG: many-domain generalization for healthcare applications", ICLR 2023.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.info import DatasetInfo, SourceFile, TargetSpec
from manydg.data.storage import DAMAGED_NPY, LARGE_FILE, DatasetWriter, drop_from_cache
from manydg.errors import ConfigError, DataError, StorageError, warn
from manydg.files import HashingThread, Json, reading_errors
from manydg.sources import NewSamples, Options, PublishedCounts, Source, SourceDocs, TrainedOn, option
from manydg.sources._preparing import (
    CohortFlow,
    Progress,
    describe_files,
    make_ready,
    read_into,
    with_provenance,
    wrong_folder,
)

CLASSES = ("OTHER", "ESZ", "LPD", "GPD", "LRDA", "GRDA")
CHANNELS = (
    "Fp1-F7", "F7-T3", "T3-T5", "T5-O1", "Fp2-F8", "F8-T4", "T4-T6", "T6-O2",
    "Fp1-F3", "F3-C3", "C3-P3", "P3-O1", "Fp2-F4", "F4-C4", "C4-P4", "P4-O2",
)  # fmt: skip
RATE, SAMPLES = 200.0, 2000
SETTINGS: dict[str, Json] = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV"}
KEPT, FEW_VOTES, NOT_FINITE = range(3)
"""What becomes of a row."""
BLOCK = 32
"""Rows at a time: a few megabytes, which stay in the processor's cache between reading, checking and writing."""
DROP_EVERY = 1 << 27
"""Bytes of a large file after which what was read is dropped from the file cache."""
_ROLES = {"signals": "signals", "x": "signals", "votes": "votes", "y": "votes"} | dict.fromkeys(
    ("patients", "patient", "keys", "key"), "patients"
)
_NAME = re.compile(
    r"(?:(?P<part>.*)[_.-])?(?P<role>signals|x|votes|y|patients?|keys?)\.(?P<type>npy|csv)", re.IGNORECASE
)
_ALIASES = {"seizure": "ESZ", "sz": "ESZ", "others": "OTHER"}
Block = tuple[slice, npt.NDArray[Any], npt.NDArray[np.uint8]]


@dataclass(frozen=True)
class IiicOptions(Options):
    """Which rows become samples, and how values become microvolts."""

    limit_patients: int | None = option(None, help="Only the first N patients.", low=1, shown_default="all")
    min_votes: int = option(5, help="Leave out samples with fewer votes.", low=1)
    unvoted: str = option("refuse", help="refuse or skip rows without votes.", choices=("refuse", "skip"))
    scale: float = option(1.0, help="Microvolts per stored unit; 1e6 for volts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"the scale must be a positive number, not {self.scale}")


class Iiic(Source[IiicOptions, Options]):
    """Arrays of signals, votes and patients.

    A folder holds ``signals.npy`` ``(rows, 16, 2000)``, ``votes`` ``(rows, 6)`` and ``patients`` ``(rows,)`` as
    ``.npy`` or ``.csv``; or several such sets, in subfolders or with a common prefix (``training_signals.npy``). A set
    without a file of patients belongs to the one patient it is named after. The column ``signal`` is
    ``(rows, 16, 2000)`` float32 in microvolts; the targets are vote counts over six classes.
    """

    name = "iiic"
    options_class = IiicOptions
    parallel = False
    published = PublishedCounts(
        "IIIC seizure patterns, samples with five or more votes",
        {"patients": 2_702, "samples": 165_309},
        {"OTHER": 0.264, "ESZ": 0.037, "LPD": 0.197, "GPD": 0.242, "LRDA": 0.144, "GRDA": 0.117},
    )
    docs = SourceDocs(
        predicts="seizure patterns from sixteen channels",
        target="six classes, expert votes",
        page="[iiic](datasets/iiic.md)",
        task="seizure patterns",
        files="[IIIC](docs/datasets/iiic.md): signals and expert votes",
    )

    def looks_like(self, folder: Path) -> bool:
        # Patients may have folders of their own; a single folder of arrays is recognised by itself.
        return _has_arrays(folder) or sum(_has_arrays(path) for path in folder.iterdir() if path.is_dir()) > 1

    def prepare(self, raw: Path, out: Path, options: IiicOptions, *, workers: int = 1, overwrite: bool = False) -> Path:
        raw = raw.absolute()
        make_ready(out, overwrite=overwrite)
        parts = find_parts(raw)
        if not parts:
            raise wrong_folder(raw, "IIIC arrays (signals.npy, votes.npy, patients.npy)")
        patients = []
        for part in parts:
            rows = len(open_signals(part))
            read_votes(part, rows, options)
            patients.append(read_patients(part, rows))
        most = options.limit_patients
        chosen = None if most is None else np.unique(np.concatenate(patients))[:most]
        info = DatasetInfo(settings=SETTINGS | {"scale": options.scale})
        with DatasetWriter(out, TargetSpec("votes", CLASSES), info, overwrite=overwrite) as writer:
            readings = _copy(writer, parts, patients, chosen, options)
            verdicts = np.concatenate([reading.verdicts for reading in readings])
            flow = _flow(verdicts, np.concatenate(patients), chosen, options)
            files = [file for reading in readings for file in reading.files()]
            writer.info = with_provenance(writer.info, self.name, files, options.to_json(), flow, raw=raw)
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """All samples that are finite throughout; where nothing says whose they are, a set is of one patient."""
        self.check_trained_on(trained)
        scale = float(trained.settings.get("scale", 1.0))
        groups = {name: files for name, files in group_files(raw).items() if "signals" in files}
        if not groups:
            raise wrong_folder(raw, "IIIC signals (signals.npy)")
        parts = [
            Part(name or raw.resolve().name, files["signals"], None, files.get("patients"))
            for name, files in sorted(groups.items())
        ]
        signals, rows, patients = zip(*(_read_part(part, scale) for part in parts), strict=True)
        numbered = pl.concat(rows)
        if not numbered.height:
            raise DataError(f"{raw}: not one sample is finite throughout, so there is nothing to predict from")
        whole = signals[0] if len(signals) == 1 else np.concatenate(signals)
        yield NewSamples({"signal": torch.from_numpy(whole)}, numbered, np.concatenate(patients))


def _has_arrays(folder: Path) -> bool:
    names = [path.name.lower() for path in folder.iterdir() if path.is_file()]
    votes = any(name.endswith(("votes.npy", "votes.csv")) for name in names)
    return votes and any(name.endswith("signals.npy") for name in names)


# Which arrays belong together, and what they must look like


@dataclass(frozen=True)
class Part:
    """Arrays that belong together; without a file of patients, the part's name is its patient.

    New data to predict need no votes.
    """

    name: str
    signals: Path
    votes: Path | None
    patients: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.signals, self.votes, self.patients) if file is not None)


def group_files(raw: Path) -> dict[str, dict[str, Path]]:
    """The arrays of a folder and its subfolders by the name of their part, then by what they hold."""
    groups: dict[str, dict[str, Path]] = {}
    for path in sorted(raw.rglob("*")) if raw.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        name = "/".join(filter(None, [*path.parent.relative_to(raw).parts, match["part"] or ""]))
        role = _ROLES[match["role"].lower()]
        files = groups.setdefault(name, {})
        if role in files:
            raise DataError(f"{files[role]} and {path.name} both hold the {role} of one part: keep one of them")
        files[role] = path
    return groups


def find_parts(raw: Path) -> list[Part]:
    """The parts of a folder and its subfolders, sorted by name."""
    groups = group_files(raw)
    if not any("signals" in files or "votes" in files for files in groups.values()):
        return []
    parts = []
    for name, files in sorted(groups.items()):
        for role in ("signals", "votes"):
            if role not in files:
                there = next(iter(files.values()))
                match = _NAME.fullmatch(there.name)
                start = there.name[: match.start("role")] if match else ""
                raise DataError(f"{there} has no {role} beside it: expected {there.with_name(f'{start}{role}.npy')}")
        if "patients" not in files and not name:
            raise DataError(f"{raw} says nowhere whose the samples are: add patients.npy, or use one folder a patient")
        parts.append(Part(name, files["signals"], files["votes"], files.get("patients")))
    return parts


def open_signals(part: Part) -> npt.NDArray[Any]:
    """The memory-mapped signals of a part, ``(rows, 16, 2000)``, checked for shape and type."""
    array = _load(part.signals)
    if array.dtype.kind not in "fi":
        raise DataError(f"{part.signals} holds {array.dtype} values; signals are numbers")
    expected = (len(CHANNELS), SAMPLES)
    if array.ndim != 3 or array.shape[1:] != expected:
        raise DataError(
            f"{part.signals} has shape {array.shape}; expected (rows, 16, 2000): 16 channels, 10 s at {RATE:g} Hz"
        )
    return array


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        return np.asanyarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except DAMAGED_NPY as error:
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which are never loaded: save plain arrays of numbers or text instead"
            ) from error
        raise DataError(f"{path} is truncated or not a .npy file: copy it again") from error


def read_votes(part: Part, rows: int, options: IiicOptions) -> npt.NDArray[np.float32]:
    """Vote counts ``(rows, 6)`` in the order of ``CLASSES``."""
    path = part.votes
    assert path is not None
    header: list[str] = []
    if path.suffix.lower() == ".csv":
        header, cells = _read_csv(path)
        try:
            votes = np.array(cells, dtype=np.float64).reshape(len(cells), -1)
        except ValueError:
            raise DataError(f"{path} holds something that is no number, or rows of different lengths") from None
    else:
        votes = np.asarray(_load(path))
    if votes.dtype.kind not in "fiu" or votes.ndim != 2:
        raise DataError(f"{path} has shape {votes.shape} and type {votes.dtype}; expected numbers (rows, 6)")
    order = _columns(path, header, votes.shape[1])
    _check_rows(path, len(votes), rows, part.signals)
    votes = votes[:, order].astype(np.float64)
    bad = ~np.isfinite(votes) | (votes < 0) | (votes != np.round(votes))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(f"{path}, row {row}: {votes[row, column]:g} is no number of votes")
    empty = np.nonzero(votes.sum(axis=1) == 0)[0]
    if len(empty) and options.unvoted == "refuse":
        raise DataError(
            f"{path}, row {empty[0]}: no expert voted ({len(empty)} such rows). "
            "Mend the file, or leave such rows out with '--unvoted skip'"
        )
    return votes.astype(np.float32)


def _columns(path: Path, header: Sequence[str], columns: int) -> list[int]:
    if header:
        plain = [name.strip().lower().removesuffix("_vote").removesuffix("_votes") for name in header]
        names = [_ALIASES.get(name, name.upper()) for name in plain]
        missing = [name for name in CLASSES if name not in names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]}; its columns are {', '.join(header)}")
        return [names.index(name) for name in CLASSES]
    if columns != len(CLASSES):
        raise DataError(f"{path} has {columns} columns; expected six: {', '.join(CLASSES)}")
    return list(range(columns))


def read_patients(part: Part, rows: int) -> npt.NDArray[np.str_]:
    """Whose each row is, ``(rows,)``."""
    if part.patients is None:
        return np.full(rows, part.name)
    if part.patients.suffix.lower() == ".csv":
        header, cells = _read_csv(part.patients, text=True)
        column = next((k for k, name in enumerate(header) if "patient" in name.lower() or "key" in name.lower()), 0)
        keys = np.array([row[column] if len(row) > column else "" for row in cells], dtype=str)
    else:
        stored = np.asarray(_load(part.patients))
        if stored.ndim != 1 or stored.dtype.kind not in "iuUS":
            raise DataError(
                f"{part.patients} has shape {stored.shape} and type {stored.dtype}; expected one id a row, text or "
                "whole numbers"
            )
        keys = _as_text(part.patients, stored)
    _check_rows(part.patients, len(keys), rows, part.signals)
    empty = np.nonzero(np.char.strip(keys) == "")[0]
    if len(empty):
        raise DataError(f"{part.patients}, row {empty[0]}: the patient's id is empty")
    return keys


def _as_text(path: Path, stored: npt.NDArray[Any]) -> npt.NDArray[np.str_]:
    """Ids as text; a stored letter that is no letter would crash whatever prints or hashes it later."""
    if stored.dtype.kind == "U":
        letters = np.ascontiguousarray(stored).astype(stored.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
        readable = not ((letters >= 0x110000) | ((letters >= 0xD800) & (letters < 0xE000))).any()
    else:
        readable = stored.dtype.kind != "S" or not (stored.reshape(-1).view(np.uint8) >= 0x80).any()
    if not readable:
        raise DataError(f"{path} is damaged: some ids hold letters that do not exist")
    return stored.astype(str)


def _check_rows(path: Path, rows: int, expected: int, signals: Path) -> None:
    if rows != expected:
        raise DataError(f"{path} has {rows} rows, but {signals.name} has {expected}: they do not belong together")


def _read_csv(path: Path, *, text: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header (empty where the first row is data) and rows of a CSV file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty")
    first = [cell.strip().lower() for cell in rows[0]]
    named = any("patient" in cell or "key" in cell for cell in first) if text else not _is_number(first[0])
    return (rows[0], rows[1:]) if named else ([], rows)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# A part read in blocks: hashed, checked and passed on at once


class PartReading:
    """A part read once from end to end, for its checksum and for what becomes of each row."""

    def __init__(self, part: Part, options: IiicOptions) -> None:
        self._part, self._scale = part, options.scale
        self._signals = open_signals(part)
        self.votes = read_votes(part, len(self._signals), options)
        self.verdicts = np.where(self.votes.sum(axis=1) < options.min_votes, FEW_VOTES, KEPT).astype(np.uint8)
        self._digest = hashlib.sha256()

    def blocks(self) -> Iterator[Block]:
        """Rows, their stored signals and verdicts, a block at a time.

        Blocks are hashed by a background thread meanwhile, so that they must not be changed.
        """
        with closing(HashingThread()) as hashing:
            for rows, stored in self._stored_blocks(hashing):
                if rows.start == 0:
                    check_unit(self._part, stored, self._scale)
                block = self.verdicts[rows]
                block[(block == KEPT) & ~_is_finite(stored)] = NOT_FINITE
                yield rows, stored, block
            hashing.wait()

    def _stored_blocks(self, hashing: HashingThread) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        every = range(0, len(self._signals), BLOCK)
        if not self._signals.flags.c_contiguous:
            # Each block through a map of its own, so that pages already read do not pile up.
            yield from ((rows, open_signals(self._part)[rows]) for rows in (slice(at, at + BLOCK) for at in every))
            return
        head = int(getattr(self._signals, "offset", 0))
        # Where a file is too large to stay in memory, what has been read of it makes room for what comes.
        step = DROP_EVERY if self._part.signals.stat().st_size >= LARGE_FILE else math.inf
        with reading_errors(self._part.signals), self._part.signals.open("rb", buffering=0) as file:
            self._digest.update(file.read(head))
            at = dropped = head
            for start in every:
                rows = slice(start, min(start + BLOCK, len(self._signals)))
                # Read, not mapped: a copy costs less than a fault for every few pages.
                stored = np.empty((rows.stop - start, *self._signals.shape[1:]), self._signals.dtype)
                data = stored.reshape(-1).view(np.uint8).data
                read_into(file, data)
                at += len(data)
                if at - dropped >= step:
                    drop_from_cache(file.fileno(), dropped, at)
                    dropped = at
                hashing.update(self._digest, data)
                yield rows, stored
            hashing.update(self._digest, memoryview(file.read()))

    def files(self) -> list[SourceFile]:
        """The part's files with their checksums, once all blocks are read."""
        path = self._part.signals
        entry = SourceFile(path.name, path.stat().st_size, self._digest.hexdigest())
        if not self._signals.flags.c_contiguous:
            # Rows of a column-major file do not lie one after the other, so its bytes are read by themselves.
            (entry,) = describe_files([path])
        return [entry, *describe_files([file for file in self._part.files if file != path])]


def _is_finite(stored: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether every value of a row is finite, ``(rows,)``."""
    finite = np.ones(len(stored), bool)
    if stored.dtype.kind == "f":
        # A sum is finite only if every term is: one fast pass finds the few rows that need a closer look.
        with np.errstate(invalid="ignore", over="ignore"):
            suspects = np.nonzero(~np.isfinite(stored.sum(axis=(1, 2))))[0]
        finite[suspects] = np.isfinite(stored[suspects]).all(axis=(1, 2))
    return finite


def check_unit(part: Part, stored: npt.NDArray[Any], scale: float) -> None:
    """Raise if values are far too small for microvolts."""
    known = stored[:64][np.isfinite(stored[:64])]
    typical = float(np.median(np.abs(known.astype(np.float64)))) * scale if known.size else 0.0
    if 0 < typical < 1e-2:
        raise DataError(
            f"{part.signals}: a typical value is {typical:.1e}, far too small for microvolts. "
            "If the signals are in volts, say '--scale 1e6' (millivolts: 1e3)"
        )


def _read_part(part: Part, scale: float) -> tuple[npt.NDArray[np.float32], pl.DataFrame, npt.NDArray[np.str_]]:
    stored = open_signals(part)
    check_unit(part, stored[:32], scale)
    finite = np.array([bool(np.isfinite(sample).all()) for sample in stored], bool)
    if not finite.all():
        note = f"{part.signals}: {int((~finite).sum())} of {len(stored)} samples hold values that are not finite"
        warn(f"{note}; they get no prediction")
    patients = read_patients(part, len(stored))[finite]
    signal = np.asarray(stored[finite], np.float32) * np.float32(scale)
    rows = np.flatnonzero(finite)
    return signal, pl.DataFrame({"part": [part.name] * len(rows), "row": rows}), patients


def _flow(
    verdicts: npt.NDArray[np.uint8],
    patients: npt.NDArray[np.str_],
    chosen: npt.NDArray[np.str_] | None,
    options: IiicOptions,
) -> CohortFlow:
    flow = CohortFlow()
    flow.add("samples found", patients=len(np.unique(patients)), samples=len(verdicts))
    beyond = np.zeros(len(patients), bool) if chosen is None else ~np.isin(patients, chosen)
    steps = {"limit on patients": beyond} if beyond.any() else {}
    steps[f"at least {options.min_votes} votes"] = ~beyond & (verdicts == FEW_VOTES)
    steps["finite signal"] = ~beyond & (verdicts == NOT_FINITE)
    left = np.ones(len(verdicts), bool)
    for step, dropped in steps.items():
        left &= ~dropped
        flow.add(step, patients=len(np.unique(patients[left])), samples=int(left.sum()), left_out=int(dropped.sum()))
    return flow


def _copy(
    writer: DatasetWriter,
    parts: Sequence[Part],
    patients: Sequence[npt.NDArray[np.str_]],
    chosen: npt.NDArray[np.str_] | None,
    options: IiicOptions,
) -> list[PartReading]:
    """Write the samples, a block at a time; returns what was read."""
    readings = []
    with Progress("copying signals", total=sum(map(len, patients))) as progress:
        for part, keys in zip(parts, patients, strict=True):
            wanted = np.ones(len(keys), bool) if chosen is None else np.isin(keys, chosen)
            reading = PartReading(part, options)
            for rows, stored, verdicts in reading.blocks():
                kept = wanted[rows] & (verdicts == KEPT)
                _write_kept(writer, stored, kept, reading.votes[rows], keys[rows], options.scale)
                progress.advance(len(kept))
            readings.append(reading)
    return readings


def _write_kept(
    writer: DatasetWriter,
    stored: npt.NDArray[Any],
    kept: npt.NDArray[np.bool_],
    votes: npt.NDArray[Any],
    keys: npt.NDArray[np.str_],
    scale: float,
) -> None:
    if kept.any():
        signal = np.asarray(stored if kept.all() else stored[kept], np.float32)
        signal = signal if scale == 1.0 else signal * np.float32(scale)
        writer.append_immutable({"signal": signal}, votes[kept], keys[kept])
