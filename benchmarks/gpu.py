"""All GPU figures in one call: seconds per epoch at the paper's size, checks that fast and plain training agree.

    python -m benchmarks.gpu [--out FOLDER] [--check] [--seeds] [--tasks NAME ...] [--epochs N] [--small]

Data are made on the GPU. Every line of the table is the median epoch after the first, without evaluation. The first
epoch holds what is done once (warming up, capturing, compiling) and is given apart. Epochs with the data on the host
and predictions per second come with it. ``--seeds`` trains five seeds side by side.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import machine
from benchmarks.tasks import TASKS, Task, model
from manydg.algorithms import Algorithm
from manydg.backbones import BACKBONES
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.errors import ManyDGWarning
from manydg.studies.study import Study, grid
from manydg.training.execution.memory import place
from manydg.training.fit import Silent, TrainingLoop
from manydg.training.inference import predict_probabilities
from manydg.training.record import RunRecord

DEVICE = torch.device("cuda")
_LEAST_SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    task: str
    algorithm: str
    precision: str = "auto"
    execution: str = "auto"


CASES = [
    Case("drugs", "manydg", execution="captured"),
    Case("drugs", "base", execution="compiled"),
    Case("drugs", "manydg", execution="compiled"),
    Case("readmission", "manydg", execution="captured"),
    Case("readmission", "base", execution="compiled"),
    Case("readmission", "manydg", execution="compiled"),
    Case("seizure", "base", execution="compiled"),
    Case("seizure", "manydg", execution="compiled"),
    Case("seizure", "manydg", execution="captured"),
    Case("sleep", "base", execution="compiled"),
    Case("sleep", "manydg", execution="compiled"),
]
STREAMED = ("seizure", "sleep")
TRAININGS = (
    ("drugs", 3_000, "deterministic", 2),
    ("drugs", 12_000, "captured", 12),
    ("seizure", 13_200, "compiled", 16),
)
"""Task, samples, execution and epochs: one to compare bits, the others as ``auto`` would do them in a long training."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--epochs", type=int, default=3, help="epochs per line, the first of which is given apart")
    parser.add_argument("--check", action="store_true", help="also compare learning curves of fast and plain training")
    parser.add_argument("--seeds", action="store_true", help="also train five seeds side by side")
    parser.add_argument("--only", default="", help="only lines whose algorithm, precision or execution this names")
    parser.add_argument("--skip", default="none", help="leave such lines out")
    parser.add_argument("--small", action="store_true", help="a hundredth of the samples: does everything run?")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use")
    warnings.simplefilter("always", ManyDGWarning)
    start = time.perf_counter()
    results: dict[str, Any] = {"machine": machine(), "ceilings": ceilings(), "epochs": [], "checks": []}
    print(json.dumps(results["machine"] | results["ceilings"]), flush=True)
    for name in arguments.tasks:
        samples = TASKS[name].samples // (100 if arguments.small else 1)
        cases = [case for case in CASES if case.task == name and _wanted(case, arguments)]
        # Short epochs are measured more often: their first ones still meet lengths that are new.
        epochs = max(arguments.epochs, math.ceil(_LEAST_SECONDS / TASKS[name].target))
        results["epochs"] += time_task(TASKS[name], samples, cases, epochs)
        _write(arguments.out, results, start)
    results["streamed"] = [streamed(name) for name in STREAMED if name in arguments.tasks]
    results["inference"] = inference()
    _write(arguments.out, results, start)
    for name in arguments.tasks if arguments.check else []:
        results["checks"].append(check(name, TASKS[name]))
        _write(arguments.out, results, start)
    if arguments.seeds:
        torch.cuda.empty_cache()
        results["seeds"] = five_seeds()
        _write(arguments.out, results, start)
    print_table(results)


def _wanted(case: Case, arguments: argparse.Namespace) -> bool:
    names = vars(case).values()
    return arguments.skip not in names and (not arguments.only or arguments.only in names)


def ceilings() -> dict[str, float]:
    """What the card does at most: bytes of a large copy and operations of a large matrix product, per second."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    copy = _median_ms(partial(target.copy_, source))
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = _median_ms(partial(torch.matmul, left, right))
    del source, target
    torch.cuda.empty_cache()
    return {"copy TB/s": 8 * (1 << 30) / copy / 1e9, "bf16 TFLOP/s": 2 * 8192**3 / product / 1e9}


def time_task(task: Task, samples: int, cases: list[Case], epochs: int) -> list[dict[str, Any]]:
    """Seconds per epoch of every case; the data are made once."""
    if not cases:
        return []
    start = time.perf_counter()
    data = task.make(samples, DEVICE, 0)
    placed: DomainDataset | None = None
    lines = []
    for case in cases:
        config, algorithm = _build(task, case, data, epochs)
        placed = placed if placed is not None else place(data, algorithm, DEVICE)
        torch.cuda.synchronize()
        if not lines:
            print(f"{case.task}: data ready after {time.perf_counter() - start:.1f} s, {placed}", flush=True)
        torch.cuda.reset_peak_memory_stats()
        try:
            loop = TrainingLoop(algorithm, placed, None, config, "", None, Silent())
            loop.run()
        except Exception as error:  # noqa: BLE001 - one line that fails must not cost the others
            print(case, type(error).__name__, str(error)[:2000], flush=True)
            continue
        seconds = [entry.seconds for entry in loop.history]
        line = {
            **vars(case),
            "speed": vars(loop.speed),
            "samples": samples,
            "batch": task.batch_size,
            "first": seconds[0],
            "epoch": statistics.median(seconds[1:]),
            "epochs": seconds,
            "loss": loop.history[-1].losses["supervised"],
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
        lines.append(line)
        print(_row(line, task), flush=True)
        del loop, algorithm
        gc.collect()
        torch.cuda.empty_cache()
    return lines


def streamed(name: str) -> dict[str, Any]:
    """Seconds per epoch with data on the host and on the GPU: a tenth of the samples, spectrograms in every step."""
    task = TASKS[name]
    data = task.make(task.samples // 10, DEVICE, 1)
    found: dict[str, Any] = {"task": name, "samples": len(data)}
    for where, there in (("on the host", data.to("cpu")), ("on the GPU", data)):
        config, algorithm = _build(task, Case(name, "manydg", execution="captured"), data, 4)
        loop = TrainingLoop(algorithm, there, None, config, "", None, Silent())
        loop.run()
        found[where] = [entry.seconds for entry in loop.history]
    print(json.dumps(found), flush=True)
    return found


def check(name: str, task: Task) -> dict[str, Any]:
    """Learning curves of fast and of plain float32 training on a hundredth of the data, three seeds each.

    Fast is compiled where a long training would be, else captured. Both see the same samples in the same order; dropout
    and rounding differ. Deterministic training is done twice and must give the same bits. Plain training with the data
    on the host, sent ahead batch by batch, must give the same first epoch.
    """
    samples, epochs = max(2000, task.samples // 80), 3
    data = task.make(samples, DEVICE, 1)
    fast = "compiled" if BACKBONES.get(task.backbone).compiled_gain else "captured"
    curves: dict[str, list[list[float]]] = {"fast": [], "plain": []}
    for seed in range(3):
        for kind, case in (
            ("fast", Case(name, "manydg", execution=fast)),
            ("plain", Case(name, "manydg", "float32", "plain")),
        ):
            curves[kind].append(_curve(task, case, data, epochs, seed))
    exact = [_curve(task, Case(name, "manydg", "auto", "deterministic"), data, 1, 0) for _ in range(2)]
    streamed = _curve(task, Case(name, "manydg", "float32", "plain"), data.to("cpu"), 1, 0, stay=True)
    last = {kind: [curve[-1] for curve in found] for kind, found in curves.items()}
    gap = abs(statistics.mean(last["fast"]) - statistics.mean(last["plain"]))
    spread = max(statistics.stdev(last["plain"]), statistics.stdev(last["fast"]))
    result = {
        "task": name,
        "samples": samples,
        "curves": curves,
        "gap of the last supervised loss": gap,
        "spread over seeds": spread,
        "agree": gap <= 2 * spread + 0.01 * statistics.mean(last["plain"]),
        "deterministic twice the same": exact[0] == exact[1],
        "first epoch, streamed from the host": streamed[0],
        "streamed agrees": abs(streamed[0] - curves["plain"][0][0]) <= 0.002 * abs(curves["plain"][0][0]),
    }
    print(json.dumps(result), flush=True)
    return result


# Predictions per second


def inference(device: str = "cuda", samples: int = 12_000) -> dict[str, Any]:
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
    for _ in range(5):
        start = time.perf_counter()
        predict_probabilities(algorithm, data)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# Five seeds at the same time


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


# What the parts share


def _curve(task: Task, case: Case, data: DomainDataset, epochs: int, seed: int, *, stay: bool = False) -> list[float]:
    """Supervised loss of each epoch; with data that stay where they are, or are placed as training places them."""
    config, algorithm = _build(task, case, data, epochs, seed)
    placed = data if stay else place(data, algorithm, DEVICE)
    loop = TrainingLoop(algorithm, placed, None, config, "", None, Silent())
    loop.run()
    return [entry.losses["supervised"] for entry in loop.history]


def _build(task: Task, case: Case, data: DomainDataset, epochs: int, seed: int = 0) -> tuple[TrainingConfig, Algorithm]:
    config = TrainingConfig(
        algorithm=case.algorithm, backbone=task.backbone, epochs=epochs, batch_size=task.batch_size, lr=task.lr,
        seed=seed, precision=case.precision, execution=case.execution,
    )  # fmt: skip
    torch.manual_seed(seed)
    return config, model(task, case.algorithm, data, DEVICE)


def _median_ms(action: Any, repeats: int = 10) -> float:
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _row(line: dict[str, Any], task: Task) -> str:
    speed = line["speed"]
    steps = math.ceil(line["samples"] / line["batch"])
    return (
        f"{line['task']:12s} {line['algorithm']:8s} {speed['precision']:8s} {speed['execution']:10s} "
        f"{line['epoch']:7.3f} s/epoch (target {task.target:g}), {1e3 * line['epoch'] / steps:6.3f} ms/step, "
        f"{1e3 * line['epoch'] / line['samples']:.5f} s/1000, first {line['first']:6.2f}, {line['peak_gb']:5.1f} GB, "
        f"loss {line['loss']:.3f}"
    )


def print_table(results: dict[str, Any]) -> None:
    for line in results["epochs"]:
        print(_row(line, TASKS[line["task"]]))
    of_base = {_kind(line): line["epoch"] for line in results["epochs"] if line["algorithm"] == "base"}
    for line in results["epochs"]:
        if line["algorithm"] != "base" and _kind(line) in of_base:
            print(f"{' '.join(_kind(line))}: {line['algorithm']} / base {line['epoch'] / of_base[_kind(line)]:.2f}")
    for line in results.get("streamed", []):
        host, device = ([round(seconds, 3) for seconds in line[where]] for where in ("on the host", "on the GPU"))
        print(f"{line['task']:12s} {line['samples']} samples, s/epoch: data on the host {host}, on the GPU {device}")
    for name, found in results.get("inference", {}).items():
        print(f"{name:12s} " + ", ".join(f"{what} {value:,.1f}" for what, value in found.items()))
    for line in results["checks"]:
        print(
            f"{line['task']:12s} agree {line['agree']}, deterministic {line['deterministic twice the same']}, "
            f"streamed {line['streamed agrees']}"
        )
    for name, found in results.get("seeds", {}).items():
        print(f"{name}: five seeds side by side take {found['ratio']:.2f} times as long as one")


def _kind(line: dict[str, Any]) -> tuple[str, str]:
    return line["task"], line["speed"]["execution"]


def _write(out: Path, results: dict[str, Any], start: float) -> None:
    results["seconds"] = time.perf_counter() - start
    print(f"{results['seconds']:.0f} s so far", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
