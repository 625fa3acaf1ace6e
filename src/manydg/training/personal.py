"""Predictions for a patient of whom a few samples have labels, without training the model again.

The model's logits l(x) of the patient's samples get a random effect f(x), whose posterior comes from the labelled
samples. Its prior is the population's: variances are chosen on validation patients, some of whose labels are shown to
the learner and the rest used to score it. ``docs/method.md`` has the equations.

==============  ========================================================================================================
learner         f(x)
==============  ========================================================================================================
``effects``     Gaussian process: an intercept, a linear head on the features, and a drift in time, for each class
``prototypes``  class means of the features, moved towards the labelled samples by a closed-form Gaussian posterior
``intercept``   mixed-effects head: an intercept and a slope of the logit, for each class
``fine-tune``   baseline: a linear head on the features, by gradient descent that is stopped early
``markov``      ``effects`` without drift, then a Markov chain of the classes over the patient's samples in time: with
                causal context over earlier samples alone, else over the whole record, whether labelled or not
``auto``        the one of these that was best on validation patients
``shares``      without labels: the patient's own shares of the classes, by expectation maximisation
==============  ========================================================================================================
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from manydg.algorithms import Algorithm
from manydg.algorithms.best import Best
from manydg.backbones._sequences import (
    EMISSIONS,
    LEAST_PROBABILITY,
    PRIORS,
    SHARPNESSES,
    Chain,
    count_transitions,
)
from manydg.data.dataset import DomainDataset
from manydg.data.timeline import Timeline
from manydg.errors import ConfigError, StorageError, unknown_name
from manydg.evaluation.metrics import score
from manydg.files import Json, ParsedJson
from manydg.targets import Target
from manydg.training.inference import embed_dataset, predict_probabilities
from manydg.training.record import read_tensors, write_tensors

PERSONAL = "personal.safetensors"
MARKOV, AUTO = "markov", "auto"
LEARNERS = ("effects", "prototypes", "intercept", "fine-tune", MARKOV, AUTO)
UNLABELLED = "shares"
"""The learner that is shown samples without their labels."""
KINDS = ("classes", "votes", "binary", "multilabel")
"""Kinds of target that labels of the patient can be used for."""
MOST_LABELS, MOST_EARLIER_LABELS = 1000, 200
"""Labelled samples of one patient that a learner uses: of more, the latest half, and others spread over time."""
_MOST_AXES = 64
_TRAINING_PATIENTS, _VALIDATION_PATIENTS, _SAMPLES, _VALIDATION_SAMPLES = 60, 24, 100, 6000
_COUNTS = (1, 5, 20, 50)
_STEPS, _TOLERANCE = 100, 1e-5
_STEPS_OF_SEARCH = 10
_SCORED_SAMPLES = 250
_REACHES = (5.0, 20.0, 80.0)
"""Usual pauses since the last label by which samples are grouped."""
_CHAINS = [(0.0, 0.0), *itertools.product(EMISSIONS, PRIORS)]
"""Emission and prior of the chains that are tried: the first passes on what is known from labels, and nothing else."""

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Strengths:
    """How far a patient may differ from the population; 0 switches a part off.

    - ``intercept``, ``slope``: Standard deviation of a class's intercept, and of the slope of its logit.
    - ``head``: Of the weights of a linear head on the scaled features.
    - ``drift``, ``length``: Of a drift in time, and how long it takes to change, in the unit of the times.
    - ``prototypes``, ``temper``: Variance of class means between patients, relative to that of the training patients,
      and the share of the resulting change that is applied.
    - ``steps``: Steps of gradient descent.
    - ``samples``: How many samples the population's shares of the classes count for; without end where it is 0.
    - ``reach``: How long after the last label it still counts, where only earlier labels do; without end where it is 0.
    """

    intercept: float = 0.0
    slope: float = 0.0
    head: float = 0.0
    drift: float = 0.0
    length: float = 1.0
    prototypes: float = 0.0
    temper: float = 0.0
    steps: int = 0
    samples: float = 0.0
    reach: float = 0.0


_DEFAULTS = {
    "effects": Strengths(intercept=0.3, head=0.1),
    "prototypes": Strengths(prototypes=0.3, temper=0.03),
    "intercept": Strengths(intercept=0.3),
    "fine-tune": Strengths(steps=3),
    MARKOV: Strengths(intercept=0.3, head=0.1),
    UNLABELLED: Strengths(),
}
FIRST = "-first"
DEFAULTS = _DEFAULTS | {f"{name}{FIRST}": value for name, value in _DEFAULTS.items()}
"""Where there are no validation patients to choose by."""


@dataclass(frozen=True, eq=False)
class Population:
    """What a model's learners know of patients in general; no patient can be recognised in it.

    - ``centre`` ``(width,)``: Mean of the classes' mean features.
    - ``axes`` ``(width, n)``: To directions in which features vary alike within a class, those first in which patients
      differ most.
    - ``means`` ``(K, n)``: Of each class.
    - ``spread`` ``(n,)``: Variance of patients' class means, relative to that within a class.
    - ``shares`` ``(K,)``: Of training samples that are of each class.
    - ``strengths``: For each learner where the labelled samples are spread over the patient's others; and, as
      ``NAME-first``, where they are the patient's first, which says less about the rest.
    - ``chain``: None without times, for labels that do not exclude one another, and where it did not help on validation
      patients: ``markov`` has the effects alone then.
    - ``best``: What ``auto`` is.
    - ``patients``: Validation patients that the strengths were chosen on; 0 where they are :data:`DEFAULTS`.
    """

    centre: Array
    axes: Array
    means: Array
    spread: Array
    shares: Array
    strengths: Mapping[str, Strengths]
    patients: int
    chain: Chain | None = None
    best: str = "effects"

    def learner(self, name: str) -> str:
        """The learner that a name stands for."""
        name = self.best if name == AUTO else name
        if name not in _EFFECTS:
            raise unknown_name("learner", name, LEARNERS)
        if name not in self.strengths:
            raise ConfigError(f"this model was trained before there was the learner '{name}': train it again")
        return name


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model makes of samples, before any label of their patient is known.

    - ``logits`` ``(samples, K)``
    - ``features`` ``(samples, n)``: On the population's axes, in units of the deviation within a class.
    - ``times`` ``(samples,)``
    """

    logits: Array
    features: Array
    times: Array

    def take(self, rows: Rows) -> Outputs:
        return Outputs(self.logits[rows], self.features[rows], self.times[rows])


# What the learners know of patients in general


def fit_population(
    algorithm: Algorithm,
    train: DomainDataset,
    val: DomainDataset | None,
    probabilities: npt.NDArray[np.float32] | None,
    *,
    causal: bool = False,
) -> Population | None:
    """Learn from training and validation patients how much a patient may differ; test patients are not looked at.

    - ``train``, ``val``: With context, as the algorithm takes them.
    - ``probabilities`` ``(validation samples, K)``: As the algorithm predicts them.
    - ``causal``: Whether predictions may only use earlier samples.
    - returns: None for a target that labels of the patient cannot be used for.
    """
    if algorithm.target.kind not in KINDS:
        return None
    rows = _spread_rows(train, _TRAINING_PATIENTS, 2 * _SAMPLES)
    features, some = _features(algorithm, train, rows), train.select(rows)
    population = _moments(features, _indicators(algorithm.target, some), some.domains.cpu().numpy())
    pause = _usual_pause(train)
    if pause and algorithm.target.exclusive and not (isinstance(algorithm, Best) and algorithm.chain is not None):
        chain = Chain(_transitions(algorithm.target, train, pause), population.shares, pause)
        population = dataclasses.replace(population, chain=chain)
    variance = getattr(algorithm, "intercept_variance", None)
    if variance is not None:
        population = _with_intercept(population, float(variance))
    if val is None or probabilities is None:
        return population
    chosen = _spread_rows(val, _VALIDATION_PATIENTS, _VALIDATION_SAMPLES)
    outputs = _outputs(
        algorithm.target, _features(algorithm, val, chosen), probabilities[chosen], val, chosen, population
    )
    people = _People(
        outputs, _indicators(algorithm.target, val.select(chosen)), val.domains[chosen].cpu().numpy(), algorithm.target
    )
    return _choose(population, people, pause, causal=causal, estimated=variance is not None)


def _with_intercept(population: Population, variance: float) -> Population:
    """The population with the variance of intercepts that the algorithm estimated in training.

    It is of the difference between two logits, each of which has an intercept of its own here.
    """
    own = Strengths(intercept=(variance / 2) ** 0.5)
    return dataclasses.replace(population, strengths={**population.strengths, "intercept": own, "intercept-first": own})


def _spread_rows(dataset: DomainDataset, patients: int, samples: int) -> Rows:
    """Rows of so many patients at most, so many of each: the first half from the start, the others over the rest."""
    domains = dataset.domains.cpu().numpy()
    present = np.unique(domains)
    kept = present[np.unique(np.linspace(0, len(present) - 1, min(patients, len(present))).astype(int))]
    chosen = []
    for code in kept:
        rows = _in_time(dataset, np.flatnonzero(domains == code))
        later = np.linspace(samples // 2, len(rows) - 1, samples - samples // 2).astype(int)
        chosen.append(rows if len(rows) <= samples else np.concatenate([rows[: samples // 2], rows[np.unique(later)]]))
    return np.sort(np.concatenate(chosen))


def _in_time(dataset: DomainDataset, rows: Rows) -> Rows:
    if dataset.times is None:
        return rows
    return rows[np.argsort(dataset.times.cpu().numpy()[rows], kind="stable")]


def _features(algorithm: Algorithm, dataset: DomainDataset, rows: Rows) -> Array:
    """The features that the algorithm's head reads: what is left of v without z, or v itself."""
    if algorithm.backbone.crop is not None:
        # A sequence model reads whole sessions.
        owners = dataset.domains.cpu().numpy()
        whole = np.flatnonzero(np.isin(owners, owners[rows]))
        embeddings, taken = embed_dataset(algorithm, dataset.select(whole)), np.searchsorted(whole, rows)
    else:
        embeddings, taken = embed_dataset(algorithm, dataset.select(rows)), np.arange(len(rows))
    values = embeddings.get("orthogonal", embeddings["v"]).numpy()[taken]
    return np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)


def _indicators(target: Target, dataset: DomainDataset) -> Array:
    """Which classes or labels each sample has, ``(samples, K)``."""
    truth = target.truth(dataset.targets).cpu().numpy()
    return np.asarray(truth if truth.ndim == 2 else np.eye(target.size)[truth], np.float64)


def _moments(features: Array, indicators: Array, patients: Rows) -> Population:
    """Class means and axes of training samples ``(samples, width)``."""
    counts = indicators.sum(axis=0)
    means = indicators.T @ features / np.maximum(counts, 1.0)[:, None]
    # Of rare labels these samples may have none at all.
    centre = means[counts > 0].mean(axis=0) if counts.any() else features.mean(axis=0)
    # Several labels, or none: the mean of those present.
    of_sample = indicators @ means / np.maximum(indicators.sum(axis=1, keepdims=True), 1.0)
    within = features - np.where(indicators.sum(axis=1, keepdims=True) > 0, of_sample, centre)
    values, vectors = np.linalg.eigh(within.T @ within / len(within))
    axes = vectors / np.sqrt(np.maximum(values, 0.0) + 1e-3 * max(values.mean(), 1e-12))
    scaled, moved = (features - centre) @ axes, (means - centre) @ axes
    spread = _between_patients(scaled, moved, indicators, patients)
    order = np.argsort(-spread, kind="stable")[:_MOST_AXES]
    return Population(
        centre, axes[:, order], moved[:, order], spread[order], indicators.mean(axis=0), DEFAULTS, 0
    )  # fmt: skip


def _transitions(target: Target, dataset: DomainDataset, pause: float) -> Array:
    """How often each class follows each after a usual pause, ``(K, K)``."""
    assert dataset.times is not None
    timeline = Timeline.of(dataset.domains.cpu(), dataset.times.cpu(), None)
    follows = (torch.diff(timeline.patient) == 0) & ((torch.diff(timeline.times) - pause).abs() <= pause / 2)
    classes = target.truth(dataset.targets).cpu()[timeline.order].numpy()
    return count_transitions(classes, follows.numpy(), target.size)


def _usual_pause(dataset: DomainDataset) -> float:
    """Median time from one sample of a patient to the next; 0 without times."""
    if dataset.times is None:
        return 0.0
    timeline = Timeline.of(dataset.domains, dataset.times, None)
    pauses = torch.diff(timeline.times)[torch.diff(timeline.patient) == 0]
    return float(pauses[pauses > 0].median()) if bool((pauses > 0).any()) else 0.0


def _between_patients(scaled: Array, means: Array, indicators: Array, patients: Rows) -> Array:
    """Variance of patients' class means around the population's, less what their samples' scatter makes of it."""
    total, noise, groups = np.zeros(scaled.shape[1]), 0.0, 0
    for code in np.unique(patients):
        own = patients == code
        for label in range(indicators.shape[1]):
            rows = own & (indicators[:, label] > 0)
            if (count := int(rows.sum())) >= 5:
                total += np.square(scaled[rows].mean(axis=0) - means[label])
                noise, groups = noise + 1 / count, groups + 1
    return np.maximum((total - noise) / max(groups, 1), 1e-4)


def _outputs(
    target: Target,
    features: Array,
    probabilities: npt.NDArray[np.float32],
    dataset: DomainDataset,
    rows: Rows,
    population: Population,
) -> Outputs:
    clipped = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    logits = np.log(clipped) - (0.0 if target.exclusive else np.log1p(-clipped))
    # A clock of its own where there is none: no drift is then chosen.
    times = np.zeros(len(dataset)) if dataset.times is None else dataset.times.cpu().numpy().astype(np.float64)
    return Outputs(logits, (features - population.centre) @ population.axes, times[rows])


def outputs_of(algorithm: Algorithm, prepared: DomainDataset, population: Population) -> Outputs:
    """What a model makes of the samples of a prepared dataset."""
    rows = np.arange(len(prepared))
    probabilities = predict_probabilities(algorithm, prepared).numpy()
    return _outputs(algorithm.target, _features(algorithm, prepared, rows), probabilities, prepared, rows, population)


# The learners: the effect on samples ``at``, given labelled samples ``seen`` with indicators


@dataclass(frozen=True, eq=False)
class _Given:
    """What a learner works out an effect from: labelled samples, the samples it is asked for, and what is known."""

    seen: Outputs
    indicators: Array
    at: Outputs
    population: Population
    strengths: Strengths
    target: Target
    steps: int


def _kernel(first: Outputs, second: Outputs, population: Population, strengths: Strengths) -> Array:
    """Prior covariance of the effects of two sets of samples, ``(1 or K, first, second)``."""
    scale = (population.spread / population.spread.max()) ** 0.25
    shared = np.full((len(first.logits), len(second.logits)), strengths.intercept**2)
    if strengths.head:
        shared += strengths.head**2 * (first.features * scale) @ (second.features * scale).T
    if strengths.drift:
        apart = np.abs(first.times[:, None] - second.times)
        shared += strengths.drift**2 * np.exp(-apart / strengths.length)
    if not strengths.slope:
        return shared[None]
    one, other = (part.logits - part.logits.mean(axis=1, keepdims=True) for part in (first, second))
    return np.asarray(shared + strengths.slope**2 * one.T[:, :, None] * other.T[:, None, :])


def _gaussian_process(given: _Given) -> Array:
    """The effect at the mode of its posterior, ``(samples, K)``.

    With the prior f = K a, each step replaces the likelihood by a parabola that lies below it (Böhning's bound), so
    that no step makes the posterior less.
    """
    prior = _kernel(given.seen, given.seen, given.population, given.strengths)
    curvature = 0.5 if given.target.exclusive else 0.25
    inverse = np.linalg.inv(curvature * prior + np.eye(prior.shape[-1]))
    logits, truth = given.seen.logits.T[:, :, None], given.indicators.T[:, :, None]
    weights = np.zeros_like(logits)
    for _ in range(given.steps):
        change = inverse @ (truth - _probabilities(logits + prior @ weights, given.target) - weights)
        weights += change
        if np.abs(change).max() < _TOLERANCE:
            break
    effect: Array = (_kernel(given.at, given.seen, given.population, given.strengths) @ weights)[:, :, 0].T
    return effect


def _probabilities(logits: Array, target: Target) -> Array:
    """Of logits whose classes are in the first dimension."""
    if not target.exclusive:
        return np.asarray(1 / (1 + np.exp(-logits)))
    powers = np.exp(logits - logits.max(axis=0))
    return np.asarray(powers / powers.sum(axis=0))


def _moved_prototypes(given: _Given) -> Array:
    """The change of log N(v; mean of class, 1) where each class's mean is replaced by its posterior mean."""
    count = given.indicators.sum(axis=0)[:, None]
    variance = given.strengths.prototypes * given.population.spread
    total = given.indicators.T @ given.seen.features - count * given.population.means
    moved = variance / (1 + count * variance) * total
    gain = given.at.features @ moved.T - (moved * (given.population.means + moved / 2)).sum(axis=1)
    return np.asarray(given.strengths.temper * gain)


def _fine_tuned(given: _Given) -> Array:
    """The effect of a linear head after a few steps of gradient descent from 0."""
    ones = (np.c_[part.features, np.ones(len(part.features))] for part in (given.seen, given.at))
    known, asked = ones
    head = np.zeros((known.shape[1], given.indicators.shape[1]))
    rate = 2.0 / max(float(np.linalg.norm(known, 2)) ** 2, 1e-12)
    for _ in range(given.strengths.steps):
        errors = given.indicators - _probabilities((given.seen.logits + known @ head).T, given.target).T
        head += rate * known.T @ errors
    return np.asarray(asked @ head)


def _shifted_shares(given: _Given) -> Array:
    """The change of log share of each class, from samples whose labels are not known (Saerens et al., 2002)."""
    if not given.strengths.samples or not given.target.exclusive:
        return np.zeros_like(given.at.logits)
    usual = np.maximum(given.population.shares, LEAST_PROBABILITY)
    shares = usual
    for _ in range(given.steps):
        chance = _probabilities((given.seen.logits + np.log(shares / usual)).T, given.target).T
        shares = (chance.sum(axis=0) + given.strengths.samples * usual) / (len(chance) + given.strengths.samples)
    return np.broadcast_to(np.log(shares / usual), given.at.logits.shape)


_EFFECTS: dict[str, Callable[[_Given], Array]] = {
    "effects": _gaussian_process,
    "prototypes": _moved_prototypes,
    "intercept": _gaussian_process,
    "fine-tune": _fine_tuned,
    MARKOV: _gaussian_process,
    UNLABELLED: _shifted_shares,
}


def personal_logits(
    outputs: Outputs,
    patients: Rows,
    known: Rows,
    indicators: Array,
    population: Population,
    target: Target,
    learner: str = "effects",
    *,
    causal: bool = False,
    delay: float = 0.0,
    asked: Rows | None = None,
) -> Array:
    """Logits of all samples, each given the labelled samples of its own patient.

    - ``patients`` ``(samples,)``
    - ``known`` ``(labelled,)``: Positions of the labelled samples.
    - ``indicators`` ``(labelled, K)``: Their labels.
    - ``learner``: One of :data:`LEARNERS`.
    - ``causal``: Whether a sample may only use labels of strictly earlier samples.
    - ``delay``: With ``causal``, how long it takes until the label of a sample is known.
    - ``asked``: Positions of the samples whose logits are needed, where that saves time; others may be as without
      labels.
    """
    name = population.learner(learner)
    needs = np.ones(len(patients), bool) if asked is None else np.isin(np.arange(len(patients)), asked)
    readings = list(_readings(outputs, patients, known, indicators, population, target, name, causal, delay, needs))
    answers = [reading.logits for reading in readings]
    if name == MARKOV and population.chain is not None and readings:
        answers = _chained(readings, population.chain, causal=causal)
    return _answered(readings, answers, outputs)


@dataclass(frozen=True, eq=False)
class _Reading:
    """Samples of a patient in the order of time, what is known of them, and which of them are asked for."""

    rows: Rows
    times: Array
    logits: Array
    labels: Array
    asked: npt.NDArray[np.bool_]


def _readings(
    outputs: Outputs,
    patients: Rows,
    known: Rows,
    indicators: Array,
    population: Population,
    target: Target,
    learner: str,
    causal: bool,
    delay: float,
    needs: npt.NDArray[np.bool_],
) -> Iterator[_Reading]:
    """The samples that are read with the same labels, their logits with the effect of these labels."""
    owners = patients[known]
    for code in np.unique(patients if learner == MARKOV else owners):
        labelled = known[owners == code]
        order = np.argsort(outputs.times[labelled], kind="stable")
        own = _Labelled(labelled[order], outputs.take(labelled[order]), indicators[owners == code][order])
        rows = np.flatnonzero(patients == code)
        rows = rows[np.argsort(outputs.times[rows], kind="stable")]
        times = outputs.times[rows]
        strengths = population.strengths[learner + FIRST * (causal or own.come_first(times))]
        reached = own.reaching(times, delay, strengths.reach, needs[rows])
        for seen, at in reached if causal else [(own, np.arange(len(rows)))]:
            read = seen.since(times, at) if causal and learner == MARKOV else at
            some, asked = seen.thinned(MOST_EARLIER_LABELS if causal else MOST_LABELS), outputs.take(rows[read])
            logits = asked.logits
            if len(some.rows):
                given = _Given(some.outputs, some.indicators, asked, population, strengths, target, _STEPS)
                logits = logits + _EFFECTS[learner](given)
            yield _Reading(rows[read], times[read], logits, seen.labels_of(rows[read]), np.isin(read, at))


def _answered(readings: list[_Reading], answers: list[Array], outputs: Outputs) -> Array:
    """Logits of all samples, those that readings are asked for replaced by the answers."""
    logits = outputs.logits.copy()
    for reading, answer in zip(readings, answers, strict=True):
        logits[reading.rows[reading.asked]] = answer[reading.asked]
    return logits


def _chained(readings: list[_Reading], chain: Chain, *, causal: bool) -> list[Array]:
    """Log probabilities of the classes by the chain, given the labels of each reading."""
    parts = _chain_parts(readings, dataclasses.replace(chain, sharpness=1.0), causal=causal)
    return [fixed + chain.sharpness * read for fixed, read in parts]


def _chain_parts(readings: list[_Reading], chain: Chain, *, causal: bool) -> list[tuple[Array | float, Array]]:
    """Of each reading what stands for itself, and what the chain's sharpness multiplies.

    Where samples without labels have no evidence for their neighbours (an emission of 0), the logits get what labels
    make of the chain's own probabilities: nothing where there are none, and little far from them.
    """
    logits, labels = [reading.logits for reading in readings], [reading.labels for reading in readings]
    pauses = [np.diff(reading.times, prepend=np.nan) for reading in readings]
    answers = chain.read(logits, pauses, labels, causal=causal)
    if chain.emission:
        return [(0.0, answer) for answer in answers]
    without = chain.read(logits, pauses, causal=causal)
    return [(own, known - unknown) for own, known, unknown in zip(logits, answers, without, strict=True)]


@dataclass(frozen=True, eq=False)
class _Labelled:
    """The labelled samples of a patient in the order of time."""

    rows: Rows
    outputs: Outputs
    indicators: Array

    def come_first(self, times: Array) -> bool:
        """Whether the patient has no sample, at these times, that is earlier than one of them and not among them."""
        return bool(len(self.rows)) and int((times <= self.outputs.times[-1]).sum()) <= len(self.rows)

    def take(self, some: Rows) -> _Labelled:
        return _Labelled(self.rows[some], self.outputs.take(some), self.indicators[some])

    def since(self, times: Array, at: Rows) -> Rows:
        """Positions of the last of them and of the samples after it, until the last of those that are asked for."""
        until = np.flatnonzero(times <= times[at].max())
        return until if not len(self.rows) else until[times[until] >= self.outputs.times[-1]]

    def labels_of(self, rows: Rows) -> Array:
        """Labels of some rows; 0 in those that have none."""
        labels = np.zeros((len(rows), self.indicators.shape[1]))
        positions = {int(row): position for position, row in enumerate(rows)}
        for row, indicators in zip(self.rows, self.indicators, strict=True):
            if int(row) in positions:
                labels[positions[int(row)]] = indicators
        return labels

    def reaching(
        self, times: Array, delay: float, reach: float, needs: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[_Labelled, Rows]]:
        """The labels that are known at each of the times that are needed, and the positions of those times.

        Where the last of them is longer ago than ``reach``, none is.
        """
        counts = np.searchsorted(self.outputs.times, times - delay, side="left")
        if reach and len(self.rows):
            counts[times - self.outputs.times[counts - 1] > reach] = 0
        # Of more than a hundred labels the last fifth may wait, so that they are not weighed anew for every sample.
        counts -= np.where(counts > 100, counts % np.maximum(1, counts // 5), 0)
        for count in np.unique(counts[needs]):
            yield self.take(np.arange(count)), np.flatnonzero((counts == count) & needs)

    def thinned(self, most: int) -> _Labelled:
        count = len(self.rows)
        if count <= most:
            return self
        older = np.linspace(0, count - most // 2 - 1, most - most // 2).astype(int)
        return self.take(np.concatenate([older, np.arange(count - most // 2, count)]))


# Choosing strengths on validation patients

_Option = TypeVar("_Option")
_Answer: TypeAlias = tuple[int, Array, Array]
"""A patient, logits of samples, and their labels."""


@dataclass(frozen=True, eq=False)
class _People:
    """Validation patients, all of whose labels are known."""

    outputs: Outputs
    indicators: Array
    patients: Rows
    target: Target

    def trials(self) -> Iterator[_Trial]:
        """No labels; then, for every count, the first samples of each patient are labelled, or as many at random."""
        rng = np.random.default_rng(0)
        of_each = (np.flatnonzero(self.patients == code) for code in np.unique(self.patients))
        spread = [rows[:: -(-len(rows) // _SCORED_SAMPLES)] for rows in of_each]
        yield _Trial(self, 0, False, np.zeros(0, np.int64), np.concatenate(spread))
        for count, first in itertools.product(_COUNTS, (True, False)):
            known, rest = [], []
            for code in np.unique(self.patients):
                rows = np.flatnonzero(self.patients == code)
                rows = rows[np.argsort(self.outputs.times[rows], kind="stable")]
                if len(rows) >= 2 * count:
                    order = rows if first else rng.permutation(rows)
                    known.append(order[:count])
                    rest.append(order[count :: -(-(len(order) - count) // _SCORED_SAMPLES)])
            if known:
                yield _Trial(self, count, first, np.concatenate(known), np.concatenate(rest))


@dataclass(frozen=True, eq=False)
class _Trial:
    """Samples of validation patients that are labelled, and others to score on; labels are the ``first`` or any."""

    people: _People
    count: int
    first: bool
    known: Rows
    rest: Rows

    def tasks(self) -> Iterator[_Task]:
        """One for each patient."""
        outputs, indicators = self.people.outputs, self.people.indicators
        for code in np.unique(self.people.patients[self.known]):
            known, rest = (rows[self.people.patients[rows] == code] for rows in (self.known, self.rest))
            yield _Task(int(code), outputs.take(known), indicators[known], outputs.take(rest), indicators[rest])

    def readings(self, population: Population, learner: str, *, causal: bool) -> list[_Reading]:
        known, people = self.known, self.people
        given = people.outputs, people.patients, known, people.indicators[known], population, people.target
        return list(_readings(*given, learner, causal, 0.0, np.isin(np.arange(len(people.patients)), self.rest)))

    def logits(self, learner: str, population: Population, known: Rows, *, causal: bool) -> Array:
        """Logits of all samples; those scored are as the labels of the known ones make them."""
        people = self.people
        given = people.outputs, people.patients, known, people.indicators[known], population, people.target
        return personal_logits(*given, learner, causal=causal, asked=self.rest)

    def ages(self) -> Array:
        """Time from the last labelled sample of the patient to each of those scored."""
        people = self.people
        last = np.full(int(people.patients.max()) + 1, -np.inf)
        np.maximum.at(last, people.patients[self.known], people.outputs.times[self.known])
        return np.asarray(people.outputs.times[self.rest] - last[people.patients[self.rest]])

    def answers(self, logits: Array) -> Iterator[_Answer]:
        for code in np.unique(self.people.patients[self.rest]):
            rest = self.rest[self.people.patients[self.rest] == code]
            yield int(code), logits[rest], self.people.indicators[rest]


@dataclass(frozen=True, eq=False)
class _Task:
    """Some labelled samples of a validation patient, and others to score on."""

    patient: int
    seen: Outputs
    indicators: Array
    at: Outputs
    truth: Array

    def answer(self, learner: str, strengths: Strengths, population: Population, target: Target) -> _Answer:
        given = _Given(self.seen, self.indicators, self.at, population, strengths, target, _STEPS_OF_SEARCH)
        return self.patient, self.at.logits + _EFFECTS[learner](given), self.truth


def _choose(population: Population, people: _People, pause: float, *, causal: bool, estimated: bool) -> Population:
    """The population with the strengths under which the labels that the trials do not show are most likely.

    - ``estimated``: Whether the strength of ``intercept`` was estimated in training: it is used as it is where labels
      are seen to help.
    """
    drifts = [(0.0, 1.0), *((drift, length * pause) for drift in (0.5, 1.0, 2.0) for length in (10, 50))]
    heads = _grid("head", (0.0, 0.1, 0.2, 0.4))
    intercepts = _grid("intercept", (0.0, 0.3, 0.6, 1.2))
    drifting = [{"drift": drift, "length": length} for drift, length in drifts] if pause else []
    grids: dict[str, list[list[dict[str, float]]]] = {
        "effects": [heads, drifting, intercepts, heads],
        "prototypes": [
            [
                {"temper": temper, "prototypes": size}
                for temper in (0.0, 0.03, 0.1, 0.3)
                for size in (0.03, 0.1, 0.3, 1.0)
            ]
        ],
        "intercept": [[{}]] if estimated else [intercepts, _grid("slope", (0.0, 0.1, 0.3))],
        "fine-tune": [_grid("steps", (0, 1, 3, 10, 30, 100))],
        MARKOV: [heads, intercepts, heads],
        UNLABELLED: [_grid("samples", (0, 10, 100, 1000))],
    }
    trials = list(people.trials())
    if len(trials) == 1:
        return population
    strengths = {}
    for first in (False, True):
        some = [trial for trial in trials if trial.first == first]
        tasks = [task for trial in some for task in trial.tasks()]
        for name, parts in grids.items():
            strengths[name + FIRST * first] = _search(
                name, population.strengths[name], parts, population, tasks, people.target
            )
    used = len(np.unique(np.concatenate([people.patients[trial.known] for trial in trials])))
    chosen = dataclasses.replace(population, strengths=strengths, patients=used)
    chosen = _choose_chain(chosen, trials, causal=causal)
    if pause:
        chosen = _choose_reach(chosen, [trial for trial in trials if trial.first], pause)
    return _choose_best(chosen, trials, causal=causal)


def _grid(name: str, values: tuple[float, ...]) -> list[dict[str, float]]:
    return [{name: value} for value in values]


def _choose_chain(population: Population, trials: list[_Trial], *, causal: bool) -> Population:
    """The population with the best Markov chain, or with none where it does not help.

    It is the same wherever the labels are, so that labels cannot be worth less than none by another chain. Samples
    without labels are evidence for their neighbours only if that helps where there are no labels at all.
    """
    alone = dataclasses.replace(population, chain=None)
    if population.chain is None:
        return alone
    before = _score_trials(MARKOV, alone, trials, causal=causal)
    options: list[tuple[Population, list[_Scores]]] = []
    read = [trial.readings(population, MARKOV, causal=causal) for trial in trials]
    together = [reading for readings in read for reading in readings]
    for emission, prior in _CHAINS:
        chain = dataclasses.replace(population.chain, emission=emission, prior=prior, sharpness=1.0)
        parts = _chain_parts(together, chain, causal=causal)
        for sharpness in SHARPNESSES:
            answers = (fixed + sharpness * change for fixed, change in parts)
            scores = _score_counts(
                (trial, _answered(some, list(itertools.islice(answers, len(some))), trial.people.outputs))
                for trial, some in zip(trials, read, strict=True)
            )
            if not emission or _gains(scores[0].likelihood - before[0].likelihood):
                option = dataclasses.replace(population, chain=dataclasses.replace(chain, sharpness=sharpness))
                options.append((option, scores))
    return _most_likely([(alone, before), *options], before)


def _choose_reach(population: Population, trials: list[_Trial], pause: float) -> Population:
    """The population with how long labels count for each learner: as long as they are seen to help.

    Samples are scored apart by the time since the last label. Beyond the first range in which the likelihood does not
    rise by more than its standard error over patients, or the metric falls, labels no longer count.
    """
    strengths = dict(population.strengths)
    for name in LEARNERS:
        if strengths.get(name + FIRST, Strengths()) != Strengths() or (name == MARKOV and population.chain is not None):
            reach = _reach_of(name, population, trials, pause)
            strengths[name + FIRST] = dataclasses.replace(strengths[name + FIRST], reach=reach)
    return dataclasses.replace(population, strengths=strengths)


def _reach_of(learner: str, population: Population, trials: list[_Trial], pause: float) -> float:
    of_range: list[tuple[list[_Answer], list[_Answer]]] = [([], []) for _ in range(len(_REACHES) + 1)]
    for trial in trials:
        with_labels, without = (
            trial.logits(learner, population, known, causal=True) for known in (trial.known, trial.known[:0])
        )
        ranges = np.searchsorted(np.array(_REACHES) * pause, trial.ages())
        for number, (after, before) in enumerate(of_range):
            part = dataclasses.replace(trial, rest=trial.rest[ranges == number])
            after.extend(part.answers(with_labels))
            before.extend(part.answers(without))
    for number, (after, before) in enumerate(of_range):
        scores, alone = (_scores_of(answers, trials[0].people.target) for answers in (after, before))
        if not after or not _gains(scores.likelihood - alone.likelihood) or scores.metric < alone.metric:
            return _REACHES[max(0, number - 1)] * pause
    return 0.0


def _choose_best(population: Population, trials: list[_Trial], *, causal: bool) -> Population:
    """The population with the learner under which the labels that trials do not show are most likely."""
    before = _score_counts((trial, trial.people.outputs.logits) for trial in trials)
    options = [(name, _score_trials(name, population, trials, causal=causal)) for name in LEARNERS if name != AUTO]
    return dataclasses.replace(population, best=_most_likely(options, before))


def _most_likely(options: Sequence[tuple[_Option, list[_Scores]]], before: list[_Scores]) -> _Option:
    """The option with the highest likelihood, of those whose metric falls with no number of labels; else the first.

    Every number is asked by itself: what gains much with fifty labels must not lose with none.
    """

    def likelihood(option: tuple[_Option, list[_Scores]]) -> float:
        return float(np.mean([scores.likelihood.mean() for scores in option[1]]))

    def harmless(scores: list[_Scores]) -> bool:
        return not any(after.metric < alone.metric for after, alone in zip(scores, before, strict=True))

    ranked = sorted(options, key=likelihood, reverse=True)
    return next((option for option, scores in ranked if harmless(scores)), options[0][0])


def _search(
    learner: str,
    start: Strengths,
    grids: list[list[dict[str, float]]],
    population: Population,
    tasks: list[_Task],
    target: Target,
) -> Strengths:
    """One part after the other, the others as they are best so far; nothing where labels are not seen to help.

    They are where the likelihood rises by more than its standard error over patients. Strengths with which the target's
    metric falls are left out.
    """
    kept, nothing = start, Strengths()

    @cache
    def scores_with(strengths: Strengths) -> _Scores:
        return _scores_of((task.answer(learner, strengths, population, target) for task in tasks), target)

    best = before = scores_with(nothing)
    chosen = nothing
    for grid in grids:
        before_grid = kept
        for values in grid:
            candidate = dataclasses.replace(before_grid, **values)  # type: ignore[arg-type]
            scores = scores_with(candidate)
            if scores.beats(best) and not scores.metric < before.metric:
                best, kept, chosen = scores, candidate, candidate
    return chosen if _gains(best.likelihood - before.likelihood) else nothing


def _gains(differences: Array) -> bool:
    """Whether patients gain more than the standard error of their mean."""
    error = differences.std(ddof=1) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return bool(differences.mean() > error)


@dataclass(frozen=True, eq=False)
class _Scores:
    """How well the labels that are not shown are predicted: log likelihood of each patient, and the metric."""

    likelihood: Array
    chances: list[Array]
    truths: list[Array]
    target: Target

    @cached_property
    def metric(self) -> float:
        """Worked out when it is asked for: of most candidates the likelihood says enough."""
        truth, target = np.concatenate(self.truths), self.target
        truth = truth.argmax(axis=1) if target.exclusive else truth
        return score(target, truth, np.concatenate(self.chances))[target.selection]

    def beats(self, other: _Scores) -> bool:
        return bool(self.likelihood.mean() > other.likelihood.mean())


def _score_trials(learner: str, population: Population, trials: list[_Trial], *, causal: bool) -> list[_Scores]:
    return _score_counts((trial, trial.logits(learner, population, trial.known, causal=causal)) for trial in trials)


def _score_counts(whole: Iterable[tuple[_Trial, Array]]) -> list[_Scores]:
    """For each number of labels, how well the logits of its trials answer them."""
    answers: dict[int, list[_Answer]] = {}
    for trial, logits in whole:
        answers.setdefault(trial.count, []).extend(trial.answers(logits))
        target = trial.people.target
    return [_scores_of(some, target) for some in answers.values()]


def _scores_of(answers: Iterable[_Answer], target: Target) -> _Scores:
    by_patient: dict[int, list[float]] = {}
    chances, truths = [], []
    for patient, logits, truth in answers:
        chances.append(_probabilities(logits.T, target).T)
        truths.append(truth)
        by_patient.setdefault(patient, []).append(_likelihood(chances[-1], truth, target))
    return _Scores(np.array([np.mean(values) for values in by_patient.values()]), chances, truths, target)


def _likelihood(chance: Array, truth: Array, target: Target) -> float:
    """Mean log likelihood of labels."""
    if target.exclusive:
        return float(np.log(np.maximum((chance * truth).sum(axis=1), LEAST_PROBABILITY)).mean())
    chance = np.clip(np.where(truth > 0, chance, 1 - chance), LEAST_PROBABILITY, 1)
    return float(np.log(chance).mean())


# The file of a run folder

_ARRAYS = ("centre", "axes", "means", "spread", "shares")
_OF_CHAIN = ("pause", "emission", "prior", "sharpness")


def write_population(folder: Path, population: Population) -> None:
    """Keep a population in a run folder."""
    arrays, chain = {name: getattr(population, name) for name in _ARRAYS}, population.chain
    meta: dict[str, Json] = {
        "strengths": {name: dataclasses.asdict(value) for name, value in population.strengths.items()},
        "patients": population.patients,
        "best": population.best,
    }
    if chain is not None:
        arrays["transitions"] = chain.transitions
        meta["chain"] = {name: getattr(chain, name) for name in _OF_CHAIN}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values, np.float64)) for name, values in arrays.items()}
    write_tensors(folder / PERSONAL, tensors, meta)


def read_population(folder: Path, classes: int) -> Population | None:
    """The population of a run folder; ``None`` for a run that was made without one."""
    path = folder / PERSONAL
    if not path.exists():
        return None
    tensors, meta = read_tensors(path, "train the run again")
    try:
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        # Files of earlier versions lack what newer learners need; such a learner says so when it is asked for.
        strengths = {name: _strengths(values) for name, values in meta["strengths"].items()}
        chain = (
            _read_chain(tensors["transitions"].numpy(), arrays["shares"], meta["chain"]) if "chain" in meta else None
        )
        best = str(meta.get("best", "effects"))
        population = Population(**arrays, strengths=strengths, patients=int(meta["patients"]), chain=chain, best=best)
        population.learner(AUTO)
        width, axes = population.axes.shape
        if (width,) != population.centre.shape or population.means.shape != (classes, axes):
            raise ValueError("its arrays do not fit one another")
        if (
            population.spread.shape != (axes,)
            or population.shares.shape != (classes,)
            or not all(np.isfinite(values).all() for values in arrays.values())
        ):
            raise ValueError("its arrays have impossible values")
        return population
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise StorageError(f"{path} does not hold what personalising needs ({error}): train the run again") from error


def _read_chain(transitions: Array, shares: Array, given: ParsedJson) -> Chain:
    chain, classes = Chain(transitions, shares, **{name: float(given[name]) for name in _OF_CHAIN}), len(shares)
    possible = (transitions > 0).all() and 0 < chain.pause < 1e9 and 0 < chain.sharpness < 1e9 > chain.emission >= 0
    if transitions.shape != (classes, classes) or not possible:
        raise ValueError("its Markov chain is impossible")
    return chain


def _strengths(given: ParsedJson) -> Strengths:
    strengths = Strengths(**given)
    values = dataclasses.astuple(strengths)
    if not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in values) or strengths.length == 0:
        raise ValueError(f"a strength is impossible: {given}")
    return strengths


def needed(population: Population | None, target: Target) -> Population:
    """The population, or an error that says why there is none."""
    if target.kind not in KINDS:
        raise ConfigError(f"labels of a patient cannot be used for {target.kind} targets, only for {', '.join(KINDS)}")
    if population is None:
        raise ConfigError(f"this model was trained without {PERSONAL}: train it again with this version")
    return population
