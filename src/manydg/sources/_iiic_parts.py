"""The IIIC hand-out: which arrays belong together, what they must look like, and which rows are samples.

This module does not import torch, so that worker processes start quickly.
"""

from __future__ import annotations

import csv
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import DataError, StorageError
from manydg.sources._iiic_rules import CLASSES, Rules

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
