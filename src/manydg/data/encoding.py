"""Columns, patient ids and labels of any kind in the types that a dataset stores, with every mistake named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged
from manydg.data.info import KINDS, TargetSpec
from manydg.errors import DataError

ArrayLike = npt.NDArray[Any] | Tensor
_LARGEST_EXACT = 2**53


def encode_column(name: str, column: ArrayLike | Ragged, *, missing: bool) -> Column:
    """Check one input column and store it as float32 or int64."""
    if isinstance(column, Ragged):
        return Ragged(encode_column(name, column.values, missing=missing), column.offsets)
    if np.ndim(column) == 0:
        raise DataError(f"input '{name}' is a single number; it needs one row per sample")
    array = (
        column
        if isinstance(column, Tensor)
        else torch.from_numpy(np.ascontiguousarray(as_stored(name, np.asarray(column))))
    )
    if not array.is_floating_point():
        return array.to(torch.int64)
    array = array.to(torch.float32)
    bad = torch.isinf(array) if missing else ~torch.isfinite(array)
    if bool(bad.any()):
        where = torch.nonzero(bad)[0].tolist()
        remedy = "replace it" if missing else "replace it, or declare missing values (missing=True, --missing keep)"
        raise DataError(
            f"input '{name}' holds {int(bad.sum())} values that are not finite, the first in row {where[0]}"
            + (f", position {where[1:]}" if len(where) > 1 else "")
            + f": {remedy}"
        )
    return array


def as_stored(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers of any type as they are stored: measurements as float32, codes as int64."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"input '{name}' has type {array.dtype}; inputs are numbers: encode text as codes first")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def encode_patients(patients: ArrayLike | Sequence[Any]) -> tuple[Tensor, npt.NDArray[np.str_]]:
    """Integer codes and names, in the sorted order of the ids as given: ids of text are compared as text."""
    ids = np.asarray(patients)
    if ids.ndim != 1:
        raise DataError(f"patient ids must be one-dimensional, one per sample; they have shape {ids.shape}")
    if ids.dtype.kind == "O" and any(value is None or value != value for value in ids):
        raise DataError("some patient ids are missing; every sample must say whose it is")
    if ids.dtype.kind == "f":
        if not np.isfinite(ids).all():
            raise DataError("some patient ids are missing (NaN); every sample must say whose it is")
        if (np.abs(ids) >= _LARGEST_EXACT).any():
            raise DataError(
                "some patient ids are numbers that a float cannot tell from their neighbours: give ids as text"
            )
        if (ids == np.round(ids)).all():
            ids = ids.astype(np.int64)
    names, codes = np.unique(ids.astype(str) if ids.dtype.kind == "O" else ids, return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64)), names.astype(str)


def encode_targets(
    targets: ArrayLike | Sequence[Any], kind: str | None, names: Sequence[str] | None
) -> tuple[Tensor, TargetSpec]:
    """Integer or indicator targets and what they mean."""
    values = np.asarray(targets)
    if kind is not None and kind not in KINDS:
        raise DataError(f"unknown target kind '{kind}'; known: {', '.join(KINDS)}")
    if values.dtype.kind not in "fiubOUS":
        raise DataError(f"targets have type {values.dtype}; classes are whole numbers or names")
    if len(values) == 0:
        raise DataError("there is not a single target: no samples were given")
    if values.dtype.kind == "O" and any(value is None or value != value for value in values.ravel()):
        raise DataError("some targets are missing: leave those rows out")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{int((~np.isfinite(values)).sum())} targets are missing or not finite: leave those rows out")
    if values.ndim == 2:
        return _encode_matrix(values, kind, names)
    if values.ndim != 1:
        raise DataError(f"targets must be (rows,) or (rows, K); they have shape {values.shape}")
    if kind in ("votes", "multilabel"):
        raise DataError(f"'{kind}' targets are a matrix (rows, K); these are one-dimensional")
    return _encode_labels(values, kind, names)


def _encode_matrix(
    values: npt.NDArray[Any], kind: str | None, names: Sequence[str] | None
) -> tuple[Tensor, TargetSpec]:
    if kind in ("classes", "binary"):
        raise DataError(f"'{kind}' targets are one-dimensional; these have shape {values.shape}")
    if values.dtype.kind not in "fiub":
        raise DataError(f"a matrix of targets holds votes or 0 and 1; this one has type {values.dtype}")
    indicator = bool(np.isin(values, (0, 1)).all())
    chosen = kind or ("multilabel" if indicator else "votes")
    if chosen == "multilabel" and not indicator:
        raise DataError("multi-label targets hold only 0 and 1")
    if chosen == "votes" and (values < 0).any():
        raise DataError(f"votes cannot be negative; row {int(np.nonzero((values < 0).any(axis=1))[0][0])} is")
    if chosen == "votes" and (values.sum(axis=1) == 0).any():
        raise DataError(f"row {int(np.nonzero(values.sum(axis=1) == 0)[0][0])} has no votes at all: leave it out")
    labels = tuple(names) if names is not None else tuple(str(k) for k in range(values.shape[1]))
    if len(labels) != values.shape[1]:
        raise DataError(f"{len(labels)} class names for {values.shape[1]} target columns")
    return torch.from_numpy(values.astype(np.float32)), TargetSpec(chosen, labels)


def _encode_labels(
    values: npt.NDArray[Any], kind: str | None, names: Sequence[str] | None
) -> tuple[Tensor, TargetSpec]:
    if values.dtype.kind == "f" and (values == np.round(values)).all():
        values = values.astype(np.int64)
    if values.dtype.kind == "f":
        raise DataError("targets are fractions; classes are whole numbers or names (regression is not supported)")
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    labels, codes = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
    if names is not None:
        return _codes_given_names(values, tuple(names), kind or ("binary" if len(names) == 2 else "classes"))
    if len(labels) < 2:
        raise DataError(f"all {len(values)} targets are the same class ('{labels[0]}'): there is nothing to learn")
    reads_as_flag = labels.dtype.kind in "iu" and labels.tolist() == [0, 1]
    chosen = kind or ("binary" if reads_as_flag else "classes")
    if chosen == "binary" and len(labels) != 2:
        raise DataError(f"a binary target has two values; these have {len(labels)}: {labels[:8].tolist()}")
    return torch.from_numpy(codes.astype(np.int64)), TargetSpec(chosen, tuple(str(label) for label in labels))


def _codes_given_names(values: npt.NDArray[Any], names: tuple[str, ...], kind: str) -> tuple[Tensor, TargetSpec]:
    if values.dtype.kind in "iu":
        out_of_range = np.nonzero((values < 0) | (values >= len(names)))[0]
        if len(out_of_range):
            row = int(out_of_range[0])
            raise DataError(
                f"target {values[row]} in row {row} is outside 0 to {len(names) - 1} ({len(names)} classes)"
            )
        return torch.from_numpy(values.astype(np.int64)), TargetSpec(kind, names)
    code_of = {name: code for code, name in enumerate(names)}
    unknown = sorted(set(values.astype(str).tolist()) - set(names))
    if unknown:
        raise DataError(f"targets {unknown[:5]} are not among the class names {list(names)}")
    codes = np.fromiter((code_of[cast("str", value)] for value in values.astype(str)), np.int64, len(values))
    return torch.from_numpy(codes), TargetSpec(kind, names)
