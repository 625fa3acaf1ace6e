"""Context for LightGBM: PatientContext before a learner of your own

Each row gets further columns, made of the same patient's earlier rows. The same lines serve CatBoost, as here, or any
estimator that takes a table of numbers. torch is not imported.
"""

from __future__ import annotations

import numpy as np
from catboost import CatBoostClassifier
from lightgbm import LGBMClassifier
from sklearn.metrics import roc_auc_score

from manydg import PatientContext


def vitals(patients: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hourly heart rates; the alarm is a rise above what is usual for the patient."""
    rng = np.random.default_rng(seed)
    patient, hour = np.repeat(np.arange(patients), 40), np.tile(np.arange(40.0), patients)
    usual = rng.normal(80, 15, patients)[patient]
    rate = usual + rng.normal(0, 5, len(patient))
    return rate[:, None], rate > usual + 4, patient, hour


def main() -> None:
    X, y, patient, hour = vitals(150, seed=0)
    X_new, y_new, new_patient, new_hour = vitals(50, seed=1)
    context = PatientContext("causal").fit(X, groups=patient, time=hour)
    rows = context.transform(X, groups=patient, time=hour)
    new_rows = context.transform(X_new, groups=new_patient, time=new_hour)
    for learner in (LGBMClassifier(verbose=-1), CatBoostClassifier(100, silent=True, allow_writing_files=False)):
        name, scores = type(learner).__name__, []
        for table, new_table in ((X, X_new), (rows, new_rows)):
            scores.append(roc_auc_score(y_new, learner.fit(table, y).predict_proba(new_table)[:, 1]))
        print(f"{name}: AUROC {scores[0]:.2f} without context, {scores[1]:.2f} with it")

    # At the bedside, one row at a time: the same numbers.
    stream = context.stream()
    first = [stream.update(0, X_new[row], new_hour[row]) for row in range(40)]
    print(f"streamed rows are the same: {np.array_equal(first, new_rows[:40])}")


if __name__ == "__main__":
    main()
