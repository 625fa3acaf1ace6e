"""Where a dataset came from: the files read, the options used and the counts left after each filter."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import StorageError

_CHUNK = 1 << 22


class CohortFlow:
    """The counts after each filter, in order, as in the flow chart of a clinical paper.

    Examples
    --------
    >>> flow = CohortFlow()
    >>> flow.add("recordings found", patients=3, recordings=5)
    >>> flow.add("epochs with a stage", patients=3, samples=120)
    >>> flow.to_json()[1]
    {'step': 'epochs with a stage', 'patients': 3, 'samples': 120}
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []

    def add(self, step: str, **counts: int) -> None:
        """Note what is left after a step; any counts may be named (patients, samples, rows, left_out, ...)."""
        self._steps.append({"step": step, **{name: int(count) for name, count in counts.items()}})

    def extend(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Note steps that another flow gave as JSON values."""
        self._steps.extend(dict(step) for step in steps)

    def to_json(self) -> list[dict[str, Any]]:
        """The steps as JSON values, in order."""
        return [dict(step) for step in self._steps]


def file_checksum(path: str | Path) -> str:
    """The SHA-256 checksum of a file, read as a stream; PhysioNet's ``SHA256SUMS.txt`` lists the same."""
    digest = hashlib.sha256()
    with reading_errors(path), Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def reading_errors(path: str | Path) -> Iterator[None]:
    """Turn the operating system's errors while a file is read into ours."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def read_into(file: io.FileIO, data: memoryview) -> None:
    """Fill a buffer from an unbuffered file; one that ends before is damaged."""
    filled = 0
    while filled < len(data):
        count = file.readinto(data[filled:])
        if not count:
            raise StorageError(f"{file.name!s} became shorter while it was read: copy it again")
        filled += count


def map_whole(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file, ``(bytes,)``, mapped into memory; the disk begins to read them at once."""
    try:
        with path.open("rb") as file:
            fetch_ahead(file.fileno(), 0, 0)
            return np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def fetch_ahead(file: int, start: int, length: int) -> None:
    """Have the disk read on (all of the file for length 0) while what is there already is worked on."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, length, os.POSIX_FADV_WILLNEED)


@contextmanager
def hashed_meanwhile(digest: Any, data: memoryview) -> Iterator[None]:
    """Add bytes to a checksum while the block does something else with them; hashing does not hold the interpreter."""
    thread = threading.Thread(target=digest.update, args=(data,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def describe_files(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Name, size and checksum of each file, in memory of one chunk; folders' names are left out."""
    found = []
    for path in map(Path, paths):
        checksum = file_checksum(path)
        found.append({"name": path.name, "bytes": path.stat().st_size, "checksum": checksum})
    return found


def provenance(
    source: str, files: Iterable[str | Path] | Iterable[Mapping[str, Any]], options: Mapping[str, Any], flow: CohortFlow
) -> dict[str, Any]:
    """What to merge into :class:`manydg.data.storage.DatasetWriter`'s ``info``.

    Parameters
    ----------
    source : str
        The name of the raw format, as in ``manydg prepare NAME``.
    files : paths, or entries that :func:`describe_files` made
        The files the dataset was made from.
    options : dict
        The options that decide the content; paths among them are cut to their names.
    flow : CohortFlow

    Returns
    -------
    dict
        ``{"provenance": {"source", "program", "files", "options"}, "cohort_flow": [...]}``, all JSON values.
    """
    entries = [dict(file) if isinstance(file, Mapping) else describe_files([file])[0] for file in files]
    plain = {key: value.name if isinstance(value, Path) else value for key, value in options.items()}
    return {
        "provenance": {"source": source, "program": f"manydg {_version()}", "files": entries, "options": plain},
        "cohort_flow": flow.to_json(),
    }


def _version() -> str:
    try:
        return version("manydg")
    except PackageNotFoundError:
        return "from a source tree"


class Progress:
    """A progress bar on the terminal; where standard error is no terminal it says nothing.

    Parameters
    ----------
    title : str
    total : int, optional
        How many steps there will be, where that is known.

    Examples
    --------
    >>> with Progress("reading", total=2) as progress:
    ...     progress.advance()
    ...     progress.advance()
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._title, self._total = title, total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, steps: float = 1) -> None:
        """Say that some steps are done."""
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def describe(self, title: str) -> None:
        """Change the words beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=title)
