"""The dataset folder: plain ``.npy`` files and a ``dataset.json`` that says what they are.

A folder is written beside its final place and renamed into it at the end, so that one which opens is whole. Every
file's size and checksum stand in ``dataset.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from manydg.data._files import (
    HEADER_BYTES,
    clear_remains,
    disk_error,
    npy_header,
    remove_leftovers,
    write_atomically,
)
from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset, TargetSpec, combine_checksums
from manydg.data.writing import SCHEMA_VERSION, DatasetWriter, save_dataset
from manydg.errors import DataError, StorageError

__all__ = [
    "DatasetWriter",
    "disk_error",
    "open_dataset",
    "read_description",
    "remove_leftovers",
    "save_dataset",
    "write_atomically",
]

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
        clear_remains(path)
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
