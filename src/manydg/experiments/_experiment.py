"""What an experiment is: runs to plan, and figures to fold their records into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from manydg.algorithms import ALGORITHMS
from manydg.data.dataset import DomainDataset
from manydg.experiments.options import Options
from manydg.experiments.study import PlannedRun
from manydg.training.config import TrainingConfig
from manydg.training.run import draw_split

Record = dict[str, Any]
Figure = dict[str, Any]

RIVALS = ("base", "condadv", "dann", "irm", "sagnet", "pcl", "mldg", "manydg")


@dataclass(frozen=True)
class Request:
    """What a user asks of an experiment.

    Parameters
    ----------
    dataset : DomainDataset
    options : Options
        Options of the runs; the experiment sets the algorithm, the settings it varies and the seed.
    seeds : int
        Number of patient splits.
    algorithms : tuple of str
        Algorithms to set against one another, where the experiment compares any.
    timed_epochs : int
        Epochs to time in the running-time experiment.
    """

    dataset: DomainDataset
    options: Options
    seeds: int
    algorithms: tuple[str, ...]
    timed_epochs: int = 23

    @property
    def config(self) -> TrainingConfig:
        """What all algorithms share."""
        return self.options.common

    @property
    def stepwise(self) -> list[str]:
        """The algorithms that train in epochs, so that they can be timed by epoch and tuned further."""
        return [name for name in self.algorithms if ALGORITHMS.get(name).sampling != "whole"]

    @cached_property
    def training_patients(self) -> int:
        """How many patients train."""
        return len(draw_split(self.dataset, self.config).patients("train"))


class Experiment(ABC):
    """One experiment of the paper, for any dataset of a fitting target type.

    A subclass lives in a file of its own in ``catalogue``; the file's name is the experiment's name.
    """

    title: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("classes", "votes", "binary", "multilabel")
    workers: ClassVar[int | None] = None
    """Most runs side by side; as many as the user likes where it is ``None``."""

    @abstractmethod
    def plan(self, request: Request) -> list[PlannedRun]:
        """The runs; those that another experiment has done already are not done again."""

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        """Figures for the report, by file name; none where the records say it all.

        Parameters
        ----------
        records : sequence of dict
            Of the runs that ended well, at least one.
        folder : Path
            The results folder.
        """
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
    """How many patients train."""
    return request.training_patients
