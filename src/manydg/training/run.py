"""A run from start to finish: train, choose, score once, and leave a record."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from manydg.algorithms import Algorithm
from manydg.backbones import SingleInput
from manydg.code_version import code_version
from manydg.config import TrainingConfig, pick_device
from manydg.data.dataset import DomainDataset
from manydg.data.info import TargetSpec
from manydg.data.schema import InputSchema
from manydg.data.splits import Split, check_split, split_named, split_patients, warn_of_overlap
from manydg.errors import DataError, StorageError
from manydg.evaluation.metrics import choose_threshold, score, score_patients
from manydg.files import (
    Json,
    fingerprint,
    read_json,
    refuse_dataset_folder,
    remove_partial_files,
    replacing,
    write_json,
)
from manydg.machine import peak_memory
from manydg.targets import target_of
from manydg.training.checkpoint import read_tensors, write_tensors
from manydg.training.execution.distributed import by_leader, current_team
from manydg.training.fit import CHECKPOINT, Fitted, Reporter, Silent, fit, rebuild
from manydg.training.inference import predict_probabilities
from manydg.training.patient_context import as_trained, with_context
from manydg.training.record import TEST, VAL, Counts, Predictions, RunRecord
from manydg.training.reliability import fit_calibration, write_calibration

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
    record: RunRecord
    schema: InputSchema
    folder: Path | None = None
    info: Mapping[str, Any] | None = None

    def predict_proba(self, dataset: DomainDataset) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Probabilities for samples of any patient, ``(samples, K)``.

        Where the run was trained with patient context, that of each patient is made from the samples given here.
        """
        return predict_probabilities(self.algorithm, self.prepare(dataset)).numpy()

    def prepare(self, dataset: DomainDataset) -> DomainDataset:
        """The dataset as the run's algorithm takes it: checked, and with the patient context it was trained with."""
        prepared = as_trained(dataset, self.schema, self.algorithm.backbone)
        self.schema.check(InputSchema.of(prepared))
        return prepared


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
    >>> from manydg.data.build import from_arrays
    >>> X = np.random.default_rng(0).normal(size=(240, 4))
    >>> data = from_arrays(X, X[:, 0] > 0, np.repeat(np.arange(12), 20))
    >>> run = train(data, epochs=2)
    >>> sorted(run.record.test)
    ['auprc', 'auroc', 'f1', 'kappa']
    """
    settled = config if config is not None else TrainingConfig.from_mapping(options)
    folder = None if out is None else Path(out)
    parts = _check_split(dataset, settled, split)
    identity = _identity(dataset, settled, parts, backbone)
    if folder is not None:
        by_leader(partial(_claim, folder, identity))
        if (folder / RECORD).exists():
            (folder / CHECKPOINT).unlink(missing_ok=True)
            return open_run(folder, backbone=backbone, device=device)
    try:
        return _train_and_score(dataset, settled, parts, backbone, folder, device, name, identity, reporter or Silent())
    except BaseException:
        if folder is not None and ((team := current_team()) is None or team.leads):
            _give_back(folder)
        raise


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
    target_of(dataset.target).check(dataset.targets)
    shown = with_context(dataset, config, place, backbone, split.train)
    sides = {side: shown.select(getattr(split, side)) for side in ("train", "val", "test")}
    fitted = fit(
        config, sides["train"], sides["val"], place, backbone=backbone, folder=folder, reporter=reporter
    )  # fmt: skip
    predictions = Predictions.of(fitted.algorithm, sides, split)
    schema = InputSchema.of(shown)
    # Adapting to a patient at prediction is context too: all samples of the patient that are there.
    by_algorithm = {"mode": "offline", "by": "algorithm"} if fitted.algorithm.uses_patients else {"mode": "none"}
    team = current_team()
    record = make_record(
        config, dataset, sides, predictions, fitted,
        name=name, run=identity, seconds=time.perf_counter() - start, device=str(place),
    ).replace(
        context=schema.settings.get("context", by_algorithm), processes=None if team is None else team.size
    )  # fmt: skip
    known = dataset.info.to_json()
    info: dict[str, Json] = {key: known[key] for key in ("vocabularies", "settings") if key in known}
    options = dataset.info.provenance.options if dataset.info.provenance else {}
    info["source"] = dataset.info.source
    # Names of columns, by which a later table can say which rows are of one patient, and when.
    info["roles"] = {role: options.get(role) for role in ("patient", "time", "session")}
    if folder is not None:
        calibration = fit_calibration(fitted.algorithm, sides, predictions)
        by_leader(partial(write_calibration, folder, calibration))
        by_leader(partial(_write, folder, fitted.algorithm, config, schema, record, predictions, split, dataset, info))
    reporter.finished(record)
    return Run(fitted.algorithm, record, schema, folder, info)


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
    """The split of a seed. A dataset may name its test patients (``info.test_patients``); then only training and
    validation are drawn."""
    reserved = dataset.info.test_patients
    if not reserved:
        return split_patients(dataset, config.ratios, config.seed)
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(reserved)))
    train_share, val_share, _ = config.ratios
    drawn = split_patients(others, (train_share, val_share, 0.0), config.seed)
    return split_named(dataset, train=drawn.patients("train"), val=drawn.patients("val"), test=reserved)


def _identity(dataset: DomainDataset, config: TrainingConfig, split: Split, backbone: nn.Module | None) -> str:
    custom = None if backbone is None else [type(backbone).__qualname__, str(backbone)]
    sides = [fingerprint(getattr(split, side).tolist()) for side in ("train", "val", "test")]
    return fingerprint(code_version(), dataset.content_hash(), config.to_json(), sides, custom)


def _claim(folder: Path, identity: str) -> None:
    """Make the run folder this run's, or refuse if it is another's."""
    file = folder / IDENTITY
    refuse_dataset_folder(folder)
    remove_partial_files(folder)
    if file.exists():
        remedy = f"name another folder, or delete {folder} and run again"
        if read_json(file, remedy=remedy).get("identity") != identity:
            raise StorageError(
                f"{folder} holds a run of other data, another split, other options or another version of the program: "
                "name another folder"
            )
        return
    if (folder / RECORD).exists() or (folder / CHECKPOINT).exists():
        raise StorageError(f"{folder} holds a run that does not say what it is of: name another folder")
    write_json(file, {"identity": identity}, indent=None)


def _give_back(folder: Path) -> None:
    """Let go of the folder of a run that failed before it left anything, so that its options can be put right there."""
    if not (folder / CHECKPOINT).exists() and not (folder / RECORD).exists():
        with contextlib.suppress(OSError):
            (folder / IDENTITY).unlink(missing_ok=True)


def _write(
    folder: Path,
    algorithm: Algorithm,
    config: TrainingConfig,
    schema: InputSchema,
    record: RunRecord,
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
    with replacing(folder / PREDICTIONS) as partial:
        predictions.write(partial)
    record.write(folder / RECORD)
    (folder / CHECKPOINT).unlink(missing_ok=True)


def make_record(
    config: TrainingConfig,
    dataset: DomainDataset,
    sides: Mapping[str, DomainDataset],
    predictions: Predictions,
    fitted: Fitted,
    *,
    name: str,
    run: str,
    seconds: float,
    device: str,
) -> RunRecord:
    """The record of a run: what ran, on what, and how it did on patients it had not seen."""
    target = fitted.algorithm.target
    truth, probabilities, _ = predictions.side(VAL)
    threshold, threshold_rule = choose_threshold(target, truth, probabilities)
    val = score(target, truth, probabilities, threshold)
    truth, probabilities, patient = predictions.side(TEST)
    per_patient = score_patients(target, truth, probabilities, patient, threshold)
    return RunRecord(
        run=run,
        algorithm=config.algorithm,
        seed=config.seed,
        dataset=name,
        dataset_hash=dataset.content_hash(),
        target=dataset.target,
        samples=Counts(**{side: len(part) for side, part in sides.items()}),
        patients=Counts(**{side: part.n_patients for side, part in sides.items()}),
        config=_effective(config, fitted),
        code_version=code_version(),
        selection_rule=fitted.selection_rule,
        threshold=threshold,
        threshold_rule=threshold_rule,
        epoch=fitted.epoch,
        epochs=len(fitted.history),
        val=_plain(val),
        test=_plain(score(target, truth, probabilities, threshold)),
        per_patient={
            str(predictions.pseudonyms[code]): {**_plain(entry), "samples": int(entry["samples"])}
            for code, entry in per_patient.items()
        },
        history=tuple(fitted.history),
        seconds=seconds,
        peak_memory_mb=_peak_memory_mb(device),
        parameters=sum(parameter.numel() for parameter in fitted.algorithm.parameters()),
        device=device,
    )


def _effective(config: TrainingConfig, fitted: Fitted) -> TrainingConfig:
    """The configuration with every default filled in, and the backbone and the speed that were really used."""
    algorithm = fitted.algorithm
    backbone = algorithm.backbone.module if isinstance(algorithm.backbone, SingleInput) else algorithm.backbone
    package, _, entry = type(backbone).__module__.rpartition(".")
    used = entry.replace("_", "-") if package == "manydg.backbones" else type(backbone).__qualname__
    return config.replace(
        settings=dataclasses.asdict(algorithm.settings),
        backbone=used if config.backbone == "auto" else config.backbone,
        precision=fitted.speed.precision,
        execution=fitted.speed.execution,
    )


def _plain(metrics: Mapping[str, float]) -> dict[str, float | int | None]:
    """JSON values; an undefined metric is null."""
    return {
        name: value if isinstance(value, int) else (float(value) if math.isfinite(value) else None)
        for name, value in metrics.items()
    }


def _peak_memory_mb(device: str) -> float | None:
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else peak_memory()
    return None if peak is None else peak / 2**20


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
        raise StorageError(
            f"{path} is not a finished run: it has no {RECORD}. Name a folder that 'manydg train' finished"
        )
    again = f"delete {path} and train again"
    record = RunRecord.read(path / RECORD, again)
    tensors, meta = read_tensors(path / MODEL, again)
    config = TrainingConfig.from_mapping(meta["config"])
    schema = InputSchema.from_json(meta["schema"])
    target = target_of(TargetSpec(meta["target"]["kind"], tuple(meta["target"]["names"])))
    algorithm = rebuild(
        config, schema, target, meta["n_domains"], tensors, backbone=backbone, source=path / MODEL
    ).to(pick_device(device))  # fmt: skip
    return Run(algorithm, record, schema, path, meta["info"])
