"""Tables as hospitals write them: categories, dates, empty columns, several files, and what is odd about them."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from manydg.data.columns import EMPTY, UNSEEN
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.predict import predict_raw
from manydg.sources import prepare
from manydg.training.export import export_run
from manydg.training.run import open_run, train

PATIENTS, VISITS = 24, 5


def hospital(patients: int = PATIENTS) -> pl.DataFrame:
    """A table in which the ward decides the outcome, mostly."""
    rng = np.random.default_rng(0)
    rows = patients * VISITS
    ward = rng.choice(["ICU", "Ward A", "Ward B"], rows)
    died = np.where(rng.random(rows) < 0.2, rng.random(rows) < 0.5, ward == "ICU")
    start = datetime.datetime(2024, 5, 1, 6, 30)
    return pl.DataFrame(
        {
            "mrn": [f"{number:04d}" for number in np.repeat(np.arange(patients), VISITS)],
            "seen": [start + datetime.timedelta(hours=int(hour)) for hour in rng.integers(0, 900, rows)],
            "born": [datetime.date(1900 + row // VISITS, 1, 31) for row in range(rows)],
            "ward": ward,
            "smoker": rng.choice(["True", "False"], rows),
            "waited": [f"{hour}:30:00" for hour in rng.integers(0, 50, rows)],
            "note": [f"remark {number}" for number in range(rows)],
            "lactate": rng.normal(size=rows),
            "never": pl.Series([None] * rows, dtype=pl.Float64),
            "died": np.where(died, "Yes", "no"),
        }
    )


def prepared(path: Path, **options: Any) -> DomainDataset:
    given = {"patient": "mrn", "target": "died", "features": ["*"], "time": "seen", "missing": "keep", **options}
    with pytest.warns(ManyDGWarning, match="the same value in every sample: feature 'never'"):
        return open_dataset(prepare("table", path, path.parent / "data", **given))


def test_all_columns_of_a_hospitals_csv_are_read_as_what_they_are(tmp_path: Path) -> None:
    table = hospital()
    table.write_csv(tmp_path / "hospital.csv")
    data = prepared(tmp_path / "hospital.csv")
    names = ["born (days before seen)", "smoker", "waited", "lactate", "never"]
    assert data.info.settings["features"] == names
    assert data.info.settings["categories"] == {"ward": [UNSEEN, EMPTY, "ICU", "Ward A", "Ward B"]}
    x = dict(zip(names, np.asarray(data.columns["x"]).T, strict=True))
    age = (table["seen"] - table["born"].cast(pl.Datetime)).dt.total_seconds() / 86400
    np.testing.assert_allclose(x["born (days before seen)"], age.to_numpy(), rtol=1e-6)
    np.testing.assert_array_equal(x["smoker"], (table["smoker"] == "True").to_numpy())
    np.testing.assert_array_equal(x["waited"], [float(text.split(":")[0]) + 0.5 for text in table["waited"]])
    assert np.isnan(x["never"]).all(), "a column that is empty in a CSV is missing, not text"
    codes = np.asarray(data.columns["categories"])[:, 0]
    levels = np.array(data.info.settings["categories"]["ward"])  # type: ignore[index,call-overload]
    assert levels[codes].tolist() == table["ward"].to_list()
    assert (data.target.kind, data.target.names) == ("binary", ("no", "Yes"))
    assert data.info.provenance is not None
    assert data.info.provenance.options["text_left_out"] == ["note"], "text that hardly two patients share"
    assert data.patients[0] == "0000", "ids are text"


@pytest.mark.parametrize("name", ["t.parquet", "t.feather", "t.tsv"])
def test_every_format_gives_the_same_categories_and_numbers(tmp_path: Path, name: str) -> None:
    table = hospital()
    table.write_csv(tmp_path / "t.csv")
    write = {"t.parquet": table.write_parquet, "t.feather": table.write_ipc}
    write.get(name, lambda path: table.write_csv(path, separator="\t"))(tmp_path / name)
    first = prepared(tmp_path / "t.csv")
    second = prepared(tmp_path / name, overwrite=True)
    assert first.content_hash() == second.content_hash()
    assert first.info.settings["categories"] == second.info.settings["categories"]


def test_the_tables_of_a_folder_are_one(tmp_path: Path) -> None:
    table = hospital()
    table.write_csv(tmp_path / "whole.csv")
    (tmp_path / "parts").mkdir()
    for number, part in enumerate(table.iter_slices(40)):
        # The first has a column that is empty there alone.
        part.with_columns(lactate=None if number == 0 else pl.col("lactate")).write_csv(
            tmp_path / "parts" / f"part{number + 9}.csv"
        )
    (tmp_path / "parts" / "._part9.csv").write_bytes(b"\0\5\x16\7")  # macOS puts it there.
    parts = prepared(tmp_path / "parts")
    assert len(parts) == len(table)
    assert np.isnan(np.asarray(parts.columns["x"])[:, 3]).sum() == 40
    assert parts.info.provenance is not None
    assert [file.name for file in parts.info.provenance.files] == ["part9.csv", "part10.csv", "part11.csv"]
    pl.DataFrame({"mrn": [1]}).write_csv(tmp_path / "parts" / "part12.csv")
    with pytest.raises(DataError, match=r"part12\.csv and part9\.csv in .* have different columns \(born, died, lac"):
        prepare("table", tmp_path / "parts", tmp_path / "b", patient="mrn", target="died", features=["*"])
    (tmp_path / "none").mkdir()
    with pytest.raises(StorageError, match="is a folder without a table"):
        prepare("table", tmp_path / "none", tmp_path / "b", patient="mrn", target="died", features=["*"])


def test_numbers_may_be_categories_and_text_that_nobody_shares_is_taken_if_named(tmp_path: Path) -> None:
    table = hospital().with_columns(unit=pl.Series([1.0, 2.0, None, 1.0, 3.0] * PATIENTS))
    table.write_csv(tmp_path / "t.csv")
    data = prepared(tmp_path / "t.csv", categorical=["unit", "note"])
    levels = data.info.settings["categories"]
    assert levels["unit"] == [UNSEEN, EMPTY, "1", "2", "3"]  # type: ignore[index,call-overload]
    assert levels["note"] == [UNSEEN, EMPTY], "what one patient alone has is not stored"  # type: ignore[index,call-overload]
    assert np.asarray(data.columns["categories"])[:5, 2].tolist() == [2, 3, 1, 2, 4]
    table.with_columns(pl.col("unit").cast(pl.Int8)).write_parquet(tmp_path / "t.parquet")
    again = prepared(tmp_path / "t.parquet", categorical=["unit", "note"], overwrite=True)
    assert again.content_hash() == data.content_hash(), "3, 3.0 and '3' are one level"


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["2024-05-01 06:00", "2024-05-02 07:30"], (0.0, 91800.0)),
        (["2024-05-01T06:00:00.5Z", "2024-05-01T06:00:01.5Z"], (0.0, 1.0)),
        (["31/12/2023", "01/01/2024"], (0.0, 86400.0)),
        (["12/31/2023", "01/01/2024"], (0.0, 86400.0)),
        (["1 day 00:00:10", "25:00:00"], (0.0, 3590.0)),
        (["06:00", "18:30"], (0.0, 45000.0)),
    ],
)
def test_times_that_are_text_are_read(tmp_path: Path, texts: list[str], values: tuple[float, float]) -> None:
    table = hospital().with_columns(seen=pl.Series(texts * (PATIENTS * VISITS // 2)))
    table.write_csv(tmp_path / "t.csv")
    times = prepared(tmp_path / "t.csv", features=["lactate", "never"]).times
    assert times is not None
    assert (times[:2] - times[0]).tolist() == pytest.approx(values)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("2024-05-01 06:00", "2024-02-30 06:00"),
        ("2024-05-01 06:00", "0000-00-00"),
        ("2024-05-01 06:00", "2024-05-01"),
        ("2024-05-01T06:00:00", "2024-05-01T06:00:00+01:00"),
        ("31/12/2023", "12/31/2023"),
        ("06:00", "10:00 PM"),
        ("12.5", "late"),
    ],
)
def test_the_row_of_a_text_that_is_no_time_is_named(tmp_path: Path, usual: str, odd: str) -> None:
    seen = [usual] * (PATIENTS * VISITS)
    seen[7] = odd
    hospital().with_columns(seen=pl.Series(seen)).write_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"t\.csv: time column 'seen' holds text that is no time in row 7 \("):
        prepare(
            "table", tmp_path / "t.csv", tmp_path / "b", patient="mrn", target="died", features=["lactate"], time="seen"
        )


def test_dates_that_can_be_read_two_ways_are_refused(tmp_path: Path) -> None:
    hospital().with_columns(seen=pl.lit("01/02/2024")).write_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"t\.csv: the dates in 'seen' can be read with the day or the month first"):
        prepare("table", tmp_path / "t.csv", tmp_path / "b", patient="mrn", target="died", features=["lactate"],
                time="seen")  # fmt: skip


def test_a_table_without_a_plain_number_is_prepared_too(tmp_path: Path) -> None:
    hospital().write_csv(tmp_path / "t.csv")
    out = prepare("table", tmp_path / "t.csv", tmp_path / "out", patient="mrn", target="died", time="seen",
                  features=["ward", "born"])  # fmt: skip
    data = open_dataset(out)
    assert data.column("x").shape == (len(data), 1)
    assert np.isfinite(data.column("x").numpy()).all()


def test_repeated_rows_identifiers_and_features_that_tell_the_target_are_warned_of(tmp_path: Path) -> None:
    table = hospital().drop("never", "note")
    odd = table.with_columns(
        (pl.col("died") == "Yes").cast(pl.Float64).alias("outcome_code"),
        pl.when(pl.col("died") == "Yes").then(pl.lit(1.5)).alias("days_to_death"),
        pl.col("died").alias("status"),
        pl.Series("stay_id", range(table.height)),
    )
    pl.concat([odd, odd[:3]]).write_csv(tmp_path / "t.csv")
    with pytest.warns(ManyDGWarning) as caught:
        prepare("table", tmp_path / "t.csv", tmp_path / "out", patient="mrn", target="died", features=["*"],
                missing="keep")  # fmt: skip
    assert {entry.filename for entry in caught} == {__file__}, "warnings point to the caller's line"
    messages = [str(entry.message) for entry in caught]
    assert any("3 of 123 rows repeat an earlier row" in message for message in messages)
    assert any("alone tells the target exactly: outcome_code, days_to_death, status. Is it" in m for m in messages)
    assert any("named like identifiers: stay_id" in message for message in messages)
    assert not any("ward" in message for message in messages)


def test_a_target_of_many_numbers_is_questioned_unless_they_are_said_to_be_classes(tmp_path: Path) -> None:
    rows = {"who": np.repeat(np.arange(50), 20), "x": np.random.default_rng(0).normal(size=1000)}
    pl.DataFrame(rows | {"days": np.arange(1000) % 30}).write_csv(tmp_path / "t.csv")
    options: dict[str, Any] = {"patient": "who", "target": "days", "features": ["x"]}
    with pytest.raises(DataError, match=r"30 different values in 1000 samples: is it a measurement\?.*--kind classes"):
        prepare("table", tmp_path / "t.csv", tmp_path / "out", **options)
    data = open_dataset(prepare("table", tmp_path / "t.csv", tmp_path / "out", kind="classes", **options))
    assert data.target.size == 30


@pytest.mark.parametrize("algorithm", ["base", "boosting"])
def test_a_model_of_categories_predicts_a_new_table_with_levels_it_has_never_seen(
    tmp_path: Path, algorithm: str
) -> None:
    hospital(100).drop("never").write_csv(tmp_path / "old.csv")
    prepare("table", tmp_path / "old.csv", tmp_path / "data", patient="mrn", target="died", time="seen",
            features=["ward", "lactate", "born"])  # fmt: skip
    settings = {"rounds": 30} if algorithm == "boosting" else {}
    run = train(open_dataset(tmp_path / "data"), algorithm=algorithm, settings=settings, epochs=8, lr=0.02,
                ratios=(0.6, 0.2, 0.2), device="cpu", out=tmp_path / "run")  # fmt: skip
    assert run.record.test["auroc"] is not None
    row = hospital()[:1].drop("died", "never")
    new = pl.concat([row.with_columns(ward=pl.lit(ward)) for ward in ("ICU", "Ward A", "Hospice", "Annexe", None)])
    new.with_columns(lactate=pl.lit(0.0)).write_csv(tmp_path / "new.csv")
    (written,) = predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out", keep=["mrn", "ward"])
    with written.open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0])[:3] == ["row", "mrn", "ward"]
    assert [line["mrn"] for line in lines] == ["0000"] * 5, "ids are kept as they are written"
    risk = [float(line["p_Yes"]) for line in lines]
    assert risk[0] > risk[1] + 0.1, "the ward decides"
    assert risk[2] == risk[3], "all unseen levels are one"
    (plain,) = predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "plain")
    assert plain.read_text().startswith("row,predicted"), "no id unless it is asked for"
    with pytest.raises(DataError, match="has no kept column 'wards': did you mean 'ward'"):
        predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "b", keep=["wards"])
    new.with_columns(lactate=pl.lit("<2")).write_csv(tmp_path / "text.csv")
    with pytest.raises(
        DataError, match=r"'lactate' holds text in 5 rows.*reads numbers there, so correct them or leave"
    ):
        predict_raw(tmp_path / "run", tmp_path / "text.csv", tmp_path / "c")
    exported = export_run(tmp_path / "run", tmp_path / "model.pt2", "torch")
    assert exported.difference < 1e-4
    assert exported.metadata["settings"]["categories"] == {"ward": [UNSEEN, EMPTY, "ICU", "Ward A", "Ward B"]}
    assert open_run(tmp_path / "run").schema.categories() == {"ward": 5}


def test_a_dataset_with_other_levels_is_refused_by_a_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"patient": "mrn", "target": "died", "features": ["ward", "lactate"]}
    hospital().write_csv(tmp_path / "a.csv")
    hospital().with_columns(ward=pl.col("ward").replace("ICU", "Zoo")).write_csv(tmp_path / "b.csv")
    first, second = (
        open_dataset(prepare("table", tmp_path / f"{name}.csv", tmp_path / name, **options)) for name in "ab"
    )
    run = train(first, algorithm="base", epochs=1, device="cpu")
    with pytest.raises(DataError, match="the categories have other levels here"):
        run.predict_proba(second)


def test_types_are_those_of_all_rows_though_the_first_suggest_others(tmp_path: Path) -> None:
    rows = 12_000
    late = [None] * (rows - 3)
    frame = pl.DataFrame(
        {
            "who": [f"p{row // 60}" for row in range(rows)],
            "y": [row % 2 for row in range(rows)],
            "late": [*late, "1.5", "2", "3"],
            "flag": [*late, "true", "false", "true"],
            "grows": [*map(str, range(rows - 1)), "0.5"],
            "mixed": [*[str(row % 3) for row in range(rows - 3)], "low", "low", "low"],
        }
    )
    frame.write_csv(tmp_path / "table.csv")
    options: dict[str, Any] = {"target": ["y"], "patient": "who", "features": ["*"], "missing": "keep"}
    with pytest.raises(DataError, match=r"feature 'mixed' holds text in 3 rows, the first 'low' in row 11997"):
        prepare("table", tmp_path / "table.csv", tmp_path / "no", **options)
    data = open_dataset(prepare("table", tmp_path / "table.csv", tmp_path / "out", categorical=["mixed"], **options))
    assert data.info.settings["features"] == ["late", "flag", "grows"]
    assert data.columns["x"][-3:, 0].tolist() == [1.5, 2.0, 3.0]
    assert data.columns["x"][-3:, 1].tolist() == [1.0, 0.0, 1.0]
    assert data.columns["x"][-1, 2] == 0.5


def laboratory() -> pl.DataFrame:
    """A laboratory's numbers, some of them limits, some text."""
    rows = 240
    crp = [f"{row % 40 + 5}" for row in range(rows)]
    crp[::6] = ["<5"] * len(crp[::6])
    crp[7], crp[8], crp[13] = "haemolysed", "10-20", ""
    return pl.DataFrame(
        {"who": [f"p{row // 10}" for row in range(rows)], "crp": crp,
         "age": [row % 70 + row / 1000 for row in range(rows)], "y": [row % 2 for row in range(rows)]}
    )  # fmt: skip


LABORATORY: dict[str, Any] = {"target": ["y"], "patient": "who", "features": ["crp", "age"], "missing": "keep"}


def test_limits_in_a_column_of_numbers_are_named_with_a_remedy_and_read_on_request(tmp_path: Path) -> None:
    laboratory().write_csv(tmp_path / "lab.csv")
    with pytest.raises(DataError, match=r"'crp' holds text in 42 rows, the first '<5' in row 0.*--measured 'crp'"):
        prepare("table", tmp_path / "lab.csv", tmp_path / "no", **LABORATORY)
    with pytest.warns(ManyDGWarning, match=r"41 limits or ranges in 'crp' count as numbers, 1 others such as 'haemol"):
        out = prepare("table", tmp_path / "lab.csv", tmp_path / "out", measured=["cr*"], **LABORATORY)
    data = open_dataset(out)
    crp = data.columns["x"][:, 0].tolist()
    assert (crp[0], crp[1], crp[8]) == (5.0, 6.0, 15.0)
    assert np.isnan(crp[7])
    assert np.isnan(crp[13])
    train(data, algorithm="base", epochs=1, out=tmp_path / "run")
    (file,) = predict_raw(tmp_path / "run", tmp_path / "lab.csv", tmp_path / "predicted", keep=["crp"])
    assert pl.read_csv(file)["crp"][0] == "<5"


@pytest.mark.parametrize("ending", [".duckdb", ".sqlite", ".csv"])
def test_a_query_is_a_table_for_preparing_and_predicting(ending: str, tmp_path: Path) -> None:
    import sqlite3

    import duckdb

    frame, path, table = laboratory().drop("crp"), tmp_path / f"data{ending}", "data" if ending == ".csv" else "visits"
    if ending == ".csv":
        frame.write_csv(path)
    elif ending == ".duckdb":
        with duckdb.connect(str(path)) as database:
            database.register("frame", frame.to_arrow())
            database.execute("CREATE TABLE visits AS SELECT * FROM frame")
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE visits (who TEXT, age REAL, y INTEGER)")
            connection.executemany("INSERT INTO visits VALUES (?, ?, ?)", frame.rows())
    before = path.read_bytes()
    query = f"SELECT who, age, y FROM {table} WHERE age >= 20"
    options = LABORATORY | {"features": ["age"]}
    data = open_dataset(prepare("table", path, tmp_path / "out", query=query, **options))
    assert len(data) == frame.filter(pl.col("age") >= 20).height
    assert 20 <= float(data.columns["x"].min()) < 21
    assert data.info.provenance is not None
    assert data.info.provenance.options["query"] == query
    train(data, algorithm="base", epochs=1, out=tmp_path / "run")
    (file,) = predict_raw(tmp_path / "run", path, tmp_path / "predicted", query=query, keep=["who"])
    assert pl.read_csv(file).height == len(data)
    with pytest.raises((DataError, ConfigError), match=rf"the query on .*data\{ending} failed"):
        prepare("table", path, tmp_path / "no", query="SELECT nothing FROM nowhere", **options)
    if ending != ".csv":
        with pytest.raises(ConfigError, match="is a database: say what to read of it with a query"):
            prepare("table", path, tmp_path / "no", **options)
        with pytest.raises(DataError, match="failed"):
            prepare("table", path, tmp_path / "no", query="DELETE FROM visits", **options)
    if ending == ".duckdb":
        with pytest.raises(DataError, match="failed"):
            prepare("table", path, tmp_path / "no", query=f"COPY visits TO '{tmp_path}/stolen.csv'", **options)
        assert not (tmp_path / "stolen.csv").exists()
    assert path.read_bytes() == before


def test_what_an_unordered_query_gives_is_each_patients_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    who = np.repeat([f"{number:04d}" for number in range(1000)], 4)
    visits = pl.DataFrame({"who": who, "hour": np.tile(np.arange(4), 1000), "x": rng.normal(size=4000)})
    visits = visits.with_columns(y=(pl.col("x") + rng.normal(size=4000) > 0).cast(pl.Int64))
    pl.concat([visits, visits]).sample(fraction=1.0, shuffle=True, seed=1).write_csv(tmp_path / "visits.csv")
    query = "SELECT who, hour, AVG(x) AS x, MAX(y) AS y FROM data GROUP BY who, hour"
    options: dict[str, Any] = {"patient": "who", "target": "y", "features": ["x"]}
    data = open_dataset(prepare("table", tmp_path / "visits.csv", tmp_path / "data", query=query, **options))
    run = train(data, algorithm="base", epochs=1, out=tmp_path / "run")
    raw, out = tmp_path / "visits.csv", tmp_path / "predicted"
    (file,) = predict_raw(tmp_path / "run", raw, out, query=query, keep=["who", "hour", "x"])
    found = pl.read_csv(file, schema_overrides={"who": pl.String})
    expected = found.drop("x").join(visits, on=["who", "hour"], maintain_order="left")
    np.testing.assert_allclose(found["x"].to_numpy(), expected["x"].to_numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["p_1"], run.predict_proba(expected.select("x"))[:, 1], atol=1e-5)
