"""Write the tables of sources in README.md and docs/datasets.md from what the sources say of themselves.

``python -m tools.source_tables`` rewrites both; a test fails while a table differs from its sources.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

from manydg.sources import SOURCES, AnySource, SourceDocs, find_source

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of sources -->"


def begin(head: str) -> str:
    """What stands before a table."""
    rule = "|" + "---|" * (head.count("|") - 1)
    return f"<!-- sources: written by tools/source_tables.py -->\n{head}\n{rule}\n"


def datasets_table() -> str:
    """Every source, for docs/datasets.md."""
    rows = [f"| `{source.name}` | {docs.predicts} | {docs.target} | {docs.page} |" for source, docs in _documented()]
    return begin("| name | task | target | page |") + "\n".join(rows) + "\n"


def tasks_table() -> str:
    """The sources of clinical tasks and the commands to prepare them, for README.md."""
    rows = [f"| {docs.task} | `{_command(source)}` | {docs.files} |" for source, docs in _documented() if docs.task]
    return begin("| task | prepare | raw files |") + "\n".join(rows) + "\n"


def _documented() -> list[tuple[AnySource, SourceDocs]]:
    built_in = [find_source(name) for name in SOURCES.names()]
    return [(source, source.docs) for source in built_in if source.docs is not None]


def _command(source: AnySource) -> str:
    needed = [entry.name for entry in fields(source.options_class) if entry.default is MISSING]
    options = [f"--{name.replace('_', '-')} {name.rpartition('_')[2].upper()}" for name in needed]
    return " ".join(["manydg prepare", source.name, "RAW", *options, "--out DIR"])


def replaced(text: str, table: str) -> str:
    """A page with its table replaced."""
    pattern = r"<!-- sources: written by .*?" + re.escape(END)
    return re.sub(pattern, lambda _: table + END, text, count=1, flags=re.DOTALL)


PAGES = {"README.md": tasks_table, "docs/datasets.md": datasets_table}


def main() -> None:
    for page, table in PAGES.items():
        path = ROOT / page
        path.write_text(replaced(path.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
