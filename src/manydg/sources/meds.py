"""MEDS: any dataset in the Medical Event Data Standard, with any of its label files as the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from manydg.sources._events import EventStore, Field, Vocabulary, join_blocks
from manydg.sources._meds_events import OTHER, STATIC_NAMES, read_events
from manydg.sources._meds_tables import (
    data_files,
    label_files,
    read_labels,
    read_prediction_times,
    reading,
    scan_events,
)
from manydg.sources._provenance import CohortFlow, describe_files, provenance
from manydg.sources._resume import make_ready
from manydg.sources._twin_meds import synthesize

__all__ = ["prepare", "prepare_for_prediction", "synthesize"]

KIND_RULES = ("prefix", "one")
_MOST_KINDS = 32


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
        Accepted for the sake of one interface; polars uses its own threads.
    kinds : {"prefix", "one"}
        Whether what stands before ``//`` in a code is its kind of event, or all codes are of one kind.
    min_events, max_events, min_count : int
        As for eICU.

    Returns
    -------
    Path
        The dataset folder.
    """
    make_ready(Path(out), overwrite=overwrite)
    _check(kinds, limit_patients, min_events, max_events, min_count)
    files = data_files(raw)
    flow = CohortFlow()
    samples = _limit(read_labels(labels, flow), limit_patients, flow)
    spec, codes = _encode(samples["label"])
    events = scan_events(files)
    fields = _fields(events, raw, kinds)
    store = EventStore(fields, samples.height)
    clock = read_events(store, events, raw, samples, flow)
    vocabulary = store.vocabulary(min_count)
    info = {
        "name": Path(raw).resolve().name,
        "vocabularies": {"events": vocabulary.words},
        "settings": {
            "source": "meds",
            "event_kinds": [field.name for field in fields],
            "code_fields": vocabulary.fields,
            "static_names": list(STATIC_NAMES),
            "kinds": kinds,
            "min_events": min_events,
            "max_events": max_events,
        },
    }
    options = {
        "labels": Path(labels).name,
        "kinds": kinds,
        "limit_patients": limit_patients,
        "min_events": min_events,
        "max_events": max_events,
        "min_count": min_count,
    }
    with DatasetWriter(out, spec, info, overwrite=overwrite) as writer:
        patients, hours = samples["subject_id"].to_numpy(), clock.hours
        kept: list[npt.NDArray[np.int64]] = []
        for block in store.blocks(vocabulary, min_events=min_events, max_events=max_events, ticks_per_minute=60):
            rows = block.samples
            if len(rows):
                columns = block.columns | {"static": clock.static[rows]}
                writer.append(columns, codes[rows], patients[rows], hours[rows])
            kept.append(rows)
        chosen = np.concatenate(kept)
        if not len(chosen):
            raise DataError(f"no label has {min_events} or more events before it: is it the label file of these data?")
        step = f"samples with {min_events} or more events up to the prediction time"
        flow.add(step, patients=len(np.unique(patients[chosen])), samples=len(chosen))
        writer.info |= provenance("meds", describe_files([*files, *label_files(labels)]), options, flow)
    return Path(out)


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
    clock = read_events(store, events, raw, samples, CohortFlow())
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


def _fields(events: pl.LazyFrame, raw: str | Path, kinds: str) -> list[Field]:
    if kinds == "one":
        return [Field("event", 0)]
    with reading(raw):
        prefix = pl.col("code").str.split("//").list.first()
        frame = events.group_by(prefix.alias("prefix")).len().collect(engine="streaming")
    frame = frame.filter(pl.col("prefix").is_not_null()).sort(["len", "prefix"], descending=[True, False])
    names = sorted(frame["prefix"].head(_MOST_KINDS - 1))
    if frame.height > len(names):
        names.append(OTHER)
    return [Field(name, kind) for kind, name in enumerate(names)]
