"""ManyDG's training on a CPU: seconds per 1,000 samples, the package against the plain implementation.

Both train the same networks with the same losses on the same data, one epoch of each in turn; the fastest epoch counts.
The spectrogram that the package works out once is timed apart. Processor seconds (of all threads) are given beside
those of the clock: they hardly change when other programs keep the machine busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain import plain_training
from benchmarks.tasks import TASKS, Task
from manydg.algorithms import build_algorithm
from manydg.backbones import build_backbone
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.targets import target_of
from manydg.training.config import TrainingConfig
from manydg.training.loop import TrainingLoop
from manydg.training.placing import place
from manydg.training.reporting import Silent

SAMPLES = {"seizure": 384, "sleep": 512, "drugs": 1280, "readmission": 256}
EPOCHS = 3
CPU = torch.device("cpu")


def main(out: Path) -> dict[str, Any]:
    """Measure all four tasks."""
    results: dict[str, Any] = {}
    for name, task in TASKS.items():
        ours, plain, once = measure(name, task, SAMPLES[name])
        for side, found in (("the package", ours), ("plain", plain)):
            results[f"{name}: s per 1,000 samples, {side}"] = found.clock
            results[f"{name}: processor s per 1,000 samples, {side}"] = found.processor
        results[f"{name}: times faster by the clock (asked for: {task.times_faster:g})"] = plain.clock / ours.clock
        results[f"{name}: times faster by processor time"] = plain.processor / ours.processor
        if once.clock:
            results[f"{name}: processor s per 1,000 samples, once, for the spectrograms"] = once.processor
        print(f"{name}: {ours} against {plain}", flush=True)
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


def measure(name: str, task: Task, samples: int) -> tuple[Cost, Cost, Cost]:
    """The package, the plain implementation, and what the package spends once."""
    data = task.make(samples, CPU, 0)
    torch.manual_seed(0)
    loop, once = _loop(task, data)
    plain = iter(plain_training(name, task, data))
    ours, theirs = [], []
    for epoch in range(1, EPOCHS + 1):
        ours.append(Cost.of(partial(loop._run_epoch, epoch), samples))
        theirs.append(Cost.of(partial(next, plain), samples))
    return Cost.least(ours), Cost.least(theirs), once


def _loop(task: Task, data: DomainDataset) -> tuple[TrainingLoop, Cost]:
    backbone = build_backbone(task.backbone, InputSchema.of(data))
    backbone.fit_inputs(data)
    algorithm = build_algorithm("manydg", backbone, target_of(data.target), data.n_patients)
    once = Cost.of(partial(place, data, algorithm, CPU), len(data))
    placed = place(data, algorithm, CPU)
    config = TrainingConfig(backbone=task.backbone, epochs=EPOCHS, batch_size=task.batch_size, lr=task.lr)
    loop = TrainingLoop(algorithm, placed, None, config, "", None, Silent())
    loop.steps = loop._make_steps()
    return loop, once if placed is not data else Cost(0.0, 0.0)
