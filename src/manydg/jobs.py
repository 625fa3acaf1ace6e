"""One engine for many jobs: in this process, in processes of this machine, or on a Ray cluster.

Studies do their runs with it and sources read their files with it. An engine is chosen for a block of code, as in
``with using(RayEngine("auto")): compare(...)``; whatever has jobs within the block asks :func:`current_engine`.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import platform
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from manydg.errors import ConfigError, ManyDGError, unknown_name
from manydg.files import code_version, source_digest, warn_plainly

A = TypeVar("A")
R = TypeVar("R")
ENGINES = ("local", "ray")
RETRIES = 5
UNLIMITED = 1 << 20
"""More jobs than any cluster can do at a time."""
_SECONDS_BETWEEN_LOOKS = 2.0
_SHARE_OF_CORES = "MANYDG_SHARE_OF_CORES"
"""Variable of a worker's environment: its share of the cores, unless the caller limits threads."""


class WorkerLostError(ManyDGError):
    """A process that did a job is gone; what others have finished is kept."""


@dataclass(frozen=True)
class Job(Generic[A]):
    """One piece of work.

    - ``name``: Unique among the jobs.
    - ``files``: What it needs to see, as absolute paths.
    - ``argument``: What the function is given; can be pickled.
    """

    name: str
    files: tuple[Path, ...]
    argument: A


class Engine(Protocol):
    """Does jobs, in any order."""

    def run(
        self,
        function: Callable[[A], R],
        jobs: Iterable[Job[A]],
        workers: int = 1,
        *,
        device: str = "cpu",
        started: Callable[[Job[A]], None] | None = None,
    ) -> Iterator[tuple[Job[A], R]]:
        """Each job with the function's result, as they end.

        - ``function``: From a job's argument to its result; importable by name, for other processes to find it.
        - ``jobs``: Each is taken when a worker is free, so that an iterator may decide on it by the results so far. A
          job that is started again after the loss of a worker goes on from what it left in its files.
        - ``workers``: Most jobs at a time.
        - ``device``: Where the jobs compute: ``cpu``, ``cuda`` or ``auto``.
        - ``started``: Called with each job that begins.
        - raises WorkerLostError: If the process of a job was killed.
        """
        ...

    def limit(self, workers: int) -> int:
        """Most jobs at a time, where a command was asked for so many workers."""
        ...

    def joined(self) -> AbstractContextManager[None]:
        """A block within which several rounds of jobs share one connection."""
        ...


class LocalEngine:
    """This machine: one job after the other in this process, or several processes."""

    def run(
        self,
        function: Callable[[A], R],
        jobs: Iterable[Job[A]],
        workers: int = 1,
        *,
        device: str = "cpu",
        started: Callable[[Job[A]], None] | None = None,
    ) -> Iterator[tuple[Job[A], R]]:
        report = started or (lambda job: None)
        if workers > 1:
            yield from _in_processes(function, jobs, workers, report)
            return
        for job in jobs:
            report(job)
            yield job, function(job.argument)

    def limit(self, workers: int) -> int:
        return workers

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()


def _in_processes(
    function: Callable[[A], R], jobs: Iterable[Job[A]], workers: int, started: Callable[[Job[A]], None]
) -> Iterator[tuple[Job[A], R]]:
    # Spawned, not forked: a fork of a process whose numerical libraries run threads can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(workers,))
    running: dict[Future[R], Job[A]] = {}
    queue = iter(jobs)
    try:
        while True:
            for job in itertools.islice(queue, workers - len(running)):
                started(job)
                running[pool.submit(function, job.argument)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process was killed, most likely for want of memory; what is finished is kept: "
            "run the same command again, with fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=not running, cancel_futures=True)


def threads_of_trees() -> int:
    """Threads for a library whose results do not depend on their number: in a worker, its share of the cores."""
    import torch

    return int(os.environ.get(_SHARE_OF_CORES) or torch.get_num_threads())


def _start_worker(workers: int) -> None:
    """One thread per worker, warnings in plain lines, and an end with the process that started it."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ[_SHARE_OF_CORES] = str(max(1, (os.cpu_count() or 1) // workers))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    warn_plainly()


def _exit_with(parent: BaseProcess) -> None:
    # A worker whose parent was killed would wait for work for ever, or write into a study that goes on elsewhere.
    parent.join()
    os._exit(1)


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster: every job is a task with the CPUs and GPUs it needs, done again elsewhere if its node is lost.

    Data and results must be on a disk that every node sees under the same path, and every node must run the same
    version of the program.

    - ``address``: Of the cluster; ``auto`` for the one this machine is part of. Without it, one is started on this
      machine alone.
    - ``cpus``, ``gpus``: What each job needs. By default one CPU, and one GPU where the device asks for one or may be
      one and the cluster has some; a quarter lets four jobs share a GPU.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def run(
        self,
        function: Callable[[A], R],
        jobs: Iterable[Job[A]],
        workers: int = 1,
        *,
        device: str = "cpu",
        started: Callable[[Job[A]], None] | None = None,
    ) -> Iterator[tuple[Job[A], R]]:
        report = started or (lambda job: None)
        if isinstance(jobs, Sequence) and not jobs:
            return
        with _connected(self.address) as ray:
            gpus = self._gpus(ray, device)
            task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=RETRIES)(do_on_node)
            version = program_version()

            def start(job: Job[A]) -> Any:
                report(job)
                return task.remote(function, job, version)

            for job, reference in _as_they_end(ray, jobs, start, lambda: min(workers, _capacity(ray, self.cpus, gpus))):
                yield job, _result(ray, reference)

    def limit(self, workers: int) -> int:
        """A cluster does as many as it has room for, unless a limit above 1 is set."""
        return workers if workers > 1 else UNLIMITED

    @contextmanager
    def joined(self) -> Iterator[None]:
        with _connected(self.address):
            yield

    def _gpus(self, ray: Any, device: str) -> float:
        if self.gpus is not None:
            return self.gpus
        if device == "cpu":
            return 0.0
        if device == "auto":
            return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
        return 1.0


_chosen: ContextVar[Engine] = ContextVar("engine")


@contextmanager
def using(engine: Engine) -> Iterator[Engine]:
    """Whatever has jobs within the block does them with an engine."""
    with engine.joined():
        token = _chosen.set(engine)
        try:
            yield engine
        finally:
            _chosen.reset(token)


def current_engine() -> Engine:
    """The engine chosen, or this machine."""
    return _chosen.get(None) or LocalEngine()


def in_this_process(workers: int) -> bool:
    """Whether jobs are done in this process, one after the other."""
    return workers == 1 and isinstance(current_engine(), LocalEngine)


def engine_named(name: str, address: str | None = None, cpus: float | None = None, gpus: float | None = None) -> Engine:
    """The engine that a command was asked for."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "local":
        if cpus is not None or gpus is not None:
            raise ConfigError("--address, --cpus-per-run and --gpus-per-run are for a cluster: add --engine ray")
        if address is not None:
            raise ConfigError("--address is for a cluster: add --engine ray")
        return LocalEngine()
    if importlib.util.find_spec("ray") is None:
        raise _no_ray()
    return RayEngine(address, 1.0 if cpus is None else cpus, gpus)


@cache
def program_version() -> str:
    """A hash of all code that a job may run."""
    return f"{code_version()}+{source_digest(('sources', 'studies'))}"


def do_on_node(function: Callable[[A], R], job: Job[A], version: str) -> R:
    """Do a job on a node of a cluster, if that node has the files and the program."""
    warn_plainly()
    for file in job.files:
        if not file.exists():
            raise ConfigError(
                f"the node {platform.node()} does not see {file}: put data and results where every node of the "
                "cluster sees them under the same path"
            )
    if program_version() != version:
        raise ConfigError(f"the node {platform.node()} runs another version of the program: install the same on all")
    return function(job.argument)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ManyDGError):
            raise cause from None
        raise WorkerLostError(f"a job failed on the cluster: {str(error).splitlines()[-1]}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(
            f"a job's worker was lost {RETRIES + 1} times ({type(error).__name__}), perhaps for want of memory; what "
            "is finished is kept: run the same command again, with --workers or more --cpus-per-run so that fewer "
            "share a node"
        ) from error


def _import_ray() -> Any:
    """The package ``ray``, or an error that says how to get it."""
    try:
        import ray
    except ImportError:
        raise _no_ray() from None
    return ray


def _no_ray() -> ConfigError:
    return ConfigError("--engine ray needs the package 'ray': pip install 'manydg[ray]'")


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The package ``ray``, connected to a cluster, or to one that is started for the block on this machine alone."""
    if "ray" in sys.modules and _import_ray().is_initialized():
        yield _import_ray()
        return
    if address is not None:
        with _initialized(address) as ray:
            yield ray
        return
    with _for_this_machine() as folder, _initialized("local", include_dashboard=False, _temp_dir=str(folder)) as ray:
        yield ray


@cache
def _token() -> str:
    """One for all clusters of a process: Ray keeps the first it sees."""
    return secrets.token_hex(32)


@contextmanager
def _for_this_machine() -> Iterator[Path]:
    """An environment in which Ray listens to this machine alone and reports to nobody, and a private folder for it.

    Ray makes its own folder open to all, hence the one around it, which is deleted at the end.
    """
    around = Path(tempfile.mkdtemp(prefix="manydg-", dir="/tmp" if os.path.isdir("/tmp") else None))
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": _token()}
    if "ray" not in sys.modules:
        # Read when Ray is imported: nodes of a cluster are reached under an address, that of no cluster is loopback's.
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield around / "ray"
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(around, ignore_errors=True)


@contextmanager
def _initialized(address: str, **options: Any) -> Iterator[Any]:
    ray = _import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray cluster answers at '{address}' ({reason}): start one with 'ray start --head', or leave "
            "out --address to use this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _as_they_end(
    ray: Any, jobs: Iterable[Job[A]], start: Callable[[Job[A]], Any], capacity: Callable[[], int]
) -> Iterator[tuple[Job[A], Any]]:
    """Each job with the reference of its ended task; tasks that still run when the caller stops are cancelled.

    ``capacity`` says how many tasks may run, as the cluster is now.
    """
    running: dict[Any, Job[A]] = {}
    queue = iter(jobs)
    try:
        while True:
            for job in itertools.islice(queue, max(0, capacity() - len(running))):
                running[start(job)] = job
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)
            for reference in done:
                yield running.pop(reference), reference
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _capacity(ray: Any, cpus: float, gpus: float) -> int:
    """How many jobs the cluster can do at a time, as it is now; one at least, which then waits for a node."""
    resources = ray.cluster_resources()
    limits = [resources.get("CPU", 0) / cpus] if cpus else []
    limits += [resources.get("GPU", 0) / gpus] if gpus else []
    return max(1, int(min(limits, default=1)))
