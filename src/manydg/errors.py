"""Errors a user can fix: each message says what is wrong, where, and what to do about it.

And text of strangers, such as names of classes and patients, made safe for terminals and spreadsheets.
"""

from __future__ import annotations

import difflib
import re
import sys
import unicodedata
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


def printable(text: object) -> str:
    """Text as it may go to a terminal: what a terminal would act on is shown as an escape sequence.

    Names of classes, columns, patients and files are a stranger's. Control characters, line ends, marks that change the
    direction of writing and bytes that are no text could move the cursor, hide a line or forge one.

    Examples
    --------
    >>> print(printable("N1 " + chr(27) + "[31mred" + chr(10) + "REM"))
    N1 \\x1b[31mred\\nREM
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(map(_shown, shown))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(text: str) -> str:
    """Text as a cell of a CSV file that spreadsheets show and never compute.

    A spreadsheet runs a cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a line end as a formula, quoted or
    not; an apostrophe before it keeps it text. Numbers stay as they are.

    Examples
    --------
    >>> [csv_text(text) for text in ("N2", "-1.5", "=1+1", "@SUM(A1)", "-2+cmd")]
    ['N2', '-1.5', "'=1+1", "'@SUM(A1)", "'-2+cmd"]
    """
    dangerous = text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) and not _PLAIN_NUMBER.fullmatch(text)
    return f"'{text}" if dangerous else text


QUIET = "MANYDG_QUIET"
"""The environment variable that silences progress, whatever its value."""


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
            print(printable(f"manydg: warning: {' '.join(str(message).split())}"), file=file or sys.stderr)
        else:
            # Other libraries' own, of several lines, may repeat a name.
            lines = "\n".join(map(printable, str(message).split("\n")))
            show_others(lines, category, filename, lineno, file, line)

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
