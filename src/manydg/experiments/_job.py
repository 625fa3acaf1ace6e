"""What a procedure is given to do one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manydg.data.dataset import DomainDataset
from manydg.training.config import TrainingConfig
from manydg.training.reporting import Reporter


@dataclass(frozen=True, eq=False)
class Job:
    """One run.

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
    variant: Mapping[str, Any]
    folder: Path
    device: str
    name: str
    reporter: Reporter
