"""The five kinds of events in eICU's tables, read in batches into an EventStore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import DataError
from manydg.sources._event_rows import ranges
from manydg.sources._events import EventStore, Field
from manydg.sources._labs import parse_doses, parse_numbers
from manydg.sources._lookup import Array, CategoryMap, SampleIndex
from manydg.sources._tables import Table

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
_STAY = "patientunitstayid"
_BATCH = 250_000


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


_FAR = 1 << 30
_NO_TIME = -(1 << 62)


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
