"""A synthetic eICU.

The patient table and the five event tables with their columns, types and blemishes, of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl

from manydg.sources import Twin, option
from manydg.synthetic._twins import (
    CHUNK,
    FACTORS,
    CodeModel,
    CsvFiles,
    FloatArray,
    IntArray,
    TablesOptions,
    blank_out,
    new_tables,
    pick,
    repeat_rows,
    words,
    write_truth,
)

STATES = 6
_LABS, _DRUGS, _DIAGNOSES, _TREATMENTS, _EXAMS = 158, 400, 600, 400, 460
_ROWS_A_STAY = {"lab": 195, "medication": 36, "physicalExam": 46, "treatment": 18, "diagnosis": 13}
_ODD_RESULTS = ["<0.02", "> 90 %", "neg", "1,000", "0-2", ">16.00", "<10", "2.0  "]
_DOSES: list[str | None] = ["40 mg", "4 MG", "PYXIS", "1,000 mL", "5 3", "650 mg", "1-2 mg", None]
_FREQUENCIES: list[str | None] = ["Once", "DAILY", "Daily", "BID", "Q4H PRN", "Continuous", ".STK-MED", None]
_MOST_STAYS = 4
_ETHNICITIES = ["Caucasian", "African American", "Hispanic", "Asian", "Native American", "Other/Unknown"]


@dataclass(frozen=True)
class EicuTwinOptions(TablesOptions):
    """The same, and how much of the outcome is the patient's own."""

    patient_effect: float = option(
        0.0, help="eICU: how much the patient's factor, besides the stay's state, determines readmission."
    )


class EicuTwin(Twin[EicuTwinOptions]):
    """Unit stays of people who do not exist.

    A stay's latent state decides its events, its laboratory values and whether the patient comes back to intensive
    care; the patient's factor changes which codes occur, shifts the laboratory values and, where asked for, makes the
    patient come back more or less often. The blemishes are those of
    the original: text among the results, drugs without a name, orders cancelled, results after discharge, stays
    that end before they start, repeated rows, blank lines. The factors themselves are in ``truth.parquet``.

    The full database has 139,367 patients with 200,859 unit stays; here a patient has 1.44 stays on average too.
    """

    name = "eicu"
    options_class = EicuTwinOptions
    scales: ClassVar = {
        size: EicuTwinOptions(count) for size, count in (("full", 3000), ("small", 400), ("smoke", 160))
    }

    def write(self, out: Path, options: EicuTwinOptions) -> Path:
        patients = options.patients
        rng = np.random.default_rng(options.seed)
        world = World.make(rng)
        factors = rng.normal(size=(patients, FACTORS))
        ids = [f"{2 + number // 100_000:03d}-{number % 100_000}" for number in range(patients)]
        with new_tables(out, options.ending) as files:
            next_id = 141_000
            for start in range(0, patients, CHUNK):
                names = pl.Series(ids[start : start + CHUNK])
                stays = _draw_stays(rng, factors[start : start + CHUNK], next_id, options.patient_effect)
                next_id = int(stays.ids.max()) + 1
                files.append("patient", _patients(rng, stays, names))
                files.blank_line("patient")
                write_events(files, rng, world, stays)
            write_truth(files.folder, ids, factors)
        return out


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
        sizes = dict(zip(_ROWS_A_STAY, (_LABS, _DRUGS, _EXAMS, _TREATMENTS, _DIAGNOSES), strict=True))
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


def _draw_stays(rng: np.random.Generator, factors: FloatArray, first_id: int, patient_effect: float) -> Stays:
    hospital_stays = np.minimum(rng.geometric(0.83, len(factors)), 6)
    patient = np.repeat(np.arange(len(factors)), hospital_stays)
    state = rng.normal(size=(len(patient), _MOST_STAYS, STATES))
    logits = 1.2 * state[:, :, 0] - 2.2 + patient_effect * factors[patient, :1]
    comes_back = rng.random((len(patient), _MOST_STAYS)) < 1 / (1 + np.exp(-logits))
    stays = 1 + np.cumprod(comes_back[:, :-1], axis=1).sum(axis=1)
    at = np.repeat(np.arange(len(patient)), stays)
    visit = np.arange(len(at)) - np.repeat(np.cumsum(stays) - stays, stays)
    length = rng.integers(600, 6000, len(at))
    gap = np.where(rng.random(len(at)) < 0.7, 0, rng.integers(30, 9000, len(at)))
    clock = np.cumsum(length + gap)
    before = clock - (length + gap)
    start = before - np.repeat(before[np.cumsum(stays) - stays], stays)
    start += np.repeat(rng.integers(1, 3000, len(patient)), stays)
    # Numbers rise along the file with holes between them, and do not follow time within a hospital stay.
    ids = first_id + np.cumsum(rng.integers(1, 20, len(at)))
    swap = np.lexsort((rng.random(len(at)), at))
    return Stays(
        ids[swap], patient[at], 128_000 + first_id + at, visit, start, length, state[at, visit], factors[patient[at]]
    )


def _patients(rng: np.random.Generator, stays: Stays, names: pl.Series) -> pl.DataFrame:
    count = len(stays.ids)
    age, gender = (rng.integers(low, high, len(names))[stays.patient] for low, high in ((18, 100), (0, 2)))
    ethnicity = rng.choice(6, len(names), p=[0.77, 0.11, 0.04, 0.02, 0.01, 0.05])[stays.patient]
    frame = pl.DataFrame(
        {
            "patientunitstayid": stays.ids,
            "patienthealthsystemstayid": stays.hospital,
            "gender": pl.Series(["Female", "Male"])[gender],
            "age": pl.Series(["> 89" if year > 89 else str(year) for year in age]),
            "ethnicity": pl.Series(_ETHNICITIES)[ethnicity],
            "hospitalid": rng.integers(56, 460, count),
            "wardid": rng.integers(80, 1100, count),
            "apacheadmissiondx": pick(rng, ["Sepsis, pulmonary", "Rhythm disturbance (atrial)", None], count),
            "admissionheight": rng.normal(170, 10, count).round(1),
            "hospitaladmittime24": pick(rng, ["23:36:00", "08:15:00"], count),
            "hospitaladmitoffset": -stays.start,
            "hospitaladmitsource": pick(rng, ["Emergency Department", "Floor", None], count),
            "hospitaldischargeyear": 2014 + stays.hospital % 2,
            "hospitaldischargetime24": pick(rng, ["19:20:00", "17:05:00"], count),
            "hospitaldischargeoffset": stays.length + 1000,
            "hospitaldischargelocation": pick(rng, ["Home", "Skilled Nursing Facility", None], count),
            "hospitaldischargestatus": pick(rng, ["Alive", "Alive", "Expired"], count),
            "unittype": pick(rng, ["Med-Surg ICU", "SICU", "CCU-CTICU"], count),
            "unitadmittime24": pick(rng, ["13:14:00", "20:47:00"], count),
            "unitadmitsource": pick(rng, ["Emergency Department", "ICU to SDU"], count),
            "unitvisitnumber": stays.visit + 1,
            "unitstaytype": pl.Series(["admit", "readmit"])[(stays.visit > 0).astype(np.int64)],
            "admissionweight": rng.normal(80, 20, count).round(1),
            "dischargeweight": rng.normal(80, 20, count).round(1),
            "unitdischargetime24": pick(rng, ["18:58:00", "10:00:00"], count),
            "unitdischargeoffset": np.where(rng.random(count) < 0.0005, -60, stays.length),
            "unitdischargelocation": pick(rng, ["Floor", "Home", "Step-Down Unit (SDU)"], count),
            "unitdischargestatus": pick(rng, ["Alive", "Alive", "Expired"], count),
            "uniquepid": names[stays.patient],
        }
    )
    missing = {"gender": 0.002, "age": 0.001, "ethnicity": 0.015, "admissionheight": 0.02, "dischargeweight": 0.3}
    frame = repeat_rows(rng, blank_out(rng, frame, missing), 0.0005)
    return frame[rng.permutation(frame.height)]


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
    return pl.DataFrame(
        {
            "physicalexamid": rows.number,
            "patientunitstayid": rows.unit_stay,
            "physicalexamoffset": rows.minute,
            "physicalexampath": world.names["physicalExam"][rows.code],
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


_MAKERS = dict(zip(_ROWS_A_STAY, (_lab, _medication, _exam, _treatment, _diagnosis), strict=True))
