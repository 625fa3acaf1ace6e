"""The paper's results beside ours, never called comparable where the data differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from manydg.report.results_folder import Chapter, by_algorithm, seconds_per_epoch
from manydg.report.sections import Block, Cell, Column, Part, Section, Table, Text, probe_names
from manydg.report.words import MINUS, algorithm_name, metric_name, number, sentence
from manydg.studies.figure_data import CosineTable, Similarity
from manydg.studies.paper_figures import beside, data_difference, paper_table, paper_tasks, task_on
from manydg.studies.summary import summarize

Line = tuple[str, str, str, str, str]
"""What, quantity, ours, the paper's, the paper's table."""


class PaperTables(Section):
    """Every value that the paper has for its task on this data; nothing for other data or synthetic patients."""

    order = 300

    def build(self, chapter: Chapter) -> Iterator[Part]:
        source = None if chapter.about is None else chapter.about.source
        task = task_on(source)
        if task is None or chapter.synthetic:
            return
        lines = [*_results(chapter, task, source), *_similarity(chapter, task)]
        lines += [*_orthogonality(chapter, task), *_times(chapter, task)]
        if lines:
            blocks = [*_introduction(chapter, task, source), _table(lines)]
            yield Part("paper", "The paper’s figures beside ours", blocks)


def _introduction(chapter: Chapter, task: str, source: str | None) -> list[Block]:
    about = chapter.about
    patients, samples = (about.patients or None, about.samples or None) if about else (None, None)
    verdict = data_difference(task, source=source, patients=patients, samples=samples)
    blocks: list[Block] = [Text(f"The paper’s task on this data is {paper_tasks()[task].name.lower()}. {verdict.text}")]
    if not verdict.comparable:
        caution = "The figures stand side by side for orientation only; a higher or lower value says nothing."
        blocks.append(Text(caution, "note"))
    return blocks


def _table(lines: Sequence[Line]) -> Table:
    titles = {"Model": False, "Quantity": False, "Ours": True, "The paper’s": True, "Where": False}
    columns = [Column(title, numeric=numeric) for title, numeric in titles.items()]
    cells = [[_cell(text, column) for text, column in zip(line, columns, strict=True)] for line in lines]
    return Table("Ours and the paper’s", columns, cells)


def _cell(text: str, column: Column) -> Cell:
    """A cell that sorts by its mean, the figure before any ±; a dash or a slash sorts last."""
    mean = text.split(" ")[0].replace(MINUS, "-")
    known = re.fullmatch(r"-?\d+(\.\d+)?", mean)
    return Cell(text, float(mean) if known else None) if column.numeric else Cell(text)


def _results(chapter: Chapter, task: str, source: str | None) -> Iterator[Line]:
    runs = chapter.runs("decomposition")
    summaries = [chapter.comparison.summary] if chapter.comparison else []
    summaries += [summarize(runs)] if runs else []
    seen = set()
    for summary in summaries:
        both = beside(summary, task=task, source=source)
        for row, metric, ours, theirs, table in both.rows if both else ():
            if (row, metric) not in seen:
                seen.add((row, metric))
                yield algorithm_name(row), sentence(metric_name(metric)), ours, theirs, table


def _similarity(chapter: Chapter, task: str) -> Iterator[Line]:
    table = paper_table("domain-similarity")
    for figure in chapter.figures_of("domain-similarity"):
        if not isinstance(figure.data, Similarity):
            continue
        model, row = algorithm_name(figure.algorithm or "manydg"), figure.data.rows[-1]
        cosines = {"within": (row.within, "within a patient"), "across": (row.across, "across patients")}
        for key, (value, where) in cosines.items():
            for cell in table.find(task=task, row=key):
                yield model, f"Cosine of z {where}", number(value, 4), table.text(cell), table.name


def _orthogonality(chapter: Chapter, task: str) -> Iterator[Line]:
    table = paper_table("orthogonality")
    theirs = {" and ".join(probe_names(cell.row, "")): cell for cell in table.find(task=task)}
    for figure in chapter.figures_of("orthogonality"):
        model = algorithm_name(figure.algorithm or "manydg")
        for row in figure.data.rows if isinstance(figure.data, CosineTable) else ():
            pair = " and ".join(probe_names(row.first, row.second))
            if (cell := theirs.get(pair)) is not None and row.paper is None:
                yield model, f"Cosine of weights, {pair}", number(row.cosine, 4), table.text(cell), table.name


def _times(chapter: Chapter, task: str) -> Iterator[Line]:
    table = paper_table("runtime")
    for name, records in by_algorithm(chapter.runs("runtime")).items():
        ours = [value for value in map(seconds_per_epoch, records) if value is not None]
        for cell in table.find(task=task, row=name) if ours else ():
            mean = number(sum(ours) / len(ours), 2)
            yield algorithm_name(name), "Seconds per epoch", mean, table.text(cell), table.name
