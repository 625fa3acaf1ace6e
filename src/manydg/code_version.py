"""Which code made a result: a hash of the modules that can change one, read without comments and docstrings.

The hash is of syntax trees, so that editing a formula makes another version of the program and editing what explains it
does not. It is the same on every operating system and every supported version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import manydg

_DECISIVE = ("config.py", "data", "targets.py", "backbones", "algorithms", "evaluation", "training")
# Fields that say nothing of what a program does, or that only some versions of Python have.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores"})


@cache
def code_version() -> str:
    """Version of the package and a hash of the source that decides results, as ``0.1.0+5a1f09c2de``."""
    return f"{manydg.__version__}+{source_digest(_DECISIVE)}"


def source_digest(parts: Sequence[str], root: Path | None = None) -> str:
    """Hash what modules do: their names and their syntax trees without docstrings.

    - ``parts``: Modules and folders of modules, relative to ``root``.
    - ``root``: The folder of a package; this package's own if not given.
    - returns: Ten hexadecimal digits.
    """
    root = root or Path(__file__).parent
    digest = hashlib.blake2b(digest_size=5)
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update("".join(_tokens(ast.parse(file.read_bytes()))).encode())
    return digest.hexdigest()


def _tokens(node: ast.AST) -> Iterator[str]:
    """A syntax tree in one canonical spelling: node types and values in order, empty fields left out."""
    yield f"({type(node).__name__}"
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _IGNORED_FIELDS:
            continue
        yield f" {name}="
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, ast.AST):
                yield f"{item!r},"
            elif not _is_docstring(item):
                yield from _tokens(item)
    yield ")"


def _is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a string alone, which explains and does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
