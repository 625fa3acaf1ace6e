"""ManyDG's training on a CPU: seconds per 1,000 samples, the package against the plain implementation.

Both train the same networks with the same losses on the same data, one epoch of each in turn; the fastest epoch counts.
Each side has a process of its own, because the package changes how the C library keeps freed memory. The spectrogram
that the package works out once is timed apart. Processor seconds (of all threads) are given beside those of the clock:
with one thread they hardly change when other programs keep the machine busy.

    python -m benchmarks cpu_training                       all tasks
    python -m benchmarks.bench_cpu_training sleep 2 12      one task, with two threads, twelve epochs of each side
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain import plain_training
from benchmarks.tasks import TASKS, Task, model
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.training.execution.memory import place
from manydg.training.fit import Silent, TrainingLoop

SAMPLES = {"seizure": 512, "sleep": 512, "drugs": 1280, "readmission": 128}
EPOCHS = {"seizure": 5, "sleep": 5, "drugs": 3, "readmission": 2}
QUIET = 1.0
PACKAGE, PLAIN, HALF = "the package", "plain", "the package in bf16"
CPU = torch.device("cpu")


def main(out: Path) -> dict[str, Any]:
    """Measure all four tasks with one thread and, on a quiet machine, with two."""
    load = os.getloadavg()[0]
    results: dict[str, Any] = {}
    if load > QUIET:
        # Threads that wait for one another beside other programs say nothing about either side.
        results["two threads"] = f"not measured: the machine is busy (load {load:.1f})"
    for name, task in TASKS.items():
        for threads in (1,) if load > QUIET else (1, 2):
            where = f"{name}, {threads} thread{'s' * (threads > 1)}"
            found, once = measure(name, threads, EPOCHS[name])
            for side, cost in found.items():
                results[f"{where}: s per 1,000 samples, {side}"] = cost.clock
                results[f"{where}: processor s per 1,000 samples, {side}"] = cost.processor
            ours, plain = found[PACKAGE], found[PLAIN]
            results[f"{where}: times faster by the clock (asked for: {task.times_faster:g})"] = plain.clock / ours.clock
            results[f"{where}: times faster by processor time"] = plain.processor / ours.processor
            if once.clock:
                results[f"{where}: processor s per 1,000 samples, once, for the spectrograms"] = once.processor
            print(f"{where}: {found}", flush=True)
    return results


@dataclass(frozen=True)
class Cost:
    """Seconds per 1,000 samples, by the clock and of the processor."""

    clock: float
    processor: float

    @staticmethod
    def of(action: Callable[[], object], samples: int) -> Cost:
        clock, processor = time.perf_counter(), time.process_time()
        action()
        spent = time.perf_counter() - clock, time.process_time() - processor
        return Cost(1e3 * spent[0] / samples, 1e3 * spent[1] / samples)

    @staticmethod
    def least(costs: list[Cost]) -> Cost:
        return Cost(min(cost.clock for cost in costs), min(cost.processor for cost in costs))


def measure(name: str, threads: int, epochs: int) -> tuple[dict[str, Cost], Cost]:
    """The cost of each side, and what the package spends once."""
    sides = [PACKAGE, PLAIN] + [HALF] * (name in ("seizure", "sleep"))
    workers = {side: Worker(side, name, threads) for side in sides}
    costs: dict[str, list[Cost]] = {side: [] for side in sides}
    try:
        for _ in range(epochs):
            for side, worker in workers.items():
                costs[side].append(worker.epoch())
    finally:
        for worker in workers.values():
            worker.end()
    return {side: Cost.least(found) for side, found in costs.items()}, workers[PACKAGE].once


class Worker:
    """A process that trains one side, an epoch at every line that it is sent."""

    def __init__(self, side: str, name: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_cpu_training", side, name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": f"{threads}"},
        )
        self.once = self._read()

    def epoch(self) -> Cost:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self.process.communicate()

    def _read(self) -> Cost:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a side of the benchmark ended; what it said stands above")
        return Cost(**json.loads(line))


def work(side: str, name: str, threads: int) -> None:
    """What a worker does: tell what was spent once, then the cost of every epoch that is asked for."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    task, samples = TASKS[name], SAMPLES[name]
    data = task.make(samples, CPU, 0)
    if side == PLAIN:
        plain, once = iter(plain_training(name, task, data)), Cost(0.0, 0.0)
        serve(once, lambda epoch: next(plain), samples)
        return
    loop, once = loop_for(task, data, "bf16" if side == HALF else "auto")
    with loop.execution.running(), ThreadPoolExecutor(max_workers=1) as worker:
        serve(once, lambda epoch: loop._run_epoch(epoch, worker), samples)


def serve(once: Cost, train_epoch: Callable[[int], object], samples: int) -> None:
    print(json.dumps(asdict(once)), flush=True)
    for epoch, _ in enumerate(sys.stdin, start=1):
        print(json.dumps(asdict(Cost.of(partial(train_epoch, epoch), samples))), flush=True)


def loop_for(task: Task, data: DomainDataset, precision: str) -> tuple[TrainingLoop, Cost]:
    """The package's training, ready for its first epoch, and what was spent before."""
    algorithm = model(task, "manydg", data, CPU)
    once = Cost.of(partial(place, data, algorithm, CPU), len(data))
    placed = place(data, algorithm, CPU)
    config = TrainingConfig(
        backbone=task.backbone, epochs=10, batch_size=task.batch_size, lr=task.lr, precision=precision
    )
    loop = TrainingLoop(algorithm, placed, None, config, "", None, Silent())
    return loop, once if placed is not data else Cost(0.0, 0.0)


def tell(name: str, threads: int, epochs: int) -> None:
    """Measure one task and print it."""
    found, once = measure(name, threads, epochs)
    for side, cost in found.items():
        print(f"{side}: {cost.clock:.3f} s per 1,000 samples by the clock, {cost.processor:.3f} of the processor")
    ours, plain = found[PACKAGE], found[PLAIN]
    print(f"times faster: {plain.clock / ours.clock:.2f} by the clock, {plain.processor / ours.processor:.2f}")
    print(f"once: {once.processor:.3f}; load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    if sys.argv[1] in TASKS:
        tell(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
