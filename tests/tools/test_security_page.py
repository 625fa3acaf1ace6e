"""SECURITY.md claims nothing without a test, and every test it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
CHECKS = [line for line in TEXT.split("## What is checked")[1].split("\n## ")[0].splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("line", CHECKS[1:])
def test_every_check_names_a_test_that_exists(line: str) -> None:
    claim, *_, named = (cell.strip() for cell in line.strip("|").split(" | "))
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", named)
    assert tests, f"'{claim}' names no test"
    for file, function in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_that_a_security_policy_has_to_say_is_said() -> None:
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert headings == [
        "How to report a vulnerability", "What is trusted", "What is not trusted", "What is checked", "Patients",
        "What is not promised",
    ]  # fmt: skip
    assert len(CHECKS) > 8
