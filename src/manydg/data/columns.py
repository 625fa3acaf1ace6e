"""Columns of a dataset, a dense tensor or ragged rows of any length, and how arrays and tables become them.

A dense column is a plain tensor ``(rows, ...)``. A ragged column keeps the items of all its rows in one flat tensor and
the offset at which each row begins; its items may be ragged themselves (a stay of events, each a set of codes).
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Union, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.info import KINDS, TargetSpec
from manydg.data.timeline import ids_in, is_missing
from manydg.errors import DataError
from manydg.files import Json, ParsedJson
from manydg.registry import LazyModule

if TYPE_CHECKING:
    import polars as pl
else:
    # Arrays and prepared datasets need no tables.
    pl = LazyModule("polars")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths over one flat tensor.

    Parameters
    ----------
    values : Tensor or Ragged
        All items of all rows, one after the other: ``(items, ...)``.
    offsets : Tensor
        ``(rows + 1,)`` int64; row ``i`` holds items ``offsets[i]`` to ``offsets[i + 1]``.
    longest : int, optional
        Set by :meth:`take_padded` alone: an upper bound on the length of a row that is known without asking the device.
        Items of ``values`` after the last row are then padding.

    Examples
    --------
    >>> column = Ragged.from_rows([[3, 1], [], [2]])
    >>> column.take(torch.tensor([2, 0])).to_rows()
    [[2], [3, 1]]
    """

    values: Column
    offsets: Tensor
    longest: int | None = None

    @staticmethod
    def from_rows(rows: Sequence[Sequence[object]], dtype: torch.dtype = torch.int64) -> Ragged:
        """Build from Python lists, nested once or twice; for tests and small data."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        items = [item for row in rows for item in row]
        nested = any(isinstance(item, list | tuple) for item in items)
        inner = Ragged.from_rows(cast("list[list[object]]", items), dtype) if nested else None
        return Ragged(torch.tensor(items, dtype=dtype) if inner is None else inner, offsets_from_lengths(lengths))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """Number of items in each row, ``(rows,)``."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.offsets.device

    def take(self, indices: Tensor) -> Ragged:
        """Gather rows, in the order given, with no Python loop over rows or items."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        offsets = offsets_from_lengths(lengths)
        total = int(offsets[-1])
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
        positions = torch.arange(total, device=shift.device) + shift
        return Ragged(take(self.values, positions), offsets)

    def take_padded(self, indices: Tensor, capacity: Capacity) -> list[Ragged]:
        """Gather the rows of several batches into tensors of a fixed size, without asking the device how many items the
        rows have.

        The column of a batch has ``capacity.items`` items. Those after the last row are padding, taken from arbitrary
        rows; there must be at least one. The padding codes of a nested column are spread evenly over the padding
        items, since pooling one item of thousands of codes would keep a GPU waiting.

        Parameters
        ----------
        indices : Tensor ``(batches, rows)``
        capacity : Capacity
            Enough for the rows of each batch.
        """
        batches, rows = indices.shape
        starts = self.offsets[indices]
        offsets = offsets_from_lengths(self.offsets[indices + 1] - starts)
        slots = torch.arange(capacity.items, device=indices.device)
        row = torch.searchsorted(offsets[:, 1:].contiguous(), slots.repeat(batches, 1), right=True)
        used = row < rows
        shifted = slots + (starts - offsets[:, :-1]).gather(1, row.clamp_max(rows - 1))
        positions = torch.where(used, shifted, slots % len(self.values))
        if not isinstance(self.values, Ragged):
            items = self.values[positions]
            return [Ragged(items[batch], offsets[batch], capacity.longest) for batch in range(batches)]
        codes, bounds = self.values._take_codes(positions, used, capacity)
        padding, padding_codes = capacity.items - offsets[:, -1:], codes.shape[1] - bounds[:, -1:]
        bounds[:, 1:] += (slots + 1 - offsets[:, -1:]).clamp_min(0) * padding_codes // padding
        inner = [Ragged(codes[batch], bounds[batch]) for batch in range(batches)]
        return [Ragged(inner[batch], offsets[batch], capacity.longest) for batch in range(batches)]

    def _take_codes(self, positions: Tensor, used: Tensor, capacity: Capacity) -> tuple[Tensor, Tensor]:
        """The codes of the items at ``positions``, padded to ``capacity.inner``, and the items' bounds in them."""
        assert capacity.inner is not None
        starts = self.offsets[positions]
        bounds = offsets_from_lengths(torch.where(used, self.offsets[positions + 1] - starts, 0))
        slots = torch.arange(capacity.inner, device=positions.device)
        item = torch.searchsorted(bounds[:, 1:].contiguous(), slots.repeat(len(positions), 1), right=True)
        item = item.clamp_max(capacity.items - 1)
        source = slots + (starts - bounds[:, :-1]).gather(1, item)
        assert isinstance(self.values, Tensor)
        codes = self.values[torch.where(item < capacity.items - 1, source, slots % max(1, len(self.values)))]
        return codes, bounds

    def to(self, device: torch.device | str) -> Ragged:
        """The same rows on a device."""
        return Ragged(self.values.to(device), self.offsets.to(device), self.longest)

    def row_of_item(self) -> Tensor:
        """The row each item belongs to, ``(items,)``."""
        rows = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.values))

    def position_of_item(self) -> Tensor:
        """The index of each item within its row, counted from 0, ``(items,)``."""
        return torch.arange(len(self.values), device=self.device) - self.offsets[:-1][self.row_of_item()]

    def pad(self, values: Tensor | None = None, fill: float = 0.0) -> tuple[Tensor, Tensor]:
        """Pad rows to the length of the longest, on the right.

        Parameters
        ----------
        values : Tensor, optional
            Items to pad instead of this column's own, ``(items, ...)``: for instance their embeddings.

        Returns
        -------
        padded : Tensor ``(rows, longest, ...)``
        present : bool Tensor ``(rows, longest)``
        """
        items = self.values if values is None else values
        if not isinstance(items, Tensor):
            raise DataError("a nested ragged column cannot be padded directly: pool or embed its inner items first")
        longest = int(self.lengths.max()) if len(self) else 0
        present = torch.arange(longest, device=self.device) < self.lengths[:, None]
        padded = items.new_full((len(self), longest, *items.shape[1:]), fill)
        return padded.masked_scatter(present.reshape(present.shape + (1,) * (items.ndim - 1)), items), present

    def to_rows(self) -> list[object]:
        """Back to Python lists; for tests, messages and small data."""
        flat = self.values.to_rows() if isinstance(self.values, Ragged) else self.values.tolist()
        bounds = self.offsets.tolist()
        return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Capacity:
    """The fixed size of a ragged column in a batch of fixed shape.

    - ``longest``: At least the number of items of the longest row.
    - ``items``: More than the number of items of all rows.
    - ``inner``: Of a nested column: at least the number of inner items of all rows, and 1.
    """

    longest: int
    items: int
    inner: int | None = None


Column = Union[Tensor, Ragged]  # noqa: UP007 - evaluated at run time, where Ragged | Tensor is a forward reference


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Row boundaries from row lengths: ``(..., rows)`` to ``(..., rows + 1)``."""
    offsets = torch.zeros(*lengths.shape[:-1], lengths.shape[-1] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, dim=-1, out=offsets[..., 1:])
    return offsets


def take(column: Column, indices: Tensor) -> Column:
    """Gather rows of a dense or ragged column."""
    if isinstance(column, Ragged):
        return column.take(indices)
    if column.ndim == 4 and not column.is_contiguous():
        # Channels last: gather rows in their memory order.
        return take_dense(column.permute(0, 2, 3, 1), indices).permute(0, 3, 1, 2)
    return take_dense(column, indices)


def take_dense(column: Tensor, indices: Tensor) -> Tensor:
    """Gather rows of a tensor."""
    return torch.index_select(column, 0, indices) if column.device.type == "cpu" else column[indices]


def unnest(column: Column) -> tuple[list[Tensor], Tensor]:
    """The offsets of each ragged level, outermost first (none for a dense column), and the items under them.

    Examples
    --------
    >>> levels, items = unnest(Ragged.from_rows([[[1, 2], [3]], [[4]]]))
    >>> [offsets.tolist() for offsets in levels], items.tolist()
    ([[0, 2, 3], [0, 2, 3, 4]], [1, 2, 3, 4])
    """
    levels: list[Tensor] = []
    while isinstance(column, Ragged):
        levels.append(column.offsets)
        column = column.values
    return levels, column


def nest(levels: Sequence[Tensor], items: Tensor) -> Column:
    """The column that :func:`unnest` takes apart."""
    column: Column = items
    for offsets in reversed(levels):
        column = Ragged(column, offsets)
    return column


def tensors_of(column: Column) -> list[Tensor]:
    """Every tensor a column consists of: the offsets of its levels, then its items."""
    levels, items = unnest(column)
    return [*levels, items]


def check_column(name: str, column: Column) -> None:
    """Raise if a ragged column's offsets do not describe its values."""
    if not isinstance(column, Ragged):
        return
    offsets = column.offsets
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or len(offsets) == 0:
        raise DataError(f"column '{name}': offsets must be a one-dimensional int64 tensor of rows + 1 entries")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(column.values) or bool((column.lengths < 0).any()):
        raise DataError(
            f"column '{name}': offsets must rise from 0 to the number of items ({len(column.values)}); "
            f"they run from {int(offsets[0])} to {int(offsets[-1])}"
        )
    check_column(name, column.values)


PositionName = Callable[[tuple[int, ...]], str]
"""What messages call a position within a sample."""


def check_finite(piece: npt.NDArray[np.float32], start: int, missing: str, position_name: PositionName) -> None:
    """Raise if a value of some samples is infinite or, unless missing values are kept, missing.

    - ``piece`` ``(rows, ...)``
    - ``start``: The number of the first of these rows.
    - ``missing`` {"refuse", "keep"}
    - ``position_name``: What messages call a position within a sample.
    """
    bad = np.isinf(piece) if missing == "keep" else ~np.isfinite(piece)
    if not bad.any():
        return
    first = tuple(map(int, np.argwhere(bad)[0]))
    value = float(piece[first])
    what = "missing" if math.isnan(value) else "infinite, or too large for float32"
    remedy = "replace it" if missing == "keep" or not math.isnan(value) else "fill it in, or keep it (--missing keep)"
    others = int(bad.sum()) - 1
    more = f", and so are {others} values in the rows after it" if others else ""
    raise DataError(
        f"{position_name(first[1:])} in row {start + first[0]} (the first row is 0) is {what}{more}: {remedy}"
    )


# Columns, patient ids and labels of any kind in the types that a dataset stores, with every mistake named


ArrayLike = npt.NDArray[Any] | Tensor
Frame = Any
"""A DataFrame of polars or pandas; pandas need not be there."""
_NO_AND_YES = {("no", "yes"), ("false", "true"), ("n", "y"), ("absent", "present"), ("negative", "positive")}
"""Pairs of names that are a negative and a positive class, which is also their order by the alphabet."""


def encode_column(name: str, column: ArrayLike | Ragged, *, missing: bool) -> Column:
    """Check one input column and store it as float32 or int64."""
    if isinstance(column, Ragged):
        return Ragged(encode_column(name, column.values, missing=missing), column.offsets)
    _refuse_type(name, column)
    if np.ndim(column) == 0:
        raise DataError(f"input '{name}' is a single number; it needs one row per sample")
    if 0 in np.shape(column)[1:]:
        raise DataError(f"input '{name}' has shape {tuple(np.shape(column))}: there is nothing in it to predict from")
    if isinstance(column, Tensor):
        array = column
    else:
        stored = np.ascontiguousarray(as_stored(name, np.asarray(column)))
        with warnings.catch_warnings():
            # Nothing writes into a dataset, and a copy would read a whole memory map into memory.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            array = torch.from_numpy(stored)
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


def _refuse_type(name: str, column: Any) -> None:
    """Raise for what is no array but often given as one."""
    if column is None or isinstance(column, str | bytes | os.PathLike):
        what = "nothing" if column is None else "a path"
        raise DataError(
            f"input '{name}' is {what}; it must be an array, a tensor or a table with one row per sample: open dataset "
            "folders with manydg.open_dataset, and read files first"
        )
    if hasattr(column, "toarray"):
        raise DataError(f"input '{name}' is a sparse matrix: give its dense form, .toarray()")
    if isinstance(column, list | tuple) and len({np.shape(row) for row in column if not np.isscalar(row)}) > 1:
        raise DataError(f"the rows of input '{name}' differ in length: build it with manydg.Ragged.from_rows")


def signal_settings(shape: Sequence[int], rate: float, channels: Sequence[str] | None = None) -> dict[str, Json]:
    """Settings of signals ``(rows, channels, samples)`` in microvolts.

    - ``rate``: Samples a second.
    - ``channels``: Their names; numbered by default.
    """
    if len(shape) != 3:
        raise DataError(f"samples have shape {tuple(shape)}; signals are (rows, channels, samples)")
    if not rate > 0:
        raise DataError(f"a sampling rate is a number of hertz above 0; got {rate}")
    names = [f"channel {number + 1}" for number in range(shape[1])] if channels is None else [str(n) for n in channels]
    if len(names) != shape[1]:
        raise DataError(f"there are {len(names)} names of channels for {shape[1]} channels")
    return {"rate": float(rate), "channels": list(names), "unit": "uV"}


def as_stored(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers of any type as they are stored: measurements as float32, codes as int64."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"input '{name}' has type {array.dtype}; inputs are numbers: encode text as codes first")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def encode_patients(patients: ArrayLike | Sequence[Any]) -> tuple[Tensor, npt.NDArray[np.str_]]:
    """Integer codes and names, in the sorted order of the ids as given: ids of text are compared as text."""
    names, codes = distinct(ids_in(patients))
    _check_spelling(names, "patient ids")
    return torch.from_numpy(codes), names.astype(str)


def _check_spelling(names: npt.NDArray[Any], what: str) -> None:
    """Raise where different names are blank or the same but for the spaces around them."""
    if names.dtype.kind not in "OSU":
        return
    bare = np.char.strip(names.astype(str))
    if (bare == "").any():
        raise DataError(f"some {what} are blank: fill them in or leave those rows out")
    if alike := len(bare) - len(np.unique(bare)):
        raise DataError(f"{alike} {what} differ from another only in the spaces around them: remove the spaces")


_MANY_VALUES = 1 << 20


def distinct(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The different values in order, and the position of each value among them; objects are compared as text."""
    if values.dtype.kind in "iu" and values.dtype.isnative and len(values) > _MANY_VALUES:
        # Many rows and few different numbers: a hash table is several times as fast as sorting all of them.
        different = np.sort(pl.Series(values).unique().to_numpy())
        return different, np.searchsorted(different, values)
    different, codes = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
    return different, codes.astype(np.int64)


# 1000, 01000 and 1e3 are three people.
_PLAIN_NUMBER = r"^(?:0|[1-9][0-9]{0,17})$"


def ids_of(texts: pl.Series) -> pl.Series:
    """Ids as numbers, which are faster and sort by size, where each is the one way to write its number; else as text.

    Examples
    --------
    >>> ids_of(pl.Series(["1000", "7"])).to_list(), ids_of(pl.Series(["1000", "01000"])).to_list()
    ([1000, 7], ['1000', '01000'])
    """
    return texts.cast(pl.Int64) if texts.str.contains(_PLAIN_NUMBER).all() else texts


def as_ids_of(column: pl.Expr, known: pl.Series) -> pl.Expr:
    """A column of texts in the type of ids that :func:`ids_of` gave; -1 for what cannot be one of those numbers."""
    if known.dtype == pl.String:
        return column
    number = pl.when(column.str.contains(_PLAIN_NUMBER)).then(column.cast(pl.Int64, strict=False))
    return number.when(column.is_not_null()).then(-1)


def sites_of_patients(patients: ArrayLike | Sequence[Any], sites: ArrayLike | Sequence[Any]) -> dict[str, str]:
    """The site of each patient, by name: the one that most of the patient's samples are of, the first of several.

    Examples
    --------
    >>> sites_of_patients(["ann", "ann", "ann", "bob"], ["A", "B", "B", "A"])
    {'ann': 'B', 'bob': 'A'}
    """
    codes, names = encode_patients(patients)
    site_names, site_codes = np.unique(np.asarray(sites).astype(str), return_inverse=True)
    pairs, counts = np.unique(np.stack([codes.numpy(), site_codes]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    first = order[np.unique(pairs[0][order], return_index=True)[1]]
    return dict(zip(names.tolist(), site_names[pairs[1][first]].tolist(), strict=True))


def encode_targets(
    targets: ArrayLike | Sequence[Any], kind: str | None, names: Sequence[str] | None
) -> tuple[Tensor, TargetSpec]:
    """Integer or indicator targets, or measured values, and what they mean."""
    try:
        values = np.asarray(targets)
    except ValueError:
        raise DataError("targets have rows of different lengths: give one label each, or 0 and 1 for all") from None
    if kind is not None and kind not in KINDS:
        raise DataError(f"unknown target kind '{kind}'; known: {', '.join(KINDS)}")
    if values.dtype.kind not in "fiubOUS":
        raise DataError(f"targets have type {values.dtype}; classes are whole numbers or names")
    if values.ndim == 0:
        raise DataError(f"targets are one label for each sample; got {targets!r}")
    if len(values) == 0:
        raise DataError("there is not a single target: no samples were given")
    if values.dtype.kind == "O" and any(map(is_missing, values.ravel())):
        raise DataError("some targets are missing: leave those rows out")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{int((~np.isfinite(values)).sum())} targets are missing or not finite: leave those rows out")
    if kind == "regression":
        return _encode_values(values, names)
    if values.ndim == 2:
        return _encode_matrix(values, kind, names)
    if values.ndim != 1:
        raise DataError(f"targets must be (rows,) or (rows, K); they have shape {values.shape}")
    if kind in ("votes", "multilabel"):
        raise DataError(f"'{kind}' targets are a matrix (rows, K); these are one-dimensional")
    return _encode_labels(values, kind, names)


def _encode_values(values: npt.NDArray[Any], names: Sequence[str] | None) -> tuple[Tensor, TargetSpec]:
    if values.ndim != 1:
        raise DataError(f"'regression' targets are one-dimensional; these have shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise DataError(f"'regression' targets are numbers; these have type {values.dtype}")
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError("some targets are too large for float32: give them in a larger unit")
    if (numbers == numbers[0]).all():
        raise DataError(f"all {len(values)} targets are {numbers[0]:g}: there is nothing to learn")
    return torch.from_numpy(numbers), TargetSpec("regression", tuple(names) if names else ("value",))


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
        raise DataError(
            "targets are fractions, and classes are whole numbers or names: to predict the number itself, say "
            "--kind regression (in Python kind='regression')"
        )
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    labels, codes = distinct(values)
    _check_spelling(labels, "classes")
    if names is not None:
        return _codes_given_names(values, tuple(names), kind or ("binary" if len(names) == 2 else "classes"))
    if len(labels) < 2:
        raise DataError(f"all {len(values)} targets are the same class ('{labels[0]}'): there is nothing to learn")
    plain = tuple(sorted(str(label).strip().lower() for label in labels))
    reads_as_flag = labels.tolist() == [0, 1] if labels.dtype.kind in "iu" else plain in _NO_AND_YES
    if reads_as_flag and labels.dtype.kind not in "iu" and labels[0].lower() > labels[1].lower():
        labels, codes = labels[::-1], 1 - codes
    chosen = kind or ("binary" if reads_as_flag else "classes")
    if chosen == "binary" and len(labels) != 2:
        raise DataError(f"a binary target has two values; these have {len(labels)}: {labels[:8].tolist()}")
    return torch.from_numpy(codes), TargetSpec(chosen, tuple(str(label) for label in labels))


def _codes_given_names(values: npt.NDArray[Any], names: tuple[str, ...], kind: str) -> tuple[Tensor, TargetSpec]:
    if values.dtype.kind in "iu":
        outside = np.flatnonzero((values < 0) | (values >= len(names)))
        if len(outside):
            which = f"target {values[outside[0]]} in row {outside[0]}"
            raise DataError(f"{which} is outside 0 to {len(names) - 1} ({len(names)} classes)")
        return torch.from_numpy(values.astype(np.int64)), TargetSpec(kind, names)
    code_of, texts = {name: code for code, name in enumerate(names)}, values.astype(str).tolist()
    if unknown := sorted(set(texts) - set(names)):
        raise DataError(f"targets {unknown[:5]} are not among the class names {list(names)}")
    return torch.tensor([code_of[text] for text in texts], dtype=torch.int64), TargetSpec(kind, names)


# Frames of mixed columns: numbers, dates, times, durations and categories as numbers and codes

CATEGORIES = "categories"
"""The column of category codes, ``(rows, categorical features)`` int64, and the setting with the levels by feature."""
UNSEEN, EMPTY = "(unseen)", "(missing)"
"""The first two levels of every categorical feature: what no two training patients have, and an empty cell."""
_PIECE = 16_384
_DAY, _HOUR = 86400.0, 3600.0
_EPOCH = 946684800.0
"""Midnight of 1 January 2000, in seconds since 1970."""
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d")
_CLOCKS = ("", " %H:%M:%S%.f", "T%H:%M:%S%.f", " %H:%M", "T%H:%M")
_LENGTH = r"^(?:(\d+) days?,? ?)?(\d+):(\d\d)(?::(\d\d(?:\.\d+)?))?$"
_TRUTHS = {"true": 1.0, "false": 0.0}
_WHOLE = r"^(-?\d+)\.0+$"


@dataclass(frozen=True)
class Feature:
    """A number that is read off a column of a frame.

    - ``name``: What messages and models call it: the column's name, or that and what is read off it.
    - ``kind`` {"number", "measured", "hours", "days", "age", "hour"}: The number itself; a number among which are
      limits and ranges as text (:func:`parse_numbers`); a time of day or a duration in hours; a date in days since
      2000; a date in days before the time of the sample; the hour of the day.
    - ``form``: How a date is written where it is text.
    - ``until``: The column of the sample's time, for ``age``.
    - ``until_form``: How that is written where it is text.
    """

    name: str
    column: str
    kind: str = "number"
    form: str | None = None
    until: str | None = None
    until_form: str | None = None

    def values(self, frame: pl.DataFrame) -> npt.NDArray[np.float64]:
        """``(rows,)``, NaN where the cell is empty."""
        column = frame[self.column]
        if self.kind == "number":
            return _plain_numbers(column)
        if self.kind == "measured":
            return parse_numbers(column.cast(pl.String)).fill_null(np.nan).to_numpy()
        if self.kind == "hours":
            return _seconds(column, None) / _HOUR
        seconds = _seconds(column, self.form)
        if self.kind == "hour":
            return seconds % _DAY / _HOUR
        if self.until is None:
            return (seconds - _EPOCH) / _DAY
        return (_seconds(frame[self.until], self.until_form) - seconds) / _DAY

    def gaps(self, frame: pl.DataFrame) -> int:
        """How many of the :meth:`values` are NaN."""
        column = frame[self.column]
        if self.kind != "number" or column.dtype == pl.String:
            return int(np.isnan(self.values(frame)).sum())
        return column.null_count() + (int(column.is_nan().sum()) if column.dtype.is_float() else 0)


@dataclass(frozen=True)
class FrameEncoding:
    """How the columns of a frame become the input columns ``x`` and ``categories``.

    - ``features``: The positions of ``x``.
    - ``levels``: Levels of each categorical column, in code order; the first two are :data:`UNSEEN` and :data:`EMPTY`.
    """

    features: tuple[Feature, ...]
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(settings: ParsedJson) -> FrameEncoding:
        """The encoding that a dataset was made with, from its settings."""
        derived: ParsedJson = settings.get("derived", {})
        features = tuple(Feature(name, **derived.get(name, {"column": name})) for name in settings["features"])
        return FrameEncoding(features, {name: tuple(levels) for name, levels in settings.get(CATEGORIES, {}).items()})

    def settings(self) -> dict[str, Json]:
        """JSON values for the dataset's settings; of plain numbers only the names."""
        derived: dict[str, Json] = {
            feature.name: {name: value for name, value in asdict(feature).items() if name != "name" and value}
            for feature in self.features
            if feature.kind != "number"
        }
        known: dict[str, Json] = {"features": [feature.name for feature in self.features]}
        known |= {"derived": derived} if derived else {}
        levels: dict[str, Json] = {name: list(levels) for name, levels in self.levels.items()}
        return known | ({CATEGORIES: levels} if levels else {})

    def columns(self) -> list[str]:
        """Every column that is read, once."""
        read = [name for feature in self.features for name in (feature.column, feature.until) if name is not None]
        return list(dict.fromkeys([*read, *self.levels]))

    def numbers(self, frame: pl.DataFrame) -> npt.NDArray[np.float32]:
        """``(rows, features)``, NaN where a cell is empty."""
        values = np.empty((frame.height, len(self.features)), dtype=np.float32)
        plain = {
            number: pl.col(feature.column).cast(pl.Float64).cast(pl.Float32).fill_null(np.nan).alias(str(number))
            for number, feature in enumerate(self.features)
            if feature.kind == "number" and frame.schema[feature.column].is_numeric()
        }
        # Plain numbers at once, in polars' own threads, and in pieces that the processor's cache holds.
        for start in range(0, frame.height if plain else 0, _PIECE):
            piece = frame.slice(start, _PIECE).select(plain.values())
            values[start : start + _PIECE, list(plain)] = piece.to_numpy(order="c")
        for number, feature in enumerate(self.features):
            if number not in plain:
                with np.errstate(over="ignore"):
                    values[:, number] = feature.values(frame).astype(np.float32)
        return values

    def codes(self, frame: pl.DataFrame) -> npt.NDArray[np.int64] | None:
        """``(rows, categorical features)``; ``None`` where there are none."""
        if not self.levels:
            return None
        return np.stack([_codes(frame[name], levels) for name, levels in self.levels.items()], axis=1)


def inputs_of(frame: pl.DataFrame, encoding: FrameEncoding) -> dict[str, Column]:
    """The input columns of a frame."""
    columns: dict[str, Column] = {"x": torch.from_numpy(encoding.numbers(frame))} if encoding.features else {}
    codes = encoding.codes(frame)
    return columns if codes is None else columns | {CATEGORIES: torch.from_numpy(codes)}


def plan_encoding(
    frame: pl.DataFrame,
    names: Sequence[str],
    patients: npt.NDArray[Any],
    *,
    categorical: Collection[str] = (),
    measured: Collection[str] = (),
    time: str | None = None,
    optional: Collection[str] = (),
) -> tuple[FrameEncoding, list[str]]:
    """Decide how each column is read, from its type and its values.

    - ``names``: The columns of features.
    - ``patients`` ``(rows,)``
    - ``categorical``: Columns of categories, whatever they look like; text that is neither dates nor durations is one
      by itself.
    - ``measured``: Columns of numbers among which are limits and ranges as text: ``<5`` counts as 5, other text as
      missing.
    - ``time``: The column of the samples' times; where it holds dates, a feature that is a date becomes an age at that
      time.
    - ``optional``: Columns that may be left out: text that hardly two patients share is an identifier or free text.
    """
    features: list[Feature] = []
    levels: dict[str, tuple[str, ...]] = {}
    left_out: list[str] = []
    for name in names:
        column = frame[name]
        if name in measured and column.dtype == pl.String:
            features.append(Feature(name, name, "measured"))
            continue
        read = None if name in categorical else _features_of(column, frame, time)
        if read is not None:
            features += read
            continue
        if column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object):
            raise DataError(f"feature '{name}' has type {column.dtype}; features are numbers, dates or categories")
        known = pl.DataFrame({"level": _category_texts(column), "who": patients}).drop_nulls("level")
        # What one patient alone has says who it is and nothing of others: it is not kept.
        people = known.group_by("level").agg(pl.col("who").n_unique())
        shared = people.filter(pl.col("who") > 1)["level"].sort().to_list()
        share = float(known["level"].is_in(shared).mean() or 0.0)  # type: ignore[arg-type]
        if name not in categorical and share < 0.5 and name in optional:
            left_out.append(name)
            continue
        levels[name] = (UNSEEN, EMPTY, *shared)
    return FrameEncoding(tuple(features), levels), left_out


def _features_of(column: pl.Series, frame: pl.DataFrame, time: str | None) -> list[Feature] | None:
    """The numbers that are read off a column; ``None`` where it holds categories."""
    name, kind = column.name, column.dtype
    # Each different text is looked at once, not each row.
    different = column.unique(maintain_order=True) if kind == pl.String else column
    if _is_number(different):
        return [Feature(name, name)]
    if kind in (pl.Duration, pl.Time) or (kind == pl.String and _is_length(different)):
        return [Feature(name, name, "hours")]
    form = date_format(different) if kind == pl.String else None
    if form is None and not kind.is_temporal():
        if kind == pl.String:
            _refuse_numbers_with_text(column)
        return None
    features = [Feature(f"{name} (days since 2000)", name, "days", form)]
    until = pl.Series() if time is None else frame[time]
    until_form = date_format(until) if until.dtype == pl.String else None
    if until_form is not None or until.dtype in (pl.Date, pl.Datetime):
        features = [Feature(f"{name} (days before {time})", name, "age", form, time, until_form)]
    if bool(np.nansum(_seconds(different, form) % _DAY)):
        features.append(Feature(f"{name} (hour of day)", name, "hour", form))
    return features


def seconds_of(column: pl.Series) -> npt.NDArray[np.float64] | None:
    """Dates (since 1970), times and durations in seconds, also where they are text; ``None`` for anything else."""
    if column.dtype.is_temporal() or (column.dtype == pl.String and _is_length(column)):
        return _seconds(column, None)
    form = date_format(column) if column.dtype == pl.String else None
    return None if form is None else _seconds(column, form)


def first_unreadable_time(column: pl.Series) -> int:
    """The first row of a column of text that is no time, or is written otherwise than the rows before it.

    Examples
    --------
    >>> first_unreadable_time(pl.Series(["2026-03-31", "2026-02-30", "2026-03-30"]))
    1
    """

    def unreadable(rows: int) -> bool:
        some = column[:rows]
        try:
            return seconds_of(some) is None and some.cast(pl.Float64, strict=False).has_nulls()
        except DataError:  # Day and month cannot be told apart yet.
            return False

    return bisect.bisect_left(range(1, len(column)), True, key=unreadable)


def date_format(column: pl.Series) -> str | None:
    """How the dates of a column of text are written; ``None`` where they are not dates."""
    texts = _stripped(column).drop_nulls()
    if texts.is_empty() or not re.match(r"^\d{1,4}[-/.]?\d{1,2}[-/.]?\d{1,4}", texts[0]):
        return None
    forms = [date + clock for date in _DATES for clock in _CLOCKS]
    # The first text rules out most of them.
    for some in (texts[:1], texts):
        forms = [form for form in forms if some.str.to_datetime(form, strict=False).is_not_null().all()]
    if len(forms) > 1:
        raise DataError(f"the dates in '{column.name}' can be read with the day or the month first: write 2026-03-31")
    return forms[0] if forms else None


def _is_length(column: pl.Series) -> bool:
    texts = _stripped(column).drop_nulls()
    return not texts.is_empty() and bool(texts[:1].str.contains(_LENGTH)[0]) and bool(texts.str.contains(_LENGTH).all())


def _seconds(column: pl.Series, form: str | None) -> npt.NDArray[np.float64]:
    """Dates since 1970, times of day and durations in seconds, ``(rows,)``, NaN where empty."""
    if column.dtype == pl.String and form is not None:
        parsed = _stripped(column).str.to_datetime(form, strict=False, time_unit="us")
        _refuse_others(column, parsed, "a date written as the model's training data have it")
        column = parsed
    elif column.dtype == pl.String:
        texts = _stripped(column)
        days, hours, minutes, seconds = (texts.str.extract(_LENGTH, group).cast(pl.Float64) for group in range(1, 5))
        total = days.fill_null(0) * _DAY + hours * _HOUR + minutes * 60 + seconds.fill_null(0)
        _refuse_others(column, total, "a time or a duration such as 36:15:00")
        return total.fill_null(np.nan).to_numpy()
    if column.dtype == pl.Duration:
        return (column.dt.total_microseconds() / 1e6).cast(pl.Float64).fill_null(np.nan).to_numpy()
    if column.dtype == pl.Time:
        return (column.cast(pl.Int64) / 1e9).fill_null(np.nan).to_numpy()
    if not column.dtype.is_temporal():
        raise DataError(f"'{column.name}' has type {column.dtype}; it must hold dates, times or durations")
    return (column.cast(pl.Datetime("us")).dt.epoch("us") / 1e6).cast(pl.Float64).fill_null(np.nan).to_numpy()


def _refuse_others(column: pl.Series, parsed: pl.Series, expected: str) -> None:
    bad = _stripped(column).is_not_null() & parsed.is_null()
    if bad.any():
        row = int(bad.arg_true()[0])
        raise DataError(f"'{column.name}' in row {row} (the first row is 0) is not {expected}")


def _stripped(column: pl.Series) -> pl.Series:
    """Text without spaces around it and a final Z, which says that a time is in UTC; null where nothing is left."""
    text = column.cast(pl.String).str.strip_chars().str.replace(r"^(\d.*\d)Z$", "$1")
    return text.set(text == "", None)


def _is_number(column: pl.Series) -> bool:
    kind = column.dtype
    if kind.is_numeric() or kind in (pl.Boolean, pl.Null):
        return True
    return kind == pl.String and _stripped(column).drop_nulls().str.to_lowercase().is_in(list(_TRUTHS)).all()


def _plain_numbers(column: pl.Series) -> npt.NDArray[np.float64]:
    if column.dtype == pl.String and _is_number(column):
        column = _stripped(column).str.to_lowercase().replace_strict(_TRUTHS, default=None, return_dtype=pl.Float64)
    if not _is_number(column):
        raise DataError(f"{_not_a_number(column)}: the model reads numbers there, so correct them or leave them empty")
    return column.cast(pl.Float64).fill_null(np.nan).to_numpy()


def _refuse_numbers_with_text(column: pl.Series) -> None:
    """Raise where most cells are numbers: the others are slips or limits, and no categories."""
    known = column.drop_nulls()
    numbers = int(known.cast(pl.Float64, strict=False).is_not_null().sum())
    limits = int(known.str.contains(r"^\s*[<>≤≥]=?\s*\.?\d").sum())
    if numbers and (numbers + limits) * 2 > len(known):
        raise DataError(
            f"{_not_a_number(column)}: read limits such as <5 as numbers (--measured '{column.name}'), leave the "
            "column out, or take each value as a category (--categorical)"
        )


def _not_a_number(column: pl.Series) -> str:
    where = f"feature '{column.name}'"
    if column.dtype != pl.String:
        return f"{where} has type {column.dtype}"
    text = column.is_not_null() & column.cast(pl.Float64, strict=False).is_null()
    row = int(text.arg_true()[0]) if text.any() else 0
    return f"{where} holds text in {int(text.sum())} rows, the first '{column[row]}' in row {row} (the first row is 0)"


def _category_texts(column: pl.Series) -> pl.Series:
    """Categories as text: 3, 3.0 and '3' are one; null where empty."""
    if column.dtype.is_nested():
        raise DataError(f"feature '{column.name}' has type {column.dtype}; categories are text or numbers: make it one")
    # Each different text is looked at once, not each row.
    different = column.unique()
    texts = _stripped(different).str.replace(_WHOLE, "$1")
    if len(different) * 2 >= len(column):
        return _stripped(column).str.replace(_WHOLE, "$1")
    if column.dtype == pl.String and (texts.eq_missing(different)).all():
        return column
    return column.replace_strict(different, texts, return_dtype=pl.String)


def _codes(column: pl.Series, levels: Sequence[str]) -> npt.NDArray[np.int64]:
    code_of = {UNSEEN: 0} | {level: code for code, level in enumerate(levels) if code > 1}
    texts = _category_texts(column)
    return texts.replace_strict(code_of, default=0, return_dtype=pl.Int64).set(texts.is_null(), 1).to_numpy()


@dataclass(frozen=True)
class TableRoles:
    """Targets, patients and times beside the features of a table.

    - ``targets``, ``patients``, ``times``: From the table's columns where names were given.
    - ``named``: Those columns by what they are for: ``target``, ``patient``, ``time``.
    """

    targets: Any
    patients: Any
    times: Any
    named: Mapping[str, str]

    @staticmethod
    def of(frame: pl.DataFrame, targets: Any, patients: Any, times: Any) -> TableRoles:
        """The arrays that were given, or the columns of these names."""
        given = {"target": targets, "patient": patients, "time": times}
        named = {role: value for role, value in given.items() if isinstance(value, str)}
        for role, name in named.items():
            if name not in frame.columns:
                raise DataError(f"the table has no {role} column '{name}'; it has {', '.join(frame.columns[:12])}")
            if frame[name].null_count():
                raise DataError(f"the {role} column '{name}' is empty in {frame[name].null_count()} rows: fill them in")
        return TableRoles(
            frame[targets].to_numpy() if "target" in named else targets,
            frame[patients].to_list() if "patient" in named else patients,
            times_in(frame[times]) if "time" in named else times,
            named,
        )


def times_in(column: pl.Series) -> npt.NDArray[np.float64]:
    """Numbers as they are; dates, times and durations in seconds."""
    seconds = seconds_of(column)
    if seconds is None and not column.dtype.is_numeric():
        raise DataError(f"'{column.name}' has type {column.dtype}; times are numbers, dates, times or durations")
    return np.array(column.cast(pl.Float64).to_numpy() if seconds is None else seconds, dtype=np.float64)


def as_frame(table: Any) -> pl.DataFrame | None:
    """A polars or pandas frame as a polars one; ``None`` for anything else."""
    if sys.modules.get("polars") is not None:
        if isinstance(table, pl.LazyFrame):
            return table.collect()
        if isinstance(table, pl.DataFrame):
            return table
    if type(table).__module__.partition(".")[0] != "pandas" or not hasattr(table, "columns"):
        return None
    names = [str(name) for name in table.columns]
    if len(set(names)) < len(names):
        repeated = next(name for position, name in enumerate(names) if name in names[:position])
        raise DataError(f"the table has the column '{repeated}' twice: rename or remove one")
    return pl.DataFrame([_from_pandas(str(name), table[name]) for name in table.columns])


def _from_pandas(name: str, column: Any) -> pl.Series:
    """A column of a pandas frame, without pyarrow."""
    if column.dtype.kind in "fiubmM" and isinstance(column.dtype, np.dtype):
        return pl.Series(name, column.to_numpy())
    if column.dtype.kind == "M":
        return pl.Series(name, column.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy())
    empty = column.isna().to_numpy()
    cells = [None if gap else value for gap, value in zip(empty, column.tolist(), strict=True)]
    if column.dtype.kind in "fiub" or all(isinstance(value, bool | None) for value in cells):
        return pl.Series(name, cells, strict=False)
    texts = [None if value is None else str(value) for value in cells]
    return pl.Series(name, texts, dtype=pl.Categorical if hasattr(column, "cat") else pl.String)


# Numbers out of the text that laboratories and pharmacies write: parsed, or missing; never zero by default.


_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_UNIT = r"(?:\s*/?[%A-Za-z°µμ*^(].*)?"


def parse_numbers(texts: pl.Series) -> pl.Series:
    """Read each text as a number.

    A limit counts as the limit itself (``<0.02`` is 0.02, ``> 90 %`` is 90), a range as its middle (``0-2`` is 1), and
    a comma between groups of three digits is dropped (``1,000`` is 1000). A unit may follow (``40 mg``). What is not
    a number (``neg``, ``PYXIS``, an empty text) is missing, null.

    Examples
    --------
    >>> parse_numbers(pl.Series(["<0.02", "> 90 %", "neg", "1,000", "0-2", "2.0  ", "40 mg", "-3"])).to_list()
    [0.02, 90.0, None, 1000.0, 1.0, 2.0, 40.0, -3.0]
    """
    clean = texts.cast(pl.String).str.strip_chars()
    frame = pl.DataFrame({"text": clean}).select(
        single=_as_float(pl.col("text").str.extract(rf"^(?:[<>]=?|[≤≥~])?\s*({_NUMBER}){_UNIT}$")),
        low=_as_float(pl.col("text").str.extract(rf"^({_NUMBER})\s*(?:-|–|to)\s*{_NUMBER}{_UNIT}$")),
        high=_as_float(pl.col("text").str.extract(rf"^{_NUMBER}\s*(?:-|–|to)\s*({_NUMBER}){_UNIT}$")),
    )
    low, high = pl.col("low"), pl.col("high")
    # A "range" that falls is a date, a ratio or a slip of the pen; its middle would mean nothing.
    middle = pl.when(low <= high).then((low + high) / 2)
    ranged = low.is_not_null() & high.is_not_null()
    return frame.select(pl.when(ranged).then(middle).otherwise(pl.col("single")).alias(texts.name)).to_series()


def _as_float(expression: pl.Expr) -> pl.Expr:
    value = expression.str.replace_all(",", "", literal=True).cast(pl.Float64, strict=False)
    # Float32 is what the dataset stores: a number beyond its range is no measurement.
    return pl.when(value.abs() < 3e38).then(value)
