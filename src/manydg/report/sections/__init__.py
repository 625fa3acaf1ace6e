"""Sections of the report: one file each, found by its name.

A section of another package joins by an entry point of the group ``manydg.report.sections``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import ClassVar

from manydg.registry import Registry
from manydg.report.content import Part
from manydg.report.results_folder import Chapter

__all__ = ["SECTIONS", "Section", "all_sections", "claimed_experiments"]


class Section(ABC):
    """What one file adds to every dataset's chapter.

    Attributes
    ----------
    order : int
        Where its parts come in a chapter; a part may have an order of its own.
    experiments : tuple of str
        The experiments it shows; all others are shown as far as their records and figures go.
    expected : tuple of str
        The experiments that the contents name as not run where they are missing.
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
