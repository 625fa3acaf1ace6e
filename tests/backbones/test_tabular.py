"""The network for tables: bins of training patients, gaps, constants, outliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from manydg import backbones
from manydg.backbones import Standardize, build_backbone
from manydg.backbones.tabular import PiecewiseLinear
from manydg.data.columns import Ragged
from manydg.data.dataset import TRUST, ColumnSchema, InputSchema, from_arrays
from manydg.errors import ConfigError, ManyDGWarning

NAN = float("nan")


def fitted(values: list[list[float]], bins: int) -> PiecewiseLinear:
    encoding = PiecewiseLinear(len(values[0]), bins)
    encoding.fit([torch.tensor(values)])
    return encoding


def test_bins_below_a_value_are_full_and_its_own_holds_the_fraction() -> None:
    encoding = fitted([[float(value)] for value in range(101)], bins=4)
    found = encoding(torch.tensor([[0.0], [25.0], [60.0], [100.0]])).squeeze(1)
    torch.testing.assert_close(
        found, torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0.4, 0], [1, 1, 1, 1]]), rtol=0, atol=1e-6
    )


def test_values_beyond_the_training_range_count_as_its_ends() -> None:
    encoding = fitted([[float(value)] for value in range(101)], bins=4)
    assert encoding(torch.tensor([[-1e9]])).sum() == 0
    assert encoding(torch.tensor([[1e9]])).sum() == 4


def test_a_feature_of_few_values_has_a_bin_between_each_two() -> None:
    encoding = fitted([[0.0], [0.0], [0.0], [0.0], [1.0], [5.0]], bins=8)
    assert encoding(torch.tensor([[0.0], [1.0], [3.0], [5.0]])).squeeze(1)[:, :2].tolist() == [
        [0, 0],
        [1, 0],
        [1, 0.5],
        [1, 1],
    ]
    assert float(encoding(torch.tensor([[5.0]])).sum()) == 2


def test_a_value_that_is_mostly_zero_keeps_its_rare_part() -> None:
    values = [[0.0]] * 900 + [[float(value)] for value in range(1, 101)]
    encoding = fitted(values, bins=24)
    assert float(encoding(torch.tensor([[0.0]])).sum()) == 0
    low, high = encoding(torch.tensor([[20.0], [90.0]])).sum(dim=(1, 2)).tolist()
    assert 0 < low < high


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.integers(1, 9))
@example([0.0, 1.401298464324817e-45], 1)
def test_encodings_rise_with_the_value_and_lie_between_0_and_1(values: list[float], bins: int) -> None:
    encoding = PiecewiseLinear(1, bins)
    if len(set(values)) == 1:
        with pytest.warns(ManyDGWarning, match="constant"):
            encoding.fit([torch.tensor(values).unsqueeze(1)])
    else:
        encoding.fit([torch.tensor(values).unsqueeze(1)])
    found = encoding(torch.tensor(sorted(values)).unsqueeze(1)).squeeze(1)
    assert bool(((found >= 0) & (found <= 1)).all())
    assert bool((found.diff(dim=0) >= 0).all())


def test_constant_and_empty_features_are_reported_and_harmless() -> None:
    values = np.array([[3.0, NAN, row, NAN if row % 2 else 1.0] for row in range(12)])
    data = from_arrays(values, np.arange(12) % 2, np.arange(12), missing=True)
    backbone = build_backbone("tabular", InputSchema.of(data)).eval()
    with (
        pytest.warns(ManyDGWarning, match=r"2 input features are constant.*\[0, 3\]"),
        pytest.warns(ManyDGWarning, match=r"1 of 4 columns have no value for any training patient .*: x\[1\]"),
    ):
        backbone.fit_inputs(data)
    first = backbone({"x": torch.tensor([[3.0, NAN, 5.0, 1.0]])})
    assert torch.equal(first, backbone({"x": torch.tensor([[77.0, NAN, 5.0, 1.0]])}))
    assert not torch.allclose(first, backbone({"x": torch.tensor([[3.0, NAN, 5.0, NAN]])}))


def test_bins_come_from_the_patients_given_alone() -> None:
    values = np.concatenate([np.linspace(0, 1, 50), np.linspace(1000, 2000, 50)])[:, None]
    data = from_arrays(values, np.arange(100) % 2, np.arange(100) // 50)
    backbone = build_backbone("tabular", InputSchema.of(data))
    backbone.fit_inputs(data.subset(["0"]))
    assert float(backbone.state_dict()["encoding.start"].max()) < 1


def test_units_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=(60, 3)).astype(np.float32)
    outputs = []
    for unit in (1.0, 1024.0):
        data = from_arrays(values * np.float32(unit), np.arange(60) % 2, np.arange(60))
        torch.manual_seed(0)
        backbone = build_backbone("tabular", InputSchema.of(data)).eval()
        backbone.fit_inputs(data)
        outputs.append(backbone({"x": torch.from_numpy(values * np.float32(unit))}))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-4)


def test_ragged_inputs_and_impossible_options_are_refused() -> None:
    data = from_arrays({"codes": Ragged.from_rows([[1], [2, 3]])}, [0, 1], [0, 1])
    with pytest.raises(ConfigError, match="dense"):
        build_backbone("tabular", InputSchema.of(data))
    table = from_arrays(np.arange(4.0)[:, None], [0, 1, 0, 1], [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="bin"):
        build_backbone("tabular", InputSchema.of(table), {"bins": 0})


def test_a_rule_that_is_not_monotonic_is_learned_with_gaps_in_the_table() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(sigma=2, size=(3000, 4))
    label = ((values[:, 0] > 0.3) & (values[:, 0] < 3)).astype(int)
    values[rng.random(values.shape) < 0.1] = np.nan
    data = from_arrays(values, label, np.arange(3000) // 10, missing=True)
    backbone = build_backbone("tabular", InputSchema.of(data), {"hidden": 32, "width": 16})
    backbone.fit_inputs(data)
    head = torch.nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=5e-3)
    for step in range(60):
        batch = data.take((torch.arange(256) + 256 * step) % 2500)
        loss = torch.nn.functional.cross_entropy(head(backbone(batch.inputs)), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test = data.take(torch.arange(2500, 3000))
    with torch.no_grad():
        scores = head(backbone.eval()(test.inputs)).softmax(dim=-1)[:, 1]
    assert roc_auc_score(test.targets, scores) > 0.88


def test_a_frequent_value_takes_one_edge_and_leaves_the_others_their_bins() -> None:
    rng = np.random.default_rng(0)
    changes = rng.exponential(size=4000) + 0.1
    # Nine in ten are 0: a change that seldom happens, and whose size matters when it does.
    values = np.where(rng.random(4000) < 0.9, 0.0, changes).astype(np.float32)
    encoding = PiecewiseLinear(1, 8)
    encoding.fit([torch.from_numpy(values)[:, None]])
    some = values[values > 0]
    filled = encoding(torch.from_numpy(np.quantile(some, [0.2, 0.4, 0.6, 0.8]))[:, None].float()).sum(dim=(1, 2))
    # Quantiles of the changes: each fifth of them is 7/5 bins further up, after the bin from 0 to the least change.
    np.testing.assert_allclose(filled.numpy(), 1 + np.array([0.2, 0.4, 0.6, 0.8]) * 7, atol=0.15)
    assert encoding(torch.zeros(1, 1)).sum() == 0


@pytest.mark.parametrize("name", ["mlp", "tabular"])
def test_what_is_learned_of_a_dataset_in_pieces_is_that_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    tables = {"a": rng.lognormal(size=(90, 2, 3)) + 50, "b": rng.normal(size=(90, 4)), "c": rng.integers(0, 3, (90, 1))}
    data = from_arrays(tables, np.arange(90) % 2, np.arange(90) // 3).select(torch.arange(5, 80))
    whole = np.concatenate([table[5:80].reshape(75, -1) for table in tables.values()], axis=1)
    states = []
    for values in (2**22, 7):
        monkeypatch.setattr(backbones, "_VALUES_OF_A_PIECE", values)
        monkeypatch.setattr(backbones, "_VALUES_OF_A_BLOCK", 30 * values)
        backbone = build_backbone(name, InputSchema.of(data))
        backbone.fit_inputs(data)
        states.append({key: buffer for key, buffer in backbone.named_buffers() if "network" not in key})
    for key, buffer in states[0].items():
        assert torch.equal(states[1][key], buffer)
    if name == "mlp":
        np.testing.assert_allclose(states[1]["scale.mean"], whole.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(states[1]["scale.scale"], 1 / whole.std(axis=0), rtol=1e-6)
    else:
        np.testing.assert_allclose(states[1]["encoding.start"][:, 0], whole.min(axis=0), rtol=1e-6)


def test_scaling_passes_over_gaps_and_keeps_its_precision_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(1000, 2)) * [1.0, 0.01] + [0.0, 1000.0]).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    scale = Standardize(2)
    scale.fit(torch.from_numpy(values).split(37))
    np.testing.assert_allclose(scale.mean, np.nanmean(values.astype(np.float64), axis=0), rtol=1e-6)
    np.testing.assert_allclose(scale.scale, 1 / np.nanstd(values.astype(np.float64), axis=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {"hidden": 7, "width": 6}), ("tabular", {"bins": 3, "width": 6})]
)
def test_the_network_for_samples_alone_has_no_inputs_for_their_context(name: str, options: dict[str, Any]) -> None:
    columns = {"x": ColumnSchema("float32", (5,)), "context": ColumnSchema("float32", (20,))}
    both = build_backbone(name, InputSchema(columns | {TRUST: ColumnSchema("float32", (1,))}), options)
    alone = both.for_samples_alone()
    plain = build_backbone(name, InputSchema({"x": columns["x"]}), options)
    shapes = {key: value.shape for key, value in alone.state_dict().items()}
    assert shapes == {key: value.shape for key, value in plain.state_dict().items()}
    assert not alone.with_context
