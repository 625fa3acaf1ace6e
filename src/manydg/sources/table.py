"""Any table: CSV, TSV, parquet or Feather, one row per sample.

One column says whose sample a row is, one (or several) what is to be predicted, and the rest are features: numbers,
dates, times, durations, or categories.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import gzip
import itertools
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.config import UNITS, duration
from manydg.data.columns import (
    Column,
    FrameEncoding,
    check_finite,
    distinct,
    first_unreadable_time,
    ids_of,
    inputs_of,
    parse_numbers,
    plan_encoding,
    seconds_of,
    sites_of_patients,
)
from manydg.data.info import DatasetInfo, EventSpec, SourceFile
from manydg.data.timeline import clock_of
from manydg.errors import ConfigError, DataError, StorageError, warn
from manydg.files import GZIP, Json, check_unpacked_rows, check_whole, naming
from manydg.sources import KEEP_HELP, NewSamples, Options, RawArgument, Source, SourceDocs, TrainedOn, option
from manydg.sources._preparing import MISSING, CohortFlow, describe_files, natural, with_provenance, write_dense

_UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
_NULLS = ["", "NA", "N/A", "null", "NULL"]
_ROWS_TYPED = 10_000
"""Rows of a CSV file whose cells suggest the types of its columns, before all are looked at."""
_LONGEST_CELL, _BLOCK, _START = 2**31 - 1, 1 << 24, 1 << 16
_SQLITE = (".db", ".sqlite", ".sqlite3")
_DATABASES = (".duckdb", ".ddb", *_SQLITE)
QUERY_HELP = (
    "SQL whose result is the table: of a DuckDB or SQLite file, which is only read; of other files, where the table is "
    "called data."
)
_SHOWN = 12
_ENDINGS = (".parquet", ".pq", ".csv", ".tsv", ".feather", ".arrow")
_ENDINGS_TEXT = ".parquet, .csv, .csv.gz, .tsv or .feather"
_PATTERNED = ("feature", "target", "categorical", "measured", "kept")


@dataclass(frozen=True)
class TableOptions(Options):
    """What the columns are.

    ``features`` and ``target`` may be patterns such as ``EEG_*``; the patient, target, time and session columns are
    never features. A patient's sessions follow each other in the order of their values (numbers, dates, or names such
    as ``N2``, ``N10``), and no context takes a neighbour over their borders.
    """

    patient: str = option(help="Column of the patient.", metavar="COL")
    features: tuple[str, ...] = option(
        help="Columns of the inputs, such as 'EEG_*', or '*' for all.", metavar="PATTERN..."
    )
    target: tuple[str, ...] = option(
        (), help="Column of the class; repeat it for votes or labels. --event creates a target itself.", metavar="COL"
    )
    categorical: tuple[str, ...] = option(
        (), help="Feature that looks like a number or a date but is a category; may be repeated, or a pattern.",
        metavar="COL",
    )  # fmt: skip
    measured: tuple[str, ...] = option(
        (), help="Numeric feature with limits and ranges as text: <5 counts as 5, 0-2 as 1, other text as "
        "missing. May be repeated, or a pattern.", metavar="COL",
    )  # fmt: skip
    query: str | None = option(None, help=QUERY_HELP, metavar="SQL")
    time: str | None = option(None, help="Column of the time of a sample.", metavar="COL")
    session: str | None = option(None, help="Column of the night or stay that times are counted within.", metavar="COL")
    event: str | None = option(
        None, help="Column of an event to predict: the time of its onset, or 0 before the onset and 1 from then on.",
        metavar="COL",
    )  # fmt: skip
    horizon: str | None = option(
        None, help="How long before the onset the target is positive, such as 6h.", metavar="6h|30min|..."
    )
    time_unit: str | None = option(None, help="Unit of a numeric --time: s, min, h or d.", choices=tuple(UNITS))
    subgroup: tuple[str, ...] = option(
        (), help="Column to break results down by, such as sex; numbers in bands, as age:40,65 or age:bands (quarters "
        "of the patients). May be repeated.", metavar="COL[:CUTS]",
    )  # fmt: skip
    site: str | None = option(None, help="Column of the hospital or other site of the patient.", metavar="COL")
    kind: str | None = option(
        None, help="classes, votes, binary or multilabel, if the values are ambiguous; regression to "
        "predict the number itself (a length of stay, a laboratory value).",
    )  # fmt: skip
    classes: tuple[str, ...] | None = option(
        None, help="Names of the classes in code order.", metavar="A,B,...", commas=True
    )
    missing: str = option(
        "auto", help="keep empty values as not measured, or refuse them; auto keeps and counts them.",
        choices=("auto", *MISSING),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.session is not None and self.time is None:
            raise ConfigError(
                "a session column needs a time column, which orders the samples within a session: give time"
            )
        if not self.target and self.event is None:
            raise ConfigError("the option target is needed: the column of the class; or an event and its horizon")
        if (self.event is None) != (self.horizon is None):
            raise ConfigError(
                "an event and a horizon go together: say in which column the onset is (--event) and how long before "
                "it the event is to be foreseen (--horizon 6h)"
            )
        if self.event is not None and self.time is None:
            raise ConfigError("an event needs a time column, by which samples come before or after it: give time")
        grouped = [name.partition(":")[0] for name in self.subgroup]
        if repeated := sorted({name for name in grouped if grouped.count(name) > 1}):
            raise ConfigError(f"the subgroup column '{repeated[0]}' is named twice: name it once, with one set of cuts")
        if self.horizon is not None:
            duration(self.horizon, "horizon")

    def to_json(self) -> dict[str, Json]:
        target: Json = self.target[0] if len(self.target) == 1 else list(self.target)
        shown = super().to_json() | {"target": target}
        rare = ("categorical", "measured", "query", "event", "horizon", "time_unit", "subgroup", "site")
        left_out = {"kind", "classes", *(name for name in rare if not shown[name])}
        return {name: value for name, value in shown.items() if name not in left_out}


@dataclass(frozen=True)
class PredictionOptions(Options):
    """What the table of predictions shows of the table that was given."""

    keep: tuple[str, ...] = option((), help=KEEP_HELP, metavar="COL")
    query: str | None = option(None, help=QUERY_HELP, metavar="SQL")


class TableFile(Source[TableOptions, PredictionOptions]):
    """A table of your own.

    Numbers become the input column ``x``, ``(rows, features)`` float32, and so do dates, times and durations.
    Categories become the column ``categories``, ``(rows, categorical features)`` int64; which levels a model knows is
    decided by its training patients.
    """

    name = "table"
    options_class = TableOptions
    prediction_options_class = PredictionOptions
    raw = RawArgument(
        "Table: parquet, CSV, TSV or Feather, one row a sample; a folder of such files; or a database.", "file"
    )
    parallel = False
    self_explanatory = False
    docs = SourceDocs(predicts="your own labels", target="any kind", page="[table](datasets/table.md)")

    def looks_like(self, folder: Path) -> bool:
        """Never: any file may be a table."""
        return False

    def prepare(
        self, raw: Path, out: Path, options: TableOptions, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        tables = open_tables(raw, options.patient, *options.categorical, query=options.query)
        roles = _choose(tables[0].columns, raw, options)
        frame = _collect(tables, roles.columns(), raw)
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
            files = itertools.chain.from_iterable(pool.map(describe_files, [[table.path] for table in tables]))
            return self._write(out, frame, roles, options, raw, files, overwrite=overwrite)

    def _write(
        self, out: Path, frame: pl.DataFrame, roles: _Roles, options: TableOptions, raw: Path,
        files: Iterable[SourceFile], *, overwrite: bool,
    ) -> Path:  # fmt: skip
        flow = CohortFlow()
        flow.add("rows of the table", patients=frame[roles.patient].n_unique(), samples=frame.height)
        patients = patients_of(frame, roles.patient, raw)
        times, gap = _times(frame, roles, patients, raw)
        event = None if times is None else _event(frame, roles, options, patients, times, raw)
        if event is not None:
            flow.add(f"onset in '{roles.event}'", **event.counts())
        labels = _labels_around(event, frame, roles, raw)
        groups = [_subgroup(frame, name, patients, raw) for name in options.subgroup]
        # What is kept beside the samples, for training and results alone.
        beside = {} if event is None else {"onset": event.onset}
        beside |= {"subgroups": np.stack([group.codes for group in groups], axis=1)} if groups else {}
        info = DatasetInfo(
            sites=_sites(frame, roles.site, patients, raw), event=None if event is None else event.spec,
            subgroups={group.name: group.names for group in groups},
        )  # fmt: skip
        encoding, texts = _encoding(frame, roles, patients, raw)
        _warn_of_oddities(frame, encoding, labels, roles, raw, numeric=options.kind == "regression")
        options = replace(options, missing=_missing(options.missing, frame, encoding, raw))
        settings = encoding.settings() | ({} if gap is None else {"session_gap": gap})
        described = options.to_json() | {"left_out_of_features": roles.left_out}
        described |= {"text_left_out": list(texts)} if texts else {}
        return write_dense(
            out, _Encoded(frame, encoding), labels, patients,
            files=dict.fromkeys(("values", "target", "patient"), raw), times=times,
            position_name=lambda position: f"feature '{encoding.features[position[0]].name}'", kind=options.kind,
            classes=_class_names(options, roles), missing=options.missing, codes=encoding.codes(frame),
            metadata=beside, overwrite=overwrite,
            info=with_provenance(replace(info, settings=settings), self.name, files, described, flow, raw=raw),
        )  # fmt: skip

    def for_prediction(self, raw: Path, trained: TrainedOn, options: PredictionOptions) -> Iterator[NewSamples]:
        """Every row; where no column says whose it is, each is taken for a patient of its own."""
        self.check_trained_on(trained)
        encoding = FrameEncoding.of(trained.settings)
        answer = None if options.query is None else _answer(raw, trained, encoding, options.query, options.keep)
        columns = read_features(raw, encoding, answer)
        values = np.asarray(columns.get("x", torch.zeros(0, 0)))
        gaps = np.isnan(values).any(axis=1)
        if gaps.any() and not trained.settings.get("missing"):
            row = int(np.flatnonzero(gaps)[0])
            raise DataError(
                f"{raw}: {int(gaps.sum())} rows have empty features, the first is row {row}, but the model was trained "
                "on complete rows: fill them in or leave those rows out"
            )
        with naming(raw):
            check_finite(values, 0, "keep", lambda position: f"feature '{encoding.features[position[0]].name}'")
        patients, times = read_roles(raw, trained.roles, trained.settings.get("session_gap"), answer)
        rows = np.arange(len(next(iter(columns.values()))))
        whose = rows if patients is None else patients
        yield NewSamples(columns, _kept(raw, rows, options.keep, answer), whose, times)

    def notes_on(self, options: Mapping[str, Json]) -> list[str]:
        reasons = {
            "left_out_of_features": "not used as features, being patient, target, time, session, event or site",
            "text_left_out": "not used as features, being text that hardly two patients share (name them in "
            "--categorical to use them)",
        }
        named = {reason: names for key, reason in reasons.items() if isinstance(names := options.get(key), list)}
        return [f"{reason}: {', '.join(map(str, names))}" for reason, names in named.items() if names]


@dataclass(frozen=True, eq=False)
class _Encoded:
    """The numbers of a table ``(rows, features)``, of which a slice is computed when it is asked for."""

    frame: pl.DataFrame
    encoding: FrameEncoding

    @property
    def shape(self) -> tuple[int, int]:
        return self.frame.height, len(self.encoding.features)

    def __getitem__(self, rows: slice, /) -> npt.NDArray[np.float32]:
        return self.encoding.numbers(self.frame[rows])


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
    categorical: list[str]
    measured: list[str]
    optional: list[str]
    event: str | None = None
    subgroups: tuple[str, ...] = ()
    site: str | None = None

    def columns(self) -> list[str]:
        """Every column that is needed, once."""
        named = [name for name in (self.time, self.session, self.event, self.site) if name is not None]
        return list(dict.fromkeys([*self.features, self.patient, *self.targets, *named, *self.subgroups]))


def _choose(columns: Sequence[str], path: Path, options: TableOptions) -> _Roles:
    (patient,) = _columns([options.patient], columns, path, "patient")
    targets = _columns(options.target, columns, path, "target")
    wanted = {"time": options.time, "session": options.session, "event": options.event, "site": options.site}
    time, session, event, site = (
        None if name is None else _columns([name], columns, path, role)[0] for role, name in wanted.items()
    )
    subgroups = _columns([name.partition(":")[0] for name in options.subgroup], columns, path, "subgroup")
    if patient in targets:
        raise ConfigError(f"'{patient}' is named as the patient and as the target: they are different columns")
    chosen = _columns(options.features, columns, path, "feature")
    reserved = {patient, *targets, time, session, event, site}
    categorical = _columns(options.categorical, columns, path, "categorical")
    measured = _columns(options.measured, columns, path, "measured")
    if both := sorted(set(measured) & set(categorical)):
        raise ConfigError(f"'{both[0]}' is named as a category and as measured: it can only be one of them")
    chosen = [name for name in columns if name in {*chosen, *categorical, *measured}]
    names = [name for name in chosen if name not in reserved]
    if not names:
        raise DataError(
            f"{path}: the patterns {list(options.features)} leave no feature besides patient, target and time"
        )
    left_out, optional = [[n for n in chosen if n in reserved], [n for n in names if n not in options.features]]
    return _Roles(
        patient, targets, time, session, names, left_out, categorical, measured, optional, event, tuple(subgroups), site
    )  # fmt: skip


def _class_names(options: TableOptions, roles: _Roles) -> Sequence[str] | None:
    """Names of the classes or labels, or of the value, where the values themselves are not to name them."""
    if options.kind == "regression":
        if len(roles.targets) != 1:
            raise DataError("a regression target is one column of numbers: name one in --target")
        if options.classes is not None:
            raise ConfigError("a regression target has no classes: leave --classes or --kind regression out")
        return roles.targets
    if options.classes is not None or len(roles.targets) == 1:
        return options.classes
    return roles.targets or ("no", str(roles.event))


def _encoding(
    frame: pl.DataFrame, roles: _Roles, patients: npt.NDArray[Any], path: Path
) -> tuple[FrameEncoding, list[str]]:
    """How the features are read, and the text that is left out of them."""
    with naming(path):
        encoding, texts = plan_encoding(
            frame, roles.features, patients, categorical=roles.categorical, measured=roles.measured, time=roles.time,
            optional=roles.optional,
        )  # fmt: skip
        _warn_of_text(frame, encoding, path)
    if not encoding.columns():
        raise DataError(
            f"{path}: the features {texts} hold text that hardly two patients share, and there is no other: write "
            "numbers as 1234.5, read limits (<5) with --measured, or take each value as a category (--categorical)"
        )
    return encoding, texts


def _sites(frame: pl.DataFrame, column: str | None, patients: npt.NDArray[Any], path: Path) -> dict[str, str]:
    """The site of each patient; none without a column of it."""
    if column is None:
        return {}
    sites = frame[column].cast(pl.String)
    if empty := sites.null_count():
        row = int(sites.is_null().arg_max() or 0)
        raise DataError(
            f"{path}: {empty} rows have no site in '{column}', the first is row {row}: fill it in, or leave them out"
        )
    return sites_of_patients(patients, sites.to_numpy())


def _times(
    frame: pl.DataFrame, roles: _Roles, patients: npt.NDArray[Any], path: Path
) -> tuple[npt.NDArray[np.float64] | None, float | None]:
    """The time of each row, where there is one, and the gap of sessions that are laid out one after the other."""
    if roles.time is None:
        return None, None
    times = times_of(frame, roles.time, path)
    if roles.session is None:
        return times, None
    sessions = sessions_of(frame, roles.session, path)
    gap = session_gap(patients, sessions, times)
    return lay_out(patients, sessions, times, gap), gap


@dataclass(frozen=True)
class OpenTable:
    """A file whose rows are not read yet.

    - ``rows``: Of a CSV file, with the types that its first rows suggest.
    - ``exact``: Of a CSV file, the same with the types that all rows suggest, which takes several times as long.
    - ``texts``: Columns that are text, whatever they look like.
    """

    path: Path
    rows: pl.LazyFrame
    columns: list[str]
    exact: pl.LazyFrame | None = None
    texts: frozenset[str] = frozenset()

    def read(self, columns: Sequence[str]) -> pl.DataFrame:
        """Some columns, with the types that all rows suggest."""
        if self.exact is None:
            return self.rows.select(columns).collect()
        try:
            frame = self.rows.select(columns).collect()
        except pl.exceptions.ComputeError:
            return self.exact.select(columns).collect()
        # A column whose first rows are empty was taken for text.
        texts = [name for name in columns if frame[name].dtype == pl.String and name not in self.texts]
        return frame.with_columns(_typed(frame[name]) for name in texts)


def _typed(column: pl.Series) -> pl.Series:
    """A column of text as truth values or numbers, if all of its cells are."""
    known = column.drop_nulls()
    if known.is_empty() or known.head(_ROWS_TYPED).is_in(["true", "false"]).all():
        truths = known.is_in(["true", "false"]).all() and len(known)
        return column == "true" if truths else column
    for kind in (pl.Int64, pl.Float64):
        if known.head(_ROWS_TYPED).cast(kind, strict=False).is_not_null().all():
            numbers = column.cast(kind, strict=False)
            if numbers.null_count() == column.null_count():
                return numbers
    return column


def open_tables(path: Path, *as_text: str | None, query: str | None = None) -> list[OpenTable]:
    """The table in a file, or those in a folder, which have the same columns.

    - ``*as_text``: Names or patterns of columns that are read as text, whatever they look like.
    - ``query``: SQL whose result is the table.
    """
    database = path.is_file() and path.suffix.lower() in _DATABASES
    if query is not None:
        frame = _ask_database(path, query) if database else _ask_tables(path, query, as_text)
        return [OpenTable(path, frame.lazy(), frame.columns)]
    if database:
        raise ConfigError(f"{path} is a database: say what to read of it with a query (--query 'SELECT ... FROM ...')")
    if not path.is_dir():
        return [_open(path, as_text)]
    # macOS puts files that begin with "._" beside those on other disks.
    visible = (file for file in path.iterdir() if not file.name.startswith("."))
    files = [file for file in visible if file.is_file() and _ending(file) is not None]
    if not files:
        raise StorageError(f"{path} is a folder without a table: name one, a {_ENDINGS_TEXT} file")
    tables = [_open(file, as_text) for file in sorted(files, key=lambda file: natural(file.name))]
    first = tables[0]
    for table in tables[1:]:
        if odd := sorted(set(table.columns) ^ set(first.columns)):
            raise DataError(
                f"{table.path.name} and {first.path.name} in {path} have different columns ({', '.join(odd[:5])}): "
                "all tables of a folder have the same"
            )
    return tables


def _ask_tables(path: Path, query: str, as_text: Sequence[str | None]) -> pl.DataFrame:
    """What a query gives of the table in a file or a folder, which it calls ``data``."""
    tables = open_tables(path, *as_text)
    whole = _collect(tables, tables[0].columns, path)
    try:
        return whole.lazy().sql(query, table_name="data").collect()
    except pl.exceptions.PolarsError as error:
        raise ConfigError(f"the query on {path} failed: {_first_line(error)}. It calls the table 'data'") from None


def _ask_database(path: Path, query: str) -> pl.DataFrame:
    """What a query gives of a DuckDB or SQLite database, which is opened for reading only."""
    if path.suffix.lower() in _SQLITE:
        try:
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                return pl.read_database(query, database, infer_schema_length=None)
        except (sqlite3.Error, pl.exceptions.PolarsError) as error:
            raise DataError(f"the query on {path} failed: {_first_line(error)}") from None
    try:
        import duckdb
    except ImportError:
        raise ConfigError(f"{path} is read with the package duckdb: pip install 'manydg[duckdb]'") from None
    try:
        # Nothing but the database itself can be reached: a query that writes a file fails.
        with duckdb.connect(str(path), read_only=True, config={"enable_external_access": "false"}) as database:
            return pl.DataFrame(database.sql(query).pl())
    except (duckdb.Error, AttributeError) as error:
        raise DataError(f"the query on {path} failed: {_first_line(error)}") from None


def _ending(path: Path) -> str | None:
    name = path.name.lower().removesuffix(".gz")
    return next((ending for ending in _ENDINGS if name.endswith(ending)), None)


def _open(path: Path, as_text: Sequence[str | None]) -> OpenTable:
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    ending = _ending(path)
    if ending is None:
        raise DataError(f"{path} is not a table this command reads: {_ENDINGS_TEXT}")
    try:
        if ending not in (".csv", ".tsv"):
            table = pl.scan_parquet(path) if ending in (".parquet", ".pq") else pl.scan_ipc(path)
            columns = table.collect_schema().names()
            check_unpacked_rows(path, table.select(pl.len()).collect().item(), len(columns))
            return OpenTable(path, table, columns)
        separator = "\t" if ending == ".tsv" else ","
        _check_text(path)
        columns = pl.scan_csv(path, separator=separator, infer_schema=False).collect_schema().names()
        check_whole(path, len(columns), separator)
        _check_cells(path, separator, path.stat().st_mtime_ns)
        patterns = [name for name in as_text if name is not None]
        texts = {name: pl.String for name in columns if any(name == p or fnmatchcase(name, p) for p in patterns)}
        scan = partial(pl.scan_csv, path, separator=separator, null_values=_NULLS, schema_overrides=texts)
        exact = scan(infer_schema_length=None)
        return OpenTable(path, scan(infer_schema_length=_ROWS_TYPED), columns, exact, frozenset(texts))
    except _UNREADABLE as error:
        raise StorageError(f"cannot read {path}: {_first_line(error)}") from None


def _check_text(path: Path) -> None:
    """Raise where the beginning of a plain file shows an encoding or line ends that polars cannot read."""
    with path.open("rb") as file:
        start = file.read(_START)
    if start.startswith(GZIP):
        return
    if b"\0" in start:
        raise DataError(f"{path} is not UTF-8 text: it holds null bytes, as UTF-16 does: save it as UTF-8")
    if b"\r" in start[:-1] and b"\n" not in start:
        raise DataError(f"{path}: its lines end with a carriage return alone: save it with line feeds")


@cache
def _check_cells(path: Path, separator: str, _changed: int) -> None:
    """Raise unless every row has as many fields as the header, of which polars is sure only where it reads them all."""
    row, limit = -1, csv.field_size_limit(_LONGEST_CELL)
    with path.open("rb") as file:
        opened = gzip.open if file.read(2) == GZIP else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, delimiter=separator)
            header = next(rows, [])
            if len(header) == 1 and (other := next((sign for sign in ";\t,|" if sign in header[0]), None)):
                raise DataError(
                    f"{path}: its columns are separated by {other!r}: save it with {separator!r} between columns, and "
                    "numbers with decimal points"
                )
            if repeated := [name for name, count in Counter(header).items() if count > 1]:
                raise DataError(f"{path} has the column '{repeated[0]}' twice: rename or remove one")
            if opened is open and _is_even(path, separator, len(header)):
                return
            for row, cells in enumerate(rows):
                if cells and len(cells) != len(header):
                    raise DataError(
                        f"{path}: row {row} (the first row is 0) has {len(cells)} fields, its header {len(header)}: "
                        "put text with separators in quotes, and write the separators of empty cells too"
                    )
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not UTF-8 text, in row {row + 1} (the first row is 0) or later: save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: row {row + 1} (the first row is 0) cannot be read: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _is_even(path: Path, separator: str, fields: int) -> bool:
    """Whether every row of a file has so many fields; False where that takes a closer look, as with quotes."""
    size, cuts = path.stat().st_size, [0]
    with path.open("rb") as file, ThreadPoolExecutor() as pool:
        while cuts[-1] < size:
            file.seek(min(cuts[-1] + _BLOCK, size))
            file.readline()
            cuts.append(file.tell())
        return all(pool.map(partial(_is_even_block, path, separator, fields), itertools.pairwise(cuts)))


def _is_even_block(path: Path, separator: str, fields: int, span: tuple[int, int]) -> bool:
    with path.open("rb") as file:
        file.seek(span[0])
        block = file.read(span[1] - span[0])
    if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
        return False
    try:
        _ = block.isascii() or block.decode("utf-8")
    except UnicodeDecodeError:
        return False
    letters = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    before = np.searchsorted(np.flatnonzero(letters == ord(separator)), ends)
    return bool((np.diff(before, prepend=0) == fields - 1).all())


def _collect(tables: Sequence[OpenTable], columns: Sequence[str], path: Path) -> pl.DataFrame:
    """The rows of all tables, one after the other."""
    frames = []
    for table in tables:
        try:
            frame = table.read(columns)
        except _UNREADABLE as error:
            raise StorageError(f"cannot read {table.path}: {_first_line(error)}") from None
        # A column that is empty in a CSV is of any type, and not text.
        texts = [name for name in columns if frame[name].dtype == pl.String]
        empty = [name for name in texts if frame[name].null_count() == frame.height]
        frames.append(frame.with_columns(pl.lit(None).alias(name) for name in empty))
    try:
        whole = pl.concat(frames, how="vertical_relaxed") if len(frames) > 1 else frames[0]
    except pl.exceptions.PolarsError as error:
        raise DataError(f"the tables in {path} have columns of different types: {_first_line(error)}") from None
    if whole.height == 0:
        raise DataError(f"{path} has no rows")
    return whole


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
            more = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
            raise DataError(f"{path} has no {role} column '{pattern}'{hint} It has {', '.join(columns[:_SHOWN])}{more}")
        chosen.update(matches)
    return [name for name in columns if name in chosen]


# Columns as arrays; errors name the file, the column and the row


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
    dated = frame[name].dtype.is_temporal()
    return times_of(frame, name, path) if dated else numbers_or_text(frame, name, "session", path)


def times_of(frame: pl.DataFrame, name: str, path: Path) -> npt.NDArray[np.float64]:
    """Numbers as they are; dates, times and durations in seconds, also where they are text."""
    column = _without_gaps(frame, name, "time", path)
    with naming(path):
        seconds = seconds_of(column)
    if seconds is not None:
        return seconds.copy()  # polars' own memory is not writable
    if column.dtype == pl.String:
        raise DataError(
            f"{path}: time column '{name}' holds text that is no time in row {first_unreadable_time(column)} (the "
            "first row is 0), or that is written otherwise than in the rows before: write numbers, dates as 2026-03-31 "
            "or 2026-03-31 14:05 without a time zone, or durations as 36:15:00"
        )
    if not column.dtype.is_numeric():
        raise DataError(
            f"{path}: time column '{name}' has type {column.dtype}; it must be a number, a date, a time or a duration"
        )
    with naming(path):
        return clock_of(column.to_numpy())


# What is odd about a table, as warnings

_ROWS_FOR_A_LOOK, _COLUMNS_FOR_A_LOOK, _FEWEST_OF_A_CLASS = 2_000, 8, 10
_IDENTIFIER = re.compile(r"(?:^|[_ .-])(?:id|mrn)$|[a-z]I[dD]$", re.IGNORECASE)


def _warn_of_oddities(
    frame: pl.DataFrame, encoding: FrameEncoding, labels: npt.NDArray[Any], roles: _Roles, path: Path, *, numeric: bool
) -> None:
    """Warn of rows and patients that are there twice, of features that give the target away, and of identifiers."""
    # Rows that differ in some columns, or in their hash, are different; only if some are alike are all cells compared.
    some = frame.select(frame.columns[-_COLUMNS_FOR_A_LOOK:])
    alike = all(columns.hash_rows().n_unique() < frame.height for columns in (some, frame))
    if alike and (repeated := frame.height - frame.n_unique()):
        warn(
            f"{path}: {repeated:,} of {frame.height:,} rows repeat an earlier row in every column that is used: were "
            "tables joined twice?"
        )
    if labels.ndim == 1 and (leaking := _leaking_features(frame, encoding, labels, ordered=numeric)):
        warn(
            f"{path}: each of these features alone tells the target exactly: {', '.join(leaking[:5])}. Is it known "
            "before the target is? If not, leave it out"
        )
    if again := _numbers_written_twice(frame[roles.patient].unique().cast(pl.String)):
        warn(
            f"{path}: {again} patient ids are the number of another with zeros in front or behind the point, as 1, 001 "
            "and 1.0, and count as other patients: if they are the same people, write them alike, or people who are "
            "trained on are tested"
        )
    if ids := [name for name in roles.optional if _IDENTIFIER.search(name) and name not in roles.categorical]:
        warn(
            f"{path}: features that are named like identifiers: {', '.join(ids[:5])}. A model may learn people by them"
        )


def _numbers_written_twice(ids: pl.Series) -> int:
    numbers = ids.str.extract(r"^0*(\d+)(?:\.0*)?$").drop_nulls()
    return len(numbers) - numbers.n_unique()


def _warn_of_text(frame: pl.DataFrame, encoding: FrameEncoding, path: Path) -> None:
    """Say how many cells of columns of numbers are text, and what became of them."""
    for feature in encoding.features:
        if feature.kind != "measured":
            continue
        cells = frame[feature.column].cast(pl.String)
        text = cells.filter(cells.is_not_null() & cells.cast(pl.Float64, strict=False).is_null())
        lost = text.filter(parse_numbers(text).is_null())
        others = f", {len(lost):,} others such as '{lost[0]}' as missing" if len(lost) else ""
        warn(f"{path}: {len(text) - len(lost):,} limits or ranges in '{feature.name}' count as numbers{others}")


def _missing(wanted: str, frame: pl.DataFrame, encoding: FrameEncoding, raw: Path) -> str:
    """What to do with empty values: ``auto`` keeps them, with a warning, where there are any."""
    if wanted != "auto":
        return wanted
    gaps = np.array([feature.gaps(frame) for feature in encoding.features])
    if not gaps.any():
        return "refuse"
    warn(
        f"{raw}: {np.count_nonzero(gaps)} of {len(gaps)} features have empty values "
        f"({gaps.mean() / frame.height:.1%} of all); they are kept as measurements not taken "
        "('--missing refuse' makes them an error)"
    )
    return "keep"


def _leaking_features(
    frame: pl.DataFrame, encoding: FrameEncoding, labels: npt.NDArray[Any], *, ordered: bool = False
) -> list[str]:
    """Names of the features that fall into as many stretches as there are classes, each of one class alone.

    With ``ordered`` the labels are numbers, and a feature tells them that rises or falls with them throughout.
    """
    _, classes = distinct(labels)
    if ordered:
        ranks = {each.name: np.unique(each.values(frame), return_inverse=True)[1] for each in encoding.features}
        whole = {each.name for each in encoding.features if not each.gaps(frame)}
        # In one order or in opposite orders, with ties at the same rows.
        orders = [classes, classes.max() - classes]
        return [name for name, own in ranks.items() if name in whole and any((own == each).all() for each in orders)]
    if np.bincount(classes).min() < _FEWEST_OF_A_CLASS:
        return []
    every = max(1, frame.height // _ROWS_FOR_A_LOOK)
    leaking, look = [], encoding.numbers(frame.gather_every(every)).T
    for feature, glance in zip(encoding.features, look, strict=True):
        if _splits_into(glance, classes[::every]) and _splits_into(feature.values(frame), classes):
            leaking.append(feature.name)
    codes = encoding.codes(frame)
    for name, column in zip(encoding.levels, () if codes is None else codes.T, strict=True):
        pairs = np.count_nonzero(np.bincount(column * (classes.max() + 1) + classes))
        if pairs == np.count_nonzero(np.bincount(column)):
            leaking.append(name)
    return leaking


def _splits_into(values: npt.NDArray[np.floating], classes: npt.NDArray[Any]) -> bool:
    """Whether values in order of size, the missing ones last, change their class once for each class but one."""
    order = np.argsort(values, kind="stable")
    ranked, labels = values[order], classes[order]
    change = labels[1:] != labels[:-1]
    same = (ranked[1:] == ranked[:-1]) | (np.isnan(ranked[1:]) & np.isnan(ranked[:-1]))
    present = np.count_nonzero(np.bincount(classes))
    return int(change.sum()) == present - 1 and not bool((change & same).any())


# Several sessions of one patient (nights, stays) on one time axis: one after the other, never overlapping


def session_gap(patients: npt.NDArray[Any], sessions: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> float:
    """A pause that no session contains: the length of the longest, or 1 where every session is a single moment.

    - ``patients``, ``sessions`` ``(rows,)``: A session is what a patient's rows with one value in ``sessions`` belong
      to.
    - ``times`` ``(rows,)``: Within the session.
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
    rank[sorted(range(len(values)), key=lambda number: natural(values[number]))] = np.arange(len(values))
    pairs, session = np.unique(who * len(values) + rank[which], return_inverse=True)
    return session, pairs // len(values)


def _bounds(session: npt.NDArray[Any], times: npt.NDArray[np.float64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """First and last time of every session."""
    count = int(session.max()) + 1
    start, end = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(start, session, times)
    np.maximum.at(end, session, times)
    return start, end


# Events: when each session's begins, and which samples come before it

_LEAST_PATIENTS, _MOST_GROUPS = 10, 12


@dataclass(frozen=True, eq=False)
class _Event:
    """When the event begins in each row's session, NaN where it does not.

    ``onset`` and ``times`` are ``(rows,)``, on the time axis on which sessions follow each other.
    """

    spec: EventSpec
    onset: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]
    onsets: int

    def labels(self) -> npt.NDArray[np.int64]:
        """1 from the horizon before onset on."""
        # An hour may be no exact number of the unit.
        return np.asarray(self.onset - self.times <= self.spec.horizon * (1 + 1e-9), np.int64)

    def counts(self) -> dict[str, int]:
        before, within = self.times < self.onset, self.labels() == 1
        return {
            "onsets": self.onsets,
            "samples_within_the_horizon": int((before & within).sum()),
            "samples_from_onset_on": int((self.times >= self.onset).sum()),
        }


def _event(
    frame: pl.DataFrame,
    roles: _Roles,
    options: TableOptions,
    patients: npt.NDArray[Any],
    laid_out: npt.NDArray[np.float64],
    path: Path,
) -> _Event | None:
    """The event that is asked for; ``laid_out`` are the rows' times on the axis of all sessions."""
    if roles.event is None or roles.time is None or options.horizon is None:
        return None
    times = times_of(frame, roles.time, path)
    in_seconds = not frame[roles.time].dtype.is_numeric()
    if not in_seconds and options.time_unit is None:
        raise ConfigError(
            f"{path}: time column '{roles.time}' holds plain numbers, so that a horizon of {options.horizon} is not "
            "known in its unit: say what one unit is (--time-unit h)"
        )
    unit = 1.0 if in_seconds else UNITS[str(options.time_unit)]
    sessions = np.zeros(len(times)) if roles.session is None else sessions_of(frame, roles.session, path)
    session, _ = _number(patients, sessions)
    begins = _begins(frame[roles.event], times, in_seconds, path)
    onset = np.full(int(session.max()) + 1, np.inf)
    np.minimum.at(onset, session[~np.isnan(begins)], begins[~np.isnan(begins)])
    several = ~np.isnan(begins) & (begins != onset[session])
    if several.any() and not _is_flag(frame[roles.event]):
        what = "patient" if roles.session is None else "session"
        raise DataError(
            f"{path}: event column '{roles.event}' has two onsets in one {what}, the second in row "
            f"{int(np.flatnonzero(several)[0])} (the first row is 0): a {what} has one event; keep the first, or cut "
            "the stay into sessions (--session)"
        )
    if not np.isfinite(onset).any():
        raise DataError(f"{path}: event column '{roles.event}' has no onset in any row: there is nothing to foresee")
    spec = EventSpec(roles.event, duration(options.horizon, "horizon") / unit, UNITS["d"] / unit, not roles.targets)
    shifted = np.where(np.isfinite(onset), onset, np.nan)[session] + (laid_out - times)
    return _Event(spec, shifted, laid_out, int(np.isfinite(onset).sum()))


def _labels_around(event: _Event | None, frame: pl.DataFrame, roles: _Roles, path: Path) -> npt.NDArray[Any]:
    """The labels of the target columns, or those that the event makes where there are none."""
    if event is not None and not roles.targets:
        return event.labels()
    labels = labels_of(frame, roles.targets, path)
    if event is not None and (labels.ndim != 1 or len(np.unique(labels)) != 2):
        raise DataError(f"{path}: with an event, a target of two classes is needed: leave out --target, or --event")
    return labels


def _is_flag(column: pl.Series) -> bool:
    """Whether an event's column says of every row if the event has begun, rather than when it begins."""
    numbers = column.dtype.is_numeric() and column.null_count() == 0
    return column.dtype == pl.Boolean or (numbers and bool(((column == 0) | (column == 1)).all()))


def _begins(column: pl.Series, times: npt.NDArray[np.float64], in_seconds: bool, path: Path) -> npt.NDArray[np.float64]:
    """What each row says of the onset's time, ``(rows,)``; NaN where it says nothing."""
    if _is_flag(column):
        begun = column.cast(pl.Int8).fill_null(0).to_numpy() == 1
        return np.where(begun, times, np.nan)
    if column.null_count() == len(column):
        return np.full(len(times), np.nan)
    with naming(path):
        seconds = seconds_of(column)
    if seconds is None and not column.dtype.is_numeric():
        raise DataError(
            f"{path}: event column '{column.name}' has type {column.dtype}; it holds the onset's time as --time does, "
            "or 0 before the onset and 1 from then on"
        )
    if in_seconds != (seconds is not None):
        kinds = ("dates or durations", "plain numbers")
        raise DataError(
            f"{path}: event column '{column.name}' holds {kinds[in_seconds]} and the time column "
            f"{kinds[not in_seconds]}: write the onset as the times are written, or as 0 and 1"
        )
    return column.cast(pl.Float64).to_numpy() if seconds is None else seconds


# Subgroups that results are broken down by; no model sees them


@dataclass(frozen=True, eq=False)
class _Subgroup:
    """The group of each row, ``(rows,)`` codes, and the groups' names."""

    name: str
    codes: npt.NDArray[np.int16]
    names: list[str]


def _subgroup(frame: pl.DataFrame, wanted: str, patients: npt.NDArray[Any], path: Path) -> _Subgroup:
    name, colon, cuts = wanted.partition(":")
    column = frame[name]
    if column.dtype.is_float() and column.drop_nulls().drop_nans().round().eq(column.drop_nulls().drop_nans()).all():
        column = column.fill_nan(None).cast(pl.Int64)
    texts = _bands(column, cuts, patients, path) if colon else column.cast(pl.String)
    distinct = texts.n_unique()
    if not colon and column.dtype.is_numeric() and distinct > _MOST_GROUPS:
        raise DataError(
            f"{path}: subgroup column '{name}' has {distinct} different numbers: give bands (--subgroup "
            f"{name}:40,65, or {name}:bands for quarters of the patients)"
        )
    texts = texts.fill_null("unknown")
    people = pl.DataFrame({"group": texts, "patient": patients}).group_by("group")
    counted = people.agg(pl.col("patient").n_unique()).sort("patient", "group", descending=[True, False])
    # A group that is called "other" in the data joins the one of small groups, which has its name.
    named = [group for group, count in counted.iter_rows() if count >= _LEAST_PATIENTS and group != "other"]
    large = named[: _MOST_GROUPS - 1]
    if not large:
        few = f"no group of '{name}' has {_LEAST_PATIENTS} patients"
        raise DataError(f"{path}: {few}: nothing can be said of smaller ones")
    large.sort(key=_band_order if colon else natural)
    codes = {group: code for code, group in enumerate(large)}
    rows = np.array([codes.get(group, len(large)) for group in texts.to_list()], np.int16)
    return _Subgroup(name, rows, [*large, "other"] if (rows == len(large)).any() else large)


def _bands(column: pl.Series, cuts: str, patients: npt.NDArray[Any], path: Path) -> pl.Series:
    """Each number's band as text."""
    if not column.dtype.is_numeric():
        raise DataError(f"{path}: subgroup column '{column.name}' has type {column.dtype}; only numbers have bands")
    values = column.cast(pl.Float64)
    if cuts == "bands":
        by_patient = pl.DataFrame({"value": values, "patient": patients}).group_by("patient").agg(pl.col("value").max())
        quarters = by_patient["value"].drop_nulls().drop_nans()
        borders = sorted({float(f"{quarters.quantile(share, 'linear'):.3g}") for share in (0.25, 0.5, 0.75)})
    else:
        try:
            borders = sorted({float(cut) for cut in cuts.split(",")})
        except ValueError:
            borders = [math.nan]
        if not np.isfinite(borders).all():
            raise ConfigError(f"'{cuts}' are no cuts of '{column.name}': write numbers, as {column.name}:40,65")
    names = [f"under {borders[0]:g}", *(f"{low:g} to under {high:g}" for low, high in itertools.pairwise(borders))]
    names.append(f"{borders[-1]:g} and over")
    plain = values.fill_null(np.nan).to_numpy()
    where = np.searchsorted(borders, plain, side="right")
    return pl.Series(column.name, [None if gap else names[at] for at, gap in zip(where, np.isnan(plain), strict=True)])


def _band_order(name: str) -> tuple[float, str]:
    """Sorts bands by their numbers; what has none comes last."""
    first, _, rest = name.partition(" ")
    if first == "under":
        return (-math.inf, "")
    return (math.inf, name) if first == "unknown" else (float(first), rest)


# New tables


def _answer(
    path: Path, trained: TrainedOn, encoding: FrameEncoding, query: str, keep: Sequence[str]
) -> list[OpenTable]:
    """What a query gives: asked once, since without ORDER BY its rows may come in another order every time."""
    features = encoding.columns()
    texts = [pattern for pattern in keep if not any(fnmatchcase(name, pattern) for name in features)]
    return open_tables(path, trained.roles.get("patient"), *encoding.levels, *texts, query=query)


def _kept(path: Path, rows: npt.NDArray[np.int64], keep: Sequence[str], answer: list[OpenTable] | None) -> pl.DataFrame:
    """The number of each row, and the columns asked for as they are in the file."""
    numbered = pl.DataFrame({"row": rows})
    if not keep:
        return numbered
    tables = answer or open_tables(path, *keep)
    chosen = _columns(keep, tables[0].columns, path, "kept")
    if "row" in chosen:
        raise DataError(f"{path}: the column 'row' cannot be kept: predictions have one with the row's number")
    frame = _collect(tables, chosen, path)
    return numbered.hstack(frame.with_columns(pl.col(name).cast(pl.String) for name in chosen))


def read_features(
    file: str | Path, encoding: FrameEncoding, answer: list[OpenTable] | None = None
) -> dict[str, Column]:
    """The features of a new table, for a model that was trained on them: input columns by name.

    - ``answer``: Of a query on the file, where one is the table.
    """
    path, names = Path(file), encoding.columns()
    tables = answer or open_tables(path, *encoding.levels)
    absent = [name for name in names if name not in tables[0].columns]
    if absent:
        raise DataError(
            f"{path} lacks {len(absent)} of the {len(names)} features the model was trained on: {absent[:5]}"
        )
    frame = _collect(tables, names, path)
    with naming(path):
        return inputs_of(frame, encoding)


def read_roles(
    file: str | Path,
    roles: Mapping[str, str | None],
    gap: float | None = None,
    answer: list[OpenTable] | None = None,
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.float64] | None]:
    """Whose each row of a new table is, and when it was taken, ``(rows,)``; ``None`` where there is no such column.

    - ``roles``: Columns by what they are for: ``patient``, ``time``, ``session``.
    - ``gap``: ``session_gap`` of the data the model was trained on; sessions are laid out with it.
    - ``answer``: Of a query on the file, where one is the table.
    """
    path = Path(file)
    tables = answer or open_tables(path, roles.get("patient"))
    named = {role: name for role, name in roles.items() if name in tables[0].columns}
    if not named:
        return None, None
    frame = _collect(tables, list(dict.fromkeys(named.values())), path)
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
