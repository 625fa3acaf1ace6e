"""A summary for the terminal: what matters always, the rest as far as the width goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from manydg.experiments._summary_tables import (
    METRIC_NAMES,
    NONE,
    interval_text,
    mean_text,
    number,
    p_text,
    seeds_text,
)

if TYPE_CHECKING:
    from manydg.experiments._summary_model import Entry, Summary


@dataclass(frozen=True)
class _Column:
    header: str
    cells: list[Text]
    justify: str = "right"

    @property
    def width(self) -> int:
        lines = [*self.header.splitlines(), *(line for cell in self.cells for line in cell.plain.splitlines())]
        return max(map(len, lines), default=0) + 2


def to_rich(summary: Summary, width: int | None = None) -> Table:
    """The results for a terminal; tests of the primary metric only, the rest is in the files.

    Parameters
    ----------
    summary : Summary
    width : int, optional
        Characters to fill; the terminal's by default. Columns of lesser weight are left out where it is too small.
    """
    room = width or shutil.get_terminal_size((100, 24)).columns
    columns = list(_needed(summary))
    for extra in _extras(summary):
        if sum(column.width for column in [*columns, extra]) + 2 <= room:
            columns.append(extra)
    table = Table(title=_title(summary), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        # Names of rows are never cut: where it is too narrow, numbers go over two lines.
        justify: Literal["left", "right"] = "left" if column.justify == "left" else "right"
        table.add_column(column.header, justify=justify, no_wrap=place == 0)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    table.caption = "\n".join(summary.notes) or None
    return table


def _title(summary: Summary) -> str:
    seeds = len(summary.seeds)
    over = f"mean ± sd over {seeds} seeds" if seeds > 1 else "one seed"
    return f"{summary.experiment} on {summary.dataset}: unseen patients, {over} [95% over patients]"


def _needed(summary: Summary) -> Iterator[_Column]:
    yield _Column("", [Text(row) for row in summary.rows], "left")
    for metric in summary.metrics:
        cells = [_metric_cell(summary.entries[row, metric]) for row in summary.rows]
        yield _Column(METRIC_NAMES.get(metric, metric), cells, "left")
    if any(len(summary.entries[row, summary.primary].values) < len(summary.seeds) for row in summary.rows):
        yield _Column("seeds", [Text(seeds_text(summary, row)) for row in summary.rows])
    if summary.reference and len(summary.rows) > 1:
        primary = METRIC_NAMES.get(summary.primary, summary.primary)
        header = f"p vs {summary.reference}\n{primary}, Holm\nt, corrected"
        yield _Column(header, [_test_cell(summary.entries[row, summary.primary]) for row in summary.rows])


def _extras(summary: Summary) -> Iterator[_Column]:
    entries = [summary.entries[row, summary.primary] for row in summary.rows]
    yield _Column("10th pct.\npatient", [Text(number(entry.worst_tenth, 3)) for entry in entries])
    if summary.reference and len(summary.rows) > 1:
        sizes = [number(entry.comparison.hedges_g, 2) if entry.comparison else NONE for entry in entries]
        yield _Column("Hedges\ng", [Text(size) for size in sizes])
    yield _Column("s/run", [Text(number(summary.seconds.get(row), 1)) for row in summary.rows])


def _metric_cell(entry: Entry) -> Text:
    cell = Text(mean_text(entry, 3), style={1: "bold", 2: "underline"}.get(entry.rank, ""))
    bounds = interval_text(entry.interval)
    return cell if bounds == NONE else Text("\n").join([cell, Text(bounds, style="dim")])


def _test_cell(entry: Entry) -> Text:
    adjusted = entry.adjusted or {}
    if entry.comparison is None:
        return Text(NONE)
    return Text(f"{p_text(adjusted.get('t'))}\n{p_text(adjusted.get('corrected'))}")
