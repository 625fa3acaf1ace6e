"""The answer: which model for the next patient, how good it is expected to be, what it costs, when not to trust it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from manydg.report.results_folder import Chapter, Comparison
from manydg.report.sections import Block, Bullets, Cell, Column, Part, Section, Table, Text, text_columns
from manydg.report.sections.comparison import bounds_text, reading, value_text
from manydg.report.sections.performance import class_recall
from manydg.report.words import (
    MEANING,
    algorithm_name,
    count,
    duration,
    listed,
    metric_name,
    noted,
    number,
    plural,
    row_title,
    sentence,
    signed,
    worst_values,
)
from manydg.studies.summary import Recommendation, row_name
from manydg.targets import oriented
from manydg.training.inference import read_calibration
from manydg.training.record import RunRecord, cautions

BOOSTING = ("boosting", "lightgbm", "catboost")
_CONTEXT = {"none": "not needed", "offline": "all the patient’s samples", "causal": "the patient’s earlier samples"}
_SAID = {
    "clearly better": "Clearly better than",
    "clearly worse": "Clearly worse than",
    "not certain": "Not certainly different from",
    "no clear difference": "No clear difference from",
    "not tested": "Not tested against",
}
_PREDICTION = "Predicting 1,000 samples"
_WEAK = 0.5
_LARGE_DROP = 0.05
"""Of the validation metric: a test metric that much worse is worth a word."""
_MOST_NAMED = 4
_RULE = (
    "The model is chosen on validation patients alone: the one with the best mean validation {metric}, unless a "
    "clearly cheaper one is within one standard error of it. Clearly cheaper means: it needs no patient context, or "
    "trains in less than half the time. The standard error is that of the paired difference over the splits, "
    "corrected for splits that share patients (Nadeau and Bengio). Test patients have no part in the choice."
)


class Verdict(Section):
    """The first screen, and the rule behind it with the cost of every model."""

    order = 150

    def build(self, chapter: Chapter) -> Iterator[Part]:
        if (chosen := _chosen(chapter)) is None:
            return
        comparison, choice = chosen
        blocks: list[Block] = [
            Text(_RULE.format(metric=metric_name(chapter.metric))),
            _all_models(chapter, comparison, choice),
        ]
        if text := _procedure(chapter, choice):
            blocks.append(Text(text))
        yield Part("choice", "Which model, and why", blocks, chapter.command(comparison.summary.experiment))

    def headline(self, chapter: Chapter) -> str:
        if (chosen := _chosen(chapter)) is None:
            return ""
        comparison, choice = chosen
        entry, metric = comparison.entry(choice.row, chapter.metric), metric_name(chapter.metric)
        people = "new synthetic patients" if chapter.synthetic else "new patients"
        return (
            f"Recommended for the next patient: {row_title(choice.row)}. Expected {metric} on {people}: "
            f"{value_text(entry)}. {_against(comparison, choice)}"
        ).strip()

    def first_screen(self, chapter: Chapter) -> Sequence[Block]:
        if (chosen := _chosen(chapter)) is None:
            return ()
        comparison, choice = chosen
        why = Text(_why(choice, metric_name(chapter.metric)))
        limits = Bullets(list(_limits(chapter, comparison, choice)))
        return [why, _decision(chapter, comparison, choice), Text("When not to trust it", "label"), limits]


def _chosen(chapter: Chapter) -> tuple[Comparison, Recommendation] | None:
    comparison = chapter.choice
    if comparison is None or comparison.summary.recommendation is None:
        return None
    return comparison, comparison.summary.recommendation


def _alternatives(comparison: Comparison, choice: Recommendation) -> list[str]:
    """The rows that a reader asks for beside the recommended one: the plain model and boosting, their best variants."""
    rows = [_best_of(comparison, choice, name) for name in ("base", *BOOSTING)]
    return [row for row in rows if row is not None and row != choice.row]


def _against(comparison: Comparison, choice: Recommendation) -> str:
    """How sure it is that the recommended model differs from the plain one and from boosting."""
    said: dict[str, list[str]] = {}
    for row in _alternatives(comparison, choice):
        test = comparison.pair(choice.row, row)
        words = _SAID["not tested" if test is None else reading(test)]
        said.setdefault(words, []).append(algorithm_name(row.partition(" (")[0]))
    return " ".join(f"{words} {listed(names, last='or')}." for words, names in said.items())


def _why(choice: Recommendation, metric: str) -> str:
    name = row_title(choice.best)
    best = f"the best mean {metric} on validation patients ({number(choice.validation[choice.best])})"
    if choice.row == choice.best:
        alone = " One split cannot say how much of that is chance." if choice.splits == 1 else ""
        return f"It has {best}.{alone}"
    gap, error = number(choice.gap(choice.row)), number(choice.errors[choice.row])
    return f"{name} has {best}, but the gap of {gap} is within one standard error ({error}), and this model costs less."


def _decision(chapter: Chapter, comparison: Comparison, choice: Recommendation) -> Table:
    """The recommended model beside the plain one, boosting, and whatever else the reader will ask for."""
    shown = list(dict.fromkeys([choice.row, *_alternatives(comparison, choice), choice.best, comparison.first]))
    titles = ("Expected " + metric_name(chapter.metric), "Recommended minus this", "Training", _PREDICTION)
    columns = [Column("Model", numeric=False), *map(Column, titles), Column("Patient context", numeric=False)]
    rows = []
    for row in shown:
        entry, cost = comparison.entry(row, chapter.metric), comparison.summary.costs[row]
        test = comparison.pair(choice.row, row)
        note = "" if test is None else ", ".join(filter(None, (bounds_text(test.interval), reading(test))))
        rows.append([
            Cell(row_title(row), note="recommended" if row == choice.row else ""),
            Cell(number(entry.mean), entry.mean, bounds_text(entry.interval)),
            Cell("–", None) if test is None else Cell(signed(test.difference), test.difference, note),
            Cell(duration(cost.seconds), cost.seconds),
            Cell(_milliseconds(cost.predict_ms), cost.predict_ms),
            Cell(_CONTEXT.get(cost.context, cost.context)),
        ])  # fmt: skip
    metric, meaning = sentence(metric_name(chapter.metric)), MEANING.get(chapter.metric, "")
    note = "Expected: mean over the splits on test patients, with the 95% interval over patients."
    note += f" {metric}: {meaning[0].lower()}{meaning[1:]}" if meaning else ""
    if not any(_best_of(comparison, choice, name) for name in BOOSTING):
        note += " Boosting was not part of this comparison."
    return Table("The recommended model and its alternatives", columns, rows, note)


def _best_of(comparison: Comparison, choice: Recommendation, algorithm: str) -> str | None:
    """The variant of an algorithm that did best on validation patients; None where it was not compared."""
    rows = [row for row in comparison.rows_of(algorithm) if row in choice.validation]
    return max(rows, key=lambda row: oriented(comparison.summary.primary, choice.validation[row]), default=None)


def _milliseconds(value: float) -> str:
    return number(None) if not math.isfinite(value) else f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _limits(chapter: Chapter, comparison: Comparison, choice: Recommendation) -> Iterator[str]:
    """Whom and what the figures do not hold for, as far as the records know."""
    records = [record for record in chapter.runs(comparison.summary.experiment) if row_name(record) == choice.row]
    yield _unlike(chapter, records)
    entry, within = comparison.entry(choice.row, chapter.metric), chapter.patient_metric
    if math.isfinite(comparison.entry(choice.row, within).worst_tenth):
        values = list(comparison.entry(choice.row, within).by_patient.values())
        yield f"Some patients do worse than the mean: {worst_values(values, within)}."
    drop = oriented(chapter.metric, choice.validation[choice.row] - entry.mean)
    if drop > _LARGE_DROP * abs(choice.validation[choice.row]):
        yield (
            f"Test patients did worse than validation patients, {number(entry.mean)} against "
            f"{number(choice.validation[choice.row])}: patients who differ from those of the study may do worse still."
        )
    if weak := _weak_classes(chapter, records):
        yield weak
    for note in cautions(records, chapter.metric):
        yield noted(note)
    if choice.splits < 3:
        yield f"Only {plural(choice.splits, 'split')}: a different draw of patients may recommend another model."
    if comparison.summary.costs[choice.row].context != "none":
        yield "It needs other samples of the same patient; with few of them expect less than the figure."
    yield "Hospitals, devices and times outside of the study are untested."


def _unlike(chapter: Chapter, records: Sequence[RunRecord]) -> str:
    """What is said of a patient unlike those of the training."""
    calibrations = [read_calibration(chapter.folder / record.folder) for record in records]
    shares = [each.false_alarms for each in calibrations if each is not None and each.reference is not None]
    most = f" At most {max(shares):.0%} of patients like those of the training are marked by mistake." if shares else ""
    return f"Patients unlike those of the training: “manydg predict” marks them (column unlike_training).{most}"


def _weak_classes(chapter: Chapter, records: Sequence[RunRecord]) -> str:
    """The classes or labels of which the model misses more than half of the samples."""
    if chapter.target.numeric:
        return ""
    recall = class_recall([run for record in records if (run := chapter.predictions(record)) is not None])
    weak = sorted((share, name) for name, share in recall.items() if share < _WEAK)
    if not weak:
        return ""
    named = listed([f"{name} ({share:.0%})" for share, name in weak[:_MOST_NAMED]])
    more = f" and {len(weak) - _MOST_NAMED} more" if len(weak) > _MOST_NAMED else ""
    what = "labels" if chapter.target.kind == "multilabel" else "classes"
    return f"It recognises fewer than half of the samples of these {what}: {named}{more}."


def _all_models(chapter: Chapter, comparison: Comparison, choice: Recommendation) -> Table:
    metric = metric_name(chapter.metric)
    numbers = (f"Validation {metric}", f"Test {metric}", "Training", "Parameters", _PREDICTION)
    words = ("Within one standard error", "Patient context")
    columns = [Column("Model", numeric=False), *map(Column, numbers), *text_columns(*words)]
    rows = []
    for row in comparison.rows:
        cost, entry, validated = comparison.summary.costs[row], comparison.entry(row, chapter.metric), choice.validation
        tied = "yes" if row in choice.tied else "no" if row in validated else "not to choose from"
        tied = "recommended" if row == choice.row else tied
        rows.append([
            Cell(row_title(row)),
            Cell(number(validated.get(row)), validated.get(row)),
            Cell(number(entry.mean), entry.mean),
            Cell(duration(cost.seconds), cost.seconds),
            Cell(count(cost.parameters), cost.parameters),
            Cell(_milliseconds(cost.predict_ms), cost.predict_ms),
            Cell(tied, whole=True),
            Cell(_CONTEXT.get(cost.context, cost.context)),
        ])  # fmt: skip
    devices = listed(list(dict.fromkeys(cost.device for cost in comparison.summary.costs.values() if cost.device)))
    note = (
        "Validation patients also chose the epochs, so that validation figures are optimistic; they serve the choice "
        f"and nothing else. Training: median run{f' on {devices}' if devices else ''}. Prediction: the model alone, "
        "without reading files and making patient context. Trees have no trained parameters in this sense. Not to "
        "choose from are controls, which are there to be compared with, and models that lack most of the splits."
    )
    return Table("What every model costs, and which are within chance of the best", columns, rows, note)


def _procedure(chapter: Chapter, choice: Recommendation) -> str:
    """What choosing on validation patients is worth as a procedure, each split by itself."""
    others = sum(row != choice.row for row in choice.by_split.values())
    if choice.of_procedure is None or choice.splits < 2:
        return ""
    around = bounds_text(choice.of_procedure)
    return (
        f"Taken alone, the validation patients of {others} of {plural(choice.splits, 'split')} would have chosen "
        f"another model. Choosing in each split by its own validation patients gives {metric_name(chapter.metric)} "
        f"{number(choice.of_procedure.estimate)}{f' (95% interval {around})' if around else ''} on test patients: what "
        "the procedure, choice included, is worth. A test patient of one split may be a validation patient of another; "
        "this figure is free of that overlap."
    )
