"""``manydg prepare table`` and ``manydg prepare arrays`` as they are typed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from manydg.cli import app
from manydg.data.dataset import open_dataset
from manydg.errors import DataError
from manydg.studies.records import read_results


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["prepare", *(str(argument) for argument in arguments)])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    frame = pl.DataFrame(
        {
            "subject": ["Jane Roe", "Jane Roe", "Max Moe", "Max Moe", "Kim Poe"],
            "stage": ["W", "N1", "W", "N1", "W"],
            "eeg_1": [1.0, 2.0, 3.0, 4.0, 5.0],
            "eeg_2": [2.0, 2.0, 2.0, 2.0, 2.0],
            "age": [30, 30, 40, 40, 50],
        }
    )
    frame.write_csv(tmp_path / "table.csv")
    return tmp_path / "table.csv"


def test_several_patterns_may_follow_one_option(table: Path, tmp_path: Path) -> None:
    who = ("table", table, "--patient", "subject", "--target", "stage")
    first = run(*who, "--features", "eeg_*", "age", "--out", tmp_path / "a")
    second = run(*who, "--features", "eeg_*", "--features", "age", "--out", tmp_path / "b")
    assert (first.exit_code, second.exit_code) == (0, 0)
    names = [open_dataset(tmp_path / folder).info.settings["features"] for folder in "ab"]
    assert names == [["eeg_1", "eeg_2", "age"]] * 2


def test_a_word_after_an_option_that_takes_one_is_no_feature(table: Path, tmp_path: Path) -> None:
    # Once it became a feature: a second name behind --target gave the model a label to read off.
    who = ("table", table, "--patient", "subject", "--out", tmp_path / "a")
    result = run(*who, "--target", "stage", "age", "--features", "eeg_*")
    assert result.exit_code == 2
    assert not (tmp_path / "a").exists()
    assert run(*who, "--target", "stage", "--features", "eeg_*", "age").exit_code == 0


def test_what_was_written_and_what_is_odd_is_said_without_naming_a_patient(table: Path, tmp_path: Path) -> None:
    result = run(
        "table", table, "--patient", "subject", "--target", "stage", "--features", "eeg_*", "stage", "age",
        "--classes", "W,N1", "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "5 samples of 3 patients" in result.output
    assert "binary of 2 (W, N1)" in result.output
    assert "input x: 3 float32 a sample" in result.output
    assert "not used as features, being patient, target, time, session, event or site: stage" in result.output
    constant = f"{tmp_path / 'table.csv'}: the same value in every sample: feature 'eeg_2'"
    assert f"manydg: warning: {constant}" in result.output
    assert "Roe" not in result.output


def test_arrays_are_prepared_by_command(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(6, 2, 20)))
    np.save(tmp_path / "y.npy", np.array([0, 1] * 3))
    np.save(tmp_path / "p.npy", np.array([1, 1, 2, 2, 3, 3]))
    files = ("--x", tmp_path / "x.npy", "--y", tmp_path / "y.npy", "--patient", tmp_path / "p.npy")
    result = run("arrays", *files, "--rate", "100", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "input signal: 2 x 20 float32 a sample" in result.output
    again = run("arrays", *files, "--out", tmp_path / "out")
    assert "already exists" in str(again.exception)
    assert run("arrays", *files, "--out", tmp_path / "out", "--overwrite").exit_code == 0


def test_a_mistake_is_our_error_and_an_unknown_option_is_refused(table: Path, tmp_path: Path) -> None:
    who = ("table", table, "--patient", "sujbect", "--target", "stage", "--features", "eeg_*", "--out", tmp_path / "o")
    result = run(*who)
    assert isinstance(result.exception, DataError)
    assert "did you mean 'subject'?" in str(result.exception)
    assert run(*who, "--feature", "age").exit_code == 2


def test_the_site_of_each_patient_is_kept_and_whole_sites_are_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(24), 6)
    rows = {"id": who, "y": rng.integers(0, 2, len(who)), "hospital": (who % 6) * 100, "f": rng.normal(size=len(who))}
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    named = ("--patient", "id", "--target", "y", "--features", "*", "--site", "hospital")
    result = run("table", tmp_path / "t.parquet", *named, "--out", tmp_path / "data")
    assert result.exit_code == 0, result.output
    data = open_dataset(tmp_path / "data")
    assert data.info.sites["7"] == "100"
    assert data.columns["x"].shape[1:] == (1,), "the site is no feature"
    assert "of 6 sites" in CliRunner().invoke(app, ["inspect", str(tmp_path / "data")]).output
    small = ("--epochs", 1, "--backbone", "mlp", "--seeds", 6, "--repeats", 1, "--split", "site")
    arguments = ("compare", tmp_path / "data", "--algorithms", "base", *small, "--out", tmp_path / "out")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "intervals draw the 6 tested sites first" in result.output
    records = read_results(tmp_path / "out")
    assert sorted(set(record.sites.values()).pop() for record in records) == ["0", "100", "200", "300", "400", "500"]
    assert all(len(set(record.sites.values())) == 1 for record in records)


def test_rows_without_a_site_are_named(tmp_path: Path) -> None:
    rows = {"id": [1, 1, 2], "y": [0, 1, 0], "hospital": ["A", None, "B"], "f": [0.1, 0.2, 0.3]}
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    named = ("--patient", "id", "--target", "y", "--features", "f", "--site", "hospital")
    result = run("table", tmp_path / "t.parquet", *named, "--out", tmp_path / "data")
    assert isinstance(result.exception, DataError)
    assert "1 rows have no site in 'hospital', the first is row 1" in str(result.exception)


@pytest.fixture
def stays(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    age, weight = rng.uniform(20, 90, 240), rng.normal(80, 10, 240)
    stay = pl.DataFrame({"person": [f"Jane {i // 4}" for i in range(240)], "age": age, "weight": weight})
    stay.with_columns(days=pl.Series(age / 10 + rng.normal(size=240))).write_csv(tmp_path / "stays.csv")
    return tmp_path / "stays.csv"


def test_a_measurement_is_questioned_and_the_flag_that_predicts_it_is_named(stays: Path, tmp_path: Path) -> None:
    who = ("table", stays, "--patient", "person", "--features", "age", "weight", "--target")
    fractions = run(*who, "days", "--out", tmp_path / "out")
    assert "to predict the number itself, say --kind regression" in str(fractions.exception)
    pl.read_csv(stays).with_columns(pl.col("days").mul(10).cast(pl.Int64)).write_csv(stays)
    whole = run(*who, "days", "--out", tmp_path / "out")
    assert "is it a measurement? Say --kind regression to predict the number" in str(whole.exception)
    assert not (tmp_path / "out").exists()


def test_a_number_is_prepared_as_a_regression_target_of_its_column(stays: Path, tmp_path: Path) -> None:
    who = ("table", stays, "--patient", "person", "--features", "*", "--target", "days", "--kind", "regression")
    told = run(*who, "--out", tmp_path / "out")
    assert told.exit_code == 0, told.output
    assert "target: regression of days" in told.output
    assert "Jane" not in told.output
    data, values = open_dataset(tmp_path / "out"), pl.read_csv(stays)["days"].to_numpy()
    assert (data.target.kind, data.target.names) == ("regression", ("days",))
    np.testing.assert_allclose(data.targets.numpy(), values.astype(np.float32))
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")])
    assert "Values of days" in shown.output
    assert "of the variance is between patients" in shown.output


def test_what_makes_no_sense_of_a_number_is_refused(stays: Path, tmp_path: Path) -> None:
    who = ("table", stays, "--patient", "person", "--features", "weight", "--kind", "regression")
    several = run(*who, "--target", "days", "--target", "age", "--out", tmp_path / "out")
    assert "a regression target is one column" in str(several.exception)
    classes = run(*who, "--target", "days", "--classes", "a,b", "--out", tmp_path / "out")
    assert "a regression target has no classes" in str(classes.exception)
    nameless = run(*who[:-2], "--target", "days", "--classes", "a,", "--out", tmp_path / "out")
    assert "--classes a, has an empty name" in str(nameless.exception)
    text = run(
        "table", stays, "--patient", "age", "--features", "weight", "--kind", "regression", "--target", "person",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert "'regression' targets are numbers" in str(text.exception)


def test_a_feature_that_is_the_target_in_another_unit_is_warned_of(stays: Path, tmp_path: Path) -> None:
    pl.read_csv(stays).with_columns(hours=-24 * pl.col("days")).write_csv(stays)
    who = ("table", stays, "--patient", "person", "--features", "*", "--target", "days", "--kind", "regression")
    told = run(*who, "--out", tmp_path / "out")
    assert "tells the target exactly: hours." in told.output
