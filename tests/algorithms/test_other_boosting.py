"""LightGBM and CatBoost: their trees as tensors score exactly as the libraries do, and are used without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import numpy.typing as npt
import pytest
import torch

from manydg.algorithms import build_algorithm
from manydg.algorithms._forest import BoostedTrees
from manydg.backbones import Backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.errors import ConfigError
from manydg.targets import target_of
from manydg.training.fit import fit
from manydg.training.run import train

ROWS, ROUNDS = 400, 20
NAMES = ("lightgbm", "catboost")
Array = npt.NDArray[Any]


class Unused(Backbone):
    output_size = 3


def inputs(seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    x[:, 3] = np.round(x[:, 3])
    # The last column is never missing in training, and may be later.
    x[:, : 5 if seed else 4][rng.random((ROWS, 5 if seed else 4)) < 0.15] = np.nan
    return x


def labels(x: Array, classes: int) -> Array:
    filled = np.nan_to_num(x, nan=1.5)
    score = filled[:, 0] + filled[:, 1] * filled[:, 3] + 0.5 * filled[:, 4]
    return np.searchsorted(np.quantile(score, np.arange(1, classes) / classes), score)


def dataset(y: Array, kind: str, x: Array | None = None) -> DomainDataset:
    return from_arrays(inputs() if x is None else x, y, np.arange(ROWS) % 20, kind=kind, missing=True)


def fitted(name: str, y: Array, kind: str) -> BoostedTrees:
    data = dataset(y, kind)
    model = build_algorithm(name, Unused(), target_of(data.target), 20, {"rounds": ROUNDS})
    assert isinstance(model, BoostedTrees)
    model.fit_whole(data, seed=3)
    return model


def scores(model: BoostedTrees, x: Array) -> Array:
    return model.predict({"x": torch.from_numpy(x)}).numpy()


def reference(name: str, y: Array, new: Array) -> Array:
    """Raw scores by the library's own prediction, with the same settings."""
    several = len(np.unique(y)) > 2
    if name == "catboost":
        loss = "MultiClass" if several else "Logloss"
        model = catboost.CatBoostClassifier(
            iterations=ROUNDS, learning_rate=0.1, depth=6, l2_leaf_reg=3.0, rsm=1.0, loss_function=loss,
            random_seed=3, thread_count=1, allow_writing_files=False, logging_level="Silent",
        )  # fmt: skip
        return np.asarray(model.fit(inputs(), y).predict(new, prediction_type="RawFormulaVal"))
    options: dict[str, Any] = {"objective": "multiclass", "num_class": len(np.unique(y))} if several else {}
    options = {"objective": "binary", "seed": 3, "verbosity": -1, "num_threads": 1, **options}
    return np.asarray(lightgbm.train(options, lightgbm.Dataset(inputs(), y), ROUNDS).predict(new, raw_score=True))


@pytest.mark.parametrize("name", NAMES)
def test_classes_score_as_the_library_does_missing_values_included(name: str) -> None:
    y, new = labels(inputs(), 4), inputs(1)
    np.testing.assert_allclose(scores(fitted(name, y, "classes"), new), reference(name, y, new), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_votes_enter_once_per_class_of_the_label_set_with_its_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    top = labels(inputs(), 3)
    votes = 8 * np.eye(3)[top]
    shared = np.arange(ROWS) % 4 == 0
    votes[shared] += 5 * np.eye(3)[(top[shared] + 1) % 3]
    library, kind = (catboost, "Pool") if name == "catboost" else (lightgbm, "Dataset")
    given, make = [], getattr(library, kind)

    def noted(values: Array, classes: Array, *, weight: Array, **options: Any) -> Any:
        given.append((values, classes, weight))
        return make(values, classes, weight=weight, **options)

    monkeypatch.setattr(library, kind, noted)
    fitted(name, votes, "votes")
    values, classes, weights = given[0]
    rows = np.repeat(np.arange(ROWS), np.where(shared, 2, 1))
    np.testing.assert_array_equal(values, inputs()[rows])
    np.testing.assert_array_equal(weights, np.where(shared, 0.5, 1.0)[rows])
    held = votes > 4
    np.testing.assert_array_equal(classes, np.nonzero(held)[1])


@pytest.mark.parametrize("name", NAMES)
def test_two_classes_have_the_logits_0_and_the_library_s_score(name: str) -> None:
    y, new = labels(inputs(), 2), inputs(1)
    found = scores(fitted(name, y, "binary"), new)
    assert (found[:, 0] == 0).all()
    np.testing.assert_allclose(found[:, 1], reference(name, y, new), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_labels_have_a_model_each_and_one_that_never_changes_has_none(name: str) -> None:
    y = np.stack([labels(inputs(), 2), np.zeros(ROWS, int), 1 - labels(inputs(), 2)], axis=1)
    found = scores(fitted(name, y, "multilabel"), inputs(1))
    np.testing.assert_allclose(found[:, 0], reference(name, y[:, 0], inputs(1)), atol=1e-5)
    assert (found[:, 1] < -5).all()


@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_chosen_on_validation_patients(name: str) -> None:
    rng = np.random.default_rng(0)
    noisy = [
        dataset((x[:, 0] + 2 * rng.normal(size=ROWS) > 0).astype(int), "binary", x)
        for x in (rng.normal(size=(ROWS, 5)).astype(np.float32) for _ in range(2))
    ]
    config = TrainingConfig(algorithm=name, selection="auroc", settings={"rounds": 120})
    done = fit(config, noisy[0], noisy[1], torch.device("cpu"))
    kept = len(done.algorithm.get_submodule("forest").get_buffer("roots"))
    assert done.selection_rule == "number of rounds with the highest validation auroc"
    assert 0 < kept < 120


@pytest.mark.parametrize("name", NAMES)
def test_without_its_package_training_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    data = dataset(labels(inputs(), 2), "binary")
    with pytest.raises(ConfigError, match=rf"{name} cannot be trained here: .*pip install 'manydg\[boosting\]'"):
        fit(TrainingConfig(algorithm=name), data, None, torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_run_predicts_without_the_package(name: str, tmp_path: Path) -> None:
    data = dataset(labels(inputs(), 3), "classes")
    config = TrainingConfig(algorithm=name, ratios=(0.6, 0.2, 0.2), settings={"rounds": ROUNDS})
    run = train(data, config, out=tmp_path / "run", device="cpu", name="made up")
    given = torch.from_numpy(inputs(1))
    np.save(tmp_path / "x.npy", given.numpy())
    script = (
        f"import sys; sys.modules['{name}'] = None; import numpy, torch; from manydg.training.run import open_run;"
        f"x = torch.from_numpy(numpy.load(r'{tmp_path / 'x.npy'}'));"
        f"numpy.save(r'{tmp_path / 'y.npy'}', open_run(r'{tmp_path / 'run'}').algorithm.predict({{'x': x}}).numpy())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with torch.no_grad():
        wanted = run.algorithm.predict({"x": given}).numpy()
    assert np.array_equal(np.load(tmp_path / "y.npy"), wanted)


@pytest.mark.parametrize("loss", ["squared", "huber"])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_predicted_as_the_library_does_in_their_unit(name: str, loss: str) -> None:
    x, new = inputs(), inputs(1)
    y = 40 + 9 * np.nan_to_num(x[:, 0]) + 30 * (np.nan_to_num(x[:, 1]) > 1.5)
    data = dataset(y, "regression")
    target = target_of(data.target, loss)
    target.fit(data.targets)
    model = build_algorithm(name, Unused(), target, 20, {"rounds": ROUNDS})
    assert isinstance(model, BoostedTrees)
    model.fit_whole(data, seed=3)
    found = target.probabilities(torch.from_numpy(scores(model, new)))[:, 0].numpy()
    standard = (y - y.mean()) / y.std()
    if name == "catboost":
        own = catboost.CatBoostRegressor(
            iterations=ROUNDS, learning_rate=0.1, depth=6, l2_leaf_reg=3.0, rsm=1.0, random_seed=3, thread_count=1,
            loss_function={"squared": "RMSE", "huber": "Huber:delta=1"}[loss], allow_writing_files=False,
            logging_level="Silent",
        ).fit(x, standard)  # fmt: skip
    else:
        objective = {"squared": "regression", "huber": "huber"}[loss]
        options = {"objective": objective, "alpha": 1.0, "seed": 3, "verbosity": -1, "num_threads": 1}
        own = lightgbm.train(options, lightgbm.Dataset(x, standard), ROUNDS)
    np.testing.assert_allclose(found, np.asarray(own.predict(new)) * y.std() + y.mean(), atol=2e-2)
