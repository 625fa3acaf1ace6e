"""Where the steps of an epoch get their batches from: data on the device, or sent to it from the host."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.backbones import Backbone
from manydg.data.columns import Capacity, Column, Ragged, take
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import EpochPlan

# How much memory the steps of a plan need for ragged columns, worked out for a whole epoch at once on the host.


Lengths = npt.NDArray[np.int64]
Rooms = dict[str, Capacity]
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
                need[name] = Capacity(_on_grid(int(longest[step])), int(items[step]), held)
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
        name: Capacity(
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
        name: Capacity(
            room.longest, _wider(room.items, share), None if room.inner is None else _wider(room.inner, share)
        )
        for name, room in rooms.items()
    }


def holds(rooms: Rooms, need: Rooms) -> bool:
    """Whether a step that needs so much can be done in these rooms."""
    return join_rooms(rooms, need) == rooms


def _wider(count: int, share: float) -> int:
    return math.ceil(count * (1 + share) / _MULTIPLE) * _MULTIPLE


def _on_grid(length: int) -> int:
    return next((step for step in _GRID if step >= length), length)


_BATCHES_AHEAD, _WORKERS = 4, 2
Item = Any
"""What stands for a step's batch before it is needed."""
Held = Any
"""Memory of fixed place, which a captured step reads its batch from."""


class Feed(Protocol):
    """Gives each step its batch."""

    def items(self, plan: EpochPlan) -> Iterator[Item]:
        """One item a step, in order."""
        ...

    def batch(self, item: Item, pairs: int, rooms: Rooms | None = None) -> Batch:
        """The batch of an item, ragged columns in rooms of fixed size where there are any."""
        ...

    def hold(self, item: Item) -> Held:
        """New memory of fixed place, with what this item needs in it."""
        ...

    def fill(self, held: Held, item: Item) -> None:
        """The same memory with what another item needs."""
        ...

    def held_batch(self, held: Held, pairs: int, rooms: Rooms | None = None) -> Batch:
        """The batch that such memory stands for; what it takes to make it may be captured."""
        ...


class Resident:
    """The data are where the steps are done: an item is a step's rows, which are gathered there."""

    def __init__(self, train: DomainDataset) -> None:
        self.train = train

    def items(self, plan: EpochPlan) -> Iterator[Tensor]:
        for indices, _ in plan.to(self.train.device):
            yield indices

    def batch(self, item: Tensor, pairs: int, rooms: Rooms | None = None) -> Batch:
        if not rooms:
            return self.train.take(item, pairs)
        inputs: dict[str, Column] = {
            name: column.take_padded(item, rooms[name]) if isinstance(column, Ragged) else take(column, item)
            for name, column in self.train.columns.items()
        }
        return Batch(inputs, self.train.targets[item], self.train.domains[item], pairs)

    def hold(self, item: Tensor) -> Tensor:
        return item.clone()

    def fill(self, held: Tensor, item: Tensor) -> None:
        held.copy_(item)

    def held_batch(self, held: Tensor, pairs: int, rooms: Rooms | None = None) -> Batch:
        return self.batch(held, pairs, rooms)


class Streamed:
    """The data stay on the host: batches are gathered into pinned memory and sent ahead while the GPU computes."""

    def __init__(self, train: DomainDataset, device: torch.device) -> None:
        self.train, self.device = train, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def items(self, plan: EpochPlan) -> Iterator[Future[tuple[Batch, Any]]]:
        with ThreadPoolExecutor(_WORKERS) as workers:
            waiting: deque[Future[tuple[Batch, Any]]] = deque()
            for indices, pairs in plan:
                waiting.append(workers.submit(self._send, indices, pairs))
                if len(waiting) > _BATCHES_AHEAD:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()

    def batch(self, item: Future[tuple[Batch, Any]], pairs: int, rooms: Rooms | None = None) -> Batch:
        batch, arrived = item.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in _tensors(batch):
            tensor.record_stream(current)
        return batch

    def hold(self, item: Future[tuple[Batch, Any]]) -> Batch:
        batch = self.batch(item, 0)
        columns: dict[str, Any] = {name: _dense(column).clone() for name, column in batch.inputs.items()}
        return replace(batch, inputs=columns, targets=batch.targets.clone(), domains=batch.domains.clone())

    def fill(self, held: Batch, item: Future[tuple[Batch, Any]]) -> None:
        for place, tensor in zip(_tensors(held), _tensors(self.batch(item, 0)), strict=True):
            place.copy_(tensor)

    def held_batch(self, held: Batch, pairs: int, rooms: Rooms | None = None) -> Batch:
        return held

    def _send(self, indices: Tensor, pairs: int) -> tuple[Batch, Any]:
        """The batch on its way to the device, and the event of its arrival."""
        train = self.train
        stored = indices if train.rows is None else train.rows[indices]
        with torch.cuda.stream(self._stream):
            sent = Batch(
                {name: _sent_rows(column, stored, self.device) for name, column in train.columns.items()},
                _sent_rows(train.targets, indices, self.device),
                _sent_rows(train.domains, indices, self.device),
                pairs,
            )
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return sent, arrived


def feed_for(train: DomainDataset, device: torch.device) -> Feed:
    """From where the data are to where the steps are done."""
    on_host = device.type == "cuda" and train.device.type != "cuda"
    return Streamed(train, device) if on_host else Resident(train)


def _sent_rows(column: Any, rows: Tensor, device: torch.device) -> Any:
    """Rows of a column on their way to a device, gathered straight into pinned memory where they are dense."""
    if isinstance(column, Ragged) or not column.is_contiguous():
        return _sent(take(column, rows), device)
    gathered = pinned(len(rows), column)
    torch.index_select(column, 0, rows, out=gathered)
    return gathered.to(device, non_blocking=True)


def _sent(column: Any, device: torch.device) -> Any:
    if isinstance(column, Ragged):
        return Ragged(_sent(column.values, device), _sent(column.offsets, device))
    return column.pin_memory().to(device, non_blocking=True)


def pinned(rows: int, column: Tensor) -> Tensor:
    """Memory for so many rows of a column that a GPU can read by itself."""
    return torch.empty(rows, *column.shape[1:], dtype=column.dtype, pin_memory=True)


def _dense(column: Column) -> Tensor:
    assert isinstance(column, Tensor)
    return column


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (batch.targets, batch.domains)
    for column in batch.inputs.values():
        while isinstance(column, Ragged):
            yield column.offsets
            column = column.values
        yield column


# The shapes of a training's batches: room for ragged rows, and when a graph of a shape pays.


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
        Capacity for every step of a shape, of this epoch and those before it.
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
