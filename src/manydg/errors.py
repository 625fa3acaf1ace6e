"""Errors a user can fix: each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import TextIO


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


def in_a_line(error: BaseException) -> str:
    """An error's type and the first line of its message.

    Examples
    --------
    >>> in_a_line(RuntimeError("no compiler"))
    'RuntimeError: no compiler'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def warn_plainly() -> None:
    """Show our warnings as one line each from now on, without the source line that Python adds."""
    show_others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, ManyDGWarning):
            print(f"manydg: warning: {' '.join(str(message).split())}", file=file or sys.stderr)
        else:
            show_others(message, category, filename, lineno, file, line)

    warnings.showwarning = show


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
