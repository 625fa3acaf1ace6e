"""The shapes of a training's batches: room for ragged rows, and when a graph of a shape pays."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from manydg.backbones import Backbone
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import EpochPlan
from manydg.training.rooms import Rooms, RoomTable, holds, join_rooms, with_headroom

_STEPS_OF_A_COMMON_SHAPE = 3
_STEPS_BEFORE_FIRST_GRAPH = 3
_STEPS_BEFORE_A_RARE_GRAPH = 8
"""Capturing takes as long as several steps as written."""


class Shape(NamedTuple):
    """What a graph is captured for: rows, how many pairs of them, and the length that ragged rows are padded to."""

    rows: int
    pairs: int
    longest: int

    @property
    def of_rows(self) -> tuple[int, int]:
        """What of it compiled code depends on."""
        return self.rows, self.pairs


class Shapes:
    """What shapes there have been, epoch after epoch.

    Parameters
    ----------
    train : DomainDataset
        All of it, without a selection of rows.

    Attributes
    ----------
    ragged : bool
        Whether any rows differ in length.
    rooms : dict
        Room for every step of a shape, of this epoch and those before it.
    outgrown : set of Shape
        Shapes whose room had to grow with the last epoch.
    """

    def __init__(self, train: DomainDataset) -> None:
        self.ragged = bool(_ragged(train))
        self._table = RoomTable(train)
        self.rooms: dict[Shape, Rooms] = {}
        self.outgrown: set[Shape] = set()
        self._in_epoch: Counter[Shape] = Counter()
        self._of_rows_in_epoch: Counter[tuple[int, int]] = Counter()
        self._seen: Counter[Shape] = Counter()
        self._with_graph: set[Shape] = set()

    def enter(self, plan: EpochPlan) -> list[Shape]:
        """The shapes of an epoch's steps; they have room for them from now on."""
        needs = self._table.of_plan(plan)
        shapes = [_shape(plan, step, need) for step, need in enumerate(needs)]
        self._in_epoch = Counter(shapes)
        self._of_rows_in_epoch = Counter(shape.of_rows for shape in shapes)
        self.outgrown = set()
        wanted: dict[Shape, Rooms] = {}
        for shape, need in zip(shapes, needs, strict=True):
            wanted[shape] = join_rooms(wanted[shape], need) if shape in wanted else need
        for shape, need in wanted.items():
            self._make_room(shape, need)
        return shapes

    def worth_compiling(self, shape: Shape) -> bool:
        """Whether it is one of those that an epoch is made of, not one of the smaller ones at its end."""
        return self._of_rows_in_epoch[shape.of_rows] >= _STEPS_OF_A_COMMON_SHAPE

    def due(self, shape: Shape, compiled: bool) -> bool:
        """Whether a step of a shape without a graph is to be captured; to be asked once for each such step.

        What a step needs must be set up before it is captured: by three steps the first time, and the first time of
        every compiled kind, else by one. Lengths that are rare come and go: they must have come up several times.
        """
        self._seen[shape] += 1
        if self._seen[shape] <= self._steps_before(shape, compiled):
            return False
        self._with_graph.add(shape)
        return True

    def _steps_before(self, shape: Shape, compiled: bool) -> int:
        if shape.longest and self._in_epoch[shape] < _STEPS_OF_A_COMMON_SHAPE:
            return _STEPS_BEFORE_A_RARE_GRAPH
        alike = any(other.of_rows == shape.of_rows for other in self._with_graph)
        return 1 if alike or (self._with_graph and not compiled) else _STEPS_BEFORE_FIRST_GRAPH

    def _make_room(self, shape: Shape, need: Rooms) -> None:
        if shape not in self.rooms:
            self.rooms[shape] = with_headroom(need, self._in_epoch[shape])
        elif not holds(self.rooms[shape], need):
            self.rooms[shape] = with_headroom(join_rooms(self.rooms[shape], need), self._in_epoch[shape])
            self.outgrown.add(shape)


def has_fixed_shapes(backbone: Backbone, train: DomainDataset, device: torch.device) -> bool:
    """Whether all batches can be laid out in a few shapes: rows differ in length nowhere, or can be filled up.

    Rows can be filled up where all of them are on the device, and the backbone must know what is real.
    """
    ragged = _ragged(train)
    can_be_filled = backbone.takes_padded and train.rows is None and all(len(column.values) for column in ragged)
    return not ragged or (can_be_filled and train.device.type == device.type)


def _ragged(train: DomainDataset) -> list[Ragged]:
    return [column for column in train.columns.values() if isinstance(column, Ragged)]


def _shape(plan: EpochPlan, step: int, need: Rooms) -> Shape:
    rows = plan.bounds[step + 1] - plan.bounds[step]
    return Shape(rows, plan.pairs[step], max((room.longest for room in need.values()), default=0))
