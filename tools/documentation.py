"""A hook of mkdocs: the parts of the documentation site that come from the program, not from files in ``docs/``.

A page of ``docs/`` gets a generated part where it has a line such as ``<!-- generated: commands -->``. Pages outside
``docs/``, such as CONTRIBUTING.md, join the site, and links to them are changed to their addresses there. A public name
or a command without documentation stops the build. ``make docs`` builds the site.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import manydg
from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.cli import app
from manydg.config import SEARCHED, Choices, Range, Searched
from tools.links import CODE, LINK

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROJECT_PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "RELEASING.md": "project/releasing.md",
    "CHANGELOG.md": "project/changelog.md",
    "results/README.md": "project/records.md",
}
# Where plug-ins import from, beside manydg itself: the names given, or all public ones.
PLUG_IN_MODULES: dict[str, tuple[str, ...]] = {
    "manydg.algorithms": (),
    "manydg.backbones": (),
    "manydg.sources": (),
    "manydg.targets": (),
    "manydg.data.dataset": ("Batch", "ColumnSchema", "InputSchema"),
    "manydg.data.info": ("DatasetInfo", "TargetSpec"),
    "manydg.data.storage": ("DatasetWriter",),
    "manydg.errors": ("ConfigError", "DataError", "ManyDGError", "ManyDGWarning", "StorageError", "TrainingError"),
}
# What the commands do, for scripts.
SCRIPT_NAMES = (
    "manydg.sources.prepare",
    "manydg.sources.synthesize",
    "manydg.studies.conduct.compare",
    "manydg.studies.tuning.tune",
    "manydg.studies.settings.as_options",
    "manydg.report.write_report",
    "manydg.report.write_card",
    "manydg.report.write_checklist",
    "manydg.predict.predict_raw",
    "manydg.training.export.export_run",
    "manydg.jobs.engine_named",
    "manydg.jobs.using",
    "manydg.synthetic.DemoPatients",
    "manydg.synthetic.make_demo_dataset",
)
ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):(<code>)[~.]?")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/`` to the site."""
    for source, address in PROJECT_PAGES.items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated parts of a page and change links to files outside ``docs/``."""
    for name, generate in GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return with_site_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show a docstring's reference to another name as code."""
    return ROLE.sub(r"\1", html)


def with_site_links(markdown: str, address: str) -> str:
    """A page whose links to files of the repository lead to their pages of the site."""
    origin = next((ROOT / source for source, page in PROJECT_PAGES.items() if page == address), DOCS / address)

    def change(match: re.Match[str]) -> str:
        target = match[1]
        name, _, heading = target.partition("#")
        if not name or re.match(r"[a-z]+:", target):
            return match[0]
        goal = _address((origin.parent / name).resolve(), address)
        relative = os.path.relpath(goal.partition("#")[0], PurePosixPath(address).parent)
        anchor = heading or goal.partition("#")[2]
        changed = PurePosixPath(relative).as_posix() + (f"#{anchor}" if anchor else "")
        return match[0].replace(f"]({target})", f"]({changed})")

    parts = re.split(f"({CODE.pattern})", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(change, part) for part in parts)


def _address(path: Path, page: str) -> str:
    """Where a file of the repository is within the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    name = "results/README.md" if name == "results" else name
    if name in PROJECT_PAGES:
        return PROJECT_PAGES[name]
    if path.parent == ROOT / "examples":
        return f"gallery.md#{path.stem}"
    raise PluginError(f"{page} links to {name}, which is not part of the site: add it to tools/documentation.py")


def commands() -> str:
    """Every command with its arguments and options, as ``--help`` shows them."""
    root = typer.main.get_command(app)
    context = root.make_context("manydg", [], resilient_parsing=True)
    return "\n".join(_command("manydg", root, context))


def _command(path: str, command: Any, context: Any) -> Iterator[str]:
    if not command.help:
        raise PluginError(f"the command '{path}' has no help: write its docstring")
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if path != "manydg":
        level = "#" * min(path.count(" ") + 1, 3)
        yield f"{level} {path} {{ #{path.removeprefix('manydg ').replace(' ', '-')} }}\n"
        yield escaped(inspect.cleandoc(command.help)) + "\n"
    if not names or path == "manydg":
        yield from _parameters(path, command, context)
    for name in names:
        child = command.get_command(context, name)
        yield from _command(f"{path} {name}", child, type(context)(child, parent=context, info_name=name))


def _parameters(path: str, command: Any, context: Any) -> Iterator[str]:
    yield f"```\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    yield "| argument or option | meaning |\n|---|---|"
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False):
            continue
        record = parameter.get_help_record(context)
        if record is None or not record[1].strip() or record[1].lstrip().startswith("["):
            raise PluginError(f"'{path}': the option '{parameter.name}' has no help")
        if parameter.name != "help":
            yield f"| `{record[0]}` | {escaped(record[1])} |"
    yield ""


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(text, quote=False))


def public_names(module: ModuleType) -> list[str]:
    """The public names of a module, or those it defines where it does not list them."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    ]
    return [name for name in defined if not name.startswith("_")]


def undocumented(module: ModuleType, names: Iterable[str]) -> list[str]:
    """Names of a module, and public methods of its classes, that have no docstring."""
    missing = []
    for name in names:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        members = _methods(value) if inspect.isclass(value) else {}
        for path, member in {name: value, **{f"{name}.{key}": member for key, member in members.items()}}.items():
            if not inspect.getdoc(member):
                missing.append(f"{module.__name__}.{path}")
    return missing


def _methods(value: type) -> dict[str, object]:
    kinds = (property, classmethod, staticmethod)
    return {
        name: getattr(value, name)
        for name, member in vars(value).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


def python_names() -> str:
    """Reference of what ``import manydg`` gives."""
    return _reference(manydg, manydg.__all__)


def script_names() -> str:
    """Reference of the functions behind the commands."""
    located = [_located(path) for path in SCRIPT_NAMES]
    return "\n".join(_reference(module, [name]) for module, name in located)


def _located(path: str) -> tuple[ModuleType, str]:
    module, _, name = path.rpartition(".")
    return importlib.import_module(module), name


def plug_in_names() -> str:
    """Reference of the modules that plug-ins import from."""
    elsewhere = {_home(manydg, name) for name in manydg.__all__}
    elsewhere |= {_home(*_located(path)) for path in SCRIPT_NAMES}
    text = []
    for path, listed in PLUG_IN_MODULES.items():
        module = importlib.import_module(path)
        names = [name for name in listed or public_names(module) if _home(module, name) not in elsewhere]
        text.append(f"## {path}\n\n{_summary(module)}\n\n{_reference(module, names)}")
    return "\n".join(text)


def _reference(module: ModuleType, names: Iterable[str]) -> str:
    if missing := undocumented(module, names):
        raise PluginError(f"without a docstring: {', '.join(missing)}")
    entry = "::: {home}\n    options:\n      heading: {shown}\n      toc_label: {shown}\n"
    return "\n".join(
        entry.format(home=_home(module, name), shown=f"{module.__name__}.{name}")
        for name in sorted(names, key=str.lower)
    )


def _home(module: ModuleType, name: str) -> str:
    """Where a name is defined: a module may only pass it on."""
    value = getattr(module, name)
    home = value.__module__ if inspect.isclass(value) or inspect.isfunction(value) else module.__name__
    return f"{home}.{name}"


def _summary(module: ModuleType) -> str:
    return escaped((inspect.getdoc(module) or "").partition("\n\n")[0].replace("``", ""))


def algorithms() -> str:
    """Every algorithm with its settings and the ranges that tuning searches."""
    return "\n".join(_algorithm(name) for name in ALGORITHMS.names())


def _algorithm(name: str) -> str:
    algorithm = ALGORITHMS.get(name)
    text = f"## {name} {{ #{name} }}\n\n{escaped(ALGORITHMS.summary(name))}.\n"
    rows = [
        [f"`{entry.name}`", f"`{entry.default}`", _range(entry.metadata[SEARCHED]), escaped(entry.metadata["help"])]
        for entry in fields(algorithm.Settings)
    ]
    return text + _table(["setting", "default", "tuned within", "meaning"], rows, "It has no settings.")


def _table(head: list[str], rows: list[list[str]], otherwise: str) -> str:
    if not rows:
        return f"\n{otherwise}\n"
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def _range(searched: Searched) -> str:
    if isinstance(searched, Choices):
        return ", ".join(f"`{option}`" for option in searched.options)
    assert isinstance(searched, Range)
    return f"{searched.low:g} to {searched.high:g}"


def backbones() -> str:
    """Every backbone with its options."""
    return "\n".join(_backbone(name) for name in BACKBONES.names())


def _backbone(name: str) -> str:
    text = f"## {name} {{ #{name} }}\n\n{escaped(BACKBONES.summary(name))}.\n"
    options = list(inspect.signature(BACKBONES.get(name)).parameters.values())[1:]
    rows = [[f"`{option.name}`", f"`{option.default}`"] for option in options]
    return text + _table(["option", "default"], rows, "It has no options.")


FIRST_EXAMPLES = ("edf_to_hypnogram", "few_labels", "table_to_report")


def gallery() -> str:
    """Every example: what it shows and its code; what most readers want comes first."""
    paths = sorted((ROOT / "examples").glob("*.py"), key=lambda path: (path.stem not in FIRST_EXAMPLES, path.stem))
    return "\n".join(map(_example, paths))


def _example(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    if not title:
        raise PluginError(f"examples/{path.name} has no docstring: its first line is the title in the gallery")
    code = source.partition('"""')[2].partition('"""')[2].strip()
    shown = re.sub(r"``([^`]*)``", r"`\1`", text.strip())
    if "===" in shown:
        shown = f"```text\n{text.strip()}\n```"
    heading = title.replace("``", "`").rstrip(".")
    return f"## {heading} {{ #{path.stem} }}\n\n`examples/{path.name}`\n\n{shown}\n\n```python\n{code}\n```\n"


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "python": python_names,
    "scripts": script_names,
    "plug-ins": plug_in_names,
    "algorithms": algorithms,
    "backbones": backbones,
    "gallery": gallery,
}
