"""eICU's unit stays: who, when, whether the patient came back, and what is known of the patient."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.errors import DataError
from manydg.sources._provenance import CohortFlow
from manydg.sources._tables import Table

DAY = 24 * 60
ETHNICITIES = ("caucasian", "african american", "hispanic", "asian", "native american", "other/unknown")
STATIC_NAMES = (
    "age_over_100",
    "age_missing",
    "male",
    "gender_missing",
    *(f"ethnicity_{name.replace(' ', '_').replace('/', '_or_')}" for name in ETHNICITIES),
    "ethnicity_missing",
)
_INTEGERS = ["patientunitstayid", "patienthealthsystemstayid", "hospitaladmitoffset", "unitdischargeoffset"]
_OPTIONAL_INTEGERS = ["unitvisitnumber", "hospitaldischargeyear"]
_TEXTS = ["uniquepid", "age", "gender", "ethnicity"]


def read_stays(table: Table, flow: CohortFlow) -> pl.DataFrame:
    """Unit stays in the order of their patients, and of admission within a patient.

    Returns
    -------
    DataFrame
        The columns of the table that are needed, ``start`` (minutes since the hospital admission) and ``order`` (the
        stay's place among its patient's, from 0).
    """
    integers = [*_INTEGERS, *_OPTIONAL_INTEGERS]
    with table.reading(integers):
        rows = table.scan(integers=integers, texts=_TEXTS).collect(engine="streaming")
    if rows.is_empty():
        raise DataError(f"{table.path} holds no rows: download it again")
    known = rows.drop_nulls(["patientunitstayid", "patienthealthsystemstayid", "hospitaladmitoffset", "uniquepid"])
    stays = known.unique(maintain_order=True)
    if stays["patientunitstayid"].n_unique() < stays.height:
        raise DataError(f"{table.path}: a patientunitstayid stands there twice with other content: download it again")
    _note(
        flow,
        "unit stays in the table",
        stays,
        left_out_without_id=rows.height - known.height,
        left_out_duplicates=known.height - stays.height,
    )
    forward = stays.filter((pl.col("unitdischargeoffset") >= 0).fill_null(True))
    _note(
        flow, "unit stays that end after they start", forward, left_out_end_before_start=stays.height - forward.height
    )
    if forward.is_empty():
        raise DataError(f"{table.path} holds no usable unit stay: download it again")
    ordered = forward.with_columns(start=-pl.col("hospitaladmitoffset")).sort(
        "uniquepid",
        "hospitaldischargeyear",
        "patienthealthsystemstayid",
        "start",
        "unitvisitnumber",
        "patientunitstayid",
        nulls_last=True,
    )
    return ordered.with_columns(order=pl.int_range(pl.len()).over("uniquepid"))


def readmitted(stays: pl.DataFrame, *, within_days: float = 15.0, min_gap: float = 0.0) -> npt.NDArray[np.int64]:
    """Whether another unit stay of the same hospital stay follows.

    Parameters
    ----------
    stays : DataFrame
        As :func:`read_stays` gives them.
    within_days : float
        The later stay starts less than this many days after this one starts.
    min_gap : float
        It starts at least this many minutes after this one ends; 0 counts transfers too.

    Returns
    -------
    array ``(stays,)`` of 0 and 1
    """
    keys = stays.select(
        "patienthealthsystemstayid", "start", "order", end=pl.col("start") + pl.col("unitdischargeoffset").fill_null(0)
    ).with_row_index("row")
    pairs = keys.join(keys, on="patienthealthsystemstayid", suffix="_next").filter(
        (pl.col("order_next") > pl.col("order"))
        & (pl.col("start_next") - pl.col("start") < within_days * DAY)
        & (pl.col("start_next") - pl.col("end") >= min_gap)
    )
    label = np.zeros(stays.height, np.int64)
    label[pairs["row"].unique().to_numpy()] = 1
    return label


def static_features(stays: pl.DataFrame) -> npt.NDArray[np.float32]:
    """Age, gender and ethnicity as numbers, ``(stays, 11)``; see :data:`STATIC_NAMES`.

    Age is in hundreds of years and "> 89" counts as 90. What is missing is 0 and sets its own flag.
    """
    text = pl.col("age").str.strip_chars()
    years = pl.when(text.str.starts_with(">")).then(90.0).otherwise(text.cast(pl.Float64, strict=False))
    years = pl.when(years.is_finite() & (years >= 0) & (years < 150)).then(years)
    gender, ethnicity = (pl.col(name).str.strip_chars().str.to_lowercase() for name in ("gender", "ethnicity"))
    known_ethnicity = ethnicity.is_in(ETHNICITIES).fill_null(False)
    known_gender = gender.is_in(["male", "female"]).fill_null(False)
    features = [
        (years / 100).fill_null(0.0),
        years.is_null(),
        (gender == "male").fill_null(False),
        ~known_gender,
        *((ethnicity == name).fill_null(False) for name in ETHNICITIES),
        ~known_ethnicity,
    ]
    named = [feature.cast(pl.Float32).alias(name) for feature, name in zip(features, STATIC_NAMES, strict=True)]
    return np.ascontiguousarray(stays.select(named).to_numpy(), np.float32)


def _note(flow: CohortFlow, step: str, stays: pl.DataFrame, **left_out: int) -> None:
    flow.add(step, patients=stays["uniquepid"].n_unique(), samples=stays.height, **left_out)
