"""A Ray cluster joined for a block of code; studies and preparing share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from manydg.errors import ConfigError

J = TypeVar("J")
ENGINES = ("local", "ray")
RETRIES = 5
_SECONDS_BETWEEN_LOOKS = 2.0
UNLIMITED = 1 << 20
"""More tasks than any cluster has room for."""


def import_ray() -> Any:
    """The package ``ray``, or an error that says how to get it."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs the package 'ray': pip install 'manydg[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The package ``ray``, connected to a cluster.

    Parameters
    ----------
    address : str, optional
        Of the cluster; ``auto`` for the one this machine is part of. Without it, one is started for the block on this
        machine alone.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", configure_logging=False)
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


def as_they_end(
    ray: Any, jobs: Iterable[J], start: Callable[[J], Any], room: Callable[[], int]
) -> Iterator[tuple[J, Any]]:
    """Each job with the reference of its ended task; tasks that nobody waits for any more are cancelled.

    Parameters
    ----------
    jobs : iterable
    start : callable
        From a job to the reference of its task.
    room : callable
        How many tasks may be under way, as the cluster is now.
    """
    waiting: dict[Any, J] = {}
    queue = iter(jobs)
    try:
        while True:
            for job in itertools.islice(queue, max(0, room() - len(waiting))):
                waiting[start(job)] = job
            if not waiting:
                return
            done, _ = ray.wait(list(waiting), timeout=_SECONDS_BETWEEN_LOOKS)
            for reference in done:
                yield waiting.pop(reference), reference
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def places(ray: Any, cpus: float, gpus: float) -> int:
    """How many jobs the cluster can do at a time, as it is now; one at least, which then waits for a node."""
    there = ray.cluster_resources()
    limits = [there.get("CPU", 0) / cpus] if cpus else []
    limits += [there.get("GPU", 0) / gpus] if gpus else []
    return max(1, int(min(limits, default=1)))
