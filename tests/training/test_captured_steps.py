"""Captured steps learn what steps as written learn, wherever the data are; seen here without a GPU.

A step that cannot be captured after all is done as written, and training says where and why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manydg.algorithms import ALGORITHMS, Algorithm, Optimizers, build_algorithm
from manydg.algorithms.base import Base
from manydg.backbones import Backbone, build_backbone
from manydg.backbones._sequences import SequenceBackbone
from manydg.data.columns import Ragged
from manydg.data.context import add_order
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.sampling import plan_epoch
from manydg.data.timeline import SEQUENCES, SequenceOptions
from manydg.errors import ManyDGWarning
from manydg.targets import target_of
from manydg.training.execution.steps import (
    BatchSource,
    CapturedSteps,
    PaddedSource,
    PlainSteps,
    ResidentSource,
    Shapes,
    Steps,
    StreamedSource,
    crops_of,
    has_fixed_shapes,
    lengths_of,
)

CPU = torch.device("cpu")
STATIC = [
    name
    for name, kind in ((name, ALGORITHMS.get(name)) for name in ALGORITHMS.names())
    if kind.static_step and kind.sampling != "whole"
]
EPOCHS, BATCH, LR = 4, 12, 1e-3
SAYS = r"run as written, which is slower: .*test_captured_steps\.py:\d+\); say execution plain, or static_step = False"


def table() -> DomainDataset:
    rng = np.random.default_rng(0)
    return from_arrays(rng.normal(size=(100, 5)).astype(np.float32), np.arange(100) % 3, np.arange(100) // 7)


def model(name: str, backbone: str, data: DomainDataset) -> Algorithm:
    torch.manual_seed(0)
    if backbone in SEQUENCES:
        inner = build_backbone("mlp", InputSchema.of(table()), {"dropout": 0.0})
        options = SequenceOptions(backbone, crop=2, width=8, layers=2, dropout=0.0)
        network: Backbone = SequenceBackbone(inner, options)
        assert has_fixed_shapes(network, data, CPU)
    else:
        network = build_backbone(backbone, InputSchema.of(data), {"dropout": 0.0})
    if reason := ALGORITHMS.get(name).refuses(target_of(data.target), network):
        pytest.skip(reason)
    network.fit_inputs(data)
    return build_algorithm(name, network, target_of(data.target), data.n_patients).train()


def train(algorithm: Algorithm, data: DomainDataset, steps: Steps) -> list[float]:
    """All loss terms of some epochs."""
    found: list[float] = []
    for epoch in range(EPOCHS):
        torch.manual_seed(epoch)
        crops = crops_of(data, algorithm.backbone)
        for step in steps.run(plan_epoch(algorithm.sampling, data.domains, BATCH, 0, epoch, lengths_of(data), crops)):
            algorithm.progress.fill_(epoch / EPOCHS)
            found += step().values.tolist()
    return found


def changing(algorithm: Algorithm, optimizers: Optimizers) -> Iterator[Tensor]:
    yield from algorithm.parameters()
    yield from algorithm.buffers()
    for optimizer in optimizers.values():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def both(
    graphs_on_a_cpu: Any, name: str, backbone: str, data: DomainDataset, source: Callable[[Shapes], BatchSource]
) -> tuple[list[float], list[float], dict[str, Any], dict[str, Any]]:
    """Losses of training as written and of captured training, then their weights."""
    written, captured = model(name, backbone, data), model(name, backbone, data)
    expected = train(written, data, PlainSteps(written, ResidentSource(data), written.optimizers(LR, 0.0)))
    optimizers = captured.optimizers(LR, 0.0)
    graph = graphs_on_a_cpu(lambda: changing(captured, optimizers))
    shapes = Shapes(data)
    steps = CapturedSteps(captured, source(shapes), shapes, optimizers)
    found = train(captured, data, steps)
    assert graph.replays > EPOCHS * len(data) / BATCH / 4
    return expected, found, written.state_dict(), captured.state_dict()


@pytest.mark.parametrize(("name", "reader"), [("base", "conv"), ("manydg", "transformer")])
def test_captured_steps_of_sequences_learn_what_steps_as_written_learn(
    name: str, reader: str, graphs_on_a_cpu: Any
) -> None:
    timed = dataclasses.replace(table(), times=torch.arange(100, dtype=torch.float64))
    data = add_order(timed, SequenceOptions(reader))
    expected, found, weights, others = both(graphs_on_a_cpu, name, reader, data, lambda _: ResidentSource(data))
    assert_same(expected, found, weights, others)


@pytest.mark.parametrize("name", STATIC)
def test_captured_steps_learn_what_steps_as_written_learn(name: str, graphs_on_a_cpu: Any) -> None:
    data = table()
    expected, found, weights, others = both(graphs_on_a_cpu, name, "mlp", data, lambda _: ResidentSource(data))
    assert_same(expected, found, weights, others)


def test_batches_sent_from_the_host_are_captured_too(graphs_on_a_cpu: Any) -> None:
    data = table()
    assert_same(*both(graphs_on_a_cpu, "manydg", "mlp", data, lambda _: StreamedSource(data, CPU)))


@pytest.mark.parametrize("ragged", [False, True])
def test_batches_sent_from_the_host_are_those_of_the_plan_in_order(
    ragged: bool, visits_of: Callable[..., DomainDataset], graphs_on_a_cpu: Any
) -> None:
    graphs_on_a_cpu(list)
    data = (visits_of(100, 4, 7) if ragged else table()).select(torch.arange(90).flip(0))
    plan = plan_epoch("pairs", data.domains, BATCH, 0, 1)
    source = StreamedSource(data, CPU)
    for item, (indices, pairs) in zip(source.items(plan), plan, strict=True):
        sent, expected = source.batch(item, pairs), data.take(indices, pairs)
        assert sent.pairs == pairs
        for found, wanted in ((sent.targets, expected.targets), (sent.domains, expected.domains)):
            assert torch.equal(found, wanted)
        for name, column in expected.inputs.items():
            found = sent.inputs[name]
            same = found.to_rows() == column.to_rows() if isinstance(column, Ragged) else torch.equal(found, column)
            assert same


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 24])
def test_padded_batches_are_those_of_the_plan_in_order_however_many_are_gathered_at_once(
    at_once: int, visits_of: Callable[..., DomainDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manydg.training.execution.steps._ITEMS_AT_ONCE", at_once)
    data = visits_of(300, 6, 7)
    plan, shapes = plan_epoch("pairs", data.domains, BATCH, 0, 1, lengths_of(data)), Shapes(data)
    source, entered = PaddedSource(data, shapes), shapes.enter(plan)
    windows = len(list(source._windows(entered)))
    assert {1: windows == len(plan), 3000: 1 < windows < len(plan), 1 << 24: windows == 1}[at_once]
    for number, (item, shape) in enumerate(zip(source.items(plan, entered), entered, strict=True)):
        indices, pairs = plan.indices[plan.bounds[number] : plan.bounds[number + 1]], plan.pairs[number]
        found, expected = source.batch(item, pairs), data.take(indices, pairs)
        assert found.pairs == pairs
        assert torch.equal(found.targets, expected.targets)
        assert torch.equal(found.domains, expected.domains)
        for name, column in expected.inputs.items():
            padded, capacity = found.inputs[name], shapes.capacities[shape][name]
            assert torch.equal(padded.offsets, column.offsets)
            assert (padded.longest, len(padded.values)) == (capacity.longest, capacity.items)
            assert len(padded.values.values) == capacity.inner
            assert padded.to_rows() == column.to_rows()


@pytest.mark.parametrize("name", STATIC)
def test_captured_steps_on_rows_of_any_length_have_the_same_losses(
    name: str, visits_of: Callable[..., DomainDataset], graphs_on_a_cpu: Any
) -> None:
    """Rows that are filled up are summed up in another order, which Adam makes much of where a gradient is nearly 0."""
    data = visits_of(100, 4, 7)
    expected, found, _, _ = both(graphs_on_a_cpu, name, "gamenet", data, lambda shapes: PaddedSource(data, shapes))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def assert_same(expected: list[float], found: list[float], weights: dict[str, Any], others: dict[str, Any]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-5, atol=1e-6)


class Looking(Base):
    """Looks at its loss on the host, which a captured step may not, and does not say so."""

    capturing = False

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.capturing:
            raise RuntimeError("not permitted while capturing")
        assert math.isfinite(terms["supervised"].item())
        return terms


def looking(dropout: float, device: torch.device = CPU) -> Looking:
    data = table()
    torch.manual_seed(0)
    backbone = build_backbone("mlp", InputSchema.of(data), {"dropout": dropout})
    backbone.fit_inputs(data)
    return Looking(backbone, target_of(data.target), data.n_patients).to(device).train()


def test_training_goes_on_as_written(graphs_on_a_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data, written, refused = table(), looking(0.0), looking(0.0)
    expected = train(written, data, PlainSteps(written, ResidentSource(data), written.optimizers(LR, 0.0)))
    optimizers = refused.optimizers(LR, 0.0)
    graphs_on_a_cpu(lambda: changing(refused, optimizers))
    within = torch.cuda.graph

    def capture(*arguments: Any, **options: Any) -> Any:
        refused.capturing = True
        return within(*arguments, **options)

    def leave(*_: object) -> None:
        refused.capturing = False

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr("manydg.training.execution.steps._leave_failed_capture", leave)
    with pytest.warns(ManyDGWarning, match=SAYS) as warned:
        found = train(refused, data, CapturedSteps(refused, ResidentSource(data), Shapes(data), optimizers))
    assert found == expected
    assert len(warned) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["on the device", "on the host"])
def test_training_on_a_gpu_goes_on_as_written(where: str) -> None:
    """Random numbers are drawn again, memory that was sent to is used again, and so is the stream from before."""
    device = torch.device("cuda")
    data, algorithm = table(), looking(0.2, device)
    source = StreamedSource(data, device) if where == "on the host" else ResidentSource(data.to(device))
    before = torch.cuda.current_stream()
    steps = CapturedSteps(algorithm, source, Shapes(data), algorithm.optimizers(LR, 0.0))
    with pytest.warns(ManyDGWarning, match=SAYS):
        first = train(algorithm, data, steps)
    assert torch.cuda.current_stream() == before
    held = []
    for _ in range(20):
        again = train(algorithm, data, steps)
        held.append(torch.cuda.memory_reserved())
    assert len(again) == EPOCHS * math.ceil(len(data) / BATCH)
    assert again[-1] < first[0]
    assert held[-1] == held[4]
    # A later training is captured as ever.
    later = looking(0.2, device)
    later.losses = super(Looking, later).losses  # type: ignore[method-assign]
    steps = CapturedSteps(later, source, Shapes(data), later.optimizers(LR, 0.0))
    train(later, data, steps)
    assert steps._graphs
