"""What an experiment leaves for the report's figures: ``RESULTS/figures/*.json``.

One class per kind of figure, with the checks of its JSON beside its fields. ``figures_format.md`` of ``manydg.report``
describes the files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, cast

from manydg.errors import DataError, StorageError, unknown_name
from manydg.files import Json, JsonObject, write_json

FIGURES = "figures"
"""The folder of a results folder that holds the files."""
PSEUDONYM = re.compile(r"P-[0-9a-f]{4,64}")
"""A patient's pseudonym; the report shows patients under no other name."""

Numbers = Sequence[float | None]
Cell = str | int | float | None

_MAX_POINTS = 20_000


# The seven kinds of figure.


@dataclass(frozen=True)
class EmbeddingPanel:
    """One map: a point ``(x, y)`` per sample, and how well a linear probe tells patients and labels apart in it."""

    name: str
    xy: Sequence[Sequence[float]]
    patient_accuracy: float | None = None
    label_accuracy: float | None = None


@dataclass(frozen=True)
class Embedding:
    """Samples in two dimensions.

    Parameters
    ----------
    panels : sequence of EmbeddingPanel
    patients : sequence of int
        Each sample's index into ``pseudonyms``.
    pseudonyms : sequence of str
    labels : sequence of int
        Each sample's index into ``label_names``.
    label_names : sequence of str
    method : str, optional
        How two dimensions were made of many.
    """

    kind: ClassVar[str] = "embedding"
    experiment: ClassVar[str | None] = "embedding"

    panels: Sequence[EmbeddingPanel]
    patients: Sequence[int]
    pseudonyms: Sequence[str]
    labels: Sequence[int]
    label_names: Sequence[str]
    method: str | None = None

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        pseudonyms = _list(data, "pseudonyms")
        if not all(isinstance(name, str) and PSEUDONYM.fullmatch(name) for name in pseudonyms):
            raise DataError("data.pseudonyms holds a name that is no pseudonym (P- and hex digits)")
        names = _list(data, "label_names")
        patients = _indices(data, "patients", len(pseudonyms))
        if len(patients) > _MAX_POINTS:
            raise DataError(f"{len(patients)} points are more than the {_MAX_POINTS} a page can carry; draw a sample")
        labels = _indices(data, "labels", len(names))
        _check_length("data.labels", labels, len(patients))
        panels = [_embedding_panel(panel, len(patients)) for panel in _rows(data, "panels", ("name", "xy"))]
        return cls(panels, patients, [str(name) for name in pseudonyms], labels, [str(name) for name in names],
                   _optional_text(data, "method"))  # fmt: skip


def _embedding_panel(panel: JsonObject, samples: int) -> EmbeddingPanel:
    points, where = panel["xy"], f"data.panels {panel['name']!r}.xy"
    _check_length(where, points, samples)
    pairs = cast("list[list[float]]", points)
    if not all(isinstance(point, list) and len(point) == 2 and all(map(_is_finite, point)) for point in pairs):
        raise DataError(f"{where} holds something other than pairs of finite numbers")
    accuracies = [_number(panel, key) for key in ("patient_accuracy", "label_accuracy")]
    return EmbeddingPanel(str(panel["name"]), pairs, *accuracies)


@dataclass(frozen=True)
class SplitNorms:
    """Norms of the two parts of v, one per sample of a split."""

    name: str
    parallel: Numbers
    orthogonal: Numbers


@dataclass(frozen=True)
class NormPairs:
    """How long the parts of v along and across z are."""

    kind: ClassVar[str] = "norms"
    experiment: ClassVar[str | None] = "norms"

    splits: Sequence[SplitNorms]

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        splits = []
        for split in _rows(data, "splits", ("name", "parallel", "orthogonal")):
            parallel, orthogonal = _numbers(split, "parallel"), _numbers(split, "orthogonal")
            _check_length("data.splits.orthogonal", orthogonal, len(parallel))
            splits.append(SplitNorms(str(split["name"]), parallel, orthogonal))
        return cls(splits)


@dataclass(frozen=True)
class SimilarityRow:
    """Mean cosine of z for two samples of one patient and of two patients, each with an optional interval."""

    name: str
    within: float | None
    across: float | None
    within_interval: Numbers | None = None
    across_interval: Numbers | None = None


@dataclass(frozen=True)
class Similarity:
    """Whether z is more alike within a patient than across patients."""

    kind: ClassVar[str] = "similarity"
    experiment: ClassVar[str | None] = "domain-similarity"

    rows: Sequence[SimilarityRow]

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        rows = []
        for row in _rows(data, "rows", ("name", "within", "across")):
            within, across = _number(row, "within"), _number(row, "across")
            bounds = [_interval(row, key) for key in ("within_interval", "across_interval")]
            rows.append(SimilarityRow(str(row["name"]), within, across, *bounds))
        return cls(rows)


def _interval(row: JsonObject, key: str) -> Numbers | None:
    if row.get(key) is None:
        return None
    bounds = _numbers(row, key)
    _check_length(f"data.rows.{key}", bounds, 2)
    return bounds


@dataclass(frozen=True)
class CosineRow:
    """Cosine of the weights of two linear models.

    ``sd`` is over seeds, ``paper`` the paper's value on the same data, ``absolute`` the mean absolute cosine.
    """

    first: str
    second: str
    cosine: float | None
    sd: float | None = None
    paper: float | None = None
    absolute: float | None = None


@dataclass(frozen=True)
class CosineTable:
    """How far labels and patients use the same dimensions of v."""

    kind: ClassVar[str] = "orthogonality"
    experiment: ClassVar[str | None] = "orthogonality"

    rows: Sequence[CosineRow]

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        rows = []
        for row in _rows(data, "rows", ("first", "second", "cosine")):
            values = [_number(row, key) for key in ("cosine", "sd", "paper", "absolute")]
            rows.append(CosineRow(str(row["first"]), str(row["second"]), *values))
        return cls(rows)


@dataclass(frozen=True)
class Axis:
    """An axis: its label and its scale, ``linear`` or ``log``."""

    label: str
    scale: str = "linear"


@dataclass(frozen=True)
class XAxis:
    """The horizontal axis of a curve, with the values that all lines share."""

    label: str
    values: Numbers
    scale: str


@dataclass(frozen=True)
class Line:
    """One line of a curve: a mean per value of the horizontal axis, with an optional band."""

    name: str
    mean: Numbers
    low: Numbers | None = None
    high: Numbers | None = None


@dataclass(frozen=True)
class Curve:
    """Lines over a numeric axis."""

    kind: ClassVar[str] = "curve"
    experiment: ClassVar[str | None] = None

    x: XAxis
    y: Axis
    series: Sequence[Line]

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        x, y = (_axis(data, name) for name in ("x", "y"))
        values = _numbers(_object(data.get("x"), "data.x"), "values")
        rows = _rows(data, "series", ("name", "mean"))
        return cls(XAxis(x.label, values, x.scale), y, [_line(row, len(values), y.scale) for row in rows])


def _axis(data: JsonObject, name: str) -> Axis:
    axis = _object(data.get(name), f"data.{name}")
    label, scale = _text(axis, "label"), axis.get("scale", "linear")
    if scale not in ("linear", "log"):
        raise DataError(f"data.{name}.scale is {scale!r}, neither 'linear' nor 'log'")
    return Axis(label, str(scale))


def _line(row: JsonObject, length: int, scale: str) -> Line:
    columns: dict[str, Numbers] = {}
    for key in ("mean", "low", "high"):
        if key in row:
            columns[key] = values = _numbers(row, key)
            _check_length(f"data.series.{key}", values, length)
            if scale == "log" and any(value is not None and value <= 0 for value in values):
                raise DataError(f"data.series.{key} holds a number that is not above 0, which no log scale shows")
    return Line(str(row["name"]), **columns)


@dataclass(frozen=True)
class Bars:
    """A bar per name, with optional whiskers."""

    kind: ClassVar[str] = "bars"
    experiment: ClassVar[str | None] = None

    y: Axis
    names: Sequence[str]
    values: Numbers
    low: Numbers | None = None
    high: Numbers | None = None

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        label = _text(_object(data.get("y"), "data.y"), "label")
        names = _list(data, "names")
        columns: dict[str, Numbers] = {}
        for key in ("values", "low", "high"):
            if key == "values" or key in data:
                columns[key] = _numbers(data, key)
                _check_length(f"data.{key}", columns[key], len(names))
        return cls(Axis(label), [str(name) for name in names], **columns)


@dataclass(frozen=True)
class CellTable:
    """A table of text and numbers."""

    kind: ClassVar[str] = "table"
    experiment: ClassVar[str | None] = None

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @classmethod
    def parse(cls, data: JsonObject) -> Self:
        columns = _list(data, "columns")
        rows: list[Sequence[Cell]] = []
        for row in _list(data, "rows"):
            if not isinstance(row, list):
                raise DataError("data.rows holds something other than lists of cells")
            _check_length("a row of data.rows", row, len(columns))
            if not all(cell is None or isinstance(cell, str | int | float) for cell in row):
                raise DataError("data.rows holds a cell that is neither text, number nor null")
            rows.append(row)
        return cls([str(name) for name in columns], rows)


AnyData = Embedding | NormPairs | Similarity | CosineTable | Curve | Bars | CellTable
_KINDS: dict[str, type[AnyData]] = {
    data.kind: data for data in (Embedding, NormPairs, Similarity, CosineTable, Curve, Bars, CellTable)
}


# A figure, and the files.


@dataclass(frozen=True)
class FigureData:
    """One figure as an experiment leaves it.

    Parameters
    ----------
    title : str
        As a sentence without a full stop.
    data : Embedding, NormPairs, Similarity, CosineTable, Curve, Bars or CellTable
    experiment : str
        The experiment whose section it joins; the first four kinds know theirs.
    dataset : str, optional
        Needed where a study has several.
    note : str
        Shown under the figure.
    algorithm : str, optional
        The algorithm whose model was looked at, where it is not ManyDG.
    """

    title: str
    data: AnyData
    experiment: str = ""
    dataset: str | None = None
    note: str = ""
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if not self.experiment:
            if self.data.experiment is None:
                raise DataError(f"a figure of kind '{self.kind}' names its experiment, and 'experiment' is missing")
            object.__setattr__(self, "experiment", self.data.experiment)

    @property
    def kind(self) -> str:
        return self.data.kind

    def to_json(self) -> JsonObject:
        """The content of the figure's file; what may be left out is left out."""
        content = {
            "dataset": self.dataset,
            "kind": self.kind,
            "experiment": None if self.experiment == self.data.experiment else self.experiment,
            "title": self.title,
            "data": _to_json(self.data),
            "note": self.note or None,
            "algorithm": self.algorithm,
        }
        return {key: value for key, value in content.items() if value is not None}


def write_figure(folder: Path, name: str, figure: FigureData) -> None:
    """Write a figure into a results folder.

    Parameters
    ----------
    folder : Path
        The results folder.
    name : str
        Of the file, without its ending.
    figure : FigureData
    """
    write_json(folder / FIGURES / f"{name}.json", figure.to_json(), indent=None, allow_nan=False)


def read_figures(folder: Path) -> list[FigureData]:
    """Every figure of a folder, in the order of the files' names.

    Raises
    ------
    StorageError
        If a file is not JSON.
    DataError
        If a file is not what ``figures_format.md`` says; the message names the file and the key.
    """
    if not folder.is_dir():
        return []
    return [read_figure(path) for path in sorted(folder.glob("*.json"))]


def read_figure(path: Path) -> FigureData:
    """One figure's file, checked."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"figures/{path.name} is no readable JSON ({error}); make it again or remove it") from error
    try:
        return parse_figure(content)
    except DataError as error:
        raise DataError(f"figures/{path.name}: {error}; see figures_format.md of manydg.report") from error


def parse_figure(content: Json) -> FigureData:
    """Check one figure's JSON value.

    Examples
    --------
    >>> parse_figure({"kind": "bars", "title": "t", "experiment": "runtime", "data":
    ...     {"y": {"label": "s"}, "names": ["base"], "values": [1, 2]}})
    Traceback (most recent call last):
    manydg.errors.DataError: data.values has 2 entries where 1 are needed
    """
    figure = _object(content, "the file")
    kind = _text(figure, "kind")
    if kind not in _KINDS:
        raise DataError(str(unknown_name("kind of figure", kind, _KINDS)))
    data = _KINDS[kind].parse(_object(figure.get("data"), "data"))
    dataset, algorithm = figure.get("dataset"), figure.get("algorithm")
    return FigureData(
        title=_text(figure, "title"),
        data=data,
        experiment=str(figure.get("experiment") or ""),
        dataset=None if dataset is None else str(dataset),
        note=str(figure.get("note") or ""),
        algorithm=str(algorithm) if algorithm else None,
    )


def _to_json(value: object) -> Json:
    """Dataclasses as objects, without the optional fields that have their default."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: _to_json(entry) for name, (entry, default) in fields.items() if entry != default}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(entry) for entry in value]
    return cast("Json", value)


# Checks of JSON values.


def _object(value: Json, where: str) -> JsonObject:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is missing or no JSON object")
    return value


def _text(content: JsonObject, key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"'{key}' is missing or no text")
    return value


def _optional_text(content: JsonObject, key: str) -> str | None:
    value = content.get(key)
    return str(value) if value else None


def _list(data: JsonObject, key: str) -> list[Json]:
    value = data.get(key)
    if not isinstance(value, list) or not value:
        raise DataError(f"data.{key} is missing, empty or no list")
    return value


def _rows(data: JsonObject, key: str, required: Sequence[str]) -> list[JsonObject]:
    rows = [_object(row, f"an entry of data.{key}") for row in _list(data, key)]
    for row in rows:
        for name in required:
            if name not in row:
                raise DataError(f"an entry of data.{key} lacks '{name}'")
    return rows


def _is_finite(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(row: JsonObject, key: str) -> float | None:
    value = row.get(key)
    if value is not None and not _is_finite(value):
        raise DataError(f"'{key}' is {value!r}, neither a finite number nor null")
    return cast("float | None", value)


def _numbers(data: JsonObject, key: str) -> list[float | None]:
    values = _list(data, key)
    if not all(value is None or _is_finite(value) for value in values):
        raise DataError(f"'{key}' holds something other than finite numbers and null")
    return cast("list[float | None]", values)


def _indices(data: JsonObject, key: str, below: int) -> list[int]:
    values = _list(data, key)
    if not all(isinstance(value, int) and 0 <= value < below for value in values):
        raise DataError(f"data.{key} holds something other than whole numbers from 0 to {below - 1}")
    return cast("list[int]", values)


def _check_length(where: str, values: Json, length: int) -> None:
    if not isinstance(values, Sequence) or len(values) != length:
        count = len(values) if isinstance(values, Sequence) else "no"
        raise DataError(f"{where} has {count} entries where {length} are needed")
