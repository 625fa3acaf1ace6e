"""A network that reads samples in order: what reaches a sample's features, and what does not."""

from __future__ import annotations

import pytest
import torch

from manydg.backbones import _sequences as sequences
from manydg.backbones import build_backbone
from manydg.backbones._sequences import SequenceBackbone
from manydg.data.dataset import ColumnSchema, InputSchema
from manydg.data.timeline import DIRECTIONS, ORDER, PAUSE, SEQUENCES, SequenceOptions

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
