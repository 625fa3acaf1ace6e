"""A synthetic MIMIC-IV, with its NDC mapping.

Nine tables of the modules ``hosp`` and ``icu`` in their format and with their blemishes, of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from manydg.sources import Twin
from manydg.synthetic._twins import (
    BACKWARD,
    CHUNK,
    DRUGS_A_VISIT,
    FACTORS,
    NO_NDC,
    PRESCRIPTION_TEXTS,
    PRODUCTS,
    STATES,
    CodeModel,
    CsvFiles,
    FloatArray,
    IntArray,
    TablesOptions,
    World,
    blank_out,
    each_once,
    new_tables,
    pick,
    repeat_rows,
    stamps,
    write_map,
    write_truth,
)

_MOST_STAYS = 3
_LABS, _CHARTS, _PROCEDURES = 120, 200, 60
_ROWS_A_STAY = {"labevents": (60, 50_800), "chartevents": (90, 220_045), "procedureevents": (6, 224_260)}
_HOUR, _DAY = 3600, 86_400
_RACES = [
    "WHITE",
    "WHITE - RUSSIAN",
    "BLACK/AFRICAN AMERICAN",
    "HISPANIC/LATINO - PUERTO RICAN",
    "ASIAN - CHINESE",
    "AMERICAN INDIAN/ALASKA NATIVE",
    "UNKNOWN",
]


class Mimic4Twin(Twin[TablesOptions]):
    """Hospital visits, and stays in intensive care, of people who do not exist.

    Patients' factors change which codes and items they get; a visit's latent state decides its diagnoses, procedures,
    drugs and measurements, and whether the patient comes back to intensive care. Later visits are coded in ICD-10,
    earlier ones in ICD-9. Laboratory rows often lack the admission, some values are text, some prescriptions have no
    NDC, some rows are there twice. Beside the modules are the mapping ``ndc_to_atc.csv`` and the factors
    (``truth.parquet``).

    The full database (3.1) has 364,627 patients, of whom 65,366 were in intensive care.
    """

    name = "mimic4"
    options_class = TablesOptions

    def write(self, out: Path, options: TablesOptions) -> Path:
        rng = np.random.default_rng(options.seed)
        world, items = World.make(rng), {}
        for name, size in (("labevents", _LABS), ("chartevents", _CHARTS), ("procedureevents", _PROCEDURES)):
            items[name] = CodeModel(rng, size, STATES)
        factors = rng.normal(size=(options.patients, FACTORS))
        with new_tables(out, options.ending) as files:
            for module in ("hosp", "icu"):
                (files.folder / module).mkdir()
            for start in range(0, options.patients, CHUNK):
                _write_chunk(files, rng, world, items, Visits.draw(rng, factors[start : start + CHUNK], start))
            write_map(files.folder, rng, world)
            write_truth(files.folder, list(range(10_000_000, 10_000_000 + options.patients)), factors)
        return out


@dataclass(frozen=True)
class Visits:
    """Visits of a chunk of patients and their stays in intensive care.

    Of visits, ``(visits,)``: ``subject``, ``hadm``, ``start`` and ``end`` in seconds, ``version`` of ICD, ``state`` and
    ``factor``. Of stays, ``(stays,)``: ``visit``, ``stay``, ``into`` and ``out_of`` in seconds.
    """

    subject: IntArray
    hadm: IntArray
    start: IntArray
    end: IntArray
    version: IntArray
    state: FloatArray
    factor: FloatArray
    visit: IntArray
    stay: IntArray
    into: IntArray
    out_of: IntArray

    @staticmethod
    def draw(rng: np.random.Generator, factors: FloatArray, first: int) -> Visits:
        patients = len(factors)
        count = np.where(rng.random(patients) < 0.5, 1, 1 + rng.geometric(0.5, patients))
        patient = np.repeat(np.arange(patients), count)
        number = np.arange(len(patient)) - np.repeat(np.cumsum(count) - count, count)
        state = rng.normal(size=(len(patient), STATES))
        comes_back = rng.random((len(patient), _MOST_STAYS - 1)) < 1 / (1 + np.exp(1.8 - 1.5 * state[:, :1]))
        stays = (rng.random(len(patient)) < 0.7) * (1 + np.cumprod(comes_back, axis=1).sum(axis=1))
        visit = np.repeat(np.arange(len(patient)), stays)
        turn = np.arange(len(visit)) - np.repeat(np.cumsum(stays) - stays, stays)
        birth = np.repeat(rng.integers(4_200_000_000, 7_200_000_000, patients), count)
        start = birth + number * _DAY * 150 + rng.integers(0, _DAY * 90, len(patient))
        into = start[visit] + turn * 4 * _DAY + rng.integers(_HOUR, 20 * _HOUR, len(visit))
        out_of = into + rng.integers(8 * _HOUR, 3 * _DAY, len(visit))
        end = start + (stays + 1) * 4 * _DAY + rng.integers(0, _DAY, len(patient))
        # Admission and stay numbers are not in the order of time.
        hadm = 20_000_000 + 20 * first + rng.permutation(len(patient))
        stay = 30_000_000 + 60 * first + rng.permutation(len(visit))
        version = np.where(number >= rng.integers(0, 3, patients)[patient], 10, 9)
        subject = 10_000_000 + first + patient
        return Visits(subject, hadm, start, end, version, state, factors[patient], visit, stay, into, out_of)


def _write_chunk(
    files: CsvFiles, rng: np.random.Generator, world: World, items: dict[str, CodeModel], visits: Visits
) -> None:
    files.append("hosp/patients", _patients(rng, visits))
    files.append("hosp/admissions", _admissions(rng, visits))
    for name, model, codes, mean in (
        ("diagnoses_icd", world.diagnoses, world.diagnosis_codes, 14),
        ("procedures_icd", world.procedures, world.procedure_codes, 4),
    ):
        draws = model.draw(rng, visits.state, visits.factor, rng.poisson(mean, len(visits.hadm)))
        rows = _codes(visits, codes, *each_once(*draws, model.size))
        rows = rows if name == "procedures_icd" else rows.drop("chartdate")
        files.append(f"hosp/{name}", repeat_rows(rng, rows, 0.001))
    files.append("hosp/prescriptions", _prescriptions(rng, world, visits))
    files.append("icu/icustays", _stays(rng, visits))
    for name, (mean, first) in _ROWS_A_STAY.items():
        counts = rng.poisson(mean, len(visits.stay))
        stay, item = items[name].draw(rng, visits.state[visits.visit], visits.factor[visits.visit], counts)
        module = "hosp" if name == "labevents" else "icu"
        files.append(f"{module}/{name}", repeat_rows(rng, _measured(rng, name, visits, stay, first, item), 0.0005))


def _ids(visits: Visits, visit: IntArray) -> dict[str, IntArray]:
    return {"subject_id": visits.subject[visit], "hadm_id": visits.hadm[visit]}


def _patients(rng: np.random.Generator, visits: Visits) -> pl.DataFrame:
    subject, at = np.unique(visits.subject, return_index=True)
    age = rng.integers(18, 100, len(subject))
    return pl.DataFrame(
        {
            "subject_id": subject,
            "gender": pick(rng, ["F", "M"], len(subject)),
            "anchor_age": np.where(age > 89, 91, age),
            "anchor_year": 1970 + visits.start[at] // (365 * _DAY),
            "anchor_year_group": pick(rng, ["2008 - 2010", "2014 - 2016", "2017 - 2019"], len(subject)),
            "dod": pl.Series([None] * len(subject), dtype=pl.String),
        }
    )


def _admissions(rng: np.random.Generator, visits: Visits) -> pl.DataFrame:
    count = len(visits.hadm)
    backward = rng.random(count) < BACKWARD
    people, at = np.unique(visits.subject, return_inverse=True)
    frame = pl.DataFrame(
        {
            **_ids(visits, np.arange(count)),
            "admittime": stamps(visits.start),
            "dischtime": stamps(np.where(backward, visits.start - 2 * _HOUR, visits.end)),
            "deathtime": pl.Series([None] * count, dtype=pl.String),
            "admission_type": pick(rng, ["URGENT", "EW EMER.", "OBSERVATION ADMIT"], count),
            "admit_provider_id": pick(rng, ["P49AFC", "P784FA"], count),
            "admission_location": pick(rng, ["EMERGENCY ROOM", "TRANSFER FROM HOSPITAL"], count),
            "discharge_location": pick(rng, ["HOME", "HOSPICE", None], count),
            "insurance": pick(rng, ["Medicare", "Medicaid", "Private", None], count),
            "language": pick(rng, ["English", "Spanish"], count),
            "marital_status": pick(rng, ["WIDOWED", "SINGLE", None], count),
            "race": pick(rng, _RACES, len(people))[at],
            "edregtime": stamps(visits.start - _HOUR),
            "edouttime": stamps(visits.start + _HOUR),
            "hospital_expire_flag": np.zeros(count, np.int64),
        }
    )
    frame = repeat_rows(rng, blank_out(rng, frame, {"edregtime": 0.4, "edouttime": 0.4}), 0.001)
    return frame[rng.permutation(frame.height)]


def _codes(visits: Visits, codes: pl.Series, visit: IntArray, code: IntArray) -> pl.DataFrame:
    """Rows of coded diagnoses or procedures; an ICD-10 code is a letter more than the ICD-9 code of the same number."""
    version = visits.version[visit]
    nine = codes[code]
    ten = pl.Series([f"{'ABCDEFGHIJ'[number % 10]}{text}" for number, text in enumerate(codes)])[code]
    return pl.DataFrame(
        {
            **_ids(visits, visit),
            "seq_num": np.arange(len(visit)) - np.searchsorted(visit, visit) + 1,
            "chartdate": stamps(visits.end[visit]).str.head(10),
            "icd_code": pl.select(pl.when(pl.Series(version == 10)).then(ten).otherwise(nine)).to_series(),
            "icd_version": version,
        }
    )


def _prescriptions(rng: np.random.Generator, world: World, visits: Visits) -> pl.DataFrame:
    counts = rng.poisson(DRUGS_A_VISIT // 2, len(visits.hadm))
    visit, drug = world.drugs.draw(rng, visits.state, visits.factor, counts)
    product = drug * PRODUCTS + np.minimum(rng.geometric(0.4, len(drug)) - 1, PRODUCTS - 1)
    start = visits.start[visit] + (rng.random(len(drug)) * (visits.end - visits.start)[visit]).astype(np.int64)
    frame = pl.DataFrame(
        {
            **_ids(visits, visit),
            "pharmacy_id": rng.integers(1, 1 << 31, len(drug)),
            "poe_id": pl.Series(visits.subject[visit]).cast(pl.String) + "-1",
            "poe_seq": np.arange(len(drug)),
            "order_provider_id": pick(rng, ["P85UQ1", None], len(drug)),
            "starttime": stamps(start // _HOUR * _HOUR),
            "stoptime": stamps(start // _HOUR * _HOUR + _DAY),
            "drug_type": pick(rng, ["MAIN", "BASE"], len(drug)),
            "drug": pl.Series([f"Drug {code}" for code in world.atc])[drug],
            "formulary_drug_cd": pl.Series([f"{code}1I" for code in world.atc])[drug],
            "gsn": drug,
            "ndc": world.ndc[product],
            **{name.lower(): pick(rng, values, len(drug)) for name, values in PRESCRIPTION_TEXTS.items()},
            "doses_per_24_hrs": rng.integers(1, 5, len(drug)),
        }
    )
    unknown = pl.Series(rng.random(len(drug)) < NO_NDC)
    frame = frame.with_columns(ndc=pl.when(unknown).then(pl.lit("0")).otherwise("ndc"))
    return repeat_rows(rng, blank_out(rng, frame, {"ndc": 0.001, "gsn": 0.1, "stoptime": 0.001}), 0.001)


def _stays(rng: np.random.Generator, visits: Visits) -> pl.DataFrame:
    unit = pick(rng, ["Medical Intensive Care Unit (MICU)", "Coronary Care Unit (CCU)"], len(visits.stay))
    frame = pl.DataFrame(
        {
            **_ids(visits, visits.visit),
            "stay_id": visits.stay,
            "first_careunit": unit,
            "last_careunit": unit,
            "intime": stamps(visits.into),
            "outtime": stamps(visits.out_of),
            "los": ((visits.out_of - visits.into) / _DAY).round(4),
        }
    )
    return frame[rng.permutation(frame.height)]


def _measured(
    rng: np.random.Generator, name: str, visits: Visits, stay: IntArray, first: int, item: IntArray
) -> pl.DataFrame:
    """Rows of measurements or procedures in the stays, some of them shortly after."""
    within = rng.random(len(stay)) * 1.03 * (visits.out_of - visits.into)[stay]
    when = visits.into[stay] + within.astype(np.int64)
    logarithm = 2 + visits.state[visits.visit[stay], 0] * 0.3 + 0.3 * rng.normal(size=len(stay))
    number = pl.Series(np.exp(logarithm).round(2))
    text = pl.Series(rng.random(len(stay)) < 0.02)
    columns: dict[str, pl.Series | IntArray] = {**_ids(visits, visits.visit[stay]), "stay_id": visits.stay[stay]}
    columns["itemid"] = first + item
    if name == "procedureevents":
        return pl.DataFrame({**columns, "starttime": stamps(when), "endtime": stamps(when + _HOUR), "value": number})
    frame = pl.DataFrame({**columns, "charttime": stamps(when), "storetime": stamps(when + _HOUR), "valuenum": number})
    value = pl.when(text).then(pick(rng, ["<0.02", "___", ">16.0"], len(stay))).otherwise(number.cast(pl.String))
    frame = frame.with_columns(value=value, valuenum=pl.when(~text).then("valuenum"), valueuom=pl.lit("mg/dL"))
    if name == "chartevents":
        return frame.with_columns(warning=0)
    return blank_out(rng, frame.drop("stay_id"), {"hadm_id": 0.4}).with_row_index("labevent_id")
