"""Formulas of many groups at once: sums and means, confusion matrices and rankings without a loop over patients.

A *group* is a patient, a visit or a whole test set. Rows carry the number of their group, from 0 to ``count - 1``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import sparse

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Groups = npt.NDArray[np.integer]


def divide(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """Element-wise quotient that is NaN, without a warning, where the denominator is zero."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    quotient = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=quotient, where=bottom != 0)
    return quotient


def group_sums(values: FloatArray, groups: Groups, count: int) -> FloatArray:
    """Sum of the rows ``(rows, dim)`` of each group, ``(count, dim)``."""
    rows = len(groups)
    membership = sparse.csr_matrix((np.ones(rows), (groups, np.arange(rows))), shape=(count, rows))
    return np.asarray(membership @ values, float)


def group_means(values: FloatArray, groups: Groups, count: int) -> FloatArray:
    """Mean of the values ``(rows,)`` of each group, NaN values left out; NaN for a group with none."""
    known = ~np.isnan(values)
    sums = np.bincount(groups[known], weights=values[known], minlength=count)
    return divide(sums, np.bincount(groups[known], minlength=count))


def confusion_matrices(
    truth: npt.NDArray[np.integer], predicted: npt.NDArray[np.integer], groups: Groups, count: int, classes: int
) -> IntArray:
    """Confusion matrix of every group.

    Parameters
    ----------
    truth, predicted, groups : (rows,)
        Class codes, and the group of each row.

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


class Ranking:
    """Rows sorted from high to low score within each group.

    Rows of equal score form one *step*: a decision threshold can only fall between steps.

    Parameters
    ----------
    truth : (rows,) array of bool
    scores : (rows,) array of float
    groups : (rows,) array of int
        Every group has at least one row.
    count : int
        Number of groups.
    order : (rows,) array of int, optional
        The rows by rising group and falling score, where the caller has a quicker way to them.

    Attributes
    ----------
    order : (rows,) array of int
    """

    def __init__(
        self,
        truth: npt.NDArray[np.bool_],
        scores: npt.NDArray[np.floating],
        groups: Groups,
        count: int,
        order: npt.NDArray[np.intp] | None = None,
    ) -> None:
        self.order = np.lexsort((-scores, groups)) if order is None else order
        self._hit, self._count = truth[self.order], count
        group, score = groups[self.order], scores[self.order]
        ends = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
        self._last = np.flatnonzero(np.append(ends, np.ones(min(1, len(score)), bool)))
        self._group = group[self._last]
        # Each group's first and last step.
        self._first = np.flatnonzero(np.diff(self._group, prepend=-1))
        self._final = np.flatnonzero(np.diff(self._group, append=count))

    def cumulative(self, weights: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Positives and rows of a group from its highest score down to each step, ``(steps, columns)`` each.

        Parameters
        ----------
        weights : (rows, columns) array, optional
            How often each row counts, in the ranking's order; a column for each set of weights. Once if not given.
        """
        each = np.ones((len(self.order), 1)) if weights is None else weights
        taken = np.cumsum(each, axis=0)[self._last]
        hits = np.cumsum(np.where(self._hit[:, None], each, 0.0), axis=0)[self._last]
        return self._within_groups(hits), self._within_groups(taken)

    def areas(self, weights: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Average precision and area under the ROC curve of each group, ``(count, columns)`` each.

        Average precision is NaN without a positive; the area, in which ties count half, also without a negative.
        ``weights`` are those of :meth:`cumulative`.
        """
        hits, taken = self.cumulative(weights)
        new_hits, new_taken = self._increments(hits), self._increments(taken)
        positives, rows = hits[self._final], taken[self._final]
        # Rows of weight zero may come first: then nothing is taken yet, and nothing gained.
        precision = np.divide(hits, taken, out=np.zeros_like(hits), where=taken > 0)
        gained = self._sums(new_hits * precision)
        wins = self._sums((new_taken - new_hits) * (hits - new_hits / 2))
        return divide(gained, positives), divide(wins, positives * (rows - positives))

    def _within_groups(self, totals: FloatArray) -> FloatArray:
        """Cumulative totals over all groups, less what earlier groups hold."""
        if self._count <= 1:
            return totals
        earlier = np.concatenate([np.zeros((1, totals.shape[1])), totals[self._final[:-1]]])
        return np.asarray(totals - np.repeat(earlier, np.diff(self._first, append=len(totals)), axis=0), float)

    def _increments(self, totals: FloatArray) -> FloatArray:
        """What each step adds to its group's total."""
        added = np.diff(totals, axis=0, prepend=0.0)
        added[self._first] = totals[self._first]
        return added

    def _sums(self, values: FloatArray) -> FloatArray:
        return group_sums(values, self._group, self._count)
