"""How far to trust a prediction on a new patient: calibrated probabilities, sets that hold the truth, unusual patients.

**Prediction sets** (split conformal prediction in which a patient counts once). The score of a sample is one minus the
probability of its true class (Sadinle, Lei and Wasserman, "Least Ambiguous Set-Valued Classifiers with Bounded Error
Levels", 2019); of a multi-label sample, one minus the probability of each label's true value, present or absent; of a
measured value, the absolute error. A prediction set holds every class (value) whose score is within a threshold, and
always the most probable one: of a measured value, the interval of that half-width around the prediction. Thresholds
come from calibration patients. Two rules, and what they promise if a new patient and the calibration patients come in
random order from the same population (samples *within* a patient may depend on one another in any way):

- *on average* (hierarchical conformal prediction; Lee, Barber and Willett, 2023): the expected share of a new patient's
  samples whose set holds the truth is at least the level. Some patients have more, some less. For a binary target this
  is promised of each class by itself (over the patients who have it), because a rule for both together could leave out
  a rare class nearly always.
- *for most patients*: with at least the stated probability, a new patient is one of whose samples at least the level
  are covered.

**Novelty**. The Mahalanobis distance of a patient's mean embedding from the training patients' means: with B the
covariance of training patients' mean embeddings (shrunk after Ledoit and Wolf, since patients are few and dimensions
many) and W that of samples around their own patient's mean, the mean of n samples of a usual patient varies by
B + W / n. So a patient is not called unusual for having few samples. Where predictions use nothing later than the
sample (causal context), neither does the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
import torch

from manydg.data.timeline import Timeline, running
from manydg.errors import DataError
from manydg.evaluation.metrics import divide, group_means
from manydg.targets import Target

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
COVERAGE, PATIENTS_COVERED, FALSE_ALARMS = 0.9, 0.8, 0.05
_ROUNDING, _SMALLEST = 1e-9, 1e-9


@dataclass(frozen=True, eq=False)
class SetRule:
    """What goes into a prediction set, and what that promises.

    - ``thresholds`` ``(statements,)``: Largest score that is still in the set: one for all of several classes, one for
      each label of a multi-label target, and one for each class of a binary target (or one for both). Of a regression
      target, half the width of the interval, in the target's unit.
    - ``level``: Share of samples covered.
    - ``share``: Probability with which a new patient has that share; 0 where the level is meant on average over
      patients.
    """

    thresholds: FloatArray
    level: float
    share: float = 0.0


def conformal_scores(target: Target, truth: Array, probabilities: Array) -> FloatArray:
    """One minus the probability of the truth, or the absolute error of a value: ``(rows, 1)``, or ``(rows, K)`` for
    multi-label."""
    values = np.asarray(probabilities, float)
    if target.numeric:
        return np.asarray(np.abs(values - np.asarray(truth, float)[:, None]), float)
    if target.kind == "multilabel":
        return np.where(np.asarray(truth) != 0, 1.0 - values, values)
    return 1.0 - np.take_along_axis(values, np.asarray(truth, np.int64)[:, None], axis=1)


def fit_on_average(
    target: Target, truth: Array, probabilities: Array, patients: Array, coverage: float = COVERAGE
) -> SetRule:
    """The rule whose level holds on average over new patients.

    - ``truth``, ``probabilities``, ``patients`` ``(rows, ...)``: Of calibration patients.
    - ``coverage``: Level wanted. ``n`` patients can promise ``n / (n + 1)`` at most, and with fewer that is the level;
      a class of a binary target that too few patients have is never ruled out instead.
    """
    scores, groups, number = _prepare(target, truth, probabilities, patients, coverage)
    if target.kind == "binary":
        known = [np.asarray(truth) == code for code in range(target.size)]
        by_class = [_class_threshold(scores[rows, 0], groups[rows], coverage) for rows in known]
        return SetRule(np.array(by_class), coverage)
    level = min(coverage, number / (number + 1))
    thresholds = [_first_reaching(column, groups, number, level) for column in scores.T]
    return SetRule(np.array(thresholds), level)


def fit_for_most_patients(
    target: Target,
    truth: Array,
    probabilities: Array,
    patients: Array,
    coverage: float = COVERAGE,
    share: float = PATIENTS_COVERED,
) -> SetRule:
    """The rule whose level holds within most new patients.

    Each calibration patient has the smallest threshold that would cover ``coverage`` of his or her samples; the rule's
    threshold is the ``share`` quantile of these.
    """
    scores, groups, number = _prepare(target, truth, probabilities, patients, coverage)
    rank = min(number, math.ceil(share * (number + 1) - _ROUNDING))
    own = np.stack([_own_thresholds(column, groups, number, coverage) for column in scores.T], axis=1)
    return SetRule(np.sort(own, axis=0)[rank - 1], coverage, min(share, rank / (number + 1)))


def prediction_sets(target: Target, probabilities: Array, rule: SetRule) -> BoolArray:
    """Which classes, or which labels as present, cannot be ruled out: ``(rows, K)``."""
    values = np.asarray(probabilities, float)
    within = 1.0 - values <= rule.thresholds + _ROUNDING
    likeliest = values >= 0.5 if target.kind == "multilabel" else values == values.max(axis=1, keepdims=True)
    return np.asarray(within | likeliest, bool)


def prediction_interval(values: Array, rule: SetRule) -> FloatArray:
    """Lower and upper bound of each measured value, ``(rows, 2)``, from predictions ``(rows, 1)``."""
    return np.asarray(values + rule.thresholds * np.array([-1.0, 1.0]), float)


def covered(target: Target, truth: Array, probabilities: Array, rule: SetRule) -> BoolArray:
    """Whether each set (interval) holds the truth: ``(rows, 1)``, or ``(rows, K)`` for multi-label."""
    if target.numeric:
        return conformal_scores(target, truth, probabilities) <= rule.thresholds * (1 + _ROUNDING)
    possible = prediction_sets(target, probabilities, rule)
    if target.kind == "multilabel":
        absent_possible = prediction_sets(target, 1.0 - np.asarray(probabilities, float), rule)
        return np.where(np.asarray(truth) != 0, possible, absent_possible)
    return np.take_along_axis(possible, np.asarray(truth, np.int64)[:, None], axis=1)


def patient_coverage(
    target: Target, truth: Array, probabilities: Array, patients: Array, rule: SetRule
) -> dict[int, dict[str, float]]:
    """Within each patient: share of samples (of labels, for multi-label) covered, and mean size of the sets.

    The size of an interval is its width.
    """
    codes, groups = np.unique(patients, return_inverse=True)
    hit = covered(target, truth, probabilities, rule).mean(axis=1)
    if target.numeric:
        size = np.full(len(hit), 2.0 * float(rule.thresholds[0]))
    else:
        size = prediction_sets(target, probabilities, rule).sum(axis=1).astype(float)
    coverage, sizes = (group_means(values, groups, len(codes)) for values in (hit, size))
    return {int(code): {"coverage": float(coverage[i]), "size": float(sizes[i])} for i, code in enumerate(codes)}


def class_coverage(target: Target, truth: Array, probabilities: Array, patients: Array, rule: SetRule) -> list[float]:
    """For each class (label) that occurs, the mean over patients who have it of their share of its samples covered.

    For multi-label, presence and absence of a label count together.
    """
    _, groups = np.unique(patients, return_inverse=True)
    hit, number = covered(target, truth, probabilities, rule).astype(float), int(groups.max()) + 1
    if target.kind == "multilabel":
        return [float(np.nanmean(group_means(column, groups, number))) for column in hit.T]
    rows = [np.asarray(truth) == code for code in np.unique(truth)]
    return [float(np.nanmean(group_means(hit[of, 0], groups[of], number))) for of in rows]


def _prepare(
    target: Target, truth: Array, probabilities: Array, patients: Array, coverage: float
) -> tuple[FloatArray, npt.NDArray[np.int64], int]:
    if not 0 < coverage < 1:
        raise DataError(f"the coverage of prediction sets lies between 0 and 1; got {coverage}")
    codes, groups = np.unique(patients, return_inverse=True)
    if not len(codes):
        raise DataError("prediction sets need at least one calibration patient")
    return conformal_scores(target, truth, probabilities), groups, len(codes)


def _class_threshold(scores: FloatArray, groups: npt.NDArray[np.int64], coverage: float) -> float:
    codes, dense = np.unique(groups, return_inverse=True)
    if len(codes) < coverage * (len(codes) + 1) - _ROUNDING:
        return 1.0
    return _first_reaching(scores, dense, len(codes), coverage)


def _first_reaching(scores: FloatArray, groups: npt.NDArray[np.int64], number: int, level: float) -> float:
    """The smallest score at which the cumulative mass reaches the level.

    Each of n patients has the mass 1 / (n + 1), spread over the patient's samples; the new patient's is at infinity.
    """
    mass = 1.0 / (np.bincount(groups, minlength=number)[groups] * (number + 1))
    order = np.argsort(scores, kind="stable")
    total = np.cumsum(mass[order])
    first = int(np.searchsorted(total, level - _ROUNDING))
    return float(scores[order[min(first, len(order) - 1)]])


def _own_thresholds(scores: FloatArray, groups: npt.NDArray[np.int64], number: int, coverage: float) -> FloatArray:
    """Smallest score within each group that is at least ``coverage`` of the group's scores, ``(groups,)``."""
    order = np.lexsort((scores, groups))
    counts = np.bincount(groups, minlength=number)
    wanted = np.ceil(coverage * counts - _ROUNDING).astype(np.int64).clip(1)
    return np.asarray(scores[order[np.cumsum(counts) - counts + wanted - 1]], float)


@dataclass(frozen=True, eq=False)
class Reference:
    """Training patients' mean embedding and its covariance, as axes that whiten it.

    Along the axes the patients' means have variance one, and samples around their patient's mean are uncorrelated.

    - ``mean`` ``(dim,)``: Mean of the training patients' mean embeddings.
    - ``axes`` ``(dim, dim)``: ``(embedding - mean) @ axes`` are the coordinates of an embedding.
    - ``within`` ``(dim,)``: Variance of single samples around their patient's mean, along each axis.
    """

    mean: FloatArray
    axes: FloatArray
    within: FloatArray

    def distances(self, embeddings: Array, patients: Array) -> tuple[Array, FloatArray]:
        """Codes of the patients, in order, and the distance of each, ``(patients,)``.

        Distances are scaled so that a patient like those of the training has about one.

        - ``embeddings`` ``(samples, dim)``
        - ``patients`` ``(samples,)``
        """
        codes, means, counts, _ = _patient_means(np.asarray(embeddings, float), patients)
        return codes, self._distances(means, counts)

    def distances_so_far(
        self, embeddings: Array, patients: Array, times: Array, before: tuple[Array, Array] | None = None
    ) -> FloatArray:
        """How far each sample's patient is as known at its time, ``(samples,)``.

        The patient's mean is that of the sample itself and of strictly earlier ones, so that no later sample has a say.

        - ``embeddings`` ``(samples, dim)``
        - ``patients``, ``times`` ``(samples,)``: Codes of the patients, and when each sample was taken.
        - ``before`` ``(samples, dim)``, ``(samples,)``: Sum and number of further embeddings of the patient, of
          strictly earlier samples (:class:`EmbeddingSums`).
        """
        line = Timeline.of(torch.as_tensor(patients), torch.as_tensor(times), None)
        values = torch.as_tensor(np.asarray(embeddings, float))[line.order]
        sums = line.earlier(running(values, line.patient), line.patient) + values
        counts, order = (line.before - line.patient + 2).numpy().astype(float), line.order.numpy()
        further, number = (0.0, 0.0) if before is None else (before[0][order], before[1][order])
        counts = counts + number
        distances = np.empty(len(values))
        distances[order] = self._distances((sums.numpy() + further) / counts[:, None], counts)
        return distances

    def _distances(self, means: FloatArray, counts: FloatArray) -> FloatArray:
        """Distances of means ``(n, dim)`` of so many samples ``(n,)``; NaN where a mean is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            along = (means - self.mean) @ self.axes
            squared = along**2 / (1.0 + self.within / counts[:, None])
            return np.asarray(np.sqrt(squared.mean(axis=1)), float)


@dataclass(eq=False)
class EmbeddingSums:
    """Sums of the embeddings that patients had so far.

    - ``times`` ``(patients,)``: Of the last sample.
    - ``counts`` ``(patients, 2)``: Samples before that time, and all of them.
    - ``sums`` ``(patients, 2, dim)``
    """

    times: FloatArray
    counts: FloatArray
    sums: FloatArray

    def before(self, patients: Array, times: Array) -> tuple[FloatArray, FloatArray]:
        """Sum and number of the embeddings strictly before each sample, ``(samples, dim)`` and ``(samples,)``."""
        which = (times > self.times[patients]).astype(int)
        return self.sums[patients, which], self.counts[patients, which]

    def add(self, embeddings: Array, patients: Array, times: Array) -> None:
        """Take in further samples, none of them earlier than the patient's last."""
        last = self.times.copy()
        np.maximum.at(last, patients, times)
        later, earlier = last > self.times, times < last[patients]
        for values, added in ((self.counts, np.ones(len(patients))), (self.sums, np.asarray(embeddings, float))):
            values[later, 0] = values[later, 1]
            np.add.at(values[:, 0], patients[earlier], added[earlier])
            np.add.at(values[:, 1], patients, added)
        self.times = last


def fit_reference(embeddings: Array, patients: Array) -> Reference:
    """The reference of training patients.

    - ``embeddings`` ``(samples, dim)``
    - ``patients`` ``(samples,)``: Two patients at least.
    """
    values = np.asarray(embeddings, float)
    codes, means, _, groups = _patient_means(values, patients)
    if len(codes) < 2:
        raise DataError(f"what is usual among patients cannot be learned from {len(codes)}: two at least are needed")
    spread = values.std(axis=0)
    # Shrinkage is towards equal variances, so dimensions are scaled to one unit first; a constant one is left out.
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > _SMALLEST * (1 + np.abs(values).max()))
    centre = means.mean(axis=0)
    between = shrunk_covariance((means - centre) * scale)
    residuals = (values - means[groups]) * scale
    within = residuals.T @ residuals / max(len(values) - len(codes), 1)
    variances, directions = np.linalg.eigh(between)
    whiten = directions / np.sqrt(np.maximum(variances, max(float(variances[-1]), _SMALLEST) * _SMALLEST))
    ratios, rotation = np.linalg.eigh(whiten.T @ within @ whiten)
    return Reference(centre, scale[:, None] * (whiten @ rotation), np.maximum(ratios, 0.0))


def shrunk_covariance(centred: FloatArray) -> FloatArray:
    """Ledoit and Wolf's covariance ``(dim, dim)`` of centred rows ``(n, dim)``: shrunk towards equal variances.

    To the bit what ``sklearn.covariance.ledoit_wolf`` gives up to 1,000 dimensions. Importing that takes
    longer than many a training.
    """
    n, dim = centred.shape
    squares = centred**2
    if dim == 1:
        return np.atleast_2d(squares.mean())
    covariance = np.asarray(np.dot(centred.T, centred) / n, float)
    variances = np.sum(squares, axis=0) / n
    mean = np.sum(variances) / dim
    product = np.sum(np.dot(centred.T, centred) ** 2) / n**2
    noise = 1.0 / (dim * n) * (np.sum(np.dot(squares.T, squares)) / n - product)
    spread = (product - 2.0 * mean * variances.sum() + dim * mean**2) / dim
    noise = min(noise, spread)
    shrinkage = 0.0 if noise == 0 else noise / spread
    shrunk: FloatArray = (1.0 - shrinkage) * covariance
    shrunk.flat[:: dim + 1] += shrinkage * (np.trace(covariance) / dim)
    return shrunk


def novelty_threshold(distances: Array) -> tuple[float, float]:
    """The distance from which a patient is flagged, from patients of the same population who were not trained on.

    - ``distances`` ``(patients,)``: Of validation patients.
    - returns ``threshold``, ``false_alarms``: A patient is flagged if the distance is larger, and one of the same
      population with this probability: :data:`FALSE_ALARMS`, or ``1 / (n + 1)``, the best that ``n`` patients promise.
    """
    ordered = np.sort(np.asarray(distances, float))
    if not len(ordered):
        raise DataError("a threshold of novelty needs at least one validation patient")
    rank = min(len(ordered), math.ceil((1.0 - FALSE_ALARMS) * (len(ordered) + 1) - _ROUNDING))
    return float(ordered[rank - 1]), max(FALSE_ALARMS, 1.0 / (len(ordered) + 1))


def _patient_means(values: FloatArray, patients: Array) -> tuple[Array, FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """Codes of the patients, the mean and the number of each one's rows, and the index of each row's patient."""
    codes, groups = np.unique(patients, return_inverse=True)
    counts = np.bincount(groups, minlength=len(codes)).astype(float)
    starts = (np.cumsum(counts) - counts).astype(np.int64)
    sums = np.add.reduceat(values[np.argsort(groups, kind="stable")], starts, axis=0)
    return codes, sums / counts[:, None], counts, groups


# Calibration of probabilities: reliability curves, calibration error, Brier score, temperature scaling.
#
# A *statement* is one probability that can turn out true. Exclusive classes make one statement a sample (the most
# probable class is right), a binary target one (the second class is present), a multi-label target one for each label.


BINS = 15
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability curve: ``(bins,)`` each; NaN where a bin is empty.

    - ``stated``: mean probability of the statements in each bin
    - ``observed``: share of them that came true
    - ``counts``
    - ``error``: expected calibration error (ECE), the mean gap between the two, weighted by the counts; NaN without
      samples
    """

    stated: FloatArray
    observed: FloatArray
    counts: npt.NDArray[np.int64]
    error: float


def statements(target: Target, truth: Array, probabilities: Array) -> tuple[FloatArray, FloatArray]:
    """Each sample's stated probabilities and whether they came true, both ``(rows, statements)``."""
    stated = np.asarray(probabilities, float)
    if target.kind == "multilabel":
        return stated, np.asarray(truth, float)
    if target.kind == "binary":
        return stated[:, 1:2], np.asarray(truth, float)[:, None]
    right = np.asarray(stated.argmax(axis=1) == np.asarray(truth), float)
    return stated.max(axis=1, keepdims=True), right[:, None]


def reliability(target: Target, truth: Array, probabilities: Array, bins: int = BINS) -> Reliability:
    """Reliability curve over ``bins`` bins of equal width from 0 to 1."""
    if bins < 1:
        raise DataError(f"a reliability curve needs at least one bin; got {bins}")
    stated, true = (values.ravel() for values in statements(target, truth, probabilities))
    cell = np.clip((stated * bins).astype(np.int64), 0, bins - 1)
    counts = np.bincount(cell, minlength=bins).astype(np.int64)
    mean = divide(np.bincount(cell, weights=stated, minlength=bins), counts)
    share = divide(np.bincount(cell, weights=true, minlength=bins), counts)
    gap = np.nan_to_num(np.abs(mean - share))
    error = float((gap * counts).sum() / counts.sum()) if counts.sum() else math.nan
    return Reliability(mean, share, counts, error)


def brier_score(target: Target, truth: Array, probabilities: Array) -> float:
    """Mean squared distance of probabilities and outcome; NaN without samples.

    Binary: of the second class's probability. Exclusive classes: summed over the classes (0 to 2). Multi-label: the
    mean over the labels.
    """
    each = _brier_of_samples(target, truth, probabilities)
    return float(each.mean()) if len(each) else math.nan


def _brier_of_samples(target: Target, truth: Array, probabilities: Array) -> FloatArray:
    values = np.asarray(probabilities, float)
    if target.kind == "multilabel":
        return np.asarray(((values - truth) ** 2).mean(axis=1), float)
    if target.kind == "binary":
        return np.asarray((values[:, 1] - truth) ** 2, float)
    return np.asarray(((values - np.eye(target.size)[np.asarray(truth, np.int64)]) ** 2).sum(axis=1), float)


def patient_calibration(
    target: Target, truth: Array, probabilities: Array, patients: npt.NDArray[np.integer]
) -> dict[int, dict[str, float]]:
    """Within each patient: mean stated probability, share that came true, Brier score, calibration error (``ece``) and
    number of samples.

    The two means of all patients, plotted against one another, are the reliability curve of patients: a model may be
    well calibrated on the whole and too sure of itself for some. A calibration error within few samples is too large
    by chance, so compare it between models and not with zero.
    """
    codes, groups = np.unique(patients, return_inverse=True)
    stated, true = (values.mean(axis=1) for values in statements(target, truth, probabilities))
    brier = _brier_of_samples(target, truth, probabilities)
    columns = {"samples": np.bincount(groups, minlength=len(codes)).astype(float)}
    for name, values in (("stated", stated), ("observed", true), ("brier", brier)):
        columns[name] = group_means(values, groups, len(codes))
    columns["ece"] = _errors_within(*statements(target, truth, probabilities), groups, len(codes))
    return {int(code): {name: float(values[i]) for name, values in columns.items()} for i, code in enumerate(codes)}


def _errors_within(stated: FloatArray, true: FloatArray, groups: Array, count: int) -> FloatArray:
    """Calibration error of each group, ``(groups,)``; statements and outcomes are ``(rows, statements)``."""
    cell = np.clip((stated * BINS).astype(np.int64), 0, BINS - 1) + BINS * np.asarray(groups, np.int64)[:, None]
    # The gap of a bin times its number of statements is the absolute sum of the differences in it.
    sums = np.bincount(cell.ravel(), weights=(stated - true).ravel(), minlength=count * BINS).reshape(count, BINS)
    return divide(np.abs(sums).sum(axis=1), np.bincount(groups, minlength=count) * stated.shape[1])


def log_loss(target: Target, truth: Array, probabilities: Array) -> float:
    """Mean negative log likelihood of the truth; of all labels for multi-label."""
    values = np.clip(np.asarray(probabilities, float), _TINY, 1.0)
    if target.exclusive:
        codes = np.asarray(truth, np.int64)
        return float(-np.log(values[np.arange(len(values)), codes]).mean())
    rest = np.clip(1.0 - np.asarray(probabilities, float), _TINY, 1.0)
    return float(-np.where(np.asarray(truth) != 0, np.log(values), np.log(rest)).mean())


def scale_temperature(target: Target, probabilities: Array, temperature: float) -> FloatArray:
    """Probabilities whose logits are divided by a temperature: above 1 less sure, below 1 surer.

    The order of classes or labels does not change, so neither does any metric of ranking or of the top class.
    """
    if not temperature > 0:
        raise DataError(f"a temperature is above zero; got {temperature}")
    values = np.clip(np.asarray(probabilities, float), _TINY, 1.0)
    if target.exclusive:
        return np.asarray(scipy.special.softmax(np.log(values) / temperature, axis=1), float)
    return np.asarray(scipy.special.expit(scipy.special.logit(np.clip(values, _TINY, 1 - _TINY)) / temperature), float)


def fit_temperature(target: Target, truth: Array, probabilities: Array) -> float:
    """The temperature with the lowest log loss; give it validation patients, and apply it to new ones.

    - returns: Between 0.05 and 20; 1.0 (leave as is) without samples, and for values, which are no probabilities.
    """
    if len(np.asarray(truth)) == 0 or target.numeric:
        return 1.0

    def loss(log_temperature: float) -> float:
        return log_loss(target, truth, scale_temperature(target, probabilities, math.exp(log_temperature)))

    fitted = scipy.optimize.minimize_scalar(loss, bounds=(math.log(0.05), math.log(20.0)), method="bounded")
    return math.exp(float(fitted.x))
