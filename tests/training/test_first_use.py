"""A run's seconds are its own: what a process pays once for all its runs is measured apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIRST_USE = """
import sys, torch
from manydg.synthetic import make_demo_dataset
from manydg.training.run import train, warm_up
data = make_demo_dataset(24, 8)
first = train(data, algorithm="base", epochs=1, device="cpu").record
loaded = set(sys.modules)
second = train(data, algorithm="base", epochs=1, device="cpu").record
assert first.first_use_seconds > 0 and second.first_use_seconds is None, (first, second)
assert "first_use_seconds" in first.to_json() and "first_use_seconds" not in second.to_json()
assert first.test == second.test and warm_up(torch.device("cpu")) is None
print(sorted(name for name in set(sys.modules) - loaded))
"""
WARMED = """
import sys, torch
from manydg.synthetic import make_demo_dataset
from manydg.training.run import train, warm_up
data = make_demo_dataset(24, 8)
state = torch.get_rng_state()
assert warm_up(torch.device("cpu")) > 0
assert torch.equal(state, torch.get_rng_state())
loaded = set(sys.modules)
train(data, algorithm="base", epochs=1, device="cpu")
heavy = ("torch", "scipy", "sklearn", "sympy")
print(sorted(name for name in set(sys.modules) - loaded if name.startswith(heavy)))
"""


NOT_NEEDED = """
import sys
from manydg.synthetic import make_demo_dataset
from manydg.training.run import train
train(make_demo_dataset(24, 8), algorithm="manydg", epochs=1, device="cpu", out=sys.argv[1])
unneeded = ("torch._dynamo", "sklearn", "scipy.stats", "pandas", "polars", "matplotlib")
print([name for name in unneeded if name in sys.modules])
"""


def test_training_imports_neither_the_compiler_nor_what_only_reports_and_estimators_need(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOT_NEEDED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("program", [FIRST_USE, WARMED])
def test_the_first_run_of_a_process_does_not_pay_for_imports_and_first_calls(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
