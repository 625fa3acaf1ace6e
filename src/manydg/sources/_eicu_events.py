"""The five kinds of events in eICU's tables, read in batches into an EventStore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import DataError
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
EVENT_TABLES = ("diagnosis", "lab", "medication", "physicalexam", "treatment")
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
    ) -> Iterator[tuple[pl.DataFrame, Array, Array]]:
        """Batches of rows that belong to a known stay and to its time: the rows, their samples and their minutes."""
        integers = [_STAY, time]
        scan = table.scan(integers=integers, texts=texts).select(*integers, *columns)
        counts |= {"rows": 0, "left_out_other_stay": 0, "left_out_without_time": 0, "left_out_after_discharge": 0}
        with table.reading(integers):
            for batch in scan.collect_batches(chunk_size=_BATCH, engine="streaming"):
                counts["rows"] += batch.height
                sample = self._index(batch[_STAY].fill_null(-1).to_numpy())
                minute = batch[time].fill_null(_NO_TIME).to_numpy()
                known, timed = sample >= 0, (minute > _NO_TIME) & (np.abs(minute) < 1 << 30)
                in_time = minute <= self._last[sample]
                keep = known & timed & in_time
                if not keep.all():
                    counts["left_out_other_stay"] += int((~known).sum())
                    counts["left_out_without_time"] += int((known & ~timed).sum())
                    counts["left_out_after_discharge"] += int((known & timed & ~in_time).sum())
                    batch, sample, minute = batch.filter(pl.Series(keep)), sample[keep], minute[keep]
                yield batch, sample, minute.astype(np.int32)

    def _words(self, field: str) -> CategoryMap:
        return CategoryMap(lambda words: self._store.word_ids(field, _clean(words)), np.int32)

    def _plain(self, table: Table, time: str, column: str, field: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        words = self._words(field)
        for batch, sample, minute in self._batches(table, time, [_category(column)], [column], counts):
            ids = words(batch[column])
            _count(counts, "left_out_without_name", ids < 0)
            self._store.add(field, sample, minute, ids)
        return counts

    def _exams(self, table: Table) -> dict[str, int]:
        return self._plain(table, "physicalexamoffset", "physicalexampath", "physical_exam")

    def _treatments(self, table: Table) -> dict[str, int]:
        return self._plain(table, "treatmentoffset", "treatmentstring", "treatment")

    def _diagnoses(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        strings = self._words("diagnosis_string")
        texts = ["diagnosisstring", "icd9code"]
        columns = [_category("diagnosisstring"), pl.col("icd9code")]
        for batch, sample, minute in self._batches(table, "diagnosisoffset", columns, texts, counts):
            ids = strings(batch["diagnosisstring"])
            _count(counts, "left_out_without_name", ids < 0)
            self._store.add("diagnosis_string", sample, minute, ids)
            split = batch.select(pl.col("icd9code").str.split(",")).with_row_index("row").explode("icd9code")
            icd = self._store.word_ids("diagnosis_icd", _clean(split["icd9code"]))
            row = split["row"].to_numpy()
            self._store.add("diagnosis_icd", sample[row], minute[row], icd)
        return counts

    def _labs(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        names, texts = self._words("lab"), CategoryMap(_numbers, np.float32)
        number = pl.col("labresult").cast(pl.Float32, strict=False)
        number = pl.when(number.is_finite()).then(number).alias("number")
        columns = [_category("labname"), number, pl.col("labresult"), pl.col("labresulttext")]
        wanted = ["labname", "labresult", "labresulttext"]
        category = pl.Categorical(pl.Categories.random())
        for batch, sample, minute in self._batches(table, "labresultoffset", columns, wanted, counts):
            value = batch["number"].fill_null(np.nan).to_numpy().copy()
            unread = np.isnan(value)
            written = pl.coalesce("labresulttext", "labresult").fill_null("").cast(category)
            value[unread] = texts(batch.filter(pl.Series(unread)).select(written).to_series())
            ids = names(batch["labname"])
            _count(counts, "left_out_without_name", ids < 0)
            _count(counts, "values_from_text", unread & ~np.isnan(value))
            _count(counts, "values_missing", np.isnan(value))
            self._store.add("lab", sample, minute, ids, value)
        return counts

    def _medications(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        names, often = self._words("medication"), self._words("medication_frequency")
        doses = CategoryMap(_doses, np.float32)
        # Two in five orders lack a name; the HICL number identifies the drug just as well.
        number = pl.col("drughiclseqno").str.strip_chars().str.strip_suffix(".0")
        name = pl.coalesce("drugname", pl.format("hicl {}", number))
        cancelled = pl.col("drugordercancelled").str.strip_chars().str.to_lowercase().eq("yes").fill_null(False)
        columns = [_category(name, "name"), _category("dosage"), _category("frequency"), cancelled.alias("cancelled")]
        wanted = ["drugname", "drughiclseqno", "dosage", "frequency", "drugordercancelled"]
        for batch, sample, minute in self._batches(table, "drugstartoffset", columns, wanted, counts):
            dropped = batch["cancelled"].to_numpy()
            _count(counts, "left_out_cancelled", dropped)
            batch, sample, minute = batch.filter(pl.Series(~dropped)), sample[~dropped], minute[~dropped]
            ids, dose = names(batch["name"]), doses(batch["dosage"])
            named = ids >= 0
            _count(counts, "left_out_without_name", ~named)
            _count(counts, "doses_missing", named & np.isnan(dose))
            self._store.add("medication", sample, minute, ids, dose)
            frequency = np.where(named, often(batch["frequency"]), -1)
            self._store.add("medication_frequency", sample, minute, frequency)
        return counts


_NO_TIME = -(1 << 62)


def _category(column: str | pl.Expr, name: str | None = None) -> pl.Expr:
    """A text column as categories numbered on their own; null becomes the empty text."""
    expression = pl.col(column) if isinstance(column, str) else column
    filled = expression.fill_null("").cast(pl.Categorical(pl.Categories.random()))
    return filled if name is None else filled.alias(name)


def _clean(words: pl.Series) -> pl.Series:
    """Case and outer spaces make no difference, neither in the vocabulary nor when it is looked up."""
    return words.str.strip_chars().str.to_lowercase()


def _count(counts: dict[str, int], name: str, mask: Array) -> None:
    counts[name] = counts.get(name, 0) + int(mask.sum())


def _numbers(texts: pl.Series) -> Array:
    return parse_numbers(texts).fill_null(np.nan).to_numpy()


def _doses(texts: pl.Series) -> Array:
    return parse_doses(texts).fill_null(np.nan).to_numpy()
