"""Predictions per second on a GPU; part of ``python -m benchmarks.gpu``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.tasks import TASKS, model
from manydg.algorithms import Algorithm
from manydg.data.dataset import DomainDataset
from manydg.training.inference import predict_probabilities

SAMPLES = 12_000
_REPEATS = 5


def inference(device: str = "cuda", samples: int = SAMPLES) -> dict[str, Any]:
    """ManyDG on the paper's four tasks, float32, untrained, spectrograms worked out on the way.

    Samples per second of a dataset that is on the device already, and of one that comes from the host; and
    milliseconds for one sample alone, from the host and back.
    """
    found: dict[str, Any] = {}
    for name, task in TASKS.items():
        data = task.make(samples, torch.device(device), 3)
        algorithm, host = model(task, "manydg", data, device), data.to("cpu")
        found[name] = {
            "samples/s, data on the device": samples / _seconds(algorithm, data),
            "samples/s, data on the host": samples / _seconds(algorithm, host),
            "ms for one sample": 1e3 * _seconds(algorithm, host.select(torch.tensor([0]))),
        }
        print(name, {what: round(value, 2) for what, value in found[name].items()}, flush=True)
        del data, host, algorithm
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _seconds(algorithm: Algorithm, data: DomainDataset) -> float:
    """Median of several calls, after a first one; each ends with the probabilities on the host."""
    predict_probabilities(algorithm, data)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        predict_probabilities(algorithm, data)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
