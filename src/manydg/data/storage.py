"""The dataset folder: plain ``.npy`` files and a ``dataset.json`` that describes them.

A folder is written under a temporary name and renamed at the end, so that one which opens is complete. ``dataset.json``
records every file's size and checksum. :func:`manydg.open_dataset` opens a folder as a dataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from manydg.data.columns import Column, Ragged, as_stored, encode_patients, unnest
from manydg.data.info import ArrayFile, DatasetDescription, DatasetInfo, TargetSpec, offsets_file
from manydg.errors import DataError, StorageError
from manydg.files import (
    HashingThread,
    ParsedJson,
    disk_errors,
    make_folder,
    partial_name,
    private,
    read_json,
    reading_errors,
    recover_folder,
    replace_folder,
    verify_checksum,
    with_checksum,
    write_through,
)

DESCRIPTION = "dataset.json"
SCHEMA_VERSION = 1
METADATA = "metadata."
"""The prefix of the files with a dataset's metadata."""
VERIFY_CONTENT_BELOW = 1 << 30
"""Bytes up to which a folder's content is checked whenever it is opened."""

HEADER_BYTES = 256
DAMAGED_NPY = (
    ValueError,
    EOFError,
    SyntaxError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)
"""What NumPy raises for a header that is cut or garbled, found by fuzzing it."""
LARGE_FILE = 1 << 31
"""Bytes from which a file is kept out of the page cache while it is read or written once from end to end."""
_CACHE_STEP = 1 << 25

Array = npt.NDArray[Any]
Values = Tensor | Array
Ids = Sequence[Any] | Array
InputColumns = Mapping[str, Column | Array]
Metadata = Mapping[str, Values]
Verify = Literal["auto", "full", "sizes"]


class DatasetWriter:
    """Writes a dataset folder piece by piece, in memory of one piece; nothing appears until all of it is there.

    Use as a context manager. ``append`` any number of times, then leave the block; an exception inside it removes what
    was written and leaves an existing folder as it was.

    Parameters
    ----------
    folder : path
    target : TargetSpec
    info : DatasetInfo, or a dict of its entries
        The attribute ``info`` may be replaced until the block ends.
    overwrite : bool
        Replace an existing folder (only once the new one is complete).
    """

    def __init__(
        self, folder: str | Path, target: TargetSpec, info: DatasetInfo | ParsedJson | None = None, *,
        overwrite: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.target, self.info = Path(folder), target, DatasetInfo.of(info)
        self.overwrite = overwrite
        self._partial = partial_name(self.folder)
        self._streams: dict[str, HashedNpyStream] = {}
        self._hashing = HashingThread()
        self._nesting: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._pseudonym_key = ""

    def __enter__(self) -> DatasetWriter:
        with disk_errors(self.folder):
            recover_folder(self.folder)
            self._check_folder()
            make_folder(self._partial)
        return self

    def _check_folder(self) -> None:
        if self.folder.is_symlink():
            raise link_refused(self.folder)
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise StorageError(f"{self.folder} already exists: name another folder or say --overwrite (overwrite=True)")
        empty = self.folder.is_dir() and not any(self.folder.iterdir())
        if not (self.folder / DESCRIPTION).exists() and not empty:
            raise StorageError(
                f"{self.folder} is not a dataset folder, so it is not overwritten: name another folder, or empty it"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                with disk_errors(self.folder):
                    self._finish()
        finally:
            for stream in self._streams.values():
                stream.abandon()
            self._hashing.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def append(
        self, inputs: InputColumns, targets: Values, patients: Ids, times: Values | None = None,
        metadata: Metadata | None = None,
    ) -> None:  # fmt: skip
        """Add samples. ``patients`` holds one id per sample; a patient may occur again in a later piece."""
        self.append_immutable(inputs, targets, patients, times, metadata)
        self._hashing.wait()

    def append_immutable(
        self, inputs: InputColumns, targets: Values, patients: Ids, times: Values | None = None,
        metadata: Metadata | None = None,
    ) -> None:  # fmt: skip
        """Add samples whose arrays never change again: returns while they are still being hashed."""
        codes, names = encode_patients(patients)
        known = np.array([self._codes.setdefault(name, len(self._codes)) for name in names.tolist()], np.int64)
        self._append(inputs, targets, known[codes.numpy()], times, metadata or {})

    def append_all(
        self, inputs: InputColumns, targets: Values, codes: npt.NDArray[np.int64], patients: npt.NDArray[np.str_],
        times: Values | None, pseudonym_key: str, metadata: Metadata | None = None,
    ) -> None:  # fmt: skip
        """Add a whole dataset whose patients are encoded already, and whose pseudonyms are to stay the same.

        - ``codes`` ``(rows,)``: Positions in ``patients``.
        """
        self._codes = {name: code for code, name in enumerate(patients.tolist())}
        self._pseudonym_key = pseudonym_key
        self._append(inputs, targets, codes, times, metadata or {})

    def _append(
        self, inputs: InputColumns, targets: Values, codes: npt.NDArray[np.int64], times: Values | None,
        metadata: Metadata,
    ) -> None:  # fmt: skip
        lengths = {f"{METADATA}{name}": len(values) for name, values in metadata.items()}
        lengths |= {"targets": len(targets), **({} if times is None else {"times": len(times)})}
        self._check_piece(inputs, lengths, codes)
        with disk_errors(self.folder):
            for name, column in inputs.items():
                self._append_column(name, column)
            self._write("targets", _array(targets))
            self._write("domains", codes)
            if times is not None:
                self._write("times", _array(times).astype(np.float64))
            for name, values in metadata.items():
                self._write(f"{METADATA}{name}", _array(values))

    def _check_piece(self, inputs: InputColumns, lengths: dict[str, int], codes: npt.NDArray[np.int64]) -> None:
        """Raise before anything is written if a piece does not fit together, or not with the pieces before it."""
        lengths |= {f"input '{name}'": len(column) for name, column in inputs.items()}
        for name, length in lengths.items():
            if length != len(codes):
                raise DataError(f"{name}: {length} rows, but there are {len(codes)} patient ids")
        optional = {key for key in lengths if key == "times" or key.startswith(METADATA)}
        before = {key for key in self._streams if key == "times" or key.startswith(METADATA)}
        if self._streams and (set(inputs) != set(self._nesting) or optional != before):
            raise DataError(f"a piece with the inputs {sorted(inputs)} does not fit the pieces before it")

    def _append_column(self, name: str, column: Column | Array) -> None:
        levels, items = unnest(column) if isinstance(column, Ragged) else ([], column)
        for level, offsets in enumerate(levels):
            key = offsets_file(name, level)
            if key not in self._ends:
                self._write(key, np.zeros(1, np.int64))
            start = self._ends.get(key, 0)
            self._write(key, offsets[1:].cpu().numpy() + start)
            self._ends[key] = start + int(offsets[-1])
        nesting = len(levels)
        if self._nesting.setdefault(name, nesting) != nesting:
            raise DataError(f"input '{name}' is nested {nesting} deep after pieces nested {self._nesting[name]} deep")
        self._write(f"inputs.{name}", as_stored(name, _array(items)))

    def _write(self, key: str, array: Array) -> None:
        if key not in self._streams:
            self._streams[key] = HashedNpyStream(
                self._partial / f"{key}.npy", array.dtype, array.shape[1:], self._hashing
            )
        self._streams[key].append(array)

    def _finish(self) -> None:
        if "domains" not in self._streams or self._streams["domains"].rows == 0:
            raise DataError(
                f"there is not a single sample to write to {self.folder}; the filters left nothing: loosen them, or "
                "check that the files hold what they should"
            )
        names = np.array(list(self._codes))
        self._write("patients", names)
        files = {key: stream.close() for key, stream in self._streams.items()}
        description = DatasetDescription(
            samples=self._streams["domains"].rows,
            patients=len(names),
            target=self.target,
            columns=self._nesting,
            pseudonym_key=self._pseudonym_key or secrets.token_hex(32),
            files=files,
            info=self.info,
        )
        if (self.folder / DESCRIPTION).exists():
            description = _key_kept(self.folder, description)
        content = with_checksum({"schema_version": SCHEMA_VERSION, **description.to_json()})
        write_through(self._partial / DESCRIPTION, json.dumps(content, indent=1))
        replace_folder(self._partial, self.folder)


def _array(values: Values) -> Array:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _key_kept(folder: Path, description: DatasetDescription) -> DatasetDescription:
    """With the key of the folder that is replaced if that has the same content: runs on it know its pseudonyms."""
    try:
        before = read_description(folder)
    except StorageError:
        return description
    same = before.content_hash == description.content_hash
    return replace(description, pseudonym_key=before.pseudonym_key) if same else description


def read_description(folder: str | Path) -> DatasetDescription:
    """The content of a folder's ``dataset.json``, or an error that says why there is none."""
    path = Path(folder)
    if not path.is_dir():
        recover_folder(path)
    if not path.is_dir():
        raise StorageError(f"no dataset folder at {path}: make one with 'manydg prepare'")
    file, remedy = path / DESCRIPTION, "prepare the dataset again"
    content = read_json(file, remedy=remedy, missing=f"{path} is not a dataset folder: it has no {DESCRIPTION}")
    try:
        version = content["schema_version"]
        if version == SCHEMA_VERSION:
            description = DatasetDescription.from_json(content)
            verify_checksum(content, file, remedy)
            return description
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, DataError):
        raise StorageError(f"{file} is damaged: {remedy}") from None
    raise StorageError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: {remedy}")


def link_refused(folder: Path) -> StorageError:
    """The error for a dataset folder to be written that is a symbolic link: what it points to is not replaced."""
    return StorageError(f"{folder} is a symbolic link, which is not overwritten: name the folder itself or another")


def refuse_dataset_folder(folder: Path) -> None:
    """Raise where runs or results would be written into a dataset folder: preparing it again would delete them."""
    if (folder / DESCRIPTION).exists():
        raise StorageError(f"{folder} is a dataset folder: name another one for what is made from it")


def read_arrays(folder: Path, files: Mapping[str, ArrayFile], verify: Verify) -> dict[str, Array]:
    """A folder's arrays by name, memory-mapped and checked.

    - ``files``: From the folder's description.
    - ``verify`` {"auto", "full", "sizes"}: ``full`` reads every byte against its checksum; ``sizes`` only compares file
      sizes and headers; ``auto`` is ``full`` up to one gigabyte.
    """
    total = sum(file.bytes for file in files.values())
    content = verify == "full" or (verify == "auto" and total < VERIFY_CONTENT_BELOW)
    for key, file in files.items():
        _check_header(folder / f"{key}.npy", file)
        if content:
            _check_content(folder / f"{key}.npy", file)
    return {key: np.load(folder / f"{key}.npy", mmap_mode="c", allow_pickle=False) for key in files}


def _check_header(path: Path, expected: ArrayFile) -> None:
    if not path.exists():
        raise StorageError(f"{path} is missing: the dataset folder is damaged, prepare it again")
    size = path.stat().st_size
    if size != expected.bytes:
        raise StorageError(f"{path} has {size} bytes instead of {expected.bytes}: it is damaged, prepare it again")
    with reading_errors(path), path.open("rb") as file:
        # Compared, not parsed: what is damaged may parse as anything.
        if file.read(HEADER_BYTES) != npy_header(expected.dtype, expected.shape):
            raise StorageError(f"{path} does not begin as dataset.json says: it is damaged, prepare it again")


def _check_content(path: Path, expected: ArrayFile) -> None:
    with reading_errors(path), path.open("rb") as file:
        file.seek(HEADER_BYTES)
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    if digest.hexdigest() != expected.checksum:
        raise StorageError(f"{path} does not match its checksum: it is damaged, prepare the dataset again")


# Its files: arrays that grow by rows


class NpyStream:
    """A ``.npy`` file that grows by rows; its header is completed when it is closed."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.row_shape, self.rows = path, dtype, row_shape, 0
        self._file: IO[bytes] = open(path, "wb", opener=private)  # noqa: SIM115 - closed by close() or abandon()
        self._written = self._file.write(b"\0" * HEADER_BYTES)
        self._next_drop = LARGE_FILE

    def append(self, array: npt.NDArray[Any]) -> None:
        if array.shape[1:] != self.row_shape:
            raise DataError(f"'{self.path.stem}': rows of shape {array.shape[1:]} after rows of {self.row_shape}")
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise DataError(f"'{self.path.stem}': values of type {array.dtype} after values of {self.dtype}")
        self._write(np.ascontiguousarray(array, dtype=self.dtype).reshape(-1).view(np.uint8).data)
        self.rows += len(array)

    def _write(self, data: memoryview) -> None:
        self._written += self._file.write(data)
        if self._written >= self._next_drop:
            self._next_drop = self._written + _CACHE_STEP
            drop_from_cache(self._file.fileno(), max(0, self._written - 8 * _CACHE_STEP), self._written)

    def close(self) -> ArrayFile:
        """Write the header and flush the file to the disk."""
        self._file.seek(0)
        self._file.write(npy_header(self.dtype.str, (self.rows, *self.row_shape)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return ArrayFile(self.path.stat().st_size, self.dtype.str, (self.rows, *self.row_shape))

    def abandon(self) -> None:
        """Close the file without completing it."""
        # Closing writes what is buffered, which fails once more where the disk is full.
        with contextlib.suppress(OSError):
            self._file.close()


class HashedNpyStream(NpyStream):
    """A :class:`NpyStream` that knows its checksum when closed.

    Rows are hashed in a background thread while others are written: an array that was appended must not change until
    ``hashing.wait()`` returns.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...], hashing: HashingThread) -> None:
        super().__init__(path, dtype, row_shape)
        self._digest, self._hashing = hashlib.blake2b(digest_size=16), hashing

    def _write(self, data: memoryview) -> None:
        self._hashing.update(self._digest, data)
        super()._write(data)

    def close(self) -> ArrayFile:
        entry = super().close()
        self._hashing.wait()
        return ArrayFile(entry.bytes, entry.dtype, entry.shape, self._digest.hexdigest())


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header of a ``.npy`` file, of a fixed length."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode("latin1")
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text.ljust(HEADER_BYTES - 11) + b"\n"


def drop_from_cache(file: int, start: int, stop: int) -> None:
    """Drop a range of an open file from the page cache, where the system can.

    Otherwise a file of many gigabytes evicts everything else from memory, only to be evicted by its own end.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)
