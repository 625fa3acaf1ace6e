"""eICU: readmission to intensive care.

The eICU Collaborative Research Database 2.0 (PhysioNet, credentialed access; the demo of 2,500 unit stays is open under
the Open Database License 1.0): whether another stay in intensive care follows within 15 days is predicted from the
events of this one. Pollard et al., "The eICU Collaborative Research Database, a freely available multi-center database
for critical care research", Scientific Data 5, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import DataError
from manydg.sources import NewSamples, Options, PublishedCounts, Reporter, Source, SourceDocs, TrainedOn
from manydg.sources._events import Field, ranges
from manydg.sources._preparing import CohortFlow, make_ready
from manydg.sources._stays import NO_TIME, EventReader, StayCohort, StayOptions, category, clean, count
from manydg.sources._tables import Array, CategoryMap, Table, find_tables, parse_doses, table_names

KINDS = ("diagnosis", "lab", "medication", "physical_exam", "treatment")
FIELDS_OF = {
    "diagnosis": (Field("diagnosis_string", 0), Field("diagnosis_icd", 0)),
    "lab": (Field("lab", 1),),
    "medication": (Field("medication", 2), Field("medication_frequency", 2)),
    "physicalexam": (Field("physical_exam", 3),),
    "treatment": (Field("treatment", 4),),
}
EVENT_TABLES = tuple(FIELDS_OF)
_STAY, _SITE = "patientunitstayid", "hospitalid"
_INTEGERS = (
    *(_STAY, "patienthealthsystemstayid", "hospitaladmitoffset", "unitdischargeoffset"),
    *("unitvisitnumber", "hospitaldischargeyear"),
)
_TEXTS = ["uniquepid", "age", "gender", "ethnicity"]


@dataclass(frozen=True)
class EicuOptions(StayOptions):
    """The same, of eICU's tables."""

    event_tables: ClassVar = EVENT_TABLES


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
        cohort = StayCohort(self.name, tables, UnitEventReader, _STAY)
        read = partial(read_stays, tables["patient"])
        return cohort.prepare(raw, out, read, options, workers=workers, overwrite=overwrite)

    def for_prediction(self, raw: Path, trained: TrainedOn, options: Options) -> Iterator[NewSamples]:
        """Every unit stay with enough events; whether the patient came back need not be known.

        Codes that are not in the vocabulary count as unknown, and tables that training did without are not read.
        """
        self.check_trained_on(trained)
        tables = _find(raw, trained.settings.get("without", []))
        cohort = StayCohort(self.name, tables, UnitEventReader, _STAY)
        yield cohort.for_prediction(raw, trained, read_stays(tables["patient"], CohortFlow()))

    def options_for(self, raw: Path, nearby: Path, report: Reporter) -> EicuOptions:
        """Without the event tables that are not there."""
        absent = tuple(name for name in EVENT_TABLES if name not in table_names(raw))
        if absent:
            report(f"{self.name}: done without the tables {', '.join(absent)}, which are not in {raw}")
        return EicuOptions(without=absent)


def _find(raw: Path, without: Sequence[str]) -> dict[str, Table]:
    return find_tables(raw, ("patient", *EVENT_TABLES), source=Eicu.name, optional=EVENT_TABLES, without=without)


# Unit stays: who and when


def read_stays(table: Table, flow: CohortFlow) -> pl.DataFrame:
    """Unit stays in the order of their patients, and of admission within a patient.

    - returns: A row a stay: ``patient``, ``stay``, ``scope`` (the hospital stay), ``start`` (minutes since the hospital
      admission), ``length`` (minutes), ``order`` (the stay's position among its patient's, from 0), ``time`` (the same,
      but equal for the hospital stays of one year, whose order is not known), ``age``, ``gender`` and ``ethnicity``.
    """
    texts = [*_TEXTS, *([_SITE] if _SITE in table.columns else [])]
    rows = table.collect(integers=_INTEGERS, texts=texts)
    known = rows.drop_nulls([_STAY, "patienthealthsystemstayid", "hospitaladmitoffset", "uniquepid"])
    nameless = rows.height - known.height
    stays = table.distinct(known, _STAY, "uniquepid", flow, "unit stays in the table", nameless)
    forward = stays.filter((pl.col("unitdischargeoffset") >= 0).fill_null(True))
    backward = stays.height - forward.height
    flow.count("unit stays that end after they start", forward["uniquepid"], left_out_end_before_start=backward)
    if forward.is_empty():
        raise DataError(f"{table.path} holds no usable unit stay: download it again")
    order = ["uniquepid", "hospitaldischargeyear", "patienthealthsystemstayid", "start", "unitvisitnumber", _STAY]
    return _in_neutral_words(forward.with_columns(start=-pl.col("hospitaladmitoffset")).sort(order, nulls_last=True))


def _in_neutral_words(ordered: pl.DataFrame) -> pl.DataFrame:
    """The columns that stays of any database have."""
    order = pl.int_range(pl.len()).over("uniquepid")
    # Which of a year's hospital stays came first is not known: their unit stays have one time, so that none is earlier.
    year = ("uniquepid", "hospitaldischargeyear")
    unknown = pl.col("patienthealthsystemstayid").n_unique().over(year) > 1
    ordered = ordered.with_columns(order=order).with_columns(
        known=pl.when(unknown).then(pl.col("order").min().over(year)).otherwise("order")
    )
    site = {"site": _SITE} if _SITE in ordered.columns else {}
    return ordered.select(
        "start", "age", "gender", "ethnicity", patient="uniquepid", stay=_STAY, scope="patienthealthsystemstayid",
        length="unitdischargeoffset", order="order", time=pl.col("known").cast(pl.Float64), **site,
    )  # fmt: skip


# The event tables


class UnitEventReader(EventReader):
    """Reads the event tables of eICU, whose rows name the stay and count minutes from its start."""

    kinds = KINDS
    fields_of: ClassVar[Mapping[str, tuple[Field, ...]]] = FIELDS_OF

    def _readers(self) -> dict[str, Callable[[Table], dict[str, int]]]:
        return {
            "diagnosis": self._diagnoses,
            "lab": lambda table: self._valued(table, "labresultoffset", "labname", ("labresulttext", "labresult")),
            "medication": self._medications,
            "physicalexam": lambda table: self._plain(table, "physicalexamoffset", "physicalexampath"),
            "treatment": lambda table: self._plain(table, "treatmentoffset", "treatmentstring"),
        }

    def _ids(self, table: Table, time: str) -> list[str]:
        return [_STAY, time]

    def _locate(self, batch: pl.DataFrame, time: str) -> tuple[Array, Array]:
        return self._index(batch[_STAY].fill_null(-1).to_numpy()), batch[time].fill_null(NO_TIME).to_numpy()

    def _diagnoses(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        strings = self._words("diagnosis_string")
        icd = _CodeLists(lambda words: self._store.word_ids("diagnosis_icd", clean(words)))
        texts = ["diagnosisstring", "icd9code"]
        columns = [category("diagnosisstring"), category("icd9code")]
        for kept in self._batches(table, "diagnosisoffset", columns, texts, counts):
            ids = strings(kept.batch["diagnosisstring"])[kept.rows]
            count(counts, "left_out_without_name", ids < 0)
            self._store.add("diagnosis_string", kept.sample, kept.minute, ids)
            row, codes = icd(kept.batch["icd9code"], kept.rows)
            self._store.add("diagnosis_icd", kept.sample[row], kept.minute[row], codes)
        return counts

    def _medications(self, table: Table) -> dict[str, int]:
        counts: dict[str, int] = {}
        names, often = self._words("medication"), self._words("medication_frequency")
        # Two in five orders lack a name; the HICL number identifies the drug just as well.
        numbers = CategoryMap(lambda words: self._store.word_ids("medication", _hicl_names(words)), np.int32)
        doses = CategoryMap(lambda texts: parse_doses(texts).fill_null(np.nan).to_numpy(), np.float32)
        cancelled = CategoryMap(lambda texts: clean(texts).eq("yes").to_numpy(), np.bool_)
        wanted = ["drugname", "drughiclseqno", "dosage", "frequency", "drugordercancelled"]
        columns = [pl.col("drugname").is_null().alias("nameless"), *map(category, wanted)]
        for kept in self._batches(table, "drugstartoffset", columns, wanted, counts):
            dropped = cancelled(kept.batch["drugordercancelled"])[kept.rows]
            by_number = numbers(kept.batch["drughiclseqno"])
            ids = np.where(kept.batch["nameless"].to_numpy(), by_number, names(kept.batch["drugname"]))[kept.rows]
            dose = doses(kept.batch["dosage"])[kept.rows]
            named, ids = (ids >= 0) & ~dropped, np.where(dropped, -1, ids)
            count(counts, "left_out_cancelled", dropped)
            count(counts, "left_out_without_name", ~named & ~dropped)
            count(counts, "doses_missing", named & np.isnan(dose))
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


def _hicl_names(numbers: pl.Series) -> pl.Series:
    """What drugs are called that only have a number; no number, no name."""
    plain = numbers.str.strip_chars().str.strip_suffix(".0")
    return clean(pl.select(pl.when(plain != "").then(pl.format("hicl {}", plain))).to_series())
