"""Predictions per second on a GPU; part of ``python -m benchmarks.gpu``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.tasks import TASKS
from manydg.algorithms import Algorithm, build_algorithm
from manydg.backbones import build_backbone
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.targets import target_of
from manydg.training.inference import predict_probabilities

SAMPLES = 12_000
_REPEATS = 5


def inference(device: str = "cuda", samples: int = SAMPLES) -> dict[str, Any]:
    """ManyDG on the paper's four tasks, float32, spectrograms worked out on the way.

    Samples per second of a dataset that is on the device already, and of one that comes from the host; and
    milliseconds for one sample alone, from the host and back.
    """
    found: dict[str, Any] = {}
    for name, task in TASKS.items():
        data = task.make(samples, torch.device(device), 3)
        algorithm, host = _model(task.backbone, data, device), data.to("cpu")
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


def _model(backbone: str, data: DomainDataset, device: str) -> Algorithm:
    """ManyDG with weights as they come, because their values do not matter."""
    network = build_backbone(backbone, InputSchema.of(data)).to(device)
    network.fit_inputs(data)
    return build_algorithm("manydg", network, target_of(data.target), data.n_patients).to(device)


def _seconds(algorithm: Algorithm, data: DomainDataset) -> float:
    """Median of several calls, after a first one; each ends with the probabilities on the host."""
    predict_probabilities(algorithm, data)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        predict_probabilities(algorithm, data)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
