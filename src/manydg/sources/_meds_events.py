"""MEDS events read in batches into an EventStore, each sample up to its prediction time and never beyond."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.sources._event_rows import ranges
from manydg.sources._events import EventStore
from manydg.sources._lookup import Array, CategoryMap, SampleIndex
from manydg.sources._meds_tables import BIRTH, reading
from manydg.sources._provenance import CohortFlow

OTHER = "<other>"
STATIC_NAMES = ("age_over_100", "age_missing")
_BATCH = 250_000
_SECOND = 1_000_000
_HOUR = 3600 * _SECOND
_CENTURY = 100 * 365.25 * 24 * _HOUR
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Clock:
    """What is known of each sample's time.

    Parameters
    ----------
    hours : array ``(samples,)``
        From the subject's first event to the prediction.
    static : array ``(samples, 2)``
        Age at the prediction in hundreds of years, 0 where birth is not known, and a flag that says so.
    """

    hours: npt.NDArray[np.float64]
    static: npt.NDArray[np.float32]


def read_events(
    store: EventStore, events: pl.LazyFrame, place: str | Path, samples: pl.DataFrame, flow: CohortFlow
) -> Clock:
    """Read all events of the samples' subjects.

    Parameters
    ----------
    store : EventStore
        Its fields are the kinds of events; times go in as seconds before the prediction.
    events : LazyFrame
        ``subject_id``, ``time``, ``code``, ``numeric_value``.
    place : path
        Where they lie, for messages.
    samples : DataFrame
        ``subject_id`` and ``prediction_time``, sorted by subject.
    """
    subjects, begins, counts = np.unique(samples["subject_id"].to_numpy(), return_index=True, return_counts=True)
    when = samples["prediction_time"].dt.epoch("us").to_numpy()
    first, birth = _first_and_birth(events, place, subjects)
    beginning = np.where(first == _NEVER, when[begins], np.minimum(first, when[begins]))
    index = SampleIndex(subjects)
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
            stamp = np.where(stamp == _NEVER, beginning[subject], stamp)
            row = np.repeat(np.arange(len(subject)), counts[subject])
            sample = ranges(begins[subject], counts[subject])
            seen = stamp[row] <= when[sample]
            noted["left_out_after_prediction"] += int((~seen).sum())
            row, sample = row[seen], sample[seen]
            second = np.floor_divide(stamp[row] - when[sample], _SECOND)
            field, word = fields(batch["code"])[row], words(batch["code"])[row]
            noted["left_out_unknown_kind"] += int((field < 0).sum())
            number = batch["numeric_value"].fill_null(np.nan).to_numpy()[row]
            for at in np.unique(field[field >= 0]):
                of = field == at
                store.add(store.fields[at].name, sample[of], second[of], word[of], _finite(number[of]))
    noted["left_out_other_subject"] += noted["rows"]
    flow.add("rows of the data", **noted)
    hours = (when - np.repeat(beginning, counts)) / _HOUR
    return Clock(hours, _static(when, np.repeat(birth, counts)))


def _first_and_birth(
    events: pl.LazyFrame, place: str | Path, subjects: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Microseconds of each subject's first event and of birth, ``(subjects,)`` each."""
    time, code = pl.col("time").dt.epoch("us"), pl.col("code")
    wanted = pl.LazyFrame({"subject_id": subjects})
    born = time.filter((code == BIRTH) | code.str.starts_with(f"{BIRTH}//")).min()
    with reading(place):
        found = events.group_by("subject_id").agg(first=time.min(), birth=born)
        frame = wanted.join(found, on="subject_id", how="left", maintain_order="left").collect()
    return frame["first"].fill_null(_NEVER).to_numpy(), frame["birth"].fill_null(_NEVER).to_numpy()


def _static(when: npt.NDArray[np.int64], birth: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    known = (birth != _NEVER) & (birth <= when)
    age = np.where(known, (when - np.where(known, birth, when)) / _CENTURY, 0.0)
    return np.stack([age, ~known], axis=1).astype(np.float32)


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
