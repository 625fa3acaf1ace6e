"""``pip install manydg`` brings what running needs: all that is imported at the top of a module is a dependency."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"mlflow-skinny": "mlflow", "scikit-learn": "sklearn"}


def _names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}
    return {NAMES.get(name, name) for name in found}


def _imports(tree: ast.AST, top_level: bool) -> set[str]:
    statements = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    modules = [
        name
        for node in statements
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    # The type checkers' own stubs are nothing to install.
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"manydg", "_typeshed", ""}


def test_what_modules_import_at_their_top_is_installed_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed, optional = _names(project["dependencies"]), project["optional-dependencies"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    at_top = set().union(*(_imports(tree, top_level=True) for tree in trees))
    anywhere = set().union(*(_imports(tree, top_level=False) for tree in trees))
    extras = set().union(*(_names(optional[name]) for name in optional if name != "dev"))
    assert at_top <= needed
    assert anywhere - {"_typeshed"} <= needed | extras  # the type checker's own
    assert needed <= anywhere
