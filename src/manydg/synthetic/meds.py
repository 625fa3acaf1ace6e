"""A synthetic MEDS dataset with a label file.

Data in shards, metadata and labels, of any size.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl

from manydg.files import write_through
from manydg.sources import Twin
from manydg.synthetic._twins import (
    CHUNK,
    FACTORS,
    CodeModel,
    FloatArray,
    IntArray,
    PatientsOptions,
    pick,
    synthetic_folder,
    write_truth,
)

LABELS = Path("labels") / "readmission.parquet"
_STATES = 6
_KINDS = {"DIAGNOSIS//ICD9CM": 400, "LAB": 120, "MEDICATION//START": 200, "PROCEDURE//ICD9CM": 150}
_MICROSECONDS = 1_000_000
_EVENTS = 60


class MedsTwin(Twin[PatientsOptions]):
    """Subjects who do not exist, with a yes-or-no label per admission in ``labels/readmission.parquet``."""

    name = "meds"
    options_class = PatientsOptions

    def write(self, out: Path, options: PatientsOptions) -> Path:
        patients = options.patients
        rng = np.random.default_rng(options.seed)
        names = [f"{kind}//{number}" for kind, size in _KINDS.items() for number in range(size)]
        model = CodeModel(rng, len(names), _STATES)
        level, of_patient = rng.normal(2, 1, len(names)), 0.3 * rng.normal(size=(FACTORS, len(names)))
        factors = rng.normal(size=(patients, FACTORS))
        with synthetic_folder(out) as folder:
            for name in ("data", "metadata", "labels"):
                (folder / name).mkdir()
            labels = []
            for shard, start in enumerate(range(0, patients, CHUNK)):
                factor = factors[start : start + CHUNK]
                subject = np.arange(start, start + len(factor)) + 10_000
                admissions = _admissions(rng, subject)
                owner = admissions["row"].to_numpy()
                state = rng.normal(size=(len(owner), _STATES))
                visit, code = model.draw(rng, state, factor[owner], rng.poisson(_EVENTS, len(owner)))
                noise = 0.2 * rng.normal(size=len(code))
                value = np.exp(level[code] + (factor @ of_patient)[owner[visit], code] + noise)
                events = _events(rng, admissions, visit, pl.Series(names)[code], value)
                _shard(rng, subject, admissions, events).write_parquet(folder / "data" / f"{shard}.parquet")
                labels.append(_labels(rng, admissions, state))
            pl.concat(labels).sort("subject_id", "prediction_time").write_parquet(folder / LABELS)
            _metadata(folder, names, rng, patients)
            write_truth(folder, list(range(10_000, 10_000 + patients)), factors)
        return out


def _admissions(rng: np.random.Generator, subject: IntArray) -> pl.DataFrame:
    visits = np.minimum(rng.geometric(0.5, len(subject)), 8)
    row = np.repeat(np.arange(len(subject)), visits)
    turn = np.arange(len(row)) - np.repeat(np.cumsum(visits) - visits, visits)
    birth = rng.integers(-1_500_000_000, 300_000_000, len(subject))
    day = 365 * 30 + turn * 200 + rng.integers(0, 150, len(row))
    start = birth[row] + 86400 * day + rng.integers(0, 86400, len(row))
    length = rng.integers(86400, 86400 * 12, len(row))
    return pl.DataFrame({"row": row, "subject_id": subject[row], "birth": birth[row], "start": start, "length": length})


def _events(
    rng: np.random.Generator, admissions: pl.DataFrame, visit: IntArray, code: pl.Series, value: FloatArray
) -> pl.DataFrame:
    start, length = admissions["start"].to_numpy()[visit], admissions["length"].to_numpy()[visit]
    second = start + length * rng.integers(0, 16, len(visit)) // 16
    is_lab = code.str.starts_with("LAB") & pl.Series(rng.random(len(visit)) > 0.02)
    frame = pl.DataFrame({"subject_id": admissions["subject_id"].to_numpy()[visit], "time": second, "code": code})
    return frame.with_columns(numeric_value=pl.when(is_lab).then(pl.Series(value)).cast(pl.Float32))


def _shard(rng: np.random.Generator, subject: IntArray, admissions: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    nothing = pl.lit(None).cast(pl.Float32).alias("numeric_value")
    static = pl.DataFrame({"subject_id": subject, "code": pick(rng, ["GENDER//F", "GENDER//M"], len(subject))})
    static = static.select("subject_id", pl.lit(None).cast(pl.Int64).alias("time"), "code", nothing)
    birth = admissions.unique("subject_id", keep="first").select(
        "subject_id", pl.col("birth").alias("time"), pl.lit("MEDS_BIRTH").alias("code"), nothing
    )
    start = admissions.select("subject_id", pl.col("start").alias("time"), pl.lit("ADMISSION").alias("code"), nothing)
    rows = pl.concat([static, birth, start, events])
    rows = rows.with_columns((pl.col("time") * _MICROSECONDS).cast(pl.Datetime("us")))
    return rows.sort("subject_id", "time", "code", nulls_last=False)


def _labels(rng: np.random.Generator, admissions: pl.DataFrame, state: FloatArray) -> pl.DataFrame:
    yes = rng.random(admissions.height) < 1 / (1 + np.exp(1.5 - 1.5 * state[:, 0]))
    end = (pl.col("start") + pl.col("length")) * _MICROSECONDS
    return admissions.select(
        "subject_id", end.cast(pl.Datetime("us")).alias("prediction_time"), pl.Series("boolean_value", yes)
    )


def _metadata(folder: Path, names: list[str], rng: np.random.Generator, patients: int) -> None:
    codes = [*names, "GENDER//F", "GENDER//M", "MEDS_BIRTH", "ADMISSION"]
    table = pl.DataFrame({"code": codes, "description": [f"synthetic {code}" for code in codes]})
    table = table.with_columns(pl.lit(None).cast(pl.List(pl.String)).alias("parent_codes"))
    table.write_parquet(folder / "metadata" / "codes.parquet")
    split = pl.Series(["train", "tuning", "held_out"])[rng.choice(3, patients, p=[0.8, 0.1, 0.1])]
    splits = pl.DataFrame({"subject_id": np.arange(patients) + 10_000, "split": split})
    splits.write_parquet(folder / "metadata" / "subject_splits.parquet")
    about = {"dataset_name": "manydg synthetic", "dataset_version": "1", "meds_version": "0.4.0"}
    write_through(folder / "metadata" / "dataset.json", json.dumps(about))
