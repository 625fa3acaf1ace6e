"""Five seeds on one GPU at the same time; part of ``python -m benchmarks.gpu --seeds``."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks import TASKS
from manydg.config import TrainingConfig
from manydg.studies.study import Study, grid
from manydg.training.record import RunRecord

TRAININGS = (
    ("drugs", 3_000, "deterministic", 2),
    ("drugs", 12_000, "captured", 12),
    ("seizure", 13_200, "compiled", 16),
)
"""Task, samples, execution and epochs: one to compare bits, the others as ``auto`` would do them in a long training."""


def five_seeds(device: str = "cuda") -> dict[str, Any]:
    """Five seeds of ManyDG side by side, against one of them alone, as studies.

    Seconds are those of the training steps after the first epoch, of one run alone and of the slowest of five, and
    those of whole studies, programs started and data read included. With deterministic kernels side by side must give
    the same bits.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, samples, execution, epochs in TRAININGS:
            task, data = TASKS[name], Path(folder) / f"{name}-{samples}"
            task.make(samples, torch.device(device), 2).to("cpu").save(data)
            config = TrainingConfig(
                backbone=task.backbone, epochs=epochs, batch_size=task.batch_size, execution=execution
            )
            found[f"{name}, {execution}"] = _against_one_alone(data, config, Path(folder) / f"{name}-{execution}")
            print(name, execution, json.dumps(found[f"{name}, {execution}"]), flush=True)
    return found


def _against_one_alone(data: Path, config: TrainingConfig, out: Path) -> dict[str, Any]:
    (alone, whole_of_one), (together, whole_of_five) = (_study(data, config, out, seeds) for seeds in (1, 5))
    one, five = _after_the_first(alone[0]), max(map(_after_the_first, together))
    return {
        "one alone": one,
        "five side by side, slowest": five,
        "ratio": five / one,
        "whole study of one": whole_of_one,
        "whole study of five": whole_of_five,
        "ratio of whole studies": whole_of_five / whole_of_one,
        "same losses": alone[0].history[-1].losses == together[0].history[-1].losses,
        "test alone": alone[0].test,
        "test together": [run.test for run in together],
    }


def _study(data: Path, config: TrainingConfig, out: Path, seeds: int) -> tuple[list[RunRecord], float]:
    """The runs of so many seeds at the same time, and the seconds that all took."""
    plan, start = grid("compare", ["manydg"], range(seeds), config), time.perf_counter()
    runs, seconds = Study(out / str(seeds), data, plan, data.name).execute(seeds), time.perf_counter() - start
    if failed := [run.error for run in runs if not run.ok]:
        raise RuntimeError(f"runs failed: {failed}")
    return runs, seconds


def _after_the_first(run: RunRecord) -> float:
    """Seconds of a run's training steps without those of the first epoch."""
    return sum(entry.seconds for entry in run.history[1:])
