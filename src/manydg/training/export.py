"""A trained model as one file that runs without this package: an ONNX graph or an exported PyTorch program.

The graph takes the input columns in the dataset's own units and gives probabilities, so that scaling, spectrograms and
the softmax are inside it and nothing of the preparation can be forgotten. The number of rows is free.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm
from manydg.algorithms._forest import Forest
from manydg.data.columns import CATEGORIES
from manydg.data.dataset import InputSchema
from manydg.errors import ConfigError, StorageError, TrainingError, unknown_name
from manydg.files import ParsedJson, write_atomically
from manydg.training.inference import finite_probabilities
from manydg.training.run import Run, open_run

FORMATS = ("onnx", "torch")
METADATA = "manydg.json"
TOLERANCE = 1e-4
_OPSET = 18
_ROWS_TRACED, _ROWS_CHECKED = 3, (1, 17)


class Deployed(nn.Module):
    """An algorithm as a function of plain tensors, in the order of the columns' names, to probabilities.

    Parameters
    ----------
    algorithm : Algorithm
        It is copied, so that the original is not touched.
    names : tuple of str
        The input columns.
    """

    def __init__(self, algorithm: Algorithm, names: tuple[str, ...]) -> None:
        super().__init__()
        self.algorithm = copy.deepcopy(algorithm).cpu().eval()
        self.names = names
        for parent in list(self.algorithm.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, Forest):
                    setattr(parent, name, WalkedForest(part))

    def forward(self, *columns: Tensor) -> Tensor:
        """Probabilities ``(batch, K)`` of columns ``(batch, ...)``; NaN for a row whose input or output is infinite."""
        logits = self.algorithm.predict(dict(zip(self.names, columns, strict=True))).float()
        probabilities = finite_probabilities(self.algorithm.target, logits)
        for column in columns:
            if column.is_floating_point():
                infinite = torch.isinf(column.flatten(1)).any(dim=1, keepdim=True)
                probabilities = torch.where(infinite, torch.nan, probabilities)
        return probabilities


class WalkedForest(nn.Module):
    """A forest whose walk never looks at a value on the host, so that it can be written down as a graph."""

    def __init__(self, forest: Forest) -> None:
        super().__init__()
        self.forest, self.depth = forest, int(forest.depth)

    def forward(self, values: Tensor) -> Tensor:
        """Scores ``(rows, outputs)`` in float64 of values ``(rows, features)``."""
        forest, rows = self.forest, values.shape[0]
        trees, outputs = forest.roots.shape[0], forest.baseline.shape[0]
        start = forest.baseline.unsqueeze(0).expand(rows, outputs)
        if trees == 0:
            return start.clone()
        missing = values.isnan()
        # Nothing is compared with NaN, whose order differs between runtimes.
        filled = values.masked_fill(missing, 0.0)
        node = forest.roots.unsqueeze(0).expand(rows, trees)
        for _ in range(self.depth):
            feature = forest.feature[node]
            absent = missing.gather(1, feature)
            below = filled.gather(1, feature) <= forest.threshold[node]
            # Not torch.where, which onnxruntime lacks for truth values.
            left = (absent & forest.missing_left[node]) | (~absent & below)
            node = forest.child[2 * node + left.to(torch.int64)]
        # A sum per output as a product: every runtime knows it, and it costs nothing beside the walk.
        of_output = nn.functional.one_hot(forest.output, outputs).to(forest.value.dtype)
        return start + forest.value[node] @ of_output


@dataclass(frozen=True)
class Exported:
    """A file written by :func:`export_run`.

    Attributes
    ----------
    path : Path
    difference : float
        The largest difference found between its probabilities and the model's, over random inputs; of values, in
        standard deviations of the training patients' values.
    metadata : mapping
        What the file says of itself: inputs, classes, decision threshold, settings of the data.
    """

    path: Path
    difference: float
    metadata: ParsedJson


def export_run(
    run: str | Path | Run,
    out: str | Path,
    format: str = "onnx",
    *,
    backbone: str | None = None,
    algorithm: str | None = None,
) -> Exported:
    """Write a finished run's model to a file that needs neither this package nor its data.

    The file is run once beside the model, on inputs drawn at random, before it is put in its place.

    Parameters
    ----------
    run : path or Run
    out : path
    format : {"onnx", "torch"}
        ``onnx`` needs the extra ``manydg[onnx]``. ``torch`` is a program of :func:`torch.export.save`, to be loaded
        with :func:`torch.export.load`; it holds no Python object of this package.
    backbone, algorithm : str, optional
        Classes of your own that a run folder was trained with, as ``package.module:Class``.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    path = Path(out)
    if path.is_dir():
        raise StorageError(f"{path} is a folder: name the file to write")
    opened = run if isinstance(run, Run) else open_run(run, backbone=backbone, algorithm=algorithm)
    if reason := refusal(opened.algorithm, opened.schema):
        raise ConfigError(f"this run cannot be exported: {reason}")
    model = Deployed(opened.algorithm, tuple(opened.schema.columns))
    metadata = describe(opened)
    columns = sample_inputs(opened.schema, _ROWS_TRACED)
    make = _onnx_bytes if format == "onnx" else _torch_bytes
    with _quietly():
        content, loaded = make(model, columns, metadata)
    difference = max(_difference(model, loaded, sample_inputs(opened.schema, rows)) for rows in _ROWS_CHECKED)
    difference /= opened.algorithm.target.unit
    if not difference <= TOLERANCE:
        raise TrainingError(
            f"the {format} program's {output_name(opened.algorithm)} differ from the model's by {difference:.2g}, more "
            f"than {TOLERANCE:g}: nothing was written. Export it in the other format"
        )
    write_atomically(path, content)
    return Exported(path, difference, metadata)


def output_name(algorithm: Algorithm) -> str:
    """What the graph's output is called."""
    return "values" if algorithm.target.numeric else "probabilities"


def refusal(algorithm: Algorithm, schema: InputSchema) -> str | None:
    """Why a model cannot be written as one graph; ``None`` where it can."""
    ragged = sorted(name for name, column in schema.columns.items() if column.nesting)
    if ragged:
        return (
            f"{ragged} have rows of different lengths (visits, events), which the inputs of a graph cannot have; "
            "use manydg.open_run(...).predict_proba, or 'manydg predict' on raw files"
        )
    if algorithm.backbone.crop is not None:
        return (
            "a sequence model reads whole sessions in order, and a graph sees rows without knowing their order; use "
            "manydg.open_run(...).predict_proba, or 'manydg predict' on raw files"
        )
    if algorithm.uses_patients:
        return (
            f"{type(algorithm).__name__} predicts from all of a patient's samples together, and a graph sees rows "
            "without knowing whose they are; use manydg.open_run(...).predict_proba"
        )
    return None


def describe(run: Run) -> ParsedJson:
    """What whoever runs the file must know, as JSON values; no patient is in it."""
    columns = {
        name: {"dtype": column.dtype, "shape": ["batch", *column.shape]} for name, column in run.schema.columns.items()
    }
    return {
        "inputs": columns,
        "output": {output_name(run.algorithm): ["batch", run.algorithm.target.size]},
        "target": {"kind": run.algorithm.target.kind, "names": list(run.algorithm.target.spec.names)},
        "threshold": run.record.threshold,
        "algorithm": run.record.algorithm,
        "run": run.record.run,
        "code_version": run.record.code_version,
        "settings": dict(run.schema.settings),
    }


def sample_inputs(schema: InputSchema, rows: int) -> tuple[Tensor, ...]:
    """Random columns of a schema, the same at every call: normal values, codes 0 and 1, or levels of categories."""
    draw = torch.Generator().manual_seed(rows)
    columns = []
    for name, column in schema.columns.items():
        shape, dtype = (rows, *column.shape), getattr(torch, column.dtype)
        if dtype.is_floating_point:
            # Of the size of microvolts, so that spectrograms lie above their floor.
            columns.append(10 * torch.randn(shape, generator=draw).to(dtype))
        else:
            most = torch.tensor(list(schema.categories().values())) if name == CATEGORIES else torch.tensor(2)
            columns.append((torch.rand(shape, generator=draw) * most).to(dtype))
    return tuple(columns)


_Runs = Callable[[tuple[Tensor, ...]], Any]


def _dynamic_rows(columns: tuple[Tensor, ...]) -> tuple[tuple[dict[int, Any], ...]]:
    rows = torch.export.Dim("batch")
    return (tuple({0: rows} for _ in columns),)


def _torch_bytes(model: Deployed, columns: tuple[Tensor, ...], metadata: ParsedJson) -> tuple[bytes, _Runs]:
    program = torch.export.export(model, columns, dynamic_shapes=_dynamic_rows(columns))
    for node in program.graph.nodes:
        # Where in this machine's files it comes from.
        node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA: json.dumps(metadata)})
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, lambda given: loaded(*given).detach().numpy()


def _onnx_bytes(model: Deployed, columns: tuple[Tensor, ...], metadata: ParsedJson) -> tuple[bytes, _Runs]:
    # It looks up its maker's host otherwise, from its import on; whoever wants that may set the variable.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it and would fail with a message of its own
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs the package '{error.name}': pip install 'manydg[onnx]', or export with --format torch"
        ) from None
    output = output_name(model.algorithm)
    program = torch.onnx.export(
        model,
        columns,
        dynamo=True,
        opset_version=_OPSET,
        input_names=list(model.names),
        output_names=[output],
        dynamic_shapes=_dynamic_rows(columns),
        verbose=False,
    )
    assert program is not None
    # The exporter notes for every node where in this machine's files it comes from.
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.model.metadata_props["manydg"] = json.dumps(metadata)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    taken = {entry.name for entry in session.get_inputs()}

    def run(given: tuple[Tensor, ...]) -> Any:
        named = {name: column.numpy() for name, column in zip(model.names, given, strict=True) if name in taken}
        return session.run([output], named)[0]

    return content, run


def _difference(model: Deployed, loaded: _Runs, columns: tuple[Tensor, ...]) -> float:
    with torch.inference_mode():
        expected = model(*columns).numpy()
    return float(np.abs(expected - loaded(columns)).max())


@contextmanager
def _quietly() -> Iterator[None]:
    """Exporters talk of operators of other packages and of their own future; none of it is the user's concern."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
