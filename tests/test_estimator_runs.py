"""One model format: what the estimator saves is a run, and a run of one array is an estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from manydg import ManyDGClassifier, from_arrays, open_run, train
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, StorageError
from manydg.predict import predict_raw
from manydg.training.export import export_run
from manydg.training.record import write_tensors

PATIENTS = np.repeat([f"patient-{number:02d}" for number in range(16)], 8)
NAMES = [f"lab {number}" for number in range(5)]
KINDS = ("binary", "classes", "multilabel")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def samples(kind: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(len(PATIENTS), 5)).astype(np.float32)
    score = X[:, :3] + rng.normal(size=(len(PATIENTS), 3)) * 0.3
    if kind == "multilabel":
        return X, (score > 0).astype(int)
    return X, np.array(["a", "b", "c"])[score.argmax(axis=1)] if kind == "classes" else score[:, 0] > 0


def dataset(kind: str, seed: int = 0) -> DomainDataset:
    X, y = samples(kind, seed)
    return from_arrays(X, y, PATIENTS, kind=kind)


def quick(**options: Any) -> ManyDGClassifier:
    return ManyDGClassifier(**{"epochs": 2, "random_state": 0, "device": "cpu", **options})


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_estimator_is_a_run_that_predicts_the_same(kind: str, tmp_path: Path) -> None:
    X, y = samples(kind)
    model = quick().fit(X, y, groups=PATIENTS)
    model.save(tmp_path / "model")
    run = open_run(tmp_path / "model")
    np.testing.assert_allclose(run.predict_proba(dataset(kind)), model.predict_proba(X), atol=1e-6)
    assert run.record.algorithm == "manydg"
    assert run.record.patients.train + run.record.patients.val == 16
    assert run.record.test == {}
    assert [entry.to_json() for entry in run.record.history] == model.history_


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_run_is_an_estimator_that_predicts_the_same(kind: str, tmp_path: Path) -> None:
    data = dataset(kind)
    run = train(data, algorithm="base", epochs=2, ratios=(0.5, 0.25, 0.25), out=tmp_path / "run", device="cpu")
    model = ManyDGClassifier.load(tmp_path / "run")
    X, _ = samples(kind, seed=1)
    probabilities = run.predict_proba(dataset(kind, seed=1))
    np.testing.assert_allclose(model.predict_proba(X), probabilities, atol=1e-6)
    if run.record.threshold is None:
        assert model.predict(X).tolist() == np.array(["a", "b", "c"])[probabilities.argmax(axis=1)].tolist()
    else:
        chosen = probabilities >= run.record.threshold
        expected = chosen.astype(int) if kind == "multilabel" else np.array(data.target.names)[chosen[:, 1].astype(int)]
        assert model.predict(X).tolist() == expected.tolist()
    assert model.get_params()["algorithm"] == "base"
    assert model.n_patients_ == 12
    again = quick().set_params(**model.get_params()).fit(*samples(kind), groups=PATIENTS)
    assert again.predict_proba(X).shape == probabilities.shape


def test_a_loaded_run_can_be_saved_as_a_model_of_its_own(tmp_path: Path) -> None:
    train(dataset("binary"), epochs=1, out=tmp_path / "run", device="cpu")
    model = ManyDGClassifier.load(tmp_path / "run")
    model.save(tmp_path / "model")
    X, _ = samples("binary")
    again = ManyDGClassifier.load(tmp_path / "model")
    assert again.predict(X).tolist() == model.predict(X).tolist()
    assert again.threshold_ == open_run(tmp_path / "run").record.threshold


def test_context_reaches_a_run_that_is_an_estimator(tmp_path: Path) -> None:
    run = train(dataset("classes"), algorithm="base", context="offline", epochs=1, out=tmp_path / "run", device="cpu")
    X, _ = samples("classes")
    model = ManyDGClassifier.load(tmp_path / "run")
    np.testing.assert_allclose(
        model.predict_proba(X, groups=PATIENTS), run.predict_proba(dataset("classes")), atol=1e-6
    )


def test_a_module_of_ones_own_is_asked_for_by_both_doors(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.ELU())

    run = train(dataset("binary"), epochs=1, backbone=make(), out=tmp_path / "run", device="cpu")
    for opening in (open_run, ManyDGClassifier.load):
        with pytest.raises(ConfigError, match="module of your own"):
            opening(tmp_path / "run")
    model = ManyDGClassifier.load(tmp_path / "run", backbone=make())
    np.testing.assert_allclose(
        model.predict_proba(samples("binary")[0]), run.predict_proba(dataset("binary")), atol=1e-6
    )


def test_a_saved_estimator_can_be_exported(tmp_path: Path) -> None:
    X, y = samples("classes")
    model = quick().fit(X, y, groups=PATIENTS)
    model.save(tmp_path / "model")
    exported = export_run(tmp_path / "model", tmp_path / "model.pt2", "torch")
    program = torch.export.load(exported.path).module()
    given = program(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(given, model.predict_proba(X), atol=1e-4)
    assert exported.metadata["algorithm"] == "manydg"


def test_an_estimator_of_a_named_table_predicts_files_with_the_same_columns(tmp_path: Path) -> None:
    X, y = samples("binary")
    table = pl.DataFrame(X, schema=NAMES)
    model = quick().fit(table, y, groups=PATIENTS)
    model.save(tmp_path / "model")
    table.select("lab 3", *NAMES[:3], "lab 4").write_csv(tmp_path / "new.csv")
    (file,) = predict_raw(tmp_path / "model", tmp_path / "new.csv", tmp_path / "out")
    predicted = pl.read_csv(file)
    np.testing.assert_allclose(predicted["p_True"], model.predict_proba(table)[:, 1], atol=1e-4)
    assert predicted["predicted"].to_list() == [bool(answer) for answer in model.predict(table)]


def test_an_estimator_of_an_array_predicts_arrays(tmp_path: Path) -> None:
    X, y = samples("classes")
    model = quick().fit(X, y, groups=PATIENTS)
    model.save(tmp_path / "model")
    np.save(tmp_path / "new.npy", X)
    (file,) = predict_raw(tmp_path / "model", tmp_path / "new.npy", tmp_path / "out")
    predicted = pl.read_csv(file)
    np.testing.assert_allclose(predicted["p_b"], model.predict_proba(X)[:, 1], atol=1e-4)
    assert predicted["predicted"].to_list() == model.predict(X).tolist()


def test_the_columns_of_a_table_are_the_features_of_the_estimator(commands: Any, tmp_path: Path) -> None:
    X, y = samples("binary")
    table = pl.DataFrame(X, schema=NAMES)
    table.with_columns(pl.Series("who", PATIENTS), pl.Series("y", y.astype(int))).write_csv(tmp_path / "table.csv")
    commands.run("prepare", "table", tmp_path / "table.csv", "--patient", "who", "--target", "y", "--features", "lab *",
                 "--out", tmp_path / "data")  # fmt: skip
    commands.run("train", tmp_path / "data", "--epochs", "1", "--device", "cpu", "--out", tmp_path / "run")
    model = ManyDGClassifier.load(tmp_path / "run")
    assert model.feature_names_in_.tolist() == NAMES
    (file,) = predict_raw(tmp_path / "run", tmp_path / "table.csv", tmp_path / "out")
    predicted = pl.read_csv(file)
    np.testing.assert_allclose(predicted["p_1"], model.predict_proba(table)[:, 1], atol=1e-4)
    assert predicted["predicted"].cast(str).to_list() == model.predict(table).tolist()


def test_a_run_of_several_inputs_is_no_estimator(tmp_path: Path) -> None:
    X, y = samples("binary")
    data = from_arrays({"first": X[:, :2], "second": X[:, 2:]}, y, PATIENTS)
    train(data, epochs=1, out=tmp_path / "run", device="cpu")
    with pytest.raises(ConfigError, match=r"first, second.*open_run"):
        ManyDGClassifier.load(tmp_path / "run")


def test_a_folder_that_was_trained_in_is_not_saved_over(tmp_path: Path) -> None:
    train(dataset("binary"), epochs=1, out=tmp_path / "run", device="cpu")
    model = quick(epochs=1).fit(*samples("binary"), groups=PATIENTS)
    with pytest.raises(StorageError, match="name another folder"):
        model.save(tmp_path / "run")


def test_a_file_of_an_earlier_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(2)}, {"estimator": 1})
    for opening in (open_run, ManyDGClassifier.load):
        with pytest.raises(StorageError, match="earlier version"):
            opening(tmp_path)


def test_a_model_saved_over_another_replaces_it(tmp_path: Path) -> None:
    X, y = samples("binary")
    models = [quick(epochs=1, random_state=seed).fit(X, y, groups=PATIENTS) for seed in (0, 1)]
    runs = []
    for model in models:
        model.save(tmp_path)
        runs.append(open_run(tmp_path).record.run)
    assert runs[0] != runs[1]
    assert np.array_equal(ManyDGClassifier.load(tmp_path).predict_proba(X), models[1].predict_proba(X))
