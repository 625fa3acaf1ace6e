"""How the compared models learn and err: learning curves, patients, mix-ups, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from manydg.evaluation import calibration
from manydg.evaluation.formulas import confusion_matrices
from manydg.evaluation.predictions import Predictions, decide
from manydg.report import charts
from manydg.report.charts import Panel, Series, look
from manydg.report.content import Block, Cell, Column, Figure, Section, Table, Text
from manydg.report.study import (
    Chapter,
    Record,
    by_algorithm,
    defined_metric,
    epoch_curve,
    patient_means,
    patient_samples,
)
from manydg.report.words import LOSSES, algorithm_name, count, listed, metric_name, number, plural, sentence, signed

_OTHERS_IN_A_PANEL = 4
_MOST_CURVES = 6
_WORST = 10
_MOST_CLASSES = 20
_COMMON_LABELS = 15


def panels_of_lines(
    series: Sequence[Series], title: str, x_label: str, y_label: str, scale: str = "linear", y_scale: str = "linear"
) -> Figure:
    """Lines in panels of at most five: the first series in every panel, the others four by four, on one scale."""
    if len(series) <= _MOST_CURVES:
        groups = [list(series)]
    else:
        rest = series[1:]
        starts = range(0, len(rest), _OTHERS_IN_A_PANEL)
        groups = [[series[0], *rest[start : start + _OTHERS_IN_A_PANEL]] for start in starts]
    # A panel's own order decides the look, so that no panel needs more than six.
    groups = [[_restyled(line, place) for place, line in enumerate(group)] for group in groups]
    limits = charts.common_limits(groups, y_scale)
    titles = (
        [title] if len(groups) == 1 else [f"{title} ({place} of {len(groups)})" for place in range(1, len(groups) + 1)]
    )
    panels = [
        charts.lines(name, group, x_label, y_label, scale=scale, y_scale=y_scale, limits=limits)
        for name, group in zip(titles, groups, strict=True)
    ]
    return Figure(f"{title}.", panels)


def _restyled(line: Series, place: int) -> Series:
    return Series(line.name, line.x, line.mean, look(place), line.low, line.high)


def learning(chapter: Chapter) -> Section | None:
    """Validation metric and loss terms by epoch."""
    runs = chapter.runs("compare") or chapter.runs("train")
    metric = chapter.metric
    series = []
    for name, records in by_algorithm(runs).items():
        x, mean, low, high = epoch_curve(records, lambda entry: entry.val.get(metric))
        if len(x):
            series.append(Series(algorithm_name(name), x, mean, look(0), low, high))
    if not series:
        return None
    label = metric_name(metric)
    figure = panels_of_lines(series, f"Validation {label} by epoch", "epoch", f"validation {label}")
    words = "Lines are means over the splits, bands one standard deviation. Vertical scales are the same in all panels."
    blocks: list[Block] = [Figure(figure.caption, figure.panels, words)]
    terms = _loss_terms(by_algorithm(runs).get("manydg") or [])
    if terms:
        blocks.append(Figure("Terms of ManyDG’s loss, each multiplied by its weight.", terms))
    return Section("learning", "How the models learn", blocks, chapter.command("compare"))


def _loss_terms(records: Sequence[Record]) -> list[Panel]:
    names = dict.fromkeys(name for record in records for entry in record.history for name in entry.losses)
    series: list[Series] = []
    for name in names:
        x, mean, low, high = epoch_curve(records, lambda entry, name=name: entry.losses.get(name))  # type: ignore[misc]
        if len(x):
            series.append(Series(LOSSES.get(name, name.replace("_", " ")), x, mean, look(len(series)), low, high))
    return [charts.lines("ManyDG: terms of the loss", series, "epoch", "loss")] if series else []


def patients(chapter: Chapter) -> Section | None:
    """Performance patient by patient, with the worst named by pseudonym."""
    groups = by_algorithm(chapter.runs("compare") or chapter.runs("train"))
    if not groups:
        return None
    metric, values = _patient_values(chapter, groups)
    if not values:
        return None
    first = next(iter(values))
    label = metric_name(metric)
    shown = {algorithm_name(name): np.array(list(found.values())) for name, found in values.items()}
    panel = charts.distributions(f"{sentence(label)} of each patient", shown, f"{label} within a patient")
    tenth = float(np.quantile(list(values[first].values()), 0.1))
    lead = (
        f"An average can hide patients for whom a model fails. With {algorithm_name(first)}, nine patients in ten have "
        f"{label} above {number(tenth)}; the lowest has {number(min(values[first].values()))}."
    )
    people = len({name for records in groups.values() for record in records for name in record.per_patient})
    left_out = people - len(values[first])
    note = f"{label} is undefined for {plural(left_out, 'patient')}, left out here." if left_out > 0 else ""
    caption = "Each dot is a test patient, its value the mean over the splits in which that patient was tested."
    blocks: list[Block] = [
        Text(lead),
        Figure(caption, [panel], note),
        _worst(values, label, patient_samples(groups[first])),
    ]
    return Section("patients", "Patient by patient", blocks, chapter.command("compare"))


def _patient_values(chapter: Chapter, groups: Mapping[str, list[Record]]) -> tuple[str, Mapping[str, dict[str, float]]]:
    """The metric that can be had for most patients, and its value for each patient with each algorithm."""
    first = next(iter(groups.values()))
    metrics = list(dict.fromkeys([chapter.metric, *chapter.target.metrics]))
    metric = defined_metric(first, metrics)
    if metric is not None:
        values = {name: patient_means(records, metric) for name, records in groups.items()}
    else:
        metric = "accuracy"
        values = {name: _patient_accuracy(chapter, records) for name, records in groups.items()}
    return metric, {name: found for name, found in values.items() if found}


def _patient_accuracy(chapter: Chapter, records: Sequence[Record]) -> dict[str, float]:
    """Share of right decisions for each patient: defined even for a patient with one sample."""
    values: dict[str, list[float]] = {}
    for found in filter(None, map(chapter.predictions, records)):
        right = decide(found.target, found.probabilities, found.threshold) == found.truth
        share = np.asarray(right, float).reshape(len(found.truth), -1).mean(axis=1)
        means = np.bincount(found.groups, weights=share) / np.bincount(found.groups)
        for name, value in zip(found.names, means, strict=True):
            values.setdefault(str(name), []).append(float(value))
    return {name: float(np.mean(each)) for name, each in values.items()}


def _worst(values: Mapping[str, Mapping[str, float]], label: str, samples: Mapping[str, int]) -> Table:
    names = list(values)
    first, second = names[0], names[1] if len(names) > 1 else None
    shown = min(_WORST, max(3, len(values[first]) // 4))
    lowest = sorted(values[first].items(), key=lambda entry: (entry[1], entry[0]))[:shown]
    columns = [Column("Patient", numeric=False), Column("Samples"), Column(f"{algorithm_name(first)}, {label}")]
    if second:
        columns += [Column(f"{algorithm_name(second)}, {label}"), Column("Difference")]
    rows = []
    for name, value in lowest:
        row = [
            Cell(name, whole=True),
            Cell(count(samples.get(name)), float(samples.get(name) or 0)),
            Cell(number(value), value),
        ]
        if second:
            other = values[second].get(name)
            gap = None if other is None else value - other
            row += [Cell(number(other), other), Cell(signed(gap), gap)]
        rows.append(row)
    note = "Patients are named by a pseudonym that only somebody who holds the data can turn back into a person."
    return Table(f"The {len(lowest)} patients for whom {algorithm_name(first)} does worst", columns, rows, note)


def pooled(chapter: Chapter, records: Sequence[Record]) -> list[Predictions]:
    """Test predictions of the runs whose folders are here."""
    return [found for found in map(chapter.predictions, records) if found is not None]


def confusion(chapter: Chapter) -> Section | None:
    """Which classes are taken for which, or how well each label is found."""
    chosen = {name: found for name, records in _two(chapter).items() if (found := pooled(chapter, records))}
    if not chosen:
        return None
    if chapter.target.kind == "multilabel":
        panels = [_label_panel(chapter, algorithm_name(name), found) for name, found in chosen.items()]
        caption = "Of the samples that carry a label, the share for which it was predicted (the most common labels)."
    elif chapter.target.size > _MOST_CLASSES:
        return None
    else:
        names = chapter.target.spec.names
        panels = [charts.confusion(algorithm_name(name), _matrix(found), names) for name, found in chosen.items()]
        caption = (
            "Of the samples of each true class (row), the share given each class (column). Test patients of all splits."
        )
    return Section("confusion", "What is mistaken for what", [Figure(caption, panels)], chapter.command("compare"))


def _two(chapter: Chapter) -> dict[str, list[Record]]:
    groups = by_algorithm(chapter.runs("compare") or chapter.runs("train"))
    return dict(list(groups.items())[:2])


def _matrix(runs: Sequence[Predictions]) -> npt.NDArray[np.int64]:
    size = runs[0].target.size
    total = np.zeros((size, size), np.int64)
    for run in runs:
        codes = decide(run.target, run.probabilities, run.threshold)
        everyone = np.zeros(len(codes), np.int64)
        total += confusion_matrices(np.asarray(run.truth, np.int64), codes, everyone, 1, size)[0]
    return total


def _label_panel(chapter: Chapter, name: str, runs: Sequence[Predictions]) -> Panel:
    truth = np.concatenate([np.asarray(run.truth) != 0 for run in runs])
    hits = np.concatenate([decide(run.target, run.probabilities, run.threshold) != 0 for run in runs]) & truth
    common = np.argsort(-truth.sum(axis=0), kind="stable")[:_COMMON_LABELS]
    found = hits.sum(axis=0)[common] / np.maximum(truth.sum(axis=0)[common], 1)
    names = [chapter.target.spec.names[code] for code in common]
    return charts.bars(name, names, (found * 100).tolist(), "% found", digits=0)


def reliability(chapter: Chapter) -> Section | None:
    """Do probabilities mean what they say?"""
    curves = {}
    for name, records in list(by_algorithm(chapter.runs("compare") or chapter.runs("train")).items())[:4]:
        found = pooled(chapter, records)
        if found:
            truth = np.concatenate([run.truth for run in found])
            probabilities = np.concatenate([run.probabilities for run in found])
            curves[algorithm_name(name)] = calibration.reliability(chapter.target, truth, probabilities, bins=10)
    if not curves:
        return None
    exclusive = chapter.target.kind in ("classes", "votes")
    panel = charts.reliability(
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
    return Section(
        "calibration",
        "Can the probabilities be trusted",
        [Text(lead), Figure(caption, [panel])],
        chapter.command("compare"),
    )
