"""Gradient boosting: its trees as tensors score exactly as scikit-learn does."""

from __future__ import annotations

from collections.abc import Mapping
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
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from manydg.algorithms import Rounds
from manydg.algorithms._forest import Forest, LeafwiseSettings, round_down
from manydg.algorithms.boosting import Boosting
from manydg.backbones import Backbone
from manydg.config import TrainingConfig
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError, DataError, ManyDGWarning
from manydg.evaluation.metrics import score
from manydg.targets import target_of
from manydg.training.fit import Silent, fit
from manydg.training.inference import device_of, predict_probabilities
from manydg.training.record import EpochEntry

ROWS = 400
SETTINGS = LeafwiseSettings(rounds=25)
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
    target = target_of(data.target)
    target.fit(data.targets)
    model = Boosting(Unused(), target, 20, SETTINGS)
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


def test_trees_that_are_moved_get_their_inputs_where_they_are() -> None:
    model = fitted(labels(inputs(), 2), "binary")
    assert device_of(model) == torch.device("cpu")
    assert device_of(model.to("meta")) == torch.device("meta")


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
    chosen = LeafwiseSettings(rounds=25, leaf_samples=60, l2=4.0, feature_share=0.5)
    model = Boosting(Unused(), target_of(data.target), 20, chosen)
    model.fit_whole(data, seed=3)
    other = HistGradientBoostingClassifier(
        max_iter=25, early_stopping=False, random_state=3, min_samples_leaf=60, l2_regularization=4.0, max_features=0.5
    ).fit(x, y)
    np.testing.assert_allclose(scores(model, new)[:, 1], other.decision_function(new), atol=1e-5)


class Kept(Rounds):
    """Keeps what a test says, and remembers what it was told."""

    def __init__(self, val: DomainDataset, keep: int) -> None:
        self.val, self.keep, self.total = val, keep, 0
        self.told: dict[int, torch.Tensor] = {}
        self.loss: list[float] = []

    def started(self, total: int) -> None:
        self.total = total

    def ended(self, number: int, losses: Mapping[str, float], logits: torch.Tensor) -> None:
        self.told[number] = logits
        self.loss.append(losses["supervised"])

    def kept(self, total: int) -> int:
        return self.keep


def dataset(x: Array, y: Array, kind: str) -> DomainDataset:
    return from_arrays(x, y, np.arange(len(x)) % 20, kind=kind, missing=True)


@pytest.mark.parametrize("kind", ["classes", "binary", "multilabel"])
def test_the_scores_told_of_are_those_of_the_rounds_so_far_and_only_these_are_kept(kind: str) -> None:
    x, new = inputs(), inputs(1)
    y, y_new = (labels(each, 3 if kind == "classes" else 2) for each in (x, new))
    if kind == "multilabel":
        y, y_new = (np.stack([each, 1 - each, np.zeros(ROWS, int)], axis=1) for each in (y, y_new))
    data, val = dataset(x, y, kind), dataset(new, y_new, kind)
    rounds = Kept(val, keep=7)
    model = Boosting(Unused(), target_of(data.target), 20, SETTINGS)
    model.fit_whole(data, 3, rounds)
    assert rounds.total == 25
    assert list(rounds.told) == list(range(1, 26))
    np.testing.assert_allclose(scores(model, new), rounds.told[7].numpy(), atol=1e-5)
    assert np.abs(scores(model, new) - rounds.told[25].numpy()).max() > 0.1
    assert rounds.loss[-1] < rounds.loss[0]


class Lines(Silent):
    def __init__(self) -> None:
        self.total, self.entries = 0, list[EpochEntry]()

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        self.total = epochs

    def epoch_ended(self, entry: EpochEntry) -> None:
        self.entries.append(entry)


def noisy(seed: int) -> DomainDataset:
    """Labels that are mostly noise: many rounds learn the noise by heart."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    y = (x[:, 0] + 2 * rng.normal(size=ROWS) > 0).astype(int)
    return dataset(x, y, "binary")


def test_the_number_of_rounds_is_that_with_the_highest_validation_metric() -> None:
    lines, val = Lines(), noisy(1)
    config = TrainingConfig(algorithm="boosting", selection="auroc", settings={"rounds": 120})
    fitted = fit(config, noisy(0), val, torch.device("cpu"), reporter=lines)
    assert (lines.total, lines.entries[-1].epoch, len(lines.entries)) == (120, 120, 30)
    curve = {entry.epoch: entry.val["auroc"] for entry in lines.entries}
    best = max(curve, key=lambda number: curve[number] or 0)
    assert 4 <= best < 120
    assert fitted.selection_rule == "number of rounds with the highest validation auroc"
    assert (fitted.epoch, fitted.history) == (0, [])
    found = score(fitted.algorithm.target, val.targets.numpy(), predict_probabilities(fitted.algorithm, val).numpy())
    assert found["auroc"] == pytest.approx(curve[best])
    assert len(fitted.algorithm.get_submodule("forest").get_buffer("roots")) == best


def test_without_validation_patients_all_rounds_are_kept() -> None:
    config = TrainingConfig(algorithm="boosting", settings={"rounds": 40})
    fitted = fit(config, noisy(0), None, torch.device("cpu"))
    assert fitted.selection_rule == "all 40 rounds: no patients were held back to choose a number"
    assert len(fitted.algorithm.get_submodule("forest").get_buffer("roots")) == 40


def test_a_column_without_any_value_is_left_out_with_a_note() -> None:
    x = inputs()
    wide = np.insert(x, 2, np.nan, axis=1)
    data = dataset(wide, labels(x, 3), "classes")
    model = Boosting(Unused(), target_of(data.target), 20, SETTINGS)
    with pytest.warns(ManyDGWarning, match=r"1 of 6 columns have no value .* left out of this training: x\[2\]"):
        model.fit_whole(data, seed=3)
    # Whatever a new patient has in that column.
    new = np.insert(inputs(1), 2, 7.0, axis=1)
    assert np.array_equal(scores(model, new), scores(fitted(labels(x, 3), "classes"), inputs(1)))


def test_inputs_without_any_value_are_refused() -> None:
    data = dataset(np.full((ROWS, 2), np.nan, np.float32), labels(inputs(), 2), "binary")
    with pytest.raises(DataError, match="no training patient has a value in any column"):
        Boosting(Unused(), target_of(data.target), 20).fit_whole(data, seed=0)


def test_values_are_predicted_as_scikit_learn_does_in_their_unit() -> None:
    x, new = inputs(), inputs(1)
    y = 40 + 9 * np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 1])
    model = fitted(y, "regression")
    own = HistGradientBoostingRegressor(max_iter=SETTINGS.rounds, early_stopping=False, random_state=0)
    found = model.target.probabilities(model.predict({"x": torch.from_numpy(new)}))[:, 0]
    np.testing.assert_allclose(found.numpy(), own.fit(x, y).predict(new), atol=1e-3)


def test_the_huber_loss_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="has no Huber loss: take lightgbm or catboost"):
        Boosting(Unused(), target_of(TargetSpec("regression", ("days",)), "huber"), 20)
