"""Figures of the general kinds that experiments leave: curves, bars and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.report import _charts
from manydg.report._content import Block, Cell, Column, Figure, Table
from manydg.report._drawing import Panel, look
from manydg.report._line_charts import Series
from manydg.report._runs import FIRST
from manydg.report._sections_model import panels_of_lines
from manydg.report._words import ALGORITHMS, LOSSES, METRICS, algorithm_name, number, sentence
from manydg.report.figure_data import FigureData


def drawn(figures: Iterable[FigureData]) -> list[Block]:
    """Figures as blocks; curves that follow one another share one block, each note said once."""
    blocks: list[Block] = []
    curves: list[FigureData] = []
    for figure in figures:
        if figure.kind == "curve":
            curves.append(figure)
            continue
        blocks += _curves(curves)
        curves = []
        blocks += _bars(figure) if figure.kind == "bars" else _table(figure) if figure.kind == "table" else []
    return blocks + _curves(curves)


def _curves(figures: Sequence[FigureData]) -> list[Block]:
    if not figures:
        return []
    panels = [panel for figure in figures for panel in _curve(figure)]
    notes = " ".join(dict.fromkeys(figure.note for figure in figures if figure.note))
    bands = any(line.get("low") for figure in figures for line in figure.data["series"])
    caption = figures[0].title + "." if len(figures) == 1 else "Each panel has its own title and scale."
    return [Figure(caption + (" Bands are one standard deviation over the splits." if bands else ""), panels, notes)]


def _curve(figure: FigureData) -> Sequence[Panel]:
    axis, label = figure.data["x"], str(figure.data["y"]["label"])
    scales = [figure.data[name].get("scale", "linear") for name in ("x", "y")]
    x = np.array(axis["values"], float)
    series = []
    for line in sorted(figure.data["series"], key=lambda line: _place(str(line["name"]))):
        low, high = (_floats(line[key]) if line.get(key) else None for key in ("low", "high"))
        series.append(Series(algorithm_name(str(line["name"])), x, _floats(line["mean"]), look(0), low, high))
    shown = METRICS.get(label) or LOSSES.get(label, label)
    title = f"{sentence(shown)}: {figure.title[:1].lower()}{figure.title[1:]}" if label in METRICS else figure.title
    return panels_of_lines(series, title, axis["label"], shown, *scales).panels


def _place(name: str) -> int:
    """ManyDG, Base and the controls come first, so that they look alike in all charts."""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], float)


def _bars(figure: FigureData) -> list[Block]:
    data = figure.data
    names = [algorithm_name(str(name)) for name in data["names"]]
    low, high = (_floats(data[key]).tolist() if data.get(key) else None for key in ("low", "high"))
    values, label = _floats(data["values"]).tolist(), str(data["y"]["label"])
    panel = _charts.bars(figure.title, names, values, METRICS.get(label, label), low=low, high=high)
    return [Figure(f"{figure.title}.", [panel], figure.note)]


def _table(figure: FigureData) -> list[Block]:
    rows = figure.data["rows"]
    columns = [
        Column(sentence(str(name)), numeric=all(isinstance(row[place], int | float | None) for row in rows))
        for place, name in enumerate(figure.data["columns"])
    ]
    return [Table(figure.title, columns, [_cells(row) for row in rows], figure.note)]


def _cells(row: Sequence[Any]) -> list[Cell]:
    first, *rest = row
    named = Cell(ALGORITHMS.get(first, first)) if isinstance(first, str) else _cell(first)
    return [named, *map(_cell, rest)]


def _cell(value: Any) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", None)
    if isinstance(value, float):
        return Cell(number(value, 3 if abs(value) < 100 else 1), value)
    return Cell(f"{value:,}", float(value)) if isinstance(value, int) else Cell(str(value))
