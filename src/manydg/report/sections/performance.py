"""How the compared models do and learn: patient by patient, class by class, probabilities, learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from manydg.evaluation import trust as calibration
from manydg.evaluation.metrics import Predictions, confusion_matrices, decide
from manydg.report import charts
from manydg.report.charts import Panel, Series
from manydg.report.results_folder import (
    Chapter,
    by_algorithm,
    defined_metric,
    epoch_curve,
    metric_spread,
    patient_samples,
    patient_values,
    tested_patients,
)
from manydg.report.sections import Block, Cell, Column, Figure, Part, Section, Table, Text
from manydg.report.words import (
    LOSSES,
    algorithm_name,
    count,
    listed,
    metric_name,
    number,
    plural,
    sentence,
    signed,
    worst_values,
)
from manydg.targets import oriented
from manydg.training.record import RunRecord

_WORST_PATIENTS = 10
_MAX_CLASSES = 20
_MAX_LABELS = 15
ByAlgorithm = Mapping[str, Sequence[RunRecord]]
PatientValues = Mapping[str, Mapping[str, float]]
"""Algorithm to patient to the value of a metric; every algorithm has the same patients."""


class Performance(Section):
    """Four parts on the runs of the main comparison, of that with context, or of ``manydg train``.

    Classes have confusion and reliability; a regression target has errors and intervals in their place.
    """

    order = 400
    experiments = ("train",)

    def build(self, chapter: Chapter) -> Iterator[Part]:
        groups = by_algorithm(chapter.compared())
        context = ", with context" if any(run.experiment == "context-rivals" for run in chapter.compared()) else ""
        of_predictions = (_errors, _intervals) if chapter.target.numeric else (_confusion, _reliability)
        for make in (_patients, *of_predictions, _learning):
            if groups and (part := make(chapter, groups)) is not None:
                yield replace(part, title=part.title + context)


def _patients(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Performance patient by patient, with the worst named by pseudonym."""
    metric, values = _patient_values(chapter, groups)
    if not values:
        return None
    first = next(iter(values))
    label = metric_name(metric)
    shown = {algorithm_name(name): np.array(list(each.values())) for name, each in values.items()}
    worst = 90 if oriented(metric, 1.0) < 0 else 10
    panel = charts.distributions(f"{sentence(label)} of each patient", shown, f"{label} within a patient", worst)
    lead = (
        f"An average can hide patients for whom a model fails. With {algorithm_name(first)}, "
        f"{worst_values(list(values[first].values()), metric)}. {_coverage(groups, values, label)}"
    )
    caption = "Each dot is a test patient, its value the mean over the splits in which that patient was tested."
    blocks: list[Block] = [
        Text(lead),
        Figure(caption, [panel], _above_pooled(groups[first], metric, values[first])),
        _worst_patients(values, metric, patient_samples(groups[first])),
    ]
    return Part("patients", "Patient by patient", blocks, chapter.command("compare"))


def _coverage(groups: ByAlgorithm, values: PatientValues, label: str) -> str:
    """For how many patients the metric exists, and that methods are compared on the same ones."""
    people, known = tested_patients(groups), len(next(iter(values.values())))
    every = " with every method" if len(values) > 1 else ""
    same = ", so that all are compared on the same patients" if len(values) > 1 else ""
    if known >= people:
        return f"{sentence(label)} exists for all {plural(known, 'test patient')}{every}{same}."
    return (
        f"{sentence(label)} exists for {known} of {plural(people, 'test patient')}{every}; the others, with too few "
        f"samples or classes or without a run, are left out{same}."
    )


def _above_pooled(records: Sequence[RunRecord], metric: str, values: Mapping[str, float]) -> str:
    """Why a low percentile over patients can exceed the value over all samples, where it does."""
    pooled = metric_spread(records, metric).mean
    if oriented(metric, 1.0) < 0 or not float(np.quantile(list(values.values()), 0.1)) > pooled:
        return ""
    return (
        f"Even the 10th percentile is above {metric_name(metric)} over the samples of all patients together, "
        f"{number(pooled)}: within one patient it leaves out how patients differ, and classes that the patient does "
        "not have. The two are not on one scale."
    )


def _patient_values(chapter: Chapter, groups: ByAlgorithm) -> tuple[str, PatientValues]:
    """The first metric that exists for most patients, and its value for each patient with each algorithm."""
    metric = defined_metric(groups, [chapter.patient_metric, *chapter.metrics])
    if metric is not None:
        return metric, patient_values(groups, metric)
    values = {name: _patient_accuracy(chapter, records) for name, records in groups.items()}
    known = [each.keys() for each in values.values() if each]
    shared = set.intersection(*map(set, known)) if known else set()
    same = {name: {who: value for who, value in each.items() if who in shared} for name, each in values.items()}
    return "accuracy", {name: each for name, each in same.items() if each}


def _patient_accuracy(chapter: Chapter, records: Sequence[RunRecord]) -> dict[str, float]:
    """Share of right decisions for each patient: defined even for a patient with one sample."""
    values: dict[str, list[float]] = {}
    for run in _predictions(chapter, records):
        right = decide(run.target, run.probabilities, run.threshold) == run.truth
        share = np.asarray(right, float).reshape(len(run.truth), -1).mean(axis=1)
        means = np.bincount(run.groups, weights=share) / np.bincount(run.groups)
        for name, value in zip(run.names, means, strict=True):
            values.setdefault(str(name), []).append(float(value))
    return {name: float(np.mean(each)) for name, each in values.items()}


def _worst_patients(values: PatientValues, metric: str, samples: Mapping[str, int]) -> Table:
    """The patients for whom the first method does worst, with the value of every method."""
    first, *others = values
    shown = min(_WORST_PATIENTS, max(3, len(values[first]) // 4))
    lowest = sorted(values[first], key=lambda name: (oriented(metric, values[first][name]), name))[:shown]
    columns = [Column("Patient", numeric=False), Column("Samples"), *(Column(algorithm_name(name)) for name in values)]
    columns += [Column(f"{algorithm_name(first)} minus {algorithm_name(others[0])}")] if others else []
    rows = [
        [
            Cell(name, whole=True),
            Cell(count(samples.get(name)), float(samples.get(name) or 0)),
            *(Cell(number(each[name]), each[name]) for each in values.values()),
            *(Cell(signed(gap), gap) for gap in [values[first][name] - values[other][name] for other in others[:1]]),
        ]
        for name in lowest
    ]
    note = "Patients are named by a pseudonym that only somebody who holds the data can turn back into a person."
    return Table(
        f"{sentence(metric_name(metric))} of the {len(lowest)} patients for whom {algorithm_name(first)} does worst",
        columns,
        rows,
        note,
    )


def _predictions(chapter: Chapter, records: Sequence[RunRecord]) -> list[Predictions]:
    """Test predictions of the runs whose folders are here."""
    return [run for run in map(chapter.predictions, records) if run is not None]


def _confusion(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Which classes are taken for which, or how many of each label's samples are recognised, of every method."""
    chosen = {name: runs for name, records in groups.items() if (runs := _predictions(chapter, records))}
    if not chosen:
        return None
    if chapter.target.kind == "multilabel":
        panels = [_recall_panel(chapter, algorithm_name(name), runs) for name, runs in chosen.items()]
        caption = "Of the samples that carry a label, the share for which it was predicted (the most common labels)."
    elif chapter.target.size > _MAX_CLASSES:
        return None
    else:
        names = chapter.target.spec.names
        panels = [charts.confusion(algorithm_name(name), _matrix(runs), names) for name, runs in chosen.items()]
        caption = (
            "Of the samples of each true class (row), the share given each class (column). Test patients of all splits."
        )
    return Part("confusion", "What is mistaken for what", [Figure(caption, panels)], chapter.command("compare"))


def class_recall(runs: Sequence[Predictions]) -> dict[str, float]:
    """Of the test samples of each class, or with each label, the share that was recognised; none without any run."""
    if not runs:
        return {}
    names = runs[0].target.spec.names
    if runs[0].target.kind == "multilabel":
        truth, hits = _labels_and_hits(runs)
        total, right = truth.sum(axis=0), hits.sum(axis=0)
    else:
        matrix = _matrix(runs)
        total, right = matrix.sum(axis=1), matrix.diagonal()
    return {name: float(hit / of) for name, hit, of in zip(names, right, total, strict=True) if of}


def _labels_and_hits(runs: Sequence[Predictions]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which labels each sample has, and which of them were predicted, both ``(samples, labels)``."""
    truth = np.concatenate([np.asarray(run.truth) != 0 for run in runs])
    return truth, np.concatenate([decide(run.target, run.probabilities, run.threshold) != 0 for run in runs]) & truth


def _matrix(runs: Sequence[Predictions]) -> npt.NDArray[np.int64]:
    size = runs[0].target.size
    total = np.zeros((size, size), np.int64)
    for run in runs:
        codes = decide(run.target, run.probabilities, run.threshold)
        one_group = np.zeros(len(codes), np.int64)
        total += confusion_matrices(np.asarray(run.truth, np.int64), codes, one_group, 1, size)[0]
    return total


def _recall_panel(chapter: Chapter, name: str, runs: Sequence[Predictions]) -> Panel:
    truth, hits = _labels_and_hits(runs)
    common = np.argsort(-truth.sum(axis=0), kind="stable")[:_MAX_LABELS]
    recall = hits.sum(axis=0)[common] / np.maximum(truth.sum(axis=0)[common], 1)
    names = [chapter.target.spec.names[code] for code in common]
    return charts.bars(name, names, (recall * 100).tolist(), "% found", digits=0)


def _errors(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Predicted against true values, and how errors depend on them, of two methods."""
    what = chapter.target.spec.names[0]
    panels = []
    for name, records in list(groups.items())[:2]:
        if runs := _predictions(chapter, records):
            truth = np.concatenate([np.asarray(run.truth, float) for run in runs])
            predicted = np.concatenate([run.decisions() for run in runs])
            panels.append(charts.agreement(f"{algorithm_name(name)}: predicted and true", truth, predicted, what))
            panels.append(charts.bland_altman(f"{algorithm_name(name)}: errors", truth, predicted, what))
    if not panels:
        return None
    caption = (
        "Test patients of all splits, a dot for each sample. Left, equal values are on the dotted line. Right "
        "(Bland and Altman), the mean error is the solid line, and 95% of errors are between the dashed ones if they "
        "are normally distributed."
    )
    return Part("errors", "How far predictions are off", [Figure(caption, panels)], chapter.command("compare"))


def _intervals(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Whether intervals that were fitted on validation patients hold the truth of test patients."""
    rows = []
    for name, records in groups.items():
        if held := [each for record in records for each in _held(chapter, record)]:
            width, promised, seen, wide, patients, enough = np.mean(held, axis=0).tolist()
            shares = [Cell(f"{share:.0%}", share) for share in (promised, seen, patients, enough)]
            cells = [Cell(number(width), width), *shares[:2], Cell(number(wide), wide), *shares[2:]]
            rows.append([Cell(algorithm_name(name)), *cells])
    if not rows:
        return None
    titles = ("Half-width", "Promised", "Held", "Half-width for most", "Promised patients", "Patients held")
    lead = (
        "An interval is the prediction plus or minus a half-width, which comes from the errors on validation patients, "
        "each patient counting once. Of a new patient’s samples it promises to hold the truth of a share, on average "
        "over patients; a second one promises that share within most patients. What was promised, and what was seen "
        "on test patients, who had no part in it:"
    )
    note = "Means over the splits. Of few test patients the shares that were held depend on who they are."
    table = Table("Intervals on test patients", [Column("Method", numeric=False), *map(Column, titles)], rows, note)
    return Part("intervals", "Can the intervals be trusted", [Text(lead), table], chapter.command("compare"))


def _held(chapter: Chapter, record: RunRecord) -> Iterator[list[float]]:
    """Of a run whose predictions are here: half-width, promise and coverage of both rules."""
    val, test = chapter.validation(record), chapter.predictions(record)
    if val is None or test is None:
        return
    of_val, of_test = ((run.target, run.truth, run.probabilities, run.groups) for run in (val, test))
    mean, most = calibration.fit_on_average(*of_val), calibration.fit_for_most_patients(*of_val)
    shares = [np.array([one["coverage"] for one in calibration.patient_coverage(*of_test, rule).values()])
              for rule in (mean, most)]  # fmt: skip
    enough = float((shares[1] >= most.level - 1e-9).mean())
    widths = [float(rule.thresholds[0]) for rule in (mean, most)]
    yield [widths[0], mean.level, float(shares[0].mean()), widths[1], most.share, enough]


def _reliability(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Whether stated probabilities come true."""
    curves = {}
    for name, records in groups.items():
        if runs := _predictions(chapter, records):
            truth = np.concatenate([run.truth for run in runs])
            probabilities = np.concatenate([run.probabilities for run in runs])
            curves[algorithm_name(name)] = calibration.reliability(chapter.target, truth, probabilities, bins=10)
    if not curves:
        return None
    exclusive = chapter.target.kind in ("classes", "votes")
    panels = charts.reliability_panels(
        "Stated probability and what came true",
        curves,
        "probability of the predicted class" if exclusive else "stated probability",
        "share that was right" if exclusive else "share that came true",
    )
    lead = (
        "When a model says 80%, is it right in 8 of 10 cases? On the diagonal it is; under it the model is too sure "
        f"of itself. The mean gap (expected calibration error) is "
        f"{listed([f'{number(curve.error)} for {name}' for name, curve in curves.items()])}."
    )
    caption = (
        "Reliability on test patients of all splits, in ten bins (those with fewer than ten samples are not drawn)."
    )
    blocks: list[Block] = [Text(lead), Figure(caption, panels)]
    return Part("calibration", "Can the probabilities be trusted", blocks, chapter.command("compare"))


def _learning(chapter: Chapter, groups: ByAlgorithm) -> Part | None:
    """Validation metric and loss terms by epoch."""
    metric = chapter.metric
    series = []
    for name, records in groups.items():
        x, mean, low, high = epoch_curve(records, lambda entry: entry.val.get(metric))
        if len(x):
            series.append(Series(algorithm_name(name), x, mean, low, high))
    if not series:
        return None
    label = metric_name(metric)
    title = f"Validation {label} by epoch"
    panels = charts.line_panels(title, series, "epoch", f"validation {label}")
    note = "Lines are means over the splits, bands one standard deviation. Vertical scales are the same in all panels."
    blocks: list[Block] = [Figure(f"{title}.", panels, note)]
    if terms := _loss_terms(groups.get("manydg", ())):
        blocks.append(Figure("Terms of ManyDG’s loss, each multiplied by its weight.", terms))
    return Part("learning", "How the models learn", blocks, chapter.command("compare"))


def _loss_terms(records: Sequence[RunRecord]) -> list[Panel]:
    names = dict.fromkeys(name for record in records for entry in record.history for name in entry.losses)
    series: list[Series] = []
    for name in names:
        x, mean, low, high = epoch_curve(records, lambda entry, term=name: entry.losses.get(term))  # type: ignore[misc]
        if len(x):
            series.append(Series(LOSSES.get(name, name.replace("_", " ")), x, mean, low, high))
    return [charts.lines("ManyDG: terms of the loss", series, "epoch", "loss")] if series else []
