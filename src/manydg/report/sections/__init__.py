"""Sections of the report: what they are made of, and the registry that finds them, one file each.

A section builds parts for every dataset's chapter; a part is made of blocks: tables, figures, paragraphs, lists. A
section of another package joins by an entry point of the group ``manydg.report.sections``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from manydg.registry import Registry
from manydg.report import charts
from manydg.report.charts import Panel, Series, floats
from manydg.report.results_folder import FIRST, Chapter
from manydg.report.words import LOSSES, METRICS, algorithm_name, algorithm_or_text, count, number, sentence, signed
from manydg.studies.figure_data import (
    Bars,
    CellTable,
    CosineTable,
    Curve,
    Embedding,
    FigureData,
    NormPairs,
    Similarity,
    SimilarityRow,
)
from manydg.studies.figure_data import Cell as CellValue


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    - ``sort``: What the column is sorted by; the text where absent. None sorts last in either direction.
    - ``note``: A second, smaller line.
    - ``rank`` {"", "best", "second"}: Bold for the best, underlined for the second best.
    - ``whole``: Whether the text must stay on one line, as a pseudonym.
    """

    text: str
    sort: float | str | None = ""
    note: str = ""
    rank: str = ""
    whole: bool = False

    @property
    def key(self) -> str:
        """The sort key as the page carries it; empty sorts last."""
        if self.sort is None or (isinstance(self.sort, float) and not math.isfinite(self.sort)):
            return ""
        return self.text if self.sort == "" else str(self.sort)


@dataclass(frozen=True)
class Column:
    """A column's heading; numeric ones are set flush right and sort as numbers."""

    title: str
    numeric: bool = True


def text_columns(*titles: str) -> list[Column]:
    """Columns that are not numeric."""
    return [Column(title, numeric=False) for title in titles]


def count_cell(value: float | None, note: str = "") -> Cell:
    """A whole number; an en dash where it is not known."""
    return Cell(count(value), None if value is None else float(value), note)


@dataclass(frozen=True)
class Table:
    """A sortable table; the first cell of a row names it."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    kind: str = field(default="table", init=False)


@dataclass(frozen=True)
class Figure:
    """Panels side by side under one caption."""

    caption: str
    panels: Sequence[Panel]
    note: str = ""
    kind: str = field(default="figure", init=False)


@dataclass(frozen=True)
class Text:
    """A paragraph; a ``note`` is set smaller, a ``finding`` in bold, a ``label`` as the heading of what follows."""

    text: str
    role: str = ""
    kind: str = field(default="text", init=False)


@dataclass(frozen=True)
class Bullets:
    """A list of short points."""

    items: Sequence[str]
    kind: str = field(default="bullets", init=False)


@dataclass(frozen=True)
class Terms:
    """Words and what they mean."""

    entries: Sequence[tuple[str, str]]
    kind: str = field(default="terms", init=False)


Block = Table | Figure | Text | Bullets | Terms


@dataclass(frozen=True)
class Part:
    """A part of a chapter, under a heading of its own.

    - ``name``: The experiment, or another short name without spaces; the page's anchor is made from it.
    - ``command``: What to type to make it again; empty where it is not known.
    - ``order``: Where it comes in the chapter; None for the order of its section.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    command: str = ""
    order: int | None = None


class Section(ABC):
    """What one file adds to every dataset's chapter.

    - ``order``: Where its parts come in a chapter; a part may have an order of its own.
    - ``experiments``: The experiments it shows; all others are shown as far as their records and figures go.
    - ``expected``: The experiments that the contents name as not run where they are missing.
    """

    order: ClassVar[int]
    experiments: ClassVar[tuple[str, ...]] = ()
    expected: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build(self, chapter: Chapter) -> Iterable[Part]:
        """The section's parts for a dataset; none where there is nothing to show."""

    def headline(self, chapter: Chapter) -> str:
        """The sentence that opens the chapter's summary; the first section with one has it."""
        return ""

    def first_screen(self, chapter: Chapter) -> Sequence[Block]:
        """Blocks of the chapter's summary, after its first sentence."""
        return ()

    def findings(self, chapter: Chapter) -> list[str]:
        """Short points for the chapter's summary."""
        return []


SECTIONS: Registry[Section] = Registry("section", __name__, Section)


@cache
def all_sections() -> tuple[Section, ...]:
    """One of each section, in the order of the page."""
    return tuple(sorted((SECTIONS.get(name)() for name in SECTIONS.names()), key=lambda section: section.order))


def claimed_experiments() -> set[str]:
    """The experiments that some section shows as its own."""
    return {name for section in all_sections() for name in section.experiments}


# The figures that experiments leave, as blocks: curves, bars, tables, maps, norms and cosines

_INDISTINCT = 0.02
"""z does not tell patients apart where its cosines within and across patients differ by less."""


def figure_blocks(figures: Iterable[FigureData]) -> list[Block]:
    """Figures as blocks; consecutive curves share one block, in which equal notes appear once."""
    blocks: list[Block] = []
    curves: list[tuple[FigureData, Curve]] = []
    for figure in figures:
        if isinstance(figure.data, Curve):
            curves.append((figure, figure.data))
        else:
            blocks += [*_curve_blocks(curves), *_other_blocks(figure)]
            curves = []
    return blocks + _curve_blocks(curves)


def _other_blocks(figure: FigureData) -> list[Block]:
    match figure.data:
        case Bars() as data:
            return [_bars(figure, data)]
        case CellTable() as data:
            return [_table(figure, data)]
        case Embedding() as data:
            who = "Of the patients, the eight with most samples have a mark of their own; the others are grey."
            caption = f"{figure.title}. {who}" + (f" Drawn by {data.method}." if data.method else "")
            return [Figure(caption, charts.embedding_maps(data), figure.note)]
        case NormPairs() as data:
            model = algorithm_name(figure.algorithm or "manydg")
            caption = f"{figure.title} ({model}). On the dotted line both parts are equally long."
            return [Figure(caption, charts.norms_scatter(data), figure.note)]
        case Similarity() as data:
            return _similarity(figure, data)
        case CosineTable() as data:
            return [_cosines(figure, data)]
        case _:
            return []


def _curve_blocks(curves: Sequence[tuple[FigureData, Curve]]) -> list[Block]:
    if not curves:
        return []
    panels = [panel for figure, curve in curves for panel in _curve_panels(figure.title, curve)]
    notes = " ".join(dict.fromkeys(figure.note for figure, _ in curves if figure.note))
    bands = any(line.low for _, curve in curves for line in curve.series)
    caption = f"{curves[0][0].title}." if len(curves) == 1 else "Each panel has its own title and scale."
    return [Figure(caption + (" Bands are one standard deviation over the splits." if bands else ""), panels, notes)]


def _curve_panels(title: str, curve: Curve) -> list[Panel]:
    x, label = floats(curve.x.values), curve.y.label
    series = []
    # ManyDG, Base and the controls come first, so that they have the same style in all charts.
    for line in sorted(curve.series, key=lambda line: [*FIRST, line.name].index(line.name)):
        low, high = (None if bound is None else floats(bound) for bound in (line.low, line.high))
        series.append(Series(algorithm_name(line.name), x, floats(line.mean), low, high))
    shown = METRICS.get(label) or LOSSES.get(label, label)
    if label in METRICS:
        title = f"{sentence(shown)}: {title[:1].lower()}{title[1:]}"
    return charts.line_panels(title, series, curve.x.label, shown, curve.x.scale, curve.y.scale)


def _bars(figure: FigureData, data: Bars) -> Figure:
    names = [algorithm_name(name) for name in data.names]
    low, high = (None if bound is None else floats(bound).tolist() for bound in (data.low, data.high))
    values, label = floats(data.values).tolist(), data.y.label
    panel = charts.bars(figure.title, names, values, METRICS.get(label, label), low=low, high=high)
    return Figure(f"{figure.title}.", [panel], figure.note)


def _table(figure: FigureData, data: CellTable) -> Table:
    columns = [
        Column(sentence(name), numeric=all(isinstance(row[index], int | float | None) for row in data.rows))
        for index, name in enumerate(data.columns)
    ]
    named = [[algorithm_or_text(first) if isinstance(first, str) else first, *rest] for first, *rest in data.rows]
    return Table(figure.title, columns, [list(map(_cell, row)) for row in named], figure.note)


def _cell(value: CellValue) -> Cell:
    if isinstance(value, float):
        return Cell(number(value, 3 if abs(value) < 100 else 1), value)
    return count_cell(value) if isinstance(value, int | None) else Cell(str(value))


def _similarity(figure: FigureData, data: Similarity) -> list[Block]:
    known = known_similarities(data.rows)
    titles = ("Same patient", "Different patients", "Difference")
    columns = [Column("Patients", numeric=False), *map(Column, titles)]
    cells = []
    for row in data.rows:
        gap = None if row.within is None or row.across is None else row.within - row.across
        cosines = [Cell(number(value, 4), value) for value in (row.within, row.across)]
        cells.append([Cell(row.name), *cosines, Cell(signed(gap, 4), gap)])
    blocks: list[Block] = [Text(similarity_in_words(known), "finding")] if known else []
    if known:
        blocks.append(Figure(f"{figure.title}.", [charts.similarity_dots(known)], figure.note))
    blocks.append(Table("Mean cosine of z", columns, cells, "" if known else figure.note))
    return blocks


def known_similarities(rows: Sequence[SimilarityRow]) -> list[SimilarityRow]:
    """The rows with both cosines; patients with one sample each have none within a patient."""
    return [row for row in rows if row.within is not None and row.across is not None]


def similarity_in_words(rows: Sequence[SimilarityRow]) -> str:
    """Whether z tells patients apart, from the last row (the patients least like those of training)."""
    row = rows[-1]
    within, across = float(row.within or 0), float(row.across or 0)
    facts = f"(mean cosine {number(within, 4)} within a patient, {number(across, 4)} across patients; {row.name})"
    if within - across < _INDISTINCT:
        return f"The patient factor z is nearly the same for every patient {facts}: it hardly tells them apart."
    return f"The patient factor z is more alike within a patient than across patients {facts}."


def _cosines(figure: FigureData, data: CosineTable) -> Table:
    paper = any(row.paper is not None for row in data.rows)
    columns = [*text_columns("Weights of", "and of"), Column("Cosine"), *([Column("Paper")] if paper else [])]
    cells = []
    for row in data.rows:
        sd = f" ± {number(row.sd, 3)}" if row.sd is not None else ""
        names = [Cell(name) for name in probe_names(row.first, row.second)]
        line = [*names, Cell(f"{number(row.cosine)}{sd}", row.cosine)]
        cells.append([*line, Cell(number(row.paper), row.paper)] if paper else line)
    caution = "The paper’s values are for its own data and models; where the data differ they are no yardstick."
    return Table(figure.title, columns, cells, " ".join(filter(None, (figure.note, caution if paper else ""))))


def probe_names(first: str, second: str) -> tuple[str, str]:
    """Two linear models as ``v → labels``; ``first`` may name both, separated by a comma."""
    if not second and ", " in first:
        first, second = first.split(", ", 1)
    return _with_arrow(first), _with_arrow(second)


def _with_arrow(text: str) -> str:
    """``orthogonal domains`` as ``v⊥z → patients``; a name that has an arrow stays."""
    parts = {"orthogonal": "v⊥z", "parallel": "v∥z"}
    start, _, end = text.rpartition(" ")
    known = {"labels": "labels", "domains": "patients"}.get(end)
    return f"{parts.get(start, start)} → {known}" if known and "→" not in text else text
