"""Is a patient like those of the training? Distance of the patient's mean embedding from the training patients' means.

The distance is Mahalanobis': with B the covariance of training patients' mean embeddings (shrunk after Ledoit and Wolf,
since patients are few and dimensions many) and W that of samples around their own patient's mean, the mean of n samples
of a patient like any other varies by B + W / n. So a patient is not called strange for being little known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.errors import DataError

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
FALSE_ALARMS = 0.05
_LEAST = 1e-9
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Reference:
    """Where training patients lie, as axes along which their means vary by one and samples within them independently.

    Attributes
    ----------
    mean : array ``(dim,)``
        Mean of the training patients' mean embeddings.
    axes : array ``(dim, dim)``
        Columns take ``embedding - mean`` to those axes.
    within : array ``(dim,)``
        Variance of single samples around their patient's mean, along each axis.
    """

    mean: FloatArray
    axes: FloatArray
    within: FloatArray

    def distances(self, embeddings: Array, patients: Array) -> tuple[Array, FloatArray]:
        """Codes of the patients, in order, and the distance of each, ``(patients,)``.

        A distance is scaled so that it is about one for a patient like those of the training.

        Parameters
        ----------
        embeddings : array ``(samples, dim)``
        patients : array ``(samples,)``
        """
        codes, means, counts, _ = _patient_means(np.asarray(embeddings, float), patients)
        along = (means - self.mean) @ self.axes
        squared = along**2 / (1.0 + self.within / counts[:, None])
        return codes, np.sqrt(squared.mean(axis=1))


def fit_reference(embeddings: Array, patients: Array) -> Reference:
    """The reference of training patients.

    Parameters
    ----------
    embeddings : array ``(samples, dim)``
    patients : array ``(samples,)``
        Two patients at least.
    """
    from sklearn.covariance import ledoit_wolf

    values = np.asarray(embeddings, float)
    codes, means, _, groups = _patient_means(values, patients)
    if len(codes) < 2:
        raise DataError(f"what is usual among patients cannot be told from {len(codes)}: two at least are needed")
    spread = values.std(axis=0)
    # Shrinkage is towards equal variances, so dimensions are brought to one unit first; one without any stays out.
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > _LEAST * (1 + np.abs(values).max()))
    centre = means.mean(axis=0)
    between, _ = ledoit_wolf((means - centre) * scale, assume_centered=True)
    apart = (values - means[groups]) * scale
    within = apart.T @ apart / max(len(values) - len(codes), 1)
    lengths, directions = np.linalg.eigh(between)
    whiten = directions / np.sqrt(np.maximum(lengths, max(float(lengths[-1]), _LEAST) * _LEAST))
    ratios, turn = np.linalg.eigh(whiten.T @ within @ whiten)
    return Reference(centre, scale[:, None] * (whiten @ turn), np.maximum(ratios, 0.0))


def novelty_threshold(distances: Array, false_alarms: float = FALSE_ALARMS) -> tuple[float, float]:
    """The distance from which a patient is flagged, from patients who are like any new one but were not trained on.

    Parameters
    ----------
    distances : array ``(patients,)``
        Of validation patients.
    false_alarms : float
        Wanted probability that a patient of the same population is flagged. ``n`` patients can promise ``1 / (n + 1)``
        at best, and with fewer that is what the threshold promises.

    Returns
    -------
    threshold, false_alarms : float
        A patient is flagged if the distance is larger.
    """
    found = np.sort(np.asarray(distances, float))
    if not len(found):
        raise DataError("a threshold of novelty needs at least one validation patient")
    rank = min(len(found), math.ceil((1.0 - false_alarms) * (len(found) + 1) - _ROUNDING))
    return float(found[rank - 1]), max(false_alarms, 1.0 / (len(found) + 1))


def _patient_means(values: FloatArray, patients: Array) -> tuple[Array, FloatArray, FloatArray, npt.NDArray[np.int64]]:
    codes, groups = np.unique(patients, return_inverse=True)
    counts = np.bincount(groups, minlength=len(codes)).astype(float)
    starts = (np.cumsum(counts) - counts).astype(np.int64)
    sums = np.add.reduceat(values[np.argsort(groups, kind="stable")], starts, axis=0)
    return codes, sums / counts[:, None], counts, groups
