"""An epoch's plan of pairs for ten million samples of a million patients: seconds, and memory over the input's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SAMPLES, PATIENTS = 10_000_000, 1_000_000

# In a process of its own: the peak of a process never goes down again.
MEASURE = """
import resource, sys, time
import numpy as np
from manydg.data.sampling import fold_pairs

samples, patients = int(sys.argv[1]), int(sys.argv[2])
domains = np.random.default_rng(0).integers(0, patients, samples)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
start = time.perf_counter()
first, second = fold_pairs(domains, 0)
seconds = time.perf_counter() - start
assert (domains[first] == domains[second]).all() and (first != second).all()
print(seconds, before, peak(), len(first))
"""


def main(out: Path) -> dict[str, Any]:
    """Measure ``fold_pairs`` at full size and at a tenth of it (memory must shrink likewise), and a patient split."""
    results: dict[str, Any] = {}
    for label, scale in (("", 1), (" of a tenth", 10)):
        command = [sys.executable, "-c", MEASURE, str(SAMPLES // scale), str(PATIENTS // scale)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, before, after, pairs = map(float, run.stdout.split())
        results[f"samples{label}"] = SAMPLES // scale
        results[f"pairs{label}"] = int(pairs)
        results[f"seconds{label}"] = seconds
        results[f"peak memory above the input, MB{label}"] = after - before
        results[f"bytes per sample{label}"] = (after - before) * 2**20 / (SAMPLES // scale)
    results["seconds of a patient split"] = _split_seconds()
    return results


def _split_seconds() -> float:
    import numpy as np

    from manydg.data.splits import split_patients

    domains = np.random.default_rng(0).integers(0, PATIENTS, SAMPLES)
    start = time.perf_counter()
    split_patients(domains)
    return time.perf_counter() - start
