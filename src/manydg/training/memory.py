"""How much memory there is, and training on data that do not fit in it."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manydg.data.blocks import BlockPlan, bytes_per_row, read_ahead
from manydg.data.dataset import DomainDataset

T = TypeVar("T")
_SHARE_OF_DATA = 0.5
_SHARE_OF_WINDOW = 0.125
_SHARE_OF_FREED = 0.125
_TRIM_THRESHOLD, _MOST_MAPPED = -1, -4
_FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.full.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.randn.default,
    torch.ops.aten.zeros.default,
}
_USUAL_TRIM_THRESHOLD, _USUAL_MOST_MAPPED = 64 * 2**20, 65_536


def memory_of_machine() -> int:
    """Bytes of memory, or fewer where the process or its container has a limit.

    Not what is free at the moment, so that every run does the same.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    known = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min([physical, *known, *_container_limits()])


def _container_limits() -> list[int]:
    """Limits of the control groups this process is in, of either version; none where there are none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, place = line.split(":", 2)
        root, name = ("", "memory.max") if not kinds else ("memory", "memory.limit_in_bytes")
        if kinds and "memory" not in kinds.split(","):
            continue
        # Within a container the group's own folder is the root.
        for folder in (place.strip("/"), ""):
            try:
                text = (Path("/sys/fs/cgroup") / root / folder / name).read_text().strip()
            except OSError:
                continue
            found += [int(text)] if text.isdigit() else []
    return found


@contextmanager
def refusing_what_does_not_fit() -> Iterator[None]:
    """What is built within must fit in memory; it is told so before the system has none left."""
    with _Counting(memory_of_machine()):
        yield


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what new tensors take, four bytes a value, and raises before more than all memory is taken."""

    def __init__(self, memory: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.taken = memory, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _FACTORIES:
            self.taken += 4 * math.prod(args[0])
            if self.taken > self.memory:
                there = f"there are {self.memory / 1e9:,.0f} GB of memory"
                raise MemoryError(f"it takes {self.taken / 1e9:,.0f} GB or more, and {there}: make it smaller")
        return function(*args, **(kwargs or {}))


def rows_of_window(train: DomainDataset) -> int | None:
    """How many rows to hold in memory at a time, where a dataset on disk exceeds half of the memory; else ``None``."""
    if train.device.type != "cpu":
        return None
    memory, each = memory_of_machine(), bytes_per_row(train)
    if each * len(train) <= _SHARE_OF_DATA * memory:
        return None
    return max(2, int(_SHARE_OF_WINDOW * memory / each))


def reading_ahead(dataset: DomainDataset, blocks: BlockPlan, steps: Iterator[T]) -> Iterator[T]:
    """The same steps; while those of one window are done, the next window is read from disk."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        coming, ahead = 0, reader.submit(read_ahead, dataset, blocks.windows[0])
        for number, step in enumerate(steps):
            if coming < len(blocks.windows) and number == blocks.first_steps[coming]:
                ahead.result()
                coming += 1
                if coming < len(blocks.windows):
                    ahead = reader.submit(read_ahead, dataset, blocks.windows[coming])
            yield step


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Memory that a step frees is kept for the next one, an eighth of the machine's at most.

    The steps of a training on a CPU ask for the same blocks again and again. The C library gives the large ones back to
    the system every time, which then hands them out anew page by page: a quarter of the time of the sleep network.
    Afterwards the library does as it did, and what is free is given back. Nothing happens where it is not glibc.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    kept = min(2**31 - 1, int(_SHARE_OF_FREED * memory_of_machine()))
    library.mallopt(_MOST_MAPPED, 0)
    library.mallopt(_TRIM_THRESHOLD, kept)
    try:
        yield
    finally:
        library.mallopt(_MOST_MAPPED, _USUAL_MOST_MAPPED)
        library.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM_THRESHOLD)
        library.malloc_trim(0)
