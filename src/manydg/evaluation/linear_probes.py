"""The paper's orthogonality table: do linear models read labels and patients from different directions of v?

Logistic regressions predict the label and the patient from the fixed embeddings v, its part along z and its part at
right angles to z, each dimension divided by its standard deviation. A regression over K classes has K weight vectors
(one where K is 2). Rows that compare one question in two embeddings pair the vectors of the same class and average the
cosines over classes. The row that compares labels with patients has no such pairing: it averages over every (label
class, patient) pair. Softmax weights sum to zero over the classes, so this signed average is close to zero whatever the
embedding is; the mean absolute cosine beside it, and what random directions would give, are what can be read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from manydg.errors import DataError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
PARTS = ("v", "parallel", "orthogonal")
ROWS = (
    "v labels, orthogonal labels",
    "v domains, parallel domains",
    "v labels, v domains",
    "v labels, parallel labels",
)
"""The four rows of the paper's table, in its order."""


@dataclass(frozen=True)
class WeightCosines:
    """The four rows, and what is needed to read them.

    Attributes
    ----------
    mean : dict of str to float
        Mean cosine of each row of :data:`ROWS`.
    absolute : dict of str to float
        Mean absolute cosine of each row.
    random_absolute : float
        The mean absolute cosine of two random directions in so many dimensions.
    accuracy : dict of str to float
        ``"labels from v"`` and so on: share of held-out samples (of the same patients) a probe gets right; for
        multi-label the mean over labels.
    chance : dict of str to float
        ``labels`` and ``domains``: the share of the commonest class among the held-out samples.
    samples, domains : int
        What the probes were fitted on.
    converged : bool
    """

    mean: dict[str, float]
    absolute: dict[str, float]
    random_absolute: float
    accuracy: dict[str, float]
    chance: dict[str, float]
    samples: int
    domains: int
    converged: bool


@dataclass(frozen=True, eq=False)
class _Probe:
    weights: FloatArray
    """``(classes, dim)``, one row where there are two classes."""
    accuracy: float
    converged: bool


def weight_cosines(
    embeddings: Mapping[str, npt.NDArray[Any]],
    labels: npt.NDArray[Any],
    patients: npt.NDArray[Any],
    *,
    max_patients: int = 100,
    max_samples: int = 10_000,
    seed: int = 0,
) -> WeightCosines:
    """Fit the six linear probes and compare their weights.

    Parameters
    ----------
    embeddings : mapping
        ``v``, ``parallel`` and ``orthogonal``, each ``(samples, dim)``.
    labels : (samples,) class codes, or (samples, K) indicators for multi-label
    patients : (samples,)
    max_patients, max_samples : int
        At most so many, drawn at random: a regression over thousands of patients takes hours and says the same.
    seed : int

    Returns
    -------
    WeightCosines
    """
    rows = _chosen_rows(np.asarray(patients), max_patients, max_samples, seed)
    domains = np.unique(np.asarray(patients)[rows], return_inverse=True)[1].astype(np.int64)
    wanted = np.asarray(labels)[rows]
    if domains.max(initial=0) < 1 or (wanted == wanted[:1]).all():
        raise DataError("linear probes need samples of at least two patients and two labels")
    held = _held_out(domains, seed)
    scaled = {part: scale_dimensions(np.asarray(embeddings[part])[rows]) for part in PARTS}
    label_probes = {part: _fit(scaled[part], wanted, held) for part in PARTS}
    domain_probes = {part: _fit(scaled[part], domains, held) for part in PARTS}
    cosines = (
        _matched(label_probes["v"], label_probes["orthogonal"]),
        _matched(domain_probes["v"], domain_probes["parallel"]),
        _all_pairs(label_probes["v"], domain_probes["v"]),
        _matched(label_probes["v"], label_probes["parallel"]),
    )
    everyone = [*label_probes.values(), *domain_probes.values()]
    accuracy = {f"labels from {part}": probe.accuracy for part, probe in label_probes.items()}
    accuracy |= {f"domains from {part}": probe.accuracy for part, probe in domain_probes.items()}
    return WeightCosines(
        mean={row: _mean(values) for row, values in zip(ROWS, cosines, strict=True)},
        absolute={row: _mean(np.abs(values)) for row, values in zip(ROWS, cosines, strict=True)},
        random_absolute=random_cosine(scaled["v"].shape[1]),
        accuracy=accuracy,
        chance={"labels": _commonest(wanted[held]), "domains": _commonest(domains[held])},
        samples=len(rows),
        domains=int(domains.max()) + 1,
        converged=all(probe.converged for probe in everyone),
    )


def scale_dimensions(embeddings: npt.NDArray[Any]) -> FloatArray:
    """Each dimension divided by its standard deviation; one that does not vary is set to zero."""
    values = np.asarray(embeddings, float)
    spread = values.std(axis=0)
    varies = spread > 1e-12 * np.maximum(1.0, np.abs(values).max(axis=0, initial=0.0))
    return np.asarray(np.where(varies, (values - values.mean(axis=0)) / np.where(varies, spread, 1.0), 0.0), float)


def random_cosine(dim: int) -> float:
    """Expected absolute cosine of two random directions in ``dim`` dimensions.

    Examples
    --------
    >>> round(random_cosine(128), 3)
    0.071
    """
    return float(np.exp(special.gammaln(dim / 2) - special.gammaln((dim + 1) / 2)) / math.sqrt(math.pi))


def _chosen_rows(patients: npt.NDArray[Any], max_patients: int, max_samples: int, seed: int) -> IntArray:
    rng = np.random.default_rng(seed)
    names = np.unique(patients)
    rows = np.flatnonzero(np.isin(patients, rng.permutation(names)[:max_patients]))
    return np.sort(rng.permutation(rows)[:max_samples])


def _held_out(domains: IntArray, seed: int) -> npt.NDArray[np.bool_]:
    """A quarter of the samples, but never the last fitted one of a patient."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(domains))
    first = order[np.unique(domains[order], return_index=True)[1]]
    held = rng.random(len(domains)) < 0.25
    held[first] = False
    return held


def _fit(inputs: FloatArray, wanted: npt.NDArray[Any], held: npt.NDArray[np.bool_]) -> _Probe:
    if wanted.ndim == 1:
        return _fit_classes(inputs, wanted, held)
    both = [k for k in range(wanted.shape[1]) if len(np.unique(wanted[~held, k])) == 2]
    if not both:
        raise DataError("linear probes need a label that some samples have and others do not")
    probes = [_fit_classes(inputs, wanted[:, k], held) for k in both]
    return _Probe(
        np.concatenate([probe.weights for probe in probes]),
        float(np.mean([probe.accuracy for probe in probes])),
        all(probe.converged for probe in probes),
    )


def _fit_classes(inputs: FloatArray, wanted: npt.NDArray[Any], held: npt.NDArray[np.bool_]) -> _Probe:
    if len(np.unique(wanted[~held])) < 2:
        raise DataError(f"a linear probe needs two classes; the {int((~held).sum())} samples to fit have one")
    model = LogisticRegression(C=1.0, max_iter=300)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(inputs[~held], wanted[~held])
    slow = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    accuracy = float((model.predict(inputs[held]) == wanted[held]).mean()) if held.any() else math.nan
    return _Probe(np.asarray(model.coef_, float), accuracy, not slow)


def _matched(first: _Probe, second: _Probe) -> FloatArray:
    """Cosine of the two weight vectors of each class, ``(classes,)``."""
    return np.asarray(np.einsum("kd,kd->k", _units(first.weights), _units(second.weights)), float)


def _all_pairs(first: _Probe, second: _Probe) -> FloatArray:
    """Cosine of every weight vector of one with every one of the other."""
    return np.asarray(_units(first.weights) @ _units(second.weights).T, float).ravel()


def _units(weights: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(weights, axis=1, keepdims=True)
    return np.where(lengths > 0, weights / np.where(lengths > 0, lengths, 1.0), np.nan)


def _mean(values: FloatArray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


def _commonest(wanted: npt.NDArray[Any]) -> float:
    """Share of the commonest class; for indicators the mean over labels."""
    if len(wanted) == 0:
        return math.nan
    if wanted.ndim == 2:
        share = wanted.mean(axis=0)
        return float(np.maximum(share, 1 - share).mean())
    return float(np.unique(wanted, return_counts=True)[1].max() / len(wanted))
