"""Kidney table: hourly intensive-care data joined into one table

For ``manydg prepare table``, from the eICU demo and the YAIB project's hours:

    python examples/kidney_table.py HOURLY_FOLDER EICU_FOLDER kidney.parquet

``HOURLY_FOLDER`` holds the three tables that the YAIB project makes of eICU: ``dyn.parquet`` (48 vitals and laboratory
values by stay and hour, mostly empty), ``sta.parquet`` (age, sex, height, weight by stay) and ``outc.parquet`` (whether
the kidneys are injured, by stay and hour). ``EICU_FOLDER`` holds eICU's own ``patient.csv.gz``, which alone knows the
patient: a stay is not a patient, and splitting by stay would put one person on two sides.

One row of the result is one hour of one stay:

===================  ==================================================================================================
``uniquepid``        the patient
``hospitalid``       the hospital, as a site for ``--site``
``stay_id``          the stay in intensive care (eICU's ``patientunitstayid``)
``unitvisitnumber``  its number within the hospital stay, as eICU has it
``stay``             its place among the patient's stays, from 1 (by year, hospital stay and number within it)
``hour``             of the stay
``label``            kidney injury at that hour: from six hours before its onset to six hours after, as the YAIB project
                     labels it; the record ends there
``onset``            the hour of onset, the same in every row of a stay; empty where the kidneys stay well
``value_*``          the last value measured in the stay up to that hour; empty before the first
``measured_*``       1 where it was measured in that very hour
``static_*``         age, sex (1 male, 0 female), height, weight, and the hour of the stay
===================  ==================================================================================================
"""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

HOURS_LABELLED_BEFORE_ONSET = 6


def join(hourly: Path, eicu: Path) -> pl.DataFrame:
    """The table described above, sorted by stay and hour."""
    values = pl.read_parquet(hourly / "dyn.parquet").sort("stay_id", "time")
    measured = [name for name in values.columns if name not in ("stay_id", "time")]
    hours = values.select(
        "stay_id",
        "time",
        *(pl.col(name).forward_fill().over("stay_id").cast(pl.Float32).alias(f"value_{name}") for name in measured),
        *(pl.col(name).is_not_null().cast(pl.Float32).alias(f"measured_{name}") for name in measured),
    )
    static = pl.read_parquet(hourly / "sta.parquet").select(
        "stay_id",
        pl.col("age").alias("static_age"),
        (pl.col("sex") == "Male").cast(pl.Float32).alias("static_male"),
        pl.col("height").alias("static_height"),
        pl.col("weight").alias("static_weight"),
    )
    hour = pl.col("time").dt.total_minutes() / 60
    table = (
        pl.read_parquet(hourly / "outc.parquet")
        .join(hours, on=["stay_id", "time"], how="inner", validate="1:1")
        .join(static, on="stay_id", how="inner", validate="m:1")
        .join(_stays(eicu), on="stay_id", how="inner", validate="m:1")
        .with_columns(hour.alias("hour"), hour.alias("static_hour"), pl.col("label").cast(pl.Int8))
    )
    # Every stay with an injury has one unbroken run of 7 to 13 positive hours, so that the onset is always in the run.
    first = pl.col("hour").filter(pl.col("label") == 1).min().over("stay_id")
    table = table.with_columns((first + HOURS_LABELLED_BEFORE_ONSET).alias("onset"))
    return table.drop("time").sort("stay_id", "hour")


def _stays(eicu: Path) -> pl.DataFrame:
    """Each stay's patient, and its place in the order of the patient's stays."""
    order = ["hospitaldischargeyear", "patienthealthsystemstayid", "unitvisitnumber"]
    stays = pl.read_csv(eicu / "patient.csv.gz", columns=["patientunitstayid", "uniquepid", "hospitalid", *order])
    return stays.sort("uniquepid", *order).select(
        pl.col("patientunitstayid").cast(pl.Int32).alias("stay_id"),
        "uniquepid",
        "hospitalid",
        "unitvisitnumber",
        (pl.int_range(pl.len()).over("uniquepid") + 1).alias("stay"),
    )


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/kidney_table.py HOURLY_FOLDER EICU_FOLDER OUT.parquet")
    hourly, eicu, out = map(Path, sys.argv[1:])
    table = join(hourly, eicu)
    table.write_parquet(out)
    positive = int(table["label"].sum())
    print(
        f"wrote {out}: {table.height:,} hours ({positive:,} with injury) of {table['uniquepid'].n_unique():,} patients"
    )
    print(
        f"next: manydg prepare table {out} --patient uniquepid --event onset --horizon 6h --session stay --time hour "
        "--time-unit h --features 'value_*' 'measured_*' 'static_*' --missing keep --out kidney"
    )


if __name__ == "__main__":
    main()
