"""The main table: algorithms and controls against one another on patients none of them has seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manydg.algorithms import ALGORITHMS
from manydg.data.storage import open_dataset
from manydg.errors import ConfigError
from manydg.experiments.describe import describe_study
from manydg.experiments.options import Options, as_options
from manydg.experiments.study import Board, PlannedRun, Study, grid
from manydg.experiments.summary import write_summary
from manydg.training.config import TrainingConfig

CONTROLS = ("base", "prototype", "manydg-random-pairs")


def compare(
    dataset: str | Path,
    algorithms: Sequence[str],
    seeds: int,
    out: str | Path,
    *,
    options: Options | TrainingConfig | None = None,
    name: str | None = None,
    workers: int = 1,
    device: str = "auto",
    board: Board | None = None,
    command: str = "",
) -> list[dict[str, Any]]:
    """Train every algorithm on every seed's split and write the table of results.

    Parameters
    ----------
    dataset : path
        Dataset folder.
    algorithms : sequence of str
    seeds : int
        Number of patient splits, from seed 0.
    out : path
        Results folder; what is already there is not run again.
    options : Options or TrainingConfig, optional
        Options of the runs; a configuration's settings are those of the algorithm it names.

    Returns
    -------
    list of dict
        The runs' records.
    """
    place, folder = Path(dataset), Path(out)
    open_dataset(place)
    title = name or place.resolve().name
    runs = plan_comparison(algorithms, seeds, options)
    describe_study(folder, place, title, "compare", command)
    records = Study(folder, place, runs, title, device).execute(workers, board)
    write_summary(folder)
    return records


def plan_comparison(
    algorithms: Sequence[str], seeds: int, options: Options | TrainingConfig | None = None
) -> list[PlannedRun]:
    """The runs of a comparison."""
    if not algorithms or seeds < 1:
        raise ConfigError("a comparison needs at least one algorithm and one seed")
    for algorithm in algorithms:
        ALGORITHMS.get(algorithm)
    return grid("compare", algorithms, range(seeds), as_options(options))
