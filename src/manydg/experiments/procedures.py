"""How a planned run is done: a procedure takes the data and the run's options and returns a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split, split_named
from manydg.experiments.continual import learn_continually
from manydg.training.config import TrainingConfig
from manydg.training.run import draw_split, train

Procedure = Callable[[DomainDataset, TrainingConfig, Mapping[str, Any], Path, str, str], dict[str, Any]]


def train_once(
    dataset: DomainDataset, config: TrainingConfig, variant: Mapping[str, Any], folder: Path, device: str, name: str
) -> dict[str, Any]:
    """Train on the split of the seed and score the test patients."""
    return dict(train(dataset, config, out=folder, device=device, name=name).record)


def train_on_fewer(
    dataset: DomainDataset, config: TrainingConfig, variant: Mapping[str, Any], folder: Path, device: str, name: str
) -> dict[str, Any]:
    """Train on the first so many of the seed's training patients; validation and test stay the same."""
    split = _fewer(dataset, draw_split(dataset, config), int(variant["training patients"]))
    return dict(train(dataset, config, split=split, out=folder, device=device, name=name).record)


def _fewer(dataset: DomainDataset, split: Split, count: int) -> Split:
    """The split with ``count`` training patients, in the order of their pseudonyms: smaller sets lie within larger."""
    alias = dict(zip(dataset.patients.tolist(), dataset.pseudonyms(), strict=True))
    chosen = sorted(split.patients("train").tolist(), key=alias.__getitem__)[:count]
    return split_named(dataset, train=chosen, val=split.patients("val"), test=split.patients("test"))


PROCEDURES: dict[str, Procedure] = {
    "train": train_once,
    "limited-data": train_on_fewer,
    "continual": learn_continually,
}
