"""What ``manydg predict`` does with values that no model can judge, and with what is not known yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from manydg import ManyDGClassifier, open_run
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.errors import DataError

PATIENTS, EACH, FEATURES = 14, 20, ["a", "b", "c"]


def frame_of(seed: int) -> pl.DataFrame:
    """Rows of patients whose feature ``a`` tells the class, shifted a little by patient."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(PATIENTS), EACH)
    label = rng.integers(0, 2, len(who))
    values = rng.normal(size=(len(who), 3)) + rng.normal(size=(PATIENTS, 3))[who] + label[:, None] * [2, 0, 0]
    values *= 0.01  # So that a model divides by little, and what nearly fills float32 overflows.
    return pl.DataFrame(
        {
            "who": [f"patient {number}" for number in who],
            "hour": np.tile(np.arange(EACH), PATIENTS),
            "state": np.array(["well", "ill"])[label],
            **{name: values[:, k] for k, name in enumerate(FEATURES)},
        }
    )


def train(commands: Any, folder: Path, *more: object) -> None:
    """``data`` and ``run`` in a folder, from a table."""
    frame_of(0).write_csv(folder / "train.csv")
    roles = ("--patient", "who", "--target", "state", "--time", "hour", "--features", *FEATURES)
    assert commands.run("prepare", "table", folder / "train.csv", *roles, "--out", folder / "data")[0] == 0
    small = ("--epochs", 2, "--device", "cpu", "--backbone", "mlp", "--set", "training.ratios=[0.5,0.3,0.2]", *more)
    code, _, err = commands.run("train", folder / "data", *small, "--out", folder / "run")
    assert code == 0, err


@pytest.fixture(scope="module")
def plain(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(commands, folder, "--algorithm", "base")
    return folder


@pytest.fixture(scope="module")
def causal(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    train(commands, folder, "--algorithm", "base", "--context", "causal")
    return folder


def predict(commands: Any, folder: Path, table: pl.DataFrame, out: Path) -> tuple[int, str]:
    table.write_csv(out.with_suffix(".csv"))
    code, said, err = commands.run("predict", folder / "run", out.with_suffix(".csv"), "--out", out)
    return code, said + err


@pytest.mark.parametrize("value", ["inf", "-inf", "1e39"])
def test_an_infinite_feature_is_refused_by_name_as_prepare_refuses_it(
    commands: Any, plain: Path, tmp_path: Path, value: str
) -> None:
    new = frame_of(1).with_columns(pl.col("b").cast(pl.String))
    new[7, "b"] = value
    code, said = predict(commands, plain, new, tmp_path / "new")
    assert code == 2
    assert f"{tmp_path / 'new.csv'}: feature 'b' in row 7 (the first row is 0) is infinite, or too large" in said
    assert "Traceback" not in said
    assert not (tmp_path / "new").exists()


def test_a_row_that_overflows_in_the_network_is_not_decided(commands: Any, plain: Path, tmp_path: Path) -> None:
    new = frame_of(1)
    new[7, "a"], new[7, "b"], new[7, "c"] = 3e38, -3e38, 3e38
    code, said = predict(commands, plain, new, tmp_path / "new")
    assert code == 0, said
    assert f"1 of {new.height} samples are not predicted: the model's output is not finite" in said
    told = pl.read_csv(tmp_path / "new" / "predictions.csv")
    numbers = [name for name in told.columns if name.startswith(("p_", "calibrated_"))]
    assert told[7].select("predicted", *numbers).row(0) == (None,) * (1 + len(numbers))
    assert "not finite" in told["not_predicted"][7]
    assert told["not_predicted"].null_count() == told["predicted"].len() - 1
    assert told["unlike_training"][7] is True
    others = told.filter(pl.col("row") != 7)
    assert others["predicted"].is_in(["well", "ill"]).all()
    assert others.select(numbers).to_numpy().all()
    assert "nan" not in (tmp_path / "new" / "predictions.csv").read_text().lower()
    assert told.filter(pl.col("row") // EACH == 0)["distance"].null_count() == EACH, "a patient's distance has no value"


def overflowing(rows: int = 12) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(2).normal(size=(rows, 3)).astype(np.float32)
    values[5] = 3e38, -3e38, 3e38
    return values


def unlabelled(values: np.ndarray[Any, Any]) -> DomainDataset:
    targets = np.arange(len(values)) % 2
    return from_arrays(values, targets, np.arange(len(values)), kind="binary", names=["ill", "well"])


def test_in_python_a_run_refuses_what_overflows_and_names_the_row(plain: Path) -> None:
    run = open_run(plain / "run")
    with pytest.raises(DataError, match=r"not finite for 1 of 12 samples, the first is row 5"):
        run.predict_proba(unlabelled(overflowing()))
    infinite = unlabelled(np.zeros((12, 3), np.float32))
    column = infinite.columns["x"]
    column[9, 1] = float("inf")  # type: ignore[index]
    with pytest.raises(DataError, match=r"input 'x' is infinite, or too large for float32, in row 9"):
        run.predict_proba(infinite)


@pytest.mark.parametrize("algorithm", ["manydg", "base"])
@pytest.mark.parametrize("labels", ["classes", "indicators"])
def test_the_estimator_refuses_what_overflows_and_names_the_row(algorithm: str, labels: str) -> None:
    rng = np.random.default_rng(0)
    X, groups = 0.01 * rng.normal(size=(120, 3)), np.repeat(np.arange(12), 10)
    y = (X > 0).astype(int) if labels == "indicators" else X[:, 0] > 0
    model = ManyDGClassifier(algorithm, epochs=2, random_state=0).fit(X, y, groups=groups)
    for ask in (model.predict, model.predict_proba):
        with pytest.raises(ValueError, match=r"the first is row 5"):
            ask(overflowing())
        with pytest.raises(ValueError, match="infinity"):
            ask(np.where(np.eye(3) > 0, np.inf, 0.0))


@pytest.mark.filterwarnings("error")
def test_trees_refuse_what_is_infinite_too() -> None:
    rng = np.random.default_rng(0)
    X, groups = 0.01 * rng.normal(size=(120, 3)), np.repeat(np.arange(12), 10)
    model = ManyDGClassifier("boosting", random_state=0).fit(X, X[:, 0] > 0, groups=groups)
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((2, 3), 1e39))


def test_no_column_of_a_causal_run_looks_ahead(commands: Any, causal: Path, tmp_path: Path) -> None:
    new = frame_of(1)
    later = new.with_columns(
        pl.when(pl.col("hour") >= 12).then(pl.col(name) * -30 + 1).otherwise(pl.col(name)).alias(name)
        for name in FEATURES
    )
    assert predict(commands, causal, new, tmp_path / "a")[0] == 0
    assert predict(commands, causal, later, tmp_path / "b")[0] == 0
    one, two = (pl.read_csv(tmp_path / name / "predictions.csv") for name in "ab")
    before = pl.Series(new["hour"] < 12)
    assert {"unlike_training", "distance"} <= set(one.columns)
    for column in one.columns:
        assert one.filter(before)[column].to_list() == two.filter(before)[column].to_list(), column
    assert one.filter(~before)["distance"].to_list() != two.filter(~before)["distance"].to_list()
    assert one.filter(before)["distance"].n_unique() > PATIENTS, "what is known of a patient grows with the samples"


def test_the_last_distance_of_a_causal_run_is_that_of_the_whole_patient(causal: Path) -> None:
    from manydg.training.inference import distances_so_far, patient_embeddings, read_calibration

    run = open_run(causal / "run")
    new = frame_of(1)
    data = from_arrays(
        new.select(FEATURES).to_numpy(), new["state"].to_list(), new["who"].to_list(), times=new["hour"].to_numpy()
    )
    prepared, calibration = run.prepare(data), read_calibration(causal / "run")
    assert calibration is not None
    assert calibration.reference is not None
    so_far = distances_so_far(run.algorithm, prepared, calibration.reference)
    _, whole = calibration.reference.distances(*patient_embeddings(run.algorithm, prepared))
    last = np.flatnonzero(new["hour"].to_numpy() == EACH - 1)
    np.testing.assert_allclose(so_far[last][np.argsort(new["who"].to_numpy()[last])], whole, rtol=1e-5)
