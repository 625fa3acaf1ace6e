"""The figures that experiments leave, as blocks of the page: curves, bars, tables, maps, norms and cosines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manydg.report import charts
from manydg.report.charts import Series, floats
from manydg.report.plot_style import Panel
from manydg.report.run_statistics import FIRST
from manydg.report.sections import Block, Cell, Column, Figure, Table, Text
from manydg.report.words import LOSSES, METRICS, algorithm_name, algorithm_or_text, number, sentence, signed
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
            return [_embedding(figure, data)]
        case NormPairs() as data:
            return [_norms(figure, data)]
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
    for line in sorted(curve.series, key=lambda line: _rank(line.name)):
        low, high = (None if bound is None else floats(bound) for bound in (line.low, line.high))
        series.append(Series(algorithm_name(line.name), x, floats(line.mean), low, high))
    shown = METRICS.get(label) or LOSSES.get(label, label)
    if label in METRICS:
        title = f"{sentence(shown)}: {title[:1].lower()}{title[1:]}"
    return charts.line_panels(title, series, curve.x.label, shown, curve.x.scale, curve.y.scale)


def _rank(name: str) -> int:
    """ManyDG, Base and the controls come first, so that they have the same style in all charts."""
    return FIRST.index(name) if name in FIRST else len(FIRST)


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
    return Table(figure.title, columns, [_cells(row) for row in data.rows], figure.note)


def _cells(row: Sequence[CellValue]) -> list[Cell]:
    first, *rest = row
    named = Cell(algorithm_or_text(first)) if isinstance(first, str) else _cell(first)
    return [named, *map(_cell, rest)]


def _cell(value: CellValue) -> Cell:
    if value is None:
        return Cell("\N{EN DASH}", None)
    if isinstance(value, float):
        return Cell(number(value, 3 if abs(value) < 100 else 1), value)
    return Cell(f"{value:,}", float(value)) if isinstance(value, int) else Cell(str(value))


def _embedding(figure: FigureData, data: Embedding) -> Figure:
    who = "Of the patients, the eight with most samples have a mark of their own; the others are grey."
    caption = f"{figure.title}. {who}" + (f" Drawn by {data.method}." if data.method else "")
    return Figure(caption, charts.embedding_maps(data), figure.note)


def _norms(figure: FigureData, data: NormPairs) -> Figure:
    model = algorithm_name(figure.algorithm or "manydg")
    caption = f"{figure.title} ({model}). On the dotted line both parts are equally long."
    return Figure(caption, charts.norms_scatter(data), figure.note)


def _similarity(figure: FigureData, data: Similarity) -> list[Block]:
    known = known_similarities(data.rows)
    titles = ("Same patient", "Different patients", "Difference")
    columns = [Column("Patients", numeric=False), *map(Column, titles)]
    cells = [[Cell(row.name), *_similarity_cells(row)] for row in data.rows]
    blocks: list[Block] = [Text(similarity_in_words(known), "finding")] if known else []
    if known:
        blocks.append(Figure(f"{figure.title}.", [charts.similarity_dots(known)], figure.note))
    blocks.append(Table("Mean cosine of z", columns, cells, "" if known else figure.note))
    return blocks


def known_similarities(rows: Sequence[SimilarityRow]) -> list[SimilarityRow]:
    """The rows with both cosines; patients with one sample each have none within a patient."""
    return [row for row in rows if row.within is not None and row.across is not None]


def _similarity_cells(row: SimilarityRow) -> list[Cell]:
    within, across = row.within, row.across
    gap = None if within is None or across is None else within - across
    return [Cell(number(within, 4), within), Cell(number(across, 4), across), Cell(signed(gap, 4), gap)]


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
    columns = [Column("Weights of", numeric=False), Column("and of", numeric=False), Column("Cosine")]
    columns += [Column("Paper")] if paper else []
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
