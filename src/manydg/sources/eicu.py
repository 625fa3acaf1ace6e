"""eICU: will the patient be readmitted to intensive care within 15 days, from the events of this unit stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.data.columns import Column
from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.sources._eicu_events import EVENT_TABLES, FIELDS, FIELDS_OF, KINDS, EventReader
from manydg.sources._eicu_stays import STATIC_NAMES, read_stays, readmitted, static_features
from manydg.sources._event_cache import keep_events, put_back
from manydg.sources._event_rows import BLOCK
from manydg.sources._events import EventBlock, EventStore, Vocabulary, join_blocks
from manydg.sources._provenance import CohortFlow, describe_files, provenance
from manydg.sources._resume import WorkFolder, make_ready, run_jobs, work_folder
from manydg.sources._spread import Job
from manydg.sources._tables import Table, find_tables
from manydg.sources._twin_eicu import synthesize

__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

_NO_END = 1 << 40


def prepare(
    raw: str | Path,
    out: str | Path,
    *,
    workers: int = 1,
    limit_patients: int | None = None,
    overwrite: bool = False,
    without: Sequence[str] = (),
    within_days: float = 15.0,
    min_gap: float = 0.0,
    min_events: int = 1,
    max_events: int | None = 300,
    min_count: int = 1,
) -> Path:
    """Make a dataset folder from eICU's tables, one sample a unit stay.

    Parameters
    ----------
    raw : path
        Folder with patient, diagnosis, lab, medication, physicalExam and treatment, ``.csv`` or ``.csv.gz``, any case.
    out : path
        The dataset folder to write.
    workers : int
        Processes, each of which reads a table; polars uses threads of its own within one.
    limit_patients : int, optional
        Keep only this many patients, the first in the order of ``uniquepid``.
    without : sequence of str
        Event tables to do without (of diagnosis, lab, medication, physicalexam, treatment).
    within_days, min_gap : float
        The label; see :func:`manydg.sources._eicu_stays.readmitted`.
    min_events, max_events : int
        A stay with fewer events is left out; of one with more, the last are kept.
    min_count : int
        A code that occurs in fewer rows counts as unknown.

    Returns
    -------
    Path
        The dataset folder.
    """
    raw, out = Path(raw).absolute(), Path(out)
    make_ready(out, overwrite=overwrite)
    _check(limit_patients, within_days, min_gap, min_events, max_events, min_count)
    left_out = _left_out_tables(without)
    tables = find_tables(raw, ("patient", *EVENT_TABLES), source="eicu", without=left_out)
    options = {
        "limit_patients": limit_patients,
        "without": list(left_out),
        "within_days": within_days,
        "min_gap": min_gap,
        "min_events": min_events,
        "max_events": max_events,
        "min_count": min_count,
    }
    with work_folder(out, "eicu", {"limit_patients": limit_patients, "version": 3, "block": BLOCK}) as work:
        _make(out, tables, options, workers, overwrite, work)
    return out


def _make(
    out: Path, tables: Mapping[str, Table], options: Mapping[str, Any], workers: int, overwrite: bool, work: WorkFolder
) -> None:
    flow = CohortFlow()
    limits = {name: options[name] for name in ("min_events", "max_events")}
    with ThreadPoolExecutor(1) as pool:
        files = pool.submit(describe_files, [table.path for table in tables.values()])
        stays = _limit(read_stays(tables["patient"], flow), options["limit_patients"], flow)
        labels = readmitted(stays, within_days=options["within_days"], min_gap=options["min_gap"])
        store = _read_events(tables, stays, workers, flow, work)
        vocabulary = store.vocabulary(options["min_count"])
        info = {
            "name": "eicu",
            "vocabularies": {"events": vocabulary.words},
            "settings": _settings(vocabulary, options["without"], **limits),
        }
        target = TargetSpec("binary", ("not readmitted", "readmitted"))
        with DatasetWriter(out, target, info, overwrite=overwrite) as writer:
            kept = _write(writer, store.blocks(vocabulary, **limits), stays, labels, flow, options["min_events"])
            _check_labels(labels[kept])
            writer.info |= provenance("eicu", files.result(), options, flow)


def prepare_for_prediction(
    raw: str | Path, vocabularies: Mapping[str, Sequence[str]], settings: Mapping[str, Any]
) -> tuple[dict[str, Column], pl.DataFrame]:
    """New unit stays as a trained model's inputs; whether the patient came back need not be known.

    Parameters
    ----------
    raw : path
    vocabularies, settings : dict
        ``info["vocabularies"]`` and ``info["settings"]`` of the training dataset. Codes that are not in its vocabulary
        count as unknown, and tables it did without are not read.

    Returns
    -------
    columns : dict
        ``event_kind``, ``event_time``, ``event_codes``, ``event_values`` and ``static``.
    rows : DataFrame
        ``patientunitstayid``, ``patienthealthsystemstayid``, ``uniquepid`` and ``order`` of each row.
    """
    if settings.get("source", "eicu") != "eicu":
        raise DataError(f"the model was trained on {settings['source']} data; these are eICU tables")
    left_out = settings.get("without", [])
    tables = find_tables(raw, ("patient", *EVENT_TABLES), source="eicu", without=left_out)
    flow = CohortFlow()
    stays = read_stays(tables["patient"], flow)
    store = EventStore(FIELDS, stays.height)
    for table in _event_tables(tables):
        EventReader(store, *_ids_and_ends(stays)).read(table)
    vocabulary = Vocabulary(list(vocabularies["events"]), list(settings["code_fields"]))
    limits = {"min_events": settings.get("min_events", 1), "max_events": settings.get("max_events")}
    samples, columns = join_blocks(store.blocks(vocabulary, **limits))
    if not len(samples):
        raise DataError(f"{raw}: no unit stay has an event, so there is nothing to predict from")
    rows = stays[samples].select("patientunitstayid", "patienthealthsystemstayid", "uniquepid", "order")
    return columns | {"static": _tensor(static_features(stays[samples]))}, rows


def _tensor(array: npt.NDArray[np.float32]) -> Column:
    import torch

    return torch.from_numpy(array)


def _check(
    limit: int | None, within_days: float, min_gap: float, min_events: int, max_events: int | None, min_count: int
) -> None:
    counts = {"limit_patients": limit, "min_events": min_events, "max_events": max_events, "min_count": min_count}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if max_events is not None and max_events < min_events:
        raise ConfigError(f"max_events ({max_events}) is smaller than min_events ({min_events})")
    if not within_days > 0 or not min_gap >= 0:
        raise ConfigError(f"within_days must be above 0 and min_gap not below 0; they are {within_days} and {min_gap}")


def _left_out_tables(without: Sequence[str]) -> list[str]:
    names = sorted({name.lower().replace("_", "") for name in without})
    for name in names:
        if name not in EVENT_TABLES:
            raise unknown_name("event table to do without", name, EVENT_TABLES)
    if len(names) == len(EVENT_TABLES):
        raise ConfigError("without any event table there is nothing to learn from: keep at least one")
    return names


def _limit(stays: pl.DataFrame, limit: int | None, flow: CohortFlow) -> pl.DataFrame:
    if limit is None:
        return stays
    kept = stays.filter(pl.col("uniquepid").rank("dense") <= limit)
    flow.add(f"limited to {limit} patients", patients=kept["uniquepid"].n_unique(), samples=kept.height)
    return kept


@dataclass(frozen=True)
class _TableTask:
    """A table to read: the stays' ids and last minutes ``(stays,)``, and where its rows are to be kept."""

    table: Table
    stays: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    place: Path


def _read_table(task: _TableTask) -> dict[str, Any]:
    """Read one table and keep its rows; returns their description and the counts by reason."""
    fields = [field for field in FIELDS if field.name in FIELDS_OF[task.table.name]]
    store = EventStore(fields, len(task.stays))
    counts = EventReader(store, task.stays, task.last).read(task.table)
    return {"counts": counts, **keep_events(store, task.place)}


def _read_events(
    tables: Mapping[str, Table], stays: pl.DataFrame, workers: int, flow: CohortFlow, work: WorkFolder
) -> EventStore:
    ids, last = _ids_and_ends(stays)
    tasks, jobs = [], []
    for table in _event_tables(tables):
        files = (table.path, tables["patient"].path)
        tasks.append(_TableTask(table, ids, last, work.room_for(table.name, files)))
        jobs.append(Job(table.name, files, tasks[-1]))
    store = EventStore(FIELDS, stays.height)
    for task, found in zip(tasks, run_jobs(_read_table, jobs, work, workers=workers, title="tables"), strict=True):
        flow.add(f"rows of {task.table.name}", **found["counts"])
        put_back(store, found, task.place)
    return store


def _event_tables(tables: Mapping[str, Table]) -> list[Table]:
    return [tables[name] for name in EVENT_TABLES if name in tables]


def _ids_and_ends(stays: pl.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return stays["patientunitstayid"].to_numpy(), stays["unitdischargeoffset"].fill_null(_NO_END).to_numpy()


def _settings(
    vocabulary: Vocabulary, without: Sequence[str], min_events: int, max_events: int | None
) -> dict[str, Any]:
    return {
        "source": "eicu",
        "event_kinds": list(KINDS),
        "code_fields": [field for field in vocabulary.fields if field["stop"] > field["start"]],
        "static_names": list(STATIC_NAMES),
        "without": list(without),
        "min_events": min_events,
        "max_events": max_events,
    }


def _write(
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
            writer.append_lasting(block.columns | {"static": static[rows]}, labels[rows], patients[rows], order[rows])
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
