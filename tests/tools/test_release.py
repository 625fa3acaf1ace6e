"""A release names one version everywhere, and the workflows cover what the package promises."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools import links, release

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]


def test_the_package_and_its_citation_name_one_version() -> None:
    named = release.versions()
    del named["CHANGELOG.md"]  # It has no release before the first tag.
    assert len(set(named.values())) == 1


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- c\n\n## 1.1.0 (2027-01-02)\n\n- b\n\n## 1.0.0\n\n- a\n"
    assert release.notes(changelog, "1.1.0") == "- b\n"
    assert release.notes(changelog, "1.0.0") == "- a\n"
    assert release.notes(changelog, "0.9.0") == ""


def test_links_between_pages_lead_somewhere() -> None:
    assert list(links.broken_links()) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A b!\n[x](#a-b) [y](c.md) [z](a.md#d) [w](https://e) `[v](f.md)`\n", encoding="utf-8"
    )
    assert list(links.broken_links(tmp_path)) == ["a.md: c.md", "a.md: a.md#d"]


def test_tests_run_on_every_system_and_python_that_the_package_promises() -> None:
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]["tests"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    assert tests["strategy"]["matrix"]["python"] == promised
    assert {name.partition("-")[0] for name in tests["strategy"]["matrix"]["os"]} == {"ubuntu", "macos", "windows"}


@pytest.mark.parametrize("pattern", [".github/**/*.yml", ".pre-commit-config.yaml", "CITATION.cff"])
def test_configuration_files_are_valid_yaml(pattern: str) -> None:
    files = list(ROOT.glob(pattern))
    assert files
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)
