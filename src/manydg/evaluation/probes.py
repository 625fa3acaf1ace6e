"""What embeddings hold of the patient and of the label: similarities, norms, retrieval and linear probes.

Four questions, asked of fixed embeddings: are samples of one patient closer than those of two
(:func:`domain_similarity`), how long are the parts of v along and at right angles to z (:func:`norms`), can a patient
be recognised from another session (:func:`patient_retrieval`), and do linear models read labels and patients from
different directions of v (:func:`weight_cosines`, the paper's orthogonality table).
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
from manydg.evaluation.metrics import divide, group_sums
from manydg.evaluation.statistics import ALPHA

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_SLICE = 65_536
_EXCHANGES, _RIDGE = 999, 1e-2

PARTS = ("v", "parallel", "orthogonal")
ROWS = (
    "v labels, orthogonal labels",
    "v domains, parallel domains",
    "v labels, v domains",
    "v labels, parallel labels",
)
"""The four rows of the paper's table, in its order."""


@dataclass(frozen=True)
class DomainSimilarity:
    """Mean cosine similarity of embedding pairs.

    - ``within``: Over all pairs of samples of one patient, as the paper averages; NaN if no patient has two samples.
    - ``across``: Over all pairs of samples of two patients; NaN with one patient.
    """

    within: float
    across: float


def domain_similarity(embeddings: npt.NDArray[Any], patients: npt.NDArray[Any]) -> DomainSimilarity:
    """Mean cosine similarity within and across patients, exact over all pairs in time O(samples x dim).

    The sum of cosines over the pairs of a group is ``(|s|^2 - n) / 2``, where ``s`` is the sum of the group's ``n``
    unit vectors; pairs across patients are what is left of all pairs. An embedding of zero has no direction and enters
    none.

    - ``embeddings`` (samples, dim)
    - ``patients`` (samples,)
    """
    sums, sizes = _unit_sums(np.asarray(embeddings), _codes(patients))
    samples = sizes.sum()
    inside = ((sums**2).sum(axis=1) - sizes) / 2
    pairs = sizes * (sizes - 1) / 2
    everything = (float((sums.sum(axis=0) ** 2).sum()) - samples) / 2
    other_pairs = samples * (samples - 1) / 2 - pairs.sum()
    return DomainSimilarity(
        within=float(divide(inside.sum(), pairs.sum())), across=float(divide(everything - inside.sum(), other_pairs))
    )


def _unit_sums(embeddings: npt.NDArray[Any], groups: IntArray) -> tuple[FloatArray, FloatArray]:
    """Sum and number of the unit vectors of each group; a slice at a time."""
    count = int(groups.max(initial=-1)) + 1
    sums, sizes = np.zeros((count, embeddings.shape[-1])), np.zeros(count)
    for start in range(0, len(embeddings), _SLICE):
        units, kept = _unit_rows(embeddings[start : start + _SLICE])
        mine = groups[start : start + _SLICE][kept]
        sums += group_sums(units, mine, count)
        sizes += np.bincount(mine, minlength=count)
    return sums, sizes


def _unit_rows(embeddings: npt.NDArray[Any]) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Rows scaled to length one, and which rows have a direction at all."""
    values = np.asarray(embeddings, float)
    if values.ndim != 2 or not np.isfinite(values).all():
        raise DataError(f"embeddings are finite numbers (samples, dim); got shape {values.shape}, finite or not")
    norms = np.linalg.norm(values, axis=1)
    kept = norms > 0
    return values[kept] / norms[kept, None], kept


@dataclass(frozen=True, eq=False)
class Norms:
    """Lengths of the two parts of v, ``(samples,)`` each, and their relation.

    - ``parallel``, ``orthogonal`` (samples,)
    - ``parallel_larger``: Share of samples whose parallel part is the longer one (the paper: generally so).
    """

    parallel: FloatArray
    orthogonal: FloatArray
    parallel_larger: float


def norms(parallel: npt.NDArray[Any], orthogonal: npt.NDArray[Any]) -> Norms:
    """Lengths of the parts of v along and at right angles to z, both ``(samples, dim)``."""
    along, across = (np.linalg.norm(np.asarray(part, float), axis=1) for part in (parallel, orthogonal))
    return Norms(parallel=along, orthogonal=across, parallel_larger=float((along > across).mean()))


@dataclass(frozen=True)
class Retrieval:
    """How often a nearest neighbour is the same person, beside what chance gives.

    - ``rate``: NaN if no patient has two sessions.
    - ``chance``: The expected rate of a neighbour drawn at random among the candidates.
    """

    rate: float
    chance: float
    queries: int


@dataclass(frozen=True)
class Identification:
    """How well something tells whose a session is, beside the same with the owners of sessions exchanged at random.

    - ``rate``: Share that is right; NaN if no patient has two sessions.
    - ``chance``: Mean of that share over random exchanges.
    - ``p``: One-sided: how often a random exchange is at least as right.
    - ``patients``: How many there are to tell apart.
    """

    rate: float
    chance: float
    p: float
    patients: int

    @property
    def above_chance(self) -> bool:
        return self.p < ALPHA


def identify_sessions(
    embeddings: npt.NDArray[Any], patients: npt.NDArray[Any], sessions: npt.NDArray[Any]
) -> Identification:
    """How often the nearest other session by mean embedding (cosine) is of the same patient; each patient counts once.

    - ``embeddings`` (samples, dim)
    - ``patients``, ``sessions`` (samples,): As for :func:`patient_retrieval`.
    """
    means, owners = _session_means(embeddings, patients, sessions)
    kept = np.bincount(owners, minlength=int(owners.max(initial=-1)) + 1)[owners] > 1
    means, owners = means[kept], _codes(owners[kept])
    number = int(owners.max(initial=-1)) + 1
    if number < 2:
        return Identification(math.nan, math.nan, math.nan, number)
    likeness = means @ means.T
    np.fill_diagonal(likeness, -np.inf)
    nearest = likeness.argmax(axis=1)

    def rate(of: IntArray) -> float:
        right = (of[nearest] == of).astype(float)
        return float((np.bincount(of, right) / np.bincount(of)).mean())

    rng = np.random.default_rng(0)
    draws = np.array([rate(rng.permutation(owners)) for _ in range(_EXCHANGES)])
    return _identification(rate(owners), draws, number)


def identify_samples(
    embeddings: npt.NDArray[Any], patients: npt.NDArray[Any], sessions: npt.NDArray[Any]
) -> Identification:
    """How often a linear model that learnt each patient's first session names the patient of a sample of another one.

    The model is a linear discriminant in closed form: the patient with the nearest mean, in units of the spread within
    patients. Patients with a single session are left out, and each patient counts once.

    - ``embeddings`` (samples, dim)
    - ``patients``, ``sessions`` (samples,): Sessions are counted within the patient, from 0.
    """
    values, who, first = np.asarray(embeddings, float), _codes(patients), np.asarray(sessions) == 0
    both = np.intersect1d(who[first], who[~first])
    kept = np.isin(who, both)
    values, who, first = values[kept], _codes(who[kept]), first[kept]
    number = len(both)
    if number < 2:
        return Identification(math.nan, math.nan, math.nan, number)
    learnt = who[first]
    means = group_sums(values[first], learnt, number) / np.bincount(learnt, minlength=number)[:, None]
    spread = values[first] - means[learnt]
    covariance = spread.T @ spread / len(spread)
    ridge = _RIDGE * max(float(np.trace(covariance)) / len(covariance), 1e-12)
    weights = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), means.T)
    scores = values[~first] @ weights - 0.5 * np.einsum("pd,dp->p", means, weights)
    named = np.zeros((number, number))
    np.add.at(named, (who[~first], scores.argmax(axis=1)), 1.0)
    named /= named.sum(axis=1, keepdims=True)
    rng, every = np.random.default_rng(0), np.arange(number)
    draws = np.array([named[every, rng.permutation(number)].mean() for _ in range(_EXCHANGES)])
    return _identification(float(named.diagonal().mean()), draws, number)


def _identification(rate: float, draws: FloatArray, patients: int) -> Identification:
    p = (1 + int((draws >= rate - 1e-12).sum())) / (1 + len(draws))
    return Identification(rate, float(draws.mean()), p, patients)


def half_sessions(patients: npt.NDArray[Any]) -> IntArray:
    """Sessions where none are known: the first and the second half of each patient's samples, in their order."""
    _, groups = np.unique(patients, return_inverse=True)
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return (rank >= (sizes[groups] + 1) // 2).astype(np.int64)


def patient_retrieval(
    embeddings: npt.NDArray[Any],
    patients: npt.NDArray[Any],
    sessions: npt.NDArray[Any] | None = None,
    asks: npt.NDArray[np.bool_] | None = None,
) -> Retrieval:
    """How often the nearest other session by mean embedding (cosine) belongs to the same person.

    - ``embeddings`` (samples, dim)
    - ``patients`` (samples,)
    - ``sessions`` (samples,): Night or visit of each sample, counted within the patient; by default each patient's two
      halves.
    - ``asks`` (samples,): Samples of the patients whose sessions are queries; sessions of all patients are candidates.
    """
    means, owners = _session_means(embeddings, patients, half_sessions(patients) if sessions is None else sessions)
    same = (owners[:, None] == owners[None, :]) & ~np.eye(len(owners), dtype=bool)
    asking = same.any(axis=1)
    if asks is not None:
        asking &= np.isin(owners, _codes(patients)[asks])
    if not asking.any():
        return Retrieval(math.nan, math.nan, 0)
    likeness = means @ means.T
    np.fill_diagonal(likeness, -np.inf)
    nearest = likeness.argmax(axis=1)
    chance = same[asking].sum(axis=1) / (len(owners) - 1)
    return Retrieval(float((owners[nearest] == owners)[asking].mean()), float(chance.mean()), int(asking.sum()))


def _session_means(
    embeddings: npt.NDArray[Any], patients: npt.NDArray[Any], sessions: npt.NDArray[Any]
) -> tuple[FloatArray, IntArray]:
    """Unit mean embedding of each (patient, session), and the patient of each."""
    person, session = _codes(patients), _codes(sessions)
    _, first, groups = np.unique(person * (session.max() + 1) + session, return_index=True, return_inverse=True)
    sums = group_sums(np.asarray(embeddings, float), groups.astype(np.int64), len(first))
    means, kept = _unit_rows(sums / np.bincount(groups)[:, None])
    return means, person[first][kept]


def _codes(names: npt.NDArray[Any]) -> IntArray:
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class WeightCosines:
    """The four rows, and what is needed to read them.

    - ``mean``: Mean cosine of each row of :data:`ROWS`.
    - ``absolute``: Mean absolute cosine of each row.
    - ``random_absolute``: The mean absolute cosine of two random directions in so many dimensions.
    - ``accuracy``: ``"labels from v"`` and so on: share of held-out samples (of the same patients) a probe gets right;
      for multi-label the mean over labels.
    - ``chance``: ``labels`` and ``domains``: the share of the commonest class among the held-out samples.
    - ``samples``, ``domains``: What the probes were fitted on.
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
    """Fit logistic regressions for label and patient on each part of the embeddings and compare their weights.

    The label and the patient are predicted from v, its part along z and its part at right angles to z, each dimension
    divided by its standard deviation. A regression over K classes has K weight vectors (one where K is 2). Rows that
    compare one question in two embeddings pair the vectors of the same class and average the cosines over classes. The
    row that compares labels with patients has no such pairing: it averages over every (label class, patient) pair.
    Softmax weights sum to zero over the classes, so this signed average is close to zero whatever the embedding is;
    the mean absolute cosine beside it, and what random directions would give, are what can be read.

    - ``embeddings``: ``v``, ``parallel`` and ``orthogonal``, each ``(samples, dim)``.
    - ``labels``: (samples,) class codes, or (samples, K) indicators for multi-label
    - ``patients`` (samples,)
    - ``max_patients``, ``max_samples``: At most so many, drawn at random: a regression over thousands of patients takes
      hours for the same answer.
    """
    rows = _chosen_rows(np.asarray(patients), max_patients, max_samples, seed)
    domains = np.unique(np.asarray(patients)[rows], return_inverse=True)[1].astype(np.int64)
    wanted = np.asarray(labels)[rows]
    if domains.max(initial=0) < 1 or (wanted == wanted[:1]).all():
        raise DataError("linear probes need samples of at least two patients and two labels")
    test_rows = _held_out(domains, seed)
    scaled = {part: scale_dimensions(np.asarray(embeddings[part])[rows]) for part in PARTS}
    label_probes = {part: _fit(scaled[part], wanted, test_rows) for part in PARTS}
    domain_probes = {part: _fit(scaled[part], domains, test_rows) for part in PARTS}
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
        chance={"labels": _commonest(wanted[test_rows]), "domains": _commonest(domains[test_rows])},
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
    test_rows = rng.random(len(domains)) < 0.25
    test_rows[first] = False
    return test_rows


def _fit(inputs: FloatArray, wanted: npt.NDArray[Any], test_rows: npt.NDArray[np.bool_]) -> _Probe:
    if wanted.ndim == 1:
        return _fit_classes(inputs, wanted, test_rows)
    both = [k for k in range(wanted.shape[1]) if len(np.unique(wanted[~test_rows, k])) == 2]
    if not both:
        raise DataError("linear probes need a label that some samples have and others do not")
    probes = [_fit_classes(inputs, wanted[:, k], test_rows) for k in both]
    return _Probe(
        np.concatenate([probe.weights for probe in probes]),
        float(np.mean([probe.accuracy for probe in probes])),
        all(probe.converged for probe in probes),
    )


def _fit_classes(inputs: FloatArray, wanted: npt.NDArray[Any], test_rows: npt.NDArray[np.bool_]) -> _Probe:
    if len(np.unique(wanted[~test_rows])) < 2:
        raise DataError(f"a linear probe needs two classes; the {int((~test_rows).sum())} samples to fit have one")
    model = LogisticRegression(C=1.0, max_iter=300)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(inputs[~test_rows], wanted[~test_rows])
    slow = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    accuracy = float((model.predict(inputs[test_rows]) == wanted[test_rows]).mean()) if test_rows.any() else math.nan
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
