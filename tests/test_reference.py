"""What the program computes is what the committed reference says, bit for bit on the machine that recorded it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "reference" / "record.py"


@pytest.mark.slow
def test_everything_recorded_is_the_same_as_before() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
