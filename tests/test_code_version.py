"""Editing what explains the code keeps its version; editing what it does makes another."""

from __future__ import annotations

from pathlib import Path

import pytest

import manydg
from manydg.files import code_version, source_digest

SOURCE = '''"""A loss."""

import math


class Loss:
    """Of one sample."""

    weight: float = 0.5
    """How much of it counts."""

    def value(self, p: float) -> float:
        """Minus the logarithm."""
        return -self.weight * math.log(p)  # natural
'''


def _version(folder: Path, text: str) -> str:
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / "loss.py").write_text(text, encoding="utf-8")
    return source_digest(["part"], folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A loss."""', '"""A loss, explained at length.\n\nTwice.\n"""'),
        ('"""A loss."""\n', ""),
        ('    """Of one sample."""\n', ""),
        ('"""How much of it counts."""', '"""Its share."""'),
        ('"""Minus the logarithm."""', '"""The surprise."""'),
        ("# natural", "# to the base e"),
        ("  # natural", ""),
        ("return -self.weight * math.log(p)", "return (\n            -self.weight * math.log(p)\n        )"),
    ],
)
def test_an_edited_explanation_keeps_the_version(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert _version(tmp_path, SOURCE.replace(old, new, 1)) == _version(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5", "0.25"),
        ("0.5", "None"),
        ("-self.weight", "self.weight"),
        ("math.log(p)", "math.log2(p)"),
        ("math.log(p)", 'math.log(p) if p else "nothing"'),
        ("(self, p: float)", "(self, p: float = 1.0)"),
        ("    def value", "    @staticmethod\n    def value"),
        ("import math", "import cmath as math"),
    ],
)
def test_an_edited_formula_makes_another_version(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    assert _version(tmp_path, SOURCE.replace(old, new, 1)) != _version(tmp_path, SOURCE)


def test_a_string_that_is_used_is_no_explanation(tmp_path: Path) -> None:
    assert _version(tmp_path, 'x = "a"\n') != _version(tmp_path, 'x = "b"\n')


def test_a_module_of_another_name_makes_another_version(tmp_path: Path) -> None:
    before = _version(tmp_path, SOURCE)
    (tmp_path / "part" / "loss.py").rename(tmp_path / "part" / "losses.py")
    assert source_digest(["part"], tmp_path) != before


def test_line_ends_of_another_system_keep_the_version(tmp_path: Path) -> None:
    before = _version(tmp_path, SOURCE)
    (tmp_path / "part" / "loss.py").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    assert source_digest(["part"], tmp_path) == before


def test_the_package_carries_the_version_of_every_part_that_decides_results() -> None:
    parts = ["config.py", "data", "targets.py", "backbones", "algorithms", "evaluation", "training"]
    assert code_version() == f"{manydg.__version__}+{source_digest(parts)}"
