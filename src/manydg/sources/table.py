"""Any table: CSV or parquet, one row per sample.

One column says whose sample a row is, one (or several) what is to be predicted, and the rest are features.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.info import DatasetInfo
from manydg.errors import ConfigError, DataError, StorageError
from manydg.files import Json
from manydg.sources._preparing import MISSING, CohortFlow, check_finite, naming, with_provenance, write_dense
from manydg.sources._source import NewSamples, Options, RawArgument, Source, SourceDocs, TrainedOn, option
from manydg.sources._tables import check_unpacked_rows, check_whole, ids_of

_DIGITS = re.compile(r"(\d+)")
_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
_NULLS = ["", "NA", "N/A", "null", "NULL"]
_SHOWN = 12
_PATTERNED = ("feature", "target")


@dataclass(frozen=True)
class TableOptions(Options):
    """What the columns are.

    ``features`` and ``target`` may be patterns such as ``EEG_*``; the patient, target, time and session columns are
    never features. A patient's sessions follow each other in the order of their values (numbers, dates, or names such
    as ``N2``, ``N10``), and no context takes a neighbour over their borders.
    """

    patient: str = option(help="Column of the patient.", metavar="COL")
    target: tuple[str, ...] = option(help="Column of the class; repeat it for votes or labels.", metavar="COL")
    features: tuple[str, ...] = option(
        help="Columns of the inputs, such as 'EEG_*'.", metavar="PATTERN...", greedy=True
    )
    time: str | None = option(None, help="Column of the time of a sample.", metavar="COL")
    session: str | None = option(None, help="Column of the night or stay that times are counted within.", metavar="COL")
    kind: str | None = option(
        None, help="classes, votes, binary or multilabel, where it cannot be told from the values."
    )
    classes: tuple[str, ...] | None = option(
        None, help="Names of the classes in code order.", metavar="A,B,...", commas=True
    )
    missing: str = option(
        "refuse", help="refuse empty values, or keep them as measurements not taken.", choices=MISSING
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.session is not None and self.time is None:
            raise ConfigError(
                "a session column needs a time column, which orders the samples within a session: give time"
            )

    def to_json(self) -> dict[str, Json]:
        target: Json = self.target[0] if len(self.target) == 1 else list(self.target)
        shown = super().to_json() | {"target": target}
        return {name: value for name, value in shown.items() if name not in ("kind", "classes")}


class TableFile(Source[TableOptions, Options]):
    """A table of your own; the features become the input column ``x``, ``(rows, features)`` float32."""

    name = "table"
    options_class = TableOptions
    raw = RawArgument("Table: parquet, CSV or TSV, one row a sample.", "file")
    parallel = False
    self_explanatory = False
    docs = SourceDocs(predicts="your own", target="any kind", page="[table](datasets/table.md)")

    def looks_like(self, folder: Path) -> bool:
        """Never: any file may be a table."""
        return False

    def prepare(
        self, raw: Path, out: Path, options: TableOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        table, columns = _open(raw, options.patient)
        roles = _choose(columns, raw, options)
        frame = _collect(table.select(roles.columns()), raw)
        flow = CohortFlow()
        flow.add("rows of the table", patients=frame[roles.patient].n_unique(), samples=frame.height)
        patients = patients_of(frame, roles.patient, raw)
        times = None if roles.time is None else times_of(frame, roles.time, raw)
        settings: dict[str, Json] = {"features": roles.features}
        if roles.session is not None and times is not None:
            sessions = sessions_of(frame, roles.session, raw)
            settings["session_gap"] = gap = session_gap(patients, sessions, times)
            times = lay_out(patients, sessions, times, gap)
        described = options.to_json() | {"left_out_of_features": roles.left_out}
        return write_dense(
            out,
            feature_values(frame, roles.features, raw),
            labels_of(frame, roles.targets, raw),
            patients,
            position_name=lambda position: f"feature '{roles.features[position[0]]}'",
            files={"target": raw, "patient": raw},
            kind=options.kind,
            classes=options.classes if options.classes is not None or len(roles.targets) == 1 else roles.targets,
            times=times,
            missing=options.missing,
            info=with_provenance(DatasetInfo(settings=settings), self.name, [raw], described, flow, raw=raw),
            overwrite=overwrite,
        )

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """Every row; where no column says whose it is, each is taken for a patient of its own."""
        self.check_trained_on(trained)
        values = read_features(raw, trained.settings["features"])
        gaps = np.isnan(values).any(axis=1)
        if gaps.any() and not trained.settings.get("missing"):
            row = int(np.flatnonzero(gaps)[0])
            raise DataError(
                f"{raw}: {int(gaps.sum())} rows have empty features, the first is row {row}, but the model was trained "
                "on complete rows: fill them in or leave those rows out"
            )
        features = trained.settings["features"]
        with naming(raw):
            check_finite(values, 0, "keep", lambda position: f"feature '{features[position[0]]}'")
        patients, times = read_roles(raw, trained.roles, trained.settings.get("session_gap"))
        rows = np.arange(len(values))
        whose = rows if patients is None else patients
        yield NewSamples({"x": torch.from_numpy(values)}, pl.DataFrame({"row": rows}), whose, times)

    def notes_on(self, options: Mapping[str, Json]) -> list[str]:
        left_out = options.get("left_out_of_features")
        if not isinstance(left_out, list) or not left_out:
            return []
        return [f"not used as features, being patient, target, time or session: {', '.join(left_out)}"]


# Which column is what


@dataclass(frozen=True)
class _Roles:
    """What each column is for."""

    patient: str
    targets: list[str]
    time: str | None
    session: str | None
    features: list[str]
    left_out: list[str]

    def columns(self) -> list[str]:
        """Every column that is needed, once."""
        others = [self.patient, *self.targets, *(name for name in (self.time, self.session) if name is not None)]
        return list(dict.fromkeys([*self.features, *others]))


def _choose(columns: Sequence[str], path: Path, options: TableOptions) -> _Roles:
    (patient,) = _columns([options.patient], columns, path, "patient")
    targets = _columns(options.target, columns, path, "target")
    time = None if options.time is None else _columns([options.time], columns, path, "time")[0]
    session = None if options.session is None else _columns([options.session], columns, path, "session")[0]
    chosen = _columns(options.features, columns, path, "feature")
    reserved = {patient, *targets, time, session}
    names = [name for name in chosen if name not in reserved]
    if not names:
        raise DataError(
            f"{path}: the patterns {list(options.features)} leave no feature besides patient, target and time"
        )
    return _Roles(patient, targets, time, session, names, [name for name in chosen if name in reserved])


def _open(path: Path, *as_text: str | None) -> tuple[pl.LazyFrame, list[str]]:
    """A table whose rows are not read yet, and its columns; some of them are read as text, whatever they look like."""
    if path.is_dir():
        raise StorageError(f"{path} is a folder: name the table, a .parquet, .csv, .csv.gz or .tsv file")
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith((".parquet", ".pq", ".csv", ".tsv")):
        raise DataError(f"{path} is not a table this command reads: .parquet, .csv, .csv.gz or .tsv")
    try:
        if name.endswith((".parquet", ".pq")):
            table = pl.scan_parquet(path)
            columns = table.collect_schema().names()
            check_unpacked_rows(path, table.select(pl.len()).collect().item(), len(columns))
            return table, columns
        separator = "\t" if name.endswith(".tsv") else ","
        columns = pl.scan_csv(path, separator=separator, infer_schema=False).collect_schema().names()
        check_whole(path, len(columns), separator)
        texts = {column: pl.String for column in as_text if column in columns}
        table = pl.scan_csv(
            path, separator=separator, null_values=_NULLS, infer_schema_length=None, schema_overrides=texts
        )
        return table, table.collect_schema().names()
    except _UNREADABLE as error:
        raise StorageError(f"cannot read {path}: {_first_line(error)}") from None


def _collect(table: pl.LazyFrame, path: Path) -> pl.DataFrame:
    try:
        frame = table.collect()
    except _UNREADABLE as error:
        raise StorageError(f"cannot read {path}: {_first_line(error)}") from None
    if frame.height == 0:
        raise DataError(f"{path} has no rows")
    return frame


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _columns(patterns: Iterable[str], columns: Sequence[str], path: Path, role: str) -> list[str]:
    """The columns that names or patterns mean, in the table's order, each once."""
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [pattern] if pattern in columns else []
        if not matches and role in _PATTERNED and re.search(r"[*?\[]", pattern):
            matches = [name for name in columns if fnmatchcase(name, pattern)]
        if not matches:
            near = difflib.get_close_matches(pattern, columns, n=1, cutoff=0.4)
            hint = f": did you mean '{near[0]}'?" if near else "."
            known = ", ".join(columns[:_SHOWN]) + (
                f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
            )
            raise DataError(f"{path} has no {role} column '{pattern}'{hint} It has {known}")
        chosen.update(matches)
    return [name for name in columns if name in chosen]


# Columns as arrays; errors name the file, the column and the row


def feature_values(frame: pl.DataFrame, names: Sequence[str], path: Path) -> npt.NDArray[np.float32]:
    """``(rows, features)``, empty values as NaN."""
    values = np.empty((frame.height, len(names)), dtype=np.float32)
    for number, name in enumerate(names):
        column = frame[name]
        if not (column.dtype.is_numeric() or column.dtype == pl.Boolean or column.dtype == pl.Null):
            raise DataError(_not_a_number(column, path))
        with np.errstate(over="ignore"):
            values[:, number] = column.cast(pl.Float64).fill_null(np.nan).to_numpy().astype(np.float32)
    return values


def _not_a_number(column: pl.Series, path: Path) -> str:
    where = f"{path}: feature '{column.name}'"
    if column.dtype != pl.String:
        return f"{where} has type {column.dtype}; features are numbers: make it one, or leave the column out"
    text = column.is_not_null() & column.cast(pl.Float64, strict=False).is_null()
    row = int(text.arg_true()[0]) if text.any() else 0
    return (
        f"{where} holds text in {int(text.sum())} rows, the first '{column[row]}' in row {row} (the first row is 0): "
        "encode it as numbers, or leave the column out"
    )


def _without_gaps(frame: pl.DataFrame, name: str, role: str, path: Path) -> pl.Series:
    column = frame[name]
    empty = column.is_null() | (column.is_nan() if column.dtype.is_float() else False)
    if empty.any():
        raise DataError(
            f"{path}: {role} column '{name}' is empty in {int(empty.sum())} rows, the first is row "
            f"{int(empty.arg_true()[0])} (the first row is 0): fill them in or leave those rows out"
        )
    return column


def numbers_or_text(frame: pl.DataFrame, name: str, role: str, path: Path) -> npt.NDArray[Any]:
    """A column without gaps, ``(rows,)``."""
    column = _without_gaps(frame, name, role, path)
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return column.to_numpy()
    if column.dtype.is_temporal() or column.dtype.is_nested():
        raise DataError(f"{path}: {role} column '{name}' has type {column.dtype}; it must hold whole numbers or names")
    return np.array(column.cast(pl.String).to_list(), dtype=np.str_)


def patients_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[Any]:
    """Whose each row is, ``(rows,)``: ids are text, and numbers only where nothing gets lost by it."""
    column = _without_gaps(frame, name, "patient", path)
    if column.dtype.is_decimal() or column.dtype in (pl.Int128, pl.UInt64):
        column = column.cast(pl.String)
    if column.dtype != pl.String:
        return numbers_or_text(frame, name, "patient", path)
    ids = ids_of(column)
    return ids.to_numpy() if ids.dtype == pl.Int64 else np.array(ids.to_list(), dtype=np.str_)


def labels_of(frame: pl.DataFrame, targets: Sequence[str], path: Path) -> npt.NDArray[Any]:
    """One target column as it is, ``(rows,)``; several as numbers, ``(rows, K)``."""
    columns = [numbers_or_text(frame, name, "target", path) for name in targets]
    if len(columns) == 1:
        return columns[0]
    for name, column in zip(targets, columns, strict=True):
        if column.dtype.kind not in "fiub":
            raise DataError(f"{path}: target column '{name}' is text; several target columns hold votes or 0 and 1")
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def sessions_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[Any]:
    """Numbers and names as they are; dates in seconds."""
    if frame[name].dtype.is_temporal():
        return times_of(frame, name, path)
    return numbers_or_text(frame, name, "session", path)


def times_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[np.float64]:
    """Numbers as they are; dates and durations in seconds."""
    column = _without_gaps(frame, name, "time", path)
    if column.dtype == pl.Duration:
        return (column.dt.total_microseconds() / 1e6).to_numpy().astype(np.float64)
    if column.dtype.is_temporal() and column.dtype != pl.Time:
        return (column.cast(pl.Datetime("us")).dt.epoch("us") / 1e6).to_numpy().astype(np.float64)
    if not column.dtype.is_numeric():
        raise DataError(
            f"{path}: time column '{name}' has type {column.dtype}; it must be a number, a date or a duration"
        )
    return column.to_numpy().astype(np.float64)


# Several sessions of one patient (nights, stays) on one time axis: one after the other, never overlapping


def session_gap(patients: npt.NDArray[Any], sessions: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> float:
    """A pause that no session contains: the length of the longest, or 1 where every session is a single moment.

    Parameters
    ----------
    patients, sessions : arrays ``(rows,)``
        A session is what a patient's rows with one value in ``sessions`` belong to.
    times : array ``(rows,)``
        Within the session.
    """
    session, _ = _number(patients, sessions)
    start, end = _bounds(session, times)
    return float((end - start).max()) or 1.0


def lay_out(
    patients: npt.NDArray[Any], sessions: npt.NDArray[Any], times: npt.NDArray[np.float64], gap: float
) -> npt.NDArray[np.float64]:
    """Time since a patient's first session began, with sessions in natural order and twice ``gap`` between them.

    The time between sessions is not known, or not comparable; it is made the same for everyone, so that it tells
    nothing.

    Examples
    --------
    >>> night, epoch = np.array(["N10", "N9", "N9"]), np.array([0.0, 5.0, 8.0])
    >>> lay_out(np.array([1, 1, 1]), night, epoch, gap=3.0).tolist()
    [9.0, 0.0, 3.0]
    """
    session, patient_of = _number(patients, sessions)
    start, end = _bounds(session, times)
    offset = np.zeros(len(start))
    # Added up patient by patient, so that no rounding depends on other patients.
    for number in range(1, len(start)):
        if patient_of[number] == patient_of[number - 1]:
            offset[number] = offset[number - 1] + end[number - 1] - start[number - 1] + 2 * gap
    return np.asarray(times - start[session] + offset[session], dtype=np.float64)


def _number(patients: npt.NDArray[Any], sessions: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Each row's session, numbered by patient and then in natural order; and each session's patient."""
    _, who = np.unique(patients, return_inverse=True)
    values, which = np.unique(sessions, return_inverse=True)
    rank = np.empty(len(values), dtype=np.int64)
    rank[sorted(range(len(values)), key=lambda number: _natural(values[number]))] = np.arange(len(values))
    pairs, session = np.unique(who * len(values) + rank[which], return_inverse=True)
    return session, pairs // len(values)


def _bounds(session: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """First and last time of every session."""
    count = int(session.max()) + 1
    start, end = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(start, session, times)
    np.maximum.at(end, session, times)
    return start, end


def _natural(value: Any) -> tuple[Any, ...]:
    """Sorts numbers by size, and names with numbers in them ("N2" before "N10") by the size of those."""
    if not isinstance(value, str):
        return (value,)
    parts = _DIGITS.split(value)
    return (*(int(part) if number % 2 else part for number, part in enumerate(parts)), value)


# New tables


def read_features(file: str | Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """The named features of a new table, ``(rows, features)``, for a model that was trained on them."""
    path = Path(file)
    table, columns = _open(path)
    absent = [name for name in names if name not in columns]
    if absent:
        raise DataError(
            f"{path} lacks {len(absent)} of the {len(names)} features the model was trained on: {absent[:5]}"
        )
    return feature_values(_collect(table.select(names), path), names, path)


def read_roles(
    file: str | Path, roles: Mapping[str, str | None], gap: float | None = None
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.float64] | None]:
    """Whose each row of a new table is, and when it was taken, ``(rows,)``; ``None`` where there is no such column.

    Parameters
    ----------
    roles : mapping
        Columns by what they are for: ``patient``, ``time``, ``session``.
    gap : float, optional
        ``session_gap`` of the data the model was trained on; sessions are laid out with it.
    """
    path = Path(file)
    table, columns = _open(path, roles.get("patient"))
    named = {role: name for role, name in roles.items() if name in columns}
    if not named:
        return None, None
    frame = _collect(table.select(list(dict.fromkeys(named.values()))), path)
    patients = patients_of(frame, named["patient"], path) if "patient" in named else None
    times = times_of(frame, named["time"], path) if "time" in named else None
    if patients is None or times is None or gap is None or roles.get("session") is None:
        return patients, times
    if "session" not in named:
        raise DataError(
            f"{path} has no column '{roles['session']}': the model was trained on samples of several sessions of a "
            "patient, and times in the table are counted within a session; add the column"
        )
    return patients, lay_out(patients, sessions_of(frame, named["session"], path), times, gap)
