"""How the steps of an epoch are done: as written, fed from the host, or replayed from captured graphs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Optimizers
from manydg.data.columns import Column, Ragged, take
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import EpochPlan
from manydg.errors import ManyDGWarning
from manydg.training.compiling import compile_update, compiled, forget_compiled, make_capturable, not_compiled
from manydg.training.precision import COMPILED, Speed
from manydg.training.shapes import Shape, Shapes

_BATCHES_AHEAD = 3


@dataclass(frozen=True)
class Terms:
    """Loss terms of a step: their names, and their values ``(terms,)`` on the device."""

    names: tuple[str, ...]
    values: Tensor

    @staticmethod
    def of(terms: dict[str, Tensor]) -> Terms:
        return Terms(tuple(terms), torch.stack([value.float() for value in terms.values()]))


class Steps(Protocol):
    """Does the steps of an epoch, one after the other."""

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        """What does each step of a plan (on the host); to be called in order."""
        ...


def steps_for(
    algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device, speed: Speed
) -> Steps:
    """The fastest way that the data, the algorithm and the speed asked for allow."""
    if device.type == "cuda" and train.device.type != "cuda":
        return StreamedSteps(algorithm, train, optimizers, device)
    ragged = [column for column in train.columns.values() if isinstance(column, Ragged)]
    padded = algorithm.backbone.takes_padded and train.rows is None and all(len(column.values) for column in ragged)
    if device.type == "cuda" and speed.captures and (padded or not ragged):
        return CapturedSteps(algorithm, train, optimizers, speed)
    return PlainSteps(algorithm, train, optimizers)


class PlainSteps:
    """Gathers the batch where the data live and lets the algorithm take its step there."""

    def __init__(self, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers) -> None:
        self.algorithm, self.train, self.optimizers = algorithm, train, optimizers

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        for indices, pairs in plan.to(self.train.device):
            yield partial(self._step, indices, pairs)

    def _step(self, indices: Tensor, pairs: int) -> Terms:
        return Terms.of(self.algorithm.step(self.train.take(indices, pairs), self.optimizers))


class StreamedSteps:
    """The data stay on the host: batches are gathered into pinned memory and sent ahead while the GPU computes."""

    def __init__(
        self, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device
    ) -> None:
        self.algorithm, self.train, self.optimizers, self.device = algorithm, train, optimizers, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        with ThreadPoolExecutor(max_workers=1) as worker:
            waiting: deque[Future[tuple[Batch, Any]]] = deque()
            for indices, pairs in plan:
                waiting.append(worker.submit(self._send, indices, pairs))
                if len(waiting) > _BATCHES_AHEAD:
                    yield partial(self._step, waiting.popleft())
            while waiting:
                yield partial(self._step, waiting.popleft())

    def _send(self, indices: Tensor, pairs: int) -> tuple[Batch, Any]:
        """The batch on its way to the device, and the event of its arrival."""
        batch = self.train.take(indices, pairs)
        with torch.cuda.stream(self._stream):
            sent = replace(
                batch,
                inputs={name: _send(column, self.device) for name, column in batch.inputs.items()},
                targets=_send(batch.targets, self.device),
                domains=_send(batch.domains, self.device),
            )
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return sent, arrived

    def _step(self, ready: Future[tuple[Batch, Any]]) -> Terms:
        batch, arrived = ready.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in _tensors(batch):
            tensor.record_stream(current)
        return Terms.of(self.algorithm.step(batch, self.optimizers))


@dataclass
class _Captured:
    """A graph of one batch shape with the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    indices: Tensor
    names: tuple[str, ...]
    values: Tensor


class CapturedSteps:
    """Gather, forward, backward and update as one graph per batch shape: the launch of hundreds of kernels in one.

    The first step of each shape runs as written, which also warms up what must not be set up during capture. Ragged
    columns are gathered into memory of a size that suits all steps of a shape; no step asks the device anything.
    """

    def __init__(self, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, speed: Speed) -> None:
        self.algorithm, self.train, self.optimizers = algorithm, train, optimizers
        self._ragged = any(isinstance(column, Ragged) for column in train.columns.values())
        self._shapes = Shapes(train)
        self._graphs: dict[Shape, _Captured] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._refused = False
        self._fast_objective: Callable[..., Any] | None = None
        self._backbone: Callable[..., Tensor] | None = None
        if speed.execution == COMPILED:
            forget_compiled()
            self._fast_objective = compiled(algorithm.objective)
            # Ragged batches have many shapes, but behind the backbone they all have the same.
            self._backbone = not_compiled(algorithm.backbone.forward_in_precision) if self._ragged else None
        for optimizer in optimizers.values():
            make_capturable(optimizer)
            if speed.execution == COMPILED:
                compile_update(optimizer)

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        shapes = self._shapes.enter(plan)
        for outgrown in self._shapes.outgrown:
            self._graphs.pop(outgrown, None)
        for shape, (indices, _) in zip(shapes, plan.to(self.train.device), strict=True):
            fast = self._fast_objective is not None and self._shapes.worth_compiling(shape)
            yield partial(self._replay, indices, shape, fast)

    def _replay(self, indices: Tensor, shape: Shape, fast: bool) -> Terms:
        """A step by its graph, or as written where there is none yet."""
        if shape not in self._graphs:
            if self._refused or not self._shapes.due(shape, fast):
                return self._warm_up(indices, shape, fast)
            if not self._capture(indices, shape, fast):
                return self._step(indices, shape, fast=False)
        captured = self._graphs[shape]
        captured.indices.copy_(indices)
        captured.graph.replay()
        return Terms(captured.names, captured.values.clone())

    def _warm_up(self, indices: Tensor, shape: Shape, fast: bool) -> Terms:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # The compiler's remarks on its own choices.
            warnings.filterwarnings("ignore", module=r"torch\._inductor")
            terms = self._step(indices, shape, fast)
        torch.cuda.current_stream().wait_stream(self._stream)
        return terms

    def _capture(self, indices: Tensor, shape: Shape, fast: bool) -> bool:
        """Whether the step could be captured."""
        rows = indices.clone()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                terms = self._step(rows, shape, fast)
        except RuntimeError as error:
            self._refused = True
            message = f"training steps cannot be captured and run as written: {str(error).splitlines()[0]}"
            warnings.warn(message, ManyDGWarning, stacklevel=2)
            return False
        self._graphs[shape] = _Captured(graph, rows, terms.names, terms.values)
        return True

    def _step(self, indices: Tensor, shape: Shape, fast: bool) -> Terms:
        batch, backbone = self._take(indices, shape), self.algorithm.backbone
        if fast and self._fast_objective is not None:
            self.algorithm.objective = self._fast_objective  # type: ignore[method-assign]
            if self._backbone is not None:
                backbone.forward_in_precision = self._backbone  # type: ignore[method-assign]
        try:
            return Terms.of(self.algorithm.step(batch, self.optimizers))
        finally:
            self.algorithm.__dict__.pop("objective", None)
            backbone.__dict__.pop("forward_in_precision", None)

    def _take(self, indices: Tensor, shape: Shape) -> Batch:
        if not self._ragged:
            return self.train.take(indices, shape.pairs)
        rooms = self._shapes.rooms[shape]
        inputs: dict[str, Column] = {
            name: column.take_padded(indices, rooms[name]) if isinstance(column, Ragged) else take(column, indices)
            for name, column in self.train.columns.items()
        }
        return Batch(inputs, self.train.targets[indices], self.train.domains[indices], shape.pairs)


def read_terms(block: list[Terms]) -> dict[str, list[float | None]]:
    """Terms of several steps in one transfer; a term that a step did not have is ``None`` there."""
    names = list(dict.fromkeys(name for terms in block for name in terms.names))
    table = iter(torch.cat([terms.values for terms in block]).tolist())
    rows = [dict(zip(terms.names, table, strict=False)) for terms in block]
    return {name: [row.get(name) for row in rows] for name in names}


def _send(column: Any, device: torch.device) -> Any:
    if isinstance(column, Ragged):
        return Ragged(_send(column.values, device), _send(column.offsets, device))
    return column.pin_memory().to(device, non_blocking=True)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (batch.targets, batch.domains)
    for column in batch.inputs.values():
        while isinstance(column, Ragged):
            yield column.offsets
            column = column.values
        yield column
