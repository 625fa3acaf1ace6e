"""Writing files so that what stands under its final name is whole, and what stood there before is not lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from manydg.errors import DataError, StorageError

# Work that goes on in a thread of its own, behind the one that hands it over or ahead of the one that takes it.


_MOST_BYTES = 1 << 26
_SMALL = 1 << 16
A = TypeVar("A")
T = TypeVar("T")


class HashingThread:
    """Adds bytes to checksums behind the caller's back, in the order given; hashing does not hold the interpreter.

    At most 64 MB wait at a time, or a single piece if it is larger. What waits must not change until :meth:`settle`.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def add(self, digest: Any, data: memoryview) -> None:
        """Have ``digest.update(data)`` done; waits only for room."""
        if data.nbytes < _SMALL and not self._waiting:
            digest.update(data)
            return
        self._make_room(data.nbytes)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._waiting.append((self._pool.submit(digest.update, data), data.nbytes))
        self._bytes += data.nbytes

    def _make_room(self, coming: int) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._bytes + coming > _MOST_BYTES):
            done, length = self._waiting.popleft()
            done.result()
            self._bytes -= length

    def settle(self) -> None:
        """Wait until all that was given is part of its checksum."""
        self._make_room(_MOST_BYTES + 1)

    def close(self) -> None:
        """End the thread; what still waits is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def made_ahead(make: Callable[[A], T], items: Iterable[A], threads: int = 2) -> Iterator[T]:
    """``map(make, items)``, of which threads make the next few while the caller works on the one it has.

    Worth it where ``make`` does not hold the interpreter, as numpy's sorting does not.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        waiting: deque[Future[T]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


HEADER_BYTES = 256
LARGE_FILE = 1 << 31
"""Bytes from which a file is not kept in memory while it is read or written once from end to end."""
_STEP = 1 << 25


def let_go(file: int, start: int, stop: int) -> None:
    """Have memory forget a part of a file that the disk has, and the disk take what it has not.

    Otherwise a file of many gigabytes pushes everything else out of memory, only to be pushed out by its own end.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)


class NpyStream:
    """A ``.npy`` file that grows by rows and gets its true length when closed."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.row_shape, self.rows = path, dtype, row_shape, 0
        self._file: IO[bytes] = path.open("wb")
        self._written = self._file.write(b"\0" * HEADER_BYTES)
        self._next = LARGE_FILE

    def append(self, array: npt.NDArray[Any]) -> None:
        if array.shape[1:] != self.row_shape:
            raise DataError(f"'{self.path.stem}': rows of shape {array.shape[1:]} after rows of {self.row_shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise DataError(f"'{self.path.stem}': values of type {array.dtype} after values of {self.dtype}")
        self._write(np.ascontiguousarray(array, dtype=self.dtype).reshape(-1).view(np.uint8).data)
        self.rows += len(array)

    def _write(self, data: memoryview) -> None:
        self._written += self._file.write(data)
        if self._written >= self._next:
            self._next = self._written + _STEP
            let_go(self._file.fileno(), max(0, self._written - 8 * _STEP), self._written)

    def close(self) -> dict[str, Any]:
        """Finish the file; returns its size, type and shape."""
        self._file.seek(0)
        self._file.write(npy_header(self.dtype.str, (self.rows, *self.row_shape)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.path.stat().st_size, "dtype": self.dtype.str, "shape": [self.rows, *self.row_shape]}

    def abandon(self) -> None:
        # Closing writes what is buffered, which fails once more where the disk is full.
        with contextlib.suppress(OSError):
            self._file.close()


class HashedNpyStream(NpyStream):
    """One that knows its checksum when closed.

    Rows are hashed by ``hashing`` while others are written: arrays appended must not change until it settles.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...], hashing: HashingThread) -> None:
        super().__init__(path, dtype, row_shape)
        self._digest, self._hashing = hashlib.blake2b(digest_size=16), hashing

    def _write(self, data: memoryview) -> None:
        self._hashing.add(self._digest, data)
        super()._write(data)

    def close(self) -> dict[str, Any]:
        """Finish the file; returns its size, type, shape and checksum."""
        entry = super().close()
        self._hashing.settle()
        return entry | {"checksum": self._digest.hexdigest()}


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a ``.npy`` file, always equally many."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode("latin1")
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text.ljust(HEADER_BYTES - 11) + b"\n"


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn the operating system's errors inside the block into ours."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, place) from error


def disk_error(error: OSError, place: Path) -> StorageError:
    """An operating-system error as one that says what is left and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk is full while writing {place}: free some space and run the same command again")
    return StorageError(f"cannot write {place}: {error.strerror or error}")


def write_text(path: Path, text: str) -> None:
    """Write a text file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file's content in one step; on failure the old content stays."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(partial, text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def partial_name(final: Path) -> Path:
    """Where this process writes a folder before it has its name."""
    return final.with_name(f".{final.name}.partial-{os.getpid()}")


def swap_in(new: Path, final: Path) -> None:
    """Rename a finished folder into place, moving an old one aside first and deleting it last."""
    if not final.exists():
        new.replace(final)
        return
    aside = final.with_name(f".{final.name}.old-{os.getpid()}")
    final.replace(aside)
    try:
        new.replace(final)
    except OSError:
        aside.replace(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def clear_remains(final: Path) -> None:
    """Put right what a killed process left beside a folder: an old one moved aside comes back, half a new one goes."""
    for path, owner in _siblings(final, "old"):
        if _is_running(owner):
            continue
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.replace(final)
    for path, owner in _siblings(final, "partial"):
        if owner == os.getpid() or not _is_running(owner):
            shutil.rmtree(path, ignore_errors=True)


def refuse_dataset_folder(folder: Path) -> None:
    """An error where runs or results would go into a dataset folder: preparing it again would delete them."""
    if (folder / "dataset.json").exists():
        raise StorageError(f"{folder} is a dataset folder: name another one for what is made from it")


def remove_leftovers(folder: Path) -> None:
    """Delete the half-written files that killed processes left in a folder; those of running ones stay."""
    for path in folder.glob(".*.partial-*"):
        owner = path.name.rpartition(".partial-")[2].partition(".")[0]
        if owner.isdigit() and not _is_running(int(owner)) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def _siblings(final: Path, kind: str) -> list[tuple[Path, int]]:
    start = f".{final.name}.{kind}-"
    if not final.parent.is_dir():
        return []
    found = [path for path in final.parent.iterdir() if path.name.startswith(start)]
    return [(path, int(owner)) for path in found if (owner := path.name.removeprefix(start)).isdigit()]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
