"""Seconds per epoch of every method (appendix B.2), and the cost of a step against the number of patients."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manydg.algorithms import ALGORITHMS, Algorithm, Optimizers, build_algorithm
from manydg.backbones import build_backbone
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.sampling import PATIENTS_PER_EPISODE
from manydg.studies.figure_data import FIGURES, Axis, CellTable, Curve, FigureData, Line, XAxis, read_figure
from manydg.studies.study import Experiment, PlannedRun, Record, Request, mean_and_sd
from manydg.targets import target_of
from manydg.training.execution.memory import memory_of_machine

_FIGURES = {
    "patients_step_time": ("milliseconds", "milliseconds per step"),
    "patients_step_memory": ("megabytes", "megabytes"),
}
"""The figures by file name: what of a cost they show, and its label."""
PATIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
_ROWS, _STEPS = 256, 5
_SLOWEST_STEP = 3.0
_SHARE_OF_MEMORY = 0.25
_MOST_MEMORY_MB = 5_000.0


@dataclass(frozen=True)
class StepCost:
    """Processor milliseconds of a training step, and the megabytes that training takes."""

    milliseconds: float
    megabytes: float


Costs = dict[str, list["StepCost | None"]]


def costs_by_patients(names: Iterable[str], patients: Sequence[int]) -> Costs:
    """What a step of each algorithm costs at each number of patients; ``None`` from where memory or patience end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {name: _costs(name, patients) for name in names}
    finally:
        torch.set_num_threads(before)


def figures_of(costs: Costs, patients: Sequence[int]) -> dict[str, FigureData]:
    """The two curves for the report, by file name."""
    made = {}
    for name, (field, label) in _FIGURES.items():
        lines = [
            Line(algorithm, [None if cost is None else getattr(cost, field) for cost in steps])
            for algorithm, steps in costs.items()
        ]
        made[name] = FigureData(
            f"Cost of a training step against the number of patients: {label}",
            Curve(XAxis("training patients", list(patients), "log"), Axis(label, "log"), lines),
            "runtime",
            note=f"Batches of {_ROWS} made-up samples and a small network on one CPU core: a perceptron, or for "
            "methods on feature maps a small sleep network. A line ends where a step would take more than "
            f"{most_memory():,.0f} MB or several seconds.",
        )
    return made


def most_memory() -> float:
    """Megabytes that a step may take."""
    return min(_MOST_MEMORY_MB, _SHARE_OF_MEMORY * memory_of_machine() / 2**20)


def _costs(name: str, patients: Sequence[int]) -> list[StepCost | None]:
    data, backbone, options = _inputs(name)
    costs: list[StepCost | None] = []
    for count in patients:
        last, before = (costs or [None])[-1], (costs[-2:-1] or [None])[0]
        growth = 1.0 if last is None or before is None else last.megabytes / before.megabytes
        ends = last is not None and (last.megabytes * growth > most_memory() or last.milliseconds > 1e3 * _SLOWEST_STEP)
        if ends or (costs and last is None):
            costs.append(None)
            continue
        network = build_backbone(backbone, InputSchema.of(data), options)
        network.fit_inputs(data)
        algorithm = build_algorithm(name, network, target_of(data.target), count)
        costs.append(_measure(algorithm, _batch(algorithm, data, count)))
    return costs


def _inputs(name: str) -> tuple[DomainDataset, str, Mapping[str, int]]:
    """Made-up data, and the first small backbone on them that the algorithm takes."""
    rng, label, who = np.random.default_rng(0), np.arange(_ROWS) % 5, np.arange(_ROWS) // 2
    table = from_arrays(rng.normal(size=(_ROWS, 16)), label, who)
    options = {"hidden": 64, "layers": 1, "width": 64}
    perceptron = build_backbone("mlp", InputSchema.of(table), options)
    if ALGORITHMS.get(name).refuses(target_of(table.target), perceptron) is None:
        return table, "mlp", options
    maps = rng.normal(size=(_ROWS, 1, 24, 24)).astype(np.float32)
    return from_arrays({"spectrogram": maps}, label, who), "sleep-cnn", {}


def _batch(algorithm: Algorithm, data: DomainDataset, patients: int) -> Batch:
    """A batch as the algorithm's sampling gives it, of patients from all over the range."""
    rng, pairs = np.random.default_rng(0), 0
    if algorithm.sampling in ("episodes", "environments"):
        who = np.arange(_ROWS) * PATIENTS_PER_EPISODE // _ROWS
        codes = rng.choice(patients, PATIENTS_PER_EPISODE, replace=False)[who]
    elif algorithm.sampling in ("pairs", "random-pairs"):
        pairs = _ROWS // 2
        codes = np.tile(rng.integers(0, patients, pairs), 2)
    else:
        codes = rng.integers(0, patients, _ROWS)
    whole = data.take(torch.arange(_ROWS))
    return Batch(whole.inputs, whole.targets, torch.from_numpy(codes), pairs)


def _measure(algorithm: Algorithm, batch: Batch) -> StepCost:
    algorithm.train()
    optimizers = algorithm.optimizers(1e-3, 1e-5)
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        algorithm.step(batch, optimizers)
    times: list[float] = []
    while len(times) < _STEPS and sum(times) <= 2 * _SLOWEST_STEP:
        # Processor time of one thread: what else the machine does is no matter of the algorithm's.
        start = time.process_time()
        algorithm.step(batch, optimizers)
        times.append(time.process_time() - start)
    return StepCost(1e3 * min(times), (_held(algorithm, optimizers) + kept) / 2**20)


def _held(algorithm: Algorithm, optimizers: Optimizers) -> int:
    """Bytes that stay from step to step."""
    weights = list(algorithm.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    states = [
        value
        for optimizer in optimizers.values()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.nbytes for tensor in (*weights, *gradients, *states, *algorithm.buffers()))


PAPER_EPOCHS, DROPPED = 23, 3
NAMES = {"mldg": "MLDG (equivalent)"}


class Runtime(Experiment):
    """23 epochs of each method one after the other, the first three dropped; and a step against the number of patients.

    The paper's MLDG draws episodes, so that its time per sample is multiplied by the number of training samples to get
    an equivalent epoch. Here an epoch of episodes holds every training sample once: the product is the epoch's time.
    """

    name = "runtime"
    title = "Running time"
    workers = 1

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("runtime", request.options.of(name, 0).replace(epochs=request.timed_epochs), procedure="timing")
            for name in request.stepwise
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        rows = []
        for record in records:
            seconds = [entry.seconds for entry in record.history]
            mean, sd = mean_and_sd(seconds[min(DROPPED, len(seconds) - 1) :])
            rows.append([NAMES.get(record.algorithm, record.algorithm), mean, sd, record.device])
        columns = ["algorithm", "seconds per epoch", "sd over epochs", "device"]
        note = "MLDG's episodes of an epoch hold every training sample once, so that its time is the equivalent time."
        table = FigureData(self.title, CellTable(columns, rows), "runtime", note=note)
        # A study that is only to be tried out need not wait for a million patients.
        patients = PATIENTS[: None if request.timed_epochs >= PAPER_EPOCHS else 3]
        names = [record.algorithm for record in records]
        return {"runtime": table, **_against_patients(names, patients, folder)}

    def scaled(self, request: Request) -> str:
        if request.timed_epochs == PAPER_EPOCHS:
            return ""
        return f"The paper times {PAPER_EPOCHS} epochs; here it is {request.timed_epochs}."


def _against_patients(algorithms: Sequence[str], patients: Sequence[int], folder: Path) -> dict[str, FigureData]:
    """Cost of a step against the number of patients, which no dataset changes: measured once for a folder."""
    blank = figures_of({}, patients)
    made: dict[str, FigureData] = {}
    for name, figure in blank.items():
        for file in sorted((folder / FIGURES).glob(f"*{name}.json")):
            data = read_figure(file).data
            if not isinstance(data, Curve):
                continue
            measured = {line.name for line in data.series}
            if set(algorithms) <= measured and set(patients) <= set(data.x.values):
                made[name] = replace(figure, data=data)
    if len(made) == len(blank):
        return made
    return figures_of(costs_by_patients(algorithms, patients), patients)
