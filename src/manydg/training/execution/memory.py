"""Fitting a training into memory: how much there is, where data are kept, the order of epochs on data that do not fit.

Data larger than half of the memory stay on disk. Patients are cut into blocks of neighbours on disk; every epoch puts
the blocks in a new random order and takes several at a time: a window, which is read in long stretches, fits in memory,
and is shuffled as a small dataset would be.

What this does to training: every sample still occurs in every epoch, every pair is still of one patient, and which
blocks meet in a window changes from epoch to epoch. But the samples of a step come from the ``m`` patients of one
window instead of all. If the patients' mean gradients have variance ``s``, that of a step's gradient grows by about
``s / m``, and steps of one window lean the same way; over an epoch that cancels, because the windows make up all
patients. With hundreds of patients to a window this is small beside the noise of sampling a batch.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from manydg.algorithms import Algorithm
from manydg.config import TrainingConfig
from manydg.data.columns import Column, tensors_of, unnest
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import Crops, EpochPlan, plan_epoch
from manydg.files import prefetch_map
from manydg.training.execution.steps import crops_of, lengths_of

try:
    import resource
except ImportError:  # Windows
    _HAS_RESOURCE = False
else:
    _HAS_RESOURCE = True

BLOCKS_PER_WINDOW = 8
Index = npt.NDArray[np.int64]
T = TypeVar("T")
_PAGE = 4096
_SHARE_OF_DATA = 0.5
_SHARE_OF_WINDOW = 0.125
_SHARE_PRECOMPUTED = 8
_FACTORIES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.full.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.randn.default,
    torch.ops.aten.zeros.default,
}


@contextmanager
def refusing_what_does_not_fit() -> Iterator[None]:
    """Within it a network that is too large for the memory raises an error before the system runs out of it."""
    with _Counting(memory_of_machine()):
        yield


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors, four a value, and raises before they exceed the memory."""

    def __init__(self, memory: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.allocated = memory, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this: nothing is compiled within, and importing the compiler to skip it takes seconds."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _FACTORIES:
            self.allocated += 4 * math.prod(args[0])
            if self.allocated > self.memory:
                there = f"there are {self.memory / 1e9:,.0f} GB of memory"
                raise MemoryError(f"it takes {self.allocated / 1e9:,.0f} GB or more, and {there}: make it smaller")
        return function(*args, **(kwargs or {}))


def place(dataset: DomainDataset, algorithm: Algorithm, device: torch.device) -> DomainDataset:
    """The dataset ready for many epochs: on the GPU where it fits in half of its free memory, else where it is.

    What the backbone computes from its inputs before the first weight (a spectrogram) is precomputed, where it fits: on
    a GPU in half of the free memory, else in an eighth of the machine's.
    """
    if device.type != "cuda":
        return algorithm.backbone.precompute(
            dataset, device, memory_of_machine() // (_SHARE_PRECOMPUTED * _processes_here())
        )
    # Convolutions of few channels are fastest with the channels last, in the data and in the weights.
    algorithm.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    free, _ = torch.cuda.mem_get_info(device)
    ready = algorithm.backbone.precompute(dataset, device, free // 2)
    if ready.device.type == "cuda":
        return ready
    free, _ = torch.cuda.mem_get_info(device)
    return ready.to(device) if _bytes_of(ready) < free / 2 else ready


def _processes_here() -> int:
    """How many processes that train together share this machine's memory."""
    together = dist.is_available() and dist.is_initialized()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if together else 1


def _bytes_of(dataset: DomainDataset) -> int:
    columns = list(dataset.columns.values())
    share = 1.0 if dataset.rows is None else len(dataset) / max(1, len(columns[0]))
    return int(share * sum(tensor.nbytes for column in columns for tensor in tensors_of(column)))


@dataclass(frozen=True)
class EpochOrder:
    """What each step of an epoch sees, and the windows it goes by where the data do not fit in memory."""

    plan: EpochPlan
    windows: BlockPlan | None


class EpochOrders:
    """The orders of a training's epochs: of all samples, or by windows where they do not fit in memory.

    An order follows from the seed and the epoch alone, so that the next one can be made in the background.

    - ``rows_of_window``: About how many rows a window has; ``None`` where the data fit in memory.
    """

    def __init__(self, algorithm: Algorithm, train: DomainDataset, config: TrainingConfig) -> None:
        self._train, self._config, self._sampling = train, config, algorithm.sampling
        self._domains, self._lengths = train.domains.cpu(), lengths_of(train)
        self._crops = crops_of(train, algorithm.backbone)
        self.rows_of_window = rows_of_window(train)
        self._prefetched: dict[int, Future[EpochOrder]] = {}

    def of(self, epoch: int, worker: Executor) -> EpochOrder:
        """The order of an epoch; the worker starts to make that of the next."""
        prefetched = self._prefetched.pop(epoch, None)
        order = self._make(epoch) if prefetched is None else prefetched.result()
        if epoch < self._config.epochs:
            self._prefetched[epoch + 1] = worker.submit(self._make, epoch + 1)
        return order

    def _make(self, epoch: int) -> EpochOrder:
        batch_size, seed = self._config.batch_size, self._config.seed
        if self.rows_of_window is None:
            plan = plan_epoch(self._sampling, self._domains, batch_size, seed, epoch, self._lengths, self._crops)
            return EpochOrder(plan, None)
        rows = self.rows_of_window
        windows = plan_in_blocks(self._sampling, self._train, batch_size, seed, epoch, rows, self._crops)
        return EpochOrder(windows.plan, windows)


@dataclass(frozen=True)
class BlockPlan:
    """An epoch in windows.

    - ``windows``: The rows of the training set in each window, in their order on disk.
    - ``first_steps``: The step at which each window begins.
    """

    plan: EpochPlan
    windows: tuple[Index, ...]
    first_steps: tuple[int, ...]


def plan_in_blocks(
    sampling: str,
    dataset: DomainDataset,
    batch_size: int,
    seed: int,
    epoch: int,
    window_rows: int,
    crops: Crops | None = None,
) -> BlockPlan:
    """Plan one epoch by windows of blocks of whole patients.

    - ``sampling``: {"samples", "pairs", "random-pairs", "episodes", "environments"}
    - ``dataset``: The training patients. Best with the samples of a patient together on disk, as 'prepare' writes them.
    - ``window_rows``: About how many rows fit in memory at a time.
    - ``crops``: As for :func:`manydg.data.sampling.plan_epoch`.
    """
    blocks = cut_into_blocks(dataset, max(1, window_rows // BLOCKS_PER_WINDOW))
    order = np.random.default_rng([seed, epoch, 11]).permutation(len(blocks))
    count = max(1, round(sum(map(len, blocks)) / max(window_rows, 2 * batch_size)))
    groups = np.array_split(order, min(count, len(blocks)))
    windows = tuple(np.concatenate([blocks[block] for block in sorted(group.tolist())]) for group in groups)
    parts: list[EpochPlan] = []
    for number, window in enumerate(windows):
        rows = torch.from_numpy(window)
        # Each window its own stream of random numbers.
        part = plan_epoch(
            sampling, dataset.domains.cpu()[rows], batch_size, seed, epoch * 1_000_003 + number,
            crops=None if crops is None else crops.take(window),
        )  # fmt: skip
        parts.append(EpochPlan(rows[part.indices], part.bounds, part.pairs))
    starts = [0, *itertools.accumulate(len(part) for part in parts)]
    return BlockPlan(_join(parts), windows, tuple(starts[:-1]))


def cut_into_blocks(dataset: DomainDataset, rows: int) -> list[Index]:
    """Positions of the samples in blocks of about so many rows; patients are whole and neighbours on disk together."""
    who = dataset.domains.cpu().numpy()
    stored = np.arange(len(who)) if dataset.rows is None else dataset.rows.cpu().numpy()
    first = np.full(int(who.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, who, stored)
    order = np.lexsort((stored, first[who]))
    new_patient = np.flatnonzero(np.diff(who[order], prepend=-1))
    # A block ends with the patient who fills it.
    ends = np.flatnonzero(np.diff(new_patient // rows)) + 1
    return [block for block in np.split(order, new_patient[ends]) if len(block)]


def read_ahead(dataset: DomainDataset, positions: Index) -> int:
    """Bring rows from disk to memory in long stretches; returns how many bytes were looked at.

    - ``dataset``: Its columns are memory maps.
    """
    stored = np.sort(positions if dataset.rows is None else dataset.rows.cpu().numpy()[positions])
    cuts = np.flatnonzero(np.diff(stored) > 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(stored, cuts) if len(run)]
    return sum(_touch(column, start, stop) for column in dataset.columns.values() for start, stop in runs)


def _touch(column: Column, start: int, stop: int) -> int:
    levels, items = unnest(column)
    for offsets in levels:
        start, stop = int(offsets[start]), int(offsets[stop])
    part = items[start:stop]
    if part.numel() == 0 or not part.is_contiguous():
        return 0
    # A byte of every page: the kernel reads far ahead of sequential access.
    part.reshape(-1).view(torch.uint8)[::_PAGE].sum(dtype=torch.int64)
    return int(part.nbytes)


def _join(parts: list[EpochPlan]) -> EpochPlan:
    bounds: list[int] = [0]
    for part in parts:
        start = bounds[-1]
        bounds += [start + bound for bound in part.bounds[1:]]
    pairs = tuple(itertools.chain.from_iterable(part.pairs for part in parts))
    return EpochPlan(torch.cat([part.indices for part in parts]), tuple(bounds), pairs)


def reading_ahead(dataset: DomainDataset, blocks: BlockPlan, steps: Iterator[T]) -> Iterator[T]:
    """The same steps; while those of one window are done, the next window is read from disk."""
    windows = prefetch_map(partial(read_ahead, dataset), blocks.windows, threads=1)
    for number, step in enumerate(steps):
        if number in blocks.first_steps:
            next(windows)
        yield step


def rows_of_window(train: DomainDataset) -> int | None:
    """How many rows to hold in memory at a time, where a dataset on disk exceeds half of the memory; else ``None``."""
    if train.device.type != "cpu":
        return None
    memory, each = memory_of_machine(), bytes_per_row(train)
    if each * len(train) <= _SHARE_OF_DATA * memory:
        return None
    return max(2, int(_SHARE_OF_WINDOW * memory / each))


def bytes_per_row(dataset: DomainDataset) -> float:
    """How many bytes a row takes on disk, on average."""
    return sum(unnest(column)[1].nbytes / max(len(column), 1) for column in dataset.columns.values())


# Memory of this machine: what only some systems tell is asked for here, with a cautious answer for the others

_ASSUMED_MEMORY = 8 * 2**30
_SHARE_KEPT = 0.125
# Names and usual values of glibc's options.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_USUAL_TRIM_THRESHOLD, _USUAL_MMAP_MAX = 64 * 2**20, 65_536


def memory_of_machine() -> int:
    """Bytes of memory, or fewer where the process or its container has a limit.

    Not what is free at the moment, so that every run does the same.
    """
    return min([_physical_memory(), *_process_limits(), *_container_limits()])


def peak_memory() -> int | None:
    """Most bytes of memory this process has used so far; ``None`` where the system does not tell."""
    if sys.platform == "win32":
        return _windows_peak_memory()
    if not _HAS_RESOURCE:
        return None
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep the memory that a training step frees for the next one, up to an eighth of the machine's.

    The steps of a training on a CPU allocate the same blocks again and again. glibc returns the large ones to the
    system every time, which then maps them anew page by page: a quarter of the time of the sleep network. On leaving,
    its usual thresholds are restored and free memory is returned. Does nothing with another C library.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, min(2**31 - 1, int(_SHARE_KEPT * memory_of_machine())))
    try:
        yield
    finally:
        library.mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
        library.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_THRESHOLD)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of the process itself.
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _physical_memory() -> int:
    if sys.platform == "win32":
        return _windows_physical_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _ASSUMED_MEMORY


def _process_limits() -> list[int]:
    if sys.platform == "win32" or not _HAS_RESOURCE:
        return []
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def _container_limits() -> list[int]:
    """Limits of the Linux control groups this process is in, of either version; none where there are none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        root, name = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        # Within a container the group's own folder is the root.
        for folder in (group.strip("/"), ""):
            try:
                text = (Path("/sys/fs/cgroup") / root / folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            limits += [int(text)] if text.isdigit() else []
    return limits


if sys.platform == "win32":
    from ctypes import wintypes

    class _MemoryStatus(ctypes.Structure):
        """MEMORYSTATUSEX."""

        _fields_ = (
            ("length", wintypes.DWORD),
            ("load", wintypes.DWORD),
            ("total_physical", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 6),
        )

    class _ProcessMemory(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS."""

        _fields_ = (
            ("size", wintypes.DWORD),
            ("page_faults", wintypes.DWORD),
            ("peak_working_set", ctypes.c_size_t),
            ("others", ctypes.c_size_t * 7),
        )

    def _windows_physical_memory() -> int:
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.total_physical) if known else _ASSUMED_MEMORY

    def _windows_peak_memory() -> int | None:
        kernel, counters = ctypes.windll.kernel32, _ProcessMemory(size=ctypes.sizeof(_ProcessMemory))
        kernel.GetCurrentProcess.restype = wintypes.HANDLE
        kernel.K32GetProcessMemoryInfo.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD)
        known = kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.size)
        return int(counters.peak_working_set) if known else None
