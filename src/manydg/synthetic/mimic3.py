"""A synthetic MIMIC-III, with its NDC mapping.

The four tables with their columns, types and blemishes, of any size.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl

from manydg.sources import Twin
from manydg.synthetic._twins import (
    BACKWARD,
    CHUNK,
    DRUGS,
    DRUGS_A_VISIT,
    FACTORS,
    NO_NDC,
    PRESCRIPTION_TEXTS,
    PRODUCTS,
    STATES,
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

_ADMISSION_TEXTS: dict[str, list[str | None]] = {
    "ADMISSION_TYPE": ["EMERGENCY", "ELECTIVE", "URGENT"],
    "ADMISSION_LOCATION": ["EMERGENCY ROOM ADMIT", "TRANSFER FROM HOSP/EXTRAM"],
    "DISCHARGE_LOCATION": ["HOME", "SNF", "HOME HEALTH CARE"],
    "INSURANCE": ["Medicare", "Private", "Medicaid"],
    "LANGUAGE": ["ENGL", "SPAN", None],
    "RELIGION": ["CATHOLIC", "NOT SPECIFIED", None],
    "MARITAL_STATUS": ["MARRIED", "SINGLE", None],
    "ETHNICITY": ["WHITE", "BLACK/AFRICAN AMERICAN", "UNKNOWN/NOT SPECIFIED"],
}


class Mimic3Twin(Twin[TablesOptions]):
    """Hospital visits of people who do not exist.

    Patients' factors change which codes they get; a visit's latent state decides diagnoses, procedures and drugs
    together. Five in six patients have one visit; admission numbers are not in the order of time; a few admissions end
    before they start, some prescriptions have no NDC, and one in ten products is missing from the mapping
    ``ndc_to_atc.csv`` that is written beside the tables. The factors themselves are in ``truth.parquet``.

    The full database has 46,520 patients.
    """

    name = "mimic3"
    options_class = TablesOptions
    scales: ClassVar = {size: TablesOptions(count) for size, count in (("full", 6000), ("small", 1500), ("smoke", 200))}

    def write(self, out: Path, options: TablesOptions) -> Path:
        patients = options.patients
        rng = np.random.default_rng(options.seed)
        world = World.make(rng)
        visits = np.where(rng.random(patients) < 0.84, 1, 1 + rng.geometric(0.6, patients))
        admissions = 100_000 + rng.permutation(int(visits.sum()))
        factors = rng.normal(size=(patients, FACTORS))
        with new_tables(out, options.ending) as files:
            done = 0
            for start in range(0, patients, CHUNK):
                count = visits[start : start + CHUNK]
                ids = admissions[done : done + int(count.sum())]
                _write_chunk(files, rng, world, start, count, ids, factors[start : start + CHUNK])
                done += len(ids)
            write_map(files.folder, rng, world)
            write_truth(files.folder, list(range(1, patients + 1)), factors)
        return out


def _write_chunk(
    files: CsvFiles, rng: np.random.Generator, world: World, first: int, count: IntArray, hadm: IntArray,
    factors: FloatArray,
) -> None:  # fmt: skip
    patient = np.repeat(np.arange(len(count)), count)
    state, factor = rng.normal(size=(len(patient), STATES)), factors[patient]
    subject = first + 1 + patient
    files.append("ADMISSIONS", _admissions(rng, subject, hadm, count))
    for name, model, codes, mean in (
        ("DIAGNOSES_ICD", world.diagnoses, world.diagnosis_codes, 16),
        ("PROCEDURES_ICD", world.procedures, world.procedure_codes, 5),
    ):
        visit, code = each_once(*model.draw(rng, state, factor, rng.poisson(mean, len(patient))), model.size)
        rows = _numbered(rng, subject, hadm, visit).with_columns(ICD9_CODE=codes[code])
        files.append(name, repeat_rows(rng, blank_out(rng, rows, {"ICD9_CODE": 0.0005}), 0.001))
    visit, drug = world.drugs.draw(rng, state, factor, rng.poisson(DRUGS_A_VISIT, len(patient)))
    files.append("PRESCRIPTIONS", _prescriptions(rng, world, subject, hadm, visit, drug))


def _numbered(rng: np.random.Generator, subject: IntArray, hadm: IntArray, visit: IntArray) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "ROW_ID": rng.integers(1, 1 << 40, len(visit)),
            "SUBJECT_ID": subject[visit],
            "HADM_ID": hadm[visit],
            "SEQ_NUM": np.arange(len(visit)) - np.searchsorted(visit, visit) + 1,
        }
    )


def _admissions(rng: np.random.Generator, subject: IntArray, hadm: IntArray, count: IntArray) -> pl.DataFrame:
    birth = np.repeat(rng.integers(4_200_000_000, 7_200_000_000, len(count)), count)
    within = np.arange(len(subject)) - np.repeat(np.cumsum(count) - count, count)
    start = birth + within * 86400 * 120 + rng.integers(0, 86400 * 90, len(subject))
    stay = rng.exponential(9 * 86400, len(subject)).astype(np.int64) + 3600
    backward = rng.random(len(subject)) < BACKWARD
    end = np.where(backward, start - 7200, start + stay)
    died = rng.random(len(subject)) < 0.1
    frame = pl.DataFrame(
        {
            "ROW_ID": rng.integers(1, 1 << 40, len(subject)),
            "SUBJECT_ID": subject,
            "HADM_ID": hadm,
            "ADMITTIME": stamps(start),
            "DISCHTIME": stamps(end),
            "DEATHTIME": pl.select(pl.when(pl.Series(died)).then(stamps(end))).to_series(),
            **{name: pick(rng, values, len(subject)) for name, values in _ADMISSION_TEXTS.items()},
            "EDREGTIME": stamps(start - 3600),
            "EDOUTTIME": stamps(start + 1800),
            "DIAGNOSIS": pick(rng, ["SEPSIS", 'PNEUMONIA, "SEVERE"', "CHEST PAIN"], len(subject)),
            "HOSPITAL_EXPIRE_FLAG": died.astype(np.int64),
            "HAS_CHARTEVENTS_DATA": np.ones(len(subject), np.int64),
        }
    )
    frame = repeat_rows(rng, blank_out(rng, frame, {"EDREGTIME": 0.4, "EDOUTTIME": 0.4}), 0.001)
    return frame[rng.permutation(frame.height)]


def _prescriptions(
    rng: np.random.Generator, world: World, subject: IntArray, hadm: IntArray, visit: IntArray, drug: IntArray
) -> pl.DataFrame:
    product = drug * PRODUCTS + np.minimum(rng.geometric(0.4, len(drug)) - 1, PRODUCTS - 1)
    no_ndc = pl.Series(rng.random(len(drug)) < NO_NDC)
    day = rng.integers(4_200_000_000 // 86400, 7_200_000_000 // 86400, len(drug)) * 86400
    rows = _numbered(rng, subject, hadm, visit).drop("SEQ_NUM")
    name = pl.Series([f"Drug {code}" for code in world.atc])[drug]
    formulary = pl.Series([f"{code}1I" for code in world.atc])[drug]
    rows = rows.with_columns(
        pl.Series("ICUSTAY_ID", 200_000 + hadm[visit] % 99_999),
        stamps(day).alias("STARTDATE"),
        stamps(day + 86400).alias("ENDDATE"),
        pl.Series("DRUG_TYPE", ["MAIN", "BASE", "ADDITIVE"])[rng.choice(3, len(drug), p=[0.74, 0.25, 0.01])],
        *(name.alias(column) for column in ("DRUG", "DRUG_NAME_POE", "DRUG_NAME_GENERIC")),
        formulary.alias("FORMULARY_DRUG_CD"),
        pl.Series("GSN", [f"{number:06d}" for number in range(DRUGS)])[drug],
        pl.when(no_ndc).then(pl.lit("0")).otherwise(world.ndc[product]).alias("NDC"),
        *(pick(rng, values, len(drug)).alias(column) for column, values in PRESCRIPTION_TEXTS.items()),
    )
    missing = {"ICUSTAY_ID": 0.3, "NDC": 0.001, "ENDDATE": 0.0005, "DRUG_NAME_POE": 0.4, "GSN": 0.1}
    return repeat_rows(rng, blank_out(rng, rows, missing), 0.001)
