"""Several sessions of one patient (nights, stays) on one time axis: one after the other, never overlapping."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

_DIGITS = re.compile(r"(\d+)")


def session_gap(patients: npt.NDArray[Any], sessions: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> float:
    """A pause that no session contains: the length of the longest, or 1 where every session is a single moment.

    Parameters
    ----------
    patients, sessions : arrays ``(rows,)``
        A session is what a patient's rows with one value in ``sessions`` belong to.
    times : array ``(rows,)``
        Within the session.
    """
    session, _ = _number(patients, sessions)
    start, end = _bounds(session, times)
    return float((end - start).max()) or 1.0


def lay_out(
    patients: npt.NDArray[Any], sessions: npt.NDArray[Any], times: npt.NDArray[np.float64], gap: float
) -> npt.NDArray[np.float64]:
    """Time since a patient's first session began, with sessions in natural order and twice ``gap`` between them.

    The time between sessions is not known, or not comparable; it is made the same for everyone, so that it tells
    nothing.

    Examples
    --------
    >>> night, epoch = np.array(["N10", "N9", "N9"]), np.array([0.0, 5.0, 8.0])
    >>> lay_out(np.array([1, 1, 1]), night, epoch, gap=3.0).tolist()
    [9.0, 0.0, 3.0]
    """
    session, patient_of = _number(patients, sessions)
    start, end = _bounds(session, times)
    offset = np.zeros(len(start))
    # Added up patient by patient, so that no rounding depends on other patients.
    for place in range(1, len(start)):
        if patient_of[place] == patient_of[place - 1]:
            offset[place] = offset[place - 1] + end[place - 1] - start[place - 1] + 2 * gap
    return np.asarray(times - start[session] + offset[session], dtype=np.float64)


def _number(patients: npt.NDArray[Any], sessions: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Each row's session, numbered by patient and then in natural order; and each session's patient."""
    _, who = np.unique(patients, return_inverse=True)
    values, found = np.unique(sessions, return_inverse=True)
    rank = np.empty(len(values), dtype=np.int64)
    rank[sorted(range(len(values)), key=lambda place: _natural(values[place]))] = np.arange(len(values))
    pairs, session = np.unique(who * len(values) + rank[found], return_inverse=True)
    return session, pairs // len(values)


def _bounds(session: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """First and last time of every session."""
    count = int(session.max()) + 1
    start, end = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(start, session, times)
    np.maximum.at(end, session, times)
    return start, end


def _natural(value: Any) -> tuple[Any, ...]:
    """Sorts numbers by size, and names with numbers in them ("N2" before "N10") by the size of those."""
    if not isinstance(value, str):
        return (value,)
    parts = _DIGITS.split(value)
    return (*(int(part) if place % 2 else part for place, part in enumerate(parts)), value)
