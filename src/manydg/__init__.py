"""Models trained on many patients that keep working on patients they have never seen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manydg.algorithms import Algorithm
    from manydg.algorithms.manydg import orthogonal_projection
    from manydg.backbones import Backbone
    from manydg.config import TrainingConfig
    from manydg.data.columns import Ragged
    from manydg.data.dataset import Batch, DomainDataset, from_arrays, open_dataset
    from manydg.data.patient_context import PatientContext
    from manydg.data.sampling import fold_pairs
    from manydg.data.splits import Split, load_split, patient_folds, split_patients
    from manydg.errors import ManyDGError
    from manydg.estimator import ManyDGClassifier, ManyDGRegressor, PatientSplit
    from manydg.training.run import Run, open_run, train

__version__ = "0.1.0"

_HOMES = {
    "Algorithm": "manydg.algorithms",
    "Backbone": "manydg.backbones",
    "Batch": "manydg.data.dataset",
    "DomainDataset": "manydg.data.dataset",
    "ManyDGClassifier": "manydg.estimator",
    "ManyDGError": "manydg.errors",
    "ManyDGRegressor": "manydg.estimator",
    "PatientContext": "manydg.data.patient_context",
    "PatientSplit": "manydg.estimator",
    "Ragged": "manydg.data.columns",
    "Run": "manydg.training.run",
    "Split": "manydg.data.splits",
    "TrainingConfig": "manydg.config",
    "fold_pairs": "manydg.data.sampling",
    "from_arrays": "manydg.data.dataset",
    "load_split": "manydg.data.splits",
    "open_dataset": "manydg.data.dataset",
    "open_run": "manydg.training.run",
    "orthogonal_projection": "manydg.algorithms.manydg",
    "patient_folds": "manydg.data.splits",
    "split_patients": "manydg.data.splits",
    "train": "manydg.training.run",
}

__all__ = [
    "Algorithm",
    "Backbone",
    "Batch",
    "DomainDataset",
    "ManyDGClassifier",
    "ManyDGError",
    "ManyDGRegressor",
    "PatientContext",
    "PatientSplit",
    "Ragged",
    "Run",
    "Split",
    "TrainingConfig",
    "fold_pairs",
    "from_arrays",
    "load_split",
    "open_dataset",
    "open_run",
    "orthogonal_projection",
    "patient_folds",
    "split_patients",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``manydg --help`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'manydg' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
