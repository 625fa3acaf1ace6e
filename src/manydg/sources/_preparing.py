"""What preparing a dataset needs besides its format: provenance, checksums, and work that resumes after a kill.

What takes time (reading every byte for its checksum, checking, scoring) is done file by file. Each file's result is a
small JSON file in a hidden folder beside the dataset, written in one step. A second run takes over the results whose
files and options are unchanged; the folder is deleted once the dataset is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import TypeAdapter
from torch import Tensor

from manydg.data.columns import CATEGORIES, PositionName, check_finite, encode_patients, encode_targets
from manydg.data.info import CohortStep, DatasetInfo, Provenance, SourceFile, TargetSpec
from manydg.data.storage import DatasetWriter, link_refused
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError, warn
from manydg.files import (
    QUIET,
    Json,
    disk_errors,
    naming,
    prefetch_map,
    reading_errors,
    recover_folder,
    write_unsynced,
)
from manydg.jobs import Job, WorkerLostError, current_engine
from manydg.sources import is_synthetic, recognize

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

A = TypeVar("A")
R = TypeVar("R", bound="DataclassInstance")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# Cohort flow and provenance


class CohortFlow:
    """The counts after each filter, in order, as in the flow chart of a clinical paper.

    Examples
    --------
    >>> flow = CohortFlow()
    >>> flow.add("recordings found", patients=3, recordings=5)
    >>> flow.add("epochs with a stage", patients=3, samples=120)
    >>> flow.steps()[1]
    CohortStep(step='epochs with a stage', counts={'patients': 3, 'samples': 120})
    """

    def __init__(self) -> None:
        self._steps: list[CohortStep] = []

    def add(self, step: str, **counts: int) -> None:
        """Add what is left after a step; any counts may be named (patients, samples, rows, left_out, ...)."""
        self._steps.append(CohortStep(step, {name: int(count) for name, count in counts.items()}))

    def count(self, step: str, patients: pl.Series, **left_out: int) -> None:
        """Add a step after which samples of these patients are left, one entry a sample."""
        self.add(step, patients=patients.n_unique(), samples=len(patients), **left_out)

    def extend(self, steps: Iterable[CohortStep]) -> None:
        """Add the steps of another flow."""
        self._steps.extend(steps)

    def steps(self) -> tuple[CohortStep, ...]:
        return tuple(self._steps)


def with_provenance(
    info: DatasetInfo,
    source: str,
    files: Iterable[str | Path | SourceFile],
    options: Mapping[str, Json | Path],
    flow: CohortFlow,
    *,
    raw: Path,
) -> DatasetInfo:
    """A dataset's info with its origin.

    - ``source``: The name of the raw format, as in ``manydg prepare NAME``.
    - ``files``: The files the dataset was made from.
    - ``options``: The options that decide the content; of paths only the last part is stored.
    """
    entries = tuple(file if isinstance(file, SourceFile) else describe_files([file])[0] for file in files)
    plain = {key: value.name if isinstance(value, Path) else value for key, value in options.items()}
    origin = Provenance(source, f"manydg {_version()}", entries, plain, is_synthetic(raw))
    return replace(info, provenance=origin, cohort_flow=flow.steps())


def _version() -> str:
    try:
        return version("manydg")
    except PackageNotFoundError:
        return "from a source tree"


# Reading and checksums


def describe_files(paths: Iterable[str | Path]) -> list[SourceFile]:
    """Name, size and SHA-256 checksum of each file, as PhysioNet's ``SHA256SUMS.txt`` lists it; no folders' names."""
    entries = []
    for path in map(Path, paths):
        with reading_errors(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        entries.append(SourceFile(path.name, path.stat().st_size, digest.hexdigest()))
    return entries


def read_into(file: io.FileIO, data: memoryview) -> None:
    """Fill a buffer from an unbuffered file; a file that ends before is damaged."""
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
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def hashed_meanwhile(digest: Any, data: memoryview) -> Iterator[None]:
    """Add bytes to a checksum while the block does something else with them; hashing releases the GIL."""
    thread = threading.Thread(target=digest.update, args=(data,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


# Jobs whose results survive a kill


def run_jobs(
    function: Callable[[A], R], jobs: Sequence[Job[A]], work: WorkFolder, kind: type[R], *, workers: int, title: str
) -> list[R]:
    """Run a function over all jobs that are not done yet, and save each result as soon as it is there.

    - ``function``: From a job's argument to a dataclass; importable by name, for other processes to find it.
    - ``kind``: That dataclass, whose fields JSON can hold.
    - ``workers``: How many processes; 1 stays in this one. On a cluster (:func:`manydg.jobs.using`) 1 sets no limit.
    - returns: The results, in the order of the jobs.
    """
    if workers < 1:
        raise ConfigError(f"the number of workers must be 1 or more, not {workers}")
    results = {job.name: done for job in jobs if (done := work.load(job, kind)) is not None}
    missing = [job for job in jobs if job.name not in results]
    with Progress(title, total=len(jobs)) as progress:
        progress.advance(len(jobs) - len(missing))
        engine = current_engine()
        # A single file is not worth a process of its own.
        for job, result in engine.run(function, missing, engine.limit(min(workers, max(1, len(missing))))):
            work.save(job, result)
            results[job.name] = result
            progress.advance()
    return [results[job.name] for job in jobs]


@contextmanager
def work_folder(out: Path, source: str, options: Mapping[str, object]) -> Iterator[WorkFolder]:
    """A work folder that is deleted when the block ends, or fails because of the data.

    It stays after a kill, an interrupt, the loss of a worker, and on a full disk.
    """
    work = WorkFolder(out, source, options)
    try:
        yield work
    except WorkerLostError:
        raise
    except ManyDGError as error:
        if getattr(error.__cause__, "errno", None) not in _NO_SPACE:
            work.remove()
        raise
    work.remove()


class WorkFolder:
    """The hidden folder ``.NAME.work`` beside a dataset folder.

    - ``out``: The dataset folder that is being prepared.
    - ``options``: Whatever decides a job's result; one that was done with other options is done again.
    """

    def __init__(self, out: Path, source: str, options: Mapping[str, object]) -> None:
        # Absolute, since a job may be done by a process elsewhere.
        self.path = out.absolute().with_name(f".{out.name}.work")
        self._context = _digest([source, dict(options)])

    def load(self, job: Job[Any], kind: type[R]) -> R | None:
        """The result of a finished job, or ``None`` if there is none or what it depends on has changed since.

        - ``kind``: The dataclass of its result.
        """
        try:
            piece = json.loads(self._result_file(job).read_text(encoding="utf-8"))
            if piece["key"] != self._key(job.name, job.files):
                return None
            result = TypeAdapter(kind).validate_python(piece["result"])
            kept: dict[str, int] = getattr(result, "kept", {})
            complete = all((self.path / name).stat().st_size == size for name, size in kept.items())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if complete else None

    def save(self, job: Job[Any], result: DataclassInstance) -> None:
        """Save the result of a job; it appears whole or not at all.

        Larger things go into files of their own first (see :meth:`path_for`), whose names and sizes are the result's
        field ``kept``.
        """
        content = {"key": self._key(job.name, job.files), "result": asdict(result)}
        # Not flushed to the disk: after a crash of the machine the job is done again, and many small ones would wait.
        write_unsynced(self._result_file(job), json.dumps(content))

    def path_for(self, name: str, files: tuple[Path, ...]) -> Path:
        """A path, to which endings are added, for files of the job of this name.

        What the job depends on is part of the name, so that files of other runs are never taken for its own.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return self.path / self._key(name, files)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _result_file(self, job: Job[Any]) -> Path:
        return self.path / (hashlib.blake2b(job.name.encode(), digest_size=12).hexdigest() + ".json")

    def _key(self, name: str, files: Sequence[Path]) -> str:
        return _digest([self._context, name, states_of(files)])


def states_of(files: Sequence[Path]) -> list[list[str | int]]:
    """What shows whether files have changed: name, size and time of the last change."""
    return [[file.name, (state := file.stat()).st_size, state.st_mtime_ns] for file in files]


def _digest(values: object) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Progress:
    """A progress bar on the terminal; where standard error is no terminal it shows nothing.

    - ``total``: How many steps there will be, where that is known.

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
        if sys.stderr is not None and sys.stderr.isatty() and QUIET not in os.environ:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
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
        """Count some steps as done."""
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def describe(self, title: str) -> None:
        """Change the title."""
        if self._bar is not None:
            self._bar.update(self._task, description=title)


# Folders: the one to write, and one that holds something else


def make_ready(out: Path, *, overwrite: bool) -> None:
    """Refuse early to replace a folder, and delete what killed runs left unfinished."""
    if out.is_symlink():
        raise link_refused(out)
    if out.exists() and not overwrite:
        _remove_used_work(out)
        raise StorageError(f"{out} already exists: name another folder or say --overwrite (overwrite=True)")
    with disk_errors(out):
        recover_folder(out)


def _remove_used_work(out: Path) -> None:
    """Delete the work folder of a command that was killed after its dataset was complete.

    Work that is newer than the dataset is that of a command that was to replace it, and stays.
    """
    work = WorkFolder(out, "", {})
    with contextlib.suppress(OSError):
        if all(path.stat().st_mtime_ns <= out.stat().st_mtime_ns for path in work.path.rglob("*")):
            work.remove()


def wrong_folder(raw: Path, expected: str) -> StorageError:
    """An error for a folder that does not hold the dataset asked for, naming the one it seems to hold."""
    if not raw.is_dir():
        return StorageError(f"there is no folder {raw}: name the folder that holds {expected}")
    return StorageError(f"{raw} does not hold {expected}.{hint_at_another(raw)}")


def hint_at_another(raw: Path) -> str:
    """A sentence that names the source whose files a folder seems to hold, or nothing."""
    folders = [raw, *sorted(path for path in raw.rglob("*") if path.is_dir())]
    source = next(filter(None, map(recognize, folders)), None)
    return f" It looks like {source.name}: try 'manydg prepare {source.name}'" if source else ""


# Samples that are a block of numbers each, checked and written piece by piece

MISSING = ("refuse", "keep")
_PIECE_BYTES = 1 << 26
_NAMED = 8
_MOST_CLASSES = 20
_DIGITS = re.compile(r"(\d+)")


class Rows(Protocol):
    """An array ``(rows, ...)``, or what gives a slice of one when it is asked for it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]: ...


def write_dense(
    out: str | Path,
    values: Rows,
    targets: npt.NDArray[Any],
    patients: npt.NDArray[Any],
    *,
    column: str = "x",
    position_name: PositionName,
    files: Mapping[str, Path],
    kind: str | None = None,
    classes: Sequence[str] | None = None,
    times: npt.NDArray[np.float64] | None = None,
    missing: str = "refuse",
    codes: npt.NDArray[np.int64] | None = None,
    metadata: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    info: DatasetInfo,
    overwrite: bool = False,
) -> Path:
    """Check dense samples and write them as a dataset folder, in memory of a few pieces.

    - ``values`` ``(rows, ...)``: Numbers of any type that never change; may be memory-mapped. Stored as float32.
    - ``targets``, ``patients``: As :func:`manydg.from_arrays` takes them.
    - ``position_name``: What messages call a position within a sample.
    - ``files``: The files that ``values``, ``target`` and ``patient`` come from, for messages.
    - ``missing`` {"refuse", "keep"}: Whether NaN is an error or a measurement not taken.
    - ``codes`` ``(rows, n)``: Codes of categories, in a column of their own.
    - ``metadata``: Values of each sample that no model sees.
    """
    with naming(files["target"]):
        labels, target = encode_targets(targets, kind, classes)
        if kind is None and classes is None:
            _check_target(labels, target, numbers=targets.dtype.kind in "fiu")
    with naming(files["patient"]):
        _check_patients(patients)
    settings = {**info.settings, **({"missing": True} if missing == "keep" else {})}
    value_range = _Range(values.shape[1:])
    with DatasetWriter(out, target, replace(info, settings=settings), overwrite=overwrite) as writer:
        for rows, piece in _checked_pieces(values, files["values"], missing, position_name, value_range):
            columns = {column: piece} if piece.shape[1:] != (0,) else {}
            coded = {} if codes is None else {CATEGORIES: codes[rows]}
            when, beside = None if times is None else times[rows], {key: each[rows] for key, each in metadata.items()}
            writer.append_immutable({**columns, **coded}, labels.numpy()[rows], patients[rows], when, beside)
    _warn_of_constants(value_range.constant(), files["values"], position_name)
    return Path(out)


def _checked_pieces(
    values: Rows, file: Path, missing: str, position_name: PositionName, value_range: _Range
) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    """Some rows after the other as float32; the next piece is computed in a thread while the last is written."""
    step = max(1, _PIECE_BYTES // max(1, 4 * math.prod(values.shape[1:])))

    def checked(start: int) -> tuple[slice, npt.NDArray[np.float32]]:
        rows = slice(start, start + step)
        with np.errstate(over="ignore"):
            piece = np.asarray(values[rows], dtype=np.float32)
        with naming(file):
            check_finite(piece, start, missing, position_name)
        value_range.update(piece)
        return rows, piece

    return prefetch_map(checked, range(0, values.shape[0], step), threads=1)


def _warn_of_constants(constant: Sequence[tuple[int, ...]], file: Path, position_name: PositionName) -> None:
    if constant:
        named = ", ".join(position_name(position) for position in constant[:_NAMED])
        more = f" and {len(constant) - _NAMED} more" if len(constant) > _NAMED else ""
        warn(f"{file}: the same value in every sample: {named}{more}. They tell nothing")


def _check_target(labels: Tensor, target: TargetSpec, *, numbers: bool) -> None:
    most = _MOST_CLASSES if numbers else max(_MOST_CLASSES, len(labels) // 2)
    if target.kind == "classes" and target.size > most:
        raise DataError(
            f"the target has {target.size} different values in {len(labels)} samples: is it a measurement? Say "
            "--kind regression to predict the number, --kind classes if each value is a class, or give classes of it "
            "(above a limit)"
        )


def natural(value: Any) -> tuple[tuple[Any, ...], str]:
    """Sorts numbers by size, and names with numbers in them (``N2`` before ``N10``) by the size of those."""
    if not isinstance(value, str):
        return (value,), ""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_DIGITS.split(value))), value


class _Range:
    """Lowest and highest value seen at each position of a sample."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.low = np.full(shape, np.inf, dtype=np.float32)
        self.high = np.full(shape, -np.inf, dtype=np.float32)

    def update(self, piece: npt.NDArray[np.float32]) -> None:
        self.low = np.fmin(self.low, np.fmin.reduce(piece, axis=0, initial=np.inf))
        self.high = np.fmax(self.high, np.fmax.reduce(piece, axis=0, initial=-np.inf))

    def constant(self) -> list[tuple[int, ...]]:
        """Positions with one value only, or none at all."""
        return [tuple(map(int, position)) for position in np.argwhere(self.high <= self.low)]


def _check_patients(patients: npt.NDArray[Any]) -> None:
    codes, names = encode_patients(patients)
    if len(names) < 2:
        raise DataError("all samples are of one patient: a model for new patients needs samples of several")
    if len(names) == len(codes):
        warn(
            f"each of the {len(codes)} samples has a patient of its own, so that there are no pairs to learn from: "
            "is the patient column a row number?"
        )
