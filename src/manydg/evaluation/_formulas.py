"""Metrics of many groups at once: confusion matrices and rankings of every patient or visit without a Python loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def divide(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """Element-wise quotient that is NaN, without a warning, where the denominator is zero."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    quotient = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=quotient, where=bottom != 0)
    return quotient


def confusion_matrices(
    truth: npt.NDArray[np.integer],
    predicted: npt.NDArray[np.integer],
    groups: npt.NDArray[np.integer],
    count: int,
    classes: int,
) -> IntArray:
    """Confusion matrix of every group.

    Parameters
    ----------
    truth, predicted, groups : (rows,)
        Class codes, and the group of each row from 0 to ``count - 1``.

    Returns
    -------
    (count, classes, classes) array of int
        Rows are the truth, columns the prediction.
    """
    cell = (np.asarray(groups, np.int64) * classes + truth) * classes + predicted
    return np.bincount(cell, minlength=count * classes**2).astype(np.int64).reshape(count, classes, classes)


def accuracy_of(matrices: npt.NDArray[np.number]) -> FloatArray:
    """Share of samples on the diagonal, of each ``(..., K, K)`` matrix."""
    return divide(np.trace(matrices, axis1=-2, axis2=-1), matrices.sum(axis=(-2, -1)))


def kappa_of(matrices: npt.NDArray[np.number]) -> FloatArray:
    """Cohen's kappa of each ``(..., K, K)`` matrix; NaN where truth and prediction are one and the same class."""
    counts = np.asarray(matrices, float)
    total = counts.sum(axis=(-2, -1))
    expected = divide((counts.sum(axis=-1) * counts.sum(axis=-2)).sum(axis=-1), total)
    return divide(np.trace(counts, axis1=-2, axis2=-1) - expected, total - expected)


def f1_of(matrices: npt.NDArray[np.number]) -> FloatArray:
    """F1 of every class ``(..., K)``; NaN for a class absent from both truth and prediction."""
    counts = np.asarray(matrices, float)
    hits = np.diagonal(counts, axis1=-2, axis2=-1)
    return divide(2 * hits, counts.sum(axis=-1) + counts.sum(axis=-2))


def macro_f1_of(matrices: npt.NDArray[np.number]) -> FloatArray:
    """Mean F1 over the classes present in truth or prediction."""
    each = f1_of(matrices)
    present = ~np.isnan(each)
    return divide(np.where(present, each, 0.0).sum(axis=-1), present.sum(axis=-1))


def group_means(values: FloatArray, groups: npt.NDArray[np.integer], count: int) -> FloatArray:
    """Mean of the values of each group, NaN values left out; NaN for a group with none."""
    kept = ~np.isnan(values)
    sums = np.bincount(groups[kept], weights=values[kept], minlength=count)
    return divide(sums, np.bincount(groups[kept], minlength=count))


class Ranking:
    """Scores sorted from high to low within each group, equal scores together.

    Parameters
    ----------
    truth : (rows,) array of bool
    scores : (rows,) array of float
    groups : (rows,) array of int
        From 0 to ``count - 1``; every group has at least one row for the results to be defined.
    order : (rows,) array of int, optional
        The rows by rising group and falling score, where the caller has a quicker way to them.
    """

    def __init__(
        self,
        truth: npt.NDArray[np.bool_],
        scores: npt.NDArray[np.floating],
        groups: npt.NDArray[np.integer],
        count: int,
        order: npt.NDArray[np.intp] | None = None,
    ) -> None:
        order = np.lexsort((-scores, groups)) if order is None else order
        group, score, hit = groups[order], scores[order], truth[order].astype(np.int64)
        self.count, rows = count, len(order)
        self.positives = np.bincount(group, weights=hit, minlength=count)
        self.sizes = np.bincount(group, minlength=count).astype(float)
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        if rows == 0:
            ends = np.zeros(0, bool)
        else:
            ends = np.append((group[1:] != group[:-1]) | (score[1:] != score[:-1]), True)
        # One entry per run of equal scores: a threshold can only fall between runs.
        last = np.flatnonzero(ends)
        self.run_group = group[last]
        before = np.cumsum(hit) - hit
        offset = np.zeros(count, np.int64)
        offset[self.sizes > 0] = before[starts[self.sizes > 0]]
        self.hits = (np.cumsum(hit)[last] - offset[self.run_group]).astype(float)
        self.taken = (last + 1 - starts[self.run_group]).astype(float)
        first_run = np.append(True, self.run_group[1:] != self.run_group[:-1]) if len(last) else np.zeros(0, bool)
        self.new_hits = np.where(first_run, self.hits, self.hits - np.roll(self.hits, 1))
        self.new_taken = np.where(first_run, self.taken, self.taken - np.roll(self.taken, 1))

    def average_precision(self) -> FloatArray:
        """Average precision of each group ``(count,)``; NaN without a positive."""
        gained = self.new_hits * divide(self.hits, self.taken)
        return divide(np.bincount(self.run_group, weights=gained, minlength=self.count), self.positives)

    def area_under_roc(self) -> FloatArray:
        """Area under the ROC curve of each group ``(count,)``, ties counted half; NaN with one class only."""
        new_misses = self.new_taken - self.new_hits
        wins = new_misses * (self.hits - self.new_hits / 2)
        area = np.bincount(self.run_group, weights=wins, minlength=self.count)
        return divide(area, self.positives * (self.sizes - self.positives))
