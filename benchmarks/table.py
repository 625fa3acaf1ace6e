"""Preparing a table of a hospital against polars' own reading of the same CSV file, in one run.

    python -m benchmarks.table --rows 1000000 --columns 100

A made-up table: patient, time, a target of 0 and 1, and features of which one in ten is empty; most are numbers with
two digits after the point, some are whole numbers, one is text. Reading is ``polars.read_csv`` of the whole file. Each
step runs in a process of its own, so that its peak memory is its own; reading is done before preparing and after it,
and the mean of the two is what preparing is compared with. On a busy machine the processor's seconds say more than the
clock's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PIECE = 100_000


def write(path: Path, rows: int, columns: int) -> None:
    """The table, piece by piece."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, rows, PIECE):
            count = min(PIECE, rows - start)
            number = np.arange(start, start + count)
            frame = {"patient": pl.Series(number // 200).cast(pl.String), "hour": number % 200}
            for at in range(columns - 4):
                values = rng.normal(80, 15, count).round(2 if at % 5 else 0)
                gaps = pl.Series(rng.random(count) < 0.1)
                series = pl.Series(values).cast(pl.Float64 if at % 5 else pl.Int64)
                frame[f"feature {at}"] = pl.select(pl.when(~gaps).then(series)).to_series()
            frame["unit"] = pl.Series(["ward", "icu", "emergency"])[rng.integers(0, 3, count)]
            frame["injury"] = (rng.random(count) < 0.1).astype(np.int64)
            pl.DataFrame(frame).write_csv(file, include_header=start == 0)


def step(name: str, path: Path, out: Path) -> None:
    """One step, timed without its imports; prints seconds and peak memory."""
    import polars as pl

    from manydg import sources

    sources.find_source("table")
    start, cpu = time.perf_counter(), time.process_time()
    if name == "read":
        pl.read_csv(path)
    else:
        sources.prepare("table", path, out, target=["injury"], patient="patient", time="hour", features=["*"])
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_gb": round(peak, 2)}))


def measure(name: str, path: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.table", "--step", name, "--file", str(path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--temporary", type=Path)
    parser.add_argument("--step", choices=["read", "prepare"])
    parser.add_argument("--file", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step:
        step(options.step, options.file, options.out)
        return
    with tempfile.TemporaryDirectory(dir=options.temporary) as folder:
        path, out = Path(folder) / "table.csv", Path(folder) / "out"
        write(path, options.rows, options.columns)
        steps = [measure(name, path, out) for name in ("read", "prepare", "read")]
        ratio, cpu_ratio = (
            round(2 * steps[1][key] / (steps[0][key] + steps[2][key]), 2) for key in ("seconds", "cpu_seconds")
        )
        figures = {
            "rows": options.rows,
            "columns": options.columns,
            "csv_mb": round(path.stat().st_size / 2**20),
            "read": [steps[0], steps[2]],
            "prepare": steps[1],
            "ratio": ratio,
            "cpu_ratio": cpu_ratio,
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
