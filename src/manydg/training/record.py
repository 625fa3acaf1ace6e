"""What a run leaves behind: predictions on validation and test patients, and one JSON record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.algorithms import Algorithm
from manydg.backbones import SingleInput
from manydg.code_version import code_version
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split
from manydg.evaluation.metrics import choose_threshold, score, score_patients
from manydg.machine import peak_memory
from manydg.training.fit import Fitted
from manydg.training.inference import predict_probabilities

VAL, TEST = 0, 1


@dataclass(frozen=True)
class Predictions:
    """Probabilities and truth of every validation and test sample.

    Parameters
    ----------
    split : array ``(rows,)``
        0 for validation, 1 for test.
    row : array ``(rows,)``
        Position in the dataset.
    patient : array ``(rows,)``
        Index into ``pseudonyms``.
    probabilities : array ``(rows, K)``
    truth : array ``(rows,)`` of class codes or ``(rows, K)`` of label indicators
    """

    split: npt.NDArray[np.int8]
    row: npt.NDArray[np.int64]
    patient: npt.NDArray[np.int64]
    pseudonyms: npt.NDArray[np.str_]
    probabilities: npt.NDArray[np.float32]
    truth: npt.NDArray[Any]

    @staticmethod
    def of(algorithm: Algorithm, data: Mapping[str, DomainDataset], split: Split) -> Predictions:
        """Predict the validation and, once, the test patients."""
        rows = {"val": split.val, "test": split.test}
        names = {side: data[side].pseudonyms() for side in rows}
        parts = [
            (
                np.full(len(rows[side]), code, np.int8),
                np.asarray(rows[side]),
                data[side].domains.cpu().numpy() + (len(names["val"]) if code == TEST else 0),
                predict_probabilities(algorithm, data[side]).numpy(),
                algorithm.target.truth(data[side].targets).cpu().numpy(),
            )
            for code, side in ((VAL, "val"), (TEST, "test"))
        ]
        which, row, patient, probabilities, truth = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Predictions(which, row, patient, np.array(names["val"] + names["test"]), probabilities, truth)

    def side(self, code: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Truth, probabilities and patient of one side."""
        chosen = self.split == code
        return self.truth[chosen], self.probabilities[chosen], self.patient[chosen]

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, **vars(self))

    @staticmethod
    def read(path: Path) -> Predictions:
        with np.load(path, allow_pickle=False) as arrays:
            return Predictions(**{name: arrays[name] for name in arrays.files})


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
) -> dict[str, Any]:
    """The record of a run: what ran, on what, and how it did on patients it had not seen."""
    target = fitted.algorithm.target
    truth, probabilities, _ = predictions.side(VAL)
    threshold, threshold_rule = choose_threshold(target, truth, probabilities)
    val = score(target, truth, probabilities, threshold)
    truth, probabilities, patient = predictions.side(TEST)
    per_patient = score_patients(target, truth, probabilities, patient, threshold)
    return {
        "schema": 1,
        "run": run,
        "experiment": "train",
        "variant": {},
        "algorithm": config.algorithm,
        "seed": config.seed,
        "dataset": name,
        "dataset_hash": dataset.content_hash(),
        "target": {"kind": dataset.target.kind, "names": list(dataset.target.names)},
        "samples": {side: len(part) for side, part in sides.items()},
        "patients": {side: part.n_patients for side, part in sides.items()},
        "config": _effective(config, fitted),
        "code_version": code_version(),
        "selection_rule": fitted.selection_rule,
        "threshold": threshold,
        "threshold_rule": threshold_rule,
        "epoch": fitted.epoch,
        "epochs": len(fitted.history),
        "val": _plain(val),
        "test": _plain(score(target, truth, probabilities, threshold)),
        "per_patient": {
            str(predictions.pseudonyms[code]): {**_plain(entry), "samples": int(entry["samples"])}
            for code, entry in per_patient.items()
        },
        "history": fitted.history,
        "seconds": seconds,
        "peak_memory_mb": _peak_memory_mb(device),
        "parameters": sum(parameter.numel() for parameter in fitted.algorithm.parameters()),
        "device": device,
        "status": "ok",
        "error": None,
        "folder": ".",
    }


def _effective(config: TrainingConfig, fitted: Fitted) -> dict[str, Any]:
    """The configuration with every default filled in, and the backbone and the speed that were really used."""
    algorithm = fitted.algorithm
    backbone = algorithm.backbone.module if isinstance(algorithm.backbone, SingleInput) else algorithm.backbone
    package, _, entry = type(backbone).__module__.rpartition(".")
    used = entry.replace("_", "-") if package == "manydg.backbones" else type(backbone).__qualname__
    return {
        **config.to_json(),
        "settings": dataclasses.asdict(algorithm.settings),
        "backbone": used if config.backbone == "auto" else config.backbone,
        "precision": fitted.speed.precision,
        "execution": fitted.speed.execution,
    }


def _plain(metrics: Mapping[str, float]) -> dict[str, float | int | None]:
    """JSON values; an undefined metric is null."""
    return {
        name: value if isinstance(value, int) else (float(value) if math.isfinite(value) else None)
        for name, value in metrics.items()
    }


def _peak_memory_mb(device: str) -> float | None:
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else peak_memory()
    return None if peak is None else peak / 2**20
