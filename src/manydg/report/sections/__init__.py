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
from manydg.report.plot_style import Panel
from manydg.report.results_folder import Chapter


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
