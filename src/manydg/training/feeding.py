"""Where the steps of an epoch get their batches from: data on the device, or sent to it from the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged, take
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import EpochPlan
from manydg.training.rooms import Rooms

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
