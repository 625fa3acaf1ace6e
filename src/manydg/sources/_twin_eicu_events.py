"""The event tables of a synthetic eICU, and what its patients have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from manydg.sources._twin_tables import (
    FACTORS,
    CodeModel,
    CsvFiles,
    FloatArray,
    IntArray,
    blank_out,
    pick,
    repeat_rows,
    words,
)

STATES = 6
_LABS, _DRUGS, _DIAGNOSES, _TREATMENTS, _EXAMS = 158, 400, 600, 400, 460
_ROWS_A_STAY = {"lab": 195, "medication": 36, "physicalExam": 46, "treatment": 18, "diagnosis": 13}
_ODD_RESULTS = ["<0.02", "> 90 %", "neg", "1,000", "0-2", ">16.00", "<10", "2.0  "]
_DOSES: list[str | None] = ["40 mg", "4 MG", "PYXIS", "1,000 mL", "5 3", "650 mg", "1-2 mg", None]
_FREQUENCIES: list[str | None] = ["Once", "DAILY", "Daily", "BID", "Q4H PRN", "Continuous", ".STK-MED", None]


@dataclass(frozen=True)
class World:
    """The parts of the model that all patients share."""

    models: dict[str, CodeModel]
    names: dict[str, pl.Series]
    icd: pl.Series
    lab_level: FloatArray
    lab_of_patient: FloatArray
    lab_of_state: FloatArray

    @staticmethod
    def make(rng: np.random.Generator) -> World:
        sizes = {
            "lab": _LABS,
            "medication": _DRUGS,
            "physicalExam": _EXAMS,
            "treatment": _TREATMENTS,
            "diagnosis": _DIAGNOSES,
        }
        names = {name: pl.Series(words(name, size, rng)) for name, size in sizes.items()}
        names["lab"] = pl.Series([f"lab test {number}" for number in range(_LABS)])
        drugs = [f"DRUG {number // 2} {'5 MG PO TABS' if number % 2 else 'IV SOLN'}" for number in range(_DRUGS)]
        names["medication"] = pl.Series(drugs)
        root = "notes/Progress Notes/Physical Exam/Physical Exam/"
        names["physicalExam"] = pl.Series([f"{root}System {n // 20}/Finding {n}" for n in range(_EXAMS)])
        icd = [f"{n % 900 + 1}.{n % 10}, {'ABCIJKN'[n % 7]}{n % 90 + 10}.{n % 9}" for n in range(_DIAGNOSES)]
        return World(
            {name: CodeModel(rng, size, STATES) for name, size in sizes.items()},
            names,
            pl.Series(icd),
            rng.normal(3.0, 1.0, _LABS),
            0.3 * rng.normal(size=(FACTORS, _LABS)) / np.sqrt(FACTORS),
            0.15 * rng.normal(size=(STATES, _LABS)),
        )


@dataclass(frozen=True)
class Stays:
    """Unit stays of a chunk of patients, all arrays ``(stays, ...)``."""

    ids: IntArray
    patient: IntArray
    hospital: IntArray
    visit: IntArray
    start: IntArray
    length: IntArray
    state: FloatArray
    factor: FloatArray


def write_events(files: CsvFiles, rng: np.random.Generator, world: World, stays: Stays) -> None:
    for name, mean in _ROWS_A_STAY.items():
        stay, code = world.models[name].draw(rng, stays.state, stays.factor, rng.poisson(mean, len(stays.ids)))
        rows = _Rows(stay, code, stays.ids[stay], _minutes(rng, stays, stay), rng.integers(1, 1 << 31, len(stay)))
        files.append(name, repeat_rows(rng, _MAKERS[name](rng, world, stays, rows), 0.0005))


@dataclass(frozen=True)
class _Rows:
    stay: IntArray
    code: IntArray
    unit_stay: IntArray
    minute: IntArray
    number: IntArray


def _minutes(rng: np.random.Generator, stays: Stays, stay: IntArray) -> IntArray:
    """Rounds of the day, at most 16 in a stay, from shortly before it to shortly after it."""
    turn = rng.integers(-1, 17, len(stay))
    minutes: IntArray = stays.length[stay] * turn // 16 + stay % 7
    return minutes


def _lab(rng: np.random.Generator, world: World, stays: Stays, rows: _Rows) -> pl.DataFrame:
    offset = stays.factor @ world.lab_of_patient + stays.state @ world.lab_of_state
    noise = 0.2 * rng.standard_normal(len(rows.stay))
    value = pl.Series(np.exp(world.lab_level[rows.code] + offset[rows.stay, rows.code] + noise).round(2))
    odd = pl.Series(rng.random(len(rows.stay)) < 0.01)
    unit = pl.Series(["mg/dL", "mmol/L", "%", None])[rows.code % 4]
    return pl.DataFrame(
        {
            "labid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "labresultoffset": rows.minute,
            "labtypeid": rows.code % 5 + 1,
            "labname": world.names["lab"][rows.code],
            "labresult": value,
            "labresulttext": value.cast(pl.String),
            "labmeasurenamesystem": unit,
            "labmeasurenameinterface": unit,
            "labresultrevisedoffset": rows.minute + 35,
        }
    ).with_columns(
        labresult=pl.when(odd).then(None).otherwise(pl.col("labresult")),
        labresulttext=pl.when(odd).then(pick(rng, _ODD_RESULTS, len(odd))).otherwise(pl.col("labresulttext")),
    )


def _medication(rng: np.random.Generator, world: World, stays: Stays, rows: _Rows) -> pl.DataFrame:
    count = len(rows.stay)
    frame = pl.DataFrame(
        {
            "medicationid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "drugorderoffset": rows.minute - 10,
            "drugstartoffset": rows.minute,
            "drugivadmixture": pick(rng, ["No", "Yes"], count),
            "drugordercancelled": pl.Series(["No", "Yes"])[(rng.random(count) < 0.035).astype(np.int64)],
            "drugname": world.names["medication"][rows.code],
            "drughiclseqno": 1000 + rows.code // 2,
            "dosage": pick(rng, _DOSES, count),
            "routeadmin": pick(rng, ["IV", "PO", "Oral"], count),
            "frequency": pl.Series(_FREQUENCIES)[(rows.code + rng.integers(0, 3, count)) % len(_FREQUENCIES)],
            "loadingdose": pl.Series([None] * count, dtype=pl.String),
            "prn": pick(rng, ["No", "Yes"], count),
            "drugstopoffset": rows.minute + 1440,
            "gtc": rows.code % 90,
        }
    )
    return blank_out(rng, frame, {"drugname": 0.4, "drughiclseqno": 0.06})


def _exam(rng: np.random.Generator, world: World, stays: Stays, rows: _Rows) -> pl.DataFrame:
    path = world.names["physicalExam"][rows.code]
    return pl.DataFrame(
        {
            "physicalexamid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "physicalexamoffset": rows.minute,
            "physicalexampath": path,
            "physicalexamvalue": pick(rng, ["scored", "Performed - Structured", "HR Current"], len(rows.stay)),
            "physicalexamtext": pick(rng, ["scored", "86.2", "100", "alert, and\noriented"], len(rows.stay)),
        }
    )


def _treatment(rng: np.random.Generator, world: World, stays: Stays, rows: _Rows) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "treatmentid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "treatmentoffset": rows.minute,
            "treatmentstring": world.names["treatment"][rows.code],
            "activeupondischarge": pick(rng, ["True", "False"], len(rows.stay)),
        }
    )


def _diagnosis(rng: np.random.Generator, world: World, stays: Stays, rows: _Rows) -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            "diagnosisid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "activeupondischarge": pick(rng, ["True", "False"], len(rows.stay)),
            "diagnosisoffset": rows.minute,
            "diagnosisstring": world.names["diagnosis"][rows.code],
            "icd9code": world.icd[rows.code],
            "diagnosispriority": pick(rng, ["Primary", "Major", "Other"], len(rows.stay)),
        }
    )
    return blank_out(rng, frame, {"icd9code": 0.15})


_MAKERS = {
    "lab": _lab,
    "medication": _medication,
    "physicalExam": _exam,
    "treatment": _treatment,
    "diagnosis": _diagnosis,
}
