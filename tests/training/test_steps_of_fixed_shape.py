"""Batches of fixed shape, which a GPU can replay: the same features and gradients as batches of any shape.

That a step neither waits for the device nor copies from the host is checked without a GPU: tensors without values
(torch's meta device) cannot be looked at, and every operation that meets one of them and a tensor of the host is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manydg.algorithms import ALGORITHMS, build_algorithm
from manydg.backbones import BACKBONES, Backbone, build_backbone
from manydg.backbones._sequences import FixedLayout, Layout
from manydg.config import TrainingConfig
from manydg.data.columns import Capacity, Column, Ragged, offsets_from_lengths
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.errors import ConfigError
from manydg.targets import target_of
from manydg.training.execution.steps import (
    CapacityTable,
    join_capacities,
    lengths_of,
    not_compiled,
    suffices,
    with_headroom,
)
from manydg.training.fit import fit

ROWS = 30
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def nested(rng: np.random.Generator, lengths: list[int], codes: int, fewest: int = 0) -> list[list[list[int]]]:
    return [[rng.integers(1, codes, rng.integers(fewest, 4)).tolist() for _ in range(length)] for length in lengths]


def visits() -> DomainDataset:
    rng = np.random.default_rng(0)
    lengths = [1 + row % 5 for row in range(ROWS)]
    drugs = [f"drug{code}" for code in range(6)]
    inputs = {
        "diagnoses": Ragged.from_rows(nested(rng, lengths, 15, 1)),
        "procedures": Ragged.from_rows(nested(rng, lengths, 10)),
        "history_drugs": Ragged.from_rows(nested(rng, [length - 1 for length in lengths], 6)),
    }
    info = {
        "vocabularies": {"diagnoses": ["?"] * 15, "procedures": ["?"] * 10, "drugs": drugs},
        "settings": {"drug_interactions": [[0, 3]]},
    }
    targets = rng.integers(0, 2, (ROWS, 6))
    return from_arrays(inputs, targets, np.arange(ROWS) // 3, kind="multilabel", names=drugs, info=info)


def stays() -> DomainDataset:
    rng = np.random.default_rng(0)
    lengths = [0 if row == 4 else 1 + 5 * row % 9 for row in range(ROWS)]
    kinds = [rng.integers(0, 2, length).tolist() for length in lengths]
    codes = [[rng.integers(*((1, 8) if kind else (8, 14)), 3).tolist() for kind in row] for row in kinds]
    values = [[[float(rng.normal()) for _ in event] for event in row] for row in codes]
    inputs = {
        "event_kind": Ragged.from_rows(kinds),
        "event_codes": Ragged.from_rows(codes),
        "event_values": Ragged.from_rows(values, torch.float32),
        "static": rng.normal(size=(ROWS, 3)).astype(np.float32),
    }
    fields = [
        {"name": "name", "kind": 1, "start": 1, "stop": 5},
        {"name": "dose", "kind": 1, "start": 5, "stop": 8},
        {"name": "lab", "kind": 0, "start": 8, "stop": 14},
    ]
    info = {"vocabularies": {"events": ["?"] * 14}, "settings": {"event_kinds": ["lab", "drug"], "code_fields": fields}}
    return from_arrays(inputs, np.arange(ROWS) % 2, np.arange(ROWS) // 3, missing=True, info=info)


TASKS: dict[str, Callable[[], DomainDataset]] = {"gamenet": visits, "event-transformer": stays}


def padded(data: DomainDataset, rows: torch.Tensor, spare: int) -> dict[str, Column]:
    """The rows in memory that is larger than they need."""
    (need,) = CapacityTable(data).of_plan(EpochPlan(rows, (0, len(rows)), (0,)))
    larger = {
        n: Capacity(r.longest + 2, r.items + spare, None if r.inner is None else r.inner + spare)
        for n, r in need.items()
    }
    return {
        name: column.take_padded(rows[None], larger[name])[0] if isinstance(column, Ragged) else column[rows]
        for name, column in data.columns.items()
    }


def built(name: str, data: DomainDataset) -> Backbone:
    torch.manual_seed(0)
    backbone = build_backbone(name, InputSchema.of(data)).eval()
    backbone.fit_inputs(data)
    return backbone


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("spare", [0, 40])
def test_a_batch_of_fixed_shape_gives_the_same_features_and_gradients(name: str, spare: int) -> None:
    data = TASKS[name]()
    backbone = built(name, data)
    for rows in (torch.randperm(ROWS)[:11], torch.tensor([4, 0]), torch.arange(0, ROWS, 5)):
        found = []
        for inputs in (data.take(rows).inputs, padded(data, rows, spare)):
            backbone.zero_grad()
            features = backbone(inputs)
            (features * torch.linspace(-1, 1, features.numel()).reshape(features.shape)).sum().backward()
            found.append([features.detach()] + [p.grad.clone() for p in backbone.parameters() if p.grad is not None])
        assert len(found[0]) == len(found[1])
        for plain, fixed in zip(*found, strict=True):
            torch.testing.assert_close(fixed, plain, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_leftovers_behind_the_last_row_change_no_layout(lengths: list[int], spare: int) -> None:
    offsets, steps = offsets_from_lengths(torch.tensor(lengths)), sum(lengths)
    vectors = torch.randn(steps + spare, 3)
    plain, fixed = Layout(offsets), FixedLayout(offsets, max(lengths) + 1, steps + spare)
    torch.testing.assert_close(fixed.total(vectors), plain.total(vectors[:steps]))
    torch.testing.assert_close(fixed.last(vectors), plain.last(vectors[:steps]))
    torch.testing.assert_close(fixed.spread(vectors)[:, : plain.longest], plain.spread(vectors[:steps]))
    assert not fixed.spread(vectors)[:, plain.longest :].any()
    torch.testing.assert_close(fixed.softmax(vectors[:, 0])[:steps], plain.softmax(vectors[:steps, 0]))
    network = torch.nn.GRU(3, 4, batch_first=True)
    for direction in ("run", "run_backwards"):
        expected = getattr(plain, direction)(network, vectors[:steps])
        torch.testing.assert_close(getattr(fixed, direction)(network, vectors)[:steps], expected)


@pytest.mark.parametrize("name", TASKS)
def test_rooms_hold_every_step_of_a_plan(name: str) -> None:
    data = TASKS[name]()
    plan = plan_epoch("pairs", data.domains, 8, 0, 1, lengths_of(data))
    needs = CapacityTable(data).of_plan(plan)
    for (rows, pairs), need in zip(plan, needs, strict=True):
        plain, fixed = data.take(rows, pairs).inputs, padded(data, rows, 0)
        for column, room in need.items():
            exact, loose = plain[column], fixed[column]
            assert isinstance(exact, Ragged)
            assert isinstance(loose, Ragged)
            assert torch.equal(exact.offsets, loose.offsets)
            assert room.longest >= int(exact.lengths.max())
            assert room.items == len(exact.values) + 1
            assert Ragged(loose.values, exact.offsets).to_rows()[: len(rows)] == exact.to_rows()
    larger = with_headroom(join_capacities(needs[0], needs[1]), 2)
    assert suffices(larger, needs[0])
    assert suffices(larger, needs[1])
    assert not suffices(needs[0], larger)


def measurements() -> DomainDataset:
    rng = np.random.default_rng(0)
    return from_arrays(rng.normal(size=(ROWS, 5)), np.arange(ROWS) % 3, np.arange(ROWS) // 3)


def with_gaps() -> DomainDataset:
    rng = np.random.default_rng(0)
    values = np.where(rng.random((ROWS, 5)) < 0.2, np.nan, rng.normal(size=(ROWS, 5)))
    return from_arrays(values, np.arange(ROWS) % 2, np.arange(ROWS) // 3, missing=True)


def spectrograms() -> DomainDataset:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, 2, 129, 43)).astype(np.float32)
    return from_arrays({"spectrogram": values}, np.arange(ROWS) % 3, np.arange(ROWS) // 3)


class NothingFromTheHost(TorchDispatchMode):
    """Raises where an operation meets a tensor of the host and one of the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise AssertionError(f"{function} meets the host and the device: {[t.device.type for t in tensors]}")
        return found


CAPTURED: dict[str, Callable[[], DomainDataset]] = {
    **TASKS, "mlp": measurements, "tabular": with_gaps, "sleep-cnn": spectrograms,
}  # fmt: skip
STATIC = [
    name
    for name, kind in ((name, ALGORITHMS.get(name)) for name in ALGORITHMS.names())
    if kind.static_step and kind.sampling != "whole"
]


@pytest.mark.parametrize("backbone", CAPTURED)
@pytest.mark.parametrize("algorithm", STATIC)
def test_a_step_that_may_be_replayed_asks_the_device_nothing(algorithm: str, backbone: str) -> None:
    data = CAPTURED[backbone]()
    try:
        model = build_algorithm(algorithm, built(backbone, data), target_of(data.target), data.n_patients).train()
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    rows = torch.tensor([0, 3, 6, 9, 1, 4, 7, 10])
    (need,) = CapacityTable(data).of_plan(EpochPlan(rows, (0, len(rows)), (0,)))
    model, rows = model.to("meta"), rows.to("meta")
    there = {name: column.to("meta") for name, column in data.columns.items()}
    targets, domains = data.targets.to("meta"), data.domains.to("meta")
    with NothingFromTheHost():
        inputs = {
            name: column.take_padded(rows[None], need[name])[0] if isinstance(column, Ragged) else column[rows]
            for name, column in there.items()
        }
        batch = Batch(inputs, targets[rows], domains[rows], 4)
        terms = model.losses(batch)
        sum(terms.values()).backward()


def test_leftover_codes_are_spread_evenly_over_the_leftover_items() -> None:
    column = Ragged.from_rows([[[1, 2], [3]], [[4]], [[5, 6, 7]]])
    (taken,) = column.take_padded(torch.tensor([[1]]), Capacity(1, 5, 10))
    assert isinstance(taken.values, Ragged)
    assert taken.values.lengths.tolist() == [1, 2, 2, 2, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backbone", CAPTURED)
@pytest.mark.parametrize("algorithm", STATIC)
def test_replayed_steps_learn_what_steps_as_written_learn(algorithm: str, backbone: str) -> None:
    """With an evaluation after each epoch, which must leave alone what the captured steps work on."""
    data = CAPTURED[backbone]()
    train, val = data.select(np.tile(np.arange(24), 8)), data.select(np.arange(24, ROWS))
    options = {"dropout": 0.0} if "dropout" in inspect.signature(BACKBONES.get(backbone)).parameters else {}
    curves = []
    for execution in ("plain", "captured"):
        config = TrainingConfig(
            algorithm=algorithm, backbone=backbone, backbone_options=options, epochs=3, batch_size=6,
            precision="float32", execution=execution,
        )  # fmt: skip
        try:
            fitted = fit(config, train, val, torch.device("cuda"))
        except ConfigError as refusal:
            pytest.skip(str(refusal))
        assert fitted.speed.execution == execution
        curves.append([value for entry in fitted.history for value in entry.losses.values()])
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02, atol=1e-3)


def test_what_is_behind_a_ragged_backbone_is_compiled_once_for_batches_of_any_lengths() -> None:
    data = visits()
    model = build_algorithm("manydg", built("gamenet", data), target_of(data.target), data.n_patients)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    losses = torch.compile(model.losses, backend=backend, dynamic=False)
    for rows in ([0, 3, 6, 9, 1, 4, 7, 10], [12, 15, 18, 21, 13, 16, 19, 22]):
        batch = data.take(torch.tensor(rows), 4)
        with model.backbone.executed(caller=not_compiled(model.backbone.compute)):
            expected, found = model.losses(batch), losses(batch)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert len(graphs) == 1
    assert any("cosine_similarity" in name for name in called)
    assert not any("gru" in name.lower() or "embedding" in name for name in called)
