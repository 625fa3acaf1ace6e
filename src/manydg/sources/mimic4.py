"""MIMIC-IV: drugs prescribed in a hospital visit, or readmission to intensive care.

MIMIC-IV 2 and 3 (PhysioNet, credentialed access; the demo of 100 patients is open under the Open Database License 1.0),
the modules ``hosp`` and ``icu``. Johnson et al., "MIMIC-IV, a freely accessible electronic health record dataset",
Scientific Data 10, 2023. Visits are read as those of MIMIC-III and stays as those of eICU; what differs is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl

from manydg.errors import ConfigError, DataError
from manydg.sources import NewSamples, Reporter, Source, SourceDocs, TrainedOn, option
from manydg.sources._events import EventStore, Field
from manydg.sources._preparing import CohortFlow, make_ready
from manydg.sources._stays import NO_TIME, EventReader, StayCohort, StayOptions
from manydg.sources._tables import Array, SampleIndex, Table, find_tables, table_names
from manydg.sources._visits import (
    TABLES,
    DrugMapOptions,
    IcdColumns,
    VisitCohort,
    VisitOptions,
    find_drug_mapping,
    find_new_tables,
    read_icd,
)

ICD = IcdColumns("icd_code", "icd_version")
KINDS = ("diagnosis", "lab", "medication", "chart", "procedure")
FIELDS_OF = {
    "diagnoses_icd": (Field("diagnosis_icd", 0),),
    "labevents": (Field("lab", 1),),
    "prescriptions": (Field("medication", 2),),
    "chartevents": (Field("chart", 3),),
    "procedures_icd": (Field("procedure_icd", 4),),
    "procedureevents": (Field("procedure", 4),),
}
EVENT_TABLES = tuple(FIELDS_OF)
ICU_TABLES = ("icustays", "chartevents", "procedureevents")
_RACES = {
    "white": "caucasian",
    "black": "african american",
    "hispanic": "hispanic",
    "south american": "hispanic",
    "asian": "asian",
    "american indian": "native american",
}
_TIME = "%Y-%m-%d %H:%M:%S"
_EXAMPLE = "2180-07-23 14:00:00"
_MINUTE_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Mimic4Options(VisitOptions, StayOptions):
    """What is predicted, and the options of the one task or the other."""

    event_tables: ClassVar = EVENT_TABLES
    task: str = option(help="What to predict: drugs or readmission.", choices=("drugs", "readmission"))

    def __post_init__(self) -> None:
        super().__post_init__()
        other = StayOptions if self.task == "drugs" else VisitOptions
        own = {entry.name for entry in fields(VisitOptions if self.task == "drugs" else StayOptions)}
        for entry in fields(other):
            if entry.name not in own and getattr(self, entry.name) != entry.default:
                raise ConfigError(f"{entry.name} is not an option of --task {self.task}: leave it out")
        if self.task == "drugs" and self.ndc_map is None:
            raise ConfigError(
                "the drugs need a mapping from NDC to ATC: name a CSV table with the columns ndc and atc (--ndc-map), "
                "or choose --task readmission"
            )


class Mimic4(Source[Mimic4Options, DrugMapOptions]):
    """Hospital visits and their drugs, or stays in intensive care as events.

    A folder holds ``hosp`` and ``icu`` as PhysioNet distributes them, or the tables of both, ``.csv`` or ``.csv.gz``.
    """

    name = "mimic4"
    options_class = Mimic4Options
    prediction_options_class = DrugMapOptions
    docs = SourceDocs(
        predicts="drugs of a hospital visit, or return to intensive care",
        target="many labels, or yes or no",
        page="[mimic4](datasets/mimic4.md)",
        task="drug recommendation, readmission",
        files="[MIMIC-IV](docs/datasets/mimic4.md), full or demo",
    )

    def looks_like(self, folder: Path) -> bool:
        hospital = _module(folder, "hosp")
        return hospital != folder and len({*TABLES, "patients", "labevents"} & table_names(hospital)) >= 2

    def prepare(
        self, raw: Path, out: Path, options: Mimic4Options, *, workers: int = 1, overwrite: bool = False
    ) -> Path:
        make_ready(out, overwrite=overwrite)
        raw = raw.absolute()
        if options.task == "drugs":
            visits = self._visits(find_tables(_module(raw, "hosp"), TABLES, source=self.name))
            return visits.prepare(raw, out, options, workers=workers, overwrite=overwrite)
        tables = self._stay_tables(raw, options.without)
        read = partial(read_stays, tables)
        return self._stays(tables).prepare(raw, out, read, options, workers=workers, overwrite=overwrite)

    def for_prediction(self, raw: Path, trained: TrainedOn, options: DrugMapOptions) -> Iterator[NewSamples]:
        """Every visit with a diagnosis and a procedure, or every stay with enough events; no label need be known."""
        self.check_trained_on(trained)
        if trained.settings["task"] == "drugs":
            visits = self._visits(find_new_tables(_module(raw, "hosp"), self.name))
            yield visits.for_prediction(raw, trained, options.ndc_map)
            return
        tables = self._stay_tables(raw, trained.settings.get("without", []))
        yield self._stays(tables).for_prediction(raw, trained, read_stays(tables, CohortFlow()))

    def options_for(self, raw: Path, nearby: Path, report: Reporter) -> Mimic4Options:
        """Drugs, with any mapping of drugs that lies with the tables, or nearby."""
        return Mimic4Options(task="drugs", ndc_map=find_drug_mapping(self.name, raw, nearby))

    def _visits(self, tables: Mapping[str, Table]) -> VisitCohort:
        return VisitCohort(self.name, tables, ICD, {"task": "drugs"})

    def _stays(self, tables: Mapping[str, Table]) -> StayCohort:
        return StayCohort(self.name, tables, StayEventReader, "stay_id", {"task": "readmission"})

    def _stay_tables(self, raw: Path, without: Sequence[str]) -> dict[str, Table]:
        wanted = ("patients", "admissions", *EVENT_TABLES)
        find = partial(find_tables, source=self.name, optional=EVENT_TABLES)
        hospital = [name for name in wanted if name not in ICU_TABLES]
        of_icu = find(_module(raw, "icu"), ICU_TABLES, without=without)
        return find(_module(raw, "hosp"), hospital, without=without) | of_icu


def _module(raw: Path, name: str) -> Path:
    """The folder of a module of the database, or the folder itself where all tables are together."""
    return raw / name if (raw / name).is_dir() else raw


# Stays in intensive care


def read_stays(tables: Mapping[str, Table], flow: CohortFlow) -> pl.DataFrame:
    """Stays in the order of their patients, and of time within a patient.

    - returns: As :func:`manydg.sources.eicu.read_stays` gives them; ``scope`` is the patient, ``start`` counts the
      minutes from one moment for all, and ``time`` the hours since the patient's first stay. ``earlier`` and
      ``earlier_minute`` are the admissions that had ended when the stay began, and when they ended, before it.
    """
    table, ids = tables["icustays"], ["subject_id", "hadm_id", "stay_id"]
    rows = table.collect(integers=ids, texts=["intime", "outtime"])
    known = rows.drop_nulls(ids)
    unique = table.distinct(known, "stay_id", "subject_id", flow, "stays in the table", rows.height - known.height)
    start, end = _minutes("intime"), _minutes("outtime")
    timed = unique.with_columns(start=start, length=end - start).drop_nulls("start")
    if timed.is_empty():
        raise DataError(f"{table.path}: none of {unique.height} stays has an intime such as {_EXAMPLE}")
    forward = timed.filter((pl.col("length") >= 0).fill_null(True))
    left_out = {"without_time": unique.height - timed.height, "end_before_start": timed.height - forward.height}
    counts = {f"left_out_{reason}": count for reason, count in left_out.items()}
    flow.count("stays that begin at a known time and end after it", forward["subject_id"], **counts)
    return _ordered(_described(forward, tables))


def _described(stays: pl.DataFrame, tables: Mapping[str, Table]) -> pl.DataFrame:
    """Stays with age, gender and ethnicity in eICU's words, and the admissions that had ended before."""
    people = tables["patients"].collect(integers=["subject_id", "anchor_age", "anchor_year"], texts=["gender"])
    texts = ["admittime", "dischtime", "race" if "race" in tables["admissions"].columns else "ethnicity"]
    admissions = tables["admissions"].collect(integers=["subject_id", "hadm_id"], texts=texts)
    admissions = admissions.unique("hadm_id", keep="first")
    year = pl.from_epoch(pl.col("start") * 60).dt.year()
    age = pl.col("anchor_age") + year - pl.col("anchor_year")
    race = pl.col(texts[-1]).str.strip_chars().str.to_lowercase()
    group = pl.lit("other/unknown")
    for begins, name in _RACES.items():
        group = pl.when(race.str.starts_with(begins)).then(pl.lit(name)).otherwise(group)
    stays = stays.join(people.unique("subject_id", keep="first"), on="subject_id", how="left")
    stays = stays.join(admissions.select("hadm_id", race), on="hadm_id", how="left")
    stays = stays.with_columns(
        age=pl.when(age > 89).then(pl.lit("> 89")).otherwise(age.cast(pl.String)),
        gender=pl.col("gender").str.strip_chars().replace({"M": "male", "F": "female"}),
        ethnicity=pl.when(race.is_not_null()).then(group),
    )
    ended = admissions.select("subject_id", earlier="hadm_id", end=_minutes("dischtime")).drop_nulls()
    before = stays.select("subject_id", "stay_id", "start").join(ended, on="subject_id")
    before = before.with_columns(earlier_minute=pl.col("end") - pl.col("start")).filter(pl.col("earlier_minute") <= 0)
    earlier = before.group_by("stay_id").agg(pl.col("earlier", "earlier_minute").sort_by("earlier"))
    return stays.join(earlier, on="stay_id", how="left")


def _ordered(stays: pl.DataFrame) -> pl.DataFrame:
    first = pl.col("start").first().over("subject_id")
    return stays.sort("subject_id", "start", "stay_id").select(
        "start", "length", "age", "gender", "ethnicity", "earlier", "earlier_minute", patient="subject_id",
        scope="subject_id", stay="stay_id", order=pl.int_range(pl.len()).over("subject_id"),
        time=(pl.col("start") - first) / 60.0,
    )  # fmt: skip


def _minutes(column: str) -> pl.Expr:
    """Minutes since 1970, null for what is no time."""
    time = pl.col(column).str.strip_chars().str.to_datetime(_TIME, strict=False, time_unit="us")
    return time.dt.epoch("s").floordiv(60)


class StayEventReader(EventReader):
    """Reads the event tables of MIMIC-IV.

    Tables of ``icu`` name the stay. A row of ``labevents`` or ``prescriptions`` belongs to the patient's stay in which
    it happened. Diagnoses and procedures are coded after discharge, so that those of an admission are known in later
    admissions alone.
    """

    kinds = KINDS
    fields_of: ClassVar[Mapping[str, tuple[Field, ...]]] = FIELDS_OF

    def __init__(self, store: EventStore, stays: pl.DataFrame) -> None:
        super().__init__(store, stays)
        patients, self._start = stays["patient"].unique().sort(), stays["start"].to_numpy()
        self._patient_of = SampleIndex(patients.to_numpy())
        self._moments = self._moment(self._patient_of(stays["patient"].to_numpy()), self._start)
        self._earlier = stays.select("earlier", "earlier_minute").with_row_index("sample").drop_nulls()

    def read(self, table: Table) -> dict[str, int]:
        counts = super().read(table)
        timeless = counts.get("left_out_without_time", 0)
        if timeless and timeless == counts["rows"] - counts["left_out_other_stay"]:
            raise DataError(f"{table.path}: no row has a time such as {_EXAMPLE}")
        return counts

    def _readers(self) -> dict[str, Callable[[Table], dict[str, int]]]:
        return {
            "diagnoses_icd": self._codes,
            "procedures_icd": self._codes,
            "labevents": lambda table: self._valued(table, "charttime", "itemid", ("value", "valuenum")),
            "chartevents": lambda table: self._valued(table, "charttime", "itemid", ("valuenum",)),
            "prescriptions": lambda table: self._valued(table, "starttime", "drug", ("dose_val_rx",)),
            "procedureevents": lambda table: self._plain(table, "starttime", "itemid"),
        }

    def _ids(self, table: Table, time: str) -> list[str]:
        return ["stay_id" if table.name in ICU_TABLES else "subject_id"]

    def _scan(self, table: Table, time: str, texts: Sequence[str]) -> pl.LazyFrame:
        scan = table.scan(integers=self._ids(table, time), texts=[time, *texts])
        return scan.with_columns(_minutes(time).alias(time))

    def _locate(self, batch: pl.DataFrame, time: str) -> tuple[Array, Array]:
        when, known = batch[time].fill_null(0).to_numpy(), batch[time].is_not_null().to_numpy()
        if "stay_id" in batch.columns:
            sample = self._index(batch["stay_id"].fill_null(-1).to_numpy())
        else:
            sample = self._stay_at(batch["subject_id"].fill_null(-1).to_numpy(), np.where(known, when, NO_TIME))
        return sample, np.where(known, when - self._start[sample], NO_TIME)

    def _stay_at(self, subject: Array, when: Array) -> Array:
        """The patient's last stay that had begun; without a time, the last of all; -1 where there is none."""
        patient = self._patient_of(subject)
        latest = np.where(when == NO_TIME, (1 << (_MINUTE_BITS - 1)) - 1, when)
        at = np.searchsorted(self._moments, self._moment(patient, latest), side="right") - 1
        own = (patient >= 0) & (at >= 0) & (self._moments[at] >> _MINUTE_BITS == patient)
        return np.where(own, at, -1)

    @staticmethod
    def _moment(patient: Array, minute: Array) -> Array:
        """Numbers that order patients, and times within a patient; minutes may lie before 1970."""
        moment: Array = (patient.astype(np.int64) << _MINUTE_BITS) + minute + (1 << (_MINUTE_BITS - 1))
        return moment

    def _codes(self, table: Table) -> dict[str, int]:
        (field,) = self.fields_of[table.name]
        rows = read_icd(table, ICD, ["hadm_id"])
        coded = rows.drop_nulls()
        ended = self._earlier.explode("earlier", "earlier_minute").rename({"earlier": "hadm_id"})
        joined = coded.join(ended, on="hadm_id")
        # A code of several admissions counts once, for the last of them.
        latest = joined.group_by("sample", "code").agg(pl.col("earlier_minute").max()).sort("sample", "code")
        word = self._store.word_ids(field.name, latest["code"])
        minute = latest["earlier_minute"].to_numpy().astype(np.int32)
        self._store.add(field.name, latest["sample"].to_numpy().astype(np.int64), minute, word)
        left = coded.join(ended, on="hadm_id", how="anti").height
        return {
            "rows": rows.height,
            "left_out_without_code": rows.height - coded.height,
            "left_out_no_later_stay": left,
            "events_of_earlier_admissions": latest.height,
        }
