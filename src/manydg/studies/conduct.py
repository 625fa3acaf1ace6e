"""Conducting experiments: plan, run what is not done yet, fold, and leave everything where the report looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manydg.algorithms import ALGORITHMS
from manydg.backbones import build_backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import open_dataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError
from manydg.studies.catalogue import EXPERIMENTS
from manydg.studies.experiment import Experiment, Record, Request, ok
from manydg.studies.figure_data import write_figure
from manydg.studies.records import describe_study
from manydg.studies.settings import Options, as_options
from manydg.studies.study import Board, PlannedRun, Study, grid
from manydg.studies.summary import write_summary
from manydg.targets import target_of
from manydg.training.fit import auto_backbone
from manydg.training.patient_context import looks_ahead

_MOST_COLUMNS = 2000


def make_request(
    name: str, dataset: str | Path, options: Options | TrainingConfig, seeds: int, algorithms: Sequence[str]
) -> Request:
    """Check that an experiment fits a dataset and gather what it needs."""
    experiment = EXPERIMENTS.get(name)
    data = open_dataset(dataset)
    if data.target.kind not in experiment.kinds:
        raise ConfigError(
            f"the experiment '{name}' is for targets of the kind {' or '.join(experiment.kinds)}, and those of "
            f"{dataset} are {data.target.kind}"
        )
    for algorithm in algorithms:
        ALGORITHMS.get(algorithm)
    return Request(data, as_options(options), seeds, tuple(algorithms))


def fitting(request: Request, say: Callable[[str], None]) -> Request:
    """The request without the algorithms that make no sense for its data, each named with the reason."""
    data, config = request.dataset, request.config
    schema, target = InputSchema.of(data), target_of(data.target)
    name = auto_backbone(schema) if config.backbone == "auto" else config.backbone
    backbone = build_backbone(name, schema, config.backbone_options)
    kept = []
    for algorithm in request.algorithms:
        cls = ALGORITHMS.get(algorithm)
        reason = cls.refuses(target, backbone) or looks_ahead(algorithm, config.context)
        if reason is None and cls.sampling == "whole":
            reason = _no_table(schema)
        if reason is None:
            kept.append(algorithm)
        else:
            say(f"{algorithm} is left out: {reason}")
    return replace(request, algorithms=tuple(kept))


def _no_table(schema: InputSchema) -> str | None:
    """Why inputs are not for a learner of tables: rows of different lengths, or raw signals."""
    if any(column.nesting for column in schema.columns.values()):
        return "it takes dense inputs only, and these have rows of different lengths"
    values = sum(math.prod(column.shape) for column in schema.columns.values())
    if values > _MOST_COLUMNS:
        return f"it reads tables, and a sample here has {values:,} values"
    return None


def plan_experiment(name: str, request: Request) -> list[PlannedRun]:
    """The runs of an experiment."""
    return EXPERIMENTS.get(name)().plan(request)


def scaled_down(name: str, request: Request) -> str:
    """What an experiment makes smaller than in the paper because the dataset is; empty where nothing."""
    return EXPERIMENTS.get(name)().scaled(request)


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
    say: Callable[[str], None] | None = None,
) -> list[Record]:
    """Run an experiment to its end and write its figures and summary.

    Parameters
    ----------
    name : str
        Of the experiment.
    dataset, out : path
        Dataset folder, and results folder: what is already there is not run again.
    request : Request
    title : str, optional
        What to call the dataset.
    command : str
        How to make the results again, for the report.
    say : callable, optional
        Hears what is worth knowing about the experiment, a line at a time.

    Returns
    -------
    list of RunRecord
        Of its runs.
    """
    found = conduct_together(
        {name: request}, dataset, out, title=title, workers=workers, device=device, board=board,
        commands={name: command}, say=say,
    )  # fmt: skip
    return found[name]


def conduct_together(
    requests: Mapping[str, Request],
    dataset: str | Path,
    out: str | Path,
    *,
    title: str | None = None,
    workers: int = 1,
    device: str = "auto",
    board: Board | None = None,
    commands: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, list[Record]]:
    """Run several experiments on one dataset as one study, then fold each; the names are the requests' keys."""
    folder, place = Path(out), Path(dataset)
    called = title or place.resolve().name
    experiments: dict[str, Experiment] = {name: EXPERIMENTS.get(name)() for name in requests}
    for name in experiments:
        describe_study(folder, place, called, name, (commands or {}).get(name, ""))
    records: dict[str, list[Record]] = {}
    for limit in dict.fromkeys(experiment.workers for experiment in experiments.values()):
        group = [name for name, experiment in experiments.items() if experiment.workers == limit]
        plans = {name: experiments[name].plan(requests[name]) for name in group}
        runs = [run for name in group for run in plans[name]]
        allowed = workers if limit is None else min(workers, limit)
        done = iter(Study(folder, place, runs, called, device).execute(allowed, board))
        records |= {name: [next(done) for _ in plans[name]] for name in group}
    for name, experiment in experiments.items():
        _fold(experiment, name, requests[name], records[name], folder, called, say or _nobody)
    write_summary(folder)
    return records


def _fold(
    experiment: Experiment,
    name: str,
    request: Request,
    records: Sequence[Record],
    folder: Path,
    called: str,
    say: Callable[[str], None],
) -> None:
    note = experiment.scaled(request)
    if note:
        say(f"{name}: {note}")
    done = ok(records)
    if not done:
        say(f"{name}: no run ended well, so there is nothing to draw; the errors stand in {folder / 'results.jsonl'}")
        return
    for figure_name, figure in experiment.fold(request, done, folder).items():
        notes = " ".join(part for part in (figure.note, note) if part)
        write_figure(folder, f"{called}-{figure_name}", replace(figure, dataset=called, note=notes))


def _nobody(line: str) -> None:
    pass


# The main table: algorithms and controls against one another on patients none of them has seen.


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
) -> list[Record]:
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
    list of RunRecord
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
