"""Mutants on a checkout small enough to see what happens, and the committed list."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tools.mutants import BROKEN, KILLED, PASSES, ROOT, SURVIVED, Mutant, read_mutants, stale

ADD = Mutant("sums are sums", "src/sums.py", "a + b", "a - b", ("tests/test_sums.py::test_two_and_two",))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "src/sums.py": "def add(a, b):\n    return a + b\n\n\ndef halve(a):\n    return a / 2\n",
        "tests/test_sums.py": "from sums import add, halve\n\n\n"
        "def test_two_and_two():\n    assert add(2, 2) == 4\n\n\n"
        "def test_nothing():\n    assert halve(0) == 0\n\n\ndef test_wrong():\n    assert add(1, 1) == 3\n",
    }
    root = tmp_path / "checkout"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


PROGRAM = """
import json, sys
from pathlib import Path
from tools.mutants import Mutant, run

chosen = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in json.loads(sys.argv[1])]
for verdict in run(chosen, Path(sys.argv[2]), jobs=2, root=Path(sys.argv[3])):
    print(json.dumps(["" if verdict.mutant is None else verdict.mutant.rule, verdict.outcome]))
"""


def outcomes(chosen: list[Mutant], checkout: Path, tmp_path: Path) -> dict[str, set[str]]:
    """By rule, and by an empty text for the source as it is; in a process of its own, because this one runs pytest."""
    (tmp_path / "work").mkdir()
    given = [json.dumps([asdict(mutant) for mutant in chosen]), str(tmp_path / "work"), str(checkout)]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *given], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, set[str]] = {}
    for rule, outcome in map(json.loads, ended.stdout.splitlines()):
        found.setdefault(rule, set()).add(outcome)
    return found


def test_a_mutant_is_killed_by_a_test_that_fails_and_survives_one_that_does_not(checkout: Path, tmp_path: Path) -> None:
    weak = Mutant("half", "src/sums.py", "a / 2", "a / 4", ("tests/test_sums.py::test_nothing",))
    before = (checkout / "src/sums.py").read_text(encoding="utf-8")
    assert outcomes([ADD, weak], checkout, tmp_path) == {
        "": {PASSES},
        "sums are sums": {KILLED},
        "half": {SURVIVED},
    }
    assert (checkout / "src/sums.py").read_text(encoding="utf-8") == before


def test_code_that_does_not_run_and_tests_that_fail_anyway_prove_nothing(checkout: Path, tmp_path: Path) -> None:
    garbled = replace(ADD, rule="no program", after="a +* b")
    wrong = replace(ADD, rule="wrong", tests=("tests/test_sums.py::test_wrong",))
    found = outcomes([garbled, wrong], checkout, tmp_path)
    assert found["no program"] == {BROKEN}
    assert BROKEN in found[""]


def test_a_mutant_whose_line_or_test_is_gone_is_stale(checkout: Path) -> None:
    assert stale([ADD], checkout) == []
    gone = [
        replace(ADD, before="a * b"),
        replace(ADD, before="a"),
        replace(ADD, after="a + b"),
        replace(ADD, file="src/none.py"),
        replace(ADD, tests=("tests/test_sums.py::test_gone",)),
    ]
    problems = [stale([mutant], checkout) for mutant in gone]
    assert [len(each) for each in problems] == [1, 1, 1, 1, 1]
    assert "occurs 0 times, not once" in problems[0][0]
    assert "changes nothing" in problems[2][0]
    assert "there is no test tests/test_sums.py::test_gone" in problems[4][0]


def test_the_committed_list_fits_the_source_and_the_tests() -> None:
    listed = read_mutants()
    assert len(listed) >= 80
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in listed}) == len(listed)
    assert stale(listed) == []
    areas = {mutant.file.removeprefix("src/manydg/").split("/")[0] for mutant in listed}
    assert areas >= {"training", "data", "evaluation", "algorithms", "sources", "studies"}
