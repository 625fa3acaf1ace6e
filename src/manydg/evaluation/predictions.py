"""Predictions of a trained model on samples whose truth is known, what is decided from them, and their file.

``predictions.npz`` of a run folder has the validation and the test patients' samples one after the other: ``split`` (0
or 1), ``row`` (position in the dataset), ``patient`` (index into ``pseudonyms``), ``probabilities`` and ``truth``.
Where there is an event, ``times``, ``onset`` and ``session``; and ``subgroup0``, ``subgroup1``, ... of ``subgroups``.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.info import EventSpec
from manydg.errors import DataError, StorageError
from manydg.files import private, replacing, unpacked_limit
from manydg.targets import Target

Array = npt.NDArray[Any]
DEFAULT_THRESHOLD = 0.5
_SIDES = ("val", "test")
_TIMES = ("times", "onset", "session")
# What NumPy and the archives beneath it raise for a damaged file.
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError, SyntaxError,
    MemoryError, zipfile.BadZipFile, zlib.error, DataError,
)  # fmt: skip


def decide(target: Target, probabilities: Array, threshold: float | None = None) -> Array:
    """Class codes ``(rows,)`` or label indicators ``(rows, K)`` from probabilities ``(rows, K)``.

    Exclusive classes take the most probable one, a binary target the second class from ``threshold`` upwards, and
    every label of a multi-label target is present from ``threshold`` upwards. Without a threshold it is 0.5. The value
    of a regression target ``(rows,)`` is its own decision.
    """
    if target.numeric:
        return np.asarray(probabilities[:, 0], np.float64)
    if target.exclusive and target.kind != "binary":
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    scores = probabilities[:, 1] if target.kind == "binary" else probabilities
    # In float64, lest a threshold between two neighbouring float32 scores be rounded onto one of them.
    chosen = np.asarray(scores, np.float64) >= (DEFAULT_THRESHOLD if threshold is None else threshold)
    return np.asarray(chosen, np.int64)


@dataclass(frozen=True, eq=False)
class Timing:
    """When samples were taken, and when the event of their session begins.

    Parameters
    ----------
    event : EventSpec
    times : (rows,)
    onset : (rows,)
        NaN in sessions without the event.
    session : (rows,) int
        Rows of one number are of one session of one patient.
    """

    event: EventSpec
    times: npt.NDArray[np.float64]
    onset: npt.NDArray[np.float64]
    session: npt.NDArray[np.int64]

    @property
    def begun(self) -> npt.NDArray[np.bool_]:
        """Where the event has begun, ``(rows,)``."""
        return np.asarray(self.times >= self.onset)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities and truth of some patients' samples.

    Parameters
    ----------
    target : Target
    truth : (rows,) class codes or values, or (rows, K) indicators for multi-label
    probabilities : (rows, K), or (rows, 1) predicted values of a regression target
    patients : (rows,)
        Pseudonyms or codes; where runs are compared, the same name means the same person in each.
    threshold : float, optional
        Decision threshold of binary and multi-label targets; 0.5 if not given.
    rows : (rows,), optional
        Position of each sample in the dataset.
    timing : Timing, optional
        Where samples come before or after an event.
    subgroups : mapping of str to (rows,) array of str
        By column, the group of each row.
    """

    target: Target
    truth: Array
    probabilities: Array
    patients: Array
    threshold: float | None = None
    rows: npt.NDArray[np.int64] | None = None
    timing: Timing | None = None
    subgroups: Mapping[str, Array] = field(default_factory=dict)

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

    def select(self, chosen: npt.NDArray[np.bool_]) -> Predictions:
        """The rows where a mask is true."""
        timing = self.timing
        if timing is not None:
            timing = Timing(timing.event, timing.times[chosen], timing.onset[chosen], timing.session[chosen])
        return replace(
            self,
            truth=self.truth[chosen],
            probabilities=self.probabilities[chosen],
            patients=self.patients[chosen],
            rows=None if self.rows is None else self.rows[chosen],
            timing=timing,
            subgroups={name: groups[chosen] for name, groups in self.subgroups.items()},
        )

    def scored(self) -> Predictions:
        """The rows that the model is judged by: of an event to be foreseen, those before its onset."""
        timing = self.timing
        return self.select(~timing.begun) if timing is not None and timing.event.foresee else self

    def with_scored(self, probabilities: Array) -> Predictions:
        """The same with other probabilities of the rows of :meth:`scored`."""
        changed = np.array(self.probabilities, dtype=probabilities.dtype)
        timing = self.timing
        counts = ~timing.begun if timing is not None and timing.event.foresee else np.ones(len(changed), bool)
        changed[counts] = probabilities
        return replace(self, probabilities=changed)

    def around_onset(self) -> dict[str, Predictions]:
        """The rows ``before`` an event's onset; and those ``after``, from the onset on, with the negative ones before.

        Both have the same negative samples: hours in which nothing happens and nothing has happened. Without an event
        there are none.
        """
        if self.timing is None:
            return {}
        begun = self.timing.begun
        return {"before": self.select(~begun), "after": self.select(begun | (np.asarray(self.truth) == 0))}

    def decisions(self) -> Array:
        """Class codes or values ``(rows,)``, or label indicators ``(rows, K)``."""
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
    timings = [side.timing for side in sides if side.timing is not None]
    if timings:
        for name in _TIMES:
            joined[name] = np.concatenate([getattr(timing, name) for timing in timings])
        joined["event"] = np.array(json.dumps(timings[0].event.to_json()))
    for number, name in enumerate(sides[0].subgroups):
        joined[f"subgroup{number}"] = np.concatenate([side.subgroups[name] for side in sides])
    if sides[0].subgroups:
        joined["subgroups"] = np.array(json.dumps(list(sides[0].subgroups)))
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
            timing = None
            if "event" in arrays:
                event = EventSpec.from_json(json.loads(str(arrays["event"])))
                timing = Timing(event, *(arrays[name][chosen] for name in _TIMES))
            named = json.loads(str(arrays["subgroups"])) if "subgroups" in arrays else []
            groups = {str(name): arrays[f"subgroup{number}"][chosen] for number, name in enumerate(named)}
    except _DAMAGED as error:
        raise StorageError(f"{path} cannot be read ({error}): delete the run's folder and run it again") from error
    return Predictions(target, truth, probabilities, patients, threshold, rows, timing, groups)


def _check_unpacked_size(path: Path) -> None:
    """Raise a plain error if an archive announces, and so may unpack to, more than any predictions take."""
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > (limit := unpacked_limit(path)):
        raise ValueError(f"it unpacks to {total / 2**20:,.0f} MB, more than the {limit / 2**20:,.0f} MB allowed")
