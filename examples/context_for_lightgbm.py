"""Context for LightGBM: PatientContext before a learner of your own

Each row gets further columns, made of the same patient's earlier rows. The same lines serve CatBoost, AutoGluon or any
estimator of scikit-learn. torch is not imported.
"""

from __future__ import annotations

import numpy as np
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
    plain = LGBMClassifier(verbose=-1).fit(X, y)
    print(f"without context: AUROC {roc_auc_score(y_new, plain.predict_proba(X_new)[:, 1]):.2f}")

    context = PatientContext("causal").fit(X, groups=patient, time=hour)
    model = LGBMClassifier(verbose=-1).fit(context.transform(X, groups=patient, time=hour), y)
    rows = context.transform(X_new, groups=new_patient, time=new_hour)
    print(f"with context: AUROC {roc_auc_score(y_new, model.predict_proba(rows)[:, 1]):.2f}")

    # At the bedside, one row at a time: the same numbers.
    stream = context.stream()
    first = [stream.update(0, X_new[row], new_hour[row]) for row in range(40)]
    print(f"streamed rows are the same: {np.array_equal(first, rows[:40])}")


if __name__ == "__main__":
    main()
