"""Predictions of a trained model on samples whose truth is known, what is decided from them, and their file.

``predictions.npz`` of a run folder has the validation and the test patients' samples one after the other: ``split`` (0
or 1), ``row`` (position in the dataset), ``patient`` (index into ``pseudonyms``), ``probabilities`` and ``truth``.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import StorageError
from manydg.files import private, replacing, unpacked_limit
from manydg.targets import Target

Array = npt.NDArray[Any]
DEFAULT_THRESHOLD = 0.5
_SIDES = ("val", "test")
# What NumPy and the archives beneath it raise for a damaged file.
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError, SyntaxError,
    MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def decide(target: Target, probabilities: Array, threshold: float | None = None) -> npt.NDArray[np.int64]:
    """Class codes ``(rows,)`` or label indicators ``(rows, K)`` from probabilities ``(rows, K)``.

    Exclusive classes take the most probable one, a binary target the second class from ``threshold`` upwards, and
    every label of a multi-label target is present from ``threshold`` upwards. Without a threshold it is 0.5.
    """
    if target.exclusive and target.kind != "binary":
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    scores = probabilities[:, 1] if target.kind == "binary" else probabilities
    # In float64, lest a threshold between two neighbouring float32 scores be rounded onto one of them.
    chosen = np.asarray(scores, np.float64) >= (DEFAULT_THRESHOLD if threshold is None else threshold)
    return np.asarray(chosen, np.int64)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities and truth of some patients' samples.

    Parameters
    ----------
    target : Target
    truth : (rows,) class codes, or (rows, K) indicators for multi-label
    probabilities : (rows, K)
    patients : (rows,)
        Pseudonyms or codes; where runs are compared, the same name means the same person in each.
    threshold : float, optional
        Decision threshold of binary and multi-label targets; 0.5 if not given.
    rows : (rows,), optional
        Position of each sample in the dataset.
    """

    target: Target
    truth: Array
    probabilities: Array
    patients: Array
    threshold: float | None = None
    rows: npt.NDArray[np.int64] | None = None

    @property
    def names(self) -> Array:
        """The distinct patients, sorted."""
        return self._grouping[0]

    @property
    def groups(self) -> npt.NDArray[np.intp]:
        """Index of each row's patient in ``names``."""
        return self._grouping[1]

    @cached_property
    def _grouping(self) -> tuple[Array, npt.NDArray[np.intp]]:
        return np.unique(self.patients, return_inverse=True)

    def decisions(self) -> npt.NDArray[np.int64]:
        """Class codes ``(rows,)`` or label indicators ``(rows, K)``."""
        return decide(self.target, self.probabilities, self.threshold)


def write_predictions(path: Path, held_out: Mapping[str, Predictions]) -> None:
    """Write the predictions on validation (``val``) and ``test`` patients, who are named by pseudonyms."""
    sides = [held_out[side] for side in _SIDES]
    offsets = (0, len(sides[0].names))
    columns: dict[str, list[Array]] = {
        "split": [np.full(len(side.truth), code, np.int8) for code, side in enumerate(sides)],
        "row": [np.full(len(side.truth), -1) if side.rows is None else side.rows for side in sides],
        "patient": [side.groups + offset for side, offset in zip(sides, offsets, strict=True)],
        "pseudonyms": [side.names for side in sides],
        "probabilities": [side.probabilities for side in sides],
        "truth": [side.truth for side in sides],
    }
    # numpy's keywords are arrays and a bool, which no type says.
    joined: Any = {name: np.concatenate(parts) for name, parts in columns.items()}
    with replacing(path) as partial, open(partial, "wb", opener=private) as file:
        np.savez_compressed(file, **joined)


def read_predictions(path: Path, side: str, target: Target, threshold: float | None = None) -> Predictions:
    """Read the predictions on the ``val`` or the ``test`` patients.

    Raises
    ------
    StorageError
        If the file is missing or damaged.
    """
    try:
        _check_unpacked_size(path)
        with np.load(path, allow_pickle=False) as arrays:
            chosen = arrays["split"] == _SIDES.index(side)
            patients = arrays["pseudonyms"][arrays["patient"][chosen]]
            truth, probabilities, rows = (arrays[name][chosen] for name in ("truth", "probabilities", "row"))
    except _DAMAGED as error:
        raise StorageError(f"{path} cannot be read ({error}): delete the run's folder and run it again") from error
    return Predictions(target, truth, probabilities, patients, threshold, rows)


def _check_unpacked_size(path: Path) -> None:
    """Raise a plain error if an archive announces, and so may unpack to, more than any predictions take."""
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > (limit := unpacked_limit(path)):
        raise ValueError(f"it unpacks to {total / 2**20:,.0f} MB, more than the {limit / 2**20:,.0f} MB allowed")
