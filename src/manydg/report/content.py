"""What a page is made of, before it is HTML: chapters' parts, and the blocks inside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from manydg.report.plot_style import Panel


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Parameters
    ----------
    text : str
    sort : float or str, optional
        What the column is sorted by; the text where absent. None sorts last in either direction.
    note : str
        A second, smaller line.
    rank : {"", "best", "second"}
        Bold for the best, underlined for the second best.
    whole : bool
        Whether the text must stay on one line, as a pseudonym.
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
    """A paragraph; a ``note`` is set smaller, a ``finding`` in bold."""

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

    Parameters
    ----------
    name : str
        The experiment, or another short name without spaces; the page's anchor is made from it.
    title : str
    blocks : sequence of blocks
    command : str
        What to type to make it again; empty where it is not known.
    order : int, optional
        Where it comes in the chapter; None for the order of its section.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    command: str = ""
    order: int | None = None
