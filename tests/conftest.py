"""What several tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from manydg.data.build import from_arrays
from manydg.data.dataset import DomainDataset

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real open data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"real data are not here ({SHARED}): see docs/datasets.md")
    return SHARED


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    torch.manual_seed(0)


def make_dataset(kind: str = "classes", patients: int = 12, samples: int = 8, features: int = 6) -> DomainDataset:
    """A small learnable dataset of any target kind: class means plus a patient's shift plus noise."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(patients), samples)
    label = rng.integers(0, 2 if kind == "binary" else 3, len(who))
    means = rng.normal(size=(3, features))
    x = means[label] + rng.normal(size=(patients, features))[who] * 0.5 + rng.normal(size=(len(who), features)) * 0.3
    if kind == "votes":
        targets = rng.integers(0, 3, (len(who), 3)) + 9 * np.eye(3, dtype=int)[label]
    elif kind == "multilabel":
        targets = (x[:, :4] > 0).astype(int)
    else:
        targets = label
    return from_arrays(x, targets, who, kind=kind)


@pytest.fixture
def small_dataset() -> DomainDataset:
    return make_dataset()


@pytest.fixture(scope="session")
def dataset_of() -> Callable[..., DomainDataset]:
    """:func:`make_dataset`, for tests in other folders."""
    return make_dataset
