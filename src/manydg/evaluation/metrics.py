"""The metrics of each kind of target, over all samples and for every patient, and the threshold that goes with them.

``classes`` and ``votes``: accuracy, Cohen's kappa, macro F1 of the most probable class. ``binary``: average precision,
F1, kappa and area under the ROC curve of the probability of the second class. ``multilabel``: Jaccard, average
precision and F1 of each sample, then averaged. A metric that is undefined for the given truth is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics as sklearn_metrics

from manydg.errors import DataError
from manydg.evaluation import _formulas as formulas
from manydg.targets import Target

DEFAULT_THRESHOLD = 0.5
Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]


def null_for_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """The same metrics as JSON can hold them: an undefined one is None."""
    return {name: None if math.isnan(value) else float(value) for name, value in values.items()}


def decide(target: Target, probabilities: Array, threshold: float | None = None) -> npt.NDArray[np.int64]:
    """Class codes ``(rows,)`` or label indicators ``(rows, K)`` from probabilities ``(rows, K)``.

    Exclusive classes take the most probable one, a binary target the second class from ``threshold`` upwards, and
    every label of a multi-label target is present from ``threshold`` upwards. Without a threshold it is 0.5.
    """
    if target.exclusive and target.kind != "binary":
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    scores = probabilities[:, 1] if target.kind == "binary" else probabilities
    # In float64, lest a threshold between two neighbouring float32 scores be rounded onto one of them.
    return np.asarray(_as_float(scores) >= (DEFAULT_THRESHOLD if threshold is None else threshold), np.int64)


def score(target: Target, truth: Array, probabilities: Array, threshold: float | None = None) -> dict[str, float]:
    """Every default metric of a target.

    Parameters
    ----------
    target : Target
    truth : (rows,) class codes, or (rows, K) indicators for multi-label
    probabilities : (rows, K)
    threshold : float, optional
        For binary and multi-label targets; 0.5 when not given.

    Returns
    -------
    dict of str to float
        In the order of ``target.metrics``; NaN where undefined (one class only, no samples).

    Examples
    --------
    >>> from manydg.data.dataset import TargetSpec
    >>> from manydg.targets import target_of
    >>> wake_or_not = target_of(TargetSpec("classes", ("wake", "sleep")))
    >>> score(wake_or_not, np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))["accuracy"]
    0.6666666666666666
    """
    truth, probabilities = _checked(target, truth, probabilities)
    if len(truth) == 0:
        return dict.fromkeys(target.metrics, math.nan)
    chosen = decide(target, probabilities, threshold)
    if target.kind == "multilabel":
        values = _multilabel_scores(truth, chosen, probabilities)
    elif target.kind == "binary":
        values = _binary_scores(truth, chosen, probabilities[:, 1])
    else:
        values = _class_scores(truth, chosen)
    return {name: float(values[name]) for name in target.metrics}


def _class_scores(truth: Array, chosen: Array) -> dict[str, float]:
    return {
        "accuracy": sklearn_metrics.accuracy_score(truth, chosen),
        "kappa": _kappa(truth, chosen),
        "f1_macro": sklearn_metrics.f1_score(truth, chosen, average="macro"),
    }


def _binary_scores(truth: Array, chosen: Array, scores: Array) -> dict[str, float]:
    both = len(np.unique(truth)) == 2
    return {
        "auprc": sklearn_metrics.average_precision_score(truth, scores) if both else math.nan,
        "f1": sklearn_metrics.f1_score(truth, chosen, zero_division=math.nan),
        "kappa": _kappa(truth, chosen),
        "auroc": sklearn_metrics.roc_auc_score(truth, scores) if both else math.nan,
    }


def _multilabel_scores(truth: Array, chosen: Array, probabilities: Array) -> dict[str, float]:
    precision = sample_average_precision(truth, probabilities)
    return {
        "jaccard": sklearn_metrics.jaccard_score(truth, chosen, average="samples", zero_division=1.0),
        "auprc_samples": float(np.nanmean(precision)) if not np.isnan(precision).all() else math.nan,
        "f1_samples": sklearn_metrics.f1_score(truth, chosen, average="samples", zero_division=1.0),
    }


def _kappa(truth: Array, chosen: Array) -> float:
    """Cohen's kappa, undefined where truth and prediction are one and the same class throughout."""
    if len(np.union1d(truth, chosen)) < 2:
        return math.nan
    return float(sklearn_metrics.cohen_kappa_score(truth, chosen))


def sample_average_precision(truth: Array, probabilities: Array) -> FloatArray:
    """Average precision of each multi-label sample ``(rows,)``; NaN for a sample without any label.

    Equal to scikit-learn's ``average_precision_score`` of each row, computed for all rows at once.
    """
    rows, labels = truth.shape
    groups = np.repeat(np.arange(rows), labels)
    order = (np.argsort(-probabilities, axis=1) + labels * np.arange(rows)[:, None]).ravel()
    ranking = formulas.Ranking(truth.ravel() != 0, probabilities.ravel(), groups, rows, order)
    return ranking.average_precision()


def sample_overlap(truth: Array, chosen: Array) -> tuple[FloatArray, FloatArray]:
    """Jaccard and F1 of each multi-label sample, both ``(rows,)``; 1 where truth and prediction are both empty."""
    hits = np.logical_and(truth, chosen).sum(axis=1)
    total = (truth != 0).sum(axis=1) + (chosen != 0).sum(axis=1)
    jaccard, f1 = formulas.divide(hits, total - hits), formulas.divide(2 * hits, total)
    return np.where(total == 0, 1.0, jaccard), np.where(total == 0, 1.0, f1)


def score_patients(
    target: Target,
    truth: Array,
    probabilities: Array,
    patients: npt.NDArray[np.integer],
    threshold: float | None = None,
) -> dict[int, dict[str, float]]:
    """Every default metric within each patient, and the patient's number of samples.

    Parameters
    ----------
    target, truth, probabilities, threshold
        As for :func:`score`.
    patients : (rows,) array of int
        The patient code of each row.

    Returns
    -------
    dict of int to dict
        By patient code, in rising order: ``samples`` and the metrics; NaN where undefined for that patient.
    """
    truth, probabilities = _checked(target, truth, probabilities)
    codes, groups = np.unique(patients, return_inverse=True)
    values = _patient_values(target, truth, probabilities, groups, len(codes), threshold)
    columns = {"samples": np.bincount(groups, minlength=len(codes)).astype(float)}
    columns |= {name: values[name] for name in target.metrics}
    rows = zip(*columns.values(), strict=True)
    return {int(code): dict(zip(columns, map(float, row), strict=True)) for code, row in zip(codes, rows, strict=True)}


def _patient_values(
    target: Target,
    truth: Array,
    probabilities: Array,
    groups: npt.NDArray[np.intp],
    count: int,
    threshold: float | None,
) -> dict[str, FloatArray]:
    """Each default metric of each group, ``(count,)``."""
    chosen = decide(target, probabilities, threshold)
    if target.kind == "multilabel":
        jaccard, f1 = sample_overlap(truth, chosen)
        each = {"jaccard": jaccard, "auprc_samples": sample_average_precision(truth, probabilities), "f1_samples": f1}
        return {name: formulas.group_means(values, groups, count) for name, values in each.items()}
    matrices = formulas.confusion_matrices(truth.astype(np.int64), chosen, groups, count, target.size)
    if target.kind != "binary":
        return {
            "accuracy": formulas.accuracy_of(matrices),
            "kappa": formulas.kappa_of(matrices),
            "f1_macro": formulas.macro_f1_of(matrices),
        }
    ranking = formulas.Ranking(truth != 0, _as_float(probabilities[:, 1]), groups, count)
    one_class = (ranking.positives == 0) | (ranking.positives == ranking.sizes)
    return {
        "auprc": np.where(one_class, np.nan, ranking.average_precision()),
        "f1": formulas.f1_of(matrices)[..., 1],
        "kappa": formulas.kappa_of(matrices),
        "auroc": ranking.area_under_roc(),
    }


def choose_threshold(target: Target, truth: Array, probabilities: Array) -> tuple[float | None, str]:
    """The decision threshold to use on new patients, and the rule's name.

    Give it validation patients only. Binary: the threshold with the highest F1 of the second class. Multi-label: the
    one threshold, shared by all labels, with the highest mean F1 of a sample. Exclusive classes need none.

    Returns
    -------
    threshold : float or None
    rule : str
    """
    truth, probabilities = _checked(target, truth, probabilities)
    if target.exclusive and target.kind != "binary":
        return None, "highest probability"
    if not np.any(truth):
        return DEFAULT_THRESHOLD, f"{DEFAULT_THRESHOLD}: no validation sample has a positive label"
    if target.kind == "binary":
        cuts, quality = _binary_f1_curve(truth, probabilities[:, 1])
        rule = "threshold with the highest F1 on validation patients"
    else:
        cuts, quality = _sample_f1_curve(truth, probabilities)
        rule = "threshold with the highest mean F1 of a sample on validation patients"
    return float(cuts[int(np.argmax(quality))]), rule


def _binary_f1_curve(truth: Array, scores: Array) -> tuple[FloatArray, FloatArray]:
    """Thresholds half-way between neighbouring scores, and the F1 each one gives."""
    values = np.unique(_as_float(scores))[::-1]
    ranking = formulas.Ranking(truth != 0, _as_float(scores), np.zeros(len(truth), np.int64), 1)
    f1 = formulas.divide(2 * ranking.hits, ranking.taken + ranking.positives[0])
    lower = np.append(values[1:], 0.0)
    return (values + lower) / 2, f1


def _sample_f1_curve(truth: Array, probabilities: Array) -> tuple[FloatArray, FloatArray]:
    """Mean F1 of a sample at a grid of thresholds joined with the quantiles of the probabilities."""
    scores, present = _as_float(probabilities), truth != 0
    cuts = np.unique(np.concatenate([np.linspace(0.01, 0.99, 99), np.quantile(scores, np.linspace(0.005, 0.995, 100))]))
    rows, size = len(scores), len(cuts) + 1
    passed = np.searchsorted(cuts, scores, side="right")
    cell = passed + np.arange(rows)[:, None] * size
    taken = np.bincount(cell.ravel(), minlength=rows * size).reshape(rows, size)
    hits = np.bincount(cell[present], minlength=rows * size).reshape(rows, size)
    # A label whose probability passes j cuts is predicted at the first j of them.
    taken, hits = (np.cumsum(counts[:, ::-1], axis=1)[:, ::-1][:, 1:] for counts in (taken, hits))
    total = taken + present.sum(axis=1, keepdims=True)
    return cuts, np.where(total == 0, 1.0, formulas.divide(2 * hits, total)).mean(axis=0)


def _as_float(values: Array) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _checked(target: Target, truth: Array, probabilities: Array) -> tuple[Array, Array]:
    truth, probabilities = np.asarray(truth), np.asarray(probabilities)
    wanted = (len(probabilities),) if target.exclusive else (len(probabilities), target.size)
    if probabilities.ndim != 2 or probabilities.shape[1] != target.size or truth.shape != wanted:
        raise DataError(
            f"{target.kind} metrics need probabilities (rows, {target.size}) and truth {wanted}; "
            f"got {probabilities.shape} and {truth.shape}"
        )
    bad = int((~np.isfinite(probabilities)).any(axis=1).sum())
    if bad:
        raise DataError(
            f"the probabilities of {bad} of {len(probabilities)} samples are not finite: the model diverged"
        )
    return truth, probabilities
