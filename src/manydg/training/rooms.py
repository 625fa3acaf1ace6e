"""How much memory the steps of a plan need for ragged columns, worked out for a whole epoch at once on the host."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from manydg.data.columns import Column, Ragged, Room
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import EpochPlan

Lengths = npt.NDArray[np.int64]
Rooms = dict[str, Room]
_HEADROOM, _MULTIPLE = 1 / 20, 64
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 300)
"""Lengths that steps are padded to. Attention costs their square, a graph each costs memory and a capture."""


class RoomTable:
    """Lengths of a dataset's ragged rows, kept on the host.

    Parameters
    ----------
    dataset : DomainDataset
        All of it, without a selection of rows.
    """

    def __init__(self, dataset: DomainDataset) -> None:
        self._outer: dict[str, Lengths] = {}
        self._inner: dict[str, Lengths] = {}
        for name, column in dataset.columns.items():
            if not isinstance(column, Ragged):
                continue
            offsets = column.offsets.cpu().numpy()
            self._outer[name] = np.diff(offsets)
            if isinstance(column.values, Ragged):
                self._inner[name] = np.diff(column.values.offsets.cpu().numpy()[offsets])

    def of_plan(self, plan: EpochPlan) -> list[Rooms]:
        """What each step needs at least, its lengths rounded up to a grid."""
        rows, starts = plan.indices.cpu().numpy(), np.array(plan.bounds[:-1])
        needs: list[Rooms] = [{} for _ in plan.pairs]
        for name, outer in self._outer.items():
            longest = np.maximum.reduceat(outer[rows], starts)
            items = np.add.reduceat(outer[rows], starts) + 1
            inner = np.add.reduceat(self._inner[name][rows], starts) if name in self._inner else None
            for step, need in enumerate(needs):
                held = None if inner is None else max(1, int(inner[step]))
                need[name] = Room(_on_grid(int(longest[step])), int(items[step]), held)
        return needs


def lengths_of(dataset: DomainDataset) -> Lengths | None:
    """How long each sample is, by its longest ragged column; ``None`` where all columns are dense."""
    found = [_lengths(column, dataset) for column in dataset.columns.values() if isinstance(column, Ragged)]
    return np.maximum.reduce(found) if found else None


def _lengths(column: Column, dataset: DomainDataset) -> Lengths:
    assert isinstance(column, Ragged)
    lengths: Lengths = column.lengths.cpu().numpy()
    return lengths if dataset.rows is None else lengths[dataset.rows.cpu().numpy()]


def join_rooms(first: Rooms, second: Rooms) -> Rooms:
    """Enough for both."""
    return {
        name: Room(
            max(room.longest, second[name].longest),
            max(room.items, second[name].items),
            None if room.inner is None else max(room.inner, second[name].inner or 1),
        )
        for name, room in first.items()
    }


def with_headroom(rooms: Rooms, steps: int) -> Rooms:
    """More than so many steps need, rounded up: those of the next epoch are of about this size, not exactly.

    A twentieth more; where there were few steps, more again, since the largest of few says less about the next.
    """
    share = max(_HEADROOM, 1 / (2 + steps))
    return {
        name: Room(room.longest, _wider(room.items, share), None if room.inner is None else _wider(room.inner, share))
        for name, room in rooms.items()
    }


def holds(rooms: Rooms, need: Rooms) -> bool:
    """Whether a step that needs so much can be done in these rooms."""
    return join_rooms(rooms, need) == rooms


def _wider(count: int, share: float) -> int:
    return math.ceil(count * (1 + share) / _MULTIPLE) * _MULTIPLE


def _on_grid(length: int) -> int:
    return next((step for step in _GRID if step >= length), length)
