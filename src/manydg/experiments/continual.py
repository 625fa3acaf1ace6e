"""Continual learning: patients arrive in order; the model is tuned on the new ones and a few samples of the old."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split
from manydg.training.config import TrainingConfig, pick_device
from manydg.training.fit import Fitted, fit, fit_further
from manydg.training.record import Predictions, make_record
from manydg.training.run import draw_split

STEPS = 10
SAMPLES_KEPT = 4
Rows = npt.NDArray[np.int64]


def learn_continually(
    dataset: DomainDataset, config: TrainingConfig, variant: Mapping[str, Any], folder: Path, device: str, name: str
) -> dict[str, Any]:
    """Pre-train on the first patients by id, then go on in steps; the test patients stay the same.

    The variant's ``replay`` says how many samples of each earlier patient join every step; ``first`` and ``each`` how
    many patients come at the start and in each step. The record's ``curve`` holds the test metrics after each step.
    """
    start, place = time.perf_counter(), pick_device(device)
    split = draw_split(dataset, config)
    train, val = dataset.select(split.train), dataset.select(split.val)
    sides = {"train": train, "val": val, "test": dataset.select(split.test)}
    arrival = _order_of_arrival(train)
    first, each, replay = int(variant["first"]), int(variant["each"]), int(variant["replay"])
    fitted = fit(config, _only(train, np.flatnonzero(arrival < first)), val, place)
    curve = [_point(0, first, config, dataset, sides, split, fitted, name, device)]
    rng = np.random.default_rng([config.seed, 11])
    for step in range(1, STEPS + 1):
        seen = first + (step - 1) * each
        rows = np.flatnonzero((arrival >= seen) & (arrival < seen + each))
        if not len(rows):
            break
        old = _sample_of_each(train.domains.cpu().numpy(), arrival < seen, replay, rng)
        tuning = config.replace(epochs=max(1, config.epochs // 5), seed=config.seed + 1000 * step)
        fitted = fit_further(fitted, tuning, _only(train, np.concatenate([rows, old])), val, place)
        curve.append(_point(step, seen + each, config, dataset, sides, split, fitted, name, device))
    record = {key: value for key, value in curve[-1].items() if key not in ("step", "patients seen")}
    points = [{key: point[key] for key in ("step", "patients seen", "val", "test")} for point in curve]
    return {**record, "curve": points, "seconds": time.perf_counter() - start}


def _order_of_arrival(train: DomainDataset) -> Rows:
    """Each sample's patient as a rank by id: numbers in the order of their value, text in the order of the alphabet."""
    names = train.patients.tolist()
    key = (lambda name: (int(name), "")) if all(name.isdigit() for name in names) else (lambda name: (0, name))
    order = sorted(range(len(names)), key=lambda code: key(names[code]))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return np.asarray(rank[train.domains.cpu().numpy()], np.int64)


def _only(train: DomainDataset, rows: Rows) -> DomainDataset:
    """Some rows of the training patients, each patient under the code it has among all of them."""
    chosen = train.select(rows)
    return dataclasses.replace(chosen, domains=train.domains[torch.from_numpy(rows)], patients=train.patients)


def _sample_of_each(domains: Rows, among: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Rows:
    """Up to ``count`` random samples of each patient, of the samples marked."""
    rows = np.flatnonzero(among)
    rows = rows[np.lexsort((rng.random(len(rows)), domains[rows]))]
    new = np.r_[True, domains[rows][1:] != domains[rows][:-1]] if len(rows) else np.zeros(0, bool)
    place = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    return rows[place < count]


def _point(
    step: int,
    seen: int,
    config: TrainingConfig,
    dataset: DomainDataset,
    sides: Mapping[str, DomainDataset],
    split: Split,
    fitted: Fitted,
    name: str,
    device: str,
) -> dict[str, Any]:
    predictions = Predictions.of(fitted.algorithm, sides, split)
    record = make_record(
        config, dataset, sides, predictions, fitted, name=name, run="", seconds=0.0, device=str(pick_device(device))
    )
    return {**record, "step": step, "patients seen": min(seen, sides["train"].n_patients)}
