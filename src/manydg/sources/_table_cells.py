"""Columns of a table as arrays; what does not fit is named by file, column and row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import DataError


def feature_values(frame: pl.DataFrame, names: Sequence[str], path: Path) -> npt.NDArray[np.float32]:
    """``(rows, features)``, empty values as NaN."""
    values = np.empty((frame.height, len(names)), dtype=np.float32)
    for number, name in enumerate(names):
        column = frame[name]
        if not (column.dtype.is_numeric() or column.dtype == pl.Boolean or column.dtype == pl.Null):
            raise DataError(_not_a_number(column, path))
        with np.errstate(over="ignore"):
            values[:, number] = column.cast(pl.Float64).fill_null(np.nan).to_numpy().astype(np.float32)
    return values


def _not_a_number(column: pl.Series, path: Path) -> str:
    where = f"{path}: feature '{column.name}'"
    if column.dtype != pl.String:
        return f"{where} has type {column.dtype}; features are numbers: make it one, or leave the column out"
    text = column.is_not_null() & column.cast(pl.Float64, strict=False).is_null()
    row = int(text.arg_true()[0]) if text.any() else 0
    return (
        f"{where} holds text in {int(text.sum())} rows, the first '{column[row]}' in row {row} (the first row is 0): "
        "encode it as numbers, or leave the column out"
    )


def _without_gaps(frame: pl.DataFrame, name: str, role: str, path: Path) -> pl.Series:
    column = frame[name]
    empty = column.is_null() | (column.is_nan() if column.dtype.is_float() else False)
    if empty.any():
        raise DataError(
            f"{path}: {role} column '{name}' is empty in {int(empty.sum())} rows, the first is row "
            f"{int(empty.arg_true()[0])} (the first row is 0): fill them in or leave those rows out"
        )
    return column


def numbers_or_text(frame: pl.DataFrame, name: str, role: str, path: Path) -> npt.NDArray[Any]:
    """A column without gaps, ``(rows,)``."""
    column = _without_gaps(frame, name, role, path)
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return column.to_numpy()
    if column.dtype.is_temporal() or column.dtype.is_nested():
        raise DataError(f"{path}: {role} column '{name}' has type {column.dtype}; it must hold whole numbers or names")
    return np.array(column.cast(pl.String).to_list(), dtype=np.str_)


def labels_of(frame: pl.DataFrame, targets: Sequence[str], path: Path) -> npt.NDArray[Any]:
    """One target column as it is, ``(rows,)``; several as numbers, ``(rows, K)``."""
    columns = [numbers_or_text(frame, name, "target", path) for name in targets]
    if len(columns) == 1:
        return columns[0]
    for name, column in zip(targets, columns, strict=True):
        if column.dtype.kind not in "fiub":
            raise DataError(f"{path}: target column '{name}' is text; several target columns hold votes or 0 and 1")
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def sessions_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[Any]:
    """Numbers and names as they are; dates in seconds."""
    if frame[name].dtype.is_temporal():
        return times_of(frame, name, path)
    return numbers_or_text(frame, name, "session", path)


def times_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[np.float64]:
    """Numbers as they are; dates and durations in seconds."""
    column = _without_gaps(frame, name, "time", path)
    if column.dtype == pl.Duration:
        return (column.dt.total_microseconds() / 1e6).to_numpy().astype(np.float64)
    if column.dtype.is_temporal() and column.dtype != pl.Time:
        return (column.cast(pl.Datetime("us")).dt.epoch("us") / 1e6).to_numpy().astype(np.float64)
    if not column.dtype.is_numeric():
        raise DataError(
            f"{path}: time column '{name}' has type {column.dtype}; it must be a number, a date or a duration"
        )
    return column.to_numpy().astype(np.float64)
