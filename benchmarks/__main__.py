"""Run every ``benchmarks/bench_*.py``: each has a ``main(out: Path)`` that returns its measurements.

    python -m benchmarks [--out FOLDER] [NAME ...]

``main`` returns a mapping of what was measured to its value, and may write files of its own under ``out``. Everything
is printed as a table and written to ``FOLDER/benchmarks.json``, beside what other benchmarks left there earlier. One
that fails is said to have failed, and the others are run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed and memory.")
    known = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run; without any, all: {known}")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder of the results")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"unknown benchmarks {unknown}; known: {', '.join(known)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.names or known
    if len(names) == 1:
        sys.exit(run(names[0], arguments.out))
    # A process for each, so that the memory and the threads of one are not those of another.
    command = [sys.executable, "-m", "benchmarks", "--out", str(arguments.out)]
    failed = [name for name in names if subprocess.run([*command, name], check=False).returncode]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(name: str, out: Path) -> int:
    """Run a benchmark, print and write what it found; 1 where it failed, else 0."""
    file = out / "benchmarks.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    start, before, failed = time.perf_counter(), machine(), False
    try:
        measured = dict(importlib.import_module(f"benchmarks.bench_{name}").main(out))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told and the other benchmarks can still be run
        traceback.print_exc()
        measured, failed = {"failed": f"{type(error).__name__}: {error}"}, True
    seconds = time.perf_counter() - start
    print_table(name, measured, seconds)
    results[name] = {"machine": before, "seconds": seconds, "measured": measured}
    file.write_text(json.dumps(results, indent=1, default=str))
    print(f"wrote {file}", flush=True)
    return int(failed)


def machine() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "load before": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def print_table(name: str, measured: Mapping[str, Any], seconds: float) -> None:
    print(f"{name} ({seconds:.1f} s)")
    width = max(map(len, measured), default=0)
    for what, value in measured.items():
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"  {what:<{width}}  {shown}", flush=True)


if __name__ == "__main__":
    main()
