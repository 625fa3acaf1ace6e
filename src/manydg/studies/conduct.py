"""Conducting experiments: plan, do the runs that are missing, and write figures, summary and description.

``manydg compare`` is the experiment ``compare``; there is one way to run any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manydg.algorithms import ALGORITHMS
from manydg.algorithms._forest import no_table
from manydg.backbones import auto_backbone, build_backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import InputSchema
from manydg.errors import ConfigError
from manydg.studies.catalogue import EXPERIMENTS
from manydg.studies.figure_data import write_figure
from manydg.studies.records import RESULTS, describe_study, read_results
from manydg.studies.settings import Options, as_options
from manydg.studies.study import Board, Experiment, PlannedRun, Record, Request, Study, ok, open_once
from manydg.studies.summary import Summary, check_reference, summarize_folder, write_summary
from manydg.studies.tuning import keep_tuning, with_tuned
from manydg.targets import target_of
from manydg.training.fit import trust_named
from manydg.training.inference import contradiction, looks_ahead

Report = Callable[[str], None]


def make_request(
    name: str, dataset: str | Path, options: Options | TrainingConfig, seeds: int, algorithms: Sequence[str]
) -> Request:
    """Check that an experiment fits a dataset and gather what it needs."""
    experiment = EXPERIMENTS.get(name)
    data = open_once(dataset)
    if data.target.kind not in experiment.kinds:
        raise ConfigError(
            f"the experiment '{name}' is for targets of the kind {' or '.join(experiment.kinds)}, and those of "
            f"{dataset} are {data.target.kind}"
        )
    # Names in a settings file were refused when it was read.
    asked = as_options(options)
    trust_named(asked.common)
    for algorithm in algorithms:
        ALGORITHMS.trust(algorithm)
        ALGORITHMS.get(algorithm)
    return Request(data, asked, seeds, tuple(algorithms))


def fitting(request: Request, report: Report) -> Request:
    """The request without the algorithms that make no sense for its data, each named with the reason."""
    data, config = request.dataset, request.config
    schema, target = InputSchema.of(data), target_of(data.target, config.loss)
    name = auto_backbone(schema) if config.backbone == "auto" else config.backbone
    backbone = build_backbone(name, schema, config.backbone_options)
    kept = []
    for algorithm in request.algorithms:
        cls = ALGORITHMS.get(algorithm)
        reason = cls.refuses(target, backbone) or contradiction(algorithm, config) or cls.lacks()
        reason = reason or looks_ahead(config.replace(algorithm=algorithm, settings={}), data)
        if reason is None and cls.sampling == "whole":
            reason = no_table(schema)
        if reason is None:
            kept.append(algorithm)
        else:
            report(f"{algorithm} is left out: {reason}")
    return replace(request, algorithms=tuple(kept))


def plan_experiment(name: str, request: Request) -> list[PlannedRun]:
    """The runs of an experiment."""
    return EXPERIMENTS.get(name)().plan(request)


def scaled_down(name: str, request: Request) -> str:
    """What an experiment makes smaller than in the paper because the dataset is; empty where nothing."""
    return EXPERIMENTS.get(name)().scaled(request)


@dataclass(frozen=True)
class Conducted:
    """Experiments that were run to their end.

    - ``records``: Experiment to the records of its runs.
    - ``summaries``: Of everything in the results folder.
    - ``files``: Where the summaries were written.
    """

    records: Mapping[str, list[Record]]
    summaries: list[Summary]
    files: list[Path]


def conduct(
    requests: Mapping[str, Request],
    dataset: str | Path,
    out: str | Path,
    *,
    title: str | None = None,
    workers: int = 1,
    device: str = "auto",
    board: Board | None = None,
    command: str = "",
    tuned: str | Path | None = None,
    reference: str | None = None,
    report: Report | None = None,
) -> Conducted:
    """Run experiments on one dataset to their end, and write their figures and the summary.

    - ``requests``: Name of each experiment to what is asked of it. A run that several ask for is done once.
    - ``dataset``, ``out``: Dataset folder, and results folder: what is already there is not run again.
    - ``title``: What to call the dataset.
    - ``workers``, ``device``, ``board``: Of the runs.
    - ``command``: How to make the results again, for the report.
    - ``tuned``: Folder of the searches whose choices a comparison's requests have, for the record.
    - ``reference``: The method that the others are tested against; by default the folder's, which is ManyDG at first.
    - ``report``: Called with lines about the experiments that are worth knowing.
    """
    folder, data_folder = Path(out), Path(dataset)
    name_of_data = title or data_folder.resolve().name
    experiments: dict[str, Experiment] = {name: EXPERIMENTS.get(name)() for name in requests}
    plans = {name: experiments[name].plan(request) for name, request in requests.items()}
    if "compare" in requests:
        keep_tuning(folder, name_of_data, None if tuned is None else Path(tuned))
    if reference is not None:
        before = read_results(folder) if (folder / RESULTS).exists() else []
        planned = [run.config.algorithm for runs in plans.values() for run in runs]
        check_reference(reference, [*planned, *(record.algorithm for record in before)])
    describe_study(folder, open_once(data_folder), name_of_data, dict.fromkeys(requests, command), reference)
    records: dict[str, list[Record]] = {}
    for limit in dict.fromkeys(experiment.workers for experiment in experiments.values()):
        group = [name for name, experiment in experiments.items() if experiment.workers == limit]
        runs = [run for name in group for run in plans[name]]
        allowed = workers if limit is None else min(workers, limit)
        done = iter(Study(folder, data_folder, runs, name_of_data, device).execute(allowed, board))
        records |= {name: [next(done) for _ in plans[name]] for name in group}
    for name, experiment in experiments.items():
        _write_figures(
            experiment, name, requests[name], records[name], folder, name_of_data, report or (lambda line: None)
        )
    summaries = summarize_folder(folder)
    return Conducted(records, summaries, write_summary(folder, summaries))


def _write_figures(
    experiment: Experiment,
    name: str,
    request: Request,
    records: Sequence[Record],
    folder: Path,
    name_of_data: str,
    report: Report,
) -> None:
    note = experiment.scaled(request)
    if note:
        report(f"{name}: {note}")
    done = ok(records)
    if not done:
        report(f"{name}: no run ended well, so there is nothing to draw; the errors stand in {folder / RESULTS}")
        return
    for figure_name, figure in experiment.aggregate(request, done, folder).items():
        notes = " ".join(part for part in (figure.note, note) if part)
        write_figure(folder, f"{name_of_data}-{figure_name}", replace(figure, dataset=name_of_data, note=notes))


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
    tuned: str | Path | None = None,
    reference: str | None = None,
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
    tuned : path, optional
        Folder of :func:`manydg.studies.tuning.tune`: every algorithm runs on each split with what was chosen there.
    reference : str, optional
        The algorithm that the others are tested against.

    Returns
    -------
    list of RunRecord
    """
    request = make_request("compare", dataset, as_options(options), seeds, algorithms)
    if tuned is not None:
        chosen = with_tuned(request.options, tuned, request.dataset, request.algorithms, range(seeds))
        request = replace(request, options=chosen)
    conducted = conduct(
        {"compare": request}, dataset, out, title=name, workers=workers, device=device, board=board, command=command,
        tuned=tuned, reference=reference,
    )  # fmt: skip
    return conducted.records["compare"]
