"""A run from start to finish: train, choose, score once, and leave a record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.backbones import Backbone, as_backbone, build_backbone
from manydg.data.dataset import DomainDataset, TargetSpec
from manydg.data.overlap import warn_of_overlap
from manydg.data.schema import InputSchema
from manydg.data.splits import Split, check_split, split_named, split_patients
from manydg.data.storage import disk_error, write_atomically
from manydg.errors import DataError, StorageError, unknown_name
from manydg.targets import Target, target_of
from manydg.training.checkpoint import read_tensors, write_tensors
from manydg.training.config import TrainingConfig, fingerprint, pick_device
from manydg.training.inference import predict_probabilities
from manydg.training.loop import CHECKPOINT, TrainingLoop
from manydg.training.record import Predictions, make_record
from manydg.training.reporting import Reporter, Silent
from manydg.training.version import code_version

RECORD, MODEL, PREDICTIONS, SPLIT, IDENTITY = (
    "run.json",
    "model.safetensors",
    "predictions.npz",
    "split.json",
    "identity.json",
)


@dataclass(frozen=True)
class Run:
    """A finished run: the trained algorithm and the record of how it did."""

    algorithm: Algorithm
    record: Mapping[str, Any]
    schema: InputSchema
    folder: Path | None = None
    info: Mapping[str, Any] | None = None

    def predict_proba(self, dataset: DomainDataset) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Probabilities for samples of any patient, ``(samples, K)``."""
        self.schema.check(InputSchema.of(dataset))
        return predict_probabilities(self.algorithm, dataset).numpy()


def train(
    dataset: DomainDataset,
    config: TrainingConfig | None = None,
    *,
    split: Split | None = None,
    backbone: nn.Module | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    name: str = "dataset",
    reporter: Reporter | None = None,
    **options: Any,
) -> Run:
    """Train an algorithm on some patients and say how it does on others.

    Parameters
    ----------
    dataset : DomainDataset
    config : TrainingConfig, optional
        Or give its fields as keywords: ``train(dataset, algorithm="dann", epochs=10)``.
    split : Split, optional
        Who trains, validates and tests; drawn from the seed if not given.
    backbone : nn.Module, optional
        A module of your own instead of ``config.backbone``.
    out : path, optional
        Run folder. An unfinished run found there is continued, a finished one returned.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    name : str
        What to call the dataset in the record.

    Examples
    --------
    >>> from manydg.experiments.demo import make_demo_dataset
    >>> run = train(make_demo_dataset(patients=30, samples=20), epochs=2)
    >>> sorted(run.record["test"])
    ['accuracy', 'f1_macro', 'kappa']
    """
    settled = config if config is not None else TrainingConfig.from_mapping(options)
    folder = None if out is None else Path(out)
    parts = _check_split(dataset, settled, split)
    identity = _identity(dataset, settled, parts, backbone)
    if folder is not None:
        _claim(folder, identity)
        if (folder / RECORD).exists():
            return open_run(folder, backbone=backbone, device=device)
    return _train_and_score(dataset, settled, parts, backbone, folder, device, name, identity, reporter or Silent())


def _train_and_score(
    dataset: DomainDataset,
    config: TrainingConfig,
    split: Split,
    backbone: nn.Module | None,
    folder: Path | None,
    device: str,
    name: str,
    identity: str,
    reporter: Reporter,
) -> Run:
    start = time.perf_counter()
    place = pick_device(device)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    sides = {side: dataset.select(getattr(split, side)) for side in ("train", "val", "test")}
    schema, target = InputSchema.of(dataset), target_of(dataset.target)
    target.check(dataset.targets)
    algorithm = _build(config, schema, target, sides["train"], backbone).to(place)
    metric = _selection_metric(config, target)
    data = {side: _place(part, place) for side, part in sides.items()}
    if algorithm.sampling == "whole":
        algorithm.fit_whole(data["train"], config.seed)
        history, epoch, rule = [], 0, "no epochs to choose from: trained once on the training patients"
        reporter.started(config.algorithm, 0, 1)
    else:
        loop = TrainingLoop(algorithm, data["train"], data["val"], config, metric, folder, reporter)
        loop.run()
        history, epoch, rule = loop.history, loop.best_epoch, f"epoch with the highest validation {metric}"
    predictions = Predictions.of(algorithm, data, split)
    record = make_record(
        config, dataset, sides, predictions, algorithm,
        name=name, run=identity, history=history, epoch=epoch, selection_rule=rule,
        seconds=time.perf_counter() - start, device=str(place),
    )  # fmt: skip
    info = {key: dataset.info[key] for key in ("vocabularies", "settings", "source", "options") if key in dataset.info}
    if folder is not None:
        _write(folder, algorithm, config, schema, record, predictions, split, dataset, info)
    reporter.finished(record)
    return Run(algorithm, record, schema, folder, info)


def _build(
    config: TrainingConfig, schema: InputSchema, target: Target, train: DomainDataset, module: nn.Module | None
) -> Algorithm:
    torch.manual_seed(config.seed * 1_000_003)
    backbone = _backbone(config, schema, module)
    cls = ALGORITHMS.get(config.algorithm)
    algorithm = cls(backbone, target, train.n_patients, cls.settings_from(config.settings))
    # Through the algorithm, because one that has no use for the backbone must not be held to the backbone's demands.
    algorithm.backbone.fit_inputs(train)
    return algorithm


def _backbone(config: TrainingConfig, schema: InputSchema, module: nn.Module | None) -> Backbone:
    if module is not None:
        return as_backbone(module, schema)
    name = auto_backbone(schema) if config.backbone == "auto" else config.backbone
    return build_backbone(name, schema, config.backbone_options)


def auto_backbone(schema: InputSchema) -> str:
    """The backbone that fits the inputs: the paper's for its four tasks, and a table's for anything dense.

    Examples
    --------
    >>> from manydg.data.schema import ColumnSchema
    >>> auto_backbone(InputSchema({"x": ColumnSchema("float32", (48,))}))
    'mlp'
    """
    if "diagnoses" in schema.columns:
        return "gamenet"
    if "event_codes" in schema.columns:
        return "event-transformer"
    signal = schema.columns.get("signal") or schema.columns.get("spectrogram")
    if signal is not None:
        return "sleep-cnn" if signal.shape[0] <= 4 else "seizure-cnn"
    return "tabular" if schema.settings.get("missing") else "mlp"


def _check_split(dataset: DomainDataset, config: TrainingConfig, split: Split | None) -> Split:
    if dataset.n_patients < 3:
        raise DataError(
            f"the dataset has {dataset.n_patients} patient(s): training, validation and test need one each at least"
        )
    parts = split if split is not None else draw_split(dataset, config)
    check_split(parts, dataset)
    warn_of_overlap(dataset, parts)
    return parts


def draw_split(dataset: DomainDataset, config: TrainingConfig) -> Split:
    """The split of a seed. A dataset may name its test patients (``info["test_patients"]``); then only training and
    validation are drawn."""
    reserved = dataset.info.get("test_patients")
    if not reserved:
        return split_patients(dataset, config.ratios, config.seed)
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(reserved)))
    train_share, val_share, _ = config.ratios
    drawn = split_patients(others, (train_share, val_share, 0.0), config.seed)
    return split_named(dataset, train=drawn.patients("train"), val=drawn.patients("val"), test=reserved)


def _selection_metric(config: TrainingConfig, target: Target) -> str:
    metric = config.selection or target.selection
    if metric not in target.metrics:
        raise unknown_name("selection metric", metric, target.metrics)
    return metric


def _place(dataset: DomainDataset, device: torch.device) -> DomainDataset:
    """The data on the GPU where they fit in half of its free memory, else where they are."""
    if device.type != "cuda":
        return dataset
    needed = sum(_bytes(column) for column in dataset.columns.values())
    free, _ = torch.cuda.mem_get_info(device)
    return dataset.to(device) if needed < free / 2 else dataset


def _bytes(column: Any) -> int:
    total = 0
    while not isinstance(column, torch.Tensor):
        total, column = total + column.offsets.nbytes, column.values
    return int(total + column.nbytes)


def _identity(dataset: DomainDataset, config: TrainingConfig, split: Split, backbone: nn.Module | None) -> str:
    custom = None if backbone is None else [type(backbone).__qualname__, str(backbone)]
    sides = [fingerprint(getattr(split, side).tolist()) for side in ("train", "val", "test")]
    return fingerprint(code_version(), dataset.content_hash(), config.to_json(), sides, custom)


def _claim(folder: Path, identity: str) -> None:
    """Make the run folder this run's, or refuse if it is another's."""
    file = folder / IDENTITY
    if file.exists():
        found = json.loads(file.read_text())
        if found["identity"] != identity:
            raise StorageError(
                f"{folder} holds a run of other data, another split, other options or another version of the program: "
                "name another folder"
            )
        return
    if (folder / RECORD).exists() or (folder / CHECKPOINT).exists():
        raise StorageError(f"{folder} holds a run that does not say what it is of: name another folder")
    write_atomically(file, json.dumps({"identity": identity}))


def _write(
    folder: Path,
    algorithm: Algorithm,
    config: TrainingConfig,
    schema: InputSchema,
    record: Mapping[str, Any],
    predictions: Predictions,
    split: Split,
    dataset: DomainDataset,
    info: Mapping[str, Any],
) -> None:
    meta = {
        "config": config.to_json(),
        "schema": schema.to_json(),
        "target": {"kind": dataset.target.kind, "names": list(dataset.target.names)},
        "n_domains": algorithm.n_domains,
        "info": dict(info),
    }
    write_tensors(folder / MODEL, algorithm.state_dict(), meta)
    split.save(folder / SPLIT, dataset)
    partial = folder / f".{PREDICTIONS}.partial-{os.getpid()}.npz"
    try:
        predictions.write(partial)
        partial.replace(folder / PREDICTIONS)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, folder) from error
    write_atomically(folder / RECORD, json.dumps(record, indent=1, allow_nan=False))
    (folder / CHECKPOINT).unlink(missing_ok=True)


def open_run(folder: str | Path, *, backbone: nn.Module | None = None, device: str = "cpu") -> Run:
    """Open a finished run.

    Parameters
    ----------
    folder : path
    backbone : nn.Module, optional
        The module of your own that the run was trained with, freshly built; its weights are filled in.
    """
    path = Path(folder)
    if not (path / RECORD).exists():
        raise StorageError(f"{path} is not a finished run: it has no {RECORD}. Run the training command again")
    tensors, meta = read_tensors(path / MODEL)
    config = TrainingConfig.from_mapping(meta["config"])
    schema = InputSchema.from_json(meta["schema"])
    target = target_of(TargetSpec(meta["target"]["kind"], tuple(meta["target"]["names"])))
    cls = ALGORITHMS.get(config.algorithm)
    algorithm = cls(_backbone(config, schema, backbone), target, meta["n_domains"], cls.settings_from(config.settings))
    algorithm.load_state_dict(tensors)
    algorithm.to(pick_device(device)).eval()
    return Run(algorithm, json.loads((path / RECORD).read_text()), schema, path, meta["info"])
