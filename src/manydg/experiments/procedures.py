"""How a planned run is done: a procedure takes the data and the run's options and returns a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manydg.data.dataset import DomainDataset
from manydg.training.config import TrainingConfig
from manydg.training.run import train

Procedure = Callable[[DomainDataset, TrainingConfig, Mapping[str, Any], Path, str, str], dict[str, Any]]


def train_once(
    dataset: DomainDataset, config: TrainingConfig, variant: Mapping[str, Any], folder: Path, device: str, name: str
) -> dict[str, Any]:
    """Train on the split of the seed and score the test patients."""
    return dict(train(dataset, config, out=folder, device=device, name=name).record)


PROCEDURES: dict[str, Procedure] = {"train": train_once}
