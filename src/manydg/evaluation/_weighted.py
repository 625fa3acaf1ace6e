"""Metrics under patient weights, so that a thousand resamples of the patients cost one sort and some sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.evaluation import _formulas as formulas
from manydg.evaluation.metrics import decide, sample_average_precision, sample_overlap
from manydg.targets import Target

FloatArray = npt.NDArray[np.float64]
_CELLS = 400_000
"""Most numbers held at once while rankings are re-weighted."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What one trained model said about one set of patients.

    Parameters
    ----------
    target : Target
    truth : (rows,) class codes, or (rows, K) indicators for multi-label
    probabilities : (rows, K)
    patients : (rows,) pseudonyms or codes; the same name means the same person in every run
    threshold : float, optional
    """

    target: Target
    truth: npt.NDArray[Any]
    probabilities: npt.NDArray[Any]
    patients: npt.NDArray[Any]
    threshold: float | None = None
    names: npt.NDArray[Any] = field(init=False, repr=False)
    """The distinct patients, sorted."""
    groups: npt.NDArray[np.intp] = field(init=False, repr=False)
    """Index of each row's patient in ``names``."""

    def __post_init__(self) -> None:
        names, groups = np.unique(self.patients, return_inverse=True)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "groups", groups)


class WeightedMetrics:
    """Every default metric of one run's predictions, as a function of a weight for each patient.

    A weight of 2 counts each sample of the patient twice, so that bootstrap counts, leave-one-out weights and the plain
    metric (all ones) are one computation.

    Parameters
    ----------
    predictions : Predictions
    """

    def __init__(self, predictions: Predictions) -> None:
        self.predictions = predictions
        target, truth, probabilities = predictions.target, predictions.truth, predictions.probabilities
        chosen = decide(target, probabilities, predictions.threshold)
        groups, count = predictions.groups, len(predictions.names)
        self._totals: dict[str, tuple[FloatArray, FloatArray]] = {}
        if target.kind == "multilabel":
            jaccard, f1 = sample_overlap(truth, chosen)
            precision = sample_average_precision(truth, probabilities)
            for name, values in (("jaccard", jaccard), ("auprc_samples", precision), ("f1_samples", f1)):
                self._totals[name] = _sums(values, groups, count)
            return
        codes = np.asarray(truth, np.int64)
        matrices = formulas.confusion_matrices(codes, chosen, groups, count, target.size)
        self._matrices = matrices.reshape(count, -1).astype(float)

    def __call__(self, weights: npt.NDArray[Any]) -> dict[str, FloatArray]:
        """Metrics under each row of ``weights`` ``(resamples, patients)``, every one ``(resamples,)``."""
        weights = np.asarray(weights, float)
        target = self.predictions.target
        if target.kind == "multilabel":
            return {name: formulas.divide(weights @ top, weights @ n) for name, (top, n) in self._totals.items()}
        matrices = (weights @ self._matrices).reshape(len(weights), target.size, target.size)
        values = {"kappa": formulas.kappa_of(matrices)}
        if target.kind == "binary":
            values["f1"] = formulas.f1_of(matrices)[..., 1]
            values["auprc"], values["auroc"] = self._ranking(weights)
        else:
            values["accuracy"], values["f1_macro"] = formulas.accuracy_of(matrices), formulas.macro_f1_of(matrices)
        return {name: values[name] for name in target.metrics}

    def _ranking(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Average precision and area under the ROC curve ``(resamples,)`` each, the rows sorted once."""
        scores = np.asarray(self.predictions.probabilities[:, 1], float)
        order = np.argsort(-scores, kind="stable")
        last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
        hit, who = np.asarray(self.predictions.truth)[order] != 0, self.predictions.groups[order]
        step = max(1, _CELLS // max(1, len(order)))
        parts = [_areas(weights[i : i + step], hit, who, last) for i in range(0, len(weights), step)]
        precision, area = (np.concatenate(values) for values in zip(*parts, strict=True))
        return precision, area


def _sums(values: FloatArray, groups: npt.NDArray[np.intp], count: int) -> tuple[FloatArray, FloatArray]:
    """Sum of the defined values of each group, and how many there are."""
    kept = ~np.isnan(values)
    top = np.bincount(groups[kept], weights=values[kept], minlength=count)
    number: FloatArray = np.bincount(groups[kept], minlength=count).astype(float)
    return np.asarray(top, float), number


def _areas(
    weights: FloatArray, hit: npt.NDArray[np.bool_], who: npt.NDArray[np.intp], last: npt.NDArray[np.intp]
) -> tuple[FloatArray, FloatArray]:
    # One column for each resample, so that sums down the ranking run over neighbours in memory.
    each = np.ascontiguousarray(weights.T)[who]
    taken = np.cumsum(each, axis=0)[last]
    hits = np.cumsum(np.where(hit[:, None], each, 0.0), axis=0)[last]
    positives, total = hits[-1], taken[-1]
    new_hits = np.diff(hits, axis=0, prepend=0.0)
    new_misses = np.diff(taken, axis=0, prepend=0.0) - new_hits
    one_class = (positives == 0) | (positives == total)
    gained = new_hits * np.divide(hits, taken, out=np.zeros_like(hits), where=taken > 0)
    precision = np.where(one_class, np.nan, formulas.divide(gained.sum(axis=0), positives))
    area = formulas.divide((new_misses * (hits - new_hits / 2)).sum(axis=0), positives * (total - positives))
    return precision, area


def mean_over_runs(runs: Sequence[Mapping[str, FloatArray]]) -> dict[str, FloatArray]:
    """Mean of each metric over several runs' values ``(resamples,)``; runs without a value are left out."""
    return {name: _nanmean(np.stack([values[name] for values in runs])) for name in runs[0]}


def _nanmean(values: FloatArray) -> FloatArray:
    known = ~np.isnan(values)
    return formulas.divide(np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0))
