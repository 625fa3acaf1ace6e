"""How far to trust a run's later predictions: temperature, prediction sets, and who is like its training patients.

Everything is fitted on validation patients, or for the reference of embeddings on training patients; it is kept beside
the model in ``calibration.safetensors``, a few small arrays in which no patient can be recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.algorithms import Algorithm
from manydg.data.dataset import DomainDataset
from manydg.errors import StorageError
from manydg.evaluation.predictions import Predictions
from manydg.evaluation.trust import (
    Reference,
    SetRule,
    fit_for_most_patients,
    fit_on_average,
    fit_reference,
    fit_temperature,
    novelty_threshold,
)
from manydg.files import Json
from manydg.training.checkpoint import read_tensors, write_tensors
from manydg.training.inference import embed_dataset, whole_patients

CALIBRATION = "calibration.safetensors"
SAMPLES_OF_A_PATIENT, MOST_SAMPLES = 200, 50_000


@dataclass(frozen=True, eq=False)
class Calibration:
    """How far to trust the predictions of a run.

    Attributes
    ----------
    temperature : float
        What logits are divided by to make probabilities mean what they say.
    on_average, for_most : SetRule
        Rules of prediction sets, of the probabilities as the model gives them.
    reference : Reference, optional
        Distribution of the training patients' mean embeddings; ``None`` with fewer than two patients.
    limit : float
        Distance from which a patient is unlike those of the training.
    false_alarms : float
        Probability, at most, that a patient of the same population is called so.
    patients : int
        Number of validation patients it comes from.
    """

    temperature: float
    on_average: SetRule
    for_most: SetRule
    reference: Reference | None
    limit: float
    false_alarms: float
    patients: int


def fit_calibration(algorithm: Algorithm, sides: Mapping[str, DomainDataset], val: Predictions) -> Calibration:
    """Learn from the validation patients how far predictions can be trusted; test patients are not looked at."""
    truth, probabilities = val.truth, val.probabilities
    reference, limit, false_alarms = None, np.inf, 0.0
    if sides["train"].n_patients > 1:
        reference = fit_reference(*patient_embeddings(algorithm, sides["train"]))
        _, distances = reference.distances(*patient_embeddings(algorithm, sides["val"]))
        limit, false_alarms = novelty_threshold(distances)
    return Calibration(
        fit_temperature(val.target, truth, probabilities),
        fit_on_average(val.target, truth, probabilities, val.groups),
        fit_for_most_patients(val.target, truth, probabilities, val.groups),
        reference,
        limit,
        false_alarms,
        sides["val"].n_patients,
    )


def patient_embeddings(
    algorithm: Algorithm, dataset: DomainDataset
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Embeddings of samples spread evenly over each patient's, at most two hundred of each, and their patients."""
    domains = dataset.domains.cpu().numpy()
    each = max(1, min(SAMPLES_OF_A_PATIENT, MOST_SAMPLES // max(dataset.n_patients, 1)))
    order = np.argsort(domains, kind="stable")
    counts = np.bincount(domains, minlength=dataset.n_patients)
    position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = np.minimum(counts, each)[domains[order]]
    # The n-th sample is taken where n times the share taken passes a whole number.
    share = taken / counts[domains[order]]
    chosen = np.sort(order[np.floor((position + 1) * share + 1e-9) > np.floor(position * share + 1e-9)])
    if algorithm.backbone.crop is not None:
        # A sequence model reads whole sessions.
        return _embed(algorithm, dataset)[chosen], domains[chosen]
    return _embed(algorithm, dataset.select(chosen)), domains[chosen]


def distances_so_far(algorithm: Algorithm, dataset: DomainDataset, reference: Reference) -> npt.NDArray[np.float64]:
    """How far each sample's patient is from the training patients, known from samples up to this one, ``(samples,)``.

    Parameters
    ----------
    dataset : DomainDataset
        With times.
    """
    assert dataset.times is not None
    distances = np.empty(len(dataset))
    for rows in whole_patients(dataset):
        part = dataset.select(rows)
        distances[rows.cpu().numpy()] = reference.distances_so_far(
            _embed(algorithm, part), part.domains.cpu().numpy(), dataset.times[rows].cpu().numpy()
        )
    return distances


def _embed(algorithm: Algorithm, dataset: DomainDataset) -> npt.NDArray[np.float32]:
    """The features v and, where the algorithm has it, the domain factor z beside them, ``(samples, dim)``."""
    embeddings = embed_dataset(algorithm, dataset)
    return torch.cat([embeddings[name] for name in ("v", "z") if name in embeddings], dim=1).numpy()


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Keep a calibration in a run folder."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "on_average.thresholds": calibration.on_average.thresholds,
        "for_most.thresholds": calibration.for_most.thresholds,
    }
    if calibration.reference is not None:
        for name, values in vars(calibration.reference).items():
            arrays[f"reference.{name}"] = values.astype(np.float32)
    meta: dict[str, Json] = {
        "temperature": calibration.temperature,
        "on_average": {"level": calibration.on_average.level, "share": calibration.on_average.share},
        "for_most": {"level": calibration.for_most.level, "share": calibration.for_most.share},
        "limit": calibration.limit if np.isfinite(calibration.limit) else None,
        "false_alarms": calibration.false_alarms,
        "patients": calibration.patients,
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    write_tensors(folder / CALIBRATION, tensors, meta)


def _check_calibration(calibration: Calibration) -> None:
    """Raise a plain error if a value is one that no validation patients can give."""
    if not 0 < calibration.temperature < np.inf:
        raise ValueError(f"the temperature is {calibration.temperature}")
    for rule in (calibration.on_average, calibration.for_most):
        if not (0 <= rule.level <= 1 and 0 <= rule.share <= 1):
            raise ValueError(f"a prediction set promises {rule.level} and {rule.share}")
        if rule.thresholds.ndim != 1 or np.isnan(rule.thresholds).any():
            raise ValueError("a threshold of a prediction set is no number")
    if not calibration.limit >= 0 or not 0 <= calibration.false_alarms <= 1 or calibration.patients < 0:
        raise ValueError("the limit of novelty is impossible")
    reference = calibration.reference
    if reference is not None:
        dim = len(reference.mean)
        if reference.mean.shape != (dim,) or reference.axes.shape != (dim, dim) or reference.within.shape != (dim,):
            raise ValueError("the training patients' reference has impossible shapes")
        if not all(np.isfinite(values).all() for values in vars(reference).values()) or (reference.within < 0).any():
            raise ValueError("the training patients' reference has impossible values")


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration of a run folder; ``None`` for a run that was made without one."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    tensors, meta = read_tensors(path)
    arrays = {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}
    try:
        rules = {name: SetRule(arrays[f"{name}.thresholds"], **meta[name]) for name in ("on_average", "for_most")}
        reference = None
        if "reference.mean" in arrays:
            reference = Reference(*(arrays[f"reference.{name}"] for name in ("mean", "axes", "within")))
        limit = np.inf if meta["limit"] is None else float(meta["limit"])
        calibration = Calibration(
            float(meta["temperature"]), rules["on_average"], rules["for_most"], reference, limit,
            float(meta["false_alarms"]), int(meta["patients"]),
        )  # fmt: skip
        _check_calibration(calibration)
        return calibration
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StorageError(f"{path} does not hold a calibration ({error}): train the run again") from error
