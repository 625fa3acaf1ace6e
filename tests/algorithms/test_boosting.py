"""Gradient boosting: its trees as tensors score exactly as scikit-learn does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sklearn.ensemble import HistGradientBoostingClassifier

from manydg.algorithms._forest import Forest, round_down
from manydg.algorithms.boosting import Boosting, BoostingSettings
from manydg.backbones import Backbone
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.errors import ConfigError
from manydg.targets import target_of

ROWS = 400
SETTINGS = BoostingSettings(rounds=25)
Array = npt.NDArray[Any]


class Unused(Backbone):
    output_size = 3


def inputs(seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    x[:, 3] = np.round(x[:, 3])
    x[rng.random(x.shape) < 0.15] = np.nan
    return x


def labels(x: Array, classes: int) -> Array:
    filled = np.nan_to_num(x, nan=1.5)
    score = filled[:, 0] + filled[:, 1] * filled[:, 3]
    return np.searchsorted(np.quantile(score, np.arange(1, classes) / classes), score)


def fitted(targets: Array, kind: str, x: Array | None = None, names: tuple[str, ...] | None = None) -> Boosting:
    data = from_arrays(
        inputs() if x is None else x, targets, np.arange(ROWS) % 20, kind=kind, names=names, missing=True
    )
    model = Boosting(Unused(), target_of(data.target), 20, SETTINGS)
    model.fit_whole(data, seed=3)
    return model


def reference(x: Array, y: Array, weights: Array | None = None) -> Any:
    model = HistGradientBoostingClassifier(max_iter=25, early_stopping=False, random_state=3)
    return model.fit(x, y, sample_weight=weights)


def scores(model: Boosting, x: Array) -> Array:
    return model.predict({"x": torch.from_numpy(x)}).numpy()


def test_classes_score_as_scikit_learn_does_missing_values_included() -> None:
    y, new = labels(inputs(), 4), inputs(1)
    raw = reference(inputs(), y).decision_function(new)
    np.testing.assert_allclose(scores(fitted(y, "classes"), new), raw, atol=1e-6)


def test_values_on_a_threshold_go_the_way_scikit_learn_sends_them() -> None:
    y, model = labels(inputs(), 2), fitted(labels(inputs(), 2), "binary")
    nodes = np.concatenate([t.nodes for rounds in reference(inputs(), y)._predictors for t in rounds])
    thresholds = nodes["num_threshold"][nodes["is_leaf"] == 0]
    near = np.concatenate([np.float32(thresholds), np.nextafter(np.float32(thresholds), np.float32(np.inf))])
    grid = np.repeat(near[np.isfinite(near)][:, None], 5, axis=1)
    raw = reference(inputs(), y).decision_function(grid)
    np.testing.assert_allclose(scores(model, grid)[:, 1], raw, atol=1e-6)


@for_all(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6, width=32))
@settings(max_examples=100, deadline=None)
def test_a_threshold_in_float32_parts_float32_values_as_in_float64(threshold: float, value: float) -> None:
    (rounded,) = round_down(np.array([threshold]))
    for near in (value, float(np.float32(threshold)), float(np.nextafter(np.float32(threshold), np.float32(np.inf)))):
        assert (np.float32(near) <= rounded) == (near <= threshold)


def test_a_binary_target_has_two_logits_whose_softmax_is_scikit_learn_s_probability() -> None:
    y, new = labels(inputs(), 2), inputs(1)
    model = fitted(y, "binary")
    probabilities = model.target.probabilities(model.predict({"x": torch.from_numpy(new)})).numpy()
    np.testing.assert_allclose(probabilities, reference(inputs(), y).predict_proba(new), atol=1e-6)


def test_labels_have_a_model_each() -> None:
    x, new = inputs(), inputs(1)
    y = np.stack([labels(x, 2), labels(x[:, ::-1], 2)], axis=1)
    found = scores(fitted(y, "multilabel"), new)
    for label in range(2):
        np.testing.assert_allclose(found[:, label], reference(x, y[:, label]).decision_function(new), atol=1e-6)


def test_votes_enter_once_per_class_of_the_label_set_with_its_share() -> None:
    x, new = inputs(), inputs(1)
    top, second = labels(x, 3), (labels(x, 3) + 1) % 3
    votes = 8 * np.eye(3)[top]
    shared = np.arange(ROWS) % 4 == 0
    votes[shared] += 5 * np.eye(3)[second[shared]]
    rows = np.concatenate([np.arange(ROWS), np.flatnonzero(shared)])
    y = np.concatenate([top, second[shared]])
    weights = np.where(shared, 0.5, 1.0)[rows]
    order = np.lexsort((y, rows))
    raw = reference(x[rows][order], y[order], weights[order]).decision_function(new)
    np.testing.assert_allclose(scores(fitted(votes, "votes"), new), raw, atol=1e-5)


def test_a_class_without_training_samples_is_the_least_likely() -> None:
    y = labels(inputs(), 3)
    model = fitted(np.where(y == 2, 3, y), "classes", names=("a", "b", "never", "d"))
    probabilities = model.target.probabilities(model.predict({"x": torch.from_numpy(inputs(1))}))
    assert bool(torch.isfinite(probabilities).all())
    assert float(probabilities[:, 2].max()) < 0.05


def test_two_classes_out_of_three_are_told_apart() -> None:
    y = 2 * labels(inputs(), 2)
    model = fitted(y, "classes", names=("a", "never", "c"))
    chosen = scores(model, inputs()).argmax(1)
    assert (chosen == y).mean() > 0.9


def test_a_label_that_never_changes_needs_no_trees() -> None:
    y = np.stack([np.zeros(ROWS), labels(inputs(), 2), np.ones(ROWS)], axis=1)
    found = scores(fitted(y, "multilabel"), inputs(1))
    assert (found[:, 0] < -5).all()
    assert (found[:, 2] > 5).all()
    assert found[:, 1].std() > 0.5


def test_trees_travel_through_a_file_into_a_fresh_model(tmp_path: Path) -> None:
    model = fitted(labels(inputs(), 4), "classes")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = Boosting(Unused(), model.target, 20, SETTINGS)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert np.array_equal(scores(fresh, inputs(1)), scores(model, inputs(1)))
    # A second load, of trees of other sizes, replaces the first.
    other = fitted(labels(inputs(5), 4), "classes", x=inputs(5))
    fresh.load_state_dict(other.state_dict())
    assert np.array_equal(scores(fresh, inputs(1)), scores(other, inputs(1)))


def test_the_same_seed_grows_the_same_trees() -> None:
    first, second = (fitted(labels(inputs(), 3), "classes").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_in_chunks_score_as_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted(labels(inputs(), 3), "classes")
    whole = scores(model, inputs(1))
    monkeypatch.setattr("manydg.algorithms._forest._CELLS", 200)
    assert np.array_equal(scores(model, inputs(1)), whole)
    assert Forest(3)(torch.zeros(0, 5)).shape == (0, 3)


def test_columns_are_joined_by_name_whatever_their_order() -> None:
    x = inputs()
    columns = {"late": x[:, 3:], "early": x[:, :3].reshape(ROWS, 3, 1)}
    data = from_arrays(columns, labels(x, 3), np.arange(ROWS) % 20, missing=True)
    model = Boosting(Unused(), target_of(data.target), 20, SETTINGS)
    model.fit_whole(data, seed=3)
    given = {name: torch.from_numpy(column) for name, column in columns.items()}
    turned = dict(reversed(list(given.items())))
    assert torch.equal(model.predict(given), model.predict(turned))
    np.testing.assert_allclose(model.predict(given).numpy(), scores(fitted(labels(x, 3), "classes"), x), atol=1e-6)


def test_ragged_inputs_are_refused_with_the_reason(small_dataset: DomainDataset) -> None:
    rows = Ragged.from_rows([[1, 2]] * len(small_dataset))
    data = from_arrays({"codes": rows}, small_dataset.targets, small_dataset.domains, kind="classes")
    model = Boosting(Unused(), target_of(data.target), 12)
    with pytest.raises(ConfigError, match=r"dense inputs only; \['codes'\] have rows of different lengths"):
        model.fit_whole(data, seed=0)


def test_the_given_backbone_leaves_no_weights_behind() -> None:
    model = fitted(labels(inputs(), 3), "classes")
    assert not list(model.parameters())
    assert all(name.startswith("forest.") for name in model.state_dict())


def test_regularisation_reaches_scikit_learn() -> None:
    x, y, new = inputs(), labels(inputs(), 2), inputs(1)
    data = from_arrays(x, y, np.arange(ROWS) % 20, kind="binary", missing=True)
    chosen = BoostingSettings(rounds=25, leaf_samples=60, l2=4.0, feature_share=0.5)
    model = Boosting(Unused(), target_of(data.target), 20, chosen)
    model.fit_whole(data, seed=3)
    other = HistGradientBoostingClassifier(
        max_iter=25, early_stopping=False, random_state=3, min_samples_leaf=60, l2_regularization=4.0, max_features=0.5
    ).fit(x, y)
    np.testing.assert_allclose(scores(model, new)[:, 1], other.decision_function(new), atol=1e-5)
