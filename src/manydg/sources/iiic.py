"""IIIC seizure patterns: ten-second EEG samples with the votes of several experts."""

from __future__ import annotations

import csv
import hashlib
import math
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column
from manydg.data.info import DatasetInfo, SourceFile, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.files import LARGE_FILE, HashingThread, Json, drop_from_cache, reading_errors
from manydg.jobs import Job
from manydg.sources._preparing import (
    CohortFlow,
    Progress,
    WorkFolder,
    describe_files,
    make_ready,
    read_into,
    run_jobs,
    spreads,
    with_provenance,
    wrong_folder,
)
from manydg.synthetic.iiic import synthesize

# Which IIIC samples are used: the vote rule, values that are not finite, and artefacts.


CLASSES = ("OTHER", "ESZ", "LPD", "GPD", "LRDA", "GRDA")
KEPT, FEW_VOTES, NOT_FINITE, LOUD, FLAT = range(5)


@dataclass(frozen=True)
class Rules:
    """Which rows become samples, and how values become microvolts."""

    min_votes: int = 5
    unvoted: str = "refuse"
    scale: float = 1.0
    max_amplitude: float | None = None
    flat_below: float | None = None
    vote_order: tuple[str, ...] = CLASSES

    def __post_init__(self) -> None:
        if self.min_votes < 1:
            raise ConfigError(f"the least number of votes must be 1 or more, not {self.min_votes}")
        if self.unvoted not in ("refuse", "skip"):
            raise ConfigError(f"rows without votes can be met with 'refuse' or 'skip', not '{self.unvoted}'")
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"the scale must be a positive number, not {self.scale}")
        if sorted(self.vote_order) != sorted(CLASSES):
            raise ConfigError(f"the vote order must name each of {', '.join(CLASSES)} once")
        for name, value in (("amplitude", self.max_amplitude), ("flatness", self.flat_below)):
            if value is not None and not value > 0:
                raise ConfigError(f"the {name} limit is a positive number of microvolts, not {value}")


def judge(stored: npt.NDArray[Any], rules: Rules) -> npt.NDArray[np.uint8]:
    """Whether the signals of a block are fit to use, ``(rows,)``: values that are not finite, artefacts, or kept."""
    verdicts = np.full(len(stored), KEPT, np.uint8)
    if stored.dtype.kind == "f":
        # A sum is finite only if every term is: one fast pass finds the few rows that need a closer look.
        with np.errstate(invalid="ignore", over="ignore"):
            suspects = np.nonzero(~np.isfinite(stored.sum(axis=(1, 2))))[0]
        verdicts[suspects[~np.isfinite(stored[suspects]).all(axis=(1, 2))]] = NOT_FINITE
    usable = np.nonzero(verdicts == KEPT)[0]
    signals = stored if len(usable) == len(stored) else stored[usable]
    if rules.flat_below is not None:
        flat = signals.std(axis=2, dtype=np.float32) < rules.flat_below / rules.scale
        verdicts[usable[flat.any(axis=1)]] = FLAT
    if rules.max_amplitude is not None:
        most = rules.max_amplitude / rules.scale
        verdicts[usable[(signals.max(axis=(1, 2)) > most) | (signals.min(axis=(1, 2)) < -most)]] = LOUD
    return verdicts


# The IIIC hand-out: which arrays belong together, what they must look like, and which rows are samples.
#
# This module does not import torch, so that worker processes start quickly.


CHANNELS = (
    "Fp1-F7", "F7-T3", "T3-T5", "T5-O1", "Fp2-F8", "F8-T4", "T4-T6", "T6-O2",
    "Fp1-F3", "F3-C3", "C3-P3", "P3-O1", "Fp2-F4", "F4-C4", "C4-P4", "P4-O2",
)  # fmt: skip
RATE, SAMPLES = 200.0, 2000

_ROLES = {"signals": "signals", "x": "signals", "votes": "votes", "y": "votes"} | dict.fromkeys(
    ("patients", "patient", "keys", "key"), "patients"
)
_NAME = re.compile(
    r"(?:(?P<part>.*)[_.-])?(?P<role>signals|x|votes|y|patients?|keys?)\.(?P<type>npy|csv)", re.IGNORECASE
)
# What numpy's reader raises for a header that is cut or garbled, found by fuzzing it.
_DAMAGED_HEADER = (
    ValueError,
    EOFError,
    SyntaxError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)
_ALIASES = {"seizure": "ESZ", "sz": "ESZ", "others": "OTHER"}


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
                raise DataError(f"{there} has no {role} beside it: expected {there.with_name(_partner(there, role))}")
        if "patients" not in files and not name:
            raise DataError(f"{raw} says nowhere whose the samples are: add patients.npy, or use one folder a patient")
        parts.append(Part(name, files["signals"], files["votes"], files.get("patients")))
    return parts


def _partner(path: Path, role: str) -> str:
    match = _NAME.fullmatch(path.name)
    start = path.name[: match.start("role")] if match else ""
    return f"{start}{role}.npy"


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


def signal_block(part: Part, rows: slice) -> npt.NDArray[Any]:
    """Some rows of a part's signals, through a map of their own, so that pages already read do not pile up."""
    block: npt.NDArray[Any] = open_signals(part)[rows]
    return block


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        return np.asanyarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except _DAMAGED_HEADER as error:
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which are never loaded: save plain arrays of numbers or text instead"
            ) from error
        raise DataError(f"{path} is truncated or not a .npy file: copy it again") from error


def read_votes(part: Part, rows: int, rules: Rules) -> npt.NDArray[np.float32]:
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
    order = _columns(path, header, votes.shape[1], rules)
    _check_rows(path, len(votes), rows, part.signals)
    votes = votes[:, order].astype(np.float64)
    bad = ~np.isfinite(votes) | (votes < 0) | (votes != np.round(votes))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(f"{path}, row {row}: {votes[row, column]:g} is no number of votes")
    empty = np.nonzero(votes.sum(axis=1) == 0)[0]
    if len(empty) and rules.unvoted == "refuse":
        raise DataError(
            f"{path}, row {empty[0]}: no expert voted ({len(empty)} such rows). "
            "Mend the file, or leave such rows out with '--unvoted skip'"
        )
    return votes.astype(np.float32)


def _columns(path: Path, header: Sequence[str], columns: int, rules: Rules) -> list[int]:
    if header:
        plain = [name.strip().lower().removesuffix("_vote").removesuffix("_votes") for name in header]
        names = [_ALIASES.get(name, name.upper()) for name in plain]
        missing = [name for name in CLASSES if name not in names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]}; its columns are {', '.join(header)}")
        return [names.index(name) for name in CLASSES]
    if columns != len(CLASSES):
        raise DataError(f"{path} has {columns} columns; expected six: {', '.join(rules.vote_order)}")
    return [rules.vote_order.index(name) for name in CLASSES]


def read_patients(part: Part, rows: int) -> npt.NDArray[np.str_]:
    """Whose each row is, ``(rows,)``."""
    if part.patients is None:
        return np.full(rows, part.name)
    if part.patients.suffix.lower() == ".csv":
        header, cells = _read_csv(part.patients, text=True)
        place = next((k for k, name in enumerate(header) if "patient" in name.lower() or "key" in name.lower()), 0)
        keys = np.array([row[place] if len(row) > place else "" for row in cells], dtype=str)
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


def _check_rows(path: Path, found: int, expected: int, signals: Path) -> None:
    if found != expected:
        raise DataError(f"{path} has {found} rows, but {signals.name} has {expected}: they do not belong together")


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


# The rows of an IIIC part read in blocks: hashed, judged and handed on in one pass.
#
# This module does not import torch, so that worker processes start quickly.


BLOCK = 32
"""Rows at a time: a few megabytes, which stay in the processor's cache between reading, judging and writing."""
LET_GO = 1 << 27
Block = tuple[slice, npt.NDArray[Any], npt.NDArray[np.uint8]]


class PartReading:
    """A part read once from end to end, for its checksum and for what becomes of each row.

    Parameters
    ----------
    part : Part
    rules : Rules
    """

    def __init__(self, part: Part, rules: Rules) -> None:
        self._part, self._rules = part, rules
        self._signals = open_signals(part)
        votes = read_votes(part, len(self._signals), rules)
        self._verdicts = np.where(votes.sum(axis=1) < rules.min_votes, FEW_VOTES, KEPT).astype(np.uint8)
        self._digest = hashlib.sha256()

    def blocks(self) -> Iterator[Block]:
        """Rows, their stored signals and verdicts, a block at a time.

        Blocks are hashed behind the caller's back, so that nobody may change them.
        """
        with closing(HashingThread()) as hashing:
            for rows, stored in self._stored_blocks(hashing):
                if rows.start == 0:
                    check_unit(self._part, stored, self._rules)
                block, judged = self._verdicts[rows], judge(stored, self._rules)
                block[block == KEPT] = judged[block == KEPT]
                yield rows, stored, block
            hashing.wait()

    def _stored_blocks(self, hashing: HashingThread) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        every = range(0, len(self._signals), BLOCK)
        if not self._signals.flags.c_contiguous:
            yield from ((rows, signal_block(self._part, rows)) for rows in (slice(at, at + BLOCK) for at in every))
            return
        head = int(getattr(self._signals, "offset", 0))
        # Where a file is too large to stay in memory, what has been read of it makes room for what comes.
        step = LET_GO if self._part.signals.stat().st_size >= LARGE_FILE else math.inf
        with reading_errors(self._part.signals), self._part.signals.open("rb", buffering=0) as file:
            self._digest.update(file.read(head))
            at = gone = head
            for start in every:
                rows = slice(start, min(start + BLOCK, len(self._signals)))
                # Read, not mapped: a copy costs less than a fault for every few pages.
                stored = np.empty((rows.stop - start, *self._signals.shape[1:]), self._signals.dtype)
                data = stored.reshape(-1).view(np.uint8).data
                read_into(file, data)
                at += len(data)
                if at - gone >= step:
                    drop_from_cache(file.fileno(), gone, at)
                    gone = at
                hashing.update(self._digest, data)
                yield rows, stored
            hashing.update(self._digest, memoryview(file.read()))

    def plan(self) -> dict[str, Any]:
        """What was found, once all blocks are read, as JSON values: ``verdicts`` (a digit for each row) and ``files``
        with their checksums."""
        path = self._part.signals
        entry = SourceFile(path.name, path.stat().st_size, self._digest.hexdigest())
        if not self._signals.flags.c_contiguous:
            # Rows of a column-major file do not lie one after the other, so its bytes are read by themselves.
            (entry,) = describe_files([path])
        others = describe_files([file for file in self._part.files if file != path])
        files = [file.to_json() for file in (entry, *others)]
        return {"verdicts": "".join(map(str, self._verdicts.tolist())), "files": files}


def plan_part(argument: tuple[Part, Rules]) -> dict[str, Any]:
    """Read a part for its :meth:`PartReading.plan` alone."""
    reading = PartReading(*argument)
    for _ in reading.blocks():
        pass
    return reading.plan()


class PlannedReading:
    """A part whose plan is known: blocks without a single sample are not read."""

    def __init__(self, part: Part, plan: dict[str, Any]) -> None:
        self._part, self._plan = part, plan

    def blocks(self) -> Iterator[Block]:
        """As those of :class:`PartReading`."""
        verdicts = verdicts_in(self._plan)
        for start in range(0, len(verdicts), BLOCK):
            rows = slice(start, start + BLOCK)
            if (verdicts[rows] == KEPT).any():
                yield rows, signal_block(self._part, rows), verdicts[rows]

    def plan(self) -> dict[str, Any]:
        return self._plan


def verdicts_in(plan: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """What becomes of each row, ``(rows,)``."""
    return np.frombuffer(plan["verdicts"].encode(), np.uint8) - np.uint8(ord("0"))


def check_unit(part: Part, stored: npt.NDArray[Any], rules: Rules) -> None:
    """Raise if values are far too small for microvolts."""
    typical = float(np.nanmedian(np.abs(stored[:64].astype(np.float64)))) * rules.scale
    if 0 < typical < 1e-2:
        raise DataError(
            f"{part.signals}: a typical value is {typical:.1e}, far too small for microvolts. "
            "If the signals are in volts, say '--scale 1e6' (millivolts: 1e3)"
        )


# New EEG samples without votes: from arrays to a model's inputs.


def prepare_for_prediction(
    raw: str | Path, settings: Mapping[str, Any]
) -> tuple[dict[str, Column], pl.DataFrame, npt.NDArray[np.str_]]:
    """New samples as a trained model's inputs.

    Parameters
    ----------
    raw : path
        As for preparing, but without votes. Where nothing says whose the samples are, they are of one patient.
    settings : dict
        ``info["settings"]`` of the training dataset; its ``scale`` turns stored values into microvolts.

    Returns
    -------
    columns : dict
        ``signal``, ``(rows, 16, 2000)``.
    rows : DataFrame
        ``part`` (where there are several) and ``row`` of each sample; those that are not finite are left out.
    patients : array ``(rows,)``
    """
    folder, scale = Path(raw), float(settings.get("scale", 1.0))
    groups = {name: files for name, files in group_files(folder).items() if "signals" in files}
    if not groups:
        raise wrong_folder(folder, "IIIC signals (signals.npy)")
    parts = [
        Part(name or folder.resolve().name, files["signals"], None, files.get("patients"))
        for name, files in sorted(groups.items())
    ]
    signals, rows, patients = zip(*(_read_part(part, scale) for part in parts), strict=True)
    numbered = pl.concat(rows)
    if not numbered.height:
        raise DataError(f"{folder}: not one sample is finite throughout, so there is nothing to predict from")
    whole = signals[0] if len(signals) == 1 else np.concatenate(signals)
    return {"signal": torch.from_numpy(whole)}, numbered, np.concatenate(patients)


def _read_part(part: Part, scale: float) -> tuple[npt.NDArray[np.float32], pl.DataFrame, npt.NDArray[np.str_]]:
    stored = open_signals(part)
    check_unit(part, stored[:32], Rules(scale=scale))
    finite = np.array([bool(np.isfinite(sample).all()) for sample in stored], bool)
    if not finite.all():
        note = f"{part.signals}: {int((~finite).sum())} of {len(stored)} samples hold values that are not finite"
        warnings.warn(f"{note}; they get no prediction", ManyDGWarning, stacklevel=4)
    patients = read_patients(part, len(stored))[finite]
    signal = np.asarray(stored[finite], np.float32) * np.float32(scale)
    rows = np.flatnonzero(finite)
    return signal, pl.DataFrame({"part": [part.name] * len(rows), "row": rows}), patients


__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

SETTINGS: dict[str, Json] = {"rate": RATE, "channels": list(CHANNELS), "unit": "uV"}
_LIMITED = 9


def prepare(
    raw: Path,
    out: Path,
    *,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    min_votes: int = 5,
    unvoted: str = "refuse",
    max_amplitude: float | None = None,
    flat_below: float | None = None,
    scale: float = 1.0,
    vote_order: Sequence[str] = CLASSES,
) -> Path:
    """Make a dataset folder from arrays of signals, votes and patient keys.

    The column ``signal`` is ``(rows, 16, 2000)`` float32 in microvolts; the targets are vote counts over six classes.

    Parameters
    ----------
    raw : path
        Holds ``signals.npy`` ``(rows, 16, 2000)``, ``votes`` ``(rows, 6)`` and ``patients`` ``(rows,)`` as ``.npy`` or
        ``.csv``; or several such sets, in subfolders or with a common prefix (``training_signals.npy``). A set without
        a file of patients belongs to the one patient it is named after.
    min_votes : int
        Samples with fewer votes are left out (the paper: five).
    unvoted : {"refuse", "skip"}
        What to do about a row without a single vote.
    max_amplitude : float, optional
        Artefact filter: leave out samples that exceed so many microvolts anywhere.
    flat_below : float, optional
        Artefact filter: leave out samples in which a channel's standard deviation is under so many microvolts.
    scale : float
        Microvolts per unit of the stored signals.
    vote_order : sequence of str
        Which class each column of the votes is, where the file does not say.
    """
    raw, out = Path(raw).absolute(), Path(out)
    rules = Rules(min_votes, unvoted, scale, max_amplitude, flat_below, tuple(vote_order))
    if limit_patients is not None and limit_patients < 1:
        raise ConfigError(f"the limit on patients must be 1 or more, not {limit_patients}")
    make_ready(out, overwrite=overwrite)
    parts = find_parts(raw)
    if not parts:
        raise wrong_folder(raw, "IIIC arrays (signals.npy, votes.npy, patients.npy)")
    work = WorkFolder(out, "iiic", asdict(rules))
    jobs = [Job(part.name, part.files, (part, rules)) for part in parts]
    patients = [_check_part(part, rules) for part in parts]
    if spreads(workers):
        run_jobs(plan_part, jobs, work, workers=workers, title="checking samples")
    chosen = None if limit_patients is None else np.unique(np.concatenate(patients))[:limit_patients]
    with DatasetWriter(
        out, TargetSpec("votes", CLASSES), DatasetInfo(settings=SETTINGS | {"scale": scale}), overwrite=overwrite
    ) as writer:
        plans = _copy(writer, jobs, patients, chosen, work)
        limited = [_limit(verdicts_in(plan), keys, chosen) for plan, keys in zip(plans, patients, strict=True)]
        flow = _flow(np.concatenate(limited), np.concatenate(patients), rules)
        options = asdict(rules) | {"vote_order": list(rules.vote_order), "limit_patients": limit_patients}
        files = [SourceFile.from_json(entry) for plan in plans for entry in plan["files"]]
        writer.info = with_provenance(writer.info, "iiic", files, options, flow)
    work.remove()
    return out


def _check_part(part: Part, rules: Rules) -> npt.NDArray[np.str_]:
    """Whose each row is, once the part's files are known to fit together."""
    rows = len(open_signals(part))
    read_votes(part, rows, rules)
    return read_patients(part, rows)


def _limit(
    verdicts: npt.NDArray[np.uint8], keys: npt.NDArray[np.str_], chosen: npt.NDArray[np.str_] | None
) -> npt.NDArray[np.uint8]:
    return verdicts if chosen is None else np.where(np.isin(keys, chosen), verdicts, _LIMITED).astype(np.uint8)


def _flow(verdicts: npt.NDArray[np.uint8], patients: npt.NDArray[np.str_], rules: Rules) -> CohortFlow:
    flow = CohortFlow()
    left = np.ones(len(verdicts), bool)
    flow.add("samples found", patients=len(np.unique(patients)), samples=len(verdicts))
    steps = {
        "limit on patients": _LIMITED,
        f"at least {rules.min_votes} votes": FEW_VOTES,
        "finite signal": NOT_FINITE,
    }
    if rules.flat_below is not None:
        steps[f"no channel flat (under {rules.flat_below:g} uV)"] = FLAT
    if rules.max_amplitude is not None:
        steps[f"amplitude up to {rules.max_amplitude:g} uV"] = LOUD
    for step, reason in steps.items():
        if reason == _LIMITED and not (verdicts == _LIMITED).any():
            continue
        dropped = verdicts == reason
        left &= ~dropped
        flow.add(step, patients=len(np.unique(patients[left])), samples=int(left.sum()), left_out=int(dropped.sum()))
    return flow


def _copy(
    writer: DatasetWriter,
    jobs: Sequence[Job[Any]],
    patients: Sequence[npt.NDArray[np.str_]],
    chosen: npt.NDArray[np.str_] | None,
    work: WorkFolder,
) -> list[dict[str, Any]]:
    """Write the samples, a block at a time; a part that is not planned yet is planned by the way. Returns the plans."""
    plans = []
    with Progress("copying signals", total=sum(map(len, patients))) as progress:
        for job, keys in zip(jobs, patients, strict=True):
            part, rules = job.argument
            votes = read_votes(part, len(keys), rules)
            plan = work.load(job)
            reading = PartReading(part, rules) if plan is None else PlannedReading(part, plan)
            for rows, stored, verdicts in reading.blocks():
                kept = _limit(verdicts, keys[rows], chosen) == KEPT
                if kept.any():
                    signal = _microvolts(stored, kept, rules)
                    writer.append_immutable({"signal": signal}, votes[rows][kept], keys[rows][kept])
                progress.advance(len(kept))
            plans.append(reading.plan())
            if plan is None:
                work.save(job, plans[-1])
    return plans


def _microvolts(stored: npt.NDArray[Any], kept: npt.NDArray[np.bool_], rules: Rules) -> npt.NDArray[np.float32]:
    values = np.asarray(stored if kept.all() else stored[kept], np.float32)
    return values if rules.scale == 1.0 else values * np.float32(rules.scale)
