"""Stays in intensive care as sequences of events: their options, labels, event tables and dataset folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import parse_numbers, sites_of_patients
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json, as_json
from manydg.jobs import Job
from manydg.sources import NewSamples, Options, TrainedOn, option
from manydg.sources._events import (
    BLOCK,
    EventStore,
    Field,
    SavedEvents,
    Vocabulary,
    join_blocks,
    load_events,
    save_events,
    write_blocks,
)
from manydg.sources._preparing import CohortFlow, WorkFolder, describe_files, run_jobs, with_provenance, work_folder
from manydg.sources._tables import Array, CategoryMap, SampleIndex, Table, limit_patients

DAY = 24 * 60
ETHNICITIES = ("caucasian", "african american", "hispanic", "asian", "native american", "other/unknown")
STATIC_NAMES = (
    "age_over_100",
    "age_missing",
    "male",
    "gender_missing",
    *(f"ethnicity_{name.replace(' ', '_').replace('/', '_or_')}" for name in ETHNICITIES),
    "ethnicity_missing",
)
_BATCH = 250_000
_FAR = 1 << 30
NO_TIME = -(1 << 62)
_NO_END = 1 << 40


@dataclass(frozen=True)
class StayOptions(Options):
    """Which tables, stays and events to use, and what counts as coming back."""

    event_tables: ClassVar[tuple[str, ...]]
    without: tuple[str, ...] = option((), help="Event table to leave out; may be repeated.", metavar="TABLE")
    limit_patients: int | None = option(None, help="Only the first N patients.", low=1)
    within_days: float = option(15.0, help="The next stay starts within this many days.")
    min_gap: float = option(0.0, help="Minimum minutes between the end of this stay and the next.")
    min_events: int = option(1, help="Leave out samples with fewer events.", low=1)
    max_events: int | None = option(300, help="Keep only the last N events of a sample; 0 for all.", low=1, zero=True)
    min_count: int = option(1, help="A code in fewer rows counts as unknown.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "without", _left_out_tables(self.without, self.event_tables))
        if self.max_events is not None and self.max_events < self.min_events:
            raise ConfigError(f"max_events ({self.max_events}) is smaller than min_events ({self.min_events})")
        if not self.within_days > 0 or not self.min_gap >= 0:
            raise ConfigError(
                f"within_days must be above 0 and min_gap not below 0; they are {self.within_days} and {self.min_gap}"
            )


def _left_out_tables(without: Sequence[str], tables: Sequence[str]) -> tuple[str, ...]:
    spelt = {name.replace("_", ""): name for name in tables}
    names = {spelt.get(name.lower().replace("_", ""), name) for name in without}
    for name in sorted(names):
        if name not in tables:
            raise unknown_name("event table to do without", name, tables)
    if len(names) == len(tables):
        raise ConfigError("without any event table there is nothing to learn from: keep at least one")
    return tuple(sorted(names))


# What is predicted of a stay, and what is known of the patient


def readmitted(stays: pl.DataFrame, *, within_days: float = 15.0, min_gap: float = 0.0) -> npt.NDArray[np.int64]:
    """Whether another unit stay of the same scope follows: of the same hospital stay in eICU.

    - ``stays``: As :func:`read_stays` gives them.
    - ``within_days``: The later stay starts less than this many days after this one starts.
    - ``min_gap``: It starts at least this many minutes after this one ends; 0 counts transfers too.
    - returns ``(stays,)``
    """
    keys = stays.select("scope", "start", "order", end=pl.col("start") + pl.col("length").fill_null(0))
    keys = keys.with_row_index("row")
    pairs = keys.join(keys, on="scope", suffix="_next").filter(
        (pl.col("order_next") > pl.col("order"))
        & (pl.col("start_next") - pl.col("start") < within_days * DAY)
        & (pl.col("start_next") - pl.col("end") >= min_gap)
    )
    label = np.zeros(stays.height, np.int64)
    label[pairs["row"].unique().to_numpy()] = 1
    return label


def static_features(stays: pl.DataFrame) -> npt.NDArray[np.float32]:
    """Age, gender and ethnicity as numbers, ``(stays, 11)``; see :data:`STATIC_NAMES`.

    Age is in hundreds of years and "> 89" counts as 90. What is missing is 0 and sets its own flag.
    """
    text = pl.col("age").str.strip_chars()
    years = pl.when(text.str.starts_with(">")).then(90.0).otherwise(text.cast(pl.Float64, strict=False))
    years = pl.when(years.is_finite() & (years >= 0) & (years < 150)).then(years)
    gender, ethnicity = (pl.col(name).str.strip_chars().str.to_lowercase() for name in ("gender", "ethnicity"))
    known_ethnicity = ethnicity.is_in(ETHNICITIES).fill_null(False)
    known_gender = gender.is_in(["male", "female"]).fill_null(False)
    features = [
        (years / 100).fill_null(0.0),
        years.is_null(),
        (gender == "male").fill_null(False),
        ~known_gender,
        *((ethnicity == name).fill_null(False) for name in ETHNICITIES),
        ~known_ethnicity,
    ]
    named = [feature.cast(pl.Float32).alias(name) for feature, name in zip(features, STATIC_NAMES, strict=True)]
    return np.ascontiguousarray(stays.select(named).to_numpy(), np.float32)


# The event tables, read in batches


class EventReader(ABC):
    """Reads event tables into a store and counts what is left out.

    - ``stays``: The stays in sample order; what happens after a stay belongs to what shall be predicted.
    - ``kinds``: The kinds of events, in the order of their numbers.
    - ``fields_of``: The fields of each event table, in the order in which the tables are read.
    """

    kinds: ClassVar[tuple[str, ...]]
    fields_of: ClassVar[Mapping[str, tuple[Field, ...]]]

    def __init__(self, store: EventStore, stays: pl.DataFrame) -> None:
        self._store, self._index = store, SampleIndex(stays["stay"].to_numpy())
        self._last = stays["length"].fill_null(_NO_END).to_numpy()

    def read(self, table: Table) -> dict[str, int]:
        """Read one table; returns its counts by reason."""
        counts = self._readers()[table.name](table)
        if counts["rows"] == 0:
            raise DataError(f"{table.path} holds no rows: download it again, or go on without it")
        return counts

    @abstractmethod
    def _readers(self) -> dict[str, Callable[[Table], dict[str, int]]]:
        """How each event table is read."""

    @abstractmethod
    def _ids(self, table: Table, time: str) -> list[str]:
        """The columns of whole numbers by which :meth:`_locate` knows the stay."""

    def _scan(self, table: Table, time: str, texts: Sequence[str]) -> pl.LazyFrame:
        """The columns that :meth:`_locate` needs, and some texts."""
        return table.scan(integers=self._ids(table, time), texts=texts)

    @abstractmethod
    def _locate(self, batch: pl.DataFrame, time: str) -> tuple[Array, Array]:
        """The sample and the minute of each row; -1 and ``NO_TIME`` where they are not known."""

    def _batches(
        self, table: Table, time: str, columns: Sequence[pl.Expr], texts: Sequence[str], counts: dict[str, int]
    ) -> Iterator[_Kept]:
        """Batches of rows, with those that belong to a known stay and to its time picked out."""
        integers = self._ids(table, time)
        scan = self._scan(table, time, texts).select(*dict.fromkeys([*integers, time]), *columns)
        counts |= {"rows": 0, "left_out_other_stay": 0, "left_out_without_time": 0, "left_out_after_discharge": 0}
        with table.reading(integers):
            for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
                counts["rows"] += batch.height
                sample, minute = self._locate(batch, time)
                known, timed = sample >= 0, (minute > -_FAR) & (minute < _FAR)
                in_time = minute <= self._last[sample]
                keep = known & timed & in_time
                if not keep.all():
                    counts["left_out_other_stay"] += int((~known).sum())
                    counts["left_out_without_time"] += int((known & ~timed).sum())
                    counts["left_out_after_discharge"] += int((known & timed & ~in_time).sum())
                rows = np.flatnonzero(keep)
                yield _Kept(batch, rows, sample[rows], minute[rows].astype(np.int32))

    def _words(self, field: str) -> CategoryMap:
        return CategoryMap(lambda words: self._store.word_ids(field, clean(words)), np.int32)

    def _plain(self, table: Table, time: str, column: str) -> dict[str, int]:
        """Names alone, of a table of one field."""
        counts: dict[str, int] = {}
        (field,) = self.fields_of[table.name]
        words = self._words(field.name)
        for kept in self._batches(table, time, [category(column)], [column], counts):
            ids = words(kept.batch[column])[kept.rows]
            count(counts, "left_out_without_name", ids < 0)
            self._store.add(field.name, kept.sample, kept.minute, ids)
        return counts

    def _valued(self, table: Table, time: str, name: str, values: tuple[str, ...]) -> dict[str, int]:
        """Names with a value, of a table of one field: the last of some columns is the number, if it is one.

        Else the number is read from the text of the first of them that has any.
        """
        counts: dict[str, int] = {}
        (field,) = self.fields_of[table.name]
        names = self._words(field.name)
        texts = CategoryMap(lambda texts: parse_numbers(texts).fill_null(np.nan).to_numpy(), np.float32)
        number = pl.col(values[-1]).cast(pl.Float32, strict=False).fill_null(np.nan)
        columns = [category(name), number.alias("number"), pl.col(*values)]
        texts_type = pl.Categorical(pl.Categories.random())
        for kept in self._batches(table, time, columns, [name, *values], counts):
            value = kept.batch["number"].to_numpy()[kept.rows]
            unread = np.flatnonzero(~np.isfinite(value))
            rest = kept.batch.select(*values)[kept.rows[unread]]
            value[unread] = texts(rest.select(pl.coalesce(pl.all()).fill_null("").cast(texts_type)).to_series())
            ids = names(kept.batch[name])[kept.rows]
            missing = np.isnan(value[unread])
            count(counts, "left_out_without_name", ids < 0)
            count(counts, "values_from_text", ~missing)
            count(counts, "values_missing", missing)
            self._store.add(field.name, kept.sample, kept.minute, ids, value)
        return counts


@dataclass(frozen=True)
class _Kept:
    """A batch of rows and the positions of those that count, with their samples and minutes ``(positions,)``."""

    batch: pl.DataFrame
    rows: npt.NDArray[np.int64]
    sample: Array
    minute: npt.NDArray[np.int32]


def category(column: str) -> pl.Expr:
    """A text column as categories numbered on their own; null becomes the empty text."""
    return pl.col(column).fill_null("").cast(pl.Categorical(pl.Categories.random()))


def clean(words: pl.Series) -> pl.Series:
    """Case and outer spaces make no difference, neither in the vocabulary nor when it is looked up."""
    return words.str.strip_chars().str.to_lowercase()


def count(counts: dict[str, int], name: str, mask: Array) -> None:
    counts[name] = counts.get(name, 0) + int(mask.sum())


# The dataset folder


def _sites(stays: pl.DataFrame) -> dict[str, str]:
    """The hospital of each patient; none where the table does not say it of every stay."""
    if "site" not in stays.columns or stays["site"].null_count():
        return {}
    return sites_of_patients(stays["patient"].to_numpy(), stays["site"].to_numpy())


@dataclass(frozen=True)
class TableTask:
    """A table to read: by which reader, of which stays, and the file to keep its rows in."""

    table: Table
    reader: type[EventReader]
    stays: pl.DataFrame
    out: Path


def read_table(task: TableTask) -> SavedEvents:
    """Read one table and save its rows."""
    store = EventStore(task.reader.fields_of[task.table.name], task.stays.height)
    return save_events(store, task.out, task.reader(store, task.stays).read(task.table))


@dataclass(frozen=True)
class StayCohort:
    """Stays in intensive care as sequences of events, from the tables of a database.

    - ``reader``: How to read the event tables among them.
    - ``shown``: What predictions call a stay's id.
    - ``settings``: What the dataset's settings hold besides.
    """

    source: str
    tables: Mapping[str, Table]
    reader: type[EventReader]
    shown: str
    settings: Mapping[str, Json] = field(default_factory=dict)

    def prepare(
        self, raw: Path, out: Path, read: Callable[[CohortFlow], pl.DataFrame], options: StayOptions, *,
        workers: int, overwrite: bool,
    ) -> Path:  # fmt: skip
        """Make a dataset folder; ``read`` gives the stays, as :func:`read_stays` does."""
        flow, decisive = CohortFlow(), {"limit_patients": options.limit_patients, "version": 3, "block": BLOCK}
        with work_folder(out, self.source, decisive) as work, ThreadPoolExecutor(1) as pool:
            files = pool.submit(describe_files, [table.path for table in self.tables.values()])
            stays = limit_patients(read(flow), "patient", options.limit_patients, flow)
            labels = readmitted(stays, within_days=options.within_days, min_gap=options.min_gap)
            store = self._read_events(stays, workers, flow, work)
            vocabulary = store.vocabulary(options.min_count)
            settings = {"source": self.source, **self.settings, **_settings(self.reader, vocabulary, options)}
            info = DatasetInfo(name=self.source, vocabularies={"events": vocabulary.words}, settings=settings)
            target = TargetSpec("binary", ("not readmitted", "readmitted"))
            with DatasetWriter(out, target, info, overwrite=overwrite) as writer:
                blocks = store.blocks(vocabulary, min_events=options.min_events, max_events=options.max_events)
                beside = static_features(stays), labels, stays["patient"].to_numpy(), stays["time"].to_numpy()
                kept, counts = write_blocks(writer, blocks, *beside)
                _add_written(flow, stays[kept], labels[kept], counts, options.min_events)
                if len(there := np.unique(labels[kept])) < 2:
                    raise DataError(
                        f"{'every' if there[0] else 'no'} unit stay is followed by another: there is nothing to learn; "
                        "check min_gap and within_days"
                    )
                origin = files.result()
                writer.info = replace(writer.info, sites=_sites(stays[kept]))
                writer.info = with_provenance(writer.info, self.source, origin, options.to_json(), flow, raw=raw)
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, stays: pl.DataFrame) -> NewSamples:
        """Every stay with enough events."""
        settings = trained.settings
        store = EventStore(self._fields(), stays.height)
        for table in self._event_tables():
            self.reader(store, stays).read(table)
        vocabulary = Vocabulary(list(trained.vocabularies["events"]))
        limits = {"min_events": settings.get("min_events", 1), "max_events": settings.get("max_events")}
        samples, columns = join_blocks(store.blocks(vocabulary, **limits))
        if not len(samples):
            raise DataError(f"{raw}: no unit stay has an event, so there is nothing to predict from")
        kept = stays[samples]
        columns["static"] = torch.from_numpy(static_features(kept))
        shown, times = kept.select(pl.col("stay").alias(self.shown)), kept["time"].to_numpy(writable=True)
        return NewSamples(columns, shown, kept["patient"].to_numpy(), times)

    def _fields(self) -> list[Field]:
        return [field for fields in self.reader.fields_of.values() for field in fields]

    def _event_tables(self) -> list[Table]:
        return [self.tables[name] for name in self.reader.fields_of if name in self.tables]

    def _read_events(self, stays: pl.DataFrame, workers: int, flow: CohortFlow, work: WorkFolder) -> EventStore:
        events = self._event_tables()
        others = tuple(table.path for table in self.tables.values() if table not in events)
        tasks, jobs = [], []
        for table in events:
            files = (table.path, *others)
            tasks.append(TableTask(table, self.reader, stays, work.path_for(table.name, files)))
            jobs.append(Job(table.name, files, tasks[-1]))
        store = EventStore(self._fields(), stays.height)
        pieces = run_jobs(read_table, jobs, work, SavedEvents, workers=workers, title="tables")
        for task, piece in zip(tasks, pieces, strict=True):
            flow.add(f"rows of {task.table.name}", **piece.counts)
            load_events(store, piece, task.out)
        return store


def _settings(reader: type[EventReader], vocabulary: Vocabulary, options: StayOptions) -> dict[str, Json]:
    return {
        "event_kinds": list(reader.kinds),
        "code_fields": as_json([field for field in vocabulary.fields if field.stop > field.start]),
        "static_names": list(STATIC_NAMES),
        "without": list(options.without),
        "min_events": options.min_events,
        "max_events": options.max_events,
    }


def _add_written(
    flow: CohortFlow, stays: pl.DataFrame, labels: npt.NDArray[np.int64], counts: Counter[str], min_events: int
) -> None:
    """Add the stays that were written to the cohort flow."""
    if stays.is_empty():
        raise DataError(f"no unit stay has {min_events} or more events: there is nothing to learn from")
    flow.add(
        f"unit stays with {min_events} or more events",
        patients=stays["patient"].n_unique(),
        samples=stays.height,
        left_out_samples=counts["short_samples"],
        readmitted=int(labels.sum()),
        events=counts["events"],
        left_out_events_beyond_limit=counts["events_beyond_limit"],
        left_out_repeated_rows=counts["repeated_rows"],
    )
