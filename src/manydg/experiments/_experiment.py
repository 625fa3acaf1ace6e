"""What an experiment is: runs to plan, and figures to fold their records into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from manydg.data.dataset import DomainDataset
from manydg.experiments.study import PlannedRun
from manydg.training.config import TrainingConfig

Record = dict[str, Any]
Figure = dict[str, Any]

RIVALS = ("base", "condadv", "dann", "irm", "sagnet", "pcl", "mldg", "manydg")


@dataclass(frozen=True)
class Request:
    """What a user asks of an experiment.

    Parameters
    ----------
    dataset : DomainDataset
    config : TrainingConfig
        Options common to all runs; the experiment sets the algorithm, its settings and the seed.
    seeds : int
        Number of patient splits.
    algorithms : tuple of str
        Algorithms to set against one another, where the experiment compares any.
    """

    dataset: DomainDataset
    config: TrainingConfig
    seeds: int
    algorithms: tuple[str, ...]


class Experiment(ABC):
    """One experiment of the paper, for any dataset of a fitting target type.

    A subclass lives in a file of its own in ``catalogue``; the file's name is the experiment's name.
    """

    title: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("classes", "votes", "binary", "multilabel")

    @abstractmethod
    def plan(self, request: Request) -> list[PlannedRun]:
        """The runs; those that another experiment has done already are not done again."""

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        """Figures for the report, by file name; none where the records say it all."""
        return {}

    def scaled(self, request: Request) -> str:
        """What was made smaller than in the paper because the dataset is, as a sentence; empty where nothing was."""
        return ""


def ok(records: Sequence[Record]) -> list[Record]:
    """The records of runs that did not fail."""
    return [record for record in records if record["status"] == "ok"]


def metric_names(record: Mapping[str, Any]) -> list[str]:
    """Names of the test metrics of a record."""
    return list(record["test"])


def training_patients(request: Request) -> int:
    """How many patients train under the request's ratios."""
    train, val, test = request.config.ratios
    return round(request.dataset.n_patients * train / (train + val + test))
