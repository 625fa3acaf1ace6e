"""MEDS: from a dataset of the standard and a label file to sequences of events."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manydg import sources
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, StorageError
from manydg.sources import TrainedOn
from manydg.sources import meds as source

meds = pytest.importorskip("meds", reason="the official MEDS schemas: pip install manydg[meds]")
DAY = datetime(2020, 1, 1)
ROWS: list[tuple[int, datetime | None, str, float | None]] = [
    (1, None, "GENDER//F", None),
    (1, datetime(1960, 1, 1), "MEDS_BIRTH", None),
    (1, DAY, "LAB//sodium//mmol", 140.0),
    (1, DAY, "LAB//potassium", math.nan),
    (1, DAY, "DIAGNOSIS//N17", None),
    (1, DAY + timedelta(hours=2), "LAB//sodium//mmol", 135.5),
    (1, DAY + timedelta(hours=3), "MEDS_DEATH", None),
    (2, DAY, "LAB//sodium//mmol", 150.0),
    (2, DAY + timedelta(days=9), "LAB//Sodium//mmol", 120.0),
    (3, DAY, "DIAGNOSIS//N17", None),
]
LABELS = [
    (2, DAY + timedelta(days=1), False),
    (1, DAY + timedelta(hours=2), True),
    (1, DAY + timedelta(hours=1), False),
    (2, DAY - timedelta(days=1), True),
]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A small dataset in two shards that the official schemas validate."""
    root = tmp_path / "raw"
    for name in ("data/train", "metadata", "labels"):
        (root / name).mkdir(parents=True)
    for shard, subjects in (("data/train/0", {1}), ("data/1", {2, 3})):
        rows = [row for row in ROWS if row[0] in subjects]
        columns = dict(
            zip(("subject_id", "time", "code", "numeric_value"), map(list, zip(*rows, strict=True)), strict=True)
        )
        types = {"time": pa.timestamp("us"), "numeric_value": pa.float32()}
        arrays = {name: pa.array(values, types.get(name), from_pandas=False) for name, values in columns.items()}
        pq.write_table(meds.DataSchema.align(pa.table(arrays)), root / f"{shard}.parquet")
    codes = sorted({row[2] for row in ROWS})
    pq.write_table(
        meds.CodeMetadataSchema.align(pa.table({"code": codes, "description": codes})), root / "metadata/codes.parquet"
    )
    write_labels(root, "boolean_value", [row[2] for row in LABELS], pa.bool_())
    return root


def write_labels(root: Path, column: str, values: list[object], kind: pa.DataType) -> None:
    times = pa.array([row[1] for row in LABELS], pa.timestamp("us"))
    table = pa.table(
        {"subject_id": [row[0] for row in LABELS], "prediction_time": times, column: pa.array(values, kind)}
    )
    pq.write_table(meds.LabelSchema.align(table), root / "labels" / "task.parquet")


def prepare(raw: Path, **options: object) -> DomainDataset:
    labels = options.pop("labels", raw / "labels")
    out = sources.prepare("meds", raw, raw.parent / "out", labels=labels, overwrite=True, **options)  # type: ignore[arg-type]
    return open_dataset(out)


def events(data: DomainDataset, row: int) -> list[tuple[str, float, list[tuple[str, float | None]]]]:
    words, kinds = data.info.vocabularies["events"], data.info.settings["event_kinds"]
    columns = [data.column(name) for name in ("event_kind", "event_time", "event_codes", "event_values")]
    kind, time, codes, values = (column.to_rows()[row] for column in columns if isinstance(column, Ragged))
    return [
        (kinds[k], t, [(words[c], None if math.isnan(v) else v) for c, v in zip(cs, vs, strict=True)])
        for k, t, cs, vs in zip(kind, time, codes, values, strict=True)  # type: ignore[call-overload]
    ]


def test_events_up_to_the_prediction_time_and_never_after(raw: Path) -> None:
    data = prepare(raw)
    assert data.patients[data.domains].tolist() == ["1", "1", "2"]
    assert data.targets.tolist() == [0, 1, 0]
    assert [event[:2] for event in events(data, 0)][2:] == [("DIAGNOSIS", -60.0), ("LAB", -60.0)]
    assert [event[:2] for event in events(data, 1)][2:] == [("DIAGNOSIS", -120.0), ("LAB", -120.0), ("LAB", 0.0)]
    assert events(data, 1)[-1][2] == [("LAB:LAB//sodium//mmol", 135.5)]
    assert all(word != "MEDS_DEATH:MEDS_DEATH" for word in data.info.vocabularies["events"])
    assert data.info.cohort_flow[-1].to_json() == {
        "step": "samples with 1 or more events up to the prediction time",
        "patients": 2,
        "samples": 3,
    }


def test_a_row_without_time_stands_first_and_birth_gives_the_age(raw: Path) -> None:
    data = prepare(raw)
    assert events(data, 0)[0][2] == [("GENDER:GENDER//F", None)]
    assert events(data, 0)[1][0] == "MEDS_BIRTH"
    static = data.column("static").tolist()  # type: ignore[union-attr]
    assert static[0] == pytest.approx([0.6, 0.0], abs=1e-3)
    assert static[2] == [0.0, 1.0]


def test_codes_keep_their_case_and_a_value_that_is_nan_is_missing(raw: Path) -> None:
    data = prepare(raw)
    assert events(data, 0)[-1][2] == [("LAB:LAB//potassium", None), ("LAB:LAB//sodium//mmol", 140.0)]


def test_all_codes_may_be_of_one_kind(raw: Path) -> None:
    data = prepare(raw, kinds="one")
    assert data.info.settings["event_kinds"] == ["event"]
    assert len(events(data, 0)[-1][2]) == 3
    with pytest.raises(ConfigError, match="kinds"):
        prepare(raw, kinds="two")


def test_integer_and_text_labels_are_classes(raw: Path) -> None:
    write_labels(raw, "integer_value", [3, 1, 2, 9], pa.int64())
    data = prepare(raw)
    assert (data.target.kind, data.target.names, data.targets.tolist()) == ("classes", ("1", "2", "3", "9"), [1, 0, 2])
    write_labels(raw, "categorical_value", ["b", "a", "b", "a"], pa.string())
    data = prepare(raw)
    assert (data.target.kind, data.target.names, data.targets.tolist()) == ("classes", ("a", "b"), [1, 0, 1])


def test_float_labels_are_values_to_predict(raw: Path) -> None:
    write_labels(raw, "float_value", [0.5, 0.25, 3.0, 0.125], pa.float32())
    data = prepare(raw)
    assert (data.target.kind, data.targets.tolist()) == ("regression", [3.0, 0.25, 0.5])


def test_labels_that_cannot_be_learned_are_errors(raw: Path) -> None:
    write_labels(raw, "float_value", [0.1, float("nan"), 0.3, 0.4], pa.float32())
    with pytest.raises(DataError, match="not finite"):
        prepare(raw)
    write_labels(raw, "boolean_value", [True] * 4, pa.bool_())
    with pytest.raises(DataError, match="nothing to learn"):
        prepare(raw)
    with pytest.raises(StorageError, match="no label file"):
        prepare(raw, labels=raw / "nowhere.parquet")
    with pytest.raises(DataError, match="prediction_time"):
        prepare(raw, labels=raw / "data" / "1.parquet")


def test_two_labels_for_one_time_are_an_error(raw: Path) -> None:
    frame = pl.read_parquet(raw / "labels" / "task.parquet")
    pl.concat([frame, frame.with_columns(~pl.col("boolean_value"))]).write_parquet(raw / "labels" / "task.parquet")
    with pytest.raises(DataError, match="two different labels"):
        prepare(raw)


def test_the_files_that_macos_puts_beside_others_are_passed_over(raw: Path) -> None:
    plain = prepare(raw).content_hash()
    for folder in (raw / "data", raw / "labels"):
        (folder / "._0.parquet").write_bytes(b"\0\5\x16\7")
    assert prepare(raw).content_hash() == plain


def test_damaged_or_foreign_data_are_errors_that_leave_nothing(raw: Path) -> None:
    shard = raw / "data" / "1.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"1\.parquet cannot be read as parquet"):
        prepare(raw)
    pl.DataFrame({"subject_id": [1], "code": ["a"]}).write_parquet(shard)
    with pytest.raises(DataError, match="no column 'time'"):
        prepare(raw)
    pl.DataFrame({"subject_id": ["x"], "time": [DAY], "code": ["a"]}).write_parquet(shard)
    with pytest.raises(DataError, match="whole numbers"):
        prepare(raw)
    shard.write_bytes(whole)
    labels = raw / "labels" / "task.parquet"
    written = labels.read_bytes()
    pl.read_parquet(labels).with_columns(subject_id=pl.lit(2**63, pl.UInt64)).write_parquet(labels)
    with pytest.raises(DataError, match=r"labels.* cannot be read as parquet .conversion from `u64` to `i64`"):
        prepare(raw)
    labels.write_bytes(written)
    with pytest.raises(DataError, match="not a MEDS dataset"):
        sources.prepare("meds", raw / "metadata", raw.parent / "out", labels=raw / "labels")
    assert [path.name for path in raw.parent.iterdir()] == ["raw"]


def test_new_subjects_get_the_training_vocabulary_at_their_last_event_or_at_given_times(raw: Path) -> None:
    data = prepare(raw)
    info = data.info
    trained = TrainedOn("meds", info.settings, info.vocabularies)
    (new,) = source.Meds().for_prediction(raw, trained, source.TimesOptions(raw / "labels"))
    columns, rows = new.columns, new.rows
    assert rows.height == 3
    for name in ("event_kind", "event_time", "event_codes"):
        assert columns[name].to_rows() == data.column(name).to_rows()  # type: ignore[union-attr]
    (new,) = source.Meds().for_prediction(raw, trained, source.TimesOptions())
    columns, rows = new.columns, new.rows
    assert rows["prediction_time"].to_list() == [
        DAY + timedelta(hours=3),
        DAY + timedelta(days=9),
        DAY,
    ]
    assert columns["event_codes"].to_rows()[1][-1] == [0]  # type: ignore[union-attr,index]


def test_a_twin_is_valid_by_the_official_schemas_and_goes_through(tmp_path: Path) -> None:
    twin = sources.synthesize("meds", tmp_path / "twin", patients=30, seed=1)
    for shard in (twin / "data").glob("*.parquet"):
        meds.DataSchema.validate(meds.DataSchema.align(pq.read_table(shard)))
    meds.LabelSchema.validate(meds.LabelSchema.align(pq.read_table(twin / "labels" / "readmission.parquet")))
    meds.SubjectSplitSchema.validate(
        meds.SubjectSplitSchema.align(pq.read_table(twin / "metadata" / "subject_splits.parquet"))
    )
    meds.DatasetMetadataSchema.validate(json.loads((twin / "metadata" / "dataset.json").read_text()))
    data = open_dataset(sources.prepare("meds", twin, tmp_path / "out", labels=twin / "labels" / "readmission.parquet"))
    assert data.n_patients == 30
    times = data.column("event_time")
    assert isinstance(times, Ragged)
    assert float(times.values.max()) <= 0.0  # type: ignore[union-attr]
    limited = sources.prepare(
        "meds", twin, tmp_path / "few", labels=twin / "labels" / "readmission.parquet", limit_patients=5
    )
    assert open_dataset(limited).n_patients == 5
