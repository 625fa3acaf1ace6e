"""How files are written: atomic, checksummed where it matters, and with errors a user can act on.

A file or folder is written under a hidden temporary name beside its final one (``.NAME.partial-PID``), flushed to the
disk and then renamed, so that whatever has its final name is complete. :func:`remove_partial_files` and
:func:`recover_folder` clean up after processes that were killed in between. :func:`locked` keeps two processes from
writing one output, and :func:`code_version` says which code made what was written. Of tables that others wrote,
:func:`check_whole` says whether they were cut short. Text of strangers, such as names of patients, is made safe for
terminals (:func:`printable`) and for spreadsheets (:func:`csv_text`).
"""

from __future__ import annotations

import ast
import contextlib
import csv
import ctypes
import dataclasses
import errno
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import sys
import unicodedata
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar, Union, cast

import manydg
from manydg.errors import DataError, ManyDGWarning, StorageError, warn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

if sys.platform == "win32":
    import msvcrt

try:
    import fcntl
except ImportError:  # Windows
    _HAS_FCNTL = False
else:
    _HAS_FCNTL = True

Json = Union[None, bool, int, float, str, Sequence["Json"], Mapping[str, "Json"]]  # noqa: UP007 - recursive
"""A value that JSON can hold."""
JsonObject = Mapping[str, Json]
ParsedJson = Mapping[str, Any]
"""A JSON object as it was read: only the typed reader it is handed to looks into it."""

A = TypeVar("A")
T = TypeVar("T")


# Errors of the operating system


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors inside the block into ours."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> StorageError:
    """An operating-system error as one that names the file and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk is full while writing {path}: free some space and run the same command again")
    return StorageError(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def reading_errors(path: str | Path) -> Iterator[None]:
    """Turn the operating system's errors while a file is read into ours."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to errors about data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


# Files: what is written may hold patients, so that only its owner can read it


def private(path: str, flags: int) -> int:
    """An ``opener`` of :func:`open` that makes files only their owner can read."""
    return os.open(path, flags, 0o600)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, which only their owner can open."""
    for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def partial_name(final: Path) -> Path:
    """The temporary name under which this process writes a file or folder."""
    if not final.name:
        raise StorageError(f"'{final}' cannot be written anew: name a file or folder in it")
    return final.with_name(f".{final.name}.partial-{os.getpid()}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that is renamed to ``path`` at the end of the block; on failure the old file stays.

    The block writes the temporary file itself; operating-system errors become :class:`StorageError`.
    """
    partial = partial_name(path)
    try:
        make_folder(path.parent)
        yield partial
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content in one step, flushed to the disk; on failure the old content stays."""
    with replacing(path) as partial:
        write_through(partial, content)


def write_unsynced(path: Path, content: str) -> None:
    """Replace a file's content in one step without waiting for the disk: for what is worthless after a crash."""
    with replacing(path) as partial, open(partial, "w", encoding="utf-8", opener=private) as file:
        file.write(content)


def write_through(path: Path, content: str | bytes) -> None:
    """Write a file and flush it to the disk; not atomic, for files in a folder that is renamed as a whole."""
    with open(path, "wb", opener=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file, flushed to the disk."""
    with disk_errors(path), open(path, "a", encoding="utf-8", opener=private) as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, object], *, indent: int | None = 1, allow_nan: bool = True) -> None:
    """Replace a JSON file in one step."""
    write_atomically(path, json.dumps(value, indent=indent, allow_nan=allow_nan))


def read_json(path: Path, *, remedy: str, missing: str | None = None) -> dict[str, Any]:
    """The object in a JSON file, for a typed reader to take apart.

    - ``remedy``: What to do about a file that is missing or damaged: the end of the message.
    - ``missing``: The whole message for a file that does not exist.
    - raises StorageError: If the file is missing, unreadable, not JSON, or JSON but not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(missing or f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise StorageError(f"{path} is damaged: {remedy}")
    return content


def as_json(value: object) -> Json:
    """JSON values of dataclasses, mappings and sequences; a number that is not finite is null."""
    if hasattr(value, "to_json"):
        return cast("Json", value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_as_json(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else cast("Json", value)


def fields_as_json(value: DataclassInstance, *optional: str) -> dict[str, Json]:
    """A dataclass by its fields, in their order; the optional ones only where they hold something."""
    known = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    return {name: as_json(entry) for name, entry in known.items() if name not in optional or _holds(entry)}


def _holds(value: object) -> bool:
    return bool(value) if isinstance(value, bool | str | tuple | Mapping) else value is not None


def fingerprint(*values: object) -> str:
    """Sixteen hex digits of JSON values; dictionaries are compared regardless of their order."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


INTEGRITY = "integrity"
"""The key of a JSON object under which its own checksum is, with those of the files it covers."""


def with_checksum(content: Mapping[str, Json], files: Mapping[str, str] | None = None) -> dict[str, Json]:
    """A JSON object with a checksum of itself and, by name, the checksums of files it covers."""
    # Keys and values as they will be read: a checksum of other spellings would never match.
    plain: dict[str, Json] = json.loads(json.dumps(content))
    covered = dict(files or {})
    return {**plain, INTEGRITY: {"files": covered, "checksum": fingerprint(plain, covered)}}


def verify_checksum(content: ParsedJson, source: str | Path, remedy: str) -> Mapping[str, str]:
    """Raise if a JSON object is not as :func:`with_checksum` made it.

    - returns: The checksums of the files it covers, by name.
    - raises StorageError: The message names ``source`` and ends in the remedy.
    """
    given = content.get(INTEGRITY)
    integrity: ParsedJson = given if isinstance(given, dict) else {}
    files = integrity.get("files")
    rest = {key: value for key, value in content.items() if key != INTEGRITY}
    if not isinstance(files, dict) or "checksum" not in integrity:
        raise StorageError(
            f"{source} was changed after it was written, or an earlier version wrote it: it has no checksum: {remedy}"
        )
    if integrity["checksum"] != fingerprint(rest, files):
        raise StorageError(f"{source} was changed after it was written, it does not match its checksum: {remedy}")
    return files


def file_checksum(path: Path) -> str:
    """The checksum of a file's content, in hexadecimal digits."""
    with reading_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


UNPACKED_RATIO = 200
"""How many times its size a compressed file may unpack to, where that is more than ``UNPACKED_ALWAYS``."""
UNPACKED_ALWAYS, UNPACKED_MOST = 1 << 28, 1 << 36
"""Bytes that any compressed file may unpack to, and that none may."""


def unpacked_limit(path: Path, ratio: int | None = None) -> int:
    """Bytes that a compressed file may unpack to; one that holds more is a decompression bomb."""
    return min(UNPACKED_MOST, max(UNPACKED_ALWAYS, (ratio or UNPACKED_RATIO) * path.stat().st_size))


# Tables that others wrote: whole, and of no more than such a file may unpack to


GZIP = b"\x1f\x8b"
"""How a gzip file begins."""
_TAIL, _UNPACKED_AT_ONCE = 1 << 16, 1 << 20
_PARQUET_RATIO, _BYTES_OF_A_NUMBER = 1000, 8


def check_whole(path: Path, fields: int, separator: str = ",") -> None:
    """Raise if a CSV file, plain or gzipped, ends in the middle of a row, or unpacks to more than the limits allow.

    - ``fields``: The number of columns.
    """
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(max(0, path.stat().st_size - _TAIL))
        tail = _unpacked_tail(path) if packed else file.read()
    lines = tail.decode("utf-8", "replace").splitlines()
    last = next((line for line in reversed(lines[1:]) if line.strip()), "")
    # With an odd number of quotes the row began on an earlier line, in a text that holds a line break.
    if not last or last.count('"') % 2 or "\0" in last:
        return
    try:
        count = len(next(csv.reader([last], delimiter=separator), []))
    except csv.Error:
        return
    if count < fields:
        raise DataError(f"{path} is cut short: its last row has {count} of {fields} fields: download it again")
    if not tail.endswith((b"\n", b"\r")):
        warn(
            f"the last line of {path} does not end: the file may be cut short. Compare its size with the original's, "
            "or end the line"
        )


def check_unpacked_rows(path: Path, rows: int, columns: int) -> None:
    """Raise if a parquet file announces more rows than the limits on compressed files allow."""
    size = path.stat().st_size
    limit = unpacked_limit(path, _PARQUET_RATIO)
    if _BYTES_OF_A_NUMBER * rows * columns > limit:
        raise DataError(
            f"{path} announces {rows:,} rows of {columns:,} columns in {size:,} bytes, which unpack to more than "
            f"{limit / 2**20:,.0f} MB: no table of measurements does. If it is one, split it"
        )


def _unpacked_tail(path: Path) -> bytes:
    """The end of what a gzip file holds; all of it is unpacked once, which finds damage, and nothing is kept."""
    limit = unpacked_limit(path)
    tail, total = b"", 0
    try:
        with gzip.open(path, "rb") as stream:
            while piece := stream.read(_UNPACKED_AT_ONCE):
                total += len(piece)
                if total > limit:
                    raise DataError(
                        f"{path} unpacks to more than {limit / 2**20:,.0f} MB, over {UNPACKED_RATIO} times its size or "
                        f"{UNPACKED_MOST / 2**30:g} GB: no table does. If it is one, unpack it and give the .csv"
                    )
                tail = (tail + piece)[-_TAIL:]
    except (OSError, EOFError, zlib.error) as error:
        raise broken_file(path, error) from None
    return tail


def broken_file(path: Path, error: BaseException) -> DataError | StorageError:
    """The error for a file whose reading failed: cut short, where it is compressed."""
    if path.suffix.lower() == ".gz" and not isinstance(error, FileNotFoundError | PermissionError):
        return DataError(f"{path} is cut short or is not a whole gzip file: download it again")
    return StorageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


# What is shown: text of strangers made safe, warnings and progress


def printable(text: object) -> str:
    """Text as it may go to a terminal: what a terminal would act on is shown as an escape sequence.

    Names of classes, columns, patients and files are a stranger's. Control characters, line ends, marks that change the
    direction of writing and bytes that are no text could move the cursor, hide a line or forge one.

    Examples
    --------
    >>> print(printable("N1 " + chr(27) + "[31mred" + chr(10) + "REM"))
    N1 \\x1b[31mred\\nREM
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(map(_shown, shown))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


_PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def csv_text(text: str) -> str:
    """Text as a cell of a CSV file that spreadsheets show and never compute.

    A spreadsheet runs a cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a line end as a formula, quoted or
    not; an apostrophe before it keeps it text. Numbers stay as they are.

    Examples
    --------
    >>> [csv_text(text) for text in ("N2", "-1.5", "=1+1", "@SUM(A1)", "-2+cmd")]
    ['N2', '-1.5', "'=1+1", "'@SUM(A1)", "'-2+cmd"]
    """
    dangerous = text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) and not _PLAIN_NUMBER.fullmatch(text)
    return f"'{text}" if dangerous else text


QUIET = "MANYDG_QUIET"
"""The environment variable that silences progress, whatever its value."""


def warn_plainly() -> None:
    """Show our warnings as one line each from now on, without the source line that Python adds."""
    show_others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, ManyDGWarning):
            print(printable(f"manydg: warning: {' '.join(str(message).split())}"), file=file or sys.stderr)
        else:
            # Other libraries' own, of several lines, may repeat a name.
            lines = "\n".join(map(printable, str(message).split("\n")))
            show_others(lines, category, filename, lineno, file, line)

    warnings.showwarning = show


# Locks on outputs


_BYTE_LOCKED = 1 << 30
"""Beyond the owner's id, which others read: Windows locks a range of bytes, for reading too."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Write an output alone: another process that asks for the same one within the block is refused.

    The lock is on the file ``.NAME.lock`` beside the output. The system releases it when its owner ends, however that
    may be, so that a file left by a killed process blocks nobody; the next owner takes it over and deletes it.
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


# Folders


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path``, which must not exist, at the end of the block; removed on failure."""
    partial = partial_name(path)
    try:
        with disk_errors(path):
            recover_folder(path)
            make_folder(partial)
            yield partial
            for file in partial.rglob("*"):
                file.chmod(0o700 if file.is_dir() else 0o600)
            partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """An output, file or folder, that this process alone writes within the block.

    What killed processes left beside it, and in a folder, is cleared first.

    - raises StorageError: If another process is writing it.
    """
    with locked(path):
        with disk_errors(path):
            recover_folder(path)
            remove_partial_files(path)
        yield


def replace_folder(new: Path, final: Path) -> None:
    """Rename a complete folder to its final name; a folder of that name is moved aside first and deleted last."""
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


def recover_folder(final: Path) -> None:
    """Clean up beside a folder or file after a killed process: restore an old version moved aside, delete new ones."""
    for path, owner in _versions(final, "old"):
        if not _is_gone(owner):
            continue
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.replace(final)
    for path, owner in _versions(final, "partial"):
        if _is_gone(owner):
            _delete(path)


def _is_gone(owner: int) -> bool:
    """Whether the process that made a temporary version has ended; one that had our id has, too."""
    return owner == os.getpid() or not is_running(owner)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_partial_files(folder: Path) -> None:
    """Delete the partial files that killed processes left in a folder; those of running processes stay."""
    for path in folder.glob(".*.partial-*"):
        owner = path.name.rpartition(".partial-")[2].partition(".")[0]
        if owner.isdigit() and not is_running(int(owner)) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def _versions(final: Path, kind: str) -> list[tuple[Path, int]]:
    """Temporary versions of a folder with the id of the process that made each."""
    start = f".{final.name}.{kind}-"
    if not final.parent.is_dir():
        return []
    paths = [path for path in final.parent.iterdir() if path.name.startswith(start)]
    return [(path, int(owner)) for path in paths if (owner := path.name.removeprefix(start)).isdigit()]


def is_running(process: int) -> bool:
    """Whether a process of this id exists on this machine."""
    if sys.platform == "win32":
        # os.kill(process, 0) would send Ctrl-C there.
        query_limited_information, kernel = 0x1000, ctypes.windll.kernel32
        handle = kernel.OpenProcess(query_limited_information, False, process)
        if handle:
            kernel.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# Background threads


class Digest(Protocol):
    """What :mod:`hashlib` returns, as far as hashing needs it."""

    def update(self, data: memoryview, /) -> None: ...


_MAX_PENDING_BYTES = 1 << 26
_INLINE_BYTES = 1 << 16


class HashingThread:
    """Updates checksums in a background thread, in the order given; hashing releases the GIL.

    At most 64 MB are pending at a time, or a single piece if it is larger. Pending data must not change until
    :meth:`wait` returns.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0

    def update(self, digest: Digest, data: memoryview) -> None:
        """Schedule ``digest.update(data)``; blocks only while too much is pending."""
        if data.nbytes < _INLINE_BYTES and not self._pending:
            digest.update(data)
            return
        self._make_room(data.nbytes)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._pending.append((self._pool.submit(digest.update, data), data.nbytes))
        self._pending_bytes += data.nbytes

    def _make_room(self, size: int) -> None:
        while self._pending and (self._pending[0][0].done() or self._pending_bytes + size > _MAX_PENDING_BYTES):
            future, length = self._pending.popleft()
            future.result()
            self._pending_bytes -= length

    def wait(self) -> None:
        """Block until everything scheduled is part of its checksum."""
        self._make_room(_MAX_PENDING_BYTES + 1)

    def close(self) -> None:
        """Stop the thread; what is still pending is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def prefetch_map(function: Callable[[A], T], items: Iterable[A], threads: int = 2) -> Iterator[T]:
    """``map(function, items)`` in which threads compute the next few results while the caller uses the current one.

    Worth it where ``function`` releases the GIL, as numpy's sorting does.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        pending: deque[Future[T]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# Which code made a result: a hash of the modules that can change one, read without comments and docstrings


_DECISIVE = ("config.py", "data", "targets.py", "backbones", "algorithms", "evaluation", "training")
# Fields that say nothing of what a program does, or that only some versions of Python have.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores"})


@cache
def code_version() -> str:
    """Version of the package and a hash of the source that decides results, as ``0.1.0+5a1f09c2de``."""
    return f"{manydg.__version__}+{source_digest(_DECISIVE)}"


def source_digest(parts: Sequence[str], root: Path | None = None) -> str:
    """Hash what modules do: their names and their syntax trees without docstrings.

    - ``parts``: Modules and folders of modules, relative to ``root``.
    - ``root``: The folder of a package; this package's own if not given.
    - returns: Ten hexadecimal digits.
    """
    root = root or Path(__file__).parent
    digest = hashlib.blake2b(digest_size=5)
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update("".join(_tokens(ast.parse(file.read_bytes()))).encode())
    return digest.hexdigest()


def _tokens(node: ast.AST) -> Iterator[str]:
    """A syntax tree in one canonical spelling: node types and values in order, empty fields left out."""
    yield f"({type(node).__name__}"
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _IGNORED_FIELDS:
            continue
        yield f" {name}="
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, ast.AST):
                yield f"{item!r},"
            elif not _is_docstring(item):
                yield from _tokens(item)
    yield ")"


def _is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a string alone, which explains and does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
