"""Every run's metrics under one set of resampled patients, so that rows of a table are compared draw by draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manydg.evaluation._weighted import mean_over_runs
from manydg.evaluation.statistics import PatientResampling, Predictions
from manydg.experiments._summary_runs import Record, Selection

FloatArray = npt.NDArray[np.float64]
SAMPLE_MEANS = ("accuracy", "jaccard", "f1_samples")
"""Metrics that are means over samples, so that per-patient values give back the whole without predictions."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Every run's metrics under one set of resampled patients."""

    plan: PatientResampling
    runs: Mapping[str, Mapping[str, FloatArray]]
    """Run id to metric to values under every row of the plan's weights."""

    def mean(self, records: Sequence[Record], metric: str) -> FloatArray | None:
        """Mean over runs, or None where one of them has no such values."""
        values = [self.runs.get(str(record["run"]), {}) for record in records]
        if not values or any(metric not in each for each in values):
            return None
        return mean_over_runs([{metric: each[metric]} for each in values])[metric]


def resample_runs(
    chosen: Selection, predictions: Mapping[str, Predictions], resamples: int, seed: int
) -> tuple[Draws | None, list[str]]:
    """Resample the patients of all runs together, and say how many runs lack predictions.

    Returns
    -------
    draws : Draws or None
        None where no run names a patient.
    notes : list of str
    """
    records = chosen.records
    told = {str(record["run"]): predictions.get(str(record["run"])) for record in records}
    names = {str(name) for run in told.values() if run is not None for name in run.names}
    names |= {name for record in records for name in record.get("per_patient") or {}}
    lacking = sum(run is None for run in told.values())
    note = f"{lacking} of {len(told)} runs have no predictions here, so that some intervals cannot be given"
    if not names:
        return None, [note] if lacking else []
    plan = PatientResampling(np.array(sorted(names)), resamples=resamples, seed=seed)
    runs = {}
    for record in records:
        run = told[str(record["run"])]
        runs[str(record["run"])] = _from_patients(record, plan) if run is None else plan.evaluate(run)
    return Draws(plan, runs), [note] if lacking else []


def _from_patients(record: Record, plan: PatientResampling) -> dict[str, FloatArray]:
    """Metrics that are means over samples, resampled from a record's per-patient values."""
    people = record.get("per_patient") or {}
    columns = np.searchsorted(plan.names, list(people))
    found = {}
    for metric in SAMPLE_MEANS:
        values = [entry.get(metric) for entry in people.values()]
        if people and all(value is not None for value in values):
            samples = np.array([float(entry["samples"]) for entry in people.values()])
            weights = plan.weights[:, columns]
            total = weights @ samples
            hits = weights @ (samples * np.array(values, float))
            found[metric] = np.divide(hits, total, out=np.full(len(total), np.nan), where=total > 0)
    return found
