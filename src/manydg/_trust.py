"""How far to trust predictions on new patients: further columns of what ``manydg predict`` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset
from manydg.evaluation.calibration import scale_temperature
from manydg.evaluation.conformal import SetRule, prediction_sets
from manydg.training.calibration import Calibration, patient_embeddings, read_calibration
from manydg.training.run import Run

Columns = dict[str, Sequence[Any]]


def trust_columns(run: Run, data: DomainDataset, probabilities: npt.NDArray[np.float32]) -> Columns:
    """Columns by name, one entry per sample; none for a run that was made without calibration.

    ``calibrated_NAME`` is the probability after temperature scaling. ``set_90`` holds the classes that cannot be ruled
    out (for multi-label, the labels that may be present), separated by ``|``, so that 90% of a new patient's sets hold
    the truth on average over patients; ``set_90_of_80`` so that this is true of 80% of new patients. The figures are
    lower where few patients validated. ``unlike_training`` says whether the sample's patient lies farther from the
    training patients than nearly all validation patients, and ``distance`` how far, one being the limit.

    Parameters
    ----------
    data : DomainDataset
        The samples, with the patient of each.
    probabilities : array ``(samples, K)``
        As the model gives them.
    """
    calibration = None if run.folder is None else read_calibration(run.folder)
    if calibration is None:
        return {}
    target = run.algorithm.target
    mended = scale_temperature(target, probabilities, calibration.temperature).round(5)
    columns: Columns = {f"calibrated_{name}": mended[:, k].tolist() for k, name in enumerate(target.spec.names)}
    names = np.array(target.spec.names)
    for rule in (calibration.on_average, calibration.for_most):
        sets = prediction_sets(target, probabilities, rule)
        columns[set_name(rule)] = ["|".join(names[row]) for row in sets]
    return columns | _novelty(run, data, calibration)


def set_name(rule: SetRule) -> str:
    """What a column of prediction sets is called.

    Examples
    --------
    >>> set_name(SetRule(np.zeros(1), 0.9)), set_name(SetRule(np.zeros(1), 0.9, 0.8))
    ('set_90', 'set_90_of_80')
    """
    level = f"set_{_percent(rule.level)}"
    return f"{level}_of_{_percent(rule.share)}" if rule.share else level


def _percent(value: float) -> int:
    return math.floor(100 * value + 1e-6)


def _novelty(run: Run, data: DomainDataset, calibration: Calibration) -> Columns:
    if calibration.reference is None:
        return {}
    codes, distances = calibration.reference.distances(*patient_embeddings(run.algorithm, run.prepare(data)))
    of_sample = distances[np.searchsorted(codes, data.domains.cpu().numpy())]
    shown = (of_sample / calibration.limit).round(3) if calibration.limit > 0 else of_sample
    return {"unlike_training": (of_sample > calibration.limit).tolist(), "distance": shown.tolist()}
