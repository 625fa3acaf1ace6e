"""MEDS: any dataset in the Medical Event Data Standard, with any of its label files as the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, StorageError
from manydg.files import Json, disk_errors
from manydg.jobs import Job
from manydg.sources._events import EventBlock, EventStore, Field, Vocabulary, join_blocks, keep_events, put_back, ranges
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
from manydg.sources._tables import Array, CategoryMap, SampleIndex
from manydg.synthetic.meds import synthesize

# A MEDS dataset's files: found, checked against the format, and scanned lazily.


BIRTH = "MEDS_BIRTH"
_VALUES = ("boolean_value", "integer_value", "categorical_value")


def data_files(raw: str | Path) -> list[Path]:
    """The shards under ``data/``, sorted by name."""
    folder = Path(raw)
    if not folder.is_dir():
        raise StorageError(f"no folder at {folder}: name the root folder of a MEDS dataset")
    files = sorted((folder / "data").rglob("*.parquet")) if (folder / "data").is_dir() else []
    if not files:
        hint = hint_at_another(folder)
        raise DataError(f"{folder} is not a MEDS dataset: it has no parquet files under data/.{hint}")
    return files


def scan_events(files: list[Path]) -> pl.LazyFrame:
    """``subject_id``, ``time``, ``code`` and ``numeric_value`` of all shards, types checked file by file."""
    return pl.concat([_scan_shard(file) for file in files])


def _scan_shard(file: Path) -> pl.LazyFrame:
    with reading(file):
        scan = pl.scan_parquet(file)
        schema = scan.collect_schema()
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
def reading(place: str | Path) -> Iterator[None]:
    """Turn what goes wrong while parquet files are read into an error that names the place."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DataError(f"{place} cannot be read as parquet ({str(error).splitlines()[0][:120]})") from None
    except OSError as error:
        raise StorageError(f"cannot read {place}: {error.strerror or error}") from None


def read_labels(path: str | Path, flow: CohortFlow) -> pl.DataFrame:
    """A MEDS label file, or a folder of them.

    Returns
    -------
    DataFrame
        ``subject_id``, ``prediction_time`` and ``label`` (boolean, integer or text), by subject and time.
    """
    rows = _read_times(path)
    present = [name for name in _VALUES if name in rows.columns and rows[name].null_count() < rows.height]
    if not present and "float_value" in rows.columns:
        raise DataError(f"{path} holds float_value labels; regression is not supported: cut them into classes first")
    if len(present) != 1:
        raise DataError(f"{path} must hold exactly one of {', '.join(_VALUES)}; found: {', '.join(present) or 'none'}")
    named = rows.select("subject_id", "prediction_time", label=pl.col(present[0])).drop_nulls()
    labels = named.unique(maintain_order=True)
    if labels.select("subject_id", "prediction_time").is_duplicated().any():
        raise DataError(f"{path} gives two different labels for one subject at one time: leave one")
    flow.add(
        "labels in the file",
        patients=labels["subject_id"].n_unique(),
        samples=labels.height,
        left_out_without_value=rows.height - named.height,
        left_out_duplicates=named.height - labels.height,
    )
    if labels.is_empty():
        raise DataError(f"{path} holds no labels")
    return labels.sort("subject_id", "prediction_time")


def read_prediction_times(path: str | Path) -> pl.DataFrame:
    """``subject_id`` and ``prediction_time`` of a label file whose labels are not needed."""
    return _read_times(path).select("subject_id", "prediction_time").drop_nulls().unique().sort(pl.all())


def _read_times(path: str | Path) -> pl.DataFrame:
    place = Path(path)
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise StorageError(f"no label file at {place}: name a parquet file or a folder of them")
    with reading(place):
        frame = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")
    for name in ("subject_id", "prediction_time"):
        if name not in frame.columns:
            raise DataError(f"{place} has no column '{name}': it is not a MEDS label file")
    if not isinstance(frame.schema["prediction_time"], pl.Datetime) or not frame.schema["subject_id"].is_integer():
        raise DataError(f"{place}: subject_id must be whole numbers and prediction_time time stamps, as MEDS has them")
    time = pl.col("prediction_time").dt.replace_time_zone(None).cast(pl.Datetime("us"))
    return frame.with_columns(pl.col("subject_id").cast(pl.Int64), time)


def label_files(path: str | Path) -> list[Path]:
    """The files behind a label path."""
    place = Path(path)
    return sorted(place.rglob("*.parquet")) if place.is_dir() else [place]


# MEDS events read in batches into an EventStore, each sample up to its prediction time and never beyond.


OTHER = "<other>"
STATIC_NAMES = ("age_over_100", "age_missing")
_BATCH = 250_000
_SECOND = 1_000_000
_HOUR = 3600 * _SECOND
_CENTURY = 100 * 365.25 * 24 * _HOUR
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Clock:
    """What is known of the samples' subjects and times; a subject's samples stand together.

    Parameters
    ----------
    subjects, begins, counts : array ``(subjects,)``
        Each subject's id, its first sample, and how many it has.
    when : array ``(samples,)``
        The time of each prediction, in microseconds.
    beginning, birth : array ``(subjects,)``
        Microseconds of each subject's first event (or prediction, if that is earlier), and of birth.
    """

    subjects: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    when: npt.NDArray[np.int64]
    beginning: npt.NDArray[np.int64]
    birth: npt.NDArray[np.int64]

    @staticmethod
    def of(samples: pl.DataFrame, known: pl.DataFrame) -> Clock:
        """From ``subject_id`` and ``prediction_time``, sorted by subject, and what :func:`survey` found."""
        subjects, begins, counts = np.unique(samples["subject_id"].to_numpy(), return_index=True, return_counts=True)
        when = samples["prediction_time"].dt.epoch("us").to_numpy()
        merged = known.group_by("subject_id").agg(pl.col("first", "birth").min())
        found = pl.DataFrame({"subject_id": subjects}).join(merged, on="subject_id", how="left", maintain_order="left")
        first, birth = (found[name].fill_null(_NEVER).to_numpy() for name in ("first", "birth"))
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


def survey(events: pl.LazyFrame, place: str | Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What must be known of all events before any of them can be laid out.

    Returns
    -------
    prefixes : DataFrame
        ``prefix`` (what stands before ``//`` in a code) and ``len``, how often.
    subjects : DataFrame
        ``subject_id``, and microseconds of the ``first`` event and of ``birth``.
    """
    time, code = pl.col("time").dt.epoch("us"), pl.col("code")
    born = time.filter((code == BIRTH) | code.str.starts_with(f"{BIRTH}//")).min()
    with reading(place):
        prefix = code.str.split("//").list.first()
        prefixes = events.group_by(prefix.alias("prefix")).len().collect(engine="streaming")
        subjects = events.group_by("subject_id").agg(first=time.min(), birth=born).collect()
    return prefixes.drop_nulls(), subjects


def read_events(store: EventStore, events: pl.LazyFrame, place: str | Path, clock: Clock) -> dict[str, int]:
    """Read the events of the samples' subjects; returns counts by reason.

    Parameters
    ----------
    store : EventStore
        Its fields are the kinds of events; times go in as seconds before the prediction.
    events : LazyFrame
        ``subject_id``, ``time``, ``code``, ``numeric_value``.
    place : path
        Where they lie, for messages.
    clock : Clock
    """
    index = SampleIndex(clock.subjects)
    fields, words = _code_maps(store)
    category = pl.col("code").fill_null("").cast(pl.Categorical(pl.Categories.random()))
    time, value = pl.col("time").dt.epoch("us"), pl.col("numeric_value")
    noted = {"rows": 0, "left_out_other_subject": 0, "left_out_after_prediction": 0, "left_out_unknown_kind": 0}
    with reading(place):
        scan = events.select("subject_id", category, time, value)
        for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
            noted["rows"] += batch.height
            subject = index(batch["subject_id"].fill_null(-1).to_numpy())
            batch, subject = batch.filter(pl.Series(subject >= 0)), subject[subject >= 0]
            noted["left_out_other_subject"] -= batch.height
            # A row without a time says what always holds: it stands with the subject's first event.
            stamp = batch["time"].fill_null(_NEVER).to_numpy()
            stamp = np.where(stamp == _NEVER, clock.beginning[subject], stamp)
            row = np.repeat(np.arange(len(subject)), clock.counts[subject])
            sample = ranges(clock.begins[subject], clock.counts[subject])
            seen = stamp[row] <= clock.when[sample]
            noted["left_out_after_prediction"] += int((~seen).sum())
            row, sample = row[seen], sample[seen]
            second = np.floor_divide(stamp[row] - clock.when[sample], _SECOND)
            field, word = fields(batch["code"])[row], words(batch["code"])[row]
            noted["left_out_unknown_kind"] += int((field < 0).sum())
            number = batch["numeric_value"].fill_null(np.nan).to_numpy()[row]
            for at in np.unique(field[field >= 0]):
                of = field == at
                store.add(store.fields[at].name, sample[of], second[of], word[of], _finite(number[of]))
    noted["left_out_other_subject"] += noted["rows"]
    return noted


def _code_maps(store: EventStore) -> tuple[CategoryMap, CategoryMap]:
    """From a code to its field's number (-1 for a kind that is not known), and to its number within the field."""
    number_of = {field.name: number for number, field in enumerate(store.fields)}
    only = 0 if list(number_of) == ["event"] else None
    other = number_of.get(OTHER, -1)

    def fields(codes: pl.Series) -> Array:
        found = [number_of.get(code.split("//")[0], other) if only is None else only for code in codes]
        return np.array([number if code else -1 for number, code in zip(found, codes, strict=True)], np.int32)

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


# A MEDS dataset file by file: each is looked through and read on its own, so that a killed run goes on from there.


_MOST_KINDS = 32


@dataclass(frozen=True)
class _Look:
    """A file to look through, and where to keep what is found."""

    file: Path
    place: Path


@dataclass(frozen=True)
class _Read:
    """A file to read, and where to keep its events."""

    file: Path
    place: Path
    fields: tuple[Field, ...]
    clock: Clock


def _look_through(task: _Look) -> dict[str, Any]:
    prefixes, subjects = survey(scan_events([task.file]), task.file)
    with disk_errors(task.place.parent):
        subjects.write_ipc(task.place)
    counts = dict(zip(prefixes["prefix"].to_list(), prefixes["len"].to_list(), strict=True))
    return {"prefixes": counts, "kept": {task.place.name: task.place.stat().st_size}}


def _read_file(task: _Read) -> dict[str, Any]:
    store = EventStore(task.fields, len(task.clock.when))
    counts = read_events(store, scan_events([task.file]), task.file, task.clock)
    return {"counts": counts, **keep_events(store, task.place)}


@dataclass(frozen=True)
class Shards:
    """The data files of a MEDS dataset.

    Parameters
    ----------
    raw : path
        The root of the dataset.
    files : sequence of path
    work : WorkFolder
        Where finished files are kept.
    workers : int
        Processes to read them with.
    """

    raw: Path
    files: Sequence[Path]
    work: WorkFolder
    workers: int

    def survey(self, samples: pl.DataFrame, kinds: str) -> tuple[list[Field], Clock]:
        """The kinds of events, and the samples' subjects and times.

        Parameters
        ----------
        samples : DataFrame
            ``subject_id`` and ``prediction_time``, sorted by subject.
        kinds : {"prefix", "one"}
        """
        jobs = [self._job("survey", file, lambda place, file=file: _Look(file, place)) for file in self.files]
        found = run_jobs(_look_through, jobs, self.work, workers=self.workers, title="looking through files")
        with disk_errors(self.work.path):
            known = pl.concat([pl.read_ipc(job.argument.place) for job in jobs])
        counts: dict[str, int] = {}
        for piece in found:
            for prefix, count in piece["prefixes"].items():
                counts[prefix] = counts.get(prefix, 0) + count
        return _fields(counts, kinds), Clock.of(samples, known)

    def read(self, fields: Sequence[Field], clock: Clock, flow: CohortFlow) -> EventStore:
        """All events of the samples."""
        jobs = [
            self._job("events", file, lambda place, file=file: _Read(file, place, tuple(fields), clock))
            for file in self.files
        ]
        found = run_jobs(_read_file, jobs, self.work, workers=self.workers, title="reading files")
        store, counts = EventStore(fields, len(clock.when)), dict[str, int]()
        for job, piece in zip(jobs, found, strict=True):
            put_back(store, piece, job.argument.place)
            for name, count in piece["counts"].items():
                counts[name] = counts.get(name, 0) + count
        flow.add("rows of the data", **counts)
        return store

    def _job(self, step: str, file: Path, task: Callable[..., Any]) -> Job[Any]:
        name = f"{step} {file.relative_to(self.raw).as_posix()}"
        return Job(name, (file,), task(self.work.room_for(name, (file,))))


def _fields(counts: dict[str, int], kinds: str) -> list[Field]:
    if kinds == "one":
        return [Field("event", 0)]
    frequent = sorted(counts, key=lambda prefix: (-counts[prefix], prefix))[: _MOST_KINDS - 1]
    names = sorted(frequent)
    if len(counts) > len(names):
        names.append(OTHER)
    return [Field(name, kind) for kind, name in enumerate(names)]


__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

KIND_RULES = ("prefix", "one")


def prepare(
    raw: str | Path,
    out: str | Path,
    *,
    labels: str | Path,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    kinds: str = "prefix",
    min_events: int = 1,
    max_events: int | None = 300,
    min_count: int = 1,
) -> Path:
    """Make a dataset folder from a MEDS dataset, one sample a label.

    Parameters
    ----------
    raw : path
        The root of the dataset: ``data/**/*.parquet`` and, where present, ``metadata/``.
    out : path
        The dataset folder to write.
    labels : path
        A label file, or a folder of them: ``subject_id``, ``prediction_time`` and one of ``boolean_value``,
        ``integer_value``, ``categorical_value``. Only events up to the prediction time are used.
    workers : int
        Processes, each of which reads a file; polars uses threads of its own within one.
    kinds : {"prefix", "one"}
        Whether what stands before ``//`` in a code is its kind of event, or all codes are of one kind.
    min_events, max_events, min_count : int
        As for eICU.

    Returns
    -------
    Path
        The dataset folder.
    """
    raw, out, labels = Path(raw).absolute(), Path(out), Path(labels).absolute()
    make_ready(out, overwrite=overwrite)
    _check(kinds, limit_patients, min_events, max_events, min_count)
    files, flow = data_files(raw), CohortFlow()
    samples = _limit(read_labels(labels, flow), limit_patients, flow)
    spec, codes = _encode(samples["label"])
    options = {
        "labels": labels.name,
        "kinds": kinds,
        "limit_patients": limit_patients,
        "min_events": min_events,
        "max_events": max_events,
        "min_count": min_count,
    }
    read = [*files, *label_files(labels)]
    # A subject's first event and the most frequent kinds are known from all files, so that one which changes changes
    # what is read of the others.
    decisive = {"limit_patients": limit_patients, "kinds": kinds, "version": 1, "files": states_of(read)}
    with work_folder(out, "meds", decisive) as work, ThreadPoolExecutor(1) as pool:
        described = pool.submit(describe_files, read)
        shards = Shards(raw, files, work, workers)
        fields, clock = shards.survey(samples, kinds)
        store = shards.read(fields, clock, flow)
        vocabulary = store.vocabulary(min_count)
        info = _info(raw.resolve().name, vocabulary, kinds, min_events, max_events)
        with DatasetWriter(out, spec, info, overwrite=overwrite) as writer:
            blocks = store.blocks(vocabulary, min_events=min_events, max_events=max_events, ticks_per_minute=60)
            _write(writer, blocks, samples, codes, clock, flow, min_events)
            writer.info = with_provenance(writer.info, "meds", described.result(), options, flow)
    return out


def _info(name: str, vocabulary: Vocabulary, kinds: str, min_events: int, max_events: int | None) -> DatasetInfo:
    settings: dict[str, Json] = {
        "source": "meds",
        "event_kinds": [field["name"] for field in vocabulary.fields],
        "code_fields": vocabulary.fields,
        "static_names": list(STATIC_NAMES),
        "kinds": kinds,
        "min_events": min_events,
        "max_events": max_events,
    }
    return DatasetInfo(name=name, vocabularies={"events": vocabulary.words}, settings=settings)


def _write(
    writer: DatasetWriter,
    blocks: Iterator[EventBlock],
    samples: pl.DataFrame,
    codes: npt.NDArray[np.int64],
    clock: Clock,
    flow: CohortFlow,
    min_events: int,
) -> None:
    patients, hours, static = samples["subject_id"].to_numpy(), clock.hours, clock.static
    kept: list[npt.NDArray[np.int64]] = []
    for block in blocks:
        rows = block.samples
        if len(rows):
            writer.append_immutable(block.columns | {"static": static[rows]}, codes[rows], patients[rows], hours[rows])
        kept.append(rows)
    chosen = np.concatenate(kept)
    if not len(chosen):
        raise DataError(f"no label has {min_events} or more events before it: is it the label file of these data?")
    step = f"samples with {min_events} or more events up to the prediction time"
    flow.add(step, patients=len(np.unique(patients[chosen])), samples=len(chosen))


def prepare_for_prediction(
    raw: str | Path,
    vocabularies: Mapping[str, Sequence[str]],
    settings: Mapping[str, Any],
    *,
    times: str | Path | None = None,
) -> tuple[dict[str, Column], pl.DataFrame]:
    """New subjects as a trained model's inputs.

    Parameters
    ----------
    raw : path
    vocabularies, settings : dict
        ``info["vocabularies"]`` and ``info["settings"]`` of the training dataset.
    times : path, optional
        Parquet file with ``subject_id`` and ``prediction_time``; without it, each subject's last event is the time.

    Returns
    -------
    columns : dict
    rows : DataFrame
        ``subject_id`` and ``prediction_time`` of each row.
    """
    if settings.get("source", "meds") != "meds":
        raise DataError(f"the model was trained on {settings['source']} data; these are MEDS files")
    events = scan_events(data_files(raw))
    if times is not None:
        samples = read_prediction_times(times)
    else:
        with reading(raw):
            last = events.group_by("subject_id").agg(prediction_time=pl.col("time").max())
            samples = last.drop_nulls().sort("subject_id").collect(engine="streaming")
    if samples.is_empty():
        raise DataError(f"{raw} holds no subject with an event in time, so there is nothing to predict from")
    names = settings["event_kinds"]
    store = EventStore([Field(name, kind) for kind, name in enumerate(names)], samples.height)
    clock = Clock.of(samples, survey(events, raw)[1])
    read_events(store, events, raw, clock)
    vocabulary = Vocabulary(list(vocabularies["events"]), list(settings["code_fields"]))
    limits = {"min_events": settings.get("min_events", 1), "max_events": settings.get("max_events")}
    rows, columns = join_blocks(store.blocks(vocabulary, **limits, ticks_per_minute=60))
    if not len(rows):
        raise DataError(f"{raw}: no subject has an event up to its prediction time")
    columns["static"] = torch.from_numpy(clock.static[rows])
    return columns, samples[rows].select("subject_id", "prediction_time")


def _check(kinds: str, limit: int | None, min_events: int, max_events: int | None, min_count: int) -> None:
    if kinds not in KIND_RULES:
        raise ConfigError(f"kinds must be one of {', '.join(KIND_RULES)}, not '{kinds}'")
    counts = {"limit_patients": limit, "min_events": min_events, "max_events": max_events, "min_count": min_count}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")


def _limit(samples: pl.DataFrame, limit: int | None, flow: CohortFlow) -> pl.DataFrame:
    if limit is None:
        return samples
    kept = samples.filter(pl.col("subject_id").rank("dense") <= limit)
    flow.add(f"limited to {limit} patients", patients=kept["subject_id"].n_unique(), samples=kept.height)
    return kept


def _encode(labels: pl.Series) -> tuple[TargetSpec, npt.NDArray[np.int64]]:
    """Target and class codes ``(rows,)`` of a label column."""
    found = labels.unique().sort().to_list()
    if len(found) < 2:
        raise DataError(f"all {len(labels)} labels are {found[0]}: there is nothing to learn")
    if labels.dtype == pl.Boolean:
        return TargetSpec("binary", ("false", "true")), labels.cast(pl.Int64).to_numpy()
    names = tuple(str(value) for value in found)
    kind = "binary" if names == ("0", "1") else "classes"
    codes = labels.replace_strict({value: code for code, value in enumerate(found)}, return_dtype=pl.Int64)
    return TargetSpec(kind, names), codes.to_numpy()
