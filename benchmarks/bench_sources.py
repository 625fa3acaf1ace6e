"""Preparing raw files against merely reading the same files, on twins of a twentieth of the real size.

``python -m benchmarks.sources --scale 1`` does the same at full size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.sources import FULL, measure

SCALE = 0.05


def main(out: Path) -> dict[str, Any]:
    """Measure each dataset in processes of its own; the twins are written under ``out`` and deleted again."""
    return {
        f"{source}: {what}": value for source in FULL for what, value in measure(source, SCALE, out.resolve()).items()
    }
