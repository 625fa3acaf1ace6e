"""What the model has learnt about patients: maps of its features, orthogonality, similarity and norms."""

from __future__ import annotations

from collections.abc import Sequence

from manydg.report import charts
from manydg.report.content import Block, Cell, Column, Figure, Section, Table, Text
from manydg.report.sections.experiments import drawn
from manydg.report.study import Chapter
from manydg.report.words import algorithm_name, number, signed
from manydg.studies.figure_data import (
    CosineTable,
    Embedding,
    FigureData,
    NormPairs,
    Similarity,
    SimilarityRow,
)

_CLOSE = 0.02


def inside(chapter: Chapter, name: str) -> Section | None:
    """The section of ``embedding``, ``orthogonality``, ``domain-similarity`` or ``norms``; None without data."""
    figures = chapter.figures_of(name)
    if not figures:
        return None
    title, lead = INSIDE[name]
    blocks: list[Block] = [Text(lead)]
    for figure in figures:
        blocks += _blocks(figure)
    return Section(name, title, blocks, chapter.command(name))


INSIDE = {
    "embedding": (
        "A map of what the model sees",
        "Each dot is a sample, placed so that samples the model finds alike lie together. The features v are split "
        "into a part along z, meant to hold what is the patient’s own, and a part at right angles, from which the "
        "label is read. If the split works, patients should separate in the first part and in z, labels in the second.",
    ),
    "orthogonality": (
        "Do patient and label use different dimensions",
        "Linear models are fitted to v and to its two parts, to predict labels or patients; the cosine of their "
        "weights says how far they use the same dimensions (1: the same, 0: unrelated).",
    ),
    "domain-similarity": (
        "Does z tell patients apart",
        "z is meant to hold what is particular to a patient. If it does, two samples of one patient have a more "
        "similar z than samples of two patients.",
    ),
    "norms": (
        "How large the two parts are",
        "Length of the part of v along z against the length of the part across it, a dot per sample.",
    ),
}
"""In the order of the page."""


def _blocks(figure: FigureData) -> list[Block]:
    match figure.data:
        case Embedding() as data:
            return [_embedding(figure, data)]
        case NormPairs() as data:
            return [_norms(figure, data)]
        case Similarity() as data:
            return _similarity(figure, data)
        case CosineTable() as data:
            return [_orthogonality(figure, data)]
        case _:
            return drawn([figure])


def _embedding(figure: FigureData, data: Embedding) -> Figure:
    method = data.method
    who = "Of the patients, the eight with most samples have a mark of their own; the others are grey."
    caption = f"{figure.title}. {who}" + (f" Drawn by {method}." if method else "")
    return Figure(caption, charts.embedding_maps(data), figure.note)


def _norms(figure: FigureData, data: NormPairs) -> Figure:
    caption = f"{figure.title} ({algorithm_name(figure.algorithm)}). On the dotted line both parts are equally long."
    return Figure(caption, charts.norms_scatter(data), figure.note)


def _similarity(figure: FigureData, data: Similarity) -> list[Block]:
    known = similarity_known(data.rows)
    columns = [
        Column("Patients", numeric=False),
        Column("Same patient"),
        Column("Different patients"),
        Column("Difference"),
    ]
    cells = [[Cell(row.name), *_pair(row)] for row in data.rows]
    blocks: list[Block] = [Text(verdict_on_z(known), "finding")] if known else []
    if known:
        blocks.append(Figure(f"{figure.title}.", [charts.similarity_dots(known)], figure.note))
    blocks.append(Table("Mean cosine of z", columns, cells, "" if known else figure.note))
    return blocks


def similarity_known(rows: Sequence[SimilarityRow]) -> list[SimilarityRow]:
    """The rows with both figures; patients with one sample each have nothing within a patient."""
    return [row for row in rows if row.within is not None and row.across is not None]


def _pair(row: SimilarityRow) -> list[Cell]:
    within, across = row.within, row.across
    gap = None if within is None or across is None else within - across
    return [Cell(number(within, 4), within), Cell(number(across, 4), across), Cell(signed(gap, 4), gap)]


def verdict_on_z(rows: Sequence[SimilarityRow]) -> str:
    """Whether z tells patients apart, from the last row (the patients least like those of training)."""
    row = rows[-1]
    within, across = float(row.within or 0), float(row.across or 0)
    facts = f"(mean cosine {number(within, 4)} within a patient, {number(across, 4)} across patients; {row.name})"
    if within - across < _CLOSE:
        return f"The patient factor z is nearly the same for every patient {facts}: it hardly tells them apart."
    return f"The patient factor z is more alike within a patient than across patients {facts}."


def weights_named(first: str, second: str) -> tuple[str, str]:
    """The two linear models of a row, as ``v → labels``; ``first`` may name both, with a comma between them."""
    if not second and ", " in first:
        first, second = first.split(", ", 1)
    return _arrow(first), _arrow(second)


def _arrow(text: str) -> str:
    """``orthogonal domains`` as ``v⊥z → patients``; what has an arrow already stays."""
    parts = {"orthogonal": "v⊥z", "parallel": "v∥z"}
    start, _, end = text.rpartition(" ")
    known = {"labels": "labels", "domains": "patients"}.get(end)
    return f"{parts.get(start, start)} → {known}" if known and "→" not in text else text


def _orthogonality(figure: FigureData, data: CosineTable) -> Table:
    paper = any(row.paper is not None for row in data.rows)
    columns = [Column("Weights of", numeric=False), Column("and of", numeric=False), Column("Cosine")]
    columns += [Column("Paper")] if paper else []
    cells = []
    for row in data.rows:
        spread = f" ± {number(row.sd, 3)}" if row.sd is not None else ""
        named = [Cell(name) for name in weights_named(row.first, row.second)]
        line = [*named, Cell(f"{number(row.cosine)}{spread}", row.cosine)]
        cells.append([*line, Cell(number(row.paper), row.paper)] if paper else line)
    note = (
        "The paper’s values are for its own data and models; where the data differ they are no yardstick."
        if paper
        else ""
    )
    return Table(figure.title, columns, cells, " ".join(filter(None, (figure.note, note))))
