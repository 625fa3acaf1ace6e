"""Experiments that vary something: what is varied is read off the records, so a new experiment needs no code here."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manydg.report import _charts
from manydg.report._charts import Series
from manydg.report._content import Block, Cell, Column, Figure, Section, Table, Text
from manydg.report._drawing import look
from manydg.report._runs import Spread, by_algorithm, grouped, metric_spread, seconds_per_epoch
from manydg.report._sections_model import panels_of_lines
from manydg.report._study import Chapter, Record
from manydg.report._words import LOSSES, algorithm_name, metric_name, number, sentence

_LOG_RATIO = 20
_FOREGROUND = ("full", "full loss", "manydg", "all", "all objectives")
_AXES = {
    "patients": "training patients",
    "train_patients": "training patients",
    "fraction": "share of the training patients",
    "value": "weight (the others at 1)",
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
    "cold-start": Told(
        "How soon a new patient is known",
        "Performance by the number of unlabelled samples of the new patient that were at hand.",
    ),
    "runtime": Told(
        "How long training takes",
        "Seconds per epoch. The first three epochs are left out, since they may be unsteady.",
    ),
}
"""In the order of the page."""


def experiment(chapter: Chapter, name: str) -> Section | None:
    """The section of an experiment that varies something; None where nothing of it was run."""
    runs, figures = chapter.runs(name), chapter.figures_of(name)
    if not runs and not figures:
        return None
    told = EXPERIMENTS.get(name) or Told(sentence(name.replace("-", " ")), "")
    blocks: list[Block] = [Text(told.lead)] if told.lead else []
    if runs:
        blocks += _blocks_of_runs(chapter, name, runs)
    for figure in figures:
        blocks += drawn(figure.kind, figure.title, figure.data, figure.note)
    return Section(name, told.title, blocks, chapter.commands.get(name, ""))


def drawn(kind: str, title: str, data: Mapping[str, Any], note: str) -> list[Block]:
    """The blocks of a figure of kind ``curve``, ``bars`` or ``table``."""
    if kind == "curve":
        axis = data["x"]
        x = np.array(axis["values"], float)
        series = [
            Series(
                algorithm_name(str(line["name"])), x, _floats(line["mean"]), look(0),
                *(_floats(line[key]) if line.get(key) else None for key in ("low", "high")),
            )
            for line in data["series"]
        ]  # fmt: skip
        figure = panels_of_lines(series, title, axis["label"], data["y"]["label"], axis.get("scale", "linear"))
        return [Figure(figure.caption, figure.panels, note)]
    if kind == "bars":
        names = [algorithm_name(str(name)) for name in data["names"]]
        ends = [_floats(data[key]).tolist() if data.get(key) else None for key in ("low", "high")]
        values = _floats(data["values"]).tolist()
        return [
            Figure(
                f"{title}.", [_charts.bars(title, names, values, data["y"]["label"], low=ends[0], high=ends[1])], note
            )
        ]
    if kind == "table":
        return [_plain_table(title, data, note)]
    return []


def _floats(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values], float)


def _plain_table(title: str, data: Mapping[str, Any], note: str) -> Table:
    numeric = [
        all(isinstance(row[place], int | float | None) for row in data["rows"]) for place in range(len(data["columns"]))
    ]
    columns = [Column(str(name), numeric=flag) for name, flag in zip(data["columns"], numeric, strict=True)]
    return Table(title, columns, [[_plain_cell(cell) for cell in row] for row in data["rows"]], note)


def _plain_cell(value: Any) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", None)
    if isinstance(value, float):
        return Cell(number(value, 3 if abs(value) < 100 else 1), value)
    return Cell(f"{value:,}", float(value)) if isinstance(value, int) else Cell(str(value))


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
        for key, value in (record.get("variant") or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(float(value))
    wide = {key: len(found) for key, found in values.items() if len(found) > 2}
    return max(wide, key=lambda key: wide[key]) if wide else None


def label_of(record: Record, axis: str | None, several_algorithms: bool) -> str:
    """What a run is called in its experiment: its algorithm where there are several, and what was varied."""
    variant = {key: value for key, value in (record.get("variant") or {}).items() if key != axis}
    parts = [algorithm_name(str(record["algorithm"]))] if several_algorithms or not variant else []
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
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {json.dumps(value)}"


def _curves(chapter: Chapter, runs: Sequence[Record], axis: str) -> list[Block]:
    metric, several = chapter.metric, len({record["algorithm"] for record in runs}) > 1
    along = [record for record in runs if isinstance((record.get("variant") or {}).get(axis), int | float)]
    aside = [record for record in runs if record not in along]
    series: list[Series] = []
    table: list[tuple[str, float, Sequence[Record]]] = []
    lines = grouped(
        [run for found in by_algorithm(along).values() for run in found], lambda run: label_of(run, axis, several)
    )
    for name, records in lines.items():
        points = grouped(records, lambda record: float(record["variant"][axis]))
        x = np.array(sorted(points))
        folded = [metric_spread(points[value], metric) for value in x]
        mean, low, high = (np.array([getattr(found, key) for found in folded]) for key in ("mean", "low", "high"))
        series.append(Series(name, x, mean, look(len(series)), low, high))
        table += [(name, float(value), points[value]) for value in x]
    label = _AXES.get(axis, axis.replace("_", " "))
    every = np.concatenate([line.x for line in series])
    scale = "log" if every.min() > 0 and every.max() / every.min() >= _LOG_RATIO else "linear"
    figure = panels_of_lines(series, f"{sentence(metric_name(metric))} by {label}", label, metric_name(metric), scale)
    note = "Means over the splits; bands are one standard deviation."
    blocks: list[Block] = [Figure(figure.caption, figure.panels, note), _variant_table(chapter, table, label)]
    return blocks + (_bars(chapter, aside) if aside else [])


def _variant_table(chapter: Chapter, entries: Sequence[tuple[str, float, Sequence[Record]]], label: str) -> Table:
    metrics = chapter.target.metrics
    columns = [
        Column("Model", numeric=False),
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
    several = len({record["algorithm"] for record in runs}) > 1
    groups: dict[Hashable, list[Record]] = {}
    for records in by_algorithm(runs).values():
        groups |= grouped(records, lambda record: label_of(record, None, several))
    metrics = chapter.target.metrics
    names = [sentence(str(name)) for name in groups]
    panels = []
    for metric in metrics:
        found = [metric_spread(records, metric) for records in groups.values()]
        panels.append(
            _charts.bars(
                sentence(metric_name(metric)),
                names,
                [each.mean for each in found],
                metric_name(metric),
                low=[each.low for each in found],
                high=[each.high for each in found],
                foreground=[name for name in names if name.lower() in _FOREGROUND] or None,
            )
        )
    note = "Bars are means over the splits, whiskers one standard deviation."
    columns = [
        Column("Variant", numeric=False),
        *(Column(sentence(metric_name(name))) for name in metrics),
        Column("Splits"),
    ]
    rows = []
    for name, records in zip(names, groups.values(), strict=True):
        each = [metric_spread(records, metric) for metric in metrics]
        rows.append([Cell(name), *map(spread_cell, each), Cell(str(each[0].count), float(each[0].count))])
    table = Table("The same in numbers (mean ± standard deviation over splits)", columns, rows)
    return [Figure("Performance on test patients.", panels, note), table]


def _times(runs: Sequence[Record]) -> list[Block]:
    names, values, rows = [], [], []
    for name, records in by_algorithm(runs).items():
        seconds = [seconds_per_epoch(record) for record in records]
        kept = [value for value in seconds if value is not None]
        if kept:
            names.append(algorithm_name(name))
            values.append(float(np.mean(kept)))
            size, memory, device = (records[0].get(key) for key in ("parameters", "peak_memory_mb", "device"))
            time = Cell(number(values[-1], 2), values[-1])
            rows.append([Cell(names[-1]), time, _optional(size), _optional(memory), Cell(str(device or ""))])
    if not names:
        return []
    panel = _charts.bars("Seconds per epoch", names, values, "seconds per epoch", digits=2, foreground=["ManyDG"])
    columns = [
        Column("Method", numeric=False), Column("Seconds per epoch"), Column("Parameters"),
        Column("Peak memory (MB)"), Column("Device", numeric=False),
    ]  # fmt: skip
    return [Figure("Mean time of an epoch.", [panel]), Table("Time and size", columns, rows)]


def _optional(value: Any) -> Cell:
    return Cell(f"{value:,.0f}", float(value)) if isinstance(value, int | float) else Cell("\N{EN DASH}", None)
