"""Where the files of a dataset are read: in this process, in several of this machine, or on a Ray cluster."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from manydg._ray import ENGINES, RETRIES, UNLIMITED, as_they_end, connected, places
from manydg.errors import ConfigError, ManyDGError, StorageError, unknown_name

Function = Callable[[Any], Any]
_DECISIVE = ("sources", "data")


class WorkerLostError(StorageError):
    """A process that read a file is gone; what others have finished is kept."""


@dataclass(frozen=True)
class Job:
    """One piece of work: a name that is unique in the run, the files it depends on, and what the function is given."""

    name: str
    files: tuple[Path, ...]
    argument: Any


class Spread(Protocol):
    """A way to do jobs."""

    def run(self, function: Function, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Any]]:
        """Each job with the function's result, as they end.

        Parameters
        ----------
        function : callable
            From a job's argument to JSON values; importable by name, for other processes to find it.
        jobs : sequence of Job
        workers : int
            Most jobs side by side.
        """
        ...


class ThisMachine:
    """One job after the other in this process, or several processes."""

    def run(self, function: Function, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Any]]:
        if workers == 1 or len(jobs) < 2:
            for job in jobs:
                yield job, function(job.argument)
            return
        # Spawned, not forked: a fork of a process whose numerical libraries run threads can hang.
        with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
            futures: dict[Future[Any], Job] = {pool.submit(function, job.argument): job for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool as error:
                raise WorkerLostError(
                    "a worker process was killed, perhaps for want of memory: run the same command with fewer workers"
                ) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster: every file is a task with a CPU of its own, read again elsewhere if its node is lost.

    The raw files and the dataset folder must be on a disk that every node sees under the same path, and every node must
    run the same version of the program.

    Parameters
    ----------
    address : str, optional
        Of the cluster; ``auto`` for the one this machine is part of. Without it, one is started on this machine alone.
    """

    address: str | None = None

    def run(self, function: Function, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Any]]:
        if not jobs:
            return
        most = workers if workers > 1 else UNLIMITED
        with connected(self.address) as ray:
            task = ray.remote(num_cpus=1, max_retries=RETRIES)(_do_on_node)
            version = _version()

            def start(job: Job) -> Any:
                return task.remote(function, job.argument, job.files, version)

            for job, reference in as_they_end(ray, jobs, start, lambda: min(most, places(ray, 1, 0))):
                yield job, _result(ray, reference)


_chosen: ContextVar[Spread] = ContextVar("spread")


@contextmanager
def spreading(engine: str = "local", address: str | None = None) -> Iterator[None]:
    """What is prepared within the block reads its files on this machine or on a Ray cluster.

    Parameters
    ----------
    engine : {"local", "ray"}
    address : str, optional
        As for :class:`RayCluster`.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if engine == "local" and address is not None:
        raise ConfigError("--address is for a cluster: add --engine ray")
    # Joined once for the whole block: a source has several rounds of jobs.
    with connected(address) if engine == "ray" else nullcontext():
        token = _chosen.set(RayCluster(address) if engine == "ray" else ThisMachine())
        try:
            yield
        finally:
            _chosen.reset(token)


def current_spread() -> Spread:
    """The way chosen, or this machine."""
    return _chosen.get(None) or ThisMachine()


def spreads(workers: int) -> bool:
    """Whether jobs are done by other processes; where they are not, what a job reads may serve two ends at once."""
    return workers > 1 or not isinstance(current_spread(), ThisMachine)


def _version() -> str:
    from manydg._code import source_digest

    return source_digest(_DECISIVE)


def _do_on_node(function: Function, argument: Any, files: Sequence[Path], version: str) -> Any:
    """Do a job on a node of a cluster, if that node has the files and the program."""
    for file in files:
        if not file.exists():
            raise ConfigError(
                f"the node {platform.node()} does not see {file}: put the raw files and the dataset where every node "
                "of the cluster sees them under the same path"
            )
    if _version() != version:
        raise ConfigError(f"the node {platform.node()} runs another version of the program: install the same on all")
    return function(argument)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ManyDGError):
            raise cause from None
        raise WorkerLostError(f"a file could not be read on the cluster: {str(error).splitlines()[-1]}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(
            f"a file's worker was lost {RETRIES + 1} times ({type(error).__name__}), perhaps for want of memory: "
            "run the same command again, with --workers so that fewer share a node"
        ) from error
