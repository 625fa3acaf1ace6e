"""What the operating system tells of this machine and its processes: memory, limits, the allocator, locks on outputs.

All that only some systems have is asked for here, so that the rest of the package runs on Linux, macOS and Windows
alike. Where a system does not tell, the answer is a cautious one or ``None``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manydg.errors import StorageError

if sys.platform == "win32":
    import msvcrt

try:
    import fcntl
except ImportError:  # Windows
    _HAS_FCNTL = False
else:
    _HAS_FCNTL = True

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


# Locks on outputs


_BYTE_LOCKED = 1 << 30
"""Beyond the owner's id, which others read: Windows locks a range of bytes, for reading too."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Write an output alone: another process that asks for the same one within the block is refused.

    The lock is on the file ``.NAME.lock`` beside the output. The system releases it when its owner ends, however that
    may be, so that a file left by a killed process is in nobody's way; the next owner takes it over and deletes it.
    Where no lock can be had (a folder that cannot be written to, a file system without locks) there is none.

    - ``path``: A file or folder, which need not exist. Folders made around it for the lock are deleted again if they
      are empty.
    - raises StorageError: If another process has it.
    """
    output = Path(os.path.realpath(path))
    lock = output.with_name(f".{output.name}.lock") if output.name else None
    created = [] if lock is None else _make_folders(lock.parent)
    try:
        descriptor = None if lock is None else _acquire(lock, path)
        try:
            yield
        finally:
            if lock is not None and descriptor is not None:
                _release(lock, descriptor)
    finally:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder; returns the folders that were missing, the innermost first."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def _acquire(lock: Path, output: Path) -> int | None:
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            if lock.is_symlink() or lock.exists():
                raise StorageError(
                    f"cannot open {lock} ({error.strerror}): another user's command may be writing {output}; delete "
                    "the file if none is"
                ) from error
            return None
        try:
            _lock(descriptor)
        except OSError as error:
            owner = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                return None
            raise StorageError(
                f"another command is writing {output} (process {owner or 'unknown'}): wait for its end, or name "
                "another output"
            ) from None
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == lock.stat().st_ino:
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        # Its owner deleted the file between our opening and locking it.
        os.close(descriptor)


def _release(lock: Path, descriptor: int) -> None:
    # Deleted while it is locked, so that nobody else's is; Windows deletes closed files alone.
    if sys.platform != "win32":
        lock.unlink(missing_ok=True)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            lock.unlink(missing_ok=True)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        os.lseek(descriptor, _BYTE_LOCKED, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    elif _HAS_FCNTL:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
