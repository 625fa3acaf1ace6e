"""What the operating system tells of this machine and this process: memory, limits, the C library's allocator.

All that only some systems have is asked for here, so that the rest of the package runs on Linux, macOS and Windows
alike. Where a system does not tell, the answer is a cautious one or ``None``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    _HAS_RESOURCE = False
else:
    _HAS_RESOURCE = True

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
