"""How the steps of an epoch are done: as written, or replayed from captured graphs."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Optimizers
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import EpochPlan
from manydg.errors import ManyDGWarning, in_a_line
from manydg.training.execution.batches import Feed, Held, Item, Shape, Shapes, feed_for
from manydg.training.execution.precision import (
    COMPILED,
    Speed,
    compile_update,
    compiled,
    forget_compiled,
    make_capturable,
    not_compiled,
)

# Capturing GPU work in a graph, beside threads that go on sending data, and without harm where it fails.


@contextmanager
def capture_into(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched within is put into a graph instead; after an error, torch is as it was before."""
    outside = torch.cuda.current_stream()
    try:
        # Other threads may take pinned memory and send batches meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        _leave_failed_capture(pool, outside)
        raise


def why_not_captured(error: BaseException) -> str:
    """What went wrong first and where; torch follows it with errors of its own."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(torch.__file__).parent not in Path(frame.filename).parents]
    place = f" ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
    return in_a_line(error) + place


def _leave_failed_capture(pool: Any, outside: torch.cuda.Stream) -> None:
    """Torch stops short where a capture ends in an error: its stream, random numbers and memory would stay in it."""
    torch.cuda.set_stream(outside)
    generator = torch.cuda.default_generators[outside.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # Where torch did get that far.
        torch._C._cuda_endAllocateToPool(outside.device_index, pool)


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
    """As the speed has it, from wherever the data are."""
    feed = feed_for(train, device)
    if device.type == "cuda" and speed.captures:
        return CapturedSteps(algorithm, feed, Shapes(train), optimizers, speed)
    return PlainSteps(algorithm, feed, optimizers)


class PlainSteps:
    """Lets the algorithm take its step as written."""

    def __init__(self, algorithm: Algorithm, feed: Feed, optimizers: Optimizers) -> None:
        self.algorithm, self.feed, self.optimizers = algorithm, feed, optimizers

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        for item, pairs in zip(self.feed.items(plan), plan.pairs, strict=True):
            yield partial(self._step, item, pairs)

    def _step(self, item: Item, pairs: int) -> Terms:
        return Terms.of(self.algorithm.step(self.feed.batch(item, pairs), self.optimizers))


@dataclass
class _Captured:
    """A graph of one batch shape with the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    held: Held
    names: tuple[str, ...]
    values: Tensor


class CapturedSteps:
    """Forward, backward and update, and the gather before them, as one graph per batch shape.

    Hundreds of kernels are launched by one call. The first step of each shape runs as written, which also warms up what
    must not be set up during capture. Ragged columns are gathered into memory of a size that suits all steps of a
    shape; no step asks the device anything.
    """

    def __init__(self, algorithm: Algorithm, feed: Feed, shapes: Shapes, optimizers: Optimizers, speed: Speed) -> None:
        self.algorithm, self.feed, self.optimizers = algorithm, feed, optimizers
        self._shapes = shapes
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
            self._backbone = not_compiled(algorithm.backbone.forward_in_precision) if shapes.ragged else None
        for optimizer in optimizers.values():
            make_capturable(optimizer)
            if speed.execution == COMPILED:
                compile_update(optimizer)

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        shapes = self._shapes.enter(plan)
        for outgrown in self._shapes.outgrown:
            self._graphs.pop(outgrown, None)
        for shape, item in zip(shapes, self.feed.items(plan), strict=True):
            fast = self._fast_objective is not None and self._shapes.worth_compiling(shape)
            yield partial(self._replay, item, shape, fast)

    def _replay(self, item: Item, shape: Shape, fast: bool) -> Terms:
        """A step by its graph, or as written where there is none yet."""
        if shape not in self._graphs:
            if self._refused or not self._shapes.due(shape, fast):
                return self._warm_up(item, shape, fast)
            if not self._capture(item, shape, fast):
                return self._step(self.feed.batch(item, shape.pairs, self._shapes.rooms[shape]), fast=False)
        captured = self._graphs[shape]
        self.feed.fill(captured.held, item)
        captured.graph.replay()
        return Terms(captured.names, captured.values.clone())

    def _warm_up(self, item: Item, shape: Shape, fast: bool) -> Terms:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # The compiler's remarks on its own choices.
            warnings.filterwarnings("ignore", module=r"torch\._inductor")
            terms = self._step(self.feed.batch(item, shape.pairs, self._shapes.rooms[shape]), fast)
        torch.cuda.current_stream().wait_stream(self._stream)
        return terms

    def _capture(self, item: Item, shape: Shape, fast: bool) -> bool:
        """Whether the step could be captured."""
        held = self.feed.hold(item)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with capture_into(graph, self._pool, self._stream):
                terms = self._step(self.feed.held_batch(held, shape.pairs, self._shapes.rooms[shape]), fast)
        except RuntimeError as error:
            self._refused = True
            self._graphs.clear()
            message = (
                "training steps cannot be captured and run as written, which is slower: "
                f"{why_not_captured(error)}; say execution plain, or static_step = False in an algorithm of your own"
            )
            warnings.warn(message, ManyDGWarning, stacklevel=2)
            return False
        self._graphs[shape] = _Captured(graph, held, terms.names, terms.values)
        return True

    def _step(self, batch: Batch, fast: bool) -> Terms:
        if not fast or self._fast_objective is None:
            return Terms.of(self.algorithm.step(batch, self.optimizers))
        backbone = self.algorithm.backbone
        self.algorithm.objective = self._fast_objective  # type: ignore[method-assign]
        if self._backbone is not None:
            backbone.forward_in_precision = self._backbone  # type: ignore[method-assign]
        try:
            return Terms.of(self.algorithm.step(batch, self.optimizers))
        finally:
            self.algorithm.__dict__.pop("objective", None)
            backbone.__dict__.pop("forward_in_precision", None)


def read_terms(block: list[Terms]) -> dict[str, list[float | None]]:
    """Terms of several steps in one transfer; a term that a step did not have is ``None`` there."""
    names = list(dict.fromkeys(name for terms in block for name in terms.names))
    table = iter(torch.cat([terms.values for terms in block]).tolist())
    rows = [dict(zip(terms.names, table, strict=False)) for terms in block]
    return {name: [row.get(name) for row in rows] for name in names}
