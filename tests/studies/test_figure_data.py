"""Figures' data are checked before they reach a page."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from manydg.errors import DataError, StorageError
from manydg.studies.figure_data import parse_figure, read_figures, write_figure

GOOD: dict[str, dict[str, Any]] = {
    "embedding": {
        "panels": [{"name": "v", "xy": [[0, 1], [1, 0.5]]}], "patients": [0, 1], "pseudonyms": ["P-00aa", "P-00ab"],
        "labels": [0, 0], "label_names": ["Wake"],
    },
    "norms": {"splits": [{"name": "train", "parallel": [1.0, 2.0], "orthogonal": [0.5, None]}]},
    "similarity": {"rows": [{"name": "test", "within": 0.9, "across": 0.8, "within_interval": [0.8, 1.0]}]},
    "orthogonality": {"rows": [{"first": "a", "second": "b", "cosine": 0.5, "paper": 0.6}]},
    "curve": {
        "x": {"label": "step", "values": [0, 1], "scale": "linear"}, "y": {"label": "kappa"},
        "series": [{"name": "base", "mean": [0.1, None], "low": [0.0, 0.1], "high": [0.2, 0.3]}],
    },
    "bars": {"y": {"label": "s"}, "names": ["base"], "values": [1.0]},
    "table": {"columns": ["a", "b"], "rows": [["x", 1], [None, 0.5]]},
}  # fmt: skip


def figure(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "title": "A title", "experiment": "runtime", "data": data}


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_format_says_is_accepted(kind: str) -> None:
    assert parse_figure(figure(kind, GOOD[kind])).kind == kind


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_written_is_read_back(kind: str, tmp_path: Path) -> None:
    content = figure(kind, GOOD[kind]) | {"dataset": "sleep", "note": "Scaled down.", "algorithm": "base"}
    first = parse_figure(content)
    write_figure(tmp_path, "one", first)
    assert read_figures(tmp_path / "figures") == [first]
    assert first.to_json() == content


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("embedding", ("pseudonyms", 0), "Jane Doe", r"data.pseudonyms.0: .* pattern"),
        ("embedding", ("patients", 0), 7, "0 to 1"),
        ("embedding", ("labels",), [0], "1 entries where 2"),
        ("embedding", ("panels", 0, "xy", 0), [1, "x"], r"data.panels.0.xy.0.1: .* valid number"),
        ("embedding", ("panels", 0, "xy", 0), [1, float("nan")], r"data.panels.0.xy.0.1: .* finite number"),
        ("norms", ("splits", 0, "orthogonal"), [1.0], "1 entries where 2"),
        ("norms", ("splits",), [], "data.splits: .* at least 1 item"),
        ("similarity", ("rows", 0, "within"), "high", "data.rows.0.within: .* valid number"),
        ("orthogonality", ("rows", 0, "cosine"), float("inf"), "finite"),
        ("curve", ("series", 0, "low"), [0.1], "data.series.low"),
        ("curve", ("x", "scale"), "cubic", r"data.x.scale: .*linear.log"),
        ("curve", ("y", "scale"), "cubic", r"data.y.scale: .*linear.log"),
        ("curve", ("y",), {"label": "MB", "scale": "log"}, "not above 0, which no log scale shows"),
        ("bars", ("values",), [1.0, 2.0], "data.values has 2"),
        ("table", ("rows", 0), ["x"], "1 entries where 2"),
        ("table", ("rows", 0, 0), {"a": 1}, "data.rows.0.0.*: Input should be"),
    ],
)
def test_what_is_wrong_is_said_where(kind: str, path: tuple[Any, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(GOOD[kind])
    entry: Any = data
    for step in path[:-1]:
        entry = entry[step]
    entry[path[-1]] = value
    with pytest.raises(DataError, match=message) as caught:
        parse_figure(figure(kind, data))
    assert "Jane" not in str(caught.value)


@pytest.mark.parametrize("kind", GOOD)
def test_every_key_of_the_data_that_is_needed_is_missed(kind: str) -> None:
    for key in GOOD[kind]:
        data = {name: value for name, value in GOOD[kind].items() if name != key}
        with pytest.raises(DataError):
            parse_figure(figure(kind, data))


def test_an_unknown_kind_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(DataError, match="did you mean 'curve'"):
        parse_figure(figure("curves", GOOD["curve"]))


def test_a_curve_must_name_its_experiment_and_an_embedding_need_not() -> None:
    content = figure("curve", GOOD["curve"])
    del content["experiment"]
    with pytest.raises(DataError, match="experiment"):
        parse_figure(content)
    content = figure("embedding", GOOD["embedding"])
    del content["experiment"]
    assert parse_figure(content).experiment == "embedding"


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StorageError, match=r"figures/broken\.json"):
        read_figures(tmp_path)
