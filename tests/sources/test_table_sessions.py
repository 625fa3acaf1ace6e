"""Nights and stays in a table: a patient's sessions follow each other and never mix, in training and prediction."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from manydg.data.context import add_context
from manydg.data.dataset import DomainDataset, InputSchema, open_dataset
from manydg.data.timeline import Timeline
from manydg.errors import ConfigError, DataError
from manydg.predict import predict_raw
from manydg.sources import prepare
from manydg.sources.table import lay_out, read_roles, session_gap
from manydg.training.run import train


def write(folder: Path, name: str = "table.parquet", **changes: Any) -> Path:
    rows = {
        "who": ["ann"] * 5 + ["bob"] * 3,
        "night": ["N10", "N9", "N9", "N10", "N9", "N1", "N1", "N1"],
        "epoch": [3, 1, 4, 0, 2, 7, 9, 8],
        "stage": ["W", "S", "S", "W", "W", "S", "S", "W"],
        "value": [float(number) for number in range(8)],
    }
    frame = pl.DataFrame({**rows, **changes})
    path = folder / name
    frame.write_parquet(path) if name.endswith("parquet") else frame.write_csv(path)
    return path


def prepared(file: Path, **options: Any) -> DomainDataset:
    roles = {"patient": "who", "target": "stage", "features": ["value", "night"], "time": "epoch", "session": "night"}
    return open_dataset(prepare("table", file, file.parent / "out", **{**roles, **options}))


def test_a_session_without_a_number_comes_before_those_with_one() -> None:
    times = lay_out(np.zeros(4), np.array(["N10", "N2", "N", "10"]), np.zeros(4), gap=1.0)
    assert times.tolist() == [6.0, 4.0, 2.0, 0.0]


def test_nights_follow_each_other_in_natural_order_with_a_pause_that_no_night_has(tmp_path: Path) -> None:
    dataset = prepared(write(tmp_path))
    # N9 (epochs 1 to 4) comes before N10 (0 to 3); the longest night takes 3, and 6 lie between two.
    assert dataset.info.settings["session_gap"] == 3.0
    assert dataset.times is not None
    assert dataset.times.tolist() == [12.0, 0.0, 3.0, 9.0, 1.0, 0.0, 2.0, 1.0]
    # The session is never a feature, even where a pattern means it.
    assert dataset.info.settings["features"] == ["value"]
    assert dataset.info.provenance.options["session"] == "night"


@pytest.mark.parametrize(
    "nights",
    [
        [10, 9, 9, 10, 9, 1, 1, 1],
        [1e3, -2.5, -2.5, 1e3, -2.5, 0.0, 0.0, 0.0],
        [datetime.date(2020, 10, 1 if late else 2) - datetime.timedelta(days=60 * late) for late in (0, 1, 1, 0, 1)]
        + [datetime.date(2020, 1, 1)] * 3,
        ["SC4001E0 2020-11-02", *["SC4001E0 2020-3-02"] * 2, "SC4001E0 2020-11-02", "SC4001E0 2020-3-02", *["x"] * 3],
    ],
    ids=["whole numbers", "numbers", "dates", "names"],
)
@pytest.mark.parametrize("name", ["table.parquet", "table.csv"])
def test_numbers_dates_and_names_sort_by_what_they_mean(tmp_path: Path, nights: list[Any], name: str) -> None:
    dataset = prepared(write(tmp_path, name, night=nights))
    assert dataset.times is not None
    assert dataset.times.tolist() == [12.0, 0.0, 3.0, 9.0, 1.0, 0.0, 2.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-50, 50)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_sessions_never_overlap_and_keep_their_own_time(rows: list[tuple[int, int, int]]) -> None:
    who, session, time = (np.array(column) for column in zip(*rows, strict=True))
    gap = session_gap(who, session, time.astype(float))
    laid = lay_out(who, session, time.astype(float), gap)
    for patient in np.unique(who):
        mine = who == patient
        assert laid[mine].min() == 0
        end = None
        for number in np.unique(session[mine]):
            part = mine & (session == number)
            assert (laid[part] - laid[part].min()).tolist() == (time[part] - time[part].min()).tolist()
            assert end is None or laid[part].min() == end + 2 * gap
            end = laid[part].max()
    line = Timeline.of(torch.from_numpy(who), torch.from_numpy(laid), gap)
    assert len(line.session.unique()) == len(set(zip(who.tolist(), session.tolist(), strict=True)))


def test_no_neighbour_is_taken_from_another_night(tmp_path: Path) -> None:
    before = add_context(prepared(write(tmp_path)), "causal", parts=("before",), scales=(1,)).columns["context"]
    # The first sample of N10 (row 3) and of N9 (row 1) have none; row 0 has row 3, of its own night.
    assert isinstance(before, torch.Tensor)
    assert before[:, 0].tolist() == [3.0, 0.0, 2.0, 0.0, -3.0, 0.0, 1.0, -2.0]


def test_a_session_needs_a_time_and_a_value_in_every_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a session column needs a time column"):
        prepared(write(tmp_path), time=None)
    with pytest.raises(DataError, match=r"has no session column 'nigth': did you mean 'night'\?"):
        prepared(write(tmp_path), session="nigth")
    nights = ["N1", None, "N1", "N1", "N1", "N1", "N1", "N1"]
    with pytest.raises(DataError, match="session column 'night' is empty in 1 rows, the first is row 1"):
        prepared(write(tmp_path, night=nights))


def test_a_new_table_is_laid_out_with_the_gap_of_the_training_data(tmp_path: Path) -> None:
    roles = {"patient": "who", "time": "epoch", "session": "night"}
    _, times = read_roles(write(tmp_path), roles, 100.0)
    assert times is not None
    assert times.tolist() == [206.0, 0.0, 3.0, 203.0, 1.0, 0.0, 2.0, 1.0]
    without = pl.read_parquet(tmp_path / "table.parquet").drop("night")
    without.write_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match="has no column 'night': the model was trained on samples of several sessions"):
        read_roles(tmp_path / "other.parquet", roles, 100.0)


def test_prediction_of_a_new_table_keeps_nights_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    who, night, epoch = (grid.ravel() for grid in np.meshgrid(np.arange(12), [1, 2], np.arange(8), indexing="ij"))
    value = rng.normal(size=len(who))
    label = np.where(value > 0, "yes", "no")
    frame = pl.DataFrame({"who": who, "night": night, "epoch": epoch, "stage": label, "value": value})
    frame.write_csv(tmp_path / "old.csv")
    app = pytest.importorskip("manydg.cli").app
    command = ["prepare", "table", "old.csv", "--patient", "who", "--target", "stage", "--features", "value"]
    command[2] = str(tmp_path / "old.csv")
    made = CliRunner().invoke(app, [*command, "--session", "night", "--time", "epoch", "--out", str(tmp_path / "data")])
    assert made.exit_code == 0, made.output
    options = {"parts": ["before"], "scales": [4]}
    dataset = open_dataset(tmp_path / "data")
    train(dataset, algorithm="base", context="causal", context_options=options, epochs=2, lr=0.05,
          ratios=(0.5, 0.25, 0.25), device="cpu", out=tmp_path / "run")  # fmt: skip
    first = frame.filter(pl.col("who") == 0)
    changed = first.with_columns(value=pl.when(pl.col("night") == 1).then(pl.col("value") + 9).otherwise("value"))
    answers = []
    for name, new in (("a", first), ("b", changed), ("c", first.filter(pl.col("night") == 2))):
        new.drop("stage").write_csv(tmp_path / f"{name}.csv")
        (written,) = predict_raw(tmp_path / "run", tmp_path / f"{name}.csv", tmp_path / name)
        with written.open() as file:
            answers.append([line["p_yes"] for line in csv.DictReader(file)])
    whole, other, alone = answers
    assert whole[8:] == other[8:] == alone
    assert whole[:8] != other[:8]


def test_a_model_takes_another_table_whose_nights_are_longer(tmp_path: Path) -> None:
    first = prepared(write(tmp_path))
    (tmp_path / "other").mkdir()
    epochs = [30, 1, 4, 0, 2, 7, 9, 8]
    second = prepared(write(tmp_path / "other", epoch=epochs))
    gaps = [data.info.settings["session_gap"] for data in (first, second)]
    assert gaps == [3.0, 30.0]
    InputSchema.of(first).check(InputSchema.of(second))


@pytest.mark.parametrize("hours", [3, 30])
def test_a_dataset_of_shorter_or_longer_nights_is_predicted_as_the_file_it_is_made_of(
    tmp_path: Path, hours: int
) -> None:
    old, new = (nights(patients, length) for patients, length in ((12, 12), (4, hours)))
    roles = {"patient": "who", "target": "stage", "features": ["value"], "time": "epoch", "session": "night"}
    for name, frame in (("old", old), ("new", new)):
        frame.write_csv(tmp_path / f"{name}.csv")
        prepare("table", tmp_path / f"{name}.csv", tmp_path / name, **roles)
    train(open_dataset(tmp_path / "old"), algorithm="boosting", settings={"rounds": 20}, context="causal",
          ratios=(0.5, 0.25, 0.25), out=tmp_path / "run")  # fmt: skip
    for raw in ("new", "new.csv"):
        predict_raw(tmp_path / "run", tmp_path / raw, tmp_path / f"predicted-{raw}")
    tables = [
        pl.read_csv(tmp_path / f"predicted-{raw}" / "predictions.csv", infer_schema=False) for raw in ("new", "new.csv")
    ]
    assert tables[0]["p_yes"].to_list() == tables[1]["p_yes"].to_list()


def nights(patients: int, length: int) -> pl.DataFrame:
    """Two nights of each patient, in which a value drifts from where the night began."""
    grid = np.meshgrid(np.arange(patients), [1, 2], np.arange(length), indexing="ij")
    who, night, epoch = (each.ravel() for each in grid)
    value = np.random.default_rng(length).normal(size=len(who)) + 0.2 * epoch
    label = np.where(value > 0.2 * epoch, "yes", "no")
    return pl.DataFrame({"who": who, "night": night, "epoch": epoch, "stage": label, "value": value})
