"""How the steps of an epoch are done: as written, or replayed from CUDA graphs, whose objective may be compiled."""

from __future__ import annotations

import functools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Optimizers
from manydg.data.dataset import Batch
from manydg.data.sampling import EpochPlan
from manydg.errors import ManyDGWarning, in_a_line
from manydg.training.execution.batches import BatchSource, Buffers, Item, Shape, Shapes

_MOST_SHAPES_COMPILED = 1024
"""More than any training has."""


@dataclass(frozen=True)
class Terms:
    """Loss terms of a step: their names, and their values ``(terms,)`` on the device."""

    names: tuple[str, ...]
    values: Tensor

    @staticmethod
    def of(terms: dict[str, Tensor]) -> Terms:
        return Terms(tuple(terms), torch.stack([value.float() for value in terms.values()]))


def read_terms(block: list[Terms]) -> dict[str, list[float | None]]:
    """Terms of several steps in one transfer; a term that a step did not have is ``None`` there."""
    names = list(dict.fromkeys(name for terms in block for name in terms.names))
    values = iter(torch.cat([terms.values for terms in block]).tolist())
    rows = [dict(zip(terms.names, values, strict=False)) for terms in block]
    return {name: [row.get(name) for row in rows] for name in names}


class Steps(Protocol):
    """Does the steps of an epoch, one after the other."""

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        """For each step of a plan (on the host) what does it; to be called in order."""
        ...


class PlainSteps:
    """Lets the algorithm take its step as written."""

    def __init__(self, algorithm: Algorithm, source: BatchSource, optimizers: Optimizers) -> None:
        self.algorithm, self.source, self.optimizers = algorithm, source, optimizers

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        for item, pairs in zip(self.source.items(plan), plan.pairs, strict=True):
            yield partial(self._step, item, pairs)

    def _step(self, item: Item, pairs: int) -> Terms:
        return Terms.of(self.algorithm.step(self.source.batch(item, pairs), self.optimizers))


@dataclass
class _Captured:
    """A graph of one batch shape with the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    buffers: Buffers
    names: tuple[str, ...]
    values: Tensor


class CapturedSteps:
    """Gather, forward, backward and update as one CUDA graph per batch shape.

    Hundreds of kernels are launched by one call. The first steps of each shape run as written, which also warms up what
    must not be set up during capture. Ragged columns are gathered into memory of a size that suits all steps of a
    shape; no step waits for the device.

    - ``compile``: Whether the objective is compiled for the shapes that an epoch is made of.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        source: BatchSource,
        shapes: Shapes,
        optimizers: Optimizers,
        *,
        compile: bool = False,
    ) -> None:
        self.algorithm, self.source, self.optimizers = algorithm, source, optimizers
        self._shapes = shapes
        self._graphs: dict[Shape, _Captured] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._refused = False
        self._compiled = CompiledObjective(algorithm, shapes.ragged) if compile else None
        for optimizer in optimizers.values():
            make_capturable(optimizer)

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        shapes = self._shapes.enter(plan)
        for outgrown in self._shapes.outgrown:
            self._graphs.pop(outgrown, None)
        for shape, item in zip(shapes, self.source.items(plan, shapes), strict=True):
            yield partial(self._replay, item, shape, self._shapes.worth_compiling(shape))

    def _replay(self, item: Item, shape: Shape, common: bool) -> Terms:
        """A step by its graph, or as written where there is none yet."""
        compiled = self._compiled if common else None
        if shape not in self._graphs:
            if self._refused or not self._shapes.due(shape, compiled is not None):
                return self._warm_up(item, shape, compiled)
            if not self._capture(item, shape, compiled):
                return self._step(self.source.batch(item, shape.pairs))
        captured = self._graphs[shape]
        self.source.fill(captured.buffers, item)
        captured.graph.replay()
        return Terms(captured.names, captured.values.clone())

    def _warm_up(self, item: Item, shape: Shape, compiled: CompiledObjective | None) -> Terms:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # The compiler's remarks on its own choices.
            warnings.filterwarnings("ignore", module=r"torch\._inductor")
            terms = self._step(self.source.batch(item, shape.pairs), compiled)
        torch.cuda.current_stream().wait_stream(self._stream)
        return terms

    def _capture(self, item: Item, shape: Shape, compiled: CompiledObjective | None) -> bool:
        """Whether the step could be captured."""
        buffers = self.source.allocate(item)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with capture_into(graph, self._pool, self._stream):
                terms = self._step(self.source.batch_in(buffers, shape.pairs), compiled)
        except RuntimeError as error:
            self._refused = True
            self._graphs.clear()
            message = (
                "training steps cannot be captured and run as written, which is slower: "
                f"{_first_cause(error)}; say execution plain, or static_step = False in an algorithm of your own"
            )
            warnings.warn(message, ManyDGWarning, stacklevel=2)
            return False
        self._graphs[shape] = _Captured(graph, buffers, terms.names, terms.values)
        return True

    def _step(self, batch: Batch, compiled: CompiledObjective | None = None) -> Terms:
        if compiled is None:
            return Terms.of(self.algorithm.step(batch, self.optimizers))
        with compiled.used():
            return Terms.of(self.algorithm.step(batch, self.optimizers))


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser count its steps on the device, also one whose state was counted on the host so far."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)


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


def _first_cause(error: BaseException) -> str:
    """What went wrong first and where; torch follows it with errors of its own."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(torch.__file__).parent not in Path(frame.filename).parents]
    location = f" ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
    return in_a_line(error) + location


def _leave_failed_capture(pool: Any, outside: torch.cuda.Stream) -> None:
    """Torch stops short where a capture ends in an error: its stream, random numbers and memory would stay in it."""
    torch.cuda.set_stream(outside)
    generator = torch.cuda.default_generators[outside.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # Where torch did get that far.
        torch._C._cuda_endAllocateToPool(outside.device_index, pool)


class CompiledObjective:
    """An algorithm's objective, compiled.

    Kernels come from the compiler's cache on disk where an earlier run had the same shapes. The optimiser's update is
    not compiled: that took 4% off an epoch of the seizure task and several seconds of every start.

    - ``ragged``: Whether the backbone's inputs are ragged: they have many shapes, so that the backbone is left as it is
      and only what follows it, which has few, is compiled.
    """

    def __init__(self, algorithm: Algorithm, ragged: bool) -> None:
        # What other trainings of this process compiled: torch would look through it at every call.
        torch.compiler.reset()
        self._algorithm = algorithm
        self._objective = compiled(algorithm.objective)
        self._backbone = not_compiled(algorithm.backbone.compute) if ragged else None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it the algorithm's steps evaluate the compiled objective."""
        with self._algorithm.evaluated_by(self._objective), self._algorithm.backbone.executed(caller=self._backbone):
            yield


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for batches of fixed shape, with small independent kernels joined.

    It may meet any number of shapes: torch by itself compiles for eight, then runs the function as written, and only a
    log says so.
    """
    # What the compiler leaves out of its graphs (a profiler's marks, say) is of no use to anyone who trains.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    fast = torch.compile(function, dynamic=False, options={"combo_kernels": True})

    def call(*arguments: Any, **options: Any) -> Any:
        # Takes a second or two to import.
        from torch._dynamo import config

        most = _MOST_SHAPES_COMPILED
        with config.patch(recompile_limit=most, accumulated_recompile_limit=16 * most):
            return fast(*arguments, **options)

    return call


def not_compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that the compiler steps over: what calls it is compiled before and after it."""
    return cast("Callable[..., Tensor]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


@functools.cache
def reason_against_compiling(device: torch.device) -> str | None:
    """Why nothing can be compiled for a GPU (there is no C compiler, say); ``None`` where it can be."""
    try:
        compiled(lambda values: values.square().sum())(torch.ones(8, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in many ways, and there is another way to go
        return in_a_line(error)
    return None
