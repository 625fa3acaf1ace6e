"""Predictions on samples whose truth is known, what is decided from them, and the metrics of each kind of target.

Metrics are of all samples, of every patient and under bootstrap weights.

``classes`` and ``votes``: accuracy, Cohen's kappa, macro F1 of the most probable class. ``binary``: average precision,
F1, kappa and area under the ROC curve of the probability of the second class. ``multilabel``: Jaccard, average
precision and F1 of each sample, then averaged. ``regression``: coefficient of determination (R2), mean absolute error
and root mean squared error, in the target's unit; R2 is undefined where all true values are the same. A metric that is
undefined for the given truth is NaN. Values are those of scikit-learn, which has no function for many patients, or for
many sets of weights, at once.

:class:`PatientMetrics` computes them all, from formulas of many *groups* at once without a loop over patients: a group
is a patient, a visit or a whole test set, and rows carry the number of their group, 0 to ``count - 1``.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from manydg.data.info import EventSpec
from manydg.errors import DataError, StorageError
from manydg.files import private, replacing, unpacked_limit
from manydg.targets import Target

Array = npt.NDArray[Any]
DEFAULT_THRESHOLD = 0.5
_SIDES = ("val", "test")
_TIMES = ("times", "onset", "session")
# What NumPy and the archives beneath it raise for a damaged file.
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RuntimeError, SyntaxError,
    MemoryError, zipfile.BadZipFile, zlib.error, DataError,
)  # fmt: skip


def decide(target: Target, probabilities: Array, threshold: float | None = None) -> Array:
    """Class codes ``(rows,)`` or label indicators ``(rows, K)`` from probabilities ``(rows, K)``.

    Exclusive classes take the most probable one, a binary target the second class from ``threshold`` upwards, and
    every label of a multi-label target is present from ``threshold`` upwards. Without a threshold it is 0.5. The value
    of a regression target ``(rows,)`` is its own decision.
    """
    if target.numeric:
        return np.asarray(probabilities[:, 0], np.float64)
    if target.exclusive and target.kind != "binary":
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    scores = probabilities[:, 1] if target.kind == "binary" else probabilities
    # In float64, lest a threshold between two neighbouring float32 scores be rounded onto one of them.
    chosen = np.asarray(scores, np.float64) >= (DEFAULT_THRESHOLD if threshold is None else threshold)
    return np.asarray(chosen, np.int64)


@dataclass(frozen=True, eq=False)
class Timing:
    """When samples were taken, and when the event of their session begins.

    - ``times`` (rows,)
    - ``onset`` (rows,): NaN in sessions without the event.
    - ``session`` (rows,): Rows of one number are of one session of one patient.
    """

    event: EventSpec
    times: npt.NDArray[np.float64]
    onset: npt.NDArray[np.float64]
    session: npt.NDArray[np.int64]

    @property
    def begun(self) -> npt.NDArray[np.bool_]:
        """Where the event has begun, ``(rows,)``."""
        return np.asarray(self.times >= self.onset)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities and truth of some patients' samples.

    - ``truth``: (rows,) class codes or values, or (rows, K) indicators for multi-label
    - ``probabilities``: (rows, K), or (rows, 1) predicted values of a regression target
    - ``patients`` (rows,): Pseudonyms or codes; where runs are compared, the same name means the same person in each.
    - ``threshold``: Decision threshold of binary and multi-label targets; 0.5 if not given.
    - ``rows`` (rows,): Position of each sample in the dataset.
    - ``timing``: Where samples come before or after an event.
    - ``subgroups`` (rows,): By column, the group of each row.
    """

    target: Target
    truth: Array
    probabilities: Array
    patients: Array
    threshold: float | None = None
    rows: npt.NDArray[np.int64] | None = None
    timing: Timing | None = None
    subgroups: Mapping[str, Array] = field(default_factory=dict)

    @property
    def names(self) -> Array:
        """The distinct patients, sorted."""
        return self._grouping[0]

    @property
    def groups(self) -> npt.NDArray[np.intp]:
        """Index of each row's patient in ``names``."""
        return self._grouping[1]

    @cached_property
    def _grouping(self) -> tuple[Array, npt.NDArray[np.intp]]:
        return np.unique(self.patients, return_inverse=True)

    def select(self, chosen: npt.NDArray[np.bool_]) -> Predictions:
        """The rows where a mask is true."""
        timing = self.timing
        if timing is not None:
            timing = Timing(timing.event, timing.times[chosen], timing.onset[chosen], timing.session[chosen])
        return replace(
            self,
            truth=self.truth[chosen],
            probabilities=self.probabilities[chosen],
            patients=self.patients[chosen],
            rows=None if self.rows is None else self.rows[chosen],
            timing=timing,
            subgroups={name: groups[chosen] for name, groups in self.subgroups.items()},
        )

    def scored(self) -> Predictions:
        """The rows that the model is scored on: of an event to be foreseen, those before its onset."""
        timing = self.timing
        return self.select(~timing.begun) if timing is not None and timing.event.foresee else self

    def with_scored(self, probabilities: Array) -> Predictions:
        """The same with other probabilities of the rows of :meth:`scored`."""
        changed = np.array(self.probabilities, dtype=probabilities.dtype)
        timing = self.timing
        counts = ~timing.begun if timing is not None and timing.event.foresee else np.ones(len(changed), bool)
        changed[counts] = probabilities
        return replace(self, probabilities=changed)

    def around_onset(self) -> dict[str, Predictions]:
        """The rows ``before`` an event's onset; and those ``after``, from the onset on, with the negative ones before.

        Both have the same negative samples: hours in which nothing happens and nothing has happened. Without an event
        there are none.
        """
        if self.timing is None:
            return {}
        begun = self.timing.begun
        return {"before": self.select(~begun), "after": self.select(begun | (np.asarray(self.truth) == 0))}

    def decisions(self) -> Array:
        """Class codes or values ``(rows,)``, or label indicators ``(rows, K)``."""
        return decide(self.target, self.probabilities, self.threshold)

    def rates(self, weights: npt.ArrayLike) -> dict[str, FloatArray]:
        """Sensitivity, specificity and predictive values of the samples of a binary target, ``(W,)``.

        - ``weights`` (W, P): Of ``names``.
        """
        counted = self.scored()
        truth, chosen = np.asarray(counted.truth) != 0, counted.decisions() != 0
        cells = np.stack([truth & chosen, ~truth & chosen, truth & ~chosen, ~truth & ~chosen], axis=1).astype(float)
        patient = np.searchsorted(self.names, counted.patients)
        each = np.asarray(weights, float)
        hit, false, missed, right = (each @ group_sums(cells, patient, len(self.names))).T
        return {
            "sensitivity": divide(hit, hit + missed),
            "specificity": divide(right, right + false),
            "precision": divide(hit, hit + false),
            "negative_predictive_value": divide(right, right + missed),
        }


def write_predictions(path: Path, held_out: Mapping[str, Predictions]) -> None:
    """Write the predictions on validation (``val``) and ``test`` patients, who are named by pseudonyms."""
    sides = [held_out[side] for side in _SIDES]
    offsets = (0, len(sides[0].names))
    columns: dict[str, list[Array]] = {
        "split": [np.full(len(side.truth), code, np.int8) for code, side in enumerate(sides)],
        "row": [np.full(len(side.truth), -1) if side.rows is None else side.rows for side in sides],
        "patient": [side.groups + offset for side, offset in zip(sides, offsets, strict=True)],
        "pseudonyms": [side.names for side in sides],
        "probabilities": [side.probabilities for side in sides],
        "truth": [side.truth for side in sides],
    }
    # numpy's keywords are arrays and a bool, which no type says.
    joined: Any = {name: np.concatenate(parts) for name, parts in columns.items()}
    timings = [side.timing for side in sides if side.timing is not None]
    if timings:
        for name in _TIMES:
            joined[name] = np.concatenate([getattr(timing, name) for timing in timings])
        joined["event"] = np.array(json.dumps(timings[0].event.to_json()))
    for number, name in enumerate(sides[0].subgroups):
        joined[f"subgroup{number}"] = np.concatenate([side.subgroups[name] for side in sides])
    if sides[0].subgroups:
        joined["subgroups"] = np.array(json.dumps(list(sides[0].subgroups)))
    with replacing(path) as partial, open(partial, "wb", opener=private) as file:
        np.savez_compressed(file, **joined)


def read_predictions(path: Path, side: str, target: Target, threshold: float | None = None) -> Predictions:
    """Read the predictions on the ``val`` or the ``test`` patients.

    - raises StorageError: If the file is missing or damaged.
    """
    try:
        _check_unpacked_size(path)
        with np.load(path, allow_pickle=False) as arrays:
            chosen = arrays["split"] == _SIDES.index(side)
            patients = arrays["pseudonyms"][arrays["patient"][chosen]]
            truth, probabilities, rows = (arrays[name][chosen] for name in ("truth", "probabilities", "row"))
            timing = None
            if "event" in arrays:
                event = EventSpec.from_json(json.loads(str(arrays["event"])))
                timing = Timing(event, *(arrays[name][chosen] for name in _TIMES))
            named = json.loads(str(arrays["subgroups"])) if "subgroups" in arrays else []
            groups = {str(name): arrays[f"subgroup{number}"][chosen] for number, name in enumerate(named)}
    except _DAMAGED as error:
        raise StorageError(f"{path} cannot be read ({error}): delete the run's folder and run it again") from error
    return Predictions(target, truth, probabilities, patients, threshold, rows, timing, groups)


def _check_unpacked_size(path: Path) -> None:
    """Raise a plain error if an archive announces, and so may unpack to, more than any predictions take."""
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > (limit := unpacked_limit(path)):
        raise ValueError(f"it unpacks to {total / 2**20:,.0f} MB, more than the {limit / 2**20:,.0f} MB allowed")


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Groups = npt.NDArray[np.integer]
_CELLS = 400_000
"""Most numbers held in memory at once while rankings are weighted anew."""


class PatientMetrics:
    """Every default metric of one set of predictions: of each patient alone, and of all under patient weights.

    Most metrics are functions of totals that add up over patients: confusion matrices, or sums of the samples' own
    values. These are counted once. Metrics of ranking need a sort of the samples, made once for all weights.
    """

    def __init__(self, predictions: Predictions) -> None:
        self.predictions, self.target = predictions, predictions.target
        self._patients = len(predictions.names)
        count = {"multilabel": self._count_multilabel, "regression": self._count_errors}
        self._totals = count.get(self.target.kind, self._count_classes)()

    def each(self) -> dict[str, FloatArray]:
        """Metrics of each patient's samples alone, ``(patients,)`` each, in the order of ``predictions.names``."""
        values = self._from_totals(self._totals)
        if self.target.kind == "binary":
            values |= self._ranked(self._ranking(self.predictions.groups, self._patients))
        return {name: values[name] for name in self.target.metrics}

    def weighted(self, weights: npt.ArrayLike) -> dict[str, FloatArray]:
        """Metrics of all samples together under each row of weights, ``(resamples,)`` each.

        - ``weights`` (resamples, patients): How often each patient counts: bootstrap counts, leave-one-out weights, or
          ones for the plain metric.
        """
        weights = np.asarray(weights, float)
        values = self._from_totals(weights @ self._totals)
        if self.target.kind == "binary":
            values |= self._ranked_in_parts(weights)
        return {name: values[name] for name in self.target.metrics}

    def _count_classes(self) -> FloatArray:
        """Confusion matrix of each patient, ``(patients, K * K)``."""
        run = self.predictions
        truth, size = np.asarray(run.truth, np.int64), self.target.size
        matrices = confusion_matrices(truth, run.decisions(), run.groups, self._patients, size)
        return matrices.reshape(self._patients, -1).astype(float)

    def _count_multilabel(self) -> FloatArray:
        """Sums of each patient's sample values, and how many are defined, ``(patients, 2 * metrics)``."""
        run = self.predictions
        jaccard, f1 = sample_overlap(run.truth, run.decisions())
        by_name = {
            "jaccard": jaccard,
            "auprc_samples": sample_average_precision(run.truth, run.probabilities),
            "f1_samples": f1,
        }
        values = np.stack([by_name[name] for name in self.target.metrics], axis=1)
        known = ~np.isnan(values)
        both = np.concatenate([np.where(known, values, 0.0), known], axis=1)
        return group_sums(both, run.groups, self._patients)

    def _count_errors(self) -> FloatArray:
        """Sums over each patient's samples of 1, y, y^2, |e| and e^2, e = prediction - y, ``(patients, 5)``."""
        truth = _as_float(self.predictions.truth)
        errors = _as_float(self.predictions.probabilities[:, 0]) - truth
        # R2 does not depend on where y is counted from; near the mean its sums of squares lose no digits.
        centred = truth - truth.mean() if len(truth) else truth
        each = np.stack([np.ones(len(truth)), centred, centred**2, np.abs(errors), errors**2], axis=1)
        return group_sums(each, self.predictions.groups, self._patients)

    def _from_totals(self, totals: FloatArray) -> dict[str, FloatArray]:
        """Metrics that follow from totals ``(rows, ...)``, ``(rows,)`` each."""
        if self.target.numeric:
            return error_metrics(*totals.T)
        if self.target.kind == "multilabel":
            sums, known = np.split(totals, 2, axis=1)
            return dict(zip(self.target.metrics, divide(sums, known).T, strict=True))
        matrices = totals.reshape(len(totals), self.target.size, self.target.size)
        values = {"kappa": kappa_of(matrices)}
        if self.target.kind == "binary":
            return values | {"f1": f1_of(matrices)[..., 1]}
        return values | {"accuracy": accuracy_of(matrices), "f1_macro": macro_f1_of(matrices)}

    def _ranking(self, groups: npt.NDArray[np.integer], count: int) -> Ranking:
        scores = _as_float(self.predictions.probabilities[:, 1])
        return Ranking(np.asarray(self.predictions.truth) != 0, scores, groups, count)

    def _ranked(self, ranking: Ranking, weights: FloatArray | None = None) -> dict[str, FloatArray]:
        """Metrics of ranking, of each group or under each column of ``weights``; both are undefined for one class."""
        precision, area = (values.ravel() for values in ranking.areas(weights))
        return {"auprc": np.where(np.isnan(area), np.nan, precision), "auroc": area}

    def _ranked_in_parts(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Metrics of ranking under each row of weights, some rows at a time."""
        rows = len(self.predictions.groups)
        ranking = self._ranking(np.zeros(rows, np.int64), 1)
        patients = self.predictions.groups[ranking.order]
        step = max(1, _CELLS // max(1, rows))
        # A column for each resample, so that sums down the ranking run over neighbours in memory.
        columns = (np.ascontiguousarray(weights[i : i + step].T) for i in range(0, len(weights), step))
        parts = [self._ranked(ranking, some[patients]) for some in columns]
        return {name: np.concatenate([part[name] for part in parts]) for name in ("auprc", "auroc")}


def score(target: Target, truth: Array, probabilities: Array, threshold: float | None = None) -> dict[str, float]:
    """Every default metric of a target.

    - ``truth``: (rows,) class codes or values, or (rows, K) indicators for multi-label
    - ``probabilities``: (rows, K), or (rows, 1) predicted values of a regression target
    - ``threshold``: For binary and multi-label targets; 0.5 when not given.
    - returns: In the order of ``target.metrics``; NaN where undefined (one class only, no samples).

    Examples
    --------
    >>> from manydg.data.info import TargetSpec
    >>> from manydg.targets import target_of
    >>> wake_or_not = target_of(TargetSpec("classes", ("wake", "sleep")))
    >>> score(wake_or_not, np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]))["accuracy"]
    0.6666666666666666
    """
    truth, probabilities = _checked(target, truth, probabilities)
    if len(truth) == 0:
        return dict.fromkeys(target.metrics, math.nan)
    everyone = Predictions(target, truth, probabilities, np.zeros(len(truth), np.int8), threshold)
    return {name: float(values[0]) for name, values in PatientMetrics(everyone).each().items()}


def score_patients(
    target: Target, truth: Array, probabilities: Array, patients: Array, threshold: float | None = None
) -> dict[Any, dict[str, float]]:
    """Every default metric within each patient, and the patient's number of samples.

    - ``target``, ``truth``, ``probabilities``, ``threshold``: As for :func:`score`.
    - ``patients`` (rows,): The patient of each row.
    - returns: In sorted order: ``samples`` and the metrics; NaN where undefined for that patient.
    """
    truth, probabilities = _checked(target, truth, probabilities)
    if len(truth) == 0:
        return {}
    run = Predictions(target, truth, probabilities, patients, threshold)
    columns = {"samples": np.bincount(run.groups).astype(float)} | PatientMetrics(run).each()
    rows = zip(*columns.values(), strict=True)
    return {
        name: dict(zip(columns, map(float, row), strict=True))
        for name, row in zip(run.names.tolist(), rows, strict=True)
    }


def sample_average_precision(truth: Array, probabilities: Array) -> FloatArray:
    """Average precision of each multi-label sample ``(rows,)``; NaN for a sample without any label.

    Equal to scikit-learn's ``average_precision_score`` of each row, computed for all rows at once.
    """
    rows, labels = truth.shape
    groups = np.repeat(np.arange(rows), labels)
    order = (np.argsort(-probabilities, axis=1) + labels * np.arange(rows)[:, None]).ravel()
    ranking = Ranking(truth.ravel() != 0, probabilities.ravel(), groups, rows, order)
    return ranking.areas()[0].ravel()


def sample_overlap(truth: Array, chosen: Array) -> tuple[FloatArray, FloatArray]:
    """Jaccard and F1 of each multi-label sample, both ``(rows,)``; 1 where truth and prediction are both empty."""
    hits = np.logical_and(truth, chosen).sum(axis=1)
    total = (truth != 0).sum(axis=1) + (chosen != 0).sum(axis=1)
    jaccard, f1 = divide(hits, total - hits), divide(2 * hits, total)
    return np.where(total == 0, 1.0, jaccard), np.where(total == 0, 1.0, f1)


def choose_threshold(target: Target, truth: Array, probabilities: Array) -> tuple[float | None, str]:
    """The decision threshold to use on new patients, and the rule's name.

    Give it validation patients only. Binary: the threshold with the highest F1 of the second class. Multi-label: the
    one threshold, shared by all labels, with the highest mean F1 of a sample. Exclusive classes need none.
    """
    truth, probabilities = _checked(target, truth, probabilities)
    if target.numeric:
        return None, "the predicted value itself"
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
    ranking = Ranking(truth != 0, _as_float(scores), np.zeros(len(truth), np.int64), 1)
    hits, taken = (counts.ravel() for counts in ranking.cumulative())
    lower = np.append(values[1:], 0.0)
    return (values + lower) / 2, divide(2 * hits, taken + hits[-1])


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
    return cuts, np.where(total == 0, 1.0, divide(2 * hits, total)).mean(axis=0)


def _as_float(values: Array) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _checked(target: Target, truth: Array, probabilities: Array) -> tuple[Array, Array]:
    truth, probabilities = np.asarray(truth), np.asarray(probabilities)
    wanted = (len(probabilities), target.size) if target.kind == "multilabel" else (len(probabilities),)
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


# Formulas of many groups


def error_metrics(
    count: FloatArray, total: FloatArray, squares: FloatArray, absolute: FloatArray, squared: FloatArray
) -> dict[str, FloatArray]:
    """R2, mean absolute and root mean squared error from sums of 1, y, y^2, |e| and e^2, ``(rows,)`` each."""
    about_mean = squares - np.nan_to_num(divide(total**2, count))
    # Equal values may differ from their mean in the last bits.
    about_mean = np.where(about_mean <= 1e-9 * squares, 0.0, about_mean)
    return {
        "r2": 1.0 - divide(squared, about_mean),
        "mae": divide(absolute, count),
        "rmse": np.sqrt(divide(squared, count)),
    }


def divide(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """Element-wise quotient that is NaN, without a warning, where the denominator is zero."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    quotient = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=quotient, where=bottom != 0)
    return quotient


def group_sums(values: FloatArray, groups: Groups, count: int) -> FloatArray:
    """Sum of the rows ``(rows, dim)`` of each group, ``(count, dim)``."""
    rows = len(groups)
    membership = scipy.sparse.csr_matrix((np.ones(rows), (groups, np.arange(rows))), shape=(count, rows))
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

    - ``truth``, ``predicted``, ``groups`` (rows,): Class codes, and the group of each row.
    - returns (count, classes, classes): Rows are the truth, columns the prediction.
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

    - ``truth``: (rows,) array of bool
    - ``scores``: (rows,) array of float
    - ``groups`` (rows,): Every group has at least one row.
    - ``count``: Number of groups.
    - ``order`` (rows,): The rows by rising group and falling score, where the caller has a quicker way to them.
    - ``order``: (rows,) array of int
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

        - ``weights`` (rows, columns): How often each row counts, in the ranking's order; a column for each set of
          weights. Once if not given.
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
