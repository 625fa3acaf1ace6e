"""Where the runs of a study are done: in this process, in processes of this machine, or on a Ray cluster.

An engine is chosen for a block of code, as in ``with using(RayEngine("auto")): compare(...)``; every study within the
block uses it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manydg.errors import ConfigError, ManyDGWarning, TrainingError, unknown_name, warn_plainly
from manydg.jobs import ENGINES, RETRIES, as_they_end, connected, import_ray, places

# Worker processes that share a GPU at the same time, instead of by turns.


CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_PATIENCE = 20.0


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Processes started within the block use the GPU side by side.

    A training of one model leaves most of a large GPU idle, and processes on their own get it in turns. NVIDIA's
    Multi-Process Service, which comes with the driver, lets their work run at the same time; every process computes
    what it would alone. One is started for the block, unless there is one already; where it is not installed, the
    processes take turns, with a warning.
    """
    if os.environ.get(PIPES) or (_DEFAULT_PIPES / "control").exists():
        yield
        return
    control = shutil.which(CONTROL)
    if control is None:
        _warn(f"{CONTROL} is not installed")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="manydg-mps-", ignore_cleanup_errors=True) as folder:
        before = {name: os.environ.get(name) for name in (PIPES, LOGS)}
        os.environ[PIPES] = os.environ[LOGS] = folder
        started = _tell(control, "-d")
        if not started:
            _restore(before)
        try:
            yield
        finally:
            if started:
                _tell(control, words="quit\n")
                _restore(before)


def _tell(control: str, *arguments: str, words: str = "") -> bool:
    """Whether the service's control program did as it was told."""
    # To a file, because a service that goes on in the background would keep a pipe open for ever.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                [control, *arguments], input=words, text=True, stdout=said, stderr=said, timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _warn(str(error))
            return False
        if done.returncode:
            said.seek(0)
            _warn(said.read().strip() or f"{CONTROL} ended with {done.returncode}")
        return done.returncode == 0


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _warn(reason: str) -> None:
    message = f"runs take turns on the GPU, because NVIDIA's Multi-Process Service is not to be had: {reason}"
    warnings.warn(message, ManyDGWarning, stacklevel=4)


Job = Mapping[str, Any]
Record = Any
Do = Callable[[Job], Record]
Started = Callable[[Job], None]


class Engine(Protocol):
    """Does jobs, in any order."""

    def run(self, do: Do, jobs: Sequence[Job], started: Started, workers: int) -> Iterator[tuple[Job, Record]]:
        """Each job with its record, as they end.

        Parameters
        ----------
        do : callable
            Does one job; an importable function.
        jobs : sequence of mapping
            JSON values; what a job leaves behind is in its ``folder``, where it goes on if it is started again.
        started : callable
            Hears of each job that begins.
        workers : int
            Most jobs side by side.
        """
        ...


class LocalEngine:
    """This machine: one job after the other in this process, or several processes, which share the GPU."""

    def run(self, do: Do, jobs: Sequence[Job], started: Started, workers: int) -> Iterator[tuple[Job, Record]]:
        if workers <= 1:
            for job in jobs:
                started(job)
                yield job, do(job)
            return
        context = multiprocessing.get_context("spawn")
        with (
            shared_gpu() if jobs and _on_a_gpu(jobs[0]["device"]) else nullcontext(),
            _killed_worker_named(),
            ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool,
        ):
            waiting: dict[Future[Record], Job] = {}
            queue = iter(jobs)
            while True:
                for job in itertools.islice(queue, workers - len(waiting)):
                    started(job)
                    waiting[pool.submit(do, job)] = job
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster: every job is a task with the CPUs and GPUs it needs, done again elsewhere if its node is lost.

    Datasets and results folders must be on a disk that every node sees under the same path; a job that is done again
    goes on from its last checkpoint there. Every node must run the same version of the program.

    Parameters
    ----------
    address : str, optional
        Of the cluster; ``auto`` for the one this machine is part of. Without it, one is started for the block on this
        machine alone.
    cpus, gpus : float, optional
        What each run needs. By default one CPU, and one GPU where the study asks for one or may use one and the cluster
        has some; a quarter lets four runs share a GPU.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def run(self, do: Do, jobs: Sequence[Job], started: Started, workers: int) -> Iterator[tuple[Job, Record]]:
        if not jobs:
            return
        with connected(self.address) as ray:
            gpus = self._gpus(ray, jobs[0]["device"])
            task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=RETRIES)(_do_elsewhere)

            def start(job: Job) -> Any:
                started(job)
                return task.remote(do, json.dumps(_absolute(job)))

            for job, reference in as_they_end(ray, jobs, start, lambda: min(workers, places(ray, self.cpus, gpus))):
                yield job, _result(ray, reference)

    def _gpus(self, ray: Any, device: str) -> float:
        if self.gpus is not None:
            return self.gpus
        if device == "cpu":
            return 0.0
        if device == "auto":
            return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
        return 1.0


def _on_a_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


_chosen: ContextVar[Engine] = ContextVar("engine")


@contextmanager
def using(engine: Engine) -> Iterator[None]:
    """Studies within the block do their runs with an engine."""
    token = _chosen.set(engine)
    try:
        yield
    finally:
        _chosen.reset(token)


def current_engine() -> Engine:
    """The engine chosen, or this machine."""
    return _chosen.get(None) or LocalEngine()


def engine_named(name: str, address: str | None = None, cpus: float | None = None, gpus: float | None = None) -> Engine:
    """The engine that a command was asked for."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "local":
        if address is not None or cpus is not None or gpus is not None:
            raise ConfigError("--address, --cpus-per-run and --gpus-per-run are for a cluster: add --engine ray")
        return LocalEngine()
    import_ray()
    return RayEngine(address, 1.0 if cpus is None else cpus, gpus)


def _absolute(job: Job) -> dict[str, Any]:
    """The job with paths that hold wherever it is done."""
    from manydg.code_version import code_version

    places = {name: str(Path(job[name]).resolve()) for name in ("dataset", "folder")}
    return {**job, **places, "code_version": code_version()}


def _do_elsewhere(do: Do, text: str) -> Record:
    """Do a job on a node of a cluster."""
    import platform

    from manydg.code_version import code_version

    warn_plainly()
    job = json.loads(text)
    for name in ("dataset", "folder"):
        if not Path(job[name]).is_dir():
            raise ConfigError(
                f"the node {platform.node()} does not see {job[name]}: put datasets and results where every node of "
                "the cluster sees them under the same path"
            )
    if job.pop("code_version") != code_version():
        raise ConfigError(f"the node {platform.node()} runs another version of the program: install the same on all")
    return do(job)


def _result(ray: Any, reference: Any) -> Record:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), ConfigError) else None
        raise cause or TrainingError(f"a run failed on the cluster: {str(error).splitlines()[-1]}") from error
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"a run's worker was lost {RETRIES + 1} times ({type(error).__name__}), perhaps for want of memory; "
            "finished runs are kept: run the same command again, with more --cpus-per-run so that fewer share a node"
        ) from error


@contextmanager
def _killed_worker_named() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise TrainingError(
            "a worker process was killed, most likely for want of memory; finished runs are kept: "
            "run the same command again, with fewer workers"
        ) from error


def _start_worker() -> None:
    """One thread per worker; its warnings are plain lines; and it ends with the process that started it."""
    import torch

    torch.set_num_threads(1)
    warn_plainly()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: Any) -> None:
    # A worker whose parent was killed would wait for work for ever, or write into a study that goes on elsewhere.
    parent.join()
    os._exit(1)
