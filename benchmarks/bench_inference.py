"""Predictions per second, spectrogram and scaling included: the model itself, its PyTorch program, and ONNX.

One thread each, because threads that wait for one another beside other programs would be measured instead, and by
processor seconds, which on a quiet machine are those of the clock. On a machine with a GPU the model is measured there
too, by the clock. Weights are as they come, because their values do not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST_SECONDS = 1.0
ON_GPU = "PyTorch on GPU, host to host"


def main(out: Path) -> dict[str, Any]:
    """Samples per second by model and runtime, with batches of a usual size and one sample at a time."""
    results: dict[str, Any] = {}
    torch.set_num_threads(1)
    for task, run in models().items():
        columns = inputs_of(run, 256)
        for runtime, predict in runtimes(run, out / f"exported-{task}").items():
            clock = time.perf_counter if runtime == ON_GPU else time.process_time
            results[f"{task}, {runtime}, samples/s in batches of 256"] = speed(predict, columns, clock)
            alone = tuple(column[:1] for column in columns)
            results[f"{task}, {runtime}, ms for one sample"] = 1000 / speed(predict, alone, clock)
    return results


def models() -> dict[str, Any]:
    """Runs of one epoch on random data of the paper's shapes."""
    from manydg.data.dataset import from_arrays
    from manydg.training.run import train

    rng = np.random.default_rng(0)
    who, label = np.repeat(np.arange(12), 4), rng.integers(0, 3, 48)
    shapes = {"table of 48": (48,), "sleep 2 x 3000": (2, 3000), "seizure 16 x 2000": (16, 2000)}
    found = {}
    for task, shape in shapes.items():
        column = "x" if len(shape) == 1 else "signal"
        data = from_arrays({column: (20 * rng.normal(size=(48, *shape))).astype(np.float32)}, label, who)
        found[task] = train(data, epochs=1, batch_size=32, device="cpu")
    return found


def inputs_of(run: Any, rows: int) -> tuple[Tensor, ...]:
    from manydg.training.export import sample_inputs

    return sample_inputs(run.schema, rows)


def runtimes(run: Any, place: Path) -> dict[str, Callable[[tuple[Tensor, ...]], Any]]:
    """What gives predictions, by name."""
    from manydg.training.export import Deployed, export_run

    model = Deployed(run.algorithm, tuple(run.schema.columns))
    program = torch.export.load(export_run(run, place.with_suffix(".pt2"), "torch").path).module()
    found: dict[str, Callable[[tuple[Tensor, ...]], Any]] = {
        "PyTorch on CPU": lambda columns: model(*columns),
        "exported PyTorch on CPU": lambda columns: program(*columns),
    }
    if torch.cuda.is_available():
        on_gpu = Deployed(run.algorithm, tuple(run.schema.columns)).cuda()
        found[ON_GPU] = lambda columns: on_gpu(*(c.cuda() for c in columns)).cpu()
    try:
        import onnxruntime
    except ImportError:
        return found
    path = export_run(run, place.with_suffix(".onnx"), "onnx").path
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = list(run.schema.columns)
    found["onnxruntime on CPU"] = lambda columns: session.run(
        None, {name: column.numpy() for name, column in zip(names, columns, strict=True)}
    )
    return found


def speed(
    predict: Callable[[tuple[Tensor, ...]], Any], columns: tuple[Tensor, ...], clock: Callable[[], float]
) -> float:
    """Rows per second, after a first call that is not counted."""
    with torch.inference_mode():
        predict(columns)
        calls, start = 0, clock()
        while (seconds := clock() - start) < LEAST_SECONDS:
            predict(columns)
            calls += 1
    return calls * len(columns[0]) / seconds
