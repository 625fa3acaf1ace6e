"""Table to report: compare models on a table and write a report

Writes a small synthetic table (one row per sample), prepares it, compares a plain network with gradient boosting over
two patient splits, and writes a report.

On the command line:

    manydg prepare table stays.csv --patient patient --target outcome --features 'lab_*' --out dataset
    manydg compare dataset --algorithms base,boosting --seeds 2 --epochs 3 --out results
    manydg report results --out report.html
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from manydg import TrainingConfig
from manydg.report import write_report
from manydg.sources import prepare
from manydg.studies.conduct import compare


def synthetic_table(patients: int = 30, stays: int = 8) -> pl.DataFrame:
    """Laboratory values that depend on the outcome and, more strongly, on the patient."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(patients), stays)
    outcome = rng.integers(0, 2, len(patient))
    habit = rng.normal(size=(patients, 4))[patient]
    values = outcome[:, None] * [1.0, 0.5, 0.0, 0.0] + habit + 0.5 * rng.normal(size=habit.shape)
    columns = {f"lab_{number}": values[:, number] for number in range(4)}
    return pl.DataFrame({"patient": patient, "outcome": outcome, **columns})


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="manydg-example-"))
    synthetic_table().write_csv(folder / "stays.csv")
    dataset = prepare(
        "table", folder / "stays.csv", folder / "dataset", patient="patient", target=("outcome",), features=("lab_*",)
    )
    records = compare(dataset, ["base", "boosting"], 2, folder / "results", options=TrainingConfig(epochs=3))
    for record in records:
        print(f"{record.config.algorithm}, split {record.config.seed}: AUROC {record.test['auroc']:.2f}")
    page = write_report(folder / "results", folder / "report.html")
    print(f"open {page} in a browser")


if __name__ == "__main__":
    main()
