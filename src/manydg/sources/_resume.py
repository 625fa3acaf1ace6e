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
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from manydg.errors import ConfigError, StorageError
from manydg.sources._provenance import Progress


@dataclass(frozen=True)
class Job:
    """One piece of work: a name that is unique in the run, the files it depends on, and what the function is given."""

    name: str
    files: tuple[Path, ...]
    argument: Any


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
        self.path = out.with_name(f".{out.name}.work")
        self._context = json.dumps([source, dict(options)], sort_keys=True, default=str)

    def load(self, job: Job) -> Any | None:
        """A finished piece, or ``None`` where there is none or where its files have changed since."""
        try:
            piece = json.loads(self._place(job).read_text())
            return piece["result"] if piece["key"] == self._key(job) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, job: Job, result: Any) -> None:
        """Keep a finished piece; it appears whole or not at all."""
        from manydg.data.storage import write_atomically

        write_atomically(self._place(job), json.dumps({"key": self._key(job), "result": result}))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _place(self, job: Job) -> Path:
        return self.path / (hashlib.blake2b(job.name.encode(), digest_size=12).hexdigest() + ".json")

    def _key(self, job: Job) -> str:
        files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in job.files]
        return hashlib.blake2b(json.dumps([self._context, job.name, files]).encode(), digest_size=16).hexdigest()


def run_jobs(
    function: Callable[[Any], Any], jobs: Sequence[Job], work: WorkFolder, *, workers: int, title: str
) -> list[Any]:
    """Run a function over all jobs, in this process or several, and keep each result as soon as it is there.

    Parameters
    ----------
    function : callable
        From a job's argument to JSON values; importable by name, for other processes to find it.
    jobs : sequence of Job
    work : WorkFolder
    workers : int
        How many processes; 1 stays in this one.

    Returns
    -------
    list
        The results, in the order of the jobs.
    """
    if workers < 1:
        raise ConfigError(f"the number of workers must be 1 or more, not {workers}")
    results = {job.name: work.load(job) for job in jobs}
    missing = [job for job in jobs if results[job.name] is None]
    run = _in_processes if workers > 1 and len(missing) > 1 else _in_turn
    with Progress(title, total=len(jobs)) as progress:
        progress.advance(len(jobs) - len(missing))
        for job, result in run(function, missing, workers):
            work.save(job, result)
            results[job.name] = result
            progress.advance()
    return [results[job.name] for job in jobs]


def _in_turn(function: Callable[[Any], Any], jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Any]]:
    for job in jobs:
        yield job, function(job.argument)


def _in_processes(function: Callable[[Any], Any], jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Any]]:
    # Spawned, not forked: a fork of a process whose numerical libraries run threads can hang.
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
        futures: dict[Future[Any], Job] = {pool.submit(function, job.argument): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise StorageError(
                "a worker process was killed, perhaps for want of memory: run the same command with fewer workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def make_ready(out: Path, *, overwrite: bool) -> None:
    """Refuse early to replace a folder, and clear away what killed runs left half-written."""
    if out.exists() and not overwrite:
        raise StorageError(f"{out} already exists: name another folder, or ask to overwrite it")
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
    names = sorted({path.name.lower() for path in raw.rglob("*") if path.is_file()}) if raw.is_dir() else []
    if not raw.is_dir():
        return StorageError(f"there is no folder {raw}: name the folder that holds {expected}")
    looks = next((name for name, marks in _MARKS.items() if any(_marked(file, marks) for file in names)), None)
    hint = f" It looks like {looks}: try 'manydg prepare {looks}'." if looks else ""
    return StorageError(f"{raw} does not hold {expected} ({len(names)} other files).{hint}")


_MARKS = {
    "mimic3": ("prescriptions.csv", "diagnoses_icd.csv"),
    "eicu": ("patient.csv", "physicalexam.csv"),
    "sleep-edf": ("-psg.edf", "-hypnogram.edf"),
    "iiic": ("votes.npy", "votes.csv", "signals.npy"),
    "meds": ("subject_splits.parquet", "codes.parquet"),
}


def _marked(file: str, marks: Sequence[str]) -> bool:
    return file.removesuffix(".gz").endswith(tuple(marks))
