"""The measures of the source tree, on a tree small enough to count by hand, and the package's own layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import house, layers

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "plugins": ["pack.plug.*"],
    "entries": ["pack.door"],
    "heavy": [],
    "late-imports-allowed": [{"in": "pack.door", "reason": "quick help"}],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "door.py": "import pack.used\n\ndef go():\n    from pack import late\n",
        "used.py": "from pack._closet import x\n\ndef f(a: dict[str, Any]) -> Mapping[str, Any]: ...\n",
        "late.py": "import pack.used\n\ndef f():\n    from pack.plug import red\n    from pack._closet import x\n",
        "_closet.py": "x = 1\n",
        "plug/__init__.py": "",
        "plug/red.py": "from pack.plug._shelf import y\n",
        "plug/_shelf.py": "y = 1\n\ndef long():\n" + "    y\n" * 41,
    }
    for name, text in files.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "pack"


def test_figures_of_a_small_tree_are_those_counted_by_hand(tree: Path) -> None:
    modules = {module.name: module for module in house.measure(tree, SETTINGS)}
    assert house.figures(list(modules.values())) == {
        "modules": 8,
        "private-modules": 2,
        "single-importer-modules": 2,
        "untyped-dicts": 2,
        "late-imports": 2,
        "long-functions": 1,
    }
    assert modules["pack._closet"].importers == {"pack.used", "pack.late"}
    assert {name for name, module in modules.items() if module.closet} == {"pack.late", "pack.plug._shelf"}


def test_limits_are_lowered_and_never_raised(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    names = house.figures([])
    text = (
        "[tool.house.limits]\n"
        + "".join(f"{name} = 5\n" for name in names)
        + "median-lines = 3\n\n[other]\nmodules = 9\n"
    )
    file.write_text(text, encoding="utf-8")
    house.tighten(file, house.measure(tree, SETTINGS))
    after = file.read_text(encoding="utf-8")
    assert "\nmodules = 5\n" in after
    assert "private-modules = 2\n" in after
    assert after.endswith("median-lines = 3\n\n[other]\nmodules = 9\n")


def test_a_figure_past_its_limit_is_named(tree: Path) -> None:
    limits = {**dict.fromkeys(house.figures([]), 100), "modules": 7, "median-lines": 0}
    assert house.report(house.measure(tree, SETTINGS), limits, details=False) == ["modules: 8, at most 7"]


def test_the_layers_in_contributing_are_those_that_are_checked() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert layers.redrawn(contributing, (ROOT / "pyproject.toml").read_text(encoding="utf-8")) == contributing
