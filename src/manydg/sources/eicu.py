"""eICU: will the patient come back to intensive care.

The eICU Collaborative Research Database 2.0 (PhysioNet, credentialed access; the demo of 2,500 unit stays is open under
the Open Database License 1.0): whether another stay in intensive care follows within 15 days is predicted from the
events of this one. Pollard et al., "The eICU Collaborative Research Database, a freely available multi-center database
for critical care research", Scientific Data 5, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json
from manydg.jobs import Job
from manydg.sources._events import (
    BLOCK,
    EventBlock,
    EventStore,
    Field,
    SavedEvents,
    Vocabulary,
    join_blocks,
    load_events,
    ranges,
    save_events,
)
from manydg.sources._preparing import (
    CohortFlow,
    WorkFolder,
    describe_files,
    make_ready,
    run_jobs,
    with_provenance,
    work_folder,
)
from manydg.sources._source import (
    NewSamples,
    Options,
    PublishedCounts,
    Reporter,
    Source,
    SourceDocs,
    TrainedOn,
    option,
)
from manydg.sources._tables import (
    Array,
    CategoryMap,
    SampleIndex,
    Table,
    find_tables,
    parse_doses,
    parse_numbers,
    table_names,
)

KINDS = ("diagnosis", "lab", "medication", "physical_exam", "treatment")
FIELDS = (
    Field("diagnosis_string", 0),
    Field("diagnosis_icd", 0),
    Field("lab", 1),
    Field("medication", 2),
    Field("medication_frequency", 2),
    Field("physical_exam", 3),
    Field("treatment", 4),
)
FIELDS_OF = {
    "diagnosis": ("diagnosis_string", "diagnosis_icd"),
    "lab": ("lab",),
    "medication": ("medication", "medication_frequency"),
    "physicalexam": ("physical_exam",),
    "treatment": ("treatment",),
}
EVENT_TABLES = tuple(FIELDS_OF)
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
_INTEGERS = ["patientunitstayid", "patienthealthsystemstayid", "hospitaladmitoffset", "unitdischargeoffset"]
_OPTIONAL_INTEGERS = ["unitvisitnumber", "hospitaldischargeyear"]
_TEXTS = ["uniquepid", "age", "gender", "ethnicity"]
_STAY = "patientunitstayid"
_BATCH = 250_000
_FAR = 1 << 30
_NO_TIME = -(1 << 62)
_NO_END = 1 << 40


@dataclass(frozen=True)
class EicuOptions(Options):
    """Which tables, stays and events to use, and what counts as coming back."""

    without: tuple[str, ...] = option((), help="Event table to do without; may be given several times.")
    limit_patients: int | None = option(None, help="Keep only this many patients.", low=1)
    within_days: float = option(15.0, help="The next stay starts within so many days.")
    min_gap: float = option(0.0, help="Minutes between the end of this stay and the next.")
    min_events: int = option(1, help="Leave out samples with fewer events.", low=1)
    max_events: int | None = option(
        300, help="Keep only the last so many events of a sample; 0 for all.", low=1, zero=True
    )
    min_count: int = option(1, help="A code in fewer rows counts as unknown.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "without", _left_out_tables(self.without))
        if self.max_events is not None and self.max_events < self.min_events:
            raise ConfigError(f"max_events ({self.max_events}) is smaller than min_events ({self.min_events})")
        if not self.within_days > 0 or not self.min_gap >= 0:
            raise ConfigError(
                f"within_days must be above 0 and min_gap not below 0; they are {self.within_days} and {self.min_gap}"
            )


class Eicu(Source[EicuOptions, Options]):
    """Unit stays, one sample each, as events with codes and values.

    A folder holds patient, diagnosis, lab, medication, physicalExam and treatment, ``.csv`` or ``.csv.gz``, any case.
    """

    name = "eicu"
    options_class = EicuOptions
    published = PublishedCounts(
        "eICU 2.0",
        {
            "patients": 140_000,
            "diagnosis_string": 3_845,
            "diagnosis_icd": 1_195,
            "lab": 158,
            "medication": 291,
            "physical_exam": 462,
            "treatment": 2_695,
        },
        {"not readmitted": 0.8378, "readmitted": 0.1622},
        at_least=frozenset({"patients"}),
        notes={"readmitted": "the paper prints 83.78 / 16.22 the other way round: about one stay in six is positive"},
    )
    docs = SourceDocs(
        predicts="return to intensive care",
        target="yes or no",
        page="[eicu](datasets/eicu.md)",
        task="readmission",
        files="[eICU](docs/datasets/eicu.md), full or demo",
    )

    def looks_like(self, folder: Path) -> bool:
        tables = table_names(folder)
        return "patient" in tables and len(tables & set(EVENT_TABLES)) >= 2

    def prepare(self, raw: Path, out: Path, options: EicuOptions, *, workers: int = 1, overwrite: bool = False) -> Path:
        make_ready(out, overwrite=overwrite)
        tables = _find(raw.absolute(), options.without)
        decisive = {"limit_patients": options.limit_patients, "version": 3, "block": BLOCK}
        with work_folder(out, self.name, decisive) as work:
            self._write(raw, out, tables, options, workers, overwrite, work)
        return out

    def _write(
        self,
        raw: Path,
        out: Path,
        tables: Mapping[str, Table],
        options: EicuOptions,
        workers: int,
        overwrite: bool,
        work: WorkFolder,
    ) -> None:
        flow = CohortFlow()
        with ThreadPoolExecutor(1) as pool:
            files = pool.submit(describe_files, [table.path for table in tables.values()])
            stays = _limit(read_stays(tables["patient"], flow), options.limit_patients, flow)
            labels = readmitted(stays, within_days=options.within_days, min_gap=options.min_gap)
            store = _read_events(tables, stays, workers, flow, work)
            vocabulary = store.vocabulary(options.min_count)
            settings = {"source": self.name, **_settings(vocabulary, options)}
            info = DatasetInfo(name=self.name, vocabularies={"events": vocabulary.words}, settings=settings)
            target = TargetSpec("binary", ("not readmitted", "readmitted"))
            with DatasetWriter(out, target, info, overwrite=overwrite) as writer:
                blocks = store.blocks(vocabulary, min_events=options.min_events, max_events=options.max_events)
                kept = _write_blocks(writer, blocks, stays, labels, flow, options.min_events)
                _check_labels(labels[kept])
                writer.info = with_provenance(writer.info, self.name, files.result(), options.to_json(), flow, raw=raw)

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """Every unit stay with enough events; whether the patient came back need not be known.

        Codes that are not in the vocabulary count as unknown, and tables that training did without are not read.
        """
        self.check_trained_on(trained)
        settings = trained.settings
        tables = _find(raw, settings.get("without", []))
        stays = read_stays(tables["patient"], CohortFlow())
        store = EventStore(FIELDS, stays.height)
        for table in _event_tables(tables):
            EventReader(store, *_ids_and_ends(stays)).read(table)
        vocabulary = Vocabulary(list(trained.vocabularies["events"]))
        limits = {"min_events": settings.get("min_events", 1), "max_events": settings.get("max_events")}
        samples, columns = join_blocks(store.blocks(vocabulary, **limits))
        if not len(samples):
            raise DataError(f"{raw}: no unit stay has an event, so there is nothing to predict from")
        kept = stays[samples]
        columns["static"] = torch.from_numpy(static_features(kept))
        yield NewSamples(columns, kept.select("patientunitstayid"), kept["uniquepid"].to_numpy())

    def options_for(self, raw: Path, nearby: Path, report: Reporter) -> EicuOptions:
        """Without the event tables that are not there."""
        absent = tuple(name for name in EVENT_TABLES if name not in table_names(raw))
        if absent:
            report(f"{self.name}: done without the tables {', '.join(absent)}, which are not in {raw}")
        return EicuOptions(without=absent)


def _find(raw: Path, without: Sequence[str]) -> dict[str, Table]:
    return find_tables(raw, ("patient", *EVENT_TABLES), source=Eicu.name, optional=EVENT_TABLES, without=without)


def _left_out_tables(without: Sequence[str]) -> tuple[str, ...]:
    names = sorted({name.lower().replace("_", "") for name in without})
    for name in names:
        if name not in EVENT_TABLES:
            raise unknown_name("event table to do without", name, EVENT_TABLES)
    if len(names) == len(EVENT_TABLES):
        raise ConfigError("without any event table there is nothing to learn from: keep at least one")
    return tuple(names)


# Unit stays: who, when, whether the patient came back, and what is known of the patient


def read_stays(table: Table, flow: CohortFlow) -> pl.DataFrame:
    """Unit stays in the order of their patients, and of admission within a patient.

    Returns
    -------
    DataFrame
        The columns of the table that are needed, ``start`` (minutes since the hospital admission) and ``order`` (the
        stay's position among its patient's, from 0).
    """
    integers = [*_INTEGERS, *_OPTIONAL_INTEGERS]
    with table.reading(integers):
        rows = table.scan(integers=integers, texts=_TEXTS).collect(engine="streaming")
    if rows.is_empty():
        raise DataError(f"{table.path} holds no rows: download it again")
    known = rows.drop_nulls(["patientunitstayid", "patienthealthsystemstayid", "hospitaladmitoffset", "uniquepid"])
    stays = known.unique(maintain_order=True)
    if stays["patientunitstayid"].n_unique() < stays.height:
        raise DataError(f"{table.path}: a patientunitstayid stands there twice with other content: download it again")
    _note(
        flow,
        "unit stays in the table",
        stays,
        left_out_without_id=rows.height - known.height,
        left_out_duplicates=known.height - stays.height,
    )
    forward = stays.filter((pl.col("unitdischargeoffset") >= 0).fill_null(True))
    _note(
        flow, "unit stays that end after they start", forward, left_out_end_before_start=stays.height - forward.height
    )
    if forward.is_empty():
        raise DataError(f"{table.path} holds no usable unit stay: download it again")
    ordered = forward.with_columns(start=-pl.col("hospitaladmitoffset")).sort(
        "uniquepid",
        "hospitaldischargeyear",
        "patienthealthsystemstayid",
        "start",
        "unitvisitnumber",
        "patientunitstayid",
        nulls_last=True,
    )
    return ordered.with_columns(order=pl.int_range(pl.len()).over("uniquepid"))


def readmitted(stays: pl.DataFrame, *, within_days: float = 15.0, min_gap: float = 0.0) -> npt.NDArray[np.int64]:
    """Whether another unit stay of the same hospital stay follows.

    Parameters
    ----------
    stays : DataFrame
        As :func:`read_stays` gives them.
    within_days : float
        The later stay starts less than this many days after this one starts.
    min_gap : float
        It starts at least this many minutes after this one ends; 0 counts transfers too.

    Returns
    -------
    array ``(stays,)`` of 0 and 1
    """
    keys = stays.select(
        "patienthealthsystemstayid", "start", "order", end=pl.col("start") + pl.col("unitdischargeoffset").fill_null(0)
    ).with_row_index("row")
    pairs = keys.join(keys, on="patienthealthsystemstayid", suffix="_next").filter(
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


def _note(flow: CohortFlow, step: str, stays: pl.DataFrame, **left_out: int) -> None:
    flow.add(step, patients=stays["uniquepid"].n_unique(), samples=stays.height, **left_out)


# The event tables, read in batches


class EventReader:
    """Reads event tables into a store and counts what is left out.

    Parameters
    ----------
    store : EventStore
    stays : array ``(stays,)``
        The unit stays' ids, in sample order.
    last : array ``(stays,)``
        The last minute of each stay: what happens later belongs to what shall be predicted.
    """

    def __init__(self, store: EventStore, stays: npt.NDArray[np.int64], last: Array) -> None:
        self._store, self._index, self._last = store, SampleIndex(stays), last

    def read(self, table: Table) -> dict[str, int]:
        """Read one table; returns its counts by reason."""
        readers: dict[str, Callable[[Table], dict[str, int]]] = {
            "diagnosis": self._diagnoses,
            "lab": self._labs,
            "medication": self._medications,
            "physicalexam": self._exams,
            "treatment": self._treatments,
        }
        counts = readers[table.name](table)
        if counts["rows"] == 0:
            raise DataError(f"{table.path} holds no rows: download it again, or go on without it")
        return counts

    def _batches(
        self, table: Table, time: str, columns: Sequence[pl.Expr], texts: Sequence[str], counts: dict[str, int]
    ) -> Iterator[_Kept]:
        """Batches of rows, with those that belong to a known stay and to its time picked out."""
        integers = [_STAY, time]
        scan = table.scan(integers=integers, texts=texts).select(*integers, *columns)
        counts |= {"rows": 0, "left_out_other_stay": 0, "left_out_without_time": 0, "left_out_after_discharge": 0}
        with table.reading(integers):
            for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
                counts["rows"] += batch.height
                sample = self._index(batch[_STAY].fill_null(-1).to_numpy())
                minute = batch[time].fill_null(_NO_TIME).to_numpy()
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
        return CategoryMap(lambda words: self._store.word_ids(field, _clean(words)), np.int32)

    def _plain(self, table: Table, time: str, column: str, field: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        words = self._words(field)
        for kept in self._batches(table, time, [_category(column)], [column], counts):
            ids = words(kept.batch[column])[kept.rows]
            _count(counts, "left_out_without_name", ids < 0)
            self._store.add(field, kept.sample, kept.minute, ids)
        return counts

    def _exams(self, table: Table) -> dict[str, int]:
        return self._plain(table, "physicalexamoffset", "physicalexampath", "physical_exam")

    def _treatments(self, table: Table) -> dict[str, int]:
        return self._plain(table, "treatmentoffset", "treatmentstring", "treatment")

    def _diagnoses(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        strings = self._words("diagnosis_string")
        icd = _CodeLists(lambda words: self._store.word_ids("diagnosis_icd", _clean(words)))
        texts = ["diagnosisstring", "icd9code"]
        columns = [_category("diagnosisstring"), _category("icd9code")]
        for kept in self._batches(table, "diagnosisoffset", columns, texts, counts):
            ids = strings(kept.batch["diagnosisstring"])[kept.rows]
            _count(counts, "left_out_without_name", ids < 0)
            self._store.add("diagnosis_string", kept.sample, kept.minute, ids)
            row, codes = icd(kept.batch["icd9code"], kept.rows)
            self._store.add("diagnosis_icd", kept.sample[row], kept.minute[row], codes)
        return counts

    def _labs(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        names, texts = self._words("lab"), CategoryMap(_numbers, np.float32)
        number = pl.col("labresult").cast(pl.Float32, strict=False).fill_null(np.nan)
        columns = [_category("labname"), number.alias("number"), pl.col("labresult", "labresulttext")]
        wanted = ["labname", "labresult", "labresulttext"]
        category = pl.Categorical(pl.Categories.random())
        for kept in self._batches(table, "labresultoffset", columns, wanted, counts):
            value = kept.batch["number"].to_numpy()[kept.rows]
            unread = np.flatnonzero(~np.isfinite(value))
            rest = kept.batch.select("labresulttext", "labresult")[kept.rows[unread]]
            value[unread] = texts(rest.select(pl.coalesce(pl.all()).fill_null("").cast(category)).to_series())
            ids = names(kept.batch["labname"])[kept.rows]
            missing = np.isnan(value[unread])
            _count(counts, "left_out_without_name", ids < 0)
            _count(counts, "values_from_text", ~missing)
            _count(counts, "values_missing", missing)
            self._store.add("lab", kept.sample, kept.minute, ids, value)
        return counts

    def _medications(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        names, often = self._words("medication"), self._words("medication_frequency")
        # Two in five orders lack a name; the HICL number identifies the drug just as well.
        numbers = CategoryMap(lambda words: self._store.word_ids("medication", _hicl_names(words)), np.int32)
        doses, cancelled = CategoryMap(_doses, np.float32), CategoryMap(_says_yes, np.bool_)
        wanted = ["drugname", "drughiclseqno", "dosage", "frequency", "drugordercancelled"]
        columns = [pl.col("drugname").is_null().alias("nameless"), *map(_category, wanted)]
        for kept in self._batches(table, "drugstartoffset", columns, wanted, counts):
            dropped = cancelled(kept.batch["drugordercancelled"])[kept.rows]
            by_number = numbers(kept.batch["drughiclseqno"])
            ids = np.where(kept.batch["nameless"].to_numpy(), by_number, names(kept.batch["drugname"]))[kept.rows]
            dose = doses(kept.batch["dosage"])[kept.rows]
            named, ids = (ids >= 0) & ~dropped, np.where(dropped, -1, ids)
            _count(counts, "left_out_cancelled", dropped)
            _count(counts, "left_out_without_name", ~named & ~dropped)
            _count(counts, "doses_missing", named & np.isnan(dose))
            self._store.add("medication", kept.sample, kept.minute, ids, dose)
            frequency = np.where(named, often(kept.batch["frequency"])[kept.rows], -1)
            self._store.add("medication_frequency", kept.sample, kept.minute, frequency)
        return counts


class _CodeLists:
    """Looks up the codes in texts such as ``584.9, N17.9``, taking every different text apart once."""

    def __init__(self, number: Callable[[pl.Series], npt.NDArray[np.int32]]) -> None:
        self._number = number
        self._lists = CategoryMap(self._take_apart, np.int32)
        self._codes = np.zeros(0, np.int32)
        self._begins, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def _take_apart(self, texts: pl.Series) -> Array:
        codes = texts.str.split(",")
        known, counts = len(self._begins), codes.list.len().to_numpy().astype(np.int64)
        begins = len(self._codes) + np.cumsum(counts) - counts
        self._codes = np.append(self._codes, self._number(codes.explode()))
        self._begins, self._counts = np.append(self._begins, begins), np.append(self._counts, counts)
        return np.arange(known, known + len(texts), dtype=np.int32)

    def __call__(self, column: pl.Series, rows: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Of some rows of a column of texts: which of the rows each code is of, and the code's number."""
        lists = self._lists(column)[rows]
        counts = self._counts[lists]
        return np.repeat(np.arange(len(rows)), counts), self._codes[ranges(self._begins[lists], counts)]


@dataclass(frozen=True)
class _Kept:
    """A batch of rows and the positions of those that count, with their samples and minutes ``(positions,)``."""

    batch: pl.DataFrame
    rows: npt.NDArray[np.int64]
    sample: Array
    minute: npt.NDArray[np.int32]


def _category(column: str) -> pl.Expr:
    """A text column as categories numbered on their own; null becomes the empty text."""
    return pl.col(column).fill_null("").cast(pl.Categorical(pl.Categories.random()))


def _clean(words: pl.Series) -> pl.Series:
    """Case and outer spaces make no difference, neither in the vocabulary nor when it is looked up."""
    return words.str.strip_chars().str.to_lowercase()


def _count(counts: dict[str, int], name: str, mask: Array) -> None:
    counts[name] = counts.get(name, 0) + int(mask.sum())


def _numbers(texts: pl.Series) -> Array:
    return parse_numbers(texts).fill_null(np.nan).to_numpy()


def _doses(texts: pl.Series) -> Array:
    return parse_doses(texts).fill_null(np.nan).to_numpy()


def _says_yes(texts: pl.Series) -> Array:
    return _clean(texts).eq("yes").to_numpy()


def _hicl_names(numbers: pl.Series) -> pl.Series:
    """What drugs are called that only have a number; no number, no name."""
    plain = numbers.str.strip_chars().str.strip_suffix(".0")
    return _clean(pl.select(pl.when(plain != "").then(pl.format("hicl {}", plain))).to_series())


# The dataset folder


def _limit(stays: pl.DataFrame, limit: int | None, flow: CohortFlow) -> pl.DataFrame:
    if limit is None:
        return stays
    kept = stays.filter(pl.col("uniquepid").rank("dense") <= limit)
    flow.add(f"limited to {limit} patients", patients=kept["uniquepid"].n_unique(), samples=kept.height)
    return kept


@dataclass(frozen=True)
class _TableTask:
    """A table to read: the stays' ids and last minutes ``(stays,)``, and the file to keep its rows in."""

    table: Table
    stays: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    out: Path


def _read_table(task: _TableTask) -> SavedEvents:
    """Read one table and save its rows."""
    fields = [field for field in FIELDS if field.name in FIELDS_OF[task.table.name]]
    store = EventStore(fields, len(task.stays))
    counts = EventReader(store, task.stays, task.last).read(task.table)
    return save_events(store, task.out, counts)


def _read_events(
    tables: Mapping[str, Table], stays: pl.DataFrame, workers: int, flow: CohortFlow, work: WorkFolder
) -> EventStore:
    ids, last = _ids_and_ends(stays)
    tasks, jobs = [], []
    for table in _event_tables(tables):
        files = (table.path, tables["patient"].path)
        tasks.append(_TableTask(table, ids, last, work.path_for(table.name, files)))
        jobs.append(Job(table.name, files, tasks[-1]))
    store = EventStore(FIELDS, stays.height)
    pieces = run_jobs(_read_table, jobs, work, SavedEvents, workers=workers, title="tables")
    for task, piece in zip(tasks, pieces, strict=True):
        flow.add(f"rows of {task.table.name}", **piece.counts)
        load_events(store, piece, task.out)
    return store


def _event_tables(tables: Mapping[str, Table]) -> list[Table]:
    return [tables[name] for name in EVENT_TABLES if name in tables]


def _ids_and_ends(stays: pl.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return stays["patientunitstayid"].to_numpy(), stays["unitdischargeoffset"].fill_null(_NO_END).to_numpy()


def _settings(vocabulary: Vocabulary, options: EicuOptions) -> dict[str, Json]:
    return {
        "event_kinds": list(KINDS),
        "code_fields": [field.to_json() for field in vocabulary.fields if field.stop > field.start],
        "static_names": list(STATIC_NAMES),
        "without": list(options.without),
        "min_events": options.min_events,
        "max_events": options.max_events,
    }


def _write_blocks(
    writer: DatasetWriter,
    blocks: Iterator[EventBlock],
    stays: pl.DataFrame,
    labels: npt.NDArray[np.int64],
    flow: CohortFlow,
    min_events: int,
) -> npt.NDArray[np.int64]:
    """Write the blocks; returns the numbers of the stays written."""
    static, order, patients = static_features(stays), stays["order"].to_numpy(), stays["uniquepid"].to_numpy()
    counts: dict[str, int] = {}
    kept = []
    for block in blocks:
        for name, count in block.counts.items():
            counts[name] = counts.get(name, 0) + count
        if len(block.samples):
            rows = block.samples
            writer.append_immutable(block.columns | {"static": static[rows]}, labels[rows], patients[rows], order[rows])
            kept.append(rows)
    chosen = np.concatenate(kept) if kept else np.zeros(0, np.int64)
    if not len(chosen):
        raise DataError(f"no unit stay has {min_events} or more events: there is nothing to learn from")
    flow.add(
        f"unit stays with {min_events} or more events",
        patients=stays[chosen]["uniquepid"].n_unique(),
        samples=len(chosen),
        left_out_samples=counts["short_samples"],
        readmitted=int(labels[chosen].sum()),
        events=counts["events"],
        left_out_events_beyond_limit=counts["events_beyond_limit"],
        left_out_repeated_rows=counts["repeated_rows"],
    )
    return chosen


def _check_labels(labels: npt.NDArray[np.int64]) -> None:
    if labels.min() == labels.max():
        word = "every" if labels.min() else "no"
        raise DataError(
            f"{word} unit stay is followed by another: there is nothing to learn; check min_gap and within_days"
        )
