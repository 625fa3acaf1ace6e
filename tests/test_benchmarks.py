"""A benchmark that reaches into the training loop: that it still runs is seen here, its figures are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_training_on_a_cpu_is_measured_against_the_plain_implementation() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_cpu_training", "drugs", "1", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "times faster" in done.stdout
