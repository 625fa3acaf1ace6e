"""Predictions for a patient of whom a few samples have labels, without training the model again.

The model's logits l(x) of the patient's samples get a random effect f(x), whose posterior is found from the labelled
samples. Its prior is the population's: variances are chosen on validation patients, some of whose labels are shown to
the learner and the rest used to judge it. ``docs/method.md`` has the equations.

==============  ========================================================================================================
learner         f(x)
==============  ========================================================================================================
``effects``     Gaussian process: an intercept, a linear head on the features, and a drift in time, for each class
``prototypes``  class means of the features, moved towards the labelled samples by a closed-form Gaussian posterior
``intercept``   mixed-effects head: an intercept and a slope of the logit, for each class
``fine-tune``   baseline: a linear head on the features, by gradient descent that is stopped early
``shares``      without labels: the patient's own shares of the classes, by expectation maximisation
==============  ========================================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from manydg.algorithms import Algorithm
from manydg.data.dataset import DomainDataset
from manydg.data.timeline import Timeline
from manydg.errors import ConfigError, StorageError, unknown_name
from manydg.evaluation.metrics import score
from manydg.files import ParsedJson
from manydg.targets import Target
from manydg.training.inference import embed_dataset, predict_probabilities
from manydg.training.record import read_tensors, write_tensors

PERSONAL = "personal.safetensors"
LEARNERS = ("effects", "prototypes", "intercept", "fine-tune")
UNLABELLED = "shares"
"""The learner that is shown samples without their labels."""
KINDS = ("classes", "votes", "binary", "multilabel")
"""Kinds of target that labels of the patient can be used for."""
MOST_LABELS, MOST_EARLIER_LABELS = 1000, 200
"""Labelled samples of one patient that a learner uses: of more, the latest half, and others spread over time."""
_LEAST_PROBABILITY = 1e-6
_MOST_AXES = 64
_TRAINING_PATIENTS, _VALIDATION_PATIENTS, _SAMPLES, _VALIDATION_SAMPLES = 60, 8, 100, 6000
_COUNTS = (1, 5, 50)
_STEPS, _TOLERANCE = 100, 1e-5
_STEPS_OF_SEARCH = 10

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Strengths:
    """How far a patient may differ from the population; 0 switches a part off.

    Attributes
    ----------
    intercept, slope : float
        Standard deviation of a class's intercept, and of the slope of its logit.
    head : float
        Of the weights of a linear head on the scaled features.
    drift, length : float
        Of a drift in time, and how long it takes to change, in the unit of the times.
    prototypes, temper : float
        Variance of class means between patients, relative to that of the training patients, and the share of the
        resulting change that is applied.
    steps : int
        Steps of gradient descent.
    samples : float
        How many samples the population's shares of the classes count for; without end where it is 0.
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


_DEFAULTS = {
    "effects": Strengths(intercept=0.3, head=0.1),
    "prototypes": Strengths(prototypes=0.3, temper=0.03),
    "intercept": Strengths(intercept=0.3),
    "fine-tune": Strengths(steps=3),
    UNLABELLED: Strengths(),
}
FIRST = "-first"
DEFAULTS = _DEFAULTS | {f"{name}{FIRST}": value for name, value in _DEFAULTS.items()}
"""Where there are no validation patients to choose by."""


@dataclass(frozen=True, eq=False)
class Population:
    """What a model's learners know of patients in general; no patient can be recognised in it.

    Attributes
    ----------
    centre : array ``(width,)``
        Mean of the classes' mean features.
    axes : array ``(width, n)``
        To directions in which features vary alike within a class, those first in which patients differ most.
    means : array ``(K, n)``
        Of each class.
    spread : array ``(n,)``
        Variance of patients' class means, relative to that within a class.
    shares : array ``(K,)``
        Of training samples that are of each class.
    strengths : mapping of str to Strengths
        For each learner where the labelled samples are spread over the patient's others; and, as ``NAME-first``, where
        they are the patient's first, which says less about the rest.
    patients : int
        Validation patients that the strengths were chosen on; 0 where they are :data:`DEFAULTS`.
    """

    centre: Array
    axes: Array
    means: Array
    spread: Array
    shares: Array
    strengths: Mapping[str, Strengths]
    patients: int


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model makes of samples, before any label of their patient is known.

    Attributes
    ----------
    logits : array ``(samples, K)``
    features : array ``(samples, n)``
        On the population's axes, in units of the deviation within a class.
    times : array ``(samples,)``
    """

    logits: Array
    features: Array
    times: Array

    def take(self, rows: Rows) -> Outputs:
        return Outputs(self.logits[rows], self.features[rows], self.times[rows])


# What the learners know of patients in general


def fit_population(
    algorithm: Algorithm, train: DomainDataset, val: DomainDataset | None, probabilities: npt.NDArray[np.float32] | None
) -> Population | None:
    """Learn from training and validation patients how much a patient may differ; test patients are not looked at.

    Parameters
    ----------
    train, val : DomainDataset
        With context, as the algorithm takes them.
    probabilities : array ``(validation samples, K)``
        As the algorithm predicts them.

    Returns
    -------
    Population or None
        None for a target that labels of the patient cannot be used for.
    """
    if algorithm.target.kind not in KINDS:
        return None
    rows = _spread_rows(train, _TRAINING_PATIENTS, 2 * _SAMPLES)
    features, some = _features(algorithm, train, rows), train.select(rows)
    population = _moments(features, _indicators(algorithm.target, some), some.domains.cpu().numpy())
    if val is None or probabilities is None:
        return _with_variance_of(algorithm, population)
    chosen = _spread_rows(val, _VALIDATION_PATIENTS, _VALIDATION_SAMPLES)
    outputs = _outputs(
        algorithm.target, _features(algorithm, val, chosen), probabilities[chosen], val, chosen, population
    )
    tasks = list(_tasks(outputs, _indicators(algorithm.target, val.select(chosen)), val.domains[chosen].cpu().numpy()))
    judged = _choose(population, tasks, algorithm.target, _usual_pause(val)) if tasks else population
    return _with_variance_of(algorithm, judged)


def _with_variance_of(algorithm: Algorithm, population: Population) -> Population:
    """The population with the variance of intercepts that the algorithm estimated in training, where it did.

    It is of the difference between two logits, each of which has an intercept of its own here.
    """
    variance = getattr(algorithm, "intercept_variance", None)
    if variance is None:
        return population
    own = Strengths(intercept=float(variance / 2) ** 0.5)
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
    counts = np.maximum(indicators.sum(axis=0), 1.0)
    means = indicators.T @ features / counts[:, None]
    centre = means[indicators.sum(axis=0) > 0].mean(axis=0)
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
    clipped = np.clip(probabilities.astype(np.float64), _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
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
    usual = np.maximum(given.population.shares, _LEAST_PROBABILITY)
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
) -> Array:
    """Logits of all samples, each given the labelled samples of its own patient.

    Parameters
    ----------
    outputs : Outputs
    patients : array ``(samples,)``
    known : array ``(labelled,)``
        Positions of the labelled samples.
    indicators : array ``(labelled, K)``
        Their labels.
    learner : str
        One of :data:`LEARNERS`.
    causal : bool
        Whether a sample may only use labels of strictly earlier samples.
    delay : float
        With ``causal``, how long it takes until the label of a sample is known.
    """
    if learner not in _EFFECTS:
        raise unknown_name("learner", learner, LEARNERS)
    logits = outputs.logits.copy()
    owners = patients[known]
    for code in np.unique(owners):
        labelled = np.flatnonzero(owners == code)
        labelled = labelled[np.argsort(outputs.times[known[labelled]], kind="stable")]
        rows = np.flatnonzero(patients == code)
        own = _Labelled(outputs.take(known[labelled]), indicators[labelled])
        strengths = population.strengths[learner + FIRST * (causal or own.come_first(outputs.times[rows]))]
        for seen, at in own.reaching(outputs.times[rows], delay) if causal else [(own, np.arange(len(rows)))]:
            some = seen.thinned(MOST_EARLIER_LABELS if causal else MOST_LABELS)
            asked = outputs.take(rows[at])
            given = _Given(some.outputs, some.indicators, asked, population, strengths, target, _STEPS)
            logits[rows[at]] += _EFFECTS[learner](given)
    return logits


@dataclass(frozen=True, eq=False)
class _Labelled:
    """The labelled samples of a patient in the order of time."""

    outputs: Outputs
    indicators: Array

    def come_first(self, times: Array) -> bool:
        """Whether the patient has no sample, at these times, that is earlier than one of them and not among them."""
        return int((times <= self.outputs.times[-1]).sum()) <= len(self.indicators)

    def first(self, count: int) -> _Labelled:
        return _Labelled(self.outputs.take(np.arange(count)), self.indicators[:count])

    def reaching(self, times: Array, delay: float) -> Iterator[tuple[_Labelled, Rows]]:
        """The labels that are known at each of some times, and the positions of those times."""
        counts = np.searchsorted(self.outputs.times, times - delay, side="left")
        # Of more than a hundred labels the last fifth may wait, so that they are not weighed anew for every sample.
        counts -= np.where(counts > 100, counts % np.maximum(1, counts // 5), 0)
        for count in np.unique(counts[counts > 0]):
            yield self.first(int(count)), np.flatnonzero(counts == count)

    def thinned(self, most: int) -> _Labelled:
        count = len(self.indicators)
        if count <= most:
            return self
        older = np.linspace(0, count - most // 2 - 1, most - most // 2).astype(int)
        rows = np.concatenate([older, np.arange(count - most // 2, count)])
        return _Labelled(self.outputs.take(rows), self.indicators[rows])


# Choosing strengths on validation patients


@dataclass(frozen=True, eq=False)
class _Task:
    """Some labelled samples of a validation patient, and others to be judged by; labels are the ``first`` or any."""

    patient: int
    first: bool
    seen: Outputs
    indicators: Array
    at: Outputs
    truth: Array


def _tasks(outputs: Outputs, indicators: Array, patients: Rows) -> Iterator[_Task]:
    """For every patient and count: the first samples are labelled, or as many drawn at random."""
    rng = np.random.default_rng(0)
    for code in np.unique(patients):
        rows = np.flatnonzero(patients == code)
        rows = rows[np.argsort(outputs.times[rows], kind="stable")]
        for count in _COUNTS:
            if len(rows) < 2 * count:
                break
            for first, order in ((True, np.arange(len(rows))), (False, rng.permutation(len(rows)))):
                shown, rest = rows[order[:count]], rows[order[count:]]
                rest = rest[:: -(-len(rest) // _SAMPLES)]
                yield _Task(
                    int(code), first, outputs.take(shown), indicators[shown], outputs.take(rest), indicators[rest]
                )


def _choose(population: Population, tasks: list[_Task], target: Target, pause: float) -> Population:
    """The population with the strengths under which the labels that the tasks do not show are most likely."""
    drifts = (
        [(0.0, 1.0), *((drift, length * pause) for drift in (0.5, 1.0, 2.0) for length in (10, 50))] if pause else []
    )
    grids: dict[str, list[list[dict[str, float]]]] = {
        "effects": [
            _grid("head", (0.0, 0.1, 0.2, 0.4)),
            [{"drift": drift, "length": length} for drift, length in drifts],
            _grid("intercept", (0.0, 0.3, 0.6, 1.2)),
            _grid("head", (0.0, 0.1, 0.2, 0.4)),
        ],
        "prototypes": [
            [
                {"temper": temper, "prototypes": size}
                for temper in (0.0, 0.03, 0.1, 0.3)
                for size in (0.03, 0.1, 0.3, 1.0)
            ]
        ],
        "intercept": [_grid("intercept", (0.0, 0.3, 0.6, 1.2)), _grid("slope", (0.0, 0.1, 0.3))],
        "fine-tune": [_grid("steps", (0, 1, 3, 10, 30, 100))],
        UNLABELLED: [_grid("samples", (0, 10, 100, 1000))],
    }
    strengths = {}
    for first in (False, True):
        some = [task for task in tasks if task.first == first]
        for name, parts in grids.items():
            strengths[name + FIRST * first] = _search(name, parts, population, some, target)
    return dataclasses.replace(population, strengths=strengths, patients=len({task.patient for task in tasks}))


def _grid(name: str, values: tuple[float, ...]) -> list[dict[str, float]]:
    return [{name: value} for value in values]


def _usual_pause(dataset: DomainDataset) -> float:
    """Median time from one sample of a patient to the next; 0 without times."""
    if dataset.times is None:
        return 0.0
    timeline = Timeline.of(dataset.domains, dataset.times, None)
    pauses = torch.diff(timeline.times)[torch.diff(timeline.patient) == 0]
    return float(pauses[pauses > 0].median()) if bool((pauses > 0).any()) else 0.0


def _search(
    learner: str, grids: list[list[dict[str, float]]], population: Population, tasks: list[_Task], target: Target
) -> Strengths:
    """One part after the other, the others as they are best so far; nothing where labels are not seen to help.

    They are where the likelihood rises by more than its standard error over patients, and the target's metric does not
    fall.
    """
    kept, nothing = DEFAULTS[learner], Strengths()
    best = before = _judge(learner, nothing, population, tasks, target)
    found = nothing
    for grid in grids:
        start = kept
        for values in grid:
            candidate = dataclasses.replace(start, **values)  # type: ignore[arg-type]
            judged = _judge(learner, candidate, population, tasks, target)
            if judged.likelihood.mean() > best.likelihood.mean():
                best, kept, found = judged, candidate, candidate
    gain = best.likelihood - before.likelihood
    error = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
    return found if gain.mean() > error and not best.metric < before.metric else nothing


@dataclass(frozen=True, eq=False)
class _Judged:
    """How well the labels that tasks do not show are predicted: log likelihood of each patient, and the metric."""

    likelihood: Array
    metric: float


def _judge(learner: str, strengths: Strengths, population: Population, tasks: list[_Task], target: Target) -> _Judged:
    by_patient: dict[int, list[float]] = {}
    chances = []
    for task in tasks:
        given = _Given(task.seen, task.indicators, task.at, population, strengths, target, _STEPS_OF_SEARCH)
        effect = _EFFECTS[learner](given)
        chances.append(_probabilities((task.at.logits + effect).T, target).T)
        by_patient.setdefault(task.patient, []).append(_likelihood(chances[-1], task.truth, target))
    truth = np.concatenate([task.truth for task in tasks])
    answers = truth.argmax(axis=1) if target.exclusive else truth
    metric = score(target, answers, np.concatenate(chances))[target.selection]
    return _Judged(np.array([np.mean(values) for values in by_patient.values()]), metric)


def _likelihood(chance: Array, truth: Array, target: Target) -> float:
    """Mean log likelihood of labels."""
    if target.exclusive:
        return float(np.log(np.maximum((chance * truth).sum(axis=1), _LEAST_PROBABILITY)).mean())
    chance = np.clip(np.where(truth > 0, chance, 1 - chance), _LEAST_PROBABILITY, 1)
    return float(np.log(chance).mean())


# The file of a run folder

_ARRAYS = ("centre", "axes", "means", "spread", "shares")


def write_population(folder: Path, population: Population) -> None:
    """Keep a population in a run folder."""
    arrays = {name: getattr(population, name) for name in _ARRAYS}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values, np.float64)) for name, values in arrays.items()}
    strengths = {name: dataclasses.asdict(value) for name, value in population.strengths.items()}
    write_tensors(folder / PERSONAL, tensors, {"strengths": strengths, "patients": population.patients})


def read_population(folder: Path, classes: int) -> Population | None:
    """The population of a run folder; ``None`` for a run that was made without one."""
    path = folder / PERSONAL
    if not path.exists():
        return None
    tensors, meta = read_tensors(path, "train the run again")
    try:
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        strengths = {name: _strengths(meta["strengths"][name]) for name in DEFAULTS}
        population = Population(**arrays, strengths=strengths, patients=int(meta["patients"]))
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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"{path} does not hold what personalising needs ({error}): train the run again") from error


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
