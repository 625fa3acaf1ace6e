"""The scikit-learn face."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from manydg import ManyDGClassifier, ManyDGRegressor, open_run
from manydg.errors import ConfigError, ManyDGError, ManyDGWarning, StorageError

PATIENTS = np.repeat([f"patient-{number:02d}" for number in range(20)], 12)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data(seed: int = 0, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of class means, patient shifts and noise, and class codes."""
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(99).normal(size=(classes, 5)) * 2
    label = rng.integers(0, classes, len(PATIENTS))
    shift = rng.normal(size=(20, 5))[np.repeat(np.arange(20), 12)] * 0.5
    return means[label] + shift + rng.normal(size=(len(PATIENTS), 5)) * 0.5, label


def quick(**options: Any) -> ManyDGClassifier:
    return ManyDGClassifier(**{"epochs": 3, "random_state": 0, **options})


SEVERAL_ROWS = (
    "batches depend on the order and number of rows, as for scikit-learn's own SGDClassifier; and the check gives no "
    "groups, so that each repeated row is a patient of its own"
)


@pytest.mark.filterwarnings("ignore::manydg.errors.ManyDGWarning")
@parametrize_with_checks(
    [ManyDGClassifier(), ManyDGRegressor()],
    expected_failed_checks=lambda _: {"check_sample_weight_equivalence_on_dense_data": SEVERAL_ROWS},
)
def test_scikit_learn_finds_nothing_wrong(estimator: Any, check: Any) -> None:
    check(estimator)


def test_new_patients_of_the_same_kind_are_told_apart() -> None:
    X, y = data()
    model = ManyDGClassifier(random_state=0).fit(X, y, groups=PATIENTS)
    X_new, y_new = data(seed=1)
    assert model.score(X_new, y_new) > 0.85
    assert model.predict_proba(X_new).shape == (240, 3)


@pytest.mark.parametrize(
    "labels",
    [np.array(["wake", "n1", "rem"]), np.array(["wake", "n1", "rem"], dtype=object), np.array([7, -2, 30]),
     np.array([0.0, 2.0, 5.0])],
    ids=["text", "objects", "numbers", "floats"],
)  # fmt: skip
def test_predictions_are_labels_as_they_were_given(labels: np.ndarray) -> None:
    X, y = data()
    model = quick().fit(X, labels[y], groups=PATIENTS)
    assert model.classes_.tolist() == sorted(labels.tolist())
    assert set(model.predict(X).tolist()) <= set(labels.tolist())
    assert model.predict(X).dtype == labels.dtype


def test_two_classes_are_chosen_by_average_precision_of_the_second() -> None:
    X, y = data(classes=2)
    model = quick(validation_share=0.2).fit(X, y == 1, groups=PATIENTS)
    assert model.classes_.tolist() == [False, True]
    assert model.selection_rule_ == "epoch with the highest validation auprc"
    assert set(model.history_[0]["val"]) == {"auprc", "f1", "kappa", "auroc"}


def test_label_indicators_get_a_probability_each() -> None:
    X, _ = data()
    y = (X[:, :3] > 0).astype(int)
    model = ManyDGClassifier(random_state=0).fit(X, y, groups=PATIENTS)
    probabilities = model.predict_proba(X)
    assert probabilities.shape == y.shape
    assert not np.allclose(probabilities.sum(axis=1), 1)
    assert np.array_equal(model.predict(X), probabilities >= 0.5)
    assert (model.predict(X) == y).mean() > 0.8
    assert model.classes_.tolist() == [0, 1, 2]


def test_the_epoch_is_chosen_on_patients_who_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    from manydg import estimator

    seen: dict[str, Any] = {}
    real_fit = estimator.fit

    def watched(config: Any, train: Any, val: Any, *args: Any, **rest: Any) -> Any:
        seen.update(train=set(train.patients.tolist()), val=set(val.patients.tolist()))
        return real_fit(config, train, val, *args, **rest)

    monkeypatch.setattr(estimator, "fit", watched)
    X, y = data()
    model = quick(epochs=4, validation_share=0.2).fit(X, y, groups=PATIENTS)
    assert len(seen["val"]) == 4
    assert not seen["val"] & seen["train"]
    assert seen["val"] | seen["train"] == set(PATIENTS.tolist())
    kappas = [entry["val"]["kappa"] for entry in model.history_]
    assert model.epoch_ == 1 + int(np.argmax(kappas))


@pytest.mark.parametrize("case", ["few patients", "no share", "a class of one patient"])
def test_nobody_is_held_back_where_nobody_can_be_spared(case: str) -> None:
    X, y = data()
    groups = np.repeat(np.arange(8), 30) if case == "few patients" else PATIENTS
    if case == "a class of one patient":
        # Whoever is held back, the validation patients show one class, or the training patients lack one.
        y = np.unique(PATIENTS, return_inverse=True)[1]
    model = quick(validation_share=0.0 if case == "no share" else 0.1).fit(X, y, groups=groups)
    assert model.selection_rule_ == "last epoch: no patients were held back to choose one"
    assert model.epoch_ == 3
    assert model.history_[-1]["val"] == {}


def test_the_last_epochs_weights_are_kept_where_none_is_chosen() -> None:
    X, y = data()
    one, three, again = (
        quick(epochs=epochs, validation_share=0.0, settings={"predictor": "cosine"}).fit(X, y, groups=PATIENTS)
        for epochs in (1, 3, 3)
    )
    assert np.array_equal(again.predict_proba(X), three.predict_proba(X))
    assert not np.allclose(one.predict_proba(X), three.predict_proba(X))


def test_patients_change_what_is_learnt() -> None:
    X, y = data()
    cosine = {"predictor": "cosine"}
    own, other = (
        quick(validation_share=0.0, settings=cosine).fit(X, y, groups=groups)
        for groups in (PATIENTS, np.roll(PATIENTS, 6))
    )
    assert not np.allclose(own.predict_proba(X), other.predict_proba(X))
    assert "reconstruction" in own.history_[0]["losses"]


def test_without_patients_a_warning_says_what_is_not_learnt() -> None:
    X, y = data()
    with pytest.warns(ManyDGWarning, match="Give fit the patients as groups"):
        model = quick().fit(X, y)
    assert set(model.history_[0]["losses"]) == {"supervised", "mmd"}
    assert model.n_patients_ == len(X)


def test_the_same_random_state_gives_the_same_model_and_leaves_torch_alone() -> None:
    X, y = data()
    before = torch.random.get_rng_state()
    first, second, other = (quick(random_state=seed).fit(X, y, groups=PATIENTS) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(first.predict_proba(X), second.predict_proba(X))
    assert not np.array_equal(first.predict_proba(X), other.predict_proba(X))


@pytest.mark.parametrize("algorithm", ["base", "boosting", "dann", "mldg"])
def test_every_other_algorithm_has_the_same_face(algorithm: str) -> None:
    X, y = data()
    model = quick(algorithm=algorithm, epochs=2).fit(X, y, groups=PATIENTS)
    assert np.allclose(model.predict_proba(X).sum(axis=1), 1, atol=1e-5)
    assert (model.epoch_ == 0) == (algorithm == "boosting")


def test_missing_values_are_taken_by_the_backbone_that_can() -> None:
    X, y = data()
    X[::7, 2] = np.nan
    model = quick(epochs=10).fit(X, y, groups=PATIENTS)
    assert type(model.algorithm_.backbone).__name__ == "Tabular"
    assert np.isfinite(model.predict_proba(X)).all()
    assert model.score(X, y) > 0.7


def test_missing_values_only_at_prediction_are_an_error() -> None:
    X, y = data()
    model = quick().fit(X, y, groups=PATIENTS)
    X[0, 0] = np.nan
    with pytest.raises(ValueError, match="trained on complete data"):
        model.predict(X)


def test_a_module_of_ones_own_is_the_backbone_and_stays_as_it_was() -> None:
    X, y = data()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 16), nn.ELU(), nn.Linear(16, 12), nn.ELU())
    before = [parameter.clone() for parameter in module.parameters()]
    model = clone(quick(backbone=module, epochs=8)).fit(X, y, groups=PATIENTS)
    assert model.algorithm_.backbone.output_size == 12
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert model.score(X, y) > 0.7


@pytest.mark.parametrize("own_module", [False, True])
def test_a_saved_model_predicts_the_same(tmp_path: Path, own_module: bool) -> None:
    X, y = data()
    labels = np.array(["n2", "rem", "wake"])[y]
    module = nn.Sequential(nn.Linear(5, 8), nn.ELU()) if own_module else "auto"
    model = quick(backbone=module, settings={"mmd": 0.5}).fit(X, labels, groups=PATIENTS)
    model.save(tmp_path / "model")
    fresh = nn.Sequential(nn.Linear(5, 8), nn.ELU()) if own_module else None
    loaded = ManyDGClassifier.load(tmp_path / "model", backbone=fresh)
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert loaded.predict(X).tolist() == model.predict(X).tolist()
    assert loaded.settings == {"mmd": 0.5}
    for name in ("classes_", "n_features_in_", "selection_rule_", "epoch_", "history_", "n_patients_"):
        assert np.array_equal(getattr(loaded, name), getattr(model, name)), name
    assert clone(loaded).get_params()["epochs"] == 3


def test_a_saved_model_holds_no_pickle_and_no_patient(tmp_path: Path) -> None:
    X, y = data()
    file = quick().fit(X, y, groups=PATIENTS).save(tmp_path)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["model.safetensors", "personal.safetensors", "run.json"]
    assert all(b"patient-" not in entry.read_bytes() for entry in tmp_path.iterdir())
    content = file.read_bytes()
    assert not zipfile.is_zipfile(file)
    with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError)):
        pickle.loads(content)  # noqa: S301


def test_a_module_of_ones_own_is_asked_for_when_loading(tmp_path: Path) -> None:
    X, y = data()
    quick(backbone=nn.Sequential(nn.Linear(5, 8), nn.ELU()), epochs=1).fit(X, y, groups=PATIENTS).save(tmp_path)
    with pytest.raises(ConfigError, match="module of your own"):
        ManyDGClassifier.load(tmp_path)
    with pytest.raises(StorageError, match="does not fit the model"):
        ManyDGClassifier.load(tmp_path, backbone=nn.Sequential(nn.Linear(5, 9), nn.ELU()))


def test_a_damaged_file_is_not_loaded(tmp_path: Path) -> None:
    X, y = data()
    file = quick(epochs=1).fit(X, y, groups=PATIENTS).save(tmp_path)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match="checksum"):
        ManyDGClassifier.load(tmp_path)


def test_feature_names_are_kept_and_checked(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    X, y = data()
    table = polars.DataFrame({f"lab {i}": X[:, i] for i in range(5)})
    model = quick(epochs=1).fit(table, y, groups=PATIENTS)
    model.save(tmp_path)
    loaded = ManyDGClassifier.load(tmp_path)
    assert loaded.feature_names_in_.tolist() == table.columns
    assert np.array_equal(loaded.predict_proba(table), model.predict_proba(table))
    with pytest.raises(ValueError, match="feature names should match"):
        loaded.predict(table.rename({"lab 0": "lab x"}))


def test_patients_reach_fit_in_cross_validation_pipelines_and_searches() -> None:
    X, y = data()
    with sklearn.config_context(enable_metadata_routing=True):
        routed = quick().set_fit_request(groups=True)
        pipeline = make_pipeline(StandardScaler(), routed)
        # Without the patients fit would warn, and our warnings are errors in these tests.
        scores = cross_val_score(
            pipeline, X, y, cv=GroupKFold(3), params={"groups": PATIENTS}, error_score="raise"
        )  # fmt: skip
        assert len(scores) == 3
        search = GridSearchCV(
            pipeline, {"manydgclassifier__algorithm": ["base", "manydg"]}, cv=GroupKFold(2), error_score="raise"
        )
        search.fit(X, y, groups=PATIENTS)
    assert search.best_params_["manydgclassifier__algorithm"] in {"base", "manydg"}
    assert search.best_estimator_[-1].n_patients_ == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "manydgg"}, "did you mean 'manydg'"),
        ({"settings": {"mdd": 1.0}}, "did you mean 'mmd'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"batch_size": 1}, "at least two samples"),
        ({"validation_share": 1.0}, "validation_share"),
        ({"selection": "kapa"}, "did you mean 'kappa'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"settings": ["mmd"]}, "it must be values by name"),
        ({"backbone": "mpl"}, "did you mean 'mlp'"),
        ({"backbone": nn.Linear(4, 2)}, "cannot take an input of shape"),
    ],
)
def test_a_wrong_setting_is_a_value_error_that_names_it(options: dict[str, Any], message: str) -> None:
    X, y = data()
    with pytest.raises(ValueError, match=message) as caught:
        quick(**options).fit(X, y, groups=PATIENTS)
    assert isinstance(caught.value, ManyDGError)


@pytest.mark.parametrize("case", ["one class", "too few groups", "missing group", "infinite"])
def test_data_that_cannot_be_learnt_from_are_refused(case: str) -> None:
    X, y = data()
    groups = PATIENTS.astype(object)
    if case == "one class":
        y[:] = 1
    if case == "too few groups":
        groups = groups[:-1]
    if case == "missing group":
        groups[3] = None
    if case == "infinite":
        X[2, 2] = np.inf
    with pytest.raises(ValueError, match=r"one class|inconsistent|patient ids are missing|infinity"):
        quick().fit(X, y, groups=groups)


@pytest.mark.parametrize("kind", ["None", "string", "Int64", "boolean", "polars", "float", "table"])
def test_a_missing_label_is_refused_with_its_row(kind: str) -> None:
    X, y = data(classes=2)
    inputs: Any = X
    labels: Any = ["ill" if code else "well" for code in y]
    if kind in ("Int64", "boolean", "float"):
        labels = pd.Series(y.astype(bool) if kind == "boolean" else y).astype(kind)
    labels = pd.Series(labels, dtype="string") if kind == "string" else list(labels)
    labels[3] = np.nan if kind == "float" else None
    if kind in ("Int64", "boolean"):
        labels = pd.Series(labels, dtype=kind)
    if kind == "polars":
        labels = pl.Series(labels)
    if kind == "table":
        inputs = pd.DataFrame({"unit": ["icu", "ward"] * (len(X) // 2)})
    with pytest.raises(ValueError, match=r"1 of 240 labels are missing, the first in row 3"):
        quick().fit(inputs, labels, groups=PATIENTS)


def test_a_grid_of_numpys_numbers_is_taken_and_saved(tmp_path: Path) -> None:
    X, y = data()
    options = {
        "epochs": np.int64(1),
        "batch_size": np.int32(64),
        "lr": np.float32(0.5),
        "settings": {"mmd": np.float32(1)},
    }
    model = quick(**options).fit(X, y, groups=PATIENTS)
    plain = quick(epochs=1, batch_size=64, lr=0.5, settings={"mmd": 1.0}).fit(X, y, groups=PATIENTS)
    np.testing.assert_array_equal(model.predict_proba(X), plain.predict_proba(X))
    model.save(tmp_path / "model")
    assert ManyDGClassifier.load(tmp_path / "model").epochs == 1


@pytest.mark.filterwarnings("ignore:A column-vector y was passed")  # As scikit-learn warns of it.
@pytest.mark.parametrize("labels", [float, bool, "Int64", "column"])
def test_labels_of_new_patients_are_those_of_equal_value(labels: Any) -> None:
    X, y = data(classes=2)
    model = quick(algorithm="base").fit(X, y, groups=PATIENTS)
    given: Any = y[:, None] if labels == "column" else pd.Series(y).astype(labels)
    expected = model.personalise(X, y, PATIENTS).predict_proba(X, PATIENTS)
    np.testing.assert_array_equal(model.personalise(X, given, PATIENTS).predict_proba(X, PATIENTS), expected)


def test_a_personalised_model_that_is_fitted_anew_forgets_the_labels_it_was_shown(tmp_path: Path) -> None:
    X, y = data(classes=2)
    model = quick(algorithm="base").fit(X, y, groups=PATIENTS)
    again = model.personalise(X, 1 - y, PATIENTS).fit(X, y, groups=PATIENTS)
    np.testing.assert_array_equal(again.predict_proba(X, PATIENTS), model.predict_proba(X, PATIENTS))
    again.save(tmp_path / "model")


def values(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of patients who differ, and a value in hundreds."""
    X, _ = data(seed)
    return X, 500 + 80 * X[:, 0] - 40 * X[:, 1]


def test_a_number_of_new_patients_is_predicted_in_its_unit() -> None:
    X, y = values()
    model = ManyDGRegressor(random_state=0, lr=5e-3).fit(X, y, groups=PATIENTS)
    X_new, y_new = values(seed=1)
    assert model.score(X_new, y_new) > 0.8
    assert model.selection_rule_ == "epoch with the highest validation r2"
    assert model.predict(X_new).shape == (240,)
    assert not hasattr(model, "classes_")


def test_the_loss_of_a_number_is_chosen_and_classes_have_none() -> None:
    X, y = values()
    y[:5] += 1e5
    models = [ManyDGRegressor("base", loss=loss, epochs=8, lr=1e-2, random_state=0) for loss in ("squared", "huber")]
    squared, huber = (np.abs(model.fit(X, y, groups=PATIENTS).predict(X)[5:] - y[5:]).mean() for model in models)
    assert huber < squared
    with pytest.raises(ValueError, match="the loss 'huber' is for regression targets"):
        quick(loss="huber").fit(*data(), groups=PATIENTS)


def test_a_saved_regressor_predicts_the_same_and_is_no_classifier(tmp_path: Path) -> None:
    X, y = values()
    model = ManyDGRegressor("boosting", loss="squared", random_state=0).fit(X, y, groups=PATIENTS)
    model.save(tmp_path / "model")
    again = ManyDGRegressor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.get_params()["loss"] == "squared"
    np.testing.assert_allclose(open_run(tmp_path / "model").predict_proba(X.astype(np.float32))[:, 0], model.predict(X))
    with pytest.raises(ValueError, match="load it with ManyDGRegressor"):
        ManyDGClassifier.load(tmp_path / "model")
    quick(algorithm="boosting").fit(*data(), groups=PATIENTS).save(tmp_path / "classes")
    with pytest.raises(ValueError, match="load it with ManyDGClassifier"):
        ManyDGRegressor.load(tmp_path / "classes")
