"""The paper's own figures, every cell of its tables, and how they stand beside ours.

The figures are in ``paper_figures.json``. Table 4 of the paper explains symbols and holds none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from manydg.errors import unknown_name
from manydg.files import ParsedJson
from manydg.studies.summary_text import METRIC_NAMES, mean_text
from manydg.training.record import Counts

if TYPE_CHECKING:
    from manydg.studies.summary import Summary

RESULT_TABLES = ("biosignals", "records", "biosignals-decomposition", "records-decomposition")
_CLOSE = 0.01
"""Counts that differ by less than this share may be of the same data."""


@dataclass(frozen=True)
class PaperCell:
    """One cell: ``value`` is None where the paper prints a slash (not run), ``sd`` where it prints no deviation."""

    task: str
    row: str
    metric: str
    value: float | None
    sd: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """One table.

    - ``number``: As numbered in the paper; None for figures that stand in its text.
    - ``label``: The label in the paper's source.
    - ``format``: Format of a value, as printed.
    """

    number: int | None
    slug: str
    label: str
    title: str
    format: str
    cells: tuple[PaperCell, ...]
    note: str = ""

    @property
    def name(self) -> str:
        """What to call the table.

        Examples
        --------
        >>> paper_table("runtime").name
        'Table 6'
        """
        return f"Table {self.number}" if self.number else self.title

    def find(
        self, *, task: str | None = None, row: str | None = None, metric: str | None = None
    ) -> tuple[PaperCell, ...]:
        """Cells of a task, a row (an algorithm's name here) and a metric; what is not given may be anything."""
        wanted = {"task": task, "row": row, "metric": metric}
        return tuple(cell for cell in self.cells if all(v is None or getattr(cell, k) == v for k, v in wanted.items()))

    def text(self, cell: PaperCell) -> str:
        """A cell as the paper prints it."""
        if cell.value is None:
            return "/"
        return format(cell.value, self.format) + ("" if cell.sd is None else f" ± {format(cell.sd, self.format)}")


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's four tasks, and the data it ran on.

    - ``source``: The source here that reads the same data.
    - ``patients``, ``samples``: As the paper counts them; with ``counts`` "at least", it says "more than".
    """

    slug: str
    name: str
    data: str
    kind: str
    source: str
    patients: int
    samples: int | None = None
    counts: str = "exactly"


@cache
def _content() -> ParsedJson:
    text = resources.files("manydg.studies").joinpath("paper_figures.json").read_text(encoding="utf-8")
    content: ParsedJson = json.loads(text)
    return content


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Every table of the paper that holds figures, in its order."""
    return tuple(
        PaperTable(**{**table, "cells": tuple(PaperCell(**cell) for cell in table["cells"])})
        for table in _content()["tables"]
    )


@cache
def paper_tasks() -> dict[str, PaperTask]:
    """The paper's tasks by name: ``seizure``, ``sleep``, ``drugs``, ``readmission``."""
    return {slug: PaperTask(slug, **task) for slug, task in _content()["tasks"].items()}


def paper_table(slug: str) -> PaperTable:
    """A table by its short name, such as ``orthogonality``."""
    tables = {table.slug: table for table in paper_tables()}
    if slug not in tables:
        raise unknown_name("table of the paper", slug, tables)
    return tables[slug]


def task_on(source: str | None) -> str | None:
    """The paper's task on the data that a source reads; None for data the paper did not use.

    Examples
    --------
    >>> task_on("sleep-edf"), task_on("table")
    ('sleep', None)
    """
    return next((task.slug for task in paper_tasks().values() if source == task.source), None)


@dataclass(frozen=True)
class Difference:
    """Whether our figures may be held against the paper's, and why not."""

    comparable: bool
    text: str


def data_difference(task: str, *, source: str | None, patients: int | None, samples: int | None) -> Difference:
    """Compare our data with the paper's.

    They count as the same only if they come from the same source and have the paper's numbers of patients and samples;
    whatever is not known counts as different.

    - ``source``: What the dataset was prepared from (``provenance`` of the dataset).
    """
    theirs = paper_tasks()[task]
    reasons = []
    if source != theirs.source:
        reasons.append(f"the paper used {theirs.data}, ours was prepared from {source or 'an unknown source'}")
    for what, ours, paper in (("patients", patients, theirs.patients), ("samples", samples, theirs.samples)):
        if paper is not None and not _alike(ours, paper, theirs.counts):
            count = f"{paper:,}" if theirs.counts == "exactly" else f"more than {paper:,}"
            reasons.append(f"the paper had {count} {what}, ours {'an unknown number' if ours is None else f'{ours:,}'}")
    if reasons:
        return Difference(False, f"Not comparable: {'; '.join(reasons)}.")
    return Difference(
        True, f"The same data ({theirs.data}), other splits and other code: close figures are expected, not equal ones."
    )


def _alike(ours: int | None, paper: int, counts: str) -> bool:
    if ours is None:
        return False
    return ours >= paper * (1 - _CLOSE) if counts == "at least" else abs(ours - paper) <= _CLOSE * paper


@dataclass(frozen=True)
class Beside:
    """Our table and the paper's, cell by cell.

    - ``rows``: Algorithm, metric, our text, the paper's text, and the name of the paper's table.
    """

    task: str
    difference: Difference
    rows: tuple[tuple[str, str, str, str, str], ...] = field(default=())

    def to_markdown(self) -> str:
        """The two side by side, the verdict on the data first."""
        name = paper_tasks()[self.task].name.lower()
        lines = [f"The paper's task on this data is {name}. {self.difference.text}", ""]
        lines += ["| Metric |  | Ours | The paper |  |", "| --- | --- | --- | --- | --- |"]
        for row, metric, ours, theirs, table in self.rows:
            lines.append(f"| {METRIC_NAMES.get(metric, metric)} | {row} | {ours} | {theirs} | {table} |")
        return "\n".join(lines) + "\n"


def beside(summary: Summary, *, task: str | None = None, source: str | None = None) -> Beside | None:
    """Put the paper's figures beside a summary.

    None where the paper did not use the data or has no figure for any row, and for synthetic data, which are not to be
    compared with real patients.

    - ``task``: The paper's task; by default that on the data of the source.
    - ``source``: What the dataset was prepared from.
    """
    chosen = task or task_on(source)
    if chosen is None or summary.synthetic:
        return None
    if chosen not in paper_tasks():
        raise unknown_name("task of the paper", chosen, paper_tasks())
    rows = []
    for metric in summary.metrics:
        for row in summary.rows:
            entry = summary.entries[row, metric]
            for table, cell in _printed(chosen, row, metric):
                rows.append((row, metric, mean_text(entry), table.text(cell), table.name))
    if not rows:
        return None
    totals = (_total(summary.patients), _total(summary.samples))
    return Beside(chosen, data_difference(chosen, source=source, patients=totals[0], samples=totals[1]), tuple(rows))


def _printed(task: str, row: str, metric: str) -> list[tuple[PaperTable, PaperCell]]:
    """The first result table's cell of an algorithm; ManyDG is printed in two tables, alike."""
    cells = [
        (table, cell)
        for table in map(paper_table, RESULT_TABLES)
        for cell in table.find(task=task, row=row, metric=metric)
        if cell.value is not None and not math.isnan(cell.value)
    ]
    return cells[:1]


def _total(sides: Counts) -> int | None:
    return sides.total if sides.train and sides.val and sides.test else None
