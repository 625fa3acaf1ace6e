"""How the steps of an epoch are done, as written or replayed from CUDA graphs, and where their batches come from."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import math
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Optimizers
from manydg.backbones import Backbone
from manydg.data.columns import Capacity, Column, Ragged, nest, take, tensors_of
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import Crops, EpochPlan
from manydg.data.timeline import ORDER
from manydg.errors import ManyDGWarning, in_a_line

_MOST_SHAPES_COMPILED = 1024
"""More than any training has."""
_TURN = 1e-4
"""Seconds that one thread computes while another waits, where importing must not hold up the launch of kernels."""


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
            # To try every convolution kernel takes a second or more, which a step or two of an epoch never earn back.
            torch.backends.cudnn.benchmark = common
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
    compiler_ahead().join()
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


@functools.cache
def compiler_ahead() -> Thread:
    """Start to import torch's compiler in a thread, which takes seconds; whatever compiles waits for its end."""
    thread = Thread(target=_import_compiler, daemon=True)
    thread.start()
    return thread


def _import_compiler() -> None:
    """Import the compiler and work out the versions that its cache on disk goes by, from torch's and Triton's files.

    Nothing is compiled here, since that sets random numbers back that the main thread draws. What fails here fails
    again, and is reported, where something is compiled.
    """
    turn, collecting = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_TURN)
    # Collecting garbage among a million new objects, none of which is any, was a fifth of the import.
    gc.disable()
    try:
        with suppress(Exception):
            importlib.import_module("torch._inductor.compile_fx")
            cache = importlib.import_module("torch._inductor.codecache")
            cache.torch_key()
            cache.CacheBase.get_system()
    finally:
        sys.setswitchinterval(turn)
        if collecting:
            gc.enable()


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


# Where the steps of an epoch get their batches from, and which shapes those batches have


Lengths = npt.NDArray[np.int64]
Capacities = dict[str, Capacity]
"""Of each ragged column."""
Item = Any
"""A step's batch before it is needed: its row indices, or a batch on its way to the device."""
Buffers = Any
"""Memory at a fixed address from which a captured step reads its batch."""

_PREFETCHED, _WORKERS = 4, 2
_ITEMS_AT_ONCE = 1 << 24
"""Codes gathered at a time: half a gigabyte, with what is needed on the way."""
_HEADROOM, _MULTIPLE = 1 / 20, 64
_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 300)
"""Lengths that rows are padded to. Attention costs their square, a graph each costs memory and a capture."""
_STEPS_OF_A_COMMON_SHAPE = 3
_STEPS_BEFORE_FIRST_GRAPH = 3
_STEPS_BEFORE_A_RARE_GRAPH = 8
"""Capturing takes as long as several steps as written."""


class BatchSource(Protocol):
    """Gives each step its batch."""

    def items(self, plan: EpochPlan, shapes: Sequence[Shape] = ()) -> Iterator[Item]:
        """One item for each step, in order; for steps that are captured, of these shapes."""
        ...

    def batch(self, item: Item, pairs: int) -> Batch:
        """The batch of an item."""
        ...

    def allocate(self, item: Item) -> Buffers:
        """New buffers that hold what this item needs."""
        ...

    def fill(self, buffers: Buffers, item: Item) -> None:
        """Copy what another item needs into the buffers."""
        ...

    def batch_in(self, buffers: Buffers, pairs: int) -> Batch:
        """The batch that buffers hold; the operations that make it may be captured."""
        ...


def source_for(train: DomainDataset, device: torch.device, shapes: Shapes | None = None) -> BatchSource:
    """The source of batches on a device, from wherever the data are.

    - ``shapes``: Of the batches, where steps are captured.
    """
    if device.type == "cuda" and train.device.type != "cuda":
        return StreamedSource(train, device)
    return PaddedSource(train, shapes) if shapes is not None and shapes.ragged else ResidentSource(train)


class ResidentSource:
    """The data are on the device of the steps: an item is a step's row indices, and the rows are gathered there."""

    def __init__(self, train: DomainDataset) -> None:
        self.train = train

    def items(self, plan: EpochPlan, shapes: Sequence[Shape] = ()) -> Iterator[Tensor]:
        for indices, _ in plan.to(self.train.device):
            yield indices

    def batch(self, item: Tensor, pairs: int) -> Batch:
        return self.train.take(item, pairs)

    def allocate(self, item: Tensor) -> Tensor:
        return item.clone()

    def fill(self, buffers: Tensor, item: Tensor) -> None:
        buffers.copy_(item)

    def batch_in(self, buffers: Tensor, pairs: int) -> Batch:
        return self.batch(buffers, pairs)


class _WholeBatches(ABC):
    """Buffers of sources that make batches ahead of their steps: a captured step reads a copy of its batch."""

    @abstractmethod
    def batch(self, item: Item, pairs: int) -> Batch:
        """The batch of an item of a plan."""

    def allocate(self, item: Item) -> Batch:
        batch = self.batch(item, 0)
        columns = {name: _cloned(column) for name, column in batch.inputs.items()}
        return replace(batch, inputs=columns, targets=batch.targets.clone(), domains=batch.domains.clone())

    def fill(self, buffers: Batch, item: Item) -> None:
        alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, tensor in zip(_tensors(buffers), _tensors(self.batch(item, 0)), strict=True):
            to, of = alike.setdefault(buffer.dtype, ([], []))
            to.append(buffer)
            of.append(tensor)
        for to, of in alike.values():
            torch._foreach_copy_(to, of)

    def batch_in(self, buffers: Batch, pairs: int) -> Batch:
        return replace(buffers, pairs=pairs)


class PaddedSource(_WholeBatches):
    """The data are on the device and have rows of any length: batches are padded to the capacities of their shape.

    They are gathered for many steps at once. A gather is over a hundred kernels, most of them too small to take the
    time of a launch: within each step they were a fifth of the drugs task's kernels.

    - ``train``: All of it, without a selection of rows.
    """

    def __init__(self, train: DomainDataset, shapes: Shapes) -> None:
        self.train, self.shapes = train, shapes

    def items(self, plan: EpochPlan, shapes: Sequence[Shape] = ()) -> Iterator[Batch]:
        steps = [indices for indices, _ in plan.to(self.train.device)]
        for start, stop in self._windows(shapes):
            window = range(start, stop)
            batches: dict[int, Batch] = {}
            for shape in dict.fromkeys(shapes[start:stop]):
                alike = [step for step in window if shapes[step] == shape]
                batches.update(zip(alike, self.gather([steps[step] for step in alike], shape), strict=True))
            yield from (batches.pop(step) for step in window)

    def batch(self, item: Batch, pairs: int) -> Batch:
        return item

    def gather(self, steps: list[Tensor], shape: Shape) -> list[Batch]:
        """The batches of steps of one shape."""
        train, capacities, indices = self.train, self.shapes.capacities[shape], torch.stack(steps)
        columns: dict[str, Sequence[Column]] = {
            name: column.take_padded(indices, capacities[name])
            if isinstance(column, Ragged)
            else column[indices].unbind()
            for name, column in train.columns.items()
        }
        parts = zip(train.targets[indices], train.domains[indices], *columns.values(), strict=True)
        return [
            Batch(dict(zip(columns, inputs, strict=True)), targets, domains, shape.pairs)
            for targets, domains, *inputs in parts
        ]

    def _windows(self, shapes: Sequence[Shape]) -> Iterator[tuple[int, int]]:
        """Stretches of steps that are gathered at once: from one step to before another."""
        start, items = 0, 0
        for step, shape in enumerate(shapes):
            size = max(capacity.inner or capacity.items for capacity in self.shapes.capacities[shape].values())
            if items and items + size > _ITEMS_AT_ONCE:
                yield start, step
                start, items = step, 0
            items += size
        if shapes:
            yield start, len(shapes)


class StreamedSource(_WholeBatches):
    """The data stay on the host: batches are gathered into pinned memory and sent ahead while the GPU computes."""

    def __init__(self, train: DomainDataset, device: torch.device) -> None:
        self.train, self.device = train, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def items(self, plan: EpochPlan, shapes: Sequence[Shape] = ()) -> Iterator[Future[tuple[Batch, Any]]]:
        with ThreadPoolExecutor(_WORKERS) as workers:
            waiting: deque[Future[tuple[Batch, Any]]] = deque()
            for indices, pairs in plan:
                waiting.append(workers.submit(self._send, indices, pairs))
                if len(waiting) > _PREFETCHED:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()

    def batch(self, item: Future[tuple[Batch, Any]], pairs: int) -> Batch:
        batch, arrived = item.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in _tensors(batch):
            tensor.record_stream(current)
        return batch

    def _send(self, indices: Tensor, pairs: int) -> tuple[Batch, Any]:
        """The batch on its way to the device, and the event of its arrival."""
        train = self.train
        stored = indices if train.rows is None else train.rows[indices]
        with torch.cuda.stream(self._stream):
            sent = Batch(
                {name: _send_rows(column, stored, self.device) for name, column in train.columns.items()},
                _dense(_send_rows(train.targets, indices, self.device)),
                _dense(_send_rows(train.domains, indices, self.device)),
                pairs,
            )
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return sent, arrived


def _send_rows(column: Column, rows: Tensor, device: torch.device) -> Column:
    """Send rows of a column to a device, gathered straight into pinned memory where the column is dense."""
    if isinstance(column, Ragged) or not column.is_contiguous():
        return _send(take(column, rows), device)
    gathered = pinned(len(rows), column)
    torch.index_select(column, 0, rows, out=gathered)
    return gathered.to(device, non_blocking=True)


def _send(column: Column, device: torch.device) -> Column:
    *levels, items = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors_of(column))
    return nest(levels, items)


def pinned(rows: int, column: Tensor) -> Tensor:
    """Pinned memory for so many rows of a column."""
    return torch.empty(rows, *column.shape[1:], dtype=column.dtype, pin_memory=True)


def _cloned(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(_cloned(column.values), column.offsets.clone(), column.longest)
    return column.clone()


def _dense(column: Column) -> Tensor:
    assert isinstance(column, Tensor)
    return column


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (batch.targets, batch.domains)
    for column in batch.inputs.values():
        yield from tensors_of(column)


def lengths_of(dataset: DomainDataset) -> Lengths | None:
    """How long each sample is, by its longest ragged column; ``None`` where all columns are dense."""
    stored = [column.lengths.cpu().numpy() for column in dataset.columns.values() if isinstance(column, Ragged)]
    if not stored:
        return None
    longest: Lengths = np.maximum.reduce(stored)
    return longest if dataset.rows is None else longest[dataset.rows.cpu().numpy()]


def crops_of(dataset: DomainDataset, backbone: Backbone) -> Crops | None:
    """How a network that reads samples in order is shown them in training; ``None`` for every other."""
    if backbone.crop is None:
        return None
    return Crops(_dense(dataset.column(ORDER)).cpu().numpy(), backbone.crop)


class CapacityTable:
    """What capacities the steps of a plan need, from the lengths of a dataset's ragged rows.

    - ``dataset``: All of it, without a selection of rows.
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

    def of_plan(self, plan: EpochPlan) -> list[Capacities]:
        """The least that each step needs, its lengths rounded up to a grid."""
        rows, starts = plan.indices.cpu().numpy(), np.array(plan.bounds[:-1])
        needs: list[Capacities] = [{} for _ in plan.pairs]
        for name, outer in self._outer.items():
            longest = np.maximum.reduceat(outer[rows], starts)
            items = np.add.reduceat(outer[rows], starts) + 1
            inner = np.add.reduceat(self._inner[name][rows], starts) if name in self._inner else None
            for step, need in enumerate(needs):
                on_grid = next((size for size in _GRID if size >= longest[step]), int(longest[step]))
                inner_items = None if inner is None else max(1, int(inner[step]))
                need[name] = Capacity(on_grid, int(items[step]), inner_items)
        return needs


def join_capacities(first: Capacities, second: Capacities) -> Capacities:
    """Enough for both."""
    return {
        name: Capacity(
            max(capacity.longest, second[name].longest),
            max(capacity.items, second[name].items),
            None if capacity.inner is None else max(capacity.inner, second[name].inner or 1),
        )
        for name, capacity in first.items()
    }


def with_headroom(capacities: Capacities, steps: int) -> Capacities:
    """More than so many steps need, rounded up: the steps of the next epoch are of about this size, not exactly.

    A twentieth more; where there were few steps, more again, since the largest of few says less about the next.
    """
    share = max(_HEADROOM, 1 / (2 + steps))
    return {
        name: Capacity(
            capacity.longest,
            _enlarged(capacity.items, share),
            None if capacity.inner is None else _enlarged(capacity.inner, share),
        )
        for name, capacity in capacities.items()
    }


def suffices(capacities: Capacities, need: Capacities) -> bool:
    """Whether a step that needs so much fits in these capacities."""
    return join_capacities(capacities, need) == capacities


def _enlarged(count: int, share: float) -> int:
    return math.ceil(count * (1 + share) / _MULTIPLE) * _MULTIPLE


class Shape(NamedTuple):
    """What a graph is captured for: rows, how many pairs of them, and the length that ragged rows are padded to."""

    rows: int
    pairs: int
    longest: int

    @property
    def of_rows(self) -> tuple[int, int]:
        """The part of it that compiled code depends on."""
        return self.rows, self.pairs


class Shapes:
    """The batch shapes of a training, the capacities they need, and when a graph of one pays.

    - ``train``: All of it, without a selection of rows.
    - ``ragged``: Whether any rows differ in length.
    - ``capacities``: Enough for every step of a shape, of this epoch and those before it.
    - ``outgrown``: Shapes whose capacities had to grow with the last epoch.
    """

    def __init__(self, train: DomainDataset) -> None:
        self.ragged = bool(_ragged(train))
        self._table = CapacityTable(train)
        self.capacities: dict[Shape, Capacities] = {}
        self.outgrown: set[Shape] = set()
        self._in_epoch: Counter[Shape] = Counter()
        self._of_rows_in_epoch: Counter[tuple[int, int]] = Counter()
        self._seen: Counter[Shape] = Counter()
        self._with_graph: set[Shape] = set()

    def enter(self, plan: EpochPlan) -> list[Shape]:
        """The shapes of an epoch's steps; from now on their capacities suffice for them."""
        needs = self._table.of_plan(plan)
        shapes = [_shape(plan, step, need) for step, need in enumerate(needs)]
        self._in_epoch = Counter(shapes)
        self._of_rows_in_epoch = Counter(shape.of_rows for shape in shapes)
        self.outgrown = set()
        of_shapes: dict[Shape, Capacities] = {}
        for shape, need in zip(shapes, needs, strict=True):
            of_shapes[shape] = join_capacities(of_shapes[shape], need) if shape in of_shapes else need
        for shape, need in of_shapes.items():
            self._grow(shape, need)
        return shapes

    def worth_compiling(self, shape: Shape) -> bool:
        """Whether it is one of those that an epoch is made of, not one of the smaller ones at its end."""
        return self._of_rows_in_epoch[shape.of_rows] >= _STEPS_OF_A_COMMON_SHAPE

    def due(self, shape: Shape, compiled: bool) -> bool:
        """Whether a step of a shape without a graph is to be captured; to be asked once for each such step.

        What a step needs must be set up before it is captured: by three steps the first time, and the first time of
        every compiled kind, else by one. A graph of a rare length must have come up several times to pay.
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

    def _grow(self, shape: Shape, need: Capacities) -> None:
        if shape not in self.capacities:
            self.capacities[shape] = with_headroom(need, self._in_epoch[shape])
        elif not suffices(self.capacities[shape], need):
            joined = join_capacities(self.capacities[shape], need)
            self.capacities[shape] = with_headroom(joined, self._in_epoch[shape])
            self.outgrown.add(shape)


def has_fixed_shapes(backbone: Backbone, train: DomainDataset, device: torch.device) -> bool:
    """Whether all batches can have one of a few shapes: rows differ in length nowhere, or can be padded.

    Rows can be padded where all of them are on the device and the backbone can tell padding from data.
    """
    if not backbone.fixed_shapes:
        return False
    ragged = _ragged(train)
    can_be_padded = backbone.takes_padded and train.rows is None and all(len(column.values) for column in ragged)
    return not ragged or (can_be_padded and train.device.type == device.type)


def _ragged(train: DomainDataset) -> list[Ragged]:
    return [column for column in train.columns.values() if isinstance(column, Ragged)]


def _shape(plan: EpochPlan, step: int, need: Capacities) -> Shape:
    rows = plan.bounds[step + 1] - plan.bounds[step]
    return Shape(rows, plan.pairs[step], max((capacity.longest for capacity in need.values()), default=0))
