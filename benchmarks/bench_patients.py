"""Time and memory of a training step against the number of training patients, for every algorithm, on a CPU.

The batch is the same size throughout; only the number of patients that an algorithm is built for changes. Memory is
what training holds from step to step (weights, gradients, optimiser) and what a step keeps for its backward pass.
Leaves two figures for the report beside the results: copy ``FOLDER/figures/*.json`` to a study's ``figures``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from manydg.backbones import Backbone, Inputs
from manydg.backbones.mlp import MLP
from manydg.data.build import from_arrays
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import PATIENTS_PER_EPISODE
from manydg.data.schema import InputSchema
from manydg.targets import target_of

PATIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
ROWS, FEATURES, STEPS = 256, 16, 5
MOST_MEMORY_MB = 5_000
SLOWEST_STEP = 3.0


class SmallConv(Backbone):
    """For methods on feature maps: two convolutions over a row."""

    output_size = 64

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ELU())
        self.late = nn.Sequential(nn.Conv1d(8, 8, 2, stride=2), nn.BatchNorm1d(8), nn.ELU(), nn.Flatten())

    def maps(self, inputs: Inputs) -> Tensor:
        column = inputs["x"]
        assert isinstance(column, Tensor)
        maps: Tensor = self.early(column[:, None, :])
        return maps

    def features_of(self, maps: Tensor) -> Tensor:
        features: Tensor = self.late(maps)
        return features

    def forward(self, inputs: Inputs) -> Tensor:
        return self.features_of(self.maps(inputs))


def main(out: Path) -> dict[str, Any]:
    """Measure every algorithm that is trained by steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(ROWS, FEATURES)), rng.integers(0, 5, ROWS), np.arange(ROWS) // 2)
    found: dict[str, list[tuple[float, float] | None]] = {}
    for name in ALGORITHMS.names():
        if ALGORITHMS.get(name).sampling == "whole":
            continue
        found[name] = measure(name, data)
        shown = ", ".join("-" if entry is None else f"{entry[0]:.1f} ms {entry[1]:.1f} MB" for entry in found[name])
        print(f"  {name}: {shown}", flush=True)
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for place, (file, label) in enumerate((("step_time", "milliseconds per step"), ("step_memory", "megabytes"))):
        (figures / f"patients_{file}.json").write_text(json.dumps(figure(found, place, label), indent=1))
    return {
        f"{name}: {what}, {count:,} patients": entry[place]
        for name, entries in found.items()
        for count, entry in zip(PATIENTS, entries, strict=True)
        for place, what in enumerate(("ms", "MB"))
        if entry is not None
    }


def measure(name: str, data: DomainDataset) -> list[tuple[float, float] | None]:
    """Milliseconds and megabytes at each number of patients; ``None`` from where memory or patience end."""
    found: list[tuple[float, float] | None] = []
    for patients in PATIENTS:
        last, before = (found or [None])[-1], (found[-2:-1] or [None])[0]
        growth = 1.0 if last is None or before is None else last[1] / before[1]
        if found and (last is None or last[1] * growth > MOST_MEMORY_MB or last[0] > 1e3 * SLOWEST_STEP):
            found.append(None)
            continue
        found.append(_measure(build(name, data, patients), batch_for(name, data, patients)))
    return found


def build(name: str, data: DomainDataset, patients: int) -> Algorithm:
    """An algorithm for so many patients on the first small backbone that it takes."""
    target = target_of(data.target)
    table = MLP(InputSchema.of(data), hidden=64, layers=1, width=64)
    table.fit_inputs(data)
    backbone = table if ALGORITHMS.get(name).refuses(target, table) is None else SmallConv()
    return build_algorithm(name, backbone, target, patients)


def batch_for(name: str, data: DomainDataset, patients: int) -> Batch:
    """A batch as the algorithm's sampling gives it, of patients from all over the range."""
    sampling = ALGORITHMS.get(name).sampling
    rng = np.random.default_rng(0)
    if sampling == "episodes":
        who, pairs = np.arange(ROWS) * PATIENTS_PER_EPISODE // ROWS, 0
        codes = rng.choice(patients, PATIENTS_PER_EPISODE, replace=False)[who]
    elif sampling in ("pairs", "random-pairs"):
        pairs = ROWS // 2
        codes = np.tile(rng.integers(0, patients, pairs), 2)
    else:
        codes, pairs = rng.integers(0, patients, ROWS), 0
    whole = data.take(torch.arange(ROWS))
    return Batch(whole.inputs, whole.targets, torch.from_numpy(codes), pairs)


def _measure(algorithm: Algorithm, batch: Batch) -> tuple[float, float]:
    algorithm.train()
    optimizers = algorithm.optimizers(1e-3, 1e-5)
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    weights = {id(parameter): parameter.nbytes for parameter in algorithm.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        algorithm.step(batch, optimizers)
    times = []
    for _ in range(STEPS):
        # Processor time of one thread: what else the machine does is no matter of the algorithm's.
        start = time.process_time()
        algorithm.step(batch, optimizers)
        times.append(time.process_time() - start)
        if sum(times) > 2 * SLOWEST_STEP:
            break
    gradients = sum(parameter.grad.nbytes for parameter in algorithm.parameters() if parameter.grad is not None)
    states = sum(
        value.nbytes
        for optimizer in optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    buffers = sum(buffer.nbytes for buffer in algorithm.buffers())
    return 1e3 * min(times), (sum(weights.values()) + gradients + states + buffers + kept) / 2**20


def figure(found: dict[str, list[tuple[float, float] | None]], place: int, label: str) -> dict[str, Any]:
    """Data of a curve for the report."""
    return {
        "kind": "curve",
        "title": f"Cost of a training step against the number of patients: {label}",
        "experiment": "runtime",
        "note": f"Batches of {ROWS} samples and a small network on one CPU core. A line ends where a step would take "
        f"more than {MOST_MEMORY_MB:,} MB or several seconds.",
        "data": {
            "x": {"label": "training patients", "values": list(PATIENTS), "scale": "log"},
            "y": {"label": label},
            "series": [
                {"name": name, "mean": [None if entry is None else entry[place] for entry in entries]}
                for name, entries in found.items()
            ],
        },
    }
