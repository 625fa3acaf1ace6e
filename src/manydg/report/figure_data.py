"""Data that experiments leave for figures: ``RESULTS/figures/*.json``, checked. See ``figures_format.md``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manydg.errors import DataError, StorageError, unknown_name

PSEUDONYM = re.compile(r"P-[0-9a-f]{4,64}")
"""What a patient's alias looks like; nothing else may stand for a patient in a report."""

_MOST_POINTS = 20_000
_EXPERIMENT_OF_KIND = {
    "embedding": "embedding",
    "norms": "norms",
    "similarity": "domain-similarity",
    "orthogonality": "orthogonality",
}


@dataclass(frozen=True)
class FigureData:
    """One figure's data, as an experiment left them.

    Parameters
    ----------
    kind, title, experiment : str
    data : dict
        As ``figures_format.md`` says for the kind.
    dataset : str or None
        Name of the dataset; None where the study holds one only.
    note : str
    algorithm : str
    """

    kind: str
    title: str
    experiment: str
    data: Mapping[str, Any]
    dataset: str | None = None
    note: str = ""
    algorithm: str = "manydg"


def read_figures(folder: Path) -> list[FigureData]:
    """Every figure of a results folder, in the order of the files' names.

    Raises
    ------
    StorageError
        If a file is not JSON.
    DataError
        If a file is not what ``figures_format.md`` says; the message names the file and the key.
    """
    if not folder.is_dir():
        return []
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> FigureData:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"figures/{path.name} is no readable JSON ({error}); make it again or remove it") from error
    try:
        return parse_figure(content)
    except DataError as error:
        raise DataError(f"figures/{path.name}: {error}; see figures_format.md of manydg.report") from error


def parse_figure(content: Any) -> FigureData:
    """Check one figure's JSON value.

    Examples
    --------
    >>> parse_figure({"kind": "bars", "title": "t", "experiment": "runtime", "data":
    ...     {"y": {"label": "s"}, "names": ["base"], "values": [1, 2]}})
    Traceback (most recent call last):
    manydg.errors.DataError: data.values has 2 entries where 1 are needed
    """
    content = _mapping(content, "the file")
    kind = _text(content, "kind")
    if kind not in _CHECKS:
        raise DataError(str(unknown_name("kind of figure", kind, _CHECKS)))
    data = _mapping(content.get("data"), "data")
    _CHECKS[kind](data)
    experiment = content.get("experiment") or _EXPERIMENT_OF_KIND.get(kind)
    if experiment is None:
        raise DataError(f"a figure of kind '{kind}' names its experiment, and 'experiment' is missing")
    return FigureData(
        kind=kind,
        title=_text(content, "title"),
        experiment=str(experiment),
        data=data,
        dataset=content.get("dataset"),
        note=str(content.get("note") or ""),
        algorithm=str(content.get("algorithm") or "manydg"),
    )


def _check_embedding(data: Mapping[str, Any]) -> None:
    pseudonyms = _list(data, "pseudonyms")
    if not all(isinstance(name, str) and PSEUDONYM.fullmatch(name) for name in pseudonyms):
        raise DataError("data.pseudonyms holds a name that is no pseudonym (P- and hex digits)")
    names = _list(data, "label_names")
    patients = _indices(data, "patients", len(pseudonyms))
    if len(patients) > _MOST_POINTS:
        raise DataError(f"{len(patients)} points are more than the {_MOST_POINTS} a page can carry; draw a sample")
    labels = _indices(data, "labels", len(names))
    _same_length("data.labels", labels, len(patients))
    for panel in _rows(data, "panels", ("name", "xy")):
        points = panel["xy"]
        where = f"data.panels {panel['name']!r}.xy"
        _same_length(where, points, len(patients))
        if not all(isinstance(point, list) and len(point) == 2 and all(map(_finite, point)) for point in points):
            raise DataError(f"{where} holds something other than pairs of finite numbers")


def _check_norms(data: Mapping[str, Any]) -> None:
    for split in _rows(data, "splits", ("name", "parallel", "orthogonal")):
        parallel = _numbers(split, "parallel")
        _same_length("data.splits.orthogonal", _numbers(split, "orthogonal"), len(parallel))


def _check_similarity(data: Mapping[str, Any]) -> None:
    for row in _rows(data, "rows", ("name", "within", "across")):
        _number(row, "within")
        _number(row, "across")
        for key in ("within_interval", "across_interval"):
            if row.get(key) is not None:
                _same_length(f"data.rows.{key}", _numbers(row, key), 2)


def _check_orthogonality(data: Mapping[str, Any]) -> None:
    for row in _rows(data, "rows", ("first", "second", "cosine")):
        for key in ("cosine", "sd", "paper"):
            _number(row, key)


def _check_curve(data: Mapping[str, Any]) -> None:
    axes = {name: _mapping(data.get(name), f"data.{name}") for name in ("x", "y")}
    for name, axis in axes.items():
        _text(axis, "label")
        if axis.get("scale", "linear") not in ("linear", "log"):
            raise DataError(f"data.{name}.scale is {axis['scale']!r}, neither 'linear' nor 'log'")
    values = _numbers(axes["x"], "values")
    for series in _rows(data, "series", ("name", "mean")):
        for key in ("mean", "low", "high"):
            if key in series:
                found = _numbers(series, key)
                _same_length(f"data.series.{key}", found, len(values))
                if axes["y"].get("scale") == "log" and any(value is not None and value <= 0 for value in found):
                    raise DataError(f"data.series.{key} holds a number that is not above 0, which no log scale shows")


def _check_bars(data: Mapping[str, Any]) -> None:
    _text(_mapping(data.get("y"), "data.y"), "label")
    names = _list(data, "names")
    for key in ("values", "low", "high"):
        if key == "values" or key in data:
            _same_length(f"data.{key}", _numbers(data, key), len(names))


def _check_table(data: Mapping[str, Any]) -> None:
    columns = _list(data, "columns")
    for row in _list(data, "rows"):
        if not isinstance(row, list):
            raise DataError("data.rows holds something other than lists of cells")
        _same_length("a row of data.rows", row, len(columns))
        if not all(cell is None or isinstance(cell, str | int | float) for cell in row):
            raise DataError("data.rows holds a cell that is neither text, number nor null")


_CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "embedding": _check_embedding,
    "norms": _check_norms,
    "similarity": _check_similarity,
    "orthogonality": _check_orthogonality,
    "curve": _check_curve,
    "bars": _check_bars,
    "table": _check_table,
}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is missing or no JSON object")
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"'{key}' is missing or no text")
    return value


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list) or not value:
        raise DataError(f"data.{key} is missing, empty or no list")
    return value


def _rows(data: Mapping[str, Any], key: str, needed: Sequence[str]) -> list[Mapping[str, Any]]:
    rows = _list(data, key)
    for row in rows:
        for name in needed:
            if name not in _mapping(row, f"an entry of data.{key}"):
                raise DataError(f"an entry of data.{key} lacks '{name}'")
    return rows


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(row: Mapping[str, Any], key: str) -> None:
    if row.get(key) is not None and not _finite(row[key]):
        raise DataError(f"'{key}' is {row[key]!r}, neither a finite number nor null")


def _numbers(data: Mapping[str, Any], key: str) -> list[Any]:
    values = _list(data, key)
    if not all(value is None or _finite(value) for value in values):
        raise DataError(f"'{key}' holds something other than finite numbers and null")
    return values


def _indices(data: Mapping[str, Any], key: str, below: int) -> list[int]:
    values = _list(data, key)
    if not all(isinstance(value, int) and 0 <= value < below for value in values):
        raise DataError(f"data.{key} holds something other than whole numbers from 0 to {below - 1}")
    return values


def _same_length(where: str, values: Any, length: int) -> None:
    if not isinstance(values, Sequence) or len(values) != length:
        found = len(values) if isinstance(values, Sequence) else "no"
        raise DataError(f"{where} has {found} entries where {length} are needed")
