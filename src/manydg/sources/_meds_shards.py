"""A MEDS dataset file by file: each is looked through and read on its own, so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from manydg.data._files import disk_errors
from manydg.sources._event_cache import keep_events, put_back
from manydg.sources._events import EventStore, Field
from manydg.sources._meds_events import OTHER, Clock, read_events, survey
from manydg.sources._meds_tables import scan_events
from manydg.sources._provenance import CohortFlow
from manydg.sources._resume import WorkFolder, run_jobs
from manydg.sources._spread import Job

_MOST_KINDS = 32


@dataclass(frozen=True)
class _Look:
    """A file to look through, and where to keep what is found."""

    file: Path
    place: Path


@dataclass(frozen=True)
class _Read:
    """A file to read, and where to keep its events."""

    file: Path
    place: Path
    fields: tuple[Field, ...]
    clock: Clock


def _look_through(task: _Look) -> dict[str, Any]:
    prefixes, subjects = survey(scan_events([task.file]), task.file)
    with disk_errors(task.place.parent):
        subjects.write_ipc(task.place)
    counts = dict(zip(prefixes["prefix"].to_list(), prefixes["len"].to_list(), strict=True))
    return {"prefixes": counts, "kept": {task.place.name: task.place.stat().st_size}}


def _read_file(task: _Read) -> dict[str, Any]:
    store = EventStore(task.fields, len(task.clock.when))
    counts = read_events(store, scan_events([task.file]), task.file, task.clock)
    return {"counts": counts, **keep_events(store, task.place)}


@dataclass(frozen=True)
class Shards:
    """The data files of a MEDS dataset.

    Parameters
    ----------
    raw : path
        The root of the dataset.
    files : sequence of path
    work : WorkFolder
        Where finished files are kept.
    workers : int
        Processes to read them with.
    """

    raw: Path
    files: Sequence[Path]
    work: WorkFolder
    workers: int

    def survey(self, samples: pl.DataFrame, kinds: str) -> tuple[list[Field], Clock]:
        """The kinds of events, and the samples' subjects and times.

        Parameters
        ----------
        samples : DataFrame
            ``subject_id`` and ``prediction_time``, sorted by subject.
        kinds : {"prefix", "one"}
        """
        jobs = [self._job("survey", file, lambda place, file=file: _Look(file, place)) for file in self.files]
        found = run_jobs(_look_through, jobs, self.work, workers=self.workers, title="looking through files")
        with disk_errors(self.work.path):
            known = pl.concat([pl.read_ipc(job.argument.place) for job in jobs])
        counts: dict[str, int] = {}
        for piece in found:
            for prefix, count in piece["prefixes"].items():
                counts[prefix] = counts.get(prefix, 0) + count
        return _fields(counts, kinds), Clock.of(samples, known)

    def read(self, fields: Sequence[Field], clock: Clock, flow: CohortFlow) -> EventStore:
        """All events of the samples."""
        jobs = [
            self._job("events", file, lambda place, file=file: _Read(file, place, tuple(fields), clock))
            for file in self.files
        ]
        found = run_jobs(_read_file, jobs, self.work, workers=self.workers, title="reading files")
        store, counts = EventStore(fields, len(clock.when)), dict[str, int]()
        for job, piece in zip(jobs, found, strict=True):
            put_back(store, piece, job.argument.place)
            for name, count in piece["counts"].items():
                counts[name] = counts.get(name, 0) + count
        flow.add("rows of the data", **counts)
        return store

    def _job(self, step: str, file: Path, task: Callable[..., Any]) -> Job:
        name = f"{step} {file.relative_to(self.raw).as_posix()}"
        return Job(name, (file,), task(self.work.room_for(name, (file,))))


def _fields(counts: dict[str, int], kinds: str) -> list[Field]:
    if kinds == "one":
        return [Field("event", 0)]
    frequent = sorted(counts, key=lambda prefix: (-counts[prefix], prefix))[: _MOST_KINDS - 1]
    names = sorted(frequent)
    if len(counts) > len(names):
        names.append(OTHER)
    return [Field(name, kind) for kind, name in enumerate(names)]
