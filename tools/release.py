"""Check that the package, the citation file and the changelog name the version of a tag.

``python -m tools.release v1.2.3 [--notes FILE]`` fails with what differs; the notes are the changelog's section.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version that each file names; empty where it names none. The changelog's is that of its newest release."""
    package = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    patterns = {
        "src/manydg/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    named = {file: _first(pattern, (root / file).read_text(encoding="utf-8")) for file, pattern in patterns.items()}
    return {"pyproject.toml": package, **named}


def notes(changelog: str, version: str) -> str:
    """The changelog's section of a version."""
    section = re.search(
        rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, flags=re.MULTILINE | re.DOTALL
    )
    return section[1].strip() + "\n" if section else ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, flags=re.MULTILINE)
    return match[1] if match else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tag", help="v1.2.3")
    parser.add_argument("--notes", type=Path, help="write the changelog's section to this file")
    options = parser.parse_args()
    wanted = options.tag.removeprefix("v")
    others = [f"{file} says '{version}'" for file, version in versions().items() if version != wanted]
    if others:
        sys.exit(f"the tag is {options.tag}, but {', '.join(others)}")
    if options.notes:
        options.notes.write_text(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), wanted), encoding="utf-8")


if __name__ == "__main__":
    main()
