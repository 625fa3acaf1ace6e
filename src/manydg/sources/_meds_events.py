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
