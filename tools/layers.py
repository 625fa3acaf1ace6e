"""Draw the layers of the package, as import-linter's contracts in pyproject.toml state them, into CONTRIBUTING.md.

``python -m tools.layers`` rewrites the picture; a test fails while the two differ.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- layers: drawn by tools/layers.py -->\n```\n", "```\n<!-- end of layers -->"


def picture(pyproject: str) -> str:
    """One line a layer, the top one first, with what a layer must not know in spite of being above it."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = [[name.strip() for name in layer.replace("|", ":").split(":")] for layer in layers]
    notes = [""] * len(rows)
    for contract in contracts:
        if contract["type"] == "forbidden":
            above = {name.removeprefix("manydg.") for name in contract["source_modules"]}
            unknown = ", ".join(name.removeprefix("manydg.") for name in contract["forbidden_modules"])
            notes = [
                f"nothing of {unknown}" if above & set(row) else note for row, note in zip(rows, notes, strict=True)
            ]
    names = [", ".join(row) for row in rows]
    width = max(len(name) for name, note in zip(names, notes, strict=True) if note or name == names[0])
    return "".join(f"{name:{width + 3}}{note}".rstrip() + "\n" for name, note in zip(names, notes, strict=True))


def redrawn(contributing: str, pyproject: str) -> str:
    """CONTRIBUTING's text with the picture drawn anew."""
    before, _, rest = contributing.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + picture(pyproject) + END + after


if __name__ == "__main__":
    file = ROOT / "CONTRIBUTING.md"
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    file.write_text(redrawn(file.read_text(encoding="utf-8"), pyproject), encoding="utf-8")
