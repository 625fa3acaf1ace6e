"""Work that goes on after a kill: finished pieces are kept beside the dataset until it is whole.

What takes time (reading every byte for its checksum, checking, scoring) is done file by file; each file's result is one
small JSON file in a hidden folder, written in one step. A second run takes over the results whose files and options
are unchanged, and the folder goes when the dataset stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manydg.errors import ConfigError, ManyDGError, StorageError
from manydg.sources._provenance import Progress
from manydg.sources._spread import Job, WorkerLostError, current_spread


class WorkFolder:
    """The hidden folder ``.NAME.work`` beside a dataset folder.

    Parameters
    ----------
    out : path
        The dataset folder that is being made.
    source : str
    options : dict
        Whatever decides a piece's result; a piece made with other options is made again.
    """

    def __init__(self, out: Path, source: str, options: Mapping[str, Any]) -> None:
        # Absolute, since a job may be done by a process elsewhere.
        self.path = out.absolute().with_name(f".{out.name}.work")
        self._context = _digest([source, dict(options)])

    def load(self, job: Job) -> Any | None:
        """A finished piece, or ``None`` where there is none or where what it depends on has changed since."""
        try:
            piece = json.loads(self._place(job).read_text())
            if piece["key"] != self._key(job.name, job.files):
                return None
            result = piece["result"]
            kept = result.get("kept", {}) if isinstance(result, dict) else {}
            whole = all((self.path / name).stat().st_size == size for name, size in kept.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return result if whole else None

    def save(self, job: Job, result: Any) -> None:
        """Keep a finished piece; it appears whole or not at all.

        Larger things go into files of their own first (see :meth:`room_for`), whose names and sizes stand in the
        result under ``kept``.
        """
        from manydg.data.storage import write_atomically

        text = json.dumps({"key": self._key(job.name, job.files), "result": result})
        write_atomically(self._place(job), text)

    def room_for(self, name: str, files: tuple[Path, ...]) -> Path:
        """Where the job of this name may write files of its own: a path to which it adds endings.

        What the job depends on is part of the name, so that pieces of other runs are never taken for its own.
        """
        from manydg.data._files import disk_errors

        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return self.path / self._key(name, files)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, job: Job) -> Path:
        return self.path / (hashlib.blake2b(job.name.encode(), digest_size=12).hexdigest() + ".json")

    def _key(self, name: str, files: Sequence[Path]) -> str:
        return _digest([self._context, name, states_of(files)])


def states_of(files: Sequence[Path]) -> list[list[Any]]:
    """What shows whether files have changed: name, size and time of the last change."""
    return [[file.name, (state := file.stat()).st_size, state.st_mtime_ns] for file in files]


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def work_folder(out: Path, source: str, options: Mapping[str, Any]) -> Iterator[WorkFolder]:
    """A work folder for as long as it is of use: it goes when the block ends, or fails because of the data.

    It stays after a kill, an interrupt, and the loss of a worker.
    """
    work = WorkFolder(out, source, options)
    try:
        yield work
    except WorkerLostError:
        raise
    except ManyDGError:
        work.remove()
        raise
    work.remove()


def run_jobs(
    function: Callable[[Any], Any], jobs: Sequence[Job], work: WorkFolder, *, workers: int, title: str
) -> list[Any]:
    """Run a function over all jobs that are not done yet, and keep each result as soon as it is there.

    Parameters
    ----------
    function : callable
        From a job's argument to JSON values; importable by name, for other processes to find it.
    jobs : sequence of Job
    work : WorkFolder
    workers : int
        How many processes; 1 stays in this one. On a cluster (:func:`manydg.sources._spread.spreading`) 1 sets no
        limit.

    Returns
    -------
    list
        The results, in the order of the jobs.
    """
    if workers < 1:
        raise ConfigError(f"the number of workers must be 1 or more, not {workers}")
    results = {job.name: work.load(job) for job in jobs}
    missing = [job for job in jobs if results[job.name] is None]
    with Progress(title, total=len(jobs)) as progress:
        progress.advance(len(jobs) - len(missing))
        for job, result in current_spread().run(function, missing, workers):
            work.save(job, result)
            results[job.name] = result
            progress.advance()
    return [results[job.name] for job in jobs]


def make_ready(out: Path, *, overwrite: bool) -> None:
    """Refuse early to replace a folder, and clear away what killed runs left half-written."""
    if out.exists() and not overwrite:
        raise StorageError(f"{out} already exists: name another folder or say --overwrite (overwrite=True)")
    for partial in out.parent.glob(f".{out.name}.partial-*"):
        process = partial.name.rpartition("-")[2]
        if process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(partial, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def wrong_folder(raw: Path, expected: str) -> StorageError:
    """An error for a folder that does not hold the dataset asked for, naming the one it seems to hold."""
    if not raw.is_dir():
        return StorageError(f"there is no folder {raw}: name the folder that holds {expected}")
    return StorageError(f"{raw} does not hold {expected}.{hint_at_another(raw)}")


def hint_at_another(raw: Path) -> str:
    """A sentence that names the dataset which a folder seems to hold, or nothing."""
    names = sorted({path.name.lower() for path in raw.rglob("*") if path.is_file()})
    looks = next((name for name, marks in _MARKS.items() if any(_marked(file, marks) for file in names)), None)
    return f" It looks like {looks}: try 'manydg prepare {looks}'" if looks else ""


_MARKS = {
    "mimic3": ("prescriptions.csv", "diagnoses_icd.csv"),
    "eicu": ("patient.csv", "physicalexam.csv"),
    "sleep-edf": ("-psg.edf", "-hypnogram.edf"),
    "iiic": ("votes.npy", "votes.csv", "signals.npy"),
    "meds": ("subject_splits.parquet", "codes.parquet"),
}


def _marked(file: str, marks: Sequence[str]) -> bool:
    return file.removesuffix(".gz").endswith(tuple(marks))
