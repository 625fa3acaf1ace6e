"""A Ray cluster joined for a block of code; studies and preparing share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manydg.errors import ConfigError

ENGINES = ("local", "ray")
RETRIES = 5
SECONDS_BETWEEN_LOOKS = 2.0
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


def places(ray: Any, cpus: float, gpus: float) -> int:
    """How many jobs the cluster can do at a time, as it is now; one at least, which then waits for a node."""
    there = ray.cluster_resources()
    limits = [there.get("CPU", 0) / cpus] if cpus else []
    limits += [there.get("GPU", 0) / gpus] if gpus else []
    return max(1, int(min(limits, default=1)))
