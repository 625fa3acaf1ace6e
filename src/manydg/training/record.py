"""The record of a run: what ran, on what data, and how it did; and the checkpoints beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from manydg.config import TrainingConfig
from manydg.data.info import EventSpec, TargetSpec
from manydg.errors import ManyDGError, StorageError
from manydg.files import (
    Json,
    JsonObject,
    ParsedJson,
    fields_as_json,
    file_checksum,
    fingerprint,
    read_json,
    verify_checksum,
    with_checksum,
    write_atomically,
    write_json,
)

Metrics: TypeAlias = Mapping[str, float | None]
"""Values by name; None where a metric is undefined."""
Variant: TypeAlias = Mapping[str, str | int | float]
"""What distinguishes a run within its experiment, by name."""

REMEDY = "delete it and run the same command again"
_SCHEMA = 1
COVERED = ("model.safetensors", "calibration.safetensors", "predictions.npz", "split.json", "personal.safetensors")
"""The files of a run whose checksums its record holds."""
KNOWN_LABELS = {"": "", "some": "some labels of the patient known", "earlier": "labels of earlier samples known"}
"""Which labels of a test patient a prediction may have used, and what a table says of it; "" is none."""
_NEEDED = COVERED[:2]
_ALWAYS = {"run", "experiment", "algorithm", "seed", "dataset", "status"}
_FINISHED = {*("target", "samples", "patients", "test"), *("epoch", "selection_rule", "threshold", "threshold_rule")}


_OPTIONAL = (
    *("synthetic", "first_use_seconds", "predict_seconds", "context", "processes", "sites", "curve", "members"),
    *("members_rule", "event", "operating", "experiments", "known_labels"),
)
_OF_FINISHED = (
    *("dataset_hash", "target", "samples", "patients", "selection_rule", "threshold", "threshold_rule", "epoch"),
    *("epochs", "val", "test", "per_patient", "history", "peak_memory_mb", "parameters", "device"),
)


@dataclass(frozen=True)
class EpochEntry:
    """One epoch of a training.

    - ``epoch``: From 1.
    - ``losses``: Mean of each loss term over the epoch's steps.
    - ``val``: Metrics on validation patients; empty without any.
    - ``seconds``: Of the training steps alone.
    - ``order``: In what order the samples were read, where it was not a random one over all of them.
    - ``val_terms``: Loss terms that an algorithm has computed on validation patients to be watched.
    """

    epoch: int
    losses: Mapping[str, float]
    val: Metrics
    seconds: float
    order: str | None = None
    val_terms: Metrics | None = None

    def to_json(self) -> dict[str, Json]:
        return fields_as_json(self, "order", "val_terms")

    @staticmethod
    def from_json(value: Any) -> EpochEntry:
        return EpochEntry(
            epoch=int(value["epoch"]),
            losses=value.get("losses") or {},
            val=value.get("val") or {},
            seconds=float(value.get("seconds") or 0.0),
            order=value.get("order"),
            val_terms=value.get("val_terms"),
        )


@dataclass(frozen=True)
class Counts:
    """How many patients, or samples, train, validate and test."""

    train: int = 0
    val: int = 0
    test: int = 0

    @property
    def total(self) -> int:
        return self.train + self.val + self.test

    @staticmethod
    def from_json(value: Mapping[str, int]) -> Counts:
        return Counts(*(int(value.get(side) or 0) for side in ("train", "val", "test")))


@dataclass(frozen=True)
class MemberEntry:
    """A learner that a model is made of: its share of the weights, and its own metrics on validation patients."""

    name: str
    share: float
    val: Metrics

    @staticmethod
    def from_json(value: Any) -> MemberEntry:
        return MemberEntry(str(value["name"]), float(value["share"]), value["val"])


@dataclass(frozen=True)
class Use:
    """An experiment that a run serves, and what distinguishes the run there."""

    experiment: str
    variant: Variant = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        return fields_as_json(self)

    @staticmethod
    def from_json(value: Any) -> Use:
        return Use(str(value["experiment"]), dict(value.get("variant") or {}))


@dataclass(frozen=True)
class CurvePoint:
    """Continual learning after one step: how many patients were seen, and how well the model does by then."""

    step: int
    patients_seen: int
    val: Metrics
    test: Metrics

    def to_json(self) -> dict[str, Json]:
        return {"step": self.step, "patients seen": self.patients_seen, "val": self.val, "test": self.test}

    @staticmethod
    def from_json(value: Any) -> CurvePoint:
        return CurvePoint(int(value["step"]), int(value["patients seen"]), value["val"], value["test"])


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What ran, on what data, and how it did on patients it had not seen.

    The only thing that studies, tables, statistics and the report read of a run. A run that failed has the status
    ``failed``, an error, and nothing of what only a finished one can have.

    - ``run``: The run's id.
    - ``experiment``, ``variant``: The experiment it was first made for, and what distinguishes it there.
    - ``synthetic``: Whether the dataset's patients are known to be made up.
    - ``config``: With every default filled in, and the backbone, precision and execution that were used.
    - ``selection_rule``, ``threshold_rule``: How the epoch and the decision threshold were chosen.
    - ``epoch``, ``epochs``: The epoch whose weights were kept, and how many there were.
    - ``val``, ``test``: Metrics over all samples.
    - ``per_patient``: Pseudonym of each test patient to metrics and the number of ``samples``.
    - ``seconds``, ``first_use_seconds``: From the labels' check to the last prediction; and, before that, what the
      process spent on imports and first calls, in the run that happened to be its first.
    - ``predict_seconds``: To predict a thousand samples with the trained model: without reading files and without
      making patient context.
    - ``folder``: The run's folder, relative to the results folder it is part of.
    - ``context``: Which of a patient's other samples are shown to the learner; ``mode`` is ``none``, ``offline`` or
      ``causal``.
    - ``processes``: Where several trained together.
    - ``curve``: Of continual learning.
    - ``known_labels``: One of :data:`KNOWN_LABELS`: which labels of a test patient predictions may have used.
    - ``sites``: Pseudonym of each test patient to the patient's site, where whole sites were split.
    - ``members``, ``members_rule``: Of a model of several learners, and why these count.
    - ``event``: Where samples come before or after an event: ``test`` then has every metric before and after its onset
      too, as ``auprc_before`` and ``auprc_after``.
    - ``operating``: Of a binary target, on test patients at the threshold: sensitivity, specificity, predictive values
      and, where there is an event, alarms (:func:`manydg.evaluation.clinical.rates_at_threshold`).
    - ``experiments``: Every use of the run in a results folder; empty outside of one.
    """

    schema: int = _SCHEMA
    run: str
    experiment: str = "train"
    variant: Variant = field(default_factory=dict)
    algorithm: str
    seed: int
    dataset: str
    dataset_hash: str = ""
    synthetic: bool = False
    target: TargetSpec | None = None
    samples: Counts = Counts()
    patients: Counts = Counts()
    config: TrainingConfig
    code_version: str = ""
    selection_rule: str = ""
    threshold: float | None = None
    threshold_rule: str = ""
    epoch: int = 0
    epochs: int = 0
    val: Metrics = field(default_factory=dict)
    test: Metrics = field(default_factory=dict)
    per_patient: Mapping[str, Metrics] = field(default_factory=dict)
    history: tuple[EpochEntry, ...] = ()
    seconds: float | None = None
    first_use_seconds: float | None = None
    predict_seconds: float | None = None
    peak_memory_mb: float | None = None
    parameters: int | None = None
    device: str = ""
    status: str = "ok"
    error: str | None = None
    folder: str = "."
    context: Mapping[str, Json] = field(default_factory=dict)
    processes: int | None = None
    sites: Mapping[str, Json] = field(default_factory=dict)
    known_labels: str = ""
    curve: tuple[CurvePoint, ...] = ()
    members: tuple[MemberEntry, ...] = ()
    members_rule: str = ""
    event: EventSpec | None = None
    operating: Metrics = field(default_factory=dict)
    experiments: tuple[Use, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run came to its end."""
        return self.status == "ok"

    @property
    def headline(self) -> Metrics:
        """The test metrics without those before and after an event's onset apart."""
        return {name: value for name, value in self.test.items() if not name.endswith(("_before", "_after"))}

    @property
    def uses(self) -> tuple[Use, ...]:
        """Every experiment that the run serves, the one it was made for first."""
        return self.experiments or (Use(self.experiment, self.variant),)

    def used_by(self, use: Use) -> RunRecord:
        """The record as one experiment sees it."""
        return dataclasses.replace(self, experiment=use.experiment, variant=use.variant, experiments=())

    def replace(self, **changes: Any) -> RunRecord:
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Json]:
        """The record as JSON values, in the order of the fields; of a failed run only what it has."""
        content = fields_as_json(self, *_OPTIONAL)
        return content if self.ok else {name: value for name, value in content.items() if name not in _OF_FINISHED}

    def write(self, path: Path) -> None:
        """Replace a file by the record, with checksums of itself and of the run's files beside it."""
        content = self.to_json()
        present = [path.with_name(name) for name in COVERED if self.ok and path.with_name(name).exists()]
        files = {file.name: file_checksum(file) for file in present}
        write_json(path, with_checksum(content, files), allow_nan=False)

    def to_line(self) -> str:
        """The record and its checksum as one line of JSON."""
        return json.dumps(with_checksum(self.to_json()))

    @staticmethod
    def from_json(value: Any, source: str | Path = "the record", remedy: str = REMEDY) -> RunRecord:
        """A record from JSON values.

        - ``value``: What :meth:`to_json` gives. What a record of an earlier version lacks has its default.
        - ``source``, ``remedy``: Where it comes from and what to do, for the message if it is no record of a run.
        - raises StorageError: If a key is missing without which there is no record, or a value is of another kind.
        """
        given = value if isinstance(value, Mapping) else {}
        needed = _ALWAYS | (_FINISHED if given.get("status") == "ok" else set())
        if missing := needed - given.keys():
            raise StorageError(f"{source} is damaged, it has no '{min(missing)}': {remedy}")
        try:
            record = _from_values(given)
            _check_values(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ManyDGError) as error:
            raise StorageError(f"{source} is damaged ({error}): {remedy}") from error
        return record

    @staticmethod
    def read(path: Path, remedy: str = REMEDY) -> RunRecord:
        """The record in a file; raises StorageError where there is none, or one that was changed."""
        missing = f"{path} is missing: run the same command again"
        content = read_json(path, remedy=remedy, missing=missing)
        return _verified(content, path, remedy)

    @staticmethod
    def from_line(line: bytes, source: str, remedy: str = REMEDY) -> RunRecord:
        """What :meth:`to_line` gave; raises StorageError where it is none, or was changed."""
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise StorageError(f"{source} is damaged: {remedy}") from None
        return _verified(content, source, remedy)


def _verified(content: ParsedJson, source: str | Path, remedy: str) -> RunRecord:
    record = RunRecord.from_json(content, source, remedy)
    verify_checksum(content, source, remedy)
    return record


def check_files(path: Path, remedy: str = REMEDY, names: Sequence[str] = COVERED) -> None:
    """Raise if a file of a run is not the one that its record in ``path`` was written with.

    Predictions and split may have been deleted; what a decision depends on may not.
    """
    expected = verify_checksum(read_json(path, remedy=remedy), path, remedy)
    for name in names:
        file = path.with_name(name)
        if not file.exists():
            if name in expected and name in _NEEDED:
                raise StorageError(f"{file} is missing: {remedy}")
        elif name not in expected:
            raise StorageError(f"{file} is not of this run, whose {path.name} does not know it: {remedy}")
        elif file_checksum(file) != expected[name]:
            raise StorageError(f"{file} is damaged or was changed, it does not match its checksum: {remedy}")


def _check_values(record: RunRecord) -> None:
    """Raise a plain error if a value is of the wrong kind, or is one that no run can have."""
    for entry in dataclasses.fields(RunRecord):
        value = getattr(record, entry.name)
        expected = _VALUES.get(str(entry.type))
        if expected is not None and not expected(value):
            raise ValueError(f"{entry.name} is {_short(value)}")
    if record.known_labels not in KNOWN_LABELS:
        raise ValueError(
            f"known_labels is {_short(record.known_labels)}, not one of {', '.join(filter(None, KNOWN_LABELS))}"
        )
    if record.threshold is not None and not 0 <= record.threshold <= 1:
        raise ValueError(f"threshold is {record.threshold}, which is no probability")
    counts = (*dataclasses.astuple(record.samples), *dataclasses.astuple(record.patients), record.epoch, record.epochs)
    if min(counts) < 0:
        raise ValueError("a count is negative")
    for name, metrics in record.per_patient.items():
        if not _are_metrics(metrics):
            raise ValueError(f"the metrics of {_short(name)} are {_short(metrics)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_metrics(value: object) -> bool:
    return isinstance(value, Mapping) and all(entry is None or _is_number(entry) for entry in value.values())


_VALUES: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "int | None": lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
    "float | None": lambda value: value is None or _is_number(value),
    "Metrics": _are_metrics,
    "Variant": lambda value: isinstance(value, Mapping),
    "Mapping[str, Metrics]": lambda value: isinstance(value, Mapping),
    "Mapping[str, Json]": lambda value: isinstance(value, Mapping),
}
"""What a field of a record may hold, by its annotation."""
_TYPED = {"target", "samples", "patients", "config", "history", "curve", "members", "event", "experiments"}
_PLAIN = {entry.name: entry for entry in dataclasses.fields(RunRecord) if entry.name not in _TYPED}
_CONFIG_KEYS = {entry.name for entry in dataclasses.fields(TrainingConfig)}


def _from_values(given: Any) -> RunRecord:
    """A record from checked JSON values; a null where there is a default that is not one becomes the default."""
    plain: Any = {
        name: given[name]
        for name, entry in _PLAIN.items()
        if name in given and (given[name] is not None or entry.default is None)
    }
    target, event = given.get("target"), given.get("event")
    config = {key: value for key, value in (given.get("config") or {}).items() if key in _CONFIG_KEYS}
    return RunRecord(
        **plain,
        target=TargetSpec.from_json(target) if target else None,
        samples=Counts.from_json(given.get("samples") or {}),
        patients=Counts.from_json(given.get("patients") or {}),
        config=TrainingConfig.from_mapping({"algorithm": given["algorithm"], "seed": given["seed"]} | config),
        history=tuple(EpochEntry.from_json(entry) for entry in given.get("history") or ()),
        curve=tuple(CurvePoint.from_json(point) for point in given.get("curve") or ()),
        members=tuple(MemberEntry.from_json(member) for member in given.get("members") or ()),
        event=EventSpec.from_json(event) if event else None,
        experiments=tuple(Use.from_json(use) for use in given.get("experiments") or ()),
    )


FEW_PATIENTS = 10


def cautions(records: Sequence[RunRecord], metric: str) -> list[str]:
    """What is too small in some runs to conclude much from, a sentence each; none where nothing is.

    - ``records``: Runs that ended well, on one dataset.
    - ``metric``: The metric that the runs are compared by.
    """
    sizes = [record.patients.test for record in records if record.patients.total]
    notes = []
    if sizes and min(sizes) < FEW_PATIENTS:
        people = "1 patient" if min(sizes) == 1 else f"{min(sizes)} patients"
        dealt = all(record.config.folds for record in records)
        remedy = "Get more patients" if dealt else "Test each patient with compare --repeats, or get more patients"
        notes.append(
            f"a test side has {people}, fewer than {FEW_PATIENTS}: its figures depend on who happens to be in it. "
            f"{remedy}"
        )
    tested = {name for record in records for name in record.per_patient}
    defined = {
        name
        for record in records
        for name, values in record.per_patient.items()
        if (value := values.get(metric)) is not None and math.isfinite(value)
    }
    if 2 * len(defined) < len(tested):
        notes.append(
            f"{metric} is undefined within {len(tested) - len(defined)} of {len(tested)} test patients (one class or "
            f"one value alone, say): figures per patient are of the other {len(defined)}"
        )
    return notes


# Checkpoints: tensors and JSON in one safetensors file, replaced in one step. Nothing is ever unpickled.


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: JsonObject) -> None:
    """Write tensors and JSON values to one file; the old file stays until the new one is whole."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"checksum": checksum(plain), "meta_checksum": fingerprint(meta), **meta})
    try:
        # Not safetensors' save_file: it writes through a temporary file of its own, which a kill leaves behind.
        content = save(plain, metadata={"manydg": text})
    except SafetensorError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    write_atomically(path, content)


def read_tensors(
    path: Path, remedy: str = "delete it and run the same command again"
) -> tuple[dict[str, Tensor], ParsedJson]:
    """Read what :func:`write_tensors` wrote; an error ends in the remedy."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["manydg"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if meta.pop("checksum") != checksum(tensors) or meta.pop("meta_checksum") != fingerprint(meta):
            raise ValueError("its content does not match its checksum")
        return tensors, meta
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: {remedy}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}): {remedy}") from error


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all values, by name; safetensors itself only notices a file of the wrong length."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_optimizer(name: str, optimizer: Optimizer) -> tuple[dict[str, Tensor], JsonObject]:
    """An optimiser's state as named tensors and JSON values."""
    state = optimizer.state_dict()
    entries = {
        f"{name}/{index}/{key}": value for index, entry in state["state"].items() for key, value in entry.items()
    }
    tensors = {path: value for path, value in entries.items() if isinstance(value, Tensor)}
    scalars = {path: value for path, value in entries.items() if not isinstance(value, Tensor)}
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def unpack_optimizer(name: str, optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: ParsedJson) -> None:
    """Put back what :func:`pack_optimizer` took out."""
    state: dict[int, dict[str, object]] = {}
    for source in (tensors, meta["scalars"]):
        for path, value in source.items():
            owner, _, rest = path.partition("/")
            if owner == name:
                index, _, key = rest.partition("/")
                state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": meta["groups"]})
    for weight, entry in optimizer.state.items():
        # A fused update needs the memory layout of the weights; files hold every tensor in its plain layout.
        entry.update({key: _laid_out_as(value, weight) for key, value in entry.items() if isinstance(value, Tensor)})


def _laid_out_as(tensor: Tensor, weight: Tensor) -> Tensor:
    if tensor.shape != weight.shape or tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


def same_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
