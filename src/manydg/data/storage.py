"""The dataset folder: plain ``.npy`` files and a ``dataset.json`` that says what they are.

A folder is written beside its final place and renamed into it at the end, so that one which opens is whole. Every
file's size and checksum stand in ``dataset.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.build import encode_patients
from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset, TargetSpec, combine_checksums
from manydg.errors import DataError, StorageError
from manydg.files import (
    HEADER_BYTES,
    ArrayFile,
    HashedNpyStream,
    HashingThread,
    disk_errors,
    npy_header,
    partial_name,
    recover_folder,
    replace_folder,
    write_through,
)

# Writing a dataset folder piece by piece: it appears whole or not at all.


SCHEMA_VERSION = 1
Values = Tensor | npt.NDArray[Any]
Ids = Sequence[Any] | npt.NDArray[Any]
Pieces = Mapping[str, Column | npt.NDArray[Any]]


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
            self._check_place()
            self._partial.mkdir(parents=True)
        return self

    def _check_place(self) -> None:
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise StorageError(f"{self.folder} already exists: name another folder or say --overwrite (overwrite=True)")
        if not (self.folder / "dataset.json").exists() and not _is_empty(self.folder):
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

    def append(self, inputs: Pieces, targets: Values, patients: Ids, times: Values | None = None) -> None:
        """Add samples. ``patients`` holds one id a sample; a patient may come back in a later piece."""
        self.append_lasting(inputs, targets, patients, times)
        self._hashing.wait()

    def append_lasting(self, inputs: Pieces, targets: Values, patients: Ids, times: Values | None = None) -> None:
        """Add samples whose arrays nobody changes any more: returns while they are still being hashed."""
        codes, names = encode_patients(patients)
        known = np.array([self._codes.setdefault(name, len(self._codes)) for name in names.tolist()], np.int64)
        self._append_coded(inputs, targets, known[codes.numpy()], times)

    def _append_coded(
        self, inputs: Pieces, targets: Values, codes: npt.NDArray[np.int64], times: Values | None
    ) -> None:
        self._check_piece(inputs, {"targets": len(targets), **({} if times is None else {"times": len(times)})}, codes)
        with disk_errors(self.folder):
            for name, column in inputs.items():
                self._append_column(name, column)
            self._write("targets", _array(targets))
            self._write("domains", codes)
            if times is not None:
                self._write("times", _array(times).astype(np.float64))

    def _check_piece(self, inputs: Mapping[str, Any], lengths: dict[str, int], codes: npt.NDArray[np.int64]) -> None:
        """Raise before anything is written if a piece does not fit together, or not with the pieces before it."""
        lengths |= {f"input '{name}'": len(column) for name, column in inputs.items()}
        for name, length in lengths.items():
            if length != len(codes):
                raise DataError(f"{name}: {length} rows, but there are {len(codes)} patient ids")
        if self._streams and (set(inputs) != set(self._nesting) or ("times" in lengths) != ("times" in self._streams)):
            raise DataError(f"a piece with the inputs {sorted(inputs)} does not fit the pieces before it")

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
        if self._nesting.setdefault(name, level) != level:
            raise DataError(f"input '{name}' is nested {level} deep after pieces nested {self._nesting[name]} deep")
        self._write(f"inputs.{name}", _numbers(name, _array(column)))

    def _write(self, key: str, array: npt.NDArray[Any]) -> None:
        if key not in self._streams:
            self._streams[key] = HashedNpyStream(
                self._partial / f"{key}.npy", array.dtype, array.shape[1:], self._hashing
            )
        self._streams[key].append(array)

    def _finish(self) -> None:
        if "domains" not in self._streams or self._streams["domains"].rows == 0:
            raise DataError("there is not a single sample to write; the filters left nothing")
        names = np.array(list(self._codes))
        self._write("patients", names)
        files = {key: _entry(stream.close()) for key, stream in self._streams.items()}
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
        write_through(self._partial / "dataset.json", json.dumps(description, indent=1))
        replace_folder(self._partial, self.folder)


def save_dataset(dataset: DomainDataset, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a dataset in memory to a folder."""
    writer = DatasetWriter(folder, dataset.target, dataset.info, overwrite=overwrite)
    writer._pseudonym_key = dataset.pseudonym_key
    writer._codes = {name: code for code, name in enumerate(dataset.patients.tolist())}
    with writer:
        columns = {name: dataset.column(name) for name in dataset.columns}
        writer._append_coded(columns, dataset.targets, dataset.domains.cpu().numpy(), dataset.times)
    return Path(folder)


def _array(values: Column | npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _numbers(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Inputs as they are stored: measurements as float32, codes as int64."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"input '{name}' has type {array.dtype}; inputs are numbers: encode text as codes first")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def _entry(file: ArrayFile) -> dict[str, Any]:
    return {"bytes": file.bytes, "dtype": file.dtype, "shape": list(file.shape), "checksum": file.checksum}


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _key_from_files(files: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(["pseudonyms", files]).encode(), digest_size=32).hexdigest()


VERIFY_WHOLE_BELOW = 1 << 30


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
    files, target = (
        description["files"],
        TargetSpec(description["target"]["kind"], tuple(description["target"]["names"])),
    )
    whole = verify == "full" or (
        verify == "auto" and sum(entry["bytes"] for entry in files.values()) < VERIFY_WHOLE_BELOW
    )
    for key, entry in files.items():
        _check_file(path / f"{key}.npy", entry, whole)
    arrays = {key: np.load(path / f"{key}.npy", mmap_mode="c", allow_pickle=False) for key in files}
    names = arrays.pop("patients")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return DomainDataset(
        columns={name: _assemble(name, levels, tensors) for name, levels in description["columns"].items()},
        targets=tensors["targets"],
        target=target,
        domains=tensors["domains"],
        patients=np.array(names),
        times=tensors.get("times"),
        info=description["info"],
        stored_hash=description["content_hash"],
        pseudonym_key=description["pseudonym_key"],
    )


def read_description(folder: str | Path) -> dict[str, Any]:
    """The parsed ``dataset.json`` of a folder, or an error that says why there is none."""
    path = Path(folder)
    if not path.is_dir():
        recover_folder(path)
    if not path.is_dir():
        raise StorageError(f"no dataset folder at {path}: make one with 'manydg prepare'")
    try:
        description: dict[str, Any] = json.loads((path / "dataset.json").read_text(encoding="utf-8"))
        version = description["schema_version"]
        if version == SCHEMA_VERSION:
            _check_description(description)
    except FileNotFoundError:
        raise StorageError(f"{path} is not a dataset folder: it has no dataset.json") from None
    except OSError as error:
        raise StorageError(f"cannot read {path / 'dataset.json'}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, DataError):
        raise StorageError(f"{path / 'dataset.json'} is damaged: prepare the dataset again") from None
    if version != SCHEMA_VERSION:
        raise StorageError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: prepare the dataset again"
        )
    return description


def _check_description(description: Mapping[str, Any]) -> None:
    """Raise a plain error if an entry is missing or does not agree with the others."""
    target = _target_in(description)
    if combine_checksums(description["files"], target) != description["content_hash"]:
        raise ValueError("the content hash is not that of the files")
    bytes.fromhex(description["pseudonym_key"])
    known = set(description["files"])
    needed = {f"inputs.{name}" for name in description["columns"]} | {"targets", "domains", "patients"}
    if not needed <= known or not isinstance(description["info"], dict):
        raise KeyError("files")


def _target_in(description: Mapping[str, Any]) -> TargetSpec:
    return TargetSpec(description["target"]["kind"], tuple(description["target"]["names"]))


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
    try:
        with path.open("rb") as file:
            # Compared, not parsed: what is damaged may parse as anything.
            if file.read(HEADER_BYTES) != npy_header(entry["dtype"], tuple(entry["shape"])):
                raise StorageError(f"{path} does not begin as dataset.json says: it is damaged, prepare it again")
            digest = hashlib.blake2b(digest_size=16)
            while whole and (chunk := file.read(1 << 22)):
                digest.update(chunk)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    if whole and digest.hexdigest() != entry["checksum"]:
        raise StorageError(f"{path} does not match its checksum: it is damaged, prepare the dataset again")
