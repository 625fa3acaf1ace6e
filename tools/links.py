"""Check that links between the Markdown pages lead to files and headings that exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)


def broken_links(root: Path = ROOT) -> Iterator[str]:
    """Each link that leads nowhere, as ``page: link``."""
    for page in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]):
        for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:", target) and not _leads(page, target):
                yield f"{page.relative_to(root).as_posix()}: {target}"


def _leads(page: Path, target: str) -> bool:
    name, _, heading = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists() or not heading or path.suffix != ".md":
        return path.exists()
    # "make docs" checks links into pages whose headings are generated.
    return heading in _headings(path) or "<!-- generated: " in path.read_text(encoding="utf-8")


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


if __name__ == "__main__":
    if broken := list(broken_links()):
        sys.exit("links that lead nowhere:\n" + "\n".join(broken))
