"""Events in a table: when they begin, what is to be foreseen, and the groups that results are broken down by."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError
from manydg.sources import prepare

ROLES = {"patient": "who", "features": ["value"], "time": "hour", "session": "stay", "time_unit": "h"}
# Ann's first stay has its onset at hour 4, her second none; Bob's is at hour 1.5, between two samples.
HOURS = {
    "who": ["ann"] * 6 + ["ann"] * 2 + ["bob"] * 3,
    "stay": [1] * 6 + [2] * 2 + [1] * 3,
    "hour": [0.0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2],
    "value": [float(number) for number in range(11)],
    "onset": [4.0] * 6 + [None] * 2 + [1.5] * 3,
}
LABELS = [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]
BEGUN = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]


def write(folder: Path, name: str = "table.parquet", **changes: Any) -> Path:
    frame = pl.DataFrame({**HOURS, **changes}, strict=False)
    frame.write_parquet(folder / name) if name.endswith("parquet") else frame.write_csv(folder / name)
    return folder / name


def prepared(file: Path, **options: Any) -> DomainDataset:
    event = {"event": "onset", "horizon": "2h"}
    return open_dataset(prepare("table", file, file.parent / "out", **{**ROLES, **event, **options}))


def begun(data: DomainDataset) -> list[int]:
    assert data.times is not None
    return [int(value) for value in data.times >= data.metadata["onset"]]


@pytest.mark.parametrize("name", ["table.parquet", "table.csv"])
@pytest.mark.parametrize(
    "onset",
    [
        HOURS["onset"],
        [None, 4.0, None, None, None, None, None, None, None, None, 1.5],
        [4, 4, 4, 4, 4, 4, None, None, 1.5, 1.5, 1.5],
    ],
    ids=["in every row", "in one row of a stay", "whole numbers"],
)
def test_the_target_is_positive_within_the_horizon_before_onset(tmp_path: Path, onset: list[Any], name: str) -> None:
    data = prepared(write(tmp_path, name, onset=onset))
    assert data.targets.tolist() == LABELS
    assert begun(data) == BEGUN
    assert (data.target.kind, data.target.names) == ("binary", ("no", "onset"))
    event = data.info.event
    assert event is not None
    assert (event.name, event.horizon, event.day, event.foresee) == ("onset", 2.0, 24.0, True)
    assert data.info.cohort_flow[-1].counts == {
        "onsets": 2, "samples_within_the_horizon": 4, "samples_from_onset_on": 3
    }  # fmt: skip
    # The onset tells the target, so that it is never a feature, and stays when rows are selected.
    assert data.info.settings["features"] == ["value"]
    assert begun(data.select(np.array([10, 4, 0]))) == [1, 1, 0]


def test_a_flag_begins_the_event_in_its_first_row_though_it_may_end_again(tmp_path: Path) -> None:
    data = prepared(write(tmp_path, onset=[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]))
    assert data.targets.tolist() == LABELS
    assert begun(data) == BEGUN


def test_an_event_that_every_stay_has_is_read_from_fractions_and_flags_may_be_fractions(tmp_path: Path) -> None:
    for name, onset in (("time", [4.0] * 6 + [9.0] * 2 + [1.5] * 3), ("flag", [float(value) for value in BEGUN])):
        (tmp_path / name).mkdir()
        assert begun(prepared(write(tmp_path / name, onset=onset))) == BEGUN


def test_dates_and_durations_need_no_unit(tmp_path: Path) -> None:
    start = datetime.datetime(2026, 1, 1)
    when = [start + datetime.timedelta(hours=hour) for hour in HOURS["hour"]]
    onset = [None if hour is None else start + datetime.timedelta(hours=hour) for hour in HOURS["onset"]]
    data = prepared(write(tmp_path, hour=when, onset=onset), time_unit=None)
    assert data.targets.tolist() == LABELS
    assert begun(data) == BEGUN
    assert data.info.event is not None
    assert (data.info.event.horizon, data.info.event.day) == (7200.0, 86400.0)


def test_with_labels_of_ones_own_every_sample_may_be_trained_on(tmp_path: Path) -> None:
    own = [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    (tmp_path / "own").mkdir()
    mine = prepared(write(tmp_path / "own", label=own), target=["label"])
    made = prepared(write(tmp_path))
    rows = np.arange(len(made))
    assert mine.targets.tolist() == own
    assert mine.learnable(rows).tolist() == rows.tolist()
    assert made.learnable(rows).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert mine.info.event is not None
    assert not mine.info.event.foresee


def test_the_content_says_whether_an_event_is_to_be_foreseen(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    mine = prepared(write(tmp_path / "own", label=LABELS), target=["label"], classes=["no", "onset"])
    assert mine.content_hash() != prepared(write(tmp_path)).content_hash()


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"horizon": None}, {}, "go together"),
        ({"event": None, "target": ["value"]}, {}, "go together"),
        ({"event": None, "horizon": None}, {}, "the option target is needed"),
        ({"horizon": "6 hours"}, {}, "such as 6h"),
        ({"horizon": "0h"}, {}, "such as 6h"),
        ({"time": None, "session": None}, {}, "needs a time column"),
        ({"time_unit": None}, {}, "--time-unit h"),
        ({}, {"onset": [4.0, 3.0, *[None] * 9]}, "two onsets in one session, the second in row 0"),
        ({}, {"onset": [None] * 11}, "no onset in any row"),
        ({}, {"onset": ["a"] * 11}, "0 before the onset and 1 from then on"),
        ({}, {"onset": [datetime.datetime(2026, 1, 1)] * 11}, "holds dates or durations and the time column"),
        ({"target": ["stage"]}, {"stage": ["a", "b", "c", *"aaaaaaaa"]}, "a target of two classes is needed"),
        ({"event": "onst"}, {}, "did you mean 'onset'"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_with_a_remedy(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        prepared(write(tmp_path, **changes), **options)


def people(folder: Path, **columns: Any) -> Path:
    frame = pl.DataFrame({"who": np.repeat(np.arange(40), 2), "value": np.arange(80.0), "y": [0, 1] * 40, **columns})
    frame.write_parquet(folder / "people.parquet")
    return folder / "people.parquet"


def grouped(file: Path, *subgroups: str) -> DomainDataset:
    out = file.parent / "grouped"
    return open_dataset(
        prepare("table", file, out, patient="who", target=["y"], features=["value"], subgroup=subgroups)
    )


def test_subgroups_are_kept_beside_the_samples_and_no_model_sees_them(tmp_path: Path) -> None:
    age = np.repeat(np.arange(20.0, 100.0, 2.0), 2)
    sex = np.repeat(np.array(["f", "m"] * 20), 2).tolist()
    sex[:4] = [None] * 4
    data = grouped(people(tmp_path, age=age, sex=sex), "sex", "age:bands")
    assert list(data.info.subgroups) == ["sex", "age"]
    assert data.info.settings["features"] == ["value"]
    sexes, bands = data.info.subgroups["sex"], data.info.subgroups["age"]
    codes = data.metadata["subgroups"]
    # Two patients of unknown sex are too few for a group of their own.
    assert list(sexes) == ["f", "m", "other"]
    assert np.bincount(codes[:, 0]).tolist() == [38, 38, 4]
    assert len(bands) == 4
    assert np.bincount(codes[:, -1]).tolist() == [20, 20, 20, 20]


def test_a_group_called_other_is_one_with_the_groups_that_are_too_small(tmp_path: Path) -> None:
    ward = np.repeat(["a"] * 15 + ["other"] * 20 + ["b"] * 5, 2)
    data = grouped(people(tmp_path, ward=ward), "ward")
    assert list(data.info.subgroups["ward"]) == ["a", "other"]
    assert np.bincount(data.metadata["subgroups"][:, 0]).tolist() == [30, 50]


def test_bands_are_named_by_their_cuts(tmp_path: Path) -> None:
    age = np.repeat(np.arange(20.0, 100.0, 2.0), 2)
    data = grouped(people(tmp_path, age=age), "age:40,65")
    assert list(data.info.subgroups["age"]) == ["under 40", "40 to under 65", "65 and over"]
    assert np.bincount(data.metadata["subgroups"][:, 0]).tolist() == [20, 26, 34]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("age", "give bands"),
        ("age:forty", "are no cuts"),
        ("age:nan", "are no cuts"),
        ("age:40,inf", "are no cuts"),
        ("age:40 age:50", "named twice"),
        ("name:3", "only numbers have bands"),
        ("name", "no group of 'name' has 10 patients"),
    ],
)
def test_a_subgroup_that_says_nothing_is_refused(tmp_path: Path, wanted: str, message: str) -> None:
    file = people(tmp_path, age=np.repeat(np.arange(40.5, 80.5), 2), name=[f"n{n // 2}" for n in range(80)])
    with pytest.raises((ConfigError, DataError), match=message):
        grouped(file, *wanted.split())
