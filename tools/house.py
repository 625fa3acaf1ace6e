"""Measure the source tree and hold it to the limits in ``[tool.house]`` of pyproject.toml.

``python -m tools.house`` prints every figure beside its limit and the ten modules with the most violations, and fails
when a figure is past its limit. The limits only tighten: ``--tighten`` writes today's figures over looser ones.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONG_FUNCTION = 40
UNTYPED_DICT = re.compile(r"\b(dict|(Mutable)?Mapping)\[str, Any\]")


@dataclass
class Module:
    """One source file and what counts against it."""

    name: str
    lines: int
    private: bool
    imports: set[str] = field(default_factory=set)
    importers: set[str] = field(default_factory=set)
    untyped_dicts: int = 0
    late_imports: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    closet: bool = False

    def faults(self) -> dict[str, int]:
        """Number of violations of each kind, where there are any."""
        counts = {
            "single importer": int(self.closet),
            "untyped dicts": self.untyped_dicts,
            "late imports": len(self.late_imports),
            "long functions": len(self.long_functions),
        }
        return {name: count for name, count in counts.items() if count}


def measure(source: Path, settings: Mapping[str, Any]) -> list[Module]:
    """Every module under a package's folder, with its importers and its violations."""
    files = {_module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    modules = {name: _read(name, path, set(files), settings) for name, path in files.items()}
    for module in modules.values():
        for imported in module.imports - {module.name}:
            modules[imported].importers.add(module.name)
    exempt = list(settings["plugins"]) + list(settings["entries"]) + list(settings["heavy"])
    for name, module in modules.items():
        package = files[name].name == "__init__.py"
        module.closet = len(module.importers) <= 1 and not package and not _matches(name, exempt)
    return list(modules.values())


def figures(modules: list[Module]) -> dict[str, int]:
    """The figures that have a limit, under the limits' names."""
    return {
        "modules": len(modules),
        "private-modules": sum(module.private for module in modules),
        "single-importer-modules": sum(module.closet for module in modules),
        "untyped-dicts": sum(module.untyped_dicts for module in modules),
        "late-imports": sum(len(module.late_imports) for module in modules),
        "long-functions": sum(len(module.long_functions) for module in modules),
    }


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _matches(name: str, patterns: list[str]) -> bool:
    """Whether a dotted name fits a pattern; a star stands for one public part of the name."""
    return any(_fits(name.split("."), pattern.split(".")) for pattern in patterns)


def _fits(parts: list[str], pattern: list[str]) -> bool:
    if len(parts) != len(pattern):
        return False
    return all(
        fnmatchcase(part, wanted) and ("*" not in wanted or wanted.startswith("_") or not part.startswith("_"))
        for part, wanted in zip(parts, pattern, strict=True)
    )


def _read(name: str, path: Path, known: set[str], settings: Mapping[str, Any]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    last = name.rpartition(".")[2]
    module = Module(name, text.count("\n"), last.startswith("_") and not last.startswith("__"))
    module.untyped_dicts = len(UNTYPED_DICT.findall(text))
    allowed = settings["late-imports-allowed"]
    for node, in_function in _nodes(tree):
        for imported in _imported(node, known):
            module.imports.add(imported)
            if in_function and not any(_allowed(name, imported, pair) for pair in allowed):
                module.late_imports.append(f"{imported} (line {node.lineno})")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > LONG_FUNCTION:
            module.long_functions.append(f"{node.name} ({_length(node)} lines)")
    return module


def _nodes(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[Any, bool]]:
    for node in ast.iter_child_nodes(tree):
        yield node, in_function
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _nodes(node, inside)


def _imported(node: ast.AST, known: set[str]) -> set[str]:
    """The package's own modules that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known
    if isinstance(node, ast.ImportFrom) and node.module:
        submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
        # "from package import module" needs the module; with any other name it needs the package itself.
        whole = len(submodules) == len(node.names)
        return submodules if whole else submodules | ({node.module} & known)
    return set()


def _allowed(importer: str, imported: str, rule: Mapping[str, str]) -> bool:
    return fnmatchcase(importer, rule["in"]) and fnmatchcase(imported, rule.get("of", "*"))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def report(modules: list[Module], limits: Mapping[str, int], details: bool) -> list[str]:
    """Print the figures and the worst modules; return what is past its limit."""
    past = []
    median = statistics.median(module.lines for module in modules)
    total = sum(module.lines for module in modules)
    print(f"{total:,} lines, median module {median:.0f} (at least {limits['median-lines']})")
    if median < limits["median-lines"]:
        past.append(f"median lines: {median:.0f}, at least {limits['median-lines']}")
    for name, value in figures(modules).items():
        print(f"{name.replace('-', ' '):24}{value:5}   limit {limits[name]}")
        if value > limits[name]:
            past.append(f"{name.replace('-', ' ')}: {value}, at most {limits[name]}")
    ranked = sorted(modules, key=lambda module: (-sum(module.faults().values()), module.lines))
    for module in [module for module in ranked if module.faults()][: None if details else 10]:
        faults = ", ".join(f"{count} {name}" for name, count in module.faults().items())
        print(f"  {module.name} ({module.lines} lines): {faults}")
        if details:
            importers = sorted(module.importers) if module.closet else []
            for line in [*importers, *module.late_imports, *module.long_functions]:
                print(f"      {line}")
    return past


def tighten(file: Path, modules: list[Module]) -> None:
    """Lower the limits in pyproject.toml to today's figures; none is raised."""
    text = file.read_text(encoding="utf-8")
    head, section, rest = text.partition("[tool.house.limits]\n")
    body, gap, after = rest.partition("\n\n")
    for name, value in figures(modules).items():
        limit = re.search(rf"^{name} = (\d+)$", body, flags=re.MULTILINE)
        if limit and value < int(limit[1]):
            body = body.replace(limit[0], f"{name} = {value}")
    file.write_text(head + section + body + gap + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tighten", action="store_true", help="lower the limits to today's figures")
    parser.add_argument("--details", action="store_true", help="every module with a violation, and where")
    options = parser.parse_args()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    modules = measure(ROOT / "src" / "manydg", settings)
    past = report(modules, settings["limits"], options.details)
    if options.tighten:
        tighten(ROOT / "pyproject.toml", modules)
    if past:
        sys.exit("past a limit of [tool.house.limits]: " + "; ".join(past))


if __name__ == "__main__":
    main()
