"""Streaming context: predictions that improve as a patient's samples arrive

A model with causal context uses the earlier unlabelled samples of the same patient. This script follows new patients
from their first sample on. No label of a new patient is used.
"""

from __future__ import annotations

import numpy as np

import manydg
from manydg.synthetic import DemoPatients

SAMPLES = 20


def main() -> None:
    made = DemoPatients.draw(60, samples=SAMPLES)
    # A patient's samples arrive in the order of the table, one a minute.
    minutes = np.array([np.sum(made.patient[:row] == made.patient[row]) for row in range(len(made.patient))])
    inputs = made.dataset().column("x")
    known = ~made.is_new[made.patient]
    data = manydg.from_arrays(inputs[known], made.label[known], made.patient[known], times=minutes[known])
    parts = {"parts": ["relative", "difference", "before"]}
    run = manydg.train(data, algorithm="base", context="causal", context_options=parts, epochs=15, lr=3e-3)

    # The patients of "new" took no part in training. Labels here only score the predictions.
    new = manydg.from_arrays(inputs[~known], made.label[~known], made.patient[~known], times=minutes[~known])
    right = run.predict_proba(new).argmax(axis=1) == made.label[~known]
    for first, last in ((0, 2), (2, 6), (6, SAMPLES)):
        rows = (minutes[~known] >= first) & (minutes[~known] < last)
        print(f"minutes {first} to {last}: {right[rows].mean():.0%} of the predictions are right")


if __name__ == "__main__":
    main()
