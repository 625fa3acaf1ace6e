"""Errors a user can fix: each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable


class ManyDGError(Exception):
    """Base of every error raised for something the user can fix."""


class DataError(ManyDGError):
    """The data have a wrong shape, type, range or content."""


class StorageError(ManyDGError):
    """A file or folder is missing, damaged, half-written, or cannot be written."""


class ConfigError(ManyDGError):
    """A setting is unknown, out of range or impossible in combination with another."""


class TrainingError(ManyDGError):
    """Training had to stop; the last good checkpoint is kept."""


class ManyDGWarning(UserWarning):
    """Something the user should know that does not stop the work."""


def warn(message: str) -> None:
    """Issue a :class:`ManyDGWarning` that points to the line outside this package from which it was called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ManyDGWarning, stacklevel=level)


def in_a_line(error: BaseException) -> str:
    """An error's type and the first line of its message.

    Examples
    --------
    >>> in_a_line(RuntimeError("no compiler"))
    'RuntimeError: no compiler'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Error for a misspelt name that suggests the nearest known one.

    Examples
    --------
    >>> print(unknown_name("algorithm", "manydgg", ["base", "manydg"]))
    unknown algorithm 'manydgg': did you mean 'manydg'? Known: base, manydg
    """
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f": did you mean '{near[0]}'?" if near else "."
    return ConfigError(f"unknown {kind} '{name}'{hint} Known: {', '.join(choices)}")
