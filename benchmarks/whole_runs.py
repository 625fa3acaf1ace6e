"""Whole runs of the paper's tasks, start included: seconds from a fresh process to the trained model, as JSON.

    python -m benchmarks.whole_runs [--tasks NAME ...] [--execution NAME] [--runs N] [--cache DIR] [--small]

Every run is a process of its own, with as many epochs as the paper has, and validates after each on a tenth as many
samples. Its seconds count the imports, what is fitted to the inputs, the precomputed spectrograms, compiling or
capturing, all epochs and their validation; making the synthetic data is left out. --no-validation trains alone. The
compiler's cache is empty before the first run of a task and kept for the next; with --cache it is what earlier calls
left in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

EPOCHS = {"seizure": 50, "sleep": 50, "drugs": 100, "readmission": 50}
PARTS = ("imports", "making data", "before the first epoch", "first epoch", "other epochs", "validation")
SECONDS_WANTED = {"seizure": 60, "sleep": 90, "drugs": 30, "readmission": 150}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(EPOCHS), choices=list(EPOCHS))
    parser.add_argument("--algorithm", default="manydg")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--runs", type=int, default=1, help="runs of each task; from the second on the cache is filled")
    parser.add_argument("--cache", type=Path, help="folder of the compiler's cache, kept")
    parser.add_argument("--epochs", type=int, help="instead of the paper's")
    parser.add_argument("--small", action="store_true", help="a hundredth of the samples: does everything run?")
    parser.add_argument("--no-validation", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(train(arguments.tasks[0], arguments)))
        return
    for name in arguments.tasks:
        with nullcontext(arguments.cache) if arguments.cache else tempfile.TemporaryDirectory() as cache:
            for number in range(1, arguments.runs + 1):
                print(json.dumps({"run": number, **in_process(name, arguments, Path(cache))}), flush=True)


def in_process(name: str, arguments: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """One run of a task in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.whole_runs", "--child", "--tasks", name]
    command += ["--algorithm", arguments.algorithm, "--execution", arguments.execution]
    command += ["--epochs", str(arguments.epochs)] if arguments.epochs else []
    command += ["--small"] if arguments.small else []
    command += ["--no-validation"] if arguments.no_validation else []
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    start = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=False)
    process = time.perf_counter() - start
    if done.returncode:
        return {"task": name, "failed": done.returncode}
    result = json.loads(done.stdout.splitlines()[-1])
    outside = process - sum(result[part] for part in PARTS)
    seconds = process - result["making data"]
    return {**result, "start and end of the process": outside, "seconds": seconds, "wanted": SECONDS_WANTED[name]}


def train(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on a task; seconds of each part."""
    start = time.perf_counter()
    import torch

    from benchmarks.tasks import TASKS
    from manydg.config import TrainingConfig
    from manydg.training.fit import Silent, fit

    class Clock(Silent):
        """When the loop began and when it had trained and validated the last epoch."""

        began = ended = 0.0

        def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
            self.began = time.perf_counter()

        def epoch_ended(self, entry: Any) -> None:
            self.ended = time.perf_counter()

    task, device = TASKS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    imported = time.perf_counter()
    samples = task.samples // (100 if arguments.small else 1)
    data = task.make(samples, device, 0)
    val = None if arguments.no_validation else task.make(samples // 10, device, 1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    made = time.perf_counter()
    config = TrainingConfig(
        algorithm=arguments.algorithm, backbone=task.backbone, epochs=arguments.epochs or EPOCHS[name],
        batch_size=task.batch_size, lr=task.lr, execution=arguments.execution,
    )  # fmt: skip
    clock = Clock()
    fitted = fit(config, data, val, device, reporter=clock)
    seconds = [entry.seconds for entry in fitted.history]
    return {
        "task": name,
        "epochs": len(seconds),
        "precision": fitted.speed.precision,
        "execution": fitted.speed.execution,
        "imports": imported - start,
        "making data": made - imported,
        "before the first epoch": clock.began - made,
        "first epoch": seconds[0],
        "other epochs": sum(seconds[1:]),
        "validation": clock.ended - clock.began - sum(seconds),
        "loss": fitted.history[-1].losses["supervised"],
    }


if __name__ == "__main__":
    main()
