"""Columns of a dataset: a dense tensor, or a ragged column of variable-length rows.

A dense column is a plain tensor ``(rows, ...)``. A ragged column keeps the items of all its rows in one flat tensor and
the offset at which each row begins; its items may be ragged themselves (a stay of events, each a set of codes).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union, cast

import torch
from torch import Tensor

from manydg.errors import DataError


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
        values: Column
        if nested:
            values = Ragged.from_rows(cast("list[list[object]]", items), dtype)
        else:
            values = torch.tensor(items, dtype=dtype)
        return Ragged(values, offsets_from_lengths(lengths))

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

    def take_padded(self, indices: Tensor, capacity: Capacity) -> Ragged:
        """Gather rows into tensors of a fixed size, without asking the device how many items the rows have.

        The gathered column has ``capacity.items`` items. Those after the last row are padding, taken from arbitrary
        rows; there must be at least one. The padding codes of a nested column are spread evenly over the padding
        items, since pooling one item of thousands of codes would keep a GPU waiting.

        Parameters
        ----------
        indices : Tensor ``(rows,)``
        capacity : Capacity
            Enough for these rows.
        """
        starts = self.offsets[indices]
        offsets = offsets_from_lengths(self.offsets[indices + 1] - starts)
        slots = torch.arange(capacity.items, device=indices.device)
        row = torch.searchsorted(offsets[1:], slots, right=True)
        used = row < len(indices)
        shifted = slots + (starts - offsets[:-1])[row.clamp_max(len(indices) - 1)]
        positions = torch.where(used, shifted, slots % len(self.values))
        if not isinstance(self.values, Ragged):
            return Ragged(self.values[positions], offsets, capacity.longest)
        codes, bounds = self.values._take_codes(positions, used, capacity)
        padding, padding_codes = capacity.items - offsets[-1], len(codes) - bounds[-1]
        bounds[1:] += (slots + 1 - offsets[-1]).clamp_min(0) * padding_codes // padding
        return Ragged(Ragged(codes, bounds), offsets, capacity.longest)

    def _take_codes(self, positions: Tensor, used: Tensor, capacity: Capacity) -> tuple[Tensor, Tensor]:
        """The codes of the items at ``positions``, padded to ``capacity.inner``, and the items' bounds in them."""
        assert capacity.inner is not None
        lengths = torch.where(used, self.offsets[positions + 1] - self.offsets[positions], 0)
        bounds = offsets_from_lengths(lengths)
        slots = torch.arange(capacity.inner, device=positions.device)
        item = torch.searchsorted(bounds[1:], slots, right=True).clamp_max(capacity.items - 1)
        source = self.offsets[positions[item]] + slots - bounds[item]
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

    Parameters
    ----------
    longest : int
        At least the number of items of the longest row.
    items : int
        More than the number of items of all rows.
    inner : int, optional
        Of a nested column: at least the number of inner items of all rows, and 1.
    """

    longest: int
    items: int
    inner: int | None = None


Column = Union[Tensor, Ragged]  # noqa: UP007 - evaluated at run time, where Ragged | Tensor is a forward reference


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Row boundaries from row lengths: ``(rows,)`` to ``(rows + 1,)``."""
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
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
