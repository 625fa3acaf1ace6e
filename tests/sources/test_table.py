"""Your own table to a dataset folder: what is read, and each way a table can be wrong."""

from __future__ import annotations

import csv
import datetime
import gzip
import importlib.util
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.sources import prepare, table
from manydg.sources.table import read_roles

ROWS = {
    "who": ["ann", "ann", "bob", "bob", "cem", "cem"],
    "stage": ["W", "N1", "W", "N2", "N1", "N2"],
    "eeg_a": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "eeg_b": [1, 0, 1, 0, 1, 0],
    "eog": [0.5, 0.25, -0.5, 8.0, 9.0, 1.0],
    "note": ["x", "y", "x", "y", "x", "y"],
}


def write(folder: Path, name: str = "table.parquet", **changes: Any) -> Path:
    frame = pl.DataFrame({**ROWS, **changes})
    path = folder / name
    if name.endswith(".parquet"):
        frame.write_parquet(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(frame.write_csv().encode()))
    else:
        frame.write_csv(path, separator="\t" if name.endswith(".tsv") else ",")
    return path


def prepared(file: Path, **options: Any) -> DomainDataset:
    given = {"patient": "who", "target": "stage", "features": ["eeg_*", "eog"], **options}
    return open_dataset(prepare("table", file, file.parent / "out", **given))


@pytest.mark.parametrize("name", ["table.parquet", "table.csv", "table.tsv", "table.csv.gz"])
def test_every_format_gives_the_same_dataset(tmp_path: Path, name: str) -> None:
    dataset = prepared(write(tmp_path, name))
    assert dataset.column("x").tolist() == [[a, b, c] for a, b, c in zip(*list(ROWS.values())[2:5], strict=True)]
    assert dataset.patients[dataset.domains.numpy()].tolist() == ROWS["who"]
    assert [dataset.target.names[code] for code in dataset.targets] == ROWS["stage"]
    assert dataset.info.settings == {"features": ["eeg_a", "eeg_b", "eog"]}
    assert [step.to_json() for step in dataset.info.cohort_flow] == [
        {"step": "rows of the table", "patients": 3, "samples": 6}
    ]
    (file,) = dataset.info.provenance.files
    assert (file.name, file.bytes) == (name, (tmp_path / name).stat().st_size)


def test_patient_target_and_time_are_never_features_and_that_is_said(tmp_path: Path) -> None:
    file = write(tmp_path, who=[1, 1, 2, 2, 3, 3], stage=[0, 1, 0, 1, 0, 1], clock=list(range(6)), note=[0.0] * 5 + [1])
    dataset = prepared(file, features=["*"], time="clock")
    assert dataset.info.settings["features"] == ["eeg_a", "eeg_b", "eog", "note"]
    assert dataset.info.provenance.options["left_out_of_features"] == ["who", "stage", "clock"]
    assert dataset.times is not None
    assert dataset.times.tolist() == list(range(6))
    assert dataset.target.kind == "binary"


def test_classes_can_be_put_in_order(tmp_path: Path) -> None:
    dataset = prepared(write(tmp_path), classes=["W", "N1", "N2", "N3"])
    assert dataset.target.names == ("W", "N1", "N2", "N3")
    assert dataset.targets.tolist() == [0, 1, 0, 2, 1, 2]
    with pytest.raises(DataError, match=r"\['N2'\] are not among the class names"):
        prepare(
            "table",
            write(tmp_path),
            tmp_path / "b",
            patient="who",
            target="stage",
            features=["eog"],
            classes=["W", "N1"],
        )


def test_several_target_columns_are_votes_or_labels_named_by_the_columns(tmp_path: Path) -> None:
    votes = {"v_seizure": [3, 0, 1, 2, 0, 9], "v_other": [0, 4, 1, 1, 2, 0]}
    dataset = prepared(write(tmp_path, **votes), target=["v_*"])
    assert (dataset.target.kind, dataset.target.names) == ("votes", ("v_seizure", "v_other"))
    assert dataset.targets.tolist() == [[3, 0], [0, 4], [1, 1], [2, 1], [0, 2], [9, 0]]
    (tmp_path / "labels").mkdir()
    drugs = {"aspirin": [1, 0, 1, 0, 0, 1], "heparin": [True, False, True, True, False, False]}
    dataset = prepared(write(tmp_path / "labels", **drugs), target=["aspirin", "heparin"])
    assert (dataset.target.kind, dataset.target.names) == ("multilabel", ("aspirin", "heparin"))


def test_dates_and_durations_become_seconds(tmp_path: Path) -> None:
    start = datetime.datetime(2020, 1, 1)
    dates = [start + datetime.timedelta(minutes=minute) for minute in range(6)]
    times = prepared(write(tmp_path, when=dates), time="when").times
    assert times is not None
    assert (times - times[0]).tolist() == [60.0 * minute for minute in range(6)]
    (tmp_path / "b").mkdir()
    lengths = [datetime.timedelta(hours=hour) for hour in range(6)]
    times = prepared(write(tmp_path / "b", when=lengths), time="when").times
    assert times is not None
    assert times.tolist() == [3600.0 * hour for hour in range(6)]


def test_missing_values_are_refused_with_row_and_column_or_kept(tmp_path: Path) -> None:
    file = write(tmp_path, "table.csv", eog=[0.5, None, 1.0, 2.0, None, 3.0])
    with pytest.raises(DataError, match=r"feature 'eog' in row 1 .* is missing, and so are 1 values .*--missing keep"):
        prepared(file, missing="refuse")
    assert not (tmp_path / "out").exists()
    dataset = prepared(file, missing="keep")
    assert np.isnan(dataset.column("x").numpy()[:, 2]).tolist() == [False, True, False, False, True, False]  # type: ignore[union-attr]
    assert dataset.info.settings["missing"] is True


def test_a_table_with_empty_cells_is_read_as_it_is_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(ManyDGWarning, match=r"1 of 3 features have empty values \(11\.1% of all\); they are kept"):
        dataset = prepared(write(tmp_path, "table.csv", eog=[0.5, None, 1.0, 2.0, None, 3.0]))
    assert dataset.info.settings["missing"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tmp_path / "whole").mkdir()
        assert "missing" not in prepared(write(tmp_path / "whole", "table.csv")).info.settings


def test_infinity_is_refused_even_where_missing_values_are_kept(tmp_path: Path) -> None:
    file = write(tmp_path, eog=[0.5, float("nan"), 1.0, float("inf"), 1.0, 3.0])
    said = rf"^{re.escape(str(file))}: feature 'eog' in row 3 \(the first row is 0\) is infinite"
    with pytest.raises(DataError, match=said):
        prepared(file, missing="keep")


def test_constant_features_are_kept_with_a_warning_that_names_them(tmp_path: Path) -> None:
    with pytest.warns(ManyDGWarning, match=r"the same value in every sample: feature 'eeg_b', feature 'eog'\. They"):
        dataset = prepared(write(tmp_path, eeg_b=[7] * 6, eog=[None] * 6), missing="keep")
    assert dataset.column("x").shape == (6, 3)  # type: ignore[union-attr]


def test_a_patient_for_every_row_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(ManyDGWarning, match="each of the 6 samples has a patient of its own"):
        prepared(write(tmp_path, who=list("abcdef")))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"patient": "whom"}, r"has no patient column 'whom': did you mean 'who'\?"),
        ({}, {"target": "stages"}, r"has no target column 'stages': did you mean 'stage'\?"),
        ({}, {"features": ["eeg_*", "eogg"]}, r"has no feature column 'eogg': did you mean 'eog'\?"),
        ({}, {"features": ["emg_*"]}, r"has no feature column 'emg_\*'"),
        ({}, {"features": ["who", "stage"]}, "leave no feature"),
        ({}, {"time": "note"}, r"time column 'note' holds text that is no time in row 0 \(the first row is 0\)"),
        ({"note": [[1]] * 6}, {"features": ["note"]}, r"feature 'note' has type List\(Int64\); features are numbers"),
        ({"eog": ["1", "2", "<0.02", "4", "neg", "6"]}, {}, "'eog' holds text in 2 rows, the first '<0.02' in row 2"),
        ({"eog": ["01/02/2020"] * 6}, {}, "the dates in 'eog' can be read with the day or the month first"),
        ({"stage": ["W"] * 6}, {}, r"all 6 targets are the same class \('W'\)"),
        (
            {"stage": ["W", None, "W", "N1", "N1", None]},
            {},
            "target column 'stage' is empty in 2 rows, the first is row 1",
        ),
        ({"stage": [0.5, 1.5, 0.1, 0.2, 0.3, 0.4]}, {}, "say --kind regression"),
        ({"stage": [datetime.date(2020, 1, day) for day in range(1, 7)]}, {}, "'stage' has type Date; it must hold"),
        ({"stage": [0, 1, 2, 0, 1, 2]}, {"kind": "binary"}, "binary target has two values; these have 3"),
        ({}, {"target": ["stage", "eeg_b"]}, "target column 'stage' is text"),
        ({"who": ["ann"] * 6}, {}, "all samples are of one patient"),
        ({"who": ["ann", None, "bob", "bob", "cem", "cem"]}, {}, "patient column 'who' is empty in 1 rows, .* row 1"),
        ({"who": [1.0, float("nan"), 2.0, 2.0, 3.0, 3.0]}, {}, "patient column 'who' is empty in 1 rows"),
    ],
)
def test_each_mistake_has_its_own_message(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepared(write(tmp_path, **changes), **options)
    assert "ann" not in str(caught.value)
    assert str(caught.value).count(str(tmp_path)) == 1, "the file is named, and once"
    assert not (tmp_path / "out").exists()


def test_a_measurement_as_target_is_refused(tmp_path: Path) -> None:
    rows = 60
    pl.DataFrame({"who": [r % 3 for r in range(rows)], "y": list(range(rows)), "x": list(range(rows))}).write_parquet(
        tmp_path / "t.parquet"
    )
    with pytest.raises(DataError, match="60 different values in 60 samples: is it a measurement"):
        prepare("table", tmp_path / "t.parquet", tmp_path / "out", patient="who", target="y", features=["x"])


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"patient": "who", "target": "stage", "features": ["eog"]}
    with pytest.raises(StorageError, match="there is no file"):
        prepare("table", tmp_path / "nothing.csv", tmp_path / "out", **options)
    with pytest.raises(StorageError, match="is a folder without a table: name one"):
        prepare("table", tmp_path, tmp_path / "out", **options)
    for name, content, error, message in [
        ("t.xlsx", b"x", DataError, "not a table this command reads"),
        ("t.parquet", b"not parquet at all", StorageError, "cannot read"),
        ("empty.csv", b"", StorageError, "cannot read"),
        ("header.csv", b"who,stage,eog\n", DataError, "has no rows"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=message):
            prepare("table", tmp_path / name, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="missing is one of auto, refuse, keep; got 'drop'"):
        prepared(write(tmp_path), missing="drop")


def test_a_parquet_file_that_polars_panics_over_is_refused_by_name(tmp_path: Path) -> None:
    rows = {"who": [f"p{row // 3}" for row in range(12)], "stage": ["a", "b"] * 6, "eog": [float(k) for k in range(12)]}
    file = tmp_path / "t.parquet"
    pl.DataFrame(rows).write_parquet(file)
    content, refused = file.read_bytes(), 0
    # Bits of page headers that make polars 1 panic, which is no Exception.
    for position, bit in [(58, 1), (58, 6), (60, 0), (60, 5), (88, 1), (92, 4)]:
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        file.write_bytes(changed)
        try:
            prepare("table", file, tmp_path / "out", overwrite=True, patient="who", target="stage", features=["eog"])
        except StorageError as error:
            assert str(error).startswith(f"cannot read {file}: ")  # noqa: PT017
            refused += 1
    assert refused


def test_an_existing_dataset_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    first = prepared(write(tmp_path))
    other = write(tmp_path, "other.parquet", eog=[9.0, 1, 2, 3, 4, 5])
    with pytest.raises(StorageError, match="already exists"):
        prepared(other)
    assert open_dataset(tmp_path / "out").content_hash() == first.content_hash()
    assert prepared(other, overwrite=True).content_hash() != first.content_hash()


def test_the_sleep_table_becomes_the_papers_cohort(tmp_path: Path, shared_data: Path) -> None:
    file = shared_data / "sleep_edf_78_features" / "epochs.parquet"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare("table", file, tmp_path / "sleep", patient="subject_id", target="stage", features=["EEG_*"])
    dataset = open_dataset(tmp_path / "sleep")
    assert (len(dataset), dataset.n_patients) == (414_961, 78)
    counts = dict(zip(dataset.target.names, np.bincount(dataset.targets.numpy()).tolist(), strict=True))
    assert counts == {"W": 285_433, "N1": 21_522, "N2": 69_132, "N3": 13_039, "REM": 25_835}
    assert dataset.column("x").shape == (414_961, 48)  # type: ignore[union-attr]


def test_the_kidney_example_joins_hours_to_patients(tmp_path: Path, shared_data: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "kidney_table.py"
    specification = importlib.util.spec_from_file_location("kidney_table", path)
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    table = example.join(shared_data / "aki_hourly_eicu_demo", shared_data / "eicu_demo")
    assert table.height == 78_205
    assert table["uniquepid"].n_unique() == 1_549
    assert table["label"].sum() == 8_830
    raw = pl.read_parquet(shared_data / "aki_hourly_eicu_demo" / "dyn.parquet")
    assert int(table["measured_crea"].sum()) == raw["crea"].count()
    # Carried forward by hand for one stay.
    stay = raw.group_by("stay_id").agg(pl.col("crea").count()).sort("crea", "stay_id")["stay_id"][-1]
    last, expected = float("nan"), []
    for value in raw.filter(pl.col("stay_id") == stay).sort("time")["crea"].to_list():
        last = value if value is not None else last
        expected.append(last)
    found = table.filter(pl.col("stay_id") == stay).sort("hour")["value_crea"].fill_null(float("nan")).to_list()
    assert found == pytest.approx(expected, nan_ok=True, rel=1e-6)
    # One row an hour of a stay, and the stays of a patient are numbered from 1.
    assert not table.select("uniquepid", "stay", "hour").is_duplicated().any()
    stays = table.select("uniquepid", "stay", "stay_id").unique()
    assert not stays.select("uniquepid", "stay").is_duplicated().any()
    assert stays["stay"].min() == 1


IDS = ["1000", "01000", "1e1", "10", "10.0", "98765432109876543210987", "98765432109876543210988"]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".parquet"])
@pytest.mark.parametrize("ids", [IDS, ["1000", "01000", "7"], ["10", "1e1", "5"]], ids=["all", "zeros", "exponents"])
def test_ids_of_patients_are_text(tmp_path: Path, ending: str, ids: list[str]) -> None:
    frame = pl.DataFrame({"who": np.repeat(ids, 2), "state": ["a", "b"] * len(ids), "x": np.arange(2.0 * len(ids))})
    path = tmp_path / f"table{ending}"
    if ending == ".parquet":
        frame.write_parquet(path)
    else:
        text = frame.write_csv(separator="\t" if ending == ".tsv" else ",").encode()
        path.write_bytes(gzip.compress(text) if ending == ".csv.gz" else text)
    with (
        pytest.warns(ManyDGWarning, match=r"patient ids are the number of another") if "01000" in ids else nullcontext()
    ):
        out = prepare("table", path, tmp_path / "out", patient="who", target=["state"], features=["x"])
    assert sorted(open_dataset(out).patients) == sorted(ids)
    patients, _ = read_roles(path, {"patient": "who"})
    assert patients is not None
    assert patients.tolist() == frame["who"].to_list()


def test_patient_ids_that_are_one_number_written_otherwise_are_warned_of_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "table.csv", who=["7", "007", "8", "8.0", "8", "1e1"])
    with pytest.warns(ManyDGWarning, match=r"table\.csv: 2 patient ids are the number of another with zeros"):
        assert len(prepared(path).patients) == 5


def test_ids_that_are_plain_numbers_keep_their_order_of_size(tmp_path: Path) -> None:
    frame = pl.DataFrame({"who": ["10", "9", "2", "2"], "state": ["a", "b", "a", "b"], "x": [1.0, 2.0, 3.0, 4.0]})
    frame.write_csv(tmp_path / "t.csv")
    out = prepare("table", tmp_path / "t.csv", tmp_path / "out", patient="who", target=["state"], features=["x"])
    assert open_dataset(out).patients.tolist() == ["2", "9", "10"]


def test_ids_too_large_for_a_number_of_the_file_are_told_apart_or_refused(tmp_path: Path) -> None:
    large = 2**63 + np.arange(3, dtype=np.uint64)
    frame = pl.DataFrame({"who": large.repeat(2), "state": ["a", "b"] * 3, "x": np.arange(6.0)})
    frame.write_parquet(tmp_path / "t.parquet")
    options: Any = {"patient": "who", "target": ["state"], "features": ["x"]}
    out = prepare("table", tmp_path / "t.parquet", tmp_path / "out", **options)
    assert sorted(open_dataset(out).patients) == [str(number) for number in large]
    frame.with_columns(pl.col("who").cast(pl.Float64)).write_parquet(tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"f.parquet: some patient ids are numbers that a float cannot tell"):
        prepare("table", tmp_path / "f.parquet", tmp_path / "no", **options)


def test_a_table_that_was_cut_is_refused(tmp_path: Path) -> None:
    text = "who,state,x\n1,a,1.5\n1,b,2.5\n2,a,3.5\n2,b"
    options: Any = {"patient": "who", "target": ["state"], "features": ["x"], "missing": "keep"}
    for name, content in (("t.csv", text.encode()), ("t.csv.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"is cut short: its last row has 2 of 3 fields"):
            prepare("table", tmp_path / name, tmp_path / "out", **options)


def test_a_parquet_file_that_unpacks_to_far_more_than_it_is_stops_at_the_limit(tmp_path: Path) -> None:
    rows = 40_000_000
    pl.select(who=pl.repeat(1, rows, dtype=pl.Int8), x=pl.repeat(0, rows, dtype=pl.Int8)).write_parquet(
        tmp_path / "bomb.parquet", compression="zstd"
    )
    options: Any = {"patient": "who", "target": ["x"], "features": ["x"]}
    with pytest.raises(DataError, match="announces 40,000,000 rows of 2 columns in"):
        prepare("table", tmp_path / "bomb.parquet", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bob,1,5,2,W", r"row 2 \(the first row is 0\) has 5 fields, its header 4"),
        ("bob,1,W", r"row 2 \(the first row is 0\) has 3 fields, its header 4"),
    ],
    ids=["a decimal comma", "a cell too few"],
)
def test_a_row_whose_cells_stand_in_other_columns_is_named(tmp_path: Path, line: str, says: str) -> None:
    # polars checks rows only where it reads all columns.
    file = tmp_path / "table.csv"
    file.write_text(f"who,eeg_a,eeg_b,stage\nann,1,2,W\nann,2,3,N1\n{line}\nbob,3,4,N1\n")
    with pytest.raises(DataError, match=says):
        prepared(file, features=["eeg_a"])


@given(
    cells=st.lists(st.lists(st.sampled_from(["", "1", "ä", '"a,b"', '"']), max_size=4), max_size=12),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    last=st.booleans(),
    block=st.integers(1, 40),
)
def test_rows_called_even_without_a_closer_look_are(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]], end: str, last: bool, block: int
) -> None:
    file = tmp_path_factory.mktemp("even") / "table.csv"
    file.write_bytes((end.join(",".join(row) for row in [["a", "b"], *cells]) + end * last).encode())
    with patch.object(table, "_BLOCK", block):
        quick = table._is_even(file, ",", 2)
    with file.open(newline="", encoding="utf-8") as text:
        even = all(len(row) == 2 for row in csv.reader(text) if row)
    assert even or not quick
    if all(len(row) == 2 and '"' not in "".join(row) for row in cells) and end != "\r":
        assert quick


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("who;eeg_a;stage\nann;1,5;W\n", r"separated by ';': save it with ',' between columns"),
        ("who,eeg_a,eeg_a,stage\nann,1,2,W\n", r"has the column 'eeg_a' twice"),
        ("who,eeg_ä,stage\nann,1,W\nbob,2,N1\n", r"is not UTF-8 text, in row 0"),
        ("who,eeg_a,stage\nann,1,W\nbob,2,weiß\n", r"is not UTF-8 text, in row 0"),
        ("\0".join("who,eeg_a,stage\nann,1,W\nbob,2,N1\n") + "\0", r"null bytes, as UTF-16 does: save it as UTF-8"),
        ("who,eeg_a,stage\rann,1,W\rbob,2,N1\r", r"end with a carriage return alone: save it with line feeds"),
    ],
    ids=["semicolons", "one name twice", "Latin-1 in the header", "Latin-1 in a cell", "UTF-16", "old Macs"],
)
def test_what_a_spreadsheet_wrote_otherwise_is_said_with_the_remedy(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "table.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=says):
        prepared(tmp_path / "table.csv", features=["eeg_*"])


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("who", ["ann", "ann ", "bob", "bob", "cem", "cem"], "1 patient ids differ from another only in the spaces"),
        ("who", ["ann", "ann", " ", "bob", "cem", "cem"], "some patient ids are blank"),
        ("stage", ["W", "N1", "W", " W", "N1", "N1 "], "2 classes differ from another only in the spaces"),
    ],
)
def test_names_that_differ_in_spaces_alone_are_refused(
    tmp_path: Path, column: str, values: list[str], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        prepared(write(tmp_path, "table.csv", **{column: values}))


def test_the_patient_is_not_the_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'who' is named as the patient and as the target"):
        prepared(write(tmp_path), target="who")
