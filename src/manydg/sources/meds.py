"""MEDS: any dataset of the standard, any of its label files.

The Medical Event Data Standard 0.4: events of subjects as parquet files, and label files that say what is to be
predicted, of whom and when. Arnrich et al., "Medical Event Data Standard (MEDS): facilitating machine learning for
health", ICLR 2024 Workshop on Learning from Time Series for Health. Each dataset has a licence of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import encode_targets
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, StorageError
from manydg.files import Json, as_json, check_unpacked_rows, disk_errors
from manydg.jobs import Job
from manydg.sources import NewSamples, Options, SamplePredictions, Source, SourceDocs, TrainedOn, option
from manydg.sources._events import (
    EventStore,
    Field,
    SavedEvents,
    Vocabulary,
    join_blocks,
    load_events,
    ranges,
    save_events,
    write_blocks,
)
from manydg.sources._preparing import (
    CohortFlow,
    WorkFolder,
    describe_files,
    hint_at_another,
    make_ready,
    run_jobs,
    states_of,
    with_provenance,
    work_folder,
)
from manydg.sources._tables import Array, CategoryMap, SampleIndex, limit_patients

BIRTH = "MEDS_BIRTH"
OTHER = "<other>"
STATIC_NAMES = ("age_over_100", "age_missing")
_VALUES = ("boolean_value", "integer_value", "categorical_value", "float_value")
_MOST_KINDS = 32
_BATCH = 250_000
_SECOND = 1_000_000
_HOUR = 3600 * _SECOND
_CENTURY = 100 * 365.25 * 24 * _HOUR
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class MedsOptions(Options):
    """The labels, and which events to use."""

    labels: Path = option(help="MEDS label file, or a folder of them.")
    kinds: str = option(
        "prefix",
        help="Kind of an event: 'prefix' (the part of its code before //) or 'one' for all.",
        choices=("prefix", "one"),
    )
    limit_patients: int | None = option(None, help="Only the first N patients.", low=1)
    min_events: int = option(1, help="Leave out samples with fewer events.", low=1)
    max_events: int | None = option(300, help="Keep only the last N events of a sample; 0 for all.", low=1, zero=True)
    min_count: int = option(1, help="A code in fewer rows counts as unknown.", low=1)


@dataclass(frozen=True)
class TimesOptions(Options):
    """When to predict."""

    times: Path | None = option(None, help="MEDS: parquet file of prediction times.")
    meds_evaluation: bool = option(
        False, help="MEDS: also write predictions.parquet for meds-evaluation; --times names a label file."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.meds_evaluation and self.times is None:
            raise ConfigError("meds-evaluation compares predictions with labels: name a label file with --times")


class Meds(Source[MedsOptions, TimesOptions]):
    """A MEDS dataset, one sample a label.

    A folder holds ``data/**/*.parquet`` and, where present, ``metadata/``. A label file has ``subject_id``,
    ``prediction_time`` and one of ``boolean_value``, ``integer_value``, ``categorical_value``. Only events up to the
    prediction time are used.
    """

    name = "meds"
    options_class = MedsOptions
    prediction_options_class = TimesOptions
    self_explanatory = False
    docs = SourceDocs(
        predicts="the labels of your label file",
        target="any kind",
        page="[meds](datasets/meds.md)",
        task="your own task",
        files="[MEDS](docs/datasets/meds.md) 0.4",
    )

    def looks_like(self, folder: Path) -> bool:
        return any((folder / "metadata" / name).is_file() for name in ("codes.parquet", "subject_splits.parquet"))

    def prepare(self, raw: Path, out: Path, options: MedsOptions, *, workers: int = 1, overwrite: bool = False) -> Path:
        raw, labels = raw.absolute(), options.labels.absolute()
        make_ready(out, overwrite=overwrite)
        files, flow = data_files(raw), CohortFlow()
        samples = limit_patients(read_labels(labels, flow), "subject_id", options.limit_patients, flow)
        spec, codes = _encode(samples["label"])
        read = [*files, *label_files(labels)]
        # A subject's first event and the most frequent kinds are known from all files, so that one which changes
        # changes what is read of the others.
        keys = {
            "limit_patients": options.limit_patients,
            "kinds": options.kinds,
            "version": 1,
            "files": states_of(read),
        }
        with work_folder(out, self.name, keys) as work, ThreadPoolExecutor(1) as pool:
            described = pool.submit(describe_files, read)
            shards = Shards(raw, files, work, workers)
            fields, clock = shards.survey(samples, options.kinds)
            store = shards.read(fields, clock, flow)
            vocabulary = store.vocabulary(options.min_count)
            settings = {"source": self.name, **_settings(vocabulary, options)}
            words = {"events": vocabulary.words}
            info = DatasetInfo(name=raw.resolve().name, vocabularies=words, settings=settings)
            with DatasetWriter(out, spec, info, overwrite=overwrite) as writer:
                blocks = store.blocks(
                    vocabulary, min_events=options.min_events, max_events=options.max_events, ticks_per_minute=60
                )
                patients = samples["subject_id"].to_numpy()
                kept, _ = write_blocks(writer, blocks, clock.static, codes, patients, clock.hours)
                _add_written(flow, patients[kept], options.min_events)
                writer.info = with_provenance(
                    writer.info, self.name, described.result(), options.to_json(), flow, raw=raw
                )
        return out

    def for_prediction(self, raw: Path, trained: TrainedOn, options: TimesOptions) -> Iterator[NewSamples]:
        """Every subject at the times asked for, or else at the time of its last event."""
        self.check_trained_on(trained)
        settings, events = trained.settings, scan_events(data_files(raw))
        shown = ["subject_id", "prediction_time", *(["boolean_value"] if options.meds_evaluation else [])]
        samples = _last_events(events, raw) if options.times is None else read_prediction_times(options.times, shown)
        if samples.is_empty():
            raise DataError(f"{raw} holds no subject with an event in time, so there is nothing to predict from")
        fields = [Field(name, kind) for kind, name in enumerate(settings["event_kinds"])]
        store = EventStore(fields, samples.height)
        clock = Clock.of(samples, survey(events, raw)[1])
        read_events(store, events, raw, clock)
        vocabulary = Vocabulary(list(trained.vocabularies["events"]))
        limits = {"min_events": settings.get("min_events", 1), "max_events": settings.get("max_events")}
        rows, columns = join_blocks(store.blocks(vocabulary, **limits, ticks_per_minute=60))
        if not len(rows):
            raise DataError(f"{raw}: no subject has an event up to its prediction time")
        columns["static"] = torch.from_numpy(clock.static[rows])
        kept = samples[rows].select(shown)
        yield NewSamples(columns, kept, kept["subject_id"].to_numpy(), clock.hours[rows])

    def write_predictions(self, folder: Path, samples: NewSamples, predictions: SamplePredictions) -> list[Path]:
        """One CSV table and, where the labels are known, the table that ``meds-evaluation`` reads."""
        written = super().write_predictions(folder, samples, predictions)
        if "boolean_value" not in samples.rows.columns:
            return written
        target = predictions.target
        if target.kind != "binary":
            raise ConfigError(f"meds-evaluation knows yes-or-no targets, this model predicts {target.kind}")
        decided = pl.Series(predictions.decisions, dtype=pl.String) == target.names[1]
        probability = pl.Series(predictions.probabilities[:, 1], dtype=pl.Float32).fill_nan(None)
        path = folder / "predictions.parquet"
        table = samples.rows.with_columns(predicted_boolean_value=decided, predicted_boolean_probability=probability)
        table.write_parquet(path)
        return [*written, path]


def _settings(vocabulary: Vocabulary, options: MedsOptions) -> dict[str, Json]:
    return {
        "event_kinds": [field.name for field in vocabulary.fields],
        "code_fields": as_json(vocabulary.fields),
        "static_names": list(STATIC_NAMES),
        "kinds": options.kinds,
        "min_events": options.min_events,
        "max_events": options.max_events,
    }


def _last_events(events: pl.LazyFrame, raw: Path) -> pl.DataFrame:
    with reading(raw):
        last = events.group_by("subject_id").agg(prediction_time=pl.col("time").max())
        return last.drop_nulls().sort("subject_id").collect(engine="streaming")


# The files: checked against the standard, and scanned lazily


def data_files(raw: str | Path) -> list[Path]:
    """The shards under ``data/``, sorted by name."""
    folder = Path(raw)
    if not folder.is_dir():
        raise StorageError(f"no folder at {folder}: name the root folder of a MEDS dataset")
    files = _parquet_below(folder / "data")
    if not files:
        hint = "" if (folder / "metadata").is_dir() else hint_at_another(folder)
        raise DataError(f"{folder} is not a MEDS dataset: it has no parquet files under data/.{hint}")
    return files


def scan_events(files: list[Path]) -> pl.LazyFrame:
    """``subject_id``, ``time``, ``code`` and ``numeric_value`` of all shards, types checked file by file."""
    return pl.concat([_scan_shard(file) for file in files])


def _scan_shard(file: Path) -> pl.LazyFrame:
    with reading(file):
        scan = pl.scan_parquet(file)
        schema = scan.collect_schema()
        check_unpacked_rows(file, scan.select(pl.len()).collect().item(), len(schema))
    for name in ("subject_id", "time", "code"):
        if name not in schema:
            raise DataError(f"{file} has no column '{name}': it is not MEDS data")
    if not schema["subject_id"].is_integer():
        raise DataError(f"{file}: subject_id has type {schema['subject_id']}; MEDS has whole numbers there")
    if not isinstance(schema["time"], pl.Datetime):
        raise DataError(f"{file}: time has type {schema['time']}; MEDS has time stamps there")
    value = pl.col("numeric_value") if "numeric_value" in schema else pl.lit(None).alias("numeric_value")
    return scan.select(
        pl.col("subject_id").cast(pl.Int64),
        pl.col("time").dt.replace_time_zone(None).cast(pl.Datetime("us")),
        pl.col("code").cast(pl.String),
        value.cast(pl.Float32),
    )


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn what goes wrong while parquet files are read into an error that names them."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{path} cannot be read as parquet ({str(error).splitlines()[0][:120]})") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from None


def read_labels(path: str | Path, flow: CohortFlow) -> pl.DataFrame:
    """A MEDS label file, or a folder of them.

    - returns: ``subject_id``, ``prediction_time`` and ``label`` (boolean, integer or text), by subject and time.
    """
    rows = _read_times(path)
    present = [name for name in _VALUES if name in rows.columns and rows[name].null_count() < rows.height]
    if len(present) != 1:
        raise DataError(f"{path} must hold exactly one of {', '.join(_VALUES)}; found: {', '.join(present) or 'none'}")
    named = rows.select("subject_id", "prediction_time", label=pl.col(present[0])).drop_nulls()
    labels = named.unique(maintain_order=True)
    if labels.select("subject_id", "prediction_time").is_duplicated().any():
        raise DataError(f"{path} gives two different labels for one subject at one time: leave one")
    left_out = {"without_value": rows.height - named.height, "duplicates": named.height - labels.height}
    counts = {f"left_out_{reason}": count for reason, count in left_out.items()}
    flow.count("labels in the file", labels["subject_id"], **counts)
    if labels.is_empty():
        raise DataError(f"{path} holds no labels")
    return labels.sort("subject_id", "prediction_time")


def read_prediction_times(path: str | Path, columns: Sequence[str]) -> pl.DataFrame:
    """Columns of a label file, each row once, by subject and time; its labels may be among them."""
    rows = _read_times(path)
    if "boolean_value" in columns and rows.schema.get("boolean_value") != pl.Boolean:
        raise DataError(f"{path} has no column 'boolean_value' of true and false, which meds-evaluation compares with")
    times = rows.select(columns).drop_nulls().unique().sort(pl.all())
    if times.select("subject_id", "prediction_time").is_duplicated().any():
        raise DataError(f"{path} gives two different labels for one subject at one time: leave one")
    return times


def _read_times(path: str | Path) -> pl.DataFrame:
    files = label_files(path)
    if not files or not files[0].is_file():
        raise StorageError(f"no label file at {path}: name a parquet file or a folder of them")
    with reading(path):
        frame = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")
    for name in ("subject_id", "prediction_time"):
        if name not in frame.columns:
            raise DataError(f"{path} has no column '{name}': it is not a MEDS label file")
    if not isinstance(frame.schema["prediction_time"], pl.Datetime) or not frame.schema["subject_id"].is_integer():
        raise DataError(f"{path}: subject_id must be whole numbers and prediction_time time stamps, as MEDS has them")
    time = pl.col("prediction_time").dt.replace_time_zone(None).cast(pl.Datetime("us"))
    with reading(path):
        return frame.with_columns(pl.col("subject_id").cast(pl.Int64), time)


def label_files(path: str | Path) -> list[Path]:
    """The files behind a label path."""
    given = Path(path)
    return _parquet_below(given) if given.is_dir() else [given]


def _parquet_below(folder: Path) -> list[Path]:
    # macOS puts files that begin with "._" beside those on other disks.
    return sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))


# Events read in batches, each sample up to its prediction time and never beyond


@dataclass(frozen=True)
class Clock:
    """What is known of the samples' subjects and times; a subject's samples stand together.

    - ``subjects``, ``begins``, ``counts`` ``(subjects,)``: Each subject's id, its first sample, and how many it has.
    - ``when`` ``(samples,)``: The time of each prediction, in microseconds.
    - ``beginning``, ``birth`` ``(subjects,)``: Microseconds of each subject's first event (or prediction, if that is
      earlier), and of birth.
    """

    subjects: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    when: npt.NDArray[np.int64]
    beginning: npt.NDArray[np.int64]
    birth: npt.NDArray[np.int64]

    @staticmethod
    def of(samples: pl.DataFrame, known: pl.DataFrame) -> Clock:
        """From ``subject_id`` and ``prediction_time``, sorted by subject, and the subjects of :func:`survey`."""
        subjects, begins, counts = np.unique(samples["subject_id"].to_numpy(), return_index=True, return_counts=True)
        when = samples["prediction_time"].dt.epoch("us").to_numpy()
        merged = known.group_by("subject_id").agg(pl.col("first", "birth").min())
        known = pl.DataFrame({"subject_id": subjects}).join(merged, on="subject_id", how="left", maintain_order="left")
        first, birth = (known[name].fill_null(_NEVER).to_numpy() for name in ("first", "birth"))
        beginning = np.where(first == _NEVER, when[begins], np.minimum(first, when[begins]))
        return Clock(subjects, begins, counts, when, beginning, birth)

    @property
    def hours(self) -> npt.NDArray[np.float64]:
        """From each subject's first event to the prediction, ``(samples,)``."""
        hours: npt.NDArray[np.float64] = (self.when - np.repeat(self.beginning, self.counts)) / _HOUR
        return hours

    @property
    def static(self) -> npt.NDArray[np.float32]:
        """Age at the prediction in hundreds of years, 0 where birth is not known, and a flag that says so."""
        birth = np.repeat(self.birth, self.counts)
        known = (birth != _NEVER) & (birth <= self.when)
        age = np.where(known, (self.when - np.where(known, birth, self.when)) / _CENTURY, 0.0)
        return np.stack([age, ~known], axis=1).astype(np.float32)


def survey(events: pl.LazyFrame, path: str | Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What must be known of all events before any of them can be laid out.

    - returns ``prefixes``: ``prefix`` (what stands before ``//`` in a code) and ``len``, how often.
    - returns ``subjects``: ``subject_id``, and microseconds of the ``first`` event and of ``birth``.
    """
    time, code = pl.col("time").dt.epoch("us"), pl.col("code")
    born = time.filter((code == BIRTH) | code.str.starts_with(f"{BIRTH}//")).min()
    with reading(path):
        prefix = code.str.split("//").list.first()
        prefixes = events.group_by(prefix.alias("prefix")).len().collect(engine="streaming")
        subjects = events.group_by("subject_id").agg(first=time.min(), birth=born).collect()
    return prefixes.drop_nulls(), subjects


def read_events(store: EventStore, events: pl.LazyFrame, path: str | Path, clock: Clock) -> dict[str, int]:
    """Read the events of the samples' subjects; returns counts by reason.

    - ``store``: Its fields are the kinds of events; times go in as seconds before the prediction.
    - ``events``: ``subject_id``, ``time``, ``code``, ``numeric_value``.
    - ``path``: Where they are stored, for messages.
    """
    index = SampleIndex(clock.subjects)
    fields, words = _code_maps(store)
    category = pl.col("code").fill_null("").cast(pl.Categorical(pl.Categories.random()))
    time, value = pl.col("time").dt.epoch("us"), pl.col("numeric_value")
    counts = {"rows": 0, "left_out_other_subject": 0, "left_out_after_prediction": 0, "left_out_unknown_kind": 0}
    with reading(path):
        scan = events.select("subject_id", category, time, value)
        for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
            counts["rows"] += batch.height
            subject = index(batch["subject_id"].fill_null(-1).to_numpy())
            batch, subject = batch.filter(pl.Series(subject >= 0)), subject[subject >= 0]
            counts["left_out_other_subject"] -= batch.height
            # A row without a time says what always holds: it stands with the subject's first event.
            stamp = batch["time"].fill_null(_NEVER).to_numpy()
            stamp = np.where(stamp == _NEVER, clock.beginning[subject], stamp)
            row = np.repeat(np.arange(len(subject)), clock.counts[subject])
            sample = ranges(clock.begins[subject], clock.counts[subject])
            seen = stamp[row] <= clock.when[sample]
            counts["left_out_after_prediction"] += int((~seen).sum())
            row, sample = row[seen], sample[seen]
            second = np.floor_divide(stamp[row] - clock.when[sample], _SECOND)
            field, word = fields(batch["code"])[row], words(batch["code"])[row]
            counts["left_out_unknown_kind"] += int((field < 0).sum())
            number = batch["numeric_value"].fill_null(np.nan).to_numpy()[row]
            for at in np.unique(field[field >= 0]):
                of = field == at
                store.add(store.fields[at].name, sample[of], second[of], word[of], _finite(number[of]))
    counts["left_out_other_subject"] += counts["rows"]
    return counts


def _code_maps(store: EventStore) -> tuple[CategoryMap, CategoryMap]:
    """From a code to its field's number (-1 for a kind that is not known), and to its number within the field."""
    number_of = {field.name: number for number, field in enumerate(store.fields)}
    only = 0 if list(number_of) == ["event"] else None
    other = number_of.get(OTHER, -1)

    def fields(codes: pl.Series) -> Array:
        numbers = [number_of.get(code.split("//")[0], other) if only is None else only for code in codes]
        return np.array([number if code else -1 for number, code in zip(numbers, codes, strict=True)], np.int32)

    def words(codes: pl.Series) -> Array:
        numbers = fields(codes)
        ids = np.full(len(codes), -1, np.int32)
        for number in np.unique(numbers[numbers >= 0]):
            of = numbers == number
            ids[of] = store.word_ids(store.fields[number].name, codes.filter(pl.Series(of)))
        return ids

    return CategoryMap(fields, np.int32), CategoryMap(words, np.int32)


def _finite(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(np.isfinite(values), values, np.float32(np.nan))


# File by file, so that a killed run goes on from there


@dataclass(frozen=True)
class _Look:
    """A file to look through, and the file to keep the result in."""

    file: Path
    out: Path


@dataclass(frozen=True)
class _Read:
    """A file to read, and the file to keep its events in."""

    file: Path
    out: Path
    fields: tuple[Field, ...]
    clock: Clock


@dataclass(frozen=True)
class _Survey:
    """How often each prefix of a code occurs in a file; the subjects are in the file that is kept."""

    prefixes: dict[str, int]
    kept: dict[str, int]


def _look_through(task: _Look) -> _Survey:
    prefixes, subjects = survey(scan_events([task.file]), task.file)
    with disk_errors(task.out.parent):
        subjects.write_ipc(task.out)
    counts = dict(zip(prefixes["prefix"].to_list(), prefixes["len"].to_list(), strict=True))
    return _Survey(counts, {task.out.name: task.out.stat().st_size})


def _read_file(task: _Read) -> SavedEvents:
    store = EventStore(task.fields, len(task.clock.when))
    counts = read_events(store, scan_events([task.file]), task.file, task.clock)
    return save_events(store, task.out, counts)


@dataclass(frozen=True)
class Shards:
    """The data files of a MEDS dataset.

    - ``raw``: The root of the dataset.
    - ``work``: Where finished files are kept.
    - ``workers``: Processes to read them with.
    """

    raw: Path
    files: Sequence[Path]
    work: WorkFolder
    workers: int

    def survey(self, samples: pl.DataFrame, kinds: str) -> tuple[list[Field], Clock]:
        """The kinds of events, and the samples' subjects and times.

        - ``samples``: ``subject_id`` and ``prediction_time``, sorted by subject.
        - ``kinds`` {"prefix", "one"}
        """
        jobs = [self._job("survey", file, lambda out, file=file: _Look(file, out)) for file in self.files]
        pieces = run_jobs(_look_through, jobs, self.work, _Survey, workers=self.workers, title="looking through files")
        with disk_errors(self.work.path):
            known = pl.concat([pl.read_ipc(job.argument.out) for job in jobs])
        counts: Counter[str] = Counter()
        for piece in pieces:
            counts.update(piece.prefixes)
        return _fields(counts, kinds), Clock.of(samples, known)

    def read(self, fields: Sequence[Field], clock: Clock, flow: CohortFlow) -> EventStore:
        """All events of the samples."""
        jobs = [
            self._job("events", file, lambda out, file=file: _Read(file, out, tuple(fields), clock))
            for file in self.files
        ]
        pieces = run_jobs(_read_file, jobs, self.work, SavedEvents, workers=self.workers, title="reading files")
        store, counts = EventStore(fields, len(clock.when)), Counter[str]()
        for job, piece in zip(jobs, pieces, strict=True):
            load_events(store, piece, job.argument.out)
            counts.update(piece.counts)
        flow.add("rows of the data", **counts)
        return store

    def _job(self, step: str, file: Path, task: Callable[..., Any]) -> Job[Any]:
        name = f"{step} {file.relative_to(self.raw).as_posix()}"
        return Job(name, (file,), task(self.work.path_for(name, (file,))))


def _fields(counts: dict[str, int], kinds: str) -> list[Field]:
    if kinds == "one":
        return [Field("event", 0)]
    frequent = sorted(counts, key=lambda prefix: (-counts[prefix], prefix))[: _MOST_KINDS - 1]
    names = sorted(frequent)
    if len(counts) > len(names):
        names.append(OTHER)
    return [Field(name, kind) for kind, name in enumerate(names)]


# The dataset folder


def _add_written(flow: CohortFlow, patients: npt.NDArray[np.int64], min_events: int) -> None:
    """Add the samples that were written to the cohort flow, by their patients ``(samples,)``."""
    if not len(patients):
        raise DataError(f"no label has {min_events} or more events before it: is it the label file of these data?")
    step = f"samples with {min_events} or more events up to the prediction time"
    flow.add(step, patients=len(np.unique(patients)), samples=len(patients))


def _encode(labels: pl.Series) -> tuple[TargetSpec, npt.NDArray[Any]]:
    """Target and class codes, or values, ``(rows,)`` of a label column."""
    if labels.dtype.is_float():
        measured, target = encode_targets(labels.to_numpy(), "regression", None)
        return target, measured.numpy()
    values = labels.unique().sort().to_list()
    if len(values) < 2:
        raise DataError(f"all {len(labels)} labels are {values[0]}: there is nothing to learn")
    if labels.dtype == pl.Boolean:
        return TargetSpec("binary", ("false", "true")), labels.cast(pl.Int64).to_numpy()
    names = tuple(str(value) for value in values)
    kind = "binary" if names == ("0", "1") else "classes"
    codes = labels.replace_strict({value: code for code, value in enumerate(values)}, return_dtype=pl.Int64)
    return TargetSpec(kind, names), codes.to_numpy()
