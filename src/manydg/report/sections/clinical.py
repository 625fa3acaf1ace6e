"""What a model is worth in care: before and after onset, alarms, decisions, groups of patients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from manydg.evaluation import clinical
from manydg.evaluation.clinical import RATE_NAMES, CurvePoint, GroupResult
from manydg.evaluation.metrics import Predictions
from manydg.evaluation.statistics import Interval, PatientResampling, mean_over_runs
from manydg.report import charts
from manydg.report.charts import Series
from manydg.report.results_folder import Chapter
from manydg.report.sections import Block, Cell, Column, Figure, Part, Section, Table, Text, count_cell
from manydg.report.words import interval, metric_name, number, probability, row_title, sentence
from manydg.studies.summary import row_name, sites_of, value_of
from manydg.targets import oriented
from manydg.training.record import RunRecord
from manydg.training.run import silence_of

_RESAMPLES, _MAX_CURVES, _MAX_GROUPED = 400, 4, 3
_APART = {"before": "before onset", "after": "from onset on"}
Models = Mapping[str, Sequence[Predictions]]
"""All test predictions of the runs of each model, by the name to show."""


class Clinical(Section):
    """Parts that need the runs' predictions; those of alarms an event, those of groups columns that were named."""

    order = 460

    def build(self, chapter: Chapter) -> Iterator[Part]:
        groups: dict[str, list[RunRecord]] = {}
        for record in chapter.compared() or chapter.uses():
            groups.setdefault(row_title(row_name(record)), []).append(record)
        loaded = {name: list(map(chapter.whole_predictions, records)) for name, records in groups.items()}
        models = {
            name: runs
            for name, each in loaded.items()
            if (runs := [run for run in each if run is not None and len(run.scored().truth)])
        }
        if not models:
            return
        everyone = np.concatenate([run.names for runs in models.values() for run in runs])
        plan = PatientResampling.of(everyone, sites_of(itertools.chain(*groups.values())), resamples=_RESAMPLES)
        event = next((record.event for record in chapter.records if record.event), None)
        if event is not None:
            yield _onset(chapter, groups)
        if chapter.target.kind == "binary":
            record = next(record for records in groups.values() for record in records)
            yield _decisions(chapter, models, plan, silence_of(record.config, event))
        yield from _subgroups(chapter, models, plan)


def _foremost(chapter: Chapter, models: Models, most: int) -> Models:
    """The recommended model and those that are next on validation patients, in the order of the tables."""
    choice = None if chapter.choice is None else chapter.choice.summary.recommendation
    means = {} if choice is None else {
        row_title(row): math.inf if row == choice.row else oriented(chapter.metric, mean)
        for row, mean in choice.validation.items()
    }  # fmt: skip
    kept = sorted(models, key=lambda name: -means.get(name, -math.inf))[:most]
    return {name: runs for name, runs in models.items() if name in kept}


def _left_out(models: Models, shown: Models) -> str:
    if len(shown) == len(models):
        return ""
    return (
        f" Shown are the recommended model and the next of the {len(models)} on validation patients; 'manydg clinical' "
        "has all."
    )


def _score(records: Sequence[RunRecord], metric: str) -> float:
    known = [value for value in (value_of(record, metric) for record in records) if not math.isnan(value)]
    return float(np.mean(known)) if known else -math.inf


def _cell(value: Interval, digits: int = 3) -> Cell:
    return Cell(number(value.estimate, digits), value.estimate, interval(value.low, value.high, digits))


def _onset(chapter: Chapter, groups: Mapping[str, Sequence[RunRecord]]) -> Part:
    """Every metric before and after the onset, apart."""
    metrics = [f"{metric}_{when}" for when in _APART for metric in chapter.target.metrics]
    rows = [[Cell(name), *(_mean_cell(chapter, runs, metric) for metric in metrics)] for name, runs in groups.items()]
    titles = [f"{sentence(metric_name(m))} {words}" for words in _APART.values() for m in chapter.target.metrics]
    lead = (
        "Foreseeing an event is harder than recognising one that has begun. At the bedside the hours before the onset "
        "count. Both columns have the same negative samples: those before an onset at which nothing is to come."
    )
    columns = [Column("Method", numeric=False), *map(Column, titles)]
    note = "Means over the splits, with 95% intervals over patients."
    table = Table("Before the onset, and from the onset on", columns, rows, note)
    return Part("onset", "Before and after the onset", [Text(lead), table], chapter.command("compare"))


def _mean_cell(chapter: Chapter, records: Sequence[RunRecord], metric: str) -> Cell:
    """The mean over splits with its interval, where the main comparison has one."""
    entries = {} if chapter.comparison is None else chapter.comparison.summary.entries
    # Of an event to be foreseen, the plain metric is the one before onset.
    keys = [(row_name(records[0]), key) for key in (metric, metric.removesuffix("_before"))]
    entry = next((entries[key] for key in keys if key in entries), None)
    mean, bounds = _score(records, metric), None if entry is None else entry.interval
    return Cell(number(mean), mean, "" if bounds is None else interval(bounds.low, bounds.high))


def _decisions(chapter: Chapter, models: Models, plan: PatientResampling, silence: float | None) -> Part:
    """Rates at each run's threshold, the curve of alarms, and net benefit."""
    blocks: list[Block] = [_at_threshold(models, plan, silence)]
    some = _foremost(chapter, models, _MAX_CURVES)
    if all(run.timing is not None for runs in some.values() for run in runs):
        blocks.append(_alarms(some, plan, silence))
    blocks.append(_net_benefit(some, plan))
    if left_out := _left_out(models, some):
        blocks.append(Text(left_out.strip()))
    return Part("decisions", "Decisions and alarms", blocks, chapter.command("compare"))


def _at_threshold(models: Models, plan: PatientResampling, silence: float | None) -> Table:
    rows, shown = [], list(RATE_NAMES)
    for name, runs in models.items():
        weights = [plan.weights[:, np.searchsorted(plan.names, run.names)] for run in runs]
        each = [clinical.rates_at_threshold(run, own, silence) for run, own in zip(runs, weights, strict=True)]
        means = mean_over_runs(each)
        shown = [rate for rate in RATE_NAMES if rate in means]
        rows.append([Cell(name), *(_cell(plan.interval(means[rate])) for rate in shown)])
    columns = [Column("Method", numeric=False), *(Column(RATE_NAMES[rate]) for rate in shown)]
    note = (
        "Each run at the threshold that was chosen on its validation patients. Means over the splits, with 95% "
        f"intervals over {plan.drawn}."
    )
    if "events_caught" in shown:
        note += (
            " An alarm within the horizon before onset catches the event; any other alarm before onset is false. "
            "After an alarm there is silence, as long as the horizon unless the run says otherwise."
        )
    return Table("At the decision threshold", columns, rows, note)


def _alarms(models: Models, plan: PatientResampling, silence: float | None) -> Figure:
    curves = {name: clinical.alarm_curve(runs, plan, silence) for name, runs in models.items()}
    labels = {"events_caught": "share of events caught", "lead_hours": "mean hours of warning"}
    panels = [
        charts.lines(
            sentence(label), [_series(name, curve[key]) for name, curve in curves.items()],
            "false alarms per patient-day", label, scale="log",
        )
        for key, label in labels.items()
    ]  # fmt: skip
    note = (
        "At each budget the threshold that catches most within it on these patients; bands are 95% intervals over "
        f"{plan.drawn}."
    )
    return Figure("What a budget of false alarms buys.", panels, note)


def _series(name: str, points: Sequence[CurvePoint]) -> Series:
    columns = [(point.at, point.value.estimate, point.value.low, point.value.high) for point in points]
    x, mean, low, high = np.array(columns, float).T
    return Series(name, x, mean, low, high)


def _net_benefit(models: Models, plan: PatientResampling) -> Figure:
    curves = {name: clinical.decision_curve(runs, plan) for name, runs in models.items()}
    series = [_series(name, curve["model"]) for name, curve in curves.items()]
    everybody = _series("act on everybody", next(iter(curves.values()))["everybody"])
    top = max(float(np.nanmax(each.mean)) for each in series)
    # Acting on everybody soon does far more harm than good: the axis would show nothing else.
    kept = everybody.mean >= -0.5 * max(top, 1e-3)
    shown = Series(everybody.name, everybody.x[kept], everybody.mean[kept])
    panel = charts.lines("Net benefit", [*series, shown], "threshold probability", "net benefit")
    note = (
        "Net benefit is the share of samples rightly acted on, minus the share wrongly acted on times the odds of the "
        "threshold; acting on nobody has 0. A model is worth using at the thresholds at which it is above both. It "
        "takes the probabilities as they are: where they are too high or too low, so is the threshold."
    )
    return Figure("At which thresholds it is worth acting on.", [panel], note)


def _subgroups(chapter: Chapter, models: Models, plan: PatientResampling) -> Iterator[Part]:
    some = _foremost(chapter, models, _MAX_GROUPED)
    left_out = _left_out(models, some)
    columns = list(next(iter(some.values()))[0].subgroups)
    blocks: list[Block] = []
    for column in columns:
        for name, runs in some.items():
            blocks.append(_groups(chapter, f"{column}: {name}", clinical.compare_groups(runs, column, plan)))
    gaps = {name: np.array(list(clinical.calibration_by_patient(runs).values())) for name, runs in some.items()}
    if columns:
        lead = (
            "A model may do well on average and fail a group. Each group is scored by itself; differences are from "
            "the largest group, and p is corrected for the number of groups. Average precision depends on how common "
            "the positive class is in a group; the area under the ROC curve does not." + left_out
        )
        yield Part("subgroups", "Groups of patients", [Text(lead), *blocks], chapter.command("compare"))
    label = "mean prediction minus truth" if chapter.target.kind == "regression" else "mean probability minus share"
    panel = charts.distributions("Calibration within each patient", gaps, label)
    caption = "0 is right on average for that patient; above it the model states too much, below too little." + left_out
    yield Part("patient-calibration", "Calibration patient by patient", [Figure(caption, [panel])])


def _difference(group: GroupResult, metric: str) -> Cell:
    gap, p = group.differences.get(metric), group.p.get(metric)
    if gap is None:
        return Cell("", None)
    cell = _cell(gap)
    return (
        cell if p is None or math.isnan(p) else replace(cell, note=f"{cell.note}, p\N{NO-BREAK SPACE}{probability(p)}")
    )


def _groups(chapter: Chapter, caption: str, groups: Sequence[GroupResult]) -> Table:
    metrics = [*chapter.metrics[:1], *(["auroc"] if "auroc" in chapter.metrics[1:] else []), "calibration"]
    names = {"calibration": "Probability minus truth"}
    titles = [names.get(metric) or sentence(metric_name(metric)) for metric in metrics]
    columns = [Column("Group", numeric=False), Column("Patients")]
    for title in titles:
        columns += [Column(title), Column("Difference")]
    rows = []
    for group in groups:
        positive = "" if math.isnan(group.positive) else f"{group.positive:.1%} positive"
        row = [Cell(group.group), count_cell(group.patients, positive)]
        for metric in metrics:
            row += [_cell(group.values[metric]), _difference(group, metric)]
        rows.append(row)
    # The difference in calibration is left out: both values are beside each other, and the table fits on the page.
    return Table(caption, columns[:-1], [row[:-1] for row in rows])
