"""Preparing MIMIC-III and eICU against scanning the same files, on synthetic twins of a fiftieth of the real size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCALE = 0.02
_LINE = re.compile(r"(\w+)\s+prepare / scan: ([\d.]+) \(wall\), ([\d.]+) \(processor\), peak ([\d.]+) GiB")


def main(out: Path) -> dict[str, Any]:
    """Run ``ehr_sources.py`` and read its summary lines."""
    script = Path(__file__).with_name("ehr_sources.py")
    command = [sys.executable, str(script), "--scale", str(SCALE), "--temporary", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, Any] = {}
    for source, wall, processor, peak in _LINE.findall(done.stdout):
        results[f"{source}: prepare over scan, by the clock"] = float(wall)
        results[f"{source}: prepare over scan, by processor time"] = float(processor)
        results[f"{source}: peak memory, GiB"] = float(peak)
    return results
