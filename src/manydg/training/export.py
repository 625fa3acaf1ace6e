"""A trained model as one file that runs without this package: an ONNX graph or an exported PyTorch program.

The graph takes the input columns in the dataset's own units and gives probabilities, so that scaling, spectrograms and
the softmax are inside it and nothing of the preparation can be forgotten. The number of rows is free.

Causal patient context is inside it, too: such a graph takes one further sample of each patient, its time, and the state
of what is known of the patient (:class:`~manydg.data.timeline.PatientState`), and gives the state with it.
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
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm
from manydg.algorithms._forest import Forest
from manydg.data.columns import CATEGORIES
from manydg.data.context import COLUMN, stream_of, unstreamed
from manydg.data.dataset import TRUST, ColumnSchema, InputSchema
from manydg.data.timeline import ORDER
from manydg.errors import ConfigError, StorageError, TrainingError, unknown_name
from manydg.files import ParsedJson, write_atomically
from manydg.training.inference import finite_probabilities
from manydg.training.run import Run, open_run

FORMATS, CONTEXTS = ("onnx", "torch"), ("state", "inputs")
TIME, STATE, NEW_STATE = "time", "state", "new_state"
METADATA = "manydg.json"
TOLERANCE = 1e-4
_OPSET = 18
_ROWS_TRACED, _ROWS_CHECKED, _SAMPLES_CHECKED = 3, (1, 17), 4


class Deployed(nn.Module):
    """An algorithm as a function of plain tensors, in the order of the inputs, to probabilities.

    - ``algorithm``: It is copied, so that the original is not touched.
    - ``schema``: Of what it was trained on.
    - ``outputs``: Width of each output.
    """

    def __init__(self, algorithm: Algorithm, schema: InputSchema) -> None:
        super().__init__()
        self.algorithm = copy.deepcopy(algorithm).cpu().eval()
        self.schema, self.names = schema, tuple(schema.columns)
        self.inputs, self.outputs = dict(schema.columns), {output_name(algorithm): algorithm.target.size}
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


class DeployedStream(Deployed):
    """An algorithm with causal context as a function of one further sample of each patient.

    A sample that is earlier than its patient's last one, or infinite, gets NaN and leaves the state as it was.
    """

    def __init__(self, algorithm: Algorithm, schema: InputSchema) -> None:
        super().__init__(algorithm, schema)
        given = schema.without_context().columns
        self.names = (*given, COLUMN, TRUST)
        self.layout, tables = stream_of(schema)
        self.tables = [self.names.index(name) for name in tables]
        state = ColumnSchema("float64", (self.layout.size,), 0)
        self.inputs = {**given, TIME: ColumnSchema("float64", (), 0), STATE: state}
        self.outputs = {**self.outputs, NEW_STATE: self.layout.size}

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Probabilities ``(batch, K)`` and states ``(batch, size)``, from columns, times ``(batch,)`` and states."""
        *columns, times, state = given
        values = torch.cat([columns[position].flatten(1) for position in self.tables], dim=1)
        context, weight, after = self.layout.step(state, values, times)
        probabilities = super().forward(*columns, context, weight)
        time, samples = times.unsqueeze(1), self.layout.part(state, "samples")
        late = (samples > 0) & (time < self.layout.part(state, "time"))
        valid = torch.isfinite(time) & ~late & ~torch.isinf(values).any(dim=1, keepdim=True)
        return torch.where(valid, probabilities, torch.nan), torch.where(valid, after, state)


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

    - ``difference``: The largest difference found between its probabilities and the model's, over random inputs; of
      values, in standard deviations of the training patients' values.
    - ``metadata``: What the file says of itself: inputs, classes, decision threshold, settings of the data.
    """

    path: Path
    difference: float
    metadata: ParsedJson


def export_run(
    run: str | Path | Run,
    out: str | Path,
    format: str = "onnx",
    *,
    context: str = "state",
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
    context : {"state", "inputs"}
        Of a run with patient context: made by the graph, from a state that it takes and gives, or taken as further
        inputs, which :class:`~manydg.PatientContext` makes.
    backbone, algorithm : str, optional
        Classes of your own that a run folder was trained with, as ``package.module:Class``.
    """
    if context not in CONTEXTS:
        raise unknown_name("way to give context", context, CONTEXTS)
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    path = Path(out)
    if path.is_dir():
        raise StorageError(f"{path} is a folder: name the file to write")
    opened = run if isinstance(run, Run) else open_run(run, backbone=backbone, algorithm=algorithm)
    streamed = context == "state" and "context" in opened.schema.settings
    reason = refusal(opened.algorithm, opened.schema)
    if reason is None and streamed and (reason := unstreamed(opened.schema) or _named_alike(opened.schema)):
        reason += "; train with --context causal, or" if "offline" in reason else ";"
        reason += " export with --context inputs, which takes the context as further inputs that manydg makes"
    if reason:
        raise ConfigError(f"this run cannot be exported: {reason}")
    model = (DeployedStream if streamed else Deployed)(opened.algorithm, opened.schema)
    metadata = describe(opened, model)
    make = _onnx_bytes if format == "onnx" else _torch_bytes
    with _quietly():
        content, loaded = make(model, sample_inputs(model, _ROWS_TRACED), metadata)
    difference = max(_difference(model, loaded, rows) for rows in _ROWS_CHECKED)
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
    if ORDER in schema.columns:
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


def _named_alike(schema: InputSchema) -> str | None:
    taken = [name for name in (TIME, STATE) if name in schema.columns]
    return f"its input '{taken[0]}' has the name of another input" if taken else None


def describe(run: Run, model: Deployed) -> ParsedJson:
    """What whoever runs the file must know, as JSON values; no patient is in it."""
    columns = {n: {"dtype": c.dtype, "shape": ["batch", *c.shape]} for n, c in model.inputs.items()}
    state = {}
    if isinstance(model, DeployedStream):
        fields = [field.to_json() for field in model.layout.fields.values()]
        state = {"state": {"initial": "zeros", "session_gap": model.layout.options.gap, "fields": fields}}
    return {
        "inputs": columns,
        "output": {name: ["batch", width] for name, width in model.outputs.items()},
        **state,
        "target": {"kind": run.algorithm.target.kind, "names": list(run.algorithm.target.spec.names)},
        "threshold": run.record.threshold,
        "algorithm": run.record.algorithm,
        "run": run.record.run,
        "code_version": run.record.code_version,
        "settings": dict(run.schema.settings),
    }


def sample_inputs(model: Deployed, rows: int) -> tuple[Tensor, ...]:
    """Random inputs, the same at every call: normal values, codes 0 and 1, or levels of categories; no state yet."""
    draw = torch.Generator().manual_seed(rows)
    columns = []
    for name, column in model.inputs.items():
        shape, dtype = (rows, *column.shape), getattr(torch, column.dtype)
        if name not in model.names:
            columns.append(torch.zeros(shape, dtype=dtype))
        elif dtype.is_floating_point:
            # Of the size of microvolts, so that spectrograms lie above their floor.
            columns.append(10 * torch.randn(shape, generator=draw).to(dtype))
        else:
            most = torch.tensor(list(model.schema.categories().values())) if name == CATEGORIES else torch.tensor(2)
            columns.append((torch.rand(shape, generator=draw) * most).to(dtype))
    return tuple(columns)


_Runs = Callable[[tuple[Tensor, ...]], list[npt.NDArray[Any]]]


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
    return content, lambda given: _arrays(loaded(*given))


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
    inputs, outputs = list(model.inputs), list(model.outputs)
    program = torch.onnx.export(
        model,
        columns,
        dynamo=True,
        opset_version=_OPSET,
        input_names=inputs,
        output_names=outputs,
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

    def run(given: tuple[Tensor, ...]) -> list[npt.NDArray[Any]]:
        named = {name: column.numpy() for name, column in zip(inputs, given, strict=True) if name in taken}
        return list(session.run(outputs, named))

    return content, run


def _arrays(outputs: Tensor | tuple[Tensor, ...]) -> list[npt.NDArray[Any]]:
    return [each.detach().numpy() for each in ((outputs,) if isinstance(outputs, Tensor) else outputs)]


def _difference(model: Deployed, loaded: _Runs, rows: int) -> float:
    """The largest difference; with a state over some samples, each of which gets the state that the last one gave."""
    given, differences = sample_inputs(model, rows), []
    for _ in range(_SAMPLES_CHECKED):
        with torch.inference_mode():
            expected = _arrays(model(*given))
        computed = loaded(given)
        differences.append(float(np.abs(expected[0] - computed[0]).max()))
        if not isinstance(model, DeployedStream):
            break
        *columns, times, _ = given
        given = (*(each.roll(1, 0) for each in columns), times + 1.0, torch.from_numpy(computed[1]))
    return float(np.max(differences))


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
