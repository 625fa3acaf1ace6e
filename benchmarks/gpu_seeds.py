"""Five seeds on one GPU at the same time; part of ``python -m benchmarks.gpu --seeds``."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks import TASKS
from manydg.experiments.study import Study, grid
from manydg.training.config import TrainingConfig


def five_seeds() -> dict[str, Any]:
    """Five seeds of ManyDG on sleep data side by side, against one of them alone, as studies.

    Seconds are those of the training steps after the first epoch, of one run alone and of the slowest of five, and
    those of whole studies, programs started and data read included. It is done with deterministic kernels too, for
    which side by side must give the same bits.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sleep"
        TASKS["sleep"].make(20_000, torch.device("cuda"), 2).to("cpu").save(data)
        for execution, epochs in (("captured", 30), ("deterministic", 2)):
            config = TrainingConfig(
                backbone="sleep-cnn", epochs=epochs, batch_size=256, execution=execution, precision="float32"
            )

            def study(seeds: int, config: TrainingConfig = config) -> tuple[list[dict[str, Any]], float]:
                """The runs of so many seeds at the same time, and the seconds that all took."""
                plan, start = grid("compare", ["manydg"], range(seeds), config), time.perf_counter()
                out = Path(folder) / f"{config.execution}-{seeds}"
                runs, seconds = Study(out, data, plan, "sleep").execute(seeds), time.perf_counter() - start
                if failed := [run["error"] for run in runs if run["status"] != "ok"]:
                    raise RuntimeError(f"runs failed: {failed}")
                return runs, seconds

            (alone, whole_of_one), (together, whole_of_five) = study(1), study(5)
            one, five = _after_the_first(alone[0]), max(map(_after_the_first, together))
            found[execution] = {
                "one alone": one,
                "five side by side, slowest": five,
                "ratio": five / one,
                "whole study of one": whole_of_one,
                "whole study of five": whole_of_five,
                "ratio of whole studies": whole_of_five / whole_of_one,
                "same losses": alone[0]["history"][-1]["losses"] == together[0]["history"][-1]["losses"],
                "test kappa alone": alone[0]["test"]["kappa"],
                "test kappa together": [run["test"]["kappa"] for run in together],
            }
            print(execution, json.dumps(found[execution]), flush=True)
    return found


def _after_the_first(run: dict[str, Any]) -> float:
    """Seconds of a run's training steps without those of the first epoch."""
    return sum(entry["seconds"] for entry in run["history"][1:])
