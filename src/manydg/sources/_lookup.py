"""Fast look-ups from the texts and ids of raw tables to numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

Array = npt.NDArray[Any]
_TABLE_LIMIT = 1 << 27


class CategoryMap:
    """Looks up what each category of a column is converted to, converting every category once.

    Parameters
    ----------
    convert : callable
        From a Series of different texts to an array of the same length.
    dtype : numpy type
        Of the result.
    """

    def __init__(self, convert: Callable[[pl.Series], Array], dtype: npt.DTypeLike) -> None:
        self._convert = convert
        self._known = np.zeros(0, bool)
        self._values = np.zeros(0, dtype)
        self._anchor: pl.Series | None = None

    def __call__(self, column: pl.Series) -> Array:
        """Convert a categorical column without nulls, ``(rows,)``; every column must have the same categories."""
        if self._anchor is None:
            # polars forgets a numbering, and begins another, once no column with it is alive.
            self._anchor = column.clear()
        codes = column.to_physical().to_numpy()
        if not len(codes):
            return self._values[:0]
        top = int(codes.max()) + 1
        if top > len(self._known):
            size = max(top, 2 * len(self._known))
            self._known = np.append(self._known, np.zeros(size - len(self._known), bool))
            self._values = np.append(self._values, np.zeros(size - len(self._values), self._values.dtype))
        new = ~self._known[codes]
        if new.any():
            words = column.filter(pl.Series(new)).unique()
            at = words.to_physical().to_numpy()
            self._values[at] = self._convert(words.cast(pl.String))
            self._known[at] = True
        values: Array = self._values[codes]
        return values


class SampleIndex:
    """Finds the sample of an id: by a table where ids are small numbers, else by bisection."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]
        self._table: npt.NDArray[np.int32] | None = None
        if len(ids) and self._sorted[0] >= 0 and self._sorted[-1] < _TABLE_LIMIT:
            self._table = np.full(int(self._sorted[-1]) + 2, -1, np.int32)
            self._table[ids] = np.arange(len(ids), dtype=np.int32)

    def __call__(self, ids: npt.NDArray[np.int64]) -> Array:
        """The number of each id's sample, -1 for an id that is not known."""
        if self._table is not None:
            last = len(self._table) - 1
            entry: Array = self._table[np.where((ids >= 0) & (ids < last), ids, last)]
            return entry
        at = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        position: Array = np.where(self._sorted[at] == ids, self._order[at], -1)
        return position
