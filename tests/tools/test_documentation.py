"""The documentation site: what is public is in it, documented, and every link and command in it is right."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError

import manydg
from manydg.algorithms import ALGORITHMS
from manydg.cli import app
from manydg.sources import SOURCES
from manydg.studies.catalogue import EXPERIMENTS
from tools import documentation

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]


def test_every_public_name_is_in_the_reference() -> None:
    page = documentation.python_names()
    assert re.findall(r"heading: manydg\.(\w+)$", page, flags=re.M) == sorted(manydg.__all__, key=str.lower)


def test_a_public_name_without_docstring_stops_the_build() -> None:
    class Documented:
        """A class."""

        def method(self) -> None: ...

    module = ModuleType("mine")
    module.Documented = Documented  # type: ignore[attr-defined]
    assert documentation.undocumented(module, ["Documented"]) == ["mine.Documented.method"]
    with pytest.raises(PluginError, match=r"without a docstring: mine\.Documented\.method"):
        documentation._reference(module, ["Documented"])


def test_an_option_without_help_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    other = typer.Typer(rich_markup_mode=None, help="Help.")

    @other.command()
    def first(level: Annotated[int, typer.Option()] = 1) -> None:
        """Do it."""

    @other.command()
    def second() -> None:
        """Do it again."""

    monkeypatch.setattr(documentation, "app", other)
    with pytest.raises(PluginError, match="'manydg first': the option 'level' has no help"):
        documentation.commands()


def test_every_command_and_every_algorithm_is_in_the_reference() -> None:
    page, algorithms = documentation.commands(), documentation.algorithms()
    assert "| `--version` |" in page.partition("## manydg")[0]
    headings = re.findall(r"^#+ manydg (.+) \{", page, flags=re.M)
    assert {"train", "compare", "predict", "report"} <= set(headings)
    assert {f"prepare {name}" for name in SOURCES.names()} <= set(headings)
    assert re.findall(r"^## (\S+) ", algorithms, flags=re.M) == ALGORITHMS.names()


def test_every_experiment_is_on_its_page() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert set(EXPERIMENTS.names()) <= set(re.findall(r"^\| `([a-z-]+)` \|", page, flags=re.M))


def test_what_plug_ins_and_examples_import_is_documented_or_private() -> None:
    page = documentation.plug_in_names() + documentation.python_names() + documentation.script_names()
    documented = set(re.findall(r"^::: (\S+)|heading: (\S+)$", page, flags=re.M))
    names = {name for pair in documented for name in pair if name}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sources = re.findall(r"```python\n(.*?)```", contributing, flags=re.DOTALL)
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    for module, name in (pair for source in sources for pair in _imports(source)):
        assert "._" in module or f"{module}.{name}" in names, f"from {module} import {name}"


def _imports(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manydg"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def _command_lines(page: Path) -> Iterator[list[str]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    if page.suffix == ".md":
        text = "".join(re.findall(r"^```.*?^```", text, flags=re.M | re.DOTALL))
    for line in re.findall(r"^ {0,4}manydg ([a-z].*)$", text, flags=re.M):
        yield shlex.split(line.partition("   #")[0], comments=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_line_of_a_page_has_options_that_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for words in _command_lines(page):
        command: Any = root
        context = root.make_context("manydg", [], resilient_parsing=True)
        while hasattr(command, "get_command"):
            name, *words = words
            command = command.get_command(context, name)
            assert command is not None, name
            context = type(context)(command, parent=context, info_name=name)
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} <= known, words


def test_the_readme_is_short_and_has_one_small_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 120
    (picture,) = re.findall(r"!\[.+\]\((.+)\)", text)
    assert (ROOT / picture).stat().st_size < 200_000


def test_links_to_files_outside_docs_lead_to_pages_of_the_site() -> None:
    page = "[a](../../CONTRIBUTING.md) [b](../../examples/tuning.py) [c](../results.md#x) `[d](../../no.md)` [e](https://a.b)"
    assert documentation.with_site_links(page, "howto/tune.md") == (
        "[a](../project/contributing.md) [b](../gallery.md#tuning) [c](../results.md#x) `[d](../../no.md)` [e](https://a.b)"
    )
    with pytest.raises(PluginError, match=r"start\.md links to pyproject\.toml"):
        documentation.with_site_links("[f](../pyproject.toml)", "start.md")


@pytest.mark.slow
def test_the_site_is_built_and_a_broken_link_stops_it(tmp_path: Path) -> None:
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    commands = (tmp_path / "site/reference/commands/index.html").read_text(encoding="utf-8")
    assert 'id="prepare-sleep-edf"' in commands
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (docs / "start.md").write_text("# Start\n\n[there](reference/commands.md#no-such-command)\n", encoding="utf-8")
    broken = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "other"), docs_dir=str(docs))
    with pytest.raises(Exception, match="warning"):
        build(broken)
