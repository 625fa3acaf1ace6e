"""What an experiment is: runs to plan, and a way to aggregate their records into figures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from manydg.algorithms import ALGORITHMS
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.data.info import KINDS
from manydg.studies.figure_data import Axis, Curve, FigureData, Line, XAxis
from manydg.studies.settings import Options
from manydg.studies.study import PlannedRun
from manydg.training.record import EpochEntry, RunRecord
from manydg.training.run import draw_split

Record = RunRecord


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
    label_delay : float
        How long it takes until the label of an unseen patient's sample is known, in the unit of the dataset's times.
    """

    dataset: DomainDataset
    options: Options
    seeds: int
    algorithms: tuple[str, ...]
    timed_epochs: int = 23
    label_delay: float = 0.0

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

    A subclass lives in a module of ``catalogue``, beside those it shares an idea with.
    """

    name: ClassVar[str]
    """As in ``manydg experiment NAME``."""
    title: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = KINDS
    """Kinds of target that it makes sense for."""
    workers: ClassVar[int | None] = None
    """Most runs side by side; as many as the user likes where it is ``None``."""

    @abstractmethod
    def plan(self, request: Request) -> list[PlannedRun]:
        """The runs; those that another experiment has done already are not done again."""

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        """Figures for the report, by file name; none where the records say it all.

        Parameters
        ----------
        records : sequence of RunRecord
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
    return [record for record in records if record.ok]


def metric_names(record: Record) -> list[str]:
    """Names of the test metrics of a record."""
    return list(record.test)


def training_patients(request: Request) -> int:
    """How many patients train."""
    return request.training_patients


Series = dict[str, dict[float, list[float]]]


def mean_curves(
    records: Sequence[Record], name_of: Callable[[Record], str], value_of: Callable[[EpochEntry], float | None]
) -> Series:
    """Values by name and epoch, over seeds."""
    curves: Series = {}
    for record in records:
        for entry in record.history:
            value = value_of(entry)
            if value is not None:
                curves.setdefault(name_of(record), {}).setdefault(entry.epoch, []).append(value)
    return curves


def curve(
    experiment: str, title: str, x: str, y: str, series: Series, *, note: str = "", scale: str = "linear"
) -> FigureData:
    """A ``curve`` figure: the mean over seeds of each series, with one standard deviation to each side."""
    positions = sorted({position for points in series.values() for position in points})
    lines = []
    for name, points in series.items():
        values = [points.get(position, []) for position in positions]
        mean = [float(np.mean(value)) if value else None for value in values]
        sd = [float(np.std(value, ddof=1)) if len(value) > 1 else 0.0 for value in values]
        low = [None if middle is None else middle - width for middle, width in zip(mean, sd, strict=True)]
        high = [None if middle is None else middle + width for middle, width in zip(mean, sd, strict=True)]
        lines.append(Line(name, mean, low, high))
    return FigureData(title, Curve(XAxis(x, positions, scale), Axis(y), lines), experiment, note=note)


def mean_and_sd(values: Sequence[float]) -> tuple[float | None, float]:
    """Mean and standard deviation of those that are defined; no mean where none is, no spread where there is one.

    Examples
    --------
    >>> mean_and_sd([1.0, float("nan"), 1.0])
    (1.0, 0.0)
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
