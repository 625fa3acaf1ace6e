"""Conducting an experiment: plan, run what is not done yet, fold, and leave everything where the report looks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manydg.algorithms import ALGORITHMS
from manydg.data.storage import open_dataset, write_atomically
from manydg.errors import ConfigError
from manydg.experiments._experiment import Request
from manydg.experiments.catalogue import EXPERIMENTS
from manydg.experiments.study import Board, PlannedRun, Study, describe_study
from manydg.experiments.summary import write_summary
from manydg.training.config import TrainingConfig

FIGURES = "figures"


def make_request(
    name: str, dataset: str | Path, config: TrainingConfig, seeds: int, algorithms: Sequence[str]
) -> Request:
    """Check that an experiment fits a dataset and gather what it needs."""
    experiment = EXPERIMENTS.get(name)
    data = open_dataset(dataset)
    if data.target.kind not in experiment.kinds:
        raise ConfigError(
            f"the experiment '{name}' needs targets of the kinds {experiment.kinds}: not {data.target.kind}"
        )
    for algorithm in algorithms:
        ALGORITHMS.get(algorithm)
    return Request(data, config, seeds, tuple(algorithms))


def plan_experiment(name: str, request: Request) -> list[PlannedRun]:
    """The runs of an experiment."""
    return EXPERIMENTS.get(name)().plan(request)


def conduct(
    name: str,
    dataset: str | Path,
    out: str | Path,
    request: Request,
    *,
    title: str | None = None,
    workers: int = 1,
    device: str = "auto",
    board: Board | None = None,
    command: str = "",
) -> list[dict[str, Any]]:
    """Run an experiment to its end and write its figures and summary.

    Returns
    -------
    list of dict
        The records of its runs.
    """
    experiment = EXPERIMENTS.get(name)()
    folder, place = Path(out), Path(dataset)
    called = title or place.resolve().name
    describe_study(folder, place, called, name, command)
    records = Study(folder, place, experiment.plan(request), called, device).execute(workers, board)
    note = experiment.scaled(request)
    for figure_name, figure in experiment.fold(request, records, folder).items():
        told = {"dataset": called, **figure}
        if note:
            told["note"] = " ".join(part for part in (figure.get("note", ""), note) if part)
        write_atomically(folder / FIGURES / f"{called}-{figure_name}.json", json.dumps(told))
    write_summary(folder)
    return records
