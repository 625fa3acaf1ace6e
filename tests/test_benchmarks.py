"""Benchmarks and examples reach into the package: that they still can is seen here, their figures are not."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Also within the programs that benchmarks start, which are strings.
IMPORT = re.compile(r"^\s*from (manydg[\w.]*) import (?:\(([^)]*)\)|(.*))$", flags=re.MULTILINE)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests/reference"])
def test_what_scripts_import_from_the_package_exists(folder: str) -> None:
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for module, several, one in IMPORT.findall(file.read_text(encoding="utf-8")):
            for name in re.sub(r"#.*| as \w+", "", several or one).replace(",", " ").split():
                if not _exists(module, name):
                    missing.append(f"{file.name}: {module}.{name}")
    assert not missing


def _exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.util.find_spec(f"{module}.{name}"))
    except ImportError:
        return False


@pytest.mark.slow
def test_training_on_a_cpu_is_measured_against_the_plain_implementation() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_cpu_training", "drugs", "1", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "times faster" in done.stdout
