"""MEDS: any dataset in the Medical Event Data Standard, with any of its label files as the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column
from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import ConfigError, DataError
from manydg.sources._events import EventBlock, EventStore, Field, Vocabulary, join_blocks
from manydg.sources._meds_events import STATIC_NAMES, Clock, read_events, survey
from manydg.sources._meds_shards import Shards
from manydg.sources._meds_tables import (
    data_files,
    label_files,
    read_labels,
    read_prediction_times,
    reading,
    scan_events,
)
from manydg.sources._provenance import CohortFlow, describe_files, provenance
from manydg.sources._resume import make_ready, states_of, work_folder
from manydg.sources._twin_meds import synthesize

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
            writer.info |= provenance("meds", described.result(), options, flow)
    return out


def _info(name: str, vocabulary: Vocabulary, kinds: str, min_events: int, max_events: int | None) -> dict[str, Any]:
    settings = {
        "source": "meds",
        "event_kinds": [field["name"] for field in vocabulary.fields],
        "code_fields": vocabulary.fields,
        "static_names": list(STATIC_NAMES),
        "kinds": kinds,
        "min_events": min_events,
        "max_events": max_events,
    }
    return {"name": name, "vocabularies": {"events": vocabulary.words}, "settings": settings}


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
            writer.append_lasting(block.columns | {"static": static[rows]}, codes[rows], patients[rows], hours[rows])
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
