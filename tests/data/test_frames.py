"""Tables of pandas and polars as datasets, signals with a rate, and new samples of any of these for a model."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.errors import ConfigError, DataError
from manydg.predict import predict_raw
from manydg.training.run import train

ROWS, PARTS = 120, {"parts": ["relative"]}


def table() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    ward = rng.choice(["ICU", "A"], ROWS)
    start = datetime.datetime(2024, 1, 1)
    return pl.DataFrame(
        {
            "who": [f"{row // 8:03d}" for row in range(ROWS)],
            "when": [start + datetime.timedelta(hours=row % 8) for row in range(ROWS)],
            "ward": ward,
            "unit": rng.integers(1, 4, ROWS),
            "male": rng.random(ROWS) < 0.5,
            "age": rng.normal(60, 9, ROWS),
            "ill": np.where(rng.random(ROWS) < 0.8, ward == "ICU", False),
        }
    )


def as_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    plain = pd.DataFrame({name: frame[name].to_list() for name in frame.columns})
    return plain.astype({"ward": "category", "unit": "category"})


def as_polars(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("ward").cast(pl.Categorical), pl.col("unit").cast(pl.String).cast(pl.Categorical))


def made(frame: Any, **options: Any) -> DomainDataset:
    return from_arrays(frame, "ill", "who", times="when", **options)


def test_frames_of_both_libraries_give_one_dataset() -> None:
    first, second = made(as_polars(table())), made(as_pandas(table()))
    third = made(table(), categorical=["unit"])
    assert first.content_hash() == second.content_hash() == third.content_hash()
    assert first.info.settings == second.info.settings == third.info.settings
    assert first.info.settings["features"] == ["male", "age"]
    assert list(first.info.settings["categories"]) == ["ward", "unit"]  # type: ignore[arg-type]
    assert (first.target.kind, first.n_patients) == ("binary", ROWS // 8)
    assert first.times is not None
    assert (first.times[:3] - first.times[0]).tolist() == [0, 3600, 7200]


@pytest.mark.parametrize("context", ["none", "causal"])
def test_a_run_predicts_frames_and_files_alike(tmp_path: Path, context: str) -> None:
    data = made(as_pandas(table()))
    run = train(data, backbone="mlp", algorithm="base", context=context, context_options=PARTS, epochs=2, device="cpu",
                out=tmp_path / "run")  # fmt: skip
    assert run.record.config.backbone == "mlp"
    expected = run.predict_proba(data)
    new = as_pandas(table()).drop(columns="ill")
    np.testing.assert_array_equal(run.predict_proba(new), expected)
    np.testing.assert_array_equal(run.predict_proba(as_polars(table())), expected)
    table().drop("ill").write_csv(tmp_path / "new.csv")
    (written,) = predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out", keep=["who"])
    lines = pl.read_csv(written, infer_schema=False)
    assert lines["who"].to_list() == table()["who"].to_list()
    np.testing.assert_allclose(lines["p_1"].cast(float).to_numpy(), expected[:, 1], atol=6e-6)
    with pytest.raises(DataError, match=r"the table lacks 1 features that the model was trained on: \['age'\]"):
        run.predict_proba(table().drop("age"))
    with pytest.raises(DataError, match="a dataset has patients and times of its own"):
        run.predict_proba(data, patients=[1])


def test_a_run_predicts_arrays_with_the_patients_given() -> None:
    rng = np.random.default_rng(0)
    x, who, when = rng.normal(size=(80, 3)).astype(np.float32), np.arange(80) // 8, np.arange(80) % 8
    data = from_arrays(x, x[:, 0] > 0, who, times=when.astype(np.float64))
    run = train(data, algorithm="base", context="causal", context_options=PARTS, epochs=1, device="cpu")
    expected = run.predict_proba(data)
    np.testing.assert_array_equal(run.predict_proba(x, patients=who, times=when), expected)
    np.testing.assert_array_equal(run.predict_proba({"x": x}, patients=who, times=when), expected)
    assert not np.allclose(run.predict_proba(x, times=when), expected), "context is the patient's own"
    with pytest.raises(DataError, match="the model was trained on arrays without names of features"):
        run.predict_proba(pd.DataFrame(x))


def test_signals_have_a_rate_and_channels() -> None:
    signal = np.random.default_rng(0).normal(size=(6, 2, 100)).astype(np.float32)
    data = from_arrays(signal, [0, 1] * 3, [1, 1, 2, 2, 3, 3], rate=100, channels=["C3", "C4"])
    assert list(data.columns) == ["signal"]
    assert data.info.settings == {"rate": 100.0, "channels": ["C3", "C4"], "unit": "uV"}
    with pytest.raises(DataError, match="3 names of channels for 2 channels"):
        from_arrays(signal, [0, 1] * 3, [1, 1, 2, 2, 3, 3], rate=100, channels=["a", "b", "c"])
    with pytest.raises(DataError, match=r"shape \(6, 100\); signals are \(rows, channels, samples\)"):
        from_arrays(signal[:, 0], [0, 1] * 3, [1, 1, 2, 2, 3, 3], rate=100)
    with pytest.raises(DataError, match="give their sampling rate too"):
        from_arrays(signal, [0, 1] * 3, [1, 1, 2, 2, 3, 3], channels=["a", "b"])


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ("data/eicu", [0, 1], "input 'x' is a path; .*open_dataset"),
        (Path("x.npy"), [0, 1], "input 'x' is a path"),
        (None, [0, 1], "input 'x' is nothing"),
        (scipy.sparse.eye(2).tocsr(), [0, 1], r"sparse matrix: give its dense form, \.toarray"),
        ([[1.0, 2.0], [1.0]], [0, 1], r"the rows of input 'x' differ in length: build it with manydg\.Ragged"),
        (np.eye(2), None, "targets are one label for each sample; got None"),
        (pd.DataFrame([[1, 2, 0], [3, 4, 1]], columns=["a", "a", "y"]), "y", "has the column 'a' twice"),
        (np.eye(2), "y", "targets is a name, which only a table with named columns has"),
        (pl.DataFrame({"a": [1, 2]}), "y", "the table has no target column 'y'; it has a"),
        (pd.DataFrame({"y": [0, 1]}), "y", "there are no features"),
    ],
)
def test_each_wrong_type_is_named_with_the_remedy(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(inputs, targets, [1, 2])


def test_train_names_what_it_was_given_instead_of_a_dataset() -> None:
    with pytest.raises(DataError, match=r"train takes a dataset, not str: build one with manydg.from_arrays, or open"):
        train("data/eicu")  # type: ignore[arg-type]
    data = from_arrays(np.eye(6), [0, 1] * 3, [1, 1, 2, 2, 3, 3])
    with pytest.raises(ConfigError, match=r"unknown backbone 'mpl'.*mlp"):
        train(data, backbone="mpl", algorithm="base", device="cpu")
