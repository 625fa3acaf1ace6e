"""How a planned run is done: a procedure takes the data and the run's options and returns a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split, split_named, split_patients
from manydg.experiments._job import Job
from manydg.experiments.continual import learn_continually
from manydg.training.config import TrainingConfig
from manydg.training.run import draw_split, train


def train_once(job: Job) -> dict[str, Any]:
    """Train on the split of the seed and score the test patients."""
    return _train(job, None)


def train_on_fewer(job: Job) -> dict[str, Any]:
    """Train on so many patients; whatever their number and the seed, the test patients are the same."""
    return _train(job, fewer_patients(job.dataset, job.config, int(job.variant["training patients"])))


def _train(job: Job, split: Split | None) -> dict[str, Any]:
    run = train(
        job.dataset, job.config, split=split, out=job.folder, device=job.device, name=job.name, reporter=job.reporter
    )
    return dict(run.record)


def fewer_patients(dataset: DomainDataset, config: TrainingConfig, count: int) -> Split:
    """A split with ``count`` training patients.

    The test patients are those of seed 0. The seed decides which of the others train and validate; smaller sets of
    training patients lie within larger ones.
    """
    test = draw_split(dataset, config.replace(seed=0)).patients("test")
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(test.tolist())))
    train_share, val_share, _ = config.ratios
    drawn = split_patients(others, (train_share, val_share, 0.0), config.seed)
    order = np.random.default_rng([config.seed, 13]).permutation(np.sort(drawn.patients("train")))
    return split_named(dataset, train=order[:count], val=drawn.patients("val"), test=test)


PROCEDURES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "train": train_once,
    "timing": train_once,
    "limited-data": train_on_fewer,
    "continual": learn_continually,
}
"""Plain training under the name ``timing`` is never shared with runs that may have gone on side by side."""
