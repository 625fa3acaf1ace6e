"""What an experiment leaves for the report's figures: ``RESULTS/figures/*.json``.

One class per kind of figure, with the checks of its JSON beside its fields. ``figures_format.md`` of ``manydg.report``
describes the files.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from manydg.errors import DataError, StorageError, unknown_name
from manydg.files import Json, JsonObject, write_json

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter

FIGURES = "figures"
"""The folder of a results folder that holds the files."""
PSEUDONYM = re.compile(r"P-[0-9a-f]{4,64}")
"""A patient's pseudonym; the report shows patients under no other name."""


@dataclass(frozen=True, eq=False)
class _Check:
    """What pydantic's ``Field`` checks of a value; pydantic is imported only when a file is read."""

    limits: JsonObject

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> object:
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(**self.limits)])  # type: ignore[call-overload]


_SOME, _TWO = _Check({"min_length": 1}), _Check({"min_length": 2, "max_length": 2})
Number = Annotated[float, _Check({"strict": True, "allow_inf_nan": False})]
Numbers = Annotated[Sequence[Number | None], _SOME]
Names = Annotated[Sequence[str], _SOME]
Indices = Annotated[Sequence[Annotated[int, _Check({"strict": True, "ge": 0})]], _SOME]
Interval = Annotated[Sequence[Number | None], _TWO]
Scale = Annotated[str, _Check({"pattern": "^(linear|log)$"})]
Cell = str | int | Number | None

_MAX_POINTS = 20_000


# The seven kinds of figure.


class _Data:
    """The data of a figure of some kind; ``experiment`` is the one whose section it joins unless it names another."""

    kind: ClassVar[str]
    experiment: ClassVar[str | None] = None

    def check(self) -> None:
        """Raise where fields contradict one another; nothing by default."""


@dataclass(frozen=True)
class EmbeddingPanel:
    """One map: a point ``(x, y)`` per sample, and how well a linear probe tells patients and labels apart in it."""

    name: str
    xy: Annotated[Sequence[Annotated[Sequence[Number], _TWO]], _SOME]
    patient_accuracy: Number | None = None
    label_accuracy: Number | None = None


@dataclass(frozen=True)
class Embedding(_Data):
    """Samples in two dimensions.

    - ``patients``: Each sample's index into ``pseudonyms``.
    - ``labels``: Each sample's index into ``label_names``.
    - ``method``: How two dimensions were made of many.
    """

    kind = "embedding"
    experiment = "embedding"

    panels: Annotated[Sequence[EmbeddingPanel], _SOME]
    patients: Indices
    pseudonyms: Annotated[Sequence[Annotated[str, _Check({"pattern": f"^{PSEUDONYM.pattern}$"})]], _SOME]
    labels: Indices
    label_names: Names
    method: str | None = None

    def check(self) -> None:
        points = len(self.patients)
        if points > _MAX_POINTS:
            raise DataError(f"{points} points are more than the {_MAX_POINTS} a page can carry; draw a sample")
        _check_length("data.labels", self.labels, points)
        for key, values, names in (
            ("patients", self.patients, self.pseudonyms),
            ("labels", self.labels, self.label_names),
        ):
            if max(values) >= len(names):
                raise DataError(f"data.{key} holds a number that is not from 0 to {len(names) - 1}")
        for panel in self.panels:
            _check_length(f"data.panels {panel.name!r}.xy", panel.xy, points)


@dataclass(frozen=True)
class SplitNorms:
    """Norms of the two parts of v, one per sample of a split."""

    name: str
    parallel: Numbers
    orthogonal: Numbers


@dataclass(frozen=True)
class NormPairs(_Data):
    """How long the parts of v along and across z are."""

    kind = "norms"
    experiment = "norms"

    splits: Annotated[Sequence[SplitNorms], _SOME]

    def check(self) -> None:
        for split in self.splits:
            _check_length("data.splits.orthogonal", split.orthogonal, len(split.parallel))


@dataclass(frozen=True)
class SimilarityRow:
    """Mean cosine of z for two samples of one patient and of two patients, each with an optional interval."""

    name: str
    within: Number | None
    across: Number | None
    within_interval: Interval | None = None
    across_interval: Interval | None = None


@dataclass(frozen=True)
class Similarity(_Data):
    """Whether z is more alike within a patient than across patients."""

    kind = "similarity"
    experiment = "domain-similarity"

    rows: Annotated[Sequence[SimilarityRow], _SOME]


@dataclass(frozen=True)
class CosineRow:
    """Cosine of the weights of two linear models.

    ``sd`` is over seeds, ``paper`` the paper's value on the same data, ``absolute`` the mean absolute cosine.
    """

    first: str
    second: str
    cosine: Number | None
    sd: Number | None = None
    paper: Number | None = None
    absolute: Number | None = None


@dataclass(frozen=True)
class CosineTable(_Data):
    """How far labels and patients use the same dimensions of v."""

    kind = "orthogonality"
    experiment = "orthogonality"

    rows: Annotated[Sequence[CosineRow], _SOME]


@dataclass(frozen=True)
class Axis:
    """An axis: its label and its scale, ``linear`` or ``log``."""

    label: str
    scale: Scale = "linear"


@dataclass(frozen=True)
class XAxis:
    """The horizontal axis of a curve, with the values that all lines share."""

    label: str
    values: Numbers
    # Written even where it is the default.
    scale: Scale = dataclasses.field(default_factory=lambda: "linear")


@dataclass(frozen=True)
class Line:
    """One line of a curve: a mean per value of the horizontal axis, with an optional band."""

    name: str
    mean: Numbers
    low: Numbers | None = None
    high: Numbers | None = None


@dataclass(frozen=True)
class Curve(_Data):
    """Lines over a numeric axis."""

    kind = "curve"

    x: XAxis
    y: Axis
    series: Annotated[Sequence[Line], _SOME]

    def check(self) -> None:
        for line in self.series:
            for key in ("mean", "low", "high"):
                if (values := getattr(line, key)) is None:
                    continue
                _check_length(f"data.series.{key}", values, len(self.x.values))
                if self.y.scale == "log" and any(value is not None and value <= 0 for value in values):
                    raise DataError(f"data.series.{key} holds a number that is not above 0, which no log scale shows")


@dataclass(frozen=True)
class Bars(_Data):
    """A bar per name, with optional whiskers."""

    kind = "bars"

    y: Axis
    names: Names
    values: Numbers
    low: Numbers | None = None
    high: Numbers | None = None

    def check(self) -> None:
        for key in ("values", "low", "high"):
            if (values := getattr(self, key)) is not None:
                _check_length(f"data.{key}", values, len(self.names))


@dataclass(frozen=True)
class CellTable(_Data):
    """A table of text and numbers."""

    kind = "table"

    columns: Names
    rows: Annotated[Sequence[Sequence[Cell]], _SOME]

    def check(self) -> None:
        for row in self.rows:
            _check_length("a row of data.rows", row, len(self.columns))


AnyData = Embedding | NormPairs | Similarity | CosineTable | Curve | Bars | CellTable
_KINDS: dict[str, type[AnyData]] = {
    data.kind: data for data in (Embedding, NormPairs, Similarity, CosineTable, Curve, Bars, CellTable)
}


# A figure, and the files.


@dataclass(frozen=True)
class FigureData:
    """One figure as an experiment leaves it.

    - ``title``: As a sentence without a full stop.
    - ``experiment``: The experiment whose section it joins; the first four kinds know theirs.
    - ``dataset``: Needed where a study has several.
    - ``note``: Shown under the figure.
    - ``algorithm``: The algorithm whose model was looked at, where it is not ManyDG.
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

    - ``folder``: The results folder.
    - ``name``: Of the file, without its ending.
    """
    write_json(folder / FIGURES / f"{name}.json", figure.to_json(), indent=None, allow_nan=False)


def read_figures(folder: Path) -> list[FigureData]:
    """Every figure of a folder, in the order of the files' names.

    - raises StorageError: If a file is not JSON.
    - raises DataError: If a file is not what ``figures_format.md`` says; the message names the file and the key.
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
    data = _parse_data(kind, _object(figure.get("data"), "data"))
    dataset, algorithm = figure.get("dataset"), figure.get("algorithm")
    return FigureData(
        title=_text(figure, "title"),
        data=data,
        experiment=str(figure.get("experiment") or ""),
        dataset=None if dataset is None else str(dataset),
        note=str(figure.get("note") or ""),
        algorithm=str(algorithm) if algorithm else None,
    )


def _parse_data(kind: str, content: JsonObject) -> AnyData:
    from pydantic import ValidationError

    try:
        data = _reader(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise DataError(f"{'.'.join(['data', *map(str, first['loc'])])}: {first['msg']}") from None
    data.check()
    return data


@cache
def _reader(kind: str) -> TypeAdapter[AnyData]:
    from pydantic import TypeAdapter

    return TypeAdapter(_KINDS[kind])


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


def _check_length(where: str, values: Sequence[object], length: int) -> None:
    if len(values) != length:
        raise DataError(f"{where} has {len(values)} entries where {length} are needed")
