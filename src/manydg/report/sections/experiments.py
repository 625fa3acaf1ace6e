"""Experiments that vary something: what is varied is read off the records, so a new experiment needs no code here."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.report import charts
from manydg.report.charts import Panel, Series, look
from manydg.report.content import Block, Cell, Column, Figure, Section, Table, Text
from manydg.report.sections.model import panels_of_lines
from manydg.report.study import FIRST, Chapter, Record, Spread, by_algorithm, grouped, metric_spread, seconds_per_epoch
from manydg.report.words import ALGORITHMS, LOSSES, METRICS, algorithm_name, metric_name, number, sentence
from manydg.studies.figure_data import Bars, CellTable, Curve, FigureData
from manydg.studies.figure_data import Cell as CellValue

# Figures of the general kinds that experiments leave: curves, bars and tables.


def drawn(figures: Iterable[FigureData]) -> list[Block]:
    """Figures as blocks; curves that follow one another share one block, each note said once."""
    blocks: list[Block] = []
    curves: list[tuple[FigureData, Curve]] = []
    for figure in figures:
        match figure.data:
            case Curve() as curve:
                curves.append((figure, curve))
                continue
            case Bars() as data:
                made: list[Block] = [_bar_figure(figure, data)]
            case CellTable() as data:
                made = [_table(figure, data)]
            case _:
                made = []
        blocks += [*_curve_figures(curves), *made]
        curves = []
    return blocks + _curve_figures(curves)


def _curve_figures(curves: Sequence[tuple[FigureData, Curve]]) -> list[Block]:
    if not curves:
        return []
    figures = [figure for figure, _ in curves]
    panels = [panel for figure, curve in curves for panel in _curve(figure.title, curve)]
    notes = " ".join(dict.fromkeys(figure.note for figure in figures if figure.note))
    bands = any(line.low for _, curve in curves for line in curve.series)
    caption = figures[0].title + "." if len(figures) == 1 else "Each panel has its own title and scale."
    return [Figure(caption + (" Bands are one standard deviation over the splits." if bands else ""), panels, notes)]


def _curve(title: str, curve: Curve) -> Sequence[Panel]:
    x, label = _floats(curve.x.values), curve.y.label
    series = []
    for line in sorted(curve.series, key=lambda line: _place(line.name)):
        low, high = (None if bound is None else _floats(bound) for bound in (line.low, line.high))
        series.append(Series(algorithm_name(line.name), x, _floats(line.mean), look(0), low, high))
    shown = METRICS.get(label) or LOSSES.get(label, label)
    if label in METRICS:
        title = f"{sentence(shown)}: {title[:1].lower()}{title[1:]}"
    return panels_of_lines(series, title, curve.x.label, shown, curve.x.scale, curve.y.scale).panels


def _place(name: str) -> int:
    """ManyDG, Base and the controls come first, so that they look alike in all charts."""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], float)


def _bar_figure(figure: FigureData, data: Bars) -> Figure:
    names = [algorithm_name(name) for name in data.names]
    low, high = (None if bound is None else _floats(bound).tolist() for bound in (data.low, data.high))
    values, label = _floats(data.values).tolist(), data.y.label
    panel = charts.bars(figure.title, names, values, METRICS.get(label, label), low=low, high=high)
    return Figure(f"{figure.title}.", [panel], figure.note)


def _table(figure: FigureData, data: CellTable) -> Table:
    columns = [
        Column(sentence(name), numeric=all(isinstance(row[index], int | float | None) for row in data.rows))
        for index, name in enumerate(data.columns)
    ]
    return Table(figure.title, columns, [_cells(row) for row in data.rows], figure.note)


def _cells(row: Sequence[CellValue]) -> list[Cell]:
    first, *rest = row
    named = Cell(ALGORITHMS.get(first, first)) if isinstance(first, str) else _cell(first)
    return [named, *map(_cell, rest)]


def _cell(value: CellValue) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", None)
    if isinstance(value, float):
        return Cell(number(value, 3 if abs(value) < 100 else 1), value)
    return Cell(f"{value:,}", float(value)) if isinstance(value, int) else Cell(str(value))


_LOG_RATIO = 20
_FOREGROUND = ("full", "all four objectives", "manydg")
_AXES = {
    "patients": "training patients",
    "train_patients": "training patients",
    "fraction": "share of the training patients",
    "value": "weight (the others at 1)",
    "weight": "weight (the others at 1)",
    "step": "step",
}


@dataclass(frozen=True)
class Told:
    """How an experiment is introduced."""

    title: str
    lead: str


EXPERIMENTS: dict[str, Told] = {
    "objectives": Told(
        "What each part of the method adds",
        "ManyDG adds three objectives to the plain supervised loss: features and patient factors alike in "
        "distribution (MMD), mutual reconstruction within a patient, and patient factors that agree within a patient. "
        "Here some are switched off.",
    ),
    "weights": Told(
        "How much the weights of the objectives matter",
        "One weight is varied from a tenth to ten times its default while the others stay at 1. A flat line means that "
        "the choice hardly matters.",
    ),
    "limited-data": Told(
        "With fewer patients to learn from",
        "The same test patients throughout; only the number of patients to learn from changes.",
    ),
    "continual": Told(
        "When new patients keep arriving",
        "A model trained on some patients goes on learning as groups of new ones arrive, revisiting a few samples of "
        "earlier patients, or none.",
    ),
    "decomposition": Told(
        "Simpler ways to take the patient out",
        "Two simpler decompositions of the features (SimD1, SimD2) against ManyDG’s reconstruction and projection.",
    ),
    "context": Told(
        "What a patient’s own unlabelled samples add",
        "Each input is joined with the same input seen against the rest of that patient’s samples. No label is used.",
    ),
    "context-rivals": Told(
        "Against every rival, without and with context",
        "Every algorithm twice: on a sample alone, and with the same unlabelled samples of the patient beside it.",
    ),
    "cold-start": Told(
        "How soon a new patient is known",
        "Performance by the number of unlabelled samples of the new patient that were at hand, and by the time since "
        "the recording or stay began.",
    ),
    "patient-probe": Told(
        "Is z a patient?",
        "How often the mean embedding of a session (a night, a stay) is most like that of another session of the same "
        "person, among the sessions of everyone.",
    ),
    "runtime": Told("How long training takes", ""),
}
"""In the order of the page."""


def experiment(chapter: Chapter, name: str) -> Section | None:
    """The section of an experiment that varies something; None where nothing of it was run."""
    runs, figures = chapter.runs(name), chapter.figures_of(name)
    if not runs and not figures:
        return None
    told = EXPERIMENTS.get(name) or Told(sentence(name.replace("-", " ")), "")
    blocks: list[Block] = [Text(told.lead)] if told.lead else []
    if name == "runtime" and runs:
        figures = [figure for figure in figures if figure.kind != "table"]
    if name == "continual" and figures:
        figures.sort(key=lambda figure: _y_label(figure) != chapter.metric)
        return Section(name, told.title, [*blocks, *drawn(figures), *_last(chapter, runs)], chapter.command(name))
    made = _blocks_of_runs(chapter, name, runs) if runs else []
    return Section(name, told.title, [*blocks, *made, *drawn(figures)], chapter.command(name))


def _y_label(figure: FigureData) -> str | None:
    return figure.data.y.label if isinstance(figure.data, Curve | Bars) else None


def _last(chapter: Chapter, runs: Sequence[Record]) -> list[Block]:
    """Where a course of steps ended, as a table; the figures show the way there."""
    return [_table_of(chapter, _labelled(runs), "After the last step")] if runs else []


def _blocks_of_runs(chapter: Chapter, name: str, runs: Sequence[Record]) -> list[Block]:
    if name == "runtime":
        return _times(runs)
    axis = _axis(runs)
    if axis is not None:
        return _curves(chapter, runs, axis)
    return _bars(chapter, runs)


def _axis(runs: Sequence[Record]) -> str | None:
    """The variant's key that is a number with at least three different values: what to draw along."""
    values: dict[str, set[float]] = {}
    for record in runs:
        for key, value in record.variant.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(float(value))
    wide = {key: len(found) for key, found in values.items() if len(found) > 2}
    return max(wide, key=lambda key: wide[key]) if wide else None


def _labelled(runs: Sequence[Record], axis: str | None = None) -> dict[str, list[Record]]:
    """Runs by what they are called: their algorithm where there are several, and what varies besides the axis."""
    several = len({record.algorithm for record in runs}) > 1
    values: dict[str, set[str]] = {}
    for record in runs:
        for key, value in record.variant.items():
            values.setdefault(key, set()).add(json.dumps(value))
    varied = {key for key, found in values.items() if key != axis and len(found) > 1}
    ordered = [record for records in by_algorithm(runs).values() for record in records]
    found = grouped(ordered, lambda record: _label(record, varied, several))
    if several:
        return found
    # Runs come in the order they ended in; variants are read in the order of their names, the whole method last.
    return {name: found[name] for name in sorted(found, key=lambda name: (name.lower() in _FOREGROUND, name))}


def _label(record: Record, varied: Collection[str], several: bool) -> str:
    variant = {key: value for key, value in record.variant.items() if key in varied}
    parts = [algorithm_name(record.algorithm)] if several or not variant else []
    return ", ".join(parts + [_told(key, value) for key, value in variant.items()])


def _told(key: str, value: Any) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return f"with {name}" if value else f"without {name}"
    if isinstance(value, str):
        return LOSSES.get(value, value)
    if isinstance(value, dict):
        return ", ".join(
            f"{LOSSES.get(part, part)} {entry:g}" if isinstance(entry, int | float) else f"{part} {entry}"
            for part, entry in value.items()
        )
    if isinstance(value, int | float):
        return f"{value:g} {name}" if name.split()[0].endswith("s") else f"{name} {value:g}"
    return f"{name} {json.dumps(value)}"


def _curves(chapter: Chapter, runs: Sequence[Record], axis: str) -> list[Block]:
    along = [record for record in runs if isinstance(record.variant.get(axis), int | float)]
    series: list[Series] = []
    table: list[tuple[str, float, Sequence[Record]]] = []
    for name, records in _labelled(along, axis).items():
        points = grouped(records, lambda record: float(record.variant[axis]))
        x = np.array(sorted(points))
        folded = [metric_spread(points[value], chapter.metric) for value in x]
        mean, low, high = (np.array([getattr(found, key) for found in folded]) for key in ("mean", "low", "high"))
        series.append(Series(sentence(name), x, mean, look(len(series)), low, high))
        table += [(sentence(name), float(value), points[value]) for value in x]
    label, metric = _AXES.get(axis, axis.replace("_", " ")), metric_name(chapter.metric)
    every = np.concatenate([line.x for line in series])
    scale = "log" if every.min() > 0 and every.max() / every.min() >= _LOG_RATIO else "linear"
    figure = panels_of_lines(series, f"{sentence(metric)} by {label.split(' (')[0]}", label, metric, scale)
    note = "Means over the splits; bands are one standard deviation."
    blocks: list[Block] = [Figure(figure.caption, figure.panels, note), _variant_table(chapter, table, label)]
    aside = [record for record in runs if record not in along]
    return blocks + (_beside_default(chapter, aside, along, axis) if aside else [])


def _beside_default(chapter: Chapter, aside: Sequence[Record], along: Sequence[Record], axis: str) -> list[Block]:
    """Runs that lie on no axis, beside those in which everything is at 1."""
    # Whichever weight was the one to vary, at 1 it is the same run: one for each seed is enough.
    same = {(record.algorithm, record.seed): record for record in along if record.variant[axis] == 1}
    default = [record.replace(variant={"set": "every weight at 1"}) for record in same.values()]
    return _bars(chapter, [*default, *(record.replace(variant=_only_text(record)) for record in aside)])


def _only_text(record: Record) -> dict[str, str]:
    return {"set": ", ".join(_told(key, value) for key, value in record.variant.items())}


def _variant_table(chapter: Chapter, entries: Sequence[tuple[str, float, Sequence[Record]]], label: str) -> Table:
    metrics = chapter.target.metrics
    columns = [
        Column("Variant", numeric=False),
        Column(sentence(label)),
        *(Column(sentence(metric_name(name))) for name in metrics),
    ]
    columns.append(Column("Splits"))
    rows = []
    for name, value, records in entries:
        found = [metric_spread(records, metric) for metric in metrics]
        rows.append(
            [
                Cell(name),
                Cell(f"{value:g}", value),
                *map(spread_cell, found),
                Cell(str(found[0].count), float(found[0].count)),
            ]
        )
    return Table("The same in numbers (mean ± standard deviation over splits)", columns, rows)


def spread_cell(found: Spread, digits: int = 3) -> Cell:
    """Mean ± standard deviation."""
    spread = f" ± {number(found.sd, digits)}" if found.count > 1 else ""
    return Cell(f"{number(found.mean, digits)}{spread}", found.mean)


def _bars(chapter: Chapter, runs: Sequence[Record]) -> list[Block]:
    groups = {sentence(name): records for name, records in _labelled(runs).items()}
    panels = [_bar_panel(groups, metric) for metric in chapter.target.metrics]
    note = "Bars are means over the splits, whiskers one standard deviation."
    table = _table_of(chapter, groups, "The same in numbers (mean ± standard deviation over splits)")
    return [Figure("Performance on test patients.", panels, note), table]


def _bar_panel(groups: Mapping[str, Sequence[Record]], metric: str) -> Panel:
    found = [metric_spread(records, metric) for records in groups.values()]
    return charts.bars(
        sentence(metric_name(metric)),
        list(groups),
        [each.mean for each in found],
        metric_name(metric),
        low=[each.low for each in found],
        high=[each.high for each in found],
        foreground=[name for name in groups if name.lower() in _FOREGROUND] or None,
    )


def _table_of(chapter: Chapter, groups: Mapping[str, Sequence[Record]], caption: str) -> Table:
    metrics = chapter.target.metrics
    titles = [*(sentence(metric_name(name)) for name in metrics), "Splits"]
    rows = []
    for name, records in groups.items():
        each = [metric_spread(records, metric) for metric in metrics]
        splits = Cell(str(each[0].count), float(each[0].count))
        rows.append([Cell(sentence(name)), *map(spread_cell, each), splits])
    return Table(caption, [Column("Variant", numeric=False), *map(Column, titles)], rows)


def _times(runs: Sequence[Record]) -> list[Block]:
    names, values, rows = [], [], []
    for name, records in by_algorithm(runs).items():
        seconds = [seconds_per_epoch(record) for record in records]
        kept = [value for value in seconds if value is not None]
        if kept:
            names.append(algorithm_name(name))
            values.append(float(np.mean(kept)))
            size, memory, device = records[0].parameters, records[0].peak_memory_mb, records[0].device
            time = Cell(number(values[-1], 2), values[-1])
            rows.append([Cell(names[-1]), time, _optional(size), _optional(memory), Cell(device)])
    if not names:
        return []
    panel = charts.bars("Seconds per epoch", names, values, "seconds per epoch", digits=2, foreground=["ManyDG"])
    columns = [
        Column("Method", numeric=False), Column("Seconds per epoch"), Column("Parameters"),
        Column("Peak memory (MB)"), Column("Device", numeric=False),
    ]  # fmt: skip
    lead = Text("Seconds per epoch. The first three epochs are left out, since they may be unsteady.")
    return [lead, Figure("Mean time of an epoch.", [panel]), Table("Time and size", columns, rows)]


def _optional(value: Any) -> Cell:
    return Cell(f"{value:,.0f}", float(value)) if isinstance(value, int | float) else Cell("\N{EN DASH}", None)
