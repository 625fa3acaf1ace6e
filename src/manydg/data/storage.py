"""The dataset folder: plain ``.npy`` files and a ``dataset.json`` that says what they are.

A folder is written beside its final place and renamed into it at the end, so that one which opens is whole. Every
file's size and checksum stand in ``dataset.json``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset, TargetSpec, combine_checksums
from manydg.errors import DataError, StorageError

SCHEMA_VERSION = 1
VERIFY_WHOLE_BELOW = 1 << 30
_HEADER_BYTES = 256


class _NpyStream:
    """A ``.npy`` file that grows by rows and gets its true length when closed."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.row_shape, self.rows = path, dtype, row_shape, 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._file: IO[bytes] = path.open("wb")
        self._file.write(b"\0" * _HEADER_BYTES)

    def append(self, array: npt.NDArray[Any]) -> None:
        if array.shape[1:] != self.row_shape:
            raise DataError(f"'{self.path.stem}': rows of shape {array.shape[1:]} after rows of {self.row_shape}")
        data = np.ascontiguousarray(array, dtype=self.dtype).reshape(-1).view(np.uint8).data
        self._digest.update(data)
        self._file.write(data)
        self.rows += len(array)

    def close(self) -> dict[str, Any]:
        header = repr({"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row_shape)})
        text = header.encode("latin1").ljust(_HEADER_BYTES - 11) + b"\n"
        self._file.seek(0)
        self._file.write(b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little") + text)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {
            "bytes": self.path.stat().st_size,
            "dtype": self.dtype.str,
            "shape": [self.rows, *self.row_shape],
            "checksum": self._digest.hexdigest(),
        }

    def abandon(self) -> None:
        self._file.close()


class DatasetWriter:
    """Writes a dataset folder piece by piece, in memory of one piece; nothing appears until all of it is there.

    Use as a context manager. ``append`` any number of times, then leave the block; an exception inside it removes what
    was written and leaves an existing folder as it was.

    Parameters
    ----------
    folder : path
    target : TargetSpec
    info : dict
        Stored as JSON; may be added to until the block ends.
    overwrite : bool
        Replace a folder that is already there (only once the new one is whole).
    """

    def __init__(
        self, folder: str | Path, target: TargetSpec, info: Mapping[str, Any] | None = None, *, overwrite: bool = False
    ) -> None:
        self.folder, self.target, self.info = Path(folder), target, dict(info or {})
        self.overwrite = overwrite
        self._partial = self.folder.with_name(f".{self.folder.name}.partial-{os.getpid()}")
        self._streams: dict[str, _NpyStream] = {}
        self._nesting: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._pseudonym_key = ""

    def __enter__(self) -> DatasetWriter:
        if self.folder.exists() and not self.overwrite:
            raise StorageError(f"{self.folder} already exists: name another folder, or ask to overwrite it")
        with _disk_errors(self.folder):
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                with _disk_errors(self.folder):
                    self._finish()
        finally:
            for stream in self._streams.values():
                stream.abandon()
            shutil.rmtree(self._partial, ignore_errors=True)

    def append(
        self,
        inputs: Mapping[str, Column | npt.NDArray[Any]],
        targets: Tensor | npt.NDArray[Any],
        patients: Sequence[Any] | npt.NDArray[Any],
        times: Tensor | npt.NDArray[Any] | None = None,
    ) -> None:
        """Add samples. ``patients`` holds one id a sample; a patient may come back in a later piece."""
        with _disk_errors(self.folder):
            for name, column in inputs.items():
                self._append_column(name, column)
            self._write("targets", _array(targets))
            names, inverse = np.unique(np.asarray(patients).astype(str), return_inverse=True)
            codes = np.array([self._codes.setdefault(name, len(self._codes)) for name in names.tolist()], np.int64)
            self._write("domains", codes[inverse])
            if times is not None:
                self._write("times", _array(times).astype(np.float64))

    def _append_column(self, name: str, column: Column | npt.NDArray[Any]) -> None:
        level = 0
        while isinstance(column, Ragged):
            key = f"inputs.{name}.offsets{'' if level == 0 else level + 1}"
            if key not in self._ends:
                self._write(key, np.zeros(1, np.int64))
            start = self._ends.get(key, 0)
            self._write(key, column.offsets[1:].cpu().numpy() + start)
            self._ends[key] = start + int(column.offsets[-1])
            column, level = column.values, level + 1
        self._nesting[name] = level
        self._write(f"inputs.{name}", _array(column))

    def _write(self, key: str, array: npt.NDArray[Any]) -> None:
        if key not in self._streams:
            self._streams[key] = _NpyStream(self._partial / f"{key}.npy", array.dtype, array.shape[1:])
        self._streams[key].append(array)

    def _finish(self) -> None:
        if "domains" not in self._streams:
            raise DataError("there is not a single sample to write; the filters left nothing")
        names = np.array(list(self._codes))
        self._write("patients", names)
        files = {key: stream.close() for key, stream in self._streams.items()}
        description = {
            "schema_version": SCHEMA_VERSION,
            "samples": self._streams["domains"].rows,
            "patients": len(names),
            "target": {"kind": self.target.kind, "names": list(self.target.names)},
            "columns": self._nesting,
            "content_hash": combine_checksums(files, self.target),
            "pseudonym_key": self._pseudonym_key or _key_from_files(files),
            "files": files,
            "info": self.info,
        }
        _write_text(self._partial / "dataset.json", json.dumps(description, indent=1))
        _swap_in(self._partial, self.folder)


def save_dataset(dataset: DomainDataset, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a dataset in memory to a folder."""
    writer = DatasetWriter(folder, dataset.target, dataset.info, overwrite=overwrite)
    writer._pseudonym_key = dataset.pseudonym_key
    writer._codes = {name: code for code, name in enumerate(dataset.patients.tolist())}
    with writer:
        columns = {name: dataset.column(name) for name in dataset.columns}
        writer.append(columns, dataset.targets, dataset.patients[dataset.domains.cpu().numpy()], dataset.times)
    return Path(folder)


def open_dataset(folder: str | Path, *, verify: Literal["auto", "full", "sizes"] = "auto") -> DomainDataset:
    """Open a dataset folder, memory-mapped.

    Parameters
    ----------
    folder : path
    verify : {"auto", "full", "sizes"}
        ``full`` reads every byte against its checksum; ``sizes`` only compares file sizes; ``auto`` is ``full`` up to
        one gigabyte.
    """
    path = Path(folder)
    description = read_description(path)
    whole = verify == "full" or (
        verify == "auto" and sum(entry["bytes"] for entry in description["files"].values()) < VERIFY_WHOLE_BELOW
    )
    for key, entry in description["files"].items():
        _check_file(path / f"{key}.npy", entry, whole)
    arrays = {key: _memory_map(path / f"{key}.npy") for key in description["files"]}
    columns = {name: _assemble(name, levels, arrays) for name, levels in description["columns"].items()}
    target = description["target"]
    return DomainDataset(
        columns=columns,
        targets=arrays["targets"],
        target=TargetSpec(target["kind"], tuple(target["names"])),
        domains=arrays["domains"],
        patients=np.load(path / "patients.npy", allow_pickle=False),
        times=arrays.get("times"),
        info=description["info"],
        stored_hash=description["content_hash"],
        pseudonym_key=description["pseudonym_key"],
    )


def read_description(folder: str | Path) -> dict[str, Any]:
    """The parsed ``dataset.json`` of a folder, or an error that says why there is none."""
    path = Path(folder)
    if not path.is_dir():
        raise StorageError(f"no dataset folder at {path}: make one with 'manydg prepare'")
    try:
        description: dict[str, Any] = json.loads((path / "dataset.json").read_text())
        version = description["schema_version"]
    except FileNotFoundError:
        raise StorageError(f"{path} is not a dataset folder: it has no dataset.json") from None
    except (ValueError, KeyError, TypeError):
        raise StorageError(f"{path / 'dataset.json'} is damaged: prepare the dataset again") from None
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: prepare the dataset again"
        )
    return description


def _array(values: Column | npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _key_from_files(files: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(["pseudonyms", files]).encode(), digest_size=32).hexdigest()


def _memory_map(path: Path) -> Tensor:
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    if array.dtype.kind == "U":
        return torch.empty(0)
    return torch.from_numpy(array)


def _assemble(name: str, levels: int, arrays: Mapping[str, Tensor]) -> Column:
    column: Column = arrays[f"inputs.{name}"]
    for level in reversed(range(levels)):
        column = Ragged(column, arrays[f"inputs.{name}.offsets{'' if level == 0 else level + 1}"])
    return column


def _check_file(path: Path, entry: Mapping[str, Any], whole: bool) -> None:
    if not path.exists():
        raise StorageError(f"{path} is missing: the dataset folder is damaged, prepare it again")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise StorageError(f"{path} has {size} bytes instead of {entry['bytes']}: it is damaged, prepare it again")
    if whole:
        with path.open("rb") as file:
            file.seek(_HEADER_BYTES)
            digest = hashlib.blake2b(digest_size=16)
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        if digest.hexdigest() != entry["checksum"]:
            raise StorageError(f"{path} does not match its checksum: it is damaged, prepare the dataset again")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(error, folder) from error


def disk_error(error: OSError, place: Path) -> StorageError:
    """An operating-system error as one that says what is left and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk is full while writing {place}: free some space and run the same command again")
    return StorageError(f"cannot write {place}: {error.strerror or error}")


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file's content in one step; on failure the old content stays."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_text(partial, text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def _swap_in(new: Path, final: Path) -> None:
    """Rename a finished folder into place, moving an old one aside first and deleting it last."""
    if not final.exists():
        new.replace(final)
        return
    aside = final.with_name(f".{final.name}.old-{os.getpid()}")
    final.replace(aside)
    new.replace(final)
    shutil.rmtree(aside, ignore_errors=True)
