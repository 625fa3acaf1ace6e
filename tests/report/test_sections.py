"""Sections are found by name, and one of another package joins by its entry point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from manydg import registry
from manydg.report import write_report
from manydg.report.results_folder import Chapter
from manydg.report.sections import SECTIONS, Part, Section, Text, all_sections


class Sites(Section):
    """What a plug-in would add."""

    order = 450
    experiments = expected = ("sites",)

    def build(self, chapter: Chapter) -> Iterator[Part]:
        yield Part("sites", "Site by site", [Text(f"{len(chapter.runs('sites'))} runs.")])

    def findings(self, chapter: Chapter) -> list[str]:
        return ["one site is hard."]


@pytest.fixture
def with_sites(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that has the section."""
    entry = EntryPoint("sites", f"{__name__}:Sites", SECTIONS.package)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == SECTIONS.package else [])
    all_sections.cache_clear()
    yield
    all_sections.cache_clear()


def test_every_section_has_an_order_of_its_own() -> None:
    orders = [section.order for section in all_sections()]
    assert orders == sorted(set(orders))


def test_no_experiment_belongs_to_two_sections() -> None:
    claimed = [name for section in all_sections() for name in section.experiments]
    assert len(claimed) == len(set(claimed))


def test_a_section_of_another_package_joins_in_its_order(maker: Any, tmp_path: Path, with_sites: None) -> None:
    for experiment in ("compare", "sites"):
        maker.run("few", "classes", "manydg", 0, experiment, skill=1.2)
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    names = re.findall(r'data-section="([^"]+)"', text)
    assert names.count("sites") == 1
    assert names[names.index("learning") + 1] == "sites"
    assert "One site is hard." in text
