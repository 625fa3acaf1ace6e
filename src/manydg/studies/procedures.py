"""How a planned run is done: a procedure takes the data and the run's options and returns a record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from manydg.config import TrainingConfig, pick_device
from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split, split_named, split_patients
from manydg.evaluation.predictions import Predictions, write_predictions
from manydg.training.fit import Fitted, Reporter, fit, fit_further
from manydg.training.record import CurvePoint, EpochEntry, RunRecord, Variant
from manydg.training.run import PREDICTIONS, draw_split, make_record, predict_held_out, sides_of, train, warm_up


@dataclass(frozen=True, eq=False)
class RunTask:
    """One run to do.

    Parameters
    ----------
    dataset : DomainDataset
    config : TrainingConfig
    variant : mapping
        What is special about the run, by name.
    folder : Path
        Where it leaves what it makes.
    device : str
    name : str
        The dataset's.
    reporter : Reporter
    """

    dataset: DomainDataset
    config: TrainingConfig
    variant: Variant
    folder: Path
    device: str
    name: str
    reporter: Reporter


# Continual learning: patients arrive in order; the model is tuned on the new ones and a few samples of the old.


STEPS = 10
SAMPLES_KEPT = 4
PAPER_SIZES = (1000, 100)
REPLAY = "replay"
"""The variant's key: how many samples of each earlier patient join every step."""
Rows = npt.NDArray[np.int64]


def patients_by_step(available: int) -> tuple[int, int]:
    """Patients at the start and in each step: the paper's, or half of all and tenths of the rest where there are fewer.

    Examples
    --------
    >>> patients_by_step(2162), patients_by_step(62), patients_by_step(8)
    ((1000, 100), (32, 3), (2, 1))
    """
    first, each = PAPER_SIZES
    if available >= first + STEPS * each:
        return first, each
    each = max(1, available // (2 * STEPS))
    return max(2, available - STEPS * each), each


def tuning_epochs(config: TrainingConfig) -> int:
    """Epochs of each step: a fifth of those of the pre-training."""
    return max(1, config.epochs // 5)


def learn_continually(task: RunTask) -> RunRecord:
    """Pre-train on the first patients by id, then go on in steps; the test patients stay the same.

    The variant says how many samples of each earlier patient join every step. The record's ``curve`` holds the test
    metrics after each step.
    """
    device, reporter = pick_device(task.device), task.reporter
    first_use = warm_up(device)
    start = time.perf_counter()
    dataset, config = task.dataset, task.config
    split = draw_split(dataset, config)
    sides = sides_of(dataset, split)
    scorer = _Scorer(dataset, config, split, sides, task.name, str(device))
    train, val, arrival = sides["train"], sides["val"], order_of_arrival(sides["train"])
    (first, each), replay = patients_by_step(train.n_patients), int(task.variant[REPLAY])
    reporter.started(config.algorithm, STEPS + 1, 1)
    fitted = fit(config, _only(train, np.flatnonzero(arrival < first)), val, device)
    curve = [scorer.point(fitted, 0, first, reporter)]
    rng = np.random.default_rng([config.seed, 11])
    for step in range(1, STEPS + 1):
        seen = first + (step - 1) * each
        rows = np.flatnonzero((arrival >= seen) & (arrival < seen + each))
        if not len(rows):
            break
        rows = np.concatenate([rows, sample_of_each(train.domains.cpu().numpy(), arrival < seen, replay, rng)])
        # A single sample cannot train a network with batch normalisation; it is left out.
        if len(rows) > 1:
            tuning = config.replace(epochs=tuning_epochs(config), seed=config.seed + 1000 * step)
            fitted = fit_further(fitted, tuning, _only(train, rows), val, device)
        curve.append(scorer.point(fitted, step, seen + each, reporter))
    record = scorer.record(fitted, time.perf_counter() - start, task.folder)
    return record.replace(curve=tuple(curve), first_use_seconds=first_use)


def order_of_arrival(train: DomainDataset) -> Rows:
    """Each sample's patient as a rank by id: numbers in the order of their value, text in the order of the alphabet."""
    names = train.patients.tolist()
    key = (lambda name: (int(name), "")) if all(name.isdigit() for name in names) else (lambda name: (0, name))
    order = sorted(range(len(names)), key=lambda code: key(names[code]))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return np.asarray(rank[train.domains.cpu().numpy()], np.int64)


def sample_of_each(domains: Rows, among: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Rows:
    """Up to ``count`` random samples of each patient, of the samples marked."""
    rows = np.flatnonzero(among)
    rows = rows[np.lexsort((rng.random(len(rows)), domains[rows]))]
    new = np.r_[True, domains[rows][1:] != domains[rows][:-1]] if len(rows) else np.zeros(0, bool)
    rank = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    return np.asarray(rows[rank < count], np.int64)


def _only(train: DomainDataset, rows: Rows) -> DomainDataset:
    """Some rows of the training patients, each patient under the code it has among all of them."""
    chosen = train.select(rows)
    return dataclasses.replace(chosen, domains=train.domains[torch.from_numpy(rows)], patients=train.patients)


@dataclass(frozen=True)
class _Scorer:
    """Scores the model of each step on the same test patients."""

    dataset: DomainDataset
    config: TrainingConfig
    split: Split
    sides: Mapping[str, DomainDataset]
    name: str
    device: str

    def point(self, fitted: Fitted, step: int, seen: int, reporter: Reporter) -> CurvePoint:
        record = self._score(fitted, predict_held_out(fitted.algorithm, self.dataset, self.split), 0.0)
        losses = fitted.history[-1].losses if fitted.history else {}
        reporter.epoch_ended(EpochEntry(step + 1, losses, record.val, 0.0))
        people = min(seen, self.sides["train"].n_patients)
        return CurvePoint(step, people, record.val, record.test)

    def record(self, fitted: Fitted, seconds: float, folder: Path) -> RunRecord:
        """The record of the last step's model, whose predictions are kept."""
        predictions = predict_held_out(fitted.algorithm, self.dataset, self.split)
        write_predictions(folder / PREDICTIONS, predictions)
        return self._score(fitted, predictions, seconds)

    def _score(self, fitted: Fitted, predictions: Mapping[str, Predictions], seconds: float) -> RunRecord:
        return make_record(
            self.config,
            self.dataset,
            self.sides,
            predictions,
            fitted,
            name=self.name,
            run="",
            seconds=seconds,
            device=self.device,
        )


def train_once(task: RunTask) -> RunRecord:
    """Train on the split of the seed and score the test patients."""
    return _train(task, None)


def train_on_fewer(task: RunTask) -> RunRecord:
    """Train on so many patients; whatever their number and the seed, the test patients are the same."""
    return _train(task, fewer_patients(task.dataset, task.config, int(task.variant["training patients"])))


def _train(task: RunTask, split: Split | None) -> RunRecord:
    run = train(
        task.dataset,
        task.config,
        split=split,
        out=task.folder,
        device=task.device,
        name=task.name,
        reporter=task.reporter,
    )
    return run.record


def fewer_patients(dataset: DomainDataset, config: TrainingConfig, count: int) -> Split:
    """A split with ``count`` training patients.

    The test patients are those of seed 0. The seed decides which of the others train and validate; smaller sets of
    training patients lie within larger ones.
    """
    test = draw_split(dataset, config.replace(seed=0)).patients("test")
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(test.tolist())))
    train_share, val_share, _ = config.ratios
    split = split_patients(others, (train_share, val_share, 0.0), config.seed)
    order = np.random.default_rng([config.seed, 13]).permutation(np.sort(split.patients("train")))
    return split_named(dataset, train=order[:count], val=split.patients("val"), test=test)


PROCEDURES: dict[str, Callable[[RunTask], RunRecord]] = {
    "train": train_once,
    "timing": train_once,
    "limited-data": train_on_fewer,
    "continual": learn_continually,
}
"""Plain training under the name ``timing`` is never shared with runs that may have gone on side by side."""
