"""A network that reads samples in order: what reaches a sample's features, and what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from manydg.backbones import _sequences as sequences
from manydg.backbones import auto_backbone, build_backbone
from manydg.backbones._sequences import SequenceBackbone
from manydg.data.context import add_order
from manydg.data.dataset import ColumnSchema, DomainDataset, InputSchema
from manydg.data.timeline import DIRECTIONS, ORDER, PAUSE, SEQUENCES, SequenceOptions
from manydg.errors import ConfigError

LENGTHS = (9, 1, 230)


def network(kind: str, direction: str, dropout: float = 0.0) -> SequenceBackbone:
    torch.manual_seed(0)
    inner = build_backbone("mlp", InputSchema({"x": ColumnSchema("float32", (3,))}), {"hidden": 8, "width": 6})
    return SequenceBackbone(inner, SequenceOptions(kind, direction, width=8, layers=2, dropout=dropout)).eval()


def inputs() -> dict[str, torch.Tensor]:
    """Three sessions one after the other."""
    order = torch.cat([torch.arange(length) + 100 * number for number, length in enumerate(LENGTHS)])
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(len(order), 3, generator=draw), ORDER: order, PAUSE: torch.ones(len(order), 1)}


def changed(given: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    values = given["x"].clone()
    values[row] += 3.0
    return {**given, "x": values}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_sample_reaches_its_own_session_alone_and_causally_no_earlier_sample(kind: str, direction: str) -> None:
    model, given = network(kind, direction), inputs()
    row = LENGTHS[0] + LENGTHS[1] + 112
    with torch.no_grad():
        moved = (model(given) - model(changed(given, row))).abs().amax(dim=1) > 1e-6
    reached = torch.zeros_like(moved)
    reached[row if direction == "causal" else LENGTHS[0] + LENGTHS[1] :] = True
    assert torch.equal(moved & ~reached, torch.zeros_like(moved))
    near = slice(row if direction == "causal" else row - 2, row + 3)
    assert moved[near].all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_sample_that_overflows_reaches_no_other_session_and_causally_no_earlier_sample(
    kind: str, direction: str
) -> None:
    model, given = network(kind, direction), inputs()
    row = LENGTHS[0] + LENGTHS[1] + 112
    with torch.no_grad():
        before, huge = model(given), given["x"].clone()
        huge[row] = 3e38
        after = model({**given, "x": huge})
        apart = row if direction == "causal" else LENGTHS[0] + LENGTHS[1]
        assert torch.equal(after[:apart], before[:apart])
        alone = given["x"].clone()
        alone[LENGTHS[0]] = 3e38
        after = model({**given, "x": alone})
        others = torch.arange(sum(LENGTHS)) != LENGTHS[0]
        assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_sessions_give_the_same_features_together_and_one_at_a_time(kind: str, direction: str) -> None:
    model, given = network(kind, direction), inputs()
    with torch.no_grad():
        whole = model(given)
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        parts = [
            model({name: column[end - length : end] for name, column in given.items()})
            for length, end in zip(LENGTHS, ends, strict=True)
        ]
    assert whole.shape == (sum(LENGTHS), model.output_size)
    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_long_session_in_chunks_equals_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, given = network(kind, "offline"), inputs()
    with torch.no_grad():
        whole = model(given)
        monkeypatch.setattr(sequences, "_ROWS_AT_ONCE", 7)
        torch.testing.assert_close(model(given), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_the_pause_before_a_sample_counts(kind: str) -> None:
    model, given = network(kind, "causal"), inputs()
    with torch.no_grad():
        moved = model(given) - model({**given, PAUSE: 2 * given[PAUSE]})
    assert float(moved.abs().max()) > 1e-4


@pytest.mark.parametrize("kind", SEQUENCES)
def test_without_an_order_every_sample_is_read_alone(kind: str) -> None:
    model, given = network(kind, "offline"), inputs()
    zeros = {**given, ORDER: torch.zeros_like(given[ORDER])}
    with torch.no_grad():
        alone = torch.cat([model({name: column[row : row + 1] for name, column in zeros.items()}) for row in range(4)])
        torch.testing.assert_close(model(zeros)[:4], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_every_weight_learns(kind: str) -> None:
    model = network(kind, "offline").train()
    model(inputs()).square().sum().backward()
    still = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    # A bias before a batch norm has no effect.
    assert [name for name in still if "network" not in name or "samples" not in name] == []


@pytest.mark.parametrize("shape", ["gaps", "visits", "events", "seizure"])
def test_any_backbone_may_be_read_in_order(make: Callable[[str], DomainDataset], shape: str) -> None:
    given = make(shape)
    timed = dataclasses.replace(given, times=torch.arange(len(given), dtype=torch.float64))
    data, schema = add_order(timed, SequenceOptions("conv", layers=1)), InputSchema.of(given)
    inner = build_backbone(auto_backbone(schema), schema)
    model = SequenceBackbone(inner, SequenceOptions("conv", width=8, layers=1, dropout=0.0))
    model.fit_inputs(data)
    model.eval()
    inputs = data.take(torch.arange(len(data))).inputs
    with torch.no_grad():
        features = model(inputs)
        # Patients have two samples each: a sample reaches its neighbour and nobody else.
        first = model(data.take(torch.tensor([0, 1])).inputs)
    assert features.shape == (len(data), 8)
    torch.testing.assert_close(features[:2], first, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "value"), [("layers", 10**6), ("width", 10**9), ("crop", 1), ("dropout", 1.0)])
def test_impossible_sizes_are_refused_before_anything_is_built(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"the {name} of a sequence is"):
        SequenceOptions.from_mapping("conv", {name: value})
