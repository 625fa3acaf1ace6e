"""Studies and experiments: runs planned first, cached by content, resumed after a kill, done side by side.

A run's id is a hash of the code, the data and its options, so that a run which any experiment has done is not done
again.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from manydg.algorithms import ALGORITHMS
from manydg.config import TrainingConfig, pick_device
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.data.info import KINDS
from manydg.data.splits import Split, split_named, split_patients
from manydg.data.storage import DESCRIPTION, Verify
from manydg.errors import ManyDGError
from manydg.evaluation.metrics import Predictions, write_predictions
from manydg.files import code_version, fingerprint, remove_partial_files
from manydg.jobs import Job, current_engine
from manydg.studies.figure_data import Axis, Curve, FigureData, Line, XAxis
from manydg.studies.records import (
    FAILURE,
    RUN_RECORD,
    RUNS,
    STATUS,
    StatusFile,
    append,
    collect,
    mark_use,
    read_run,
    read_runs,
)
from manydg.studies.settings import Options, as_options, spelled_out
from manydg.training.fit import Fitted, Reporter, fit, fit_further, trust_named
from manydg.training.inference import ContextCache, sharing_context
from manydg.training.record import CurvePoint, EpochEntry, RunRecord, Use, Variant
from manydg.training.run import (
    PREDICTIONS,
    data_identity,
    draw_split,
    make_record,
    predict_held_out,
    sides_of,
    train,
    warm_up,
)

TRAIN = "train"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: what to train, and what it is for.

    - ``experiment``: The experiment the run belongs to.
    - ``variant``: What distinguishes the run within its experiment, as JSON values. A procedure other than ``train``
      may read it.
    - ``procedure``: How the run is done: a name in :data:`manydg.studies.study.PROCEDURES`.
    """

    experiment: str
    config: TrainingConfig
    variant: Variant = field(default_factory=dict)
    procedure: str = TRAIN

    @property
    def use(self) -> Use:
        """What the run is to its experiment."""
        return Use(self.experiment, self.variant)

    def identity(self, data: str) -> str:
        """The run's id: the same code, data and options always give the same, whatever experiment asks for them.

        - ``data``: What :func:`~manydg.training.run.data_identity` gives.
        """
        # To plain training the variant is a name for what the options say already.
        read = {} if self.procedure == TRAIN else dict(self.variant)
        return fingerprint(code_version(), data, [self.procedure, read, self.config.to_json()])

    def settled(self, dataset: DomainDataset) -> PlannedRun:
        """The same run with every default of its options spelled out."""
        trust_named(self.config)
        return replace(self, config=spelled_out(self.config, dataset))


class Board(Protocol):
    """Shows how a study is going."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        """``runs`` are all the different runs there are to be, of which ``done`` need not be done again."""

    def run_started(self, run: PlannedRun, status: Path) -> None:
        """``status`` is a small JSON file that says how far the run is; it comes and goes with the run."""

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None: ...

    def ended(self) -> None:
        """Nothing more will come, because all is done or because something stopped the study."""


class SilentBoard:
    """Shows nothing."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        pass

    def run_started(self, run: PlannedRun, status: Path) -> None:
        pass

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        pass

    def ended(self) -> None:
        pass


@dataclass(frozen=True)
class Study:
    """Planned runs over one dataset folder, and the folder their results go to.

    - ``folder``: ``results.jsonl`` and a folder for each run are kept here. Several studies may share it.
    - ``dataset``: Dataset folder.
    - ``name``: What to call the dataset.
    """

    folder: Path
    dataset: Path
    runs: Sequence[PlannedRun]
    name: str
    device: str = "auto"

    def keyed(self) -> list[tuple[str, PlannedRun]]:
        """The planned runs in order, each with its id; runs of the same content have the same."""
        data = open_once(self.dataset)
        identity = data_identity(data)
        settled = [run.settled(data) for run in self.runs]
        return [(run.identity(identity), run) for run in settled]

    def is_done(self, key: str) -> bool:
        """Whether a run is over; one killed between its training and the study's marks on its record is not."""
        file = self._folder_of(key) / RUN_RECORD
        return file.exists() and RunRecord.read(file).run == key

    def execute(self, workers: int = 1, board: Board | None = None) -> list[RunRecord]:
        """Do every run that is not done yet.

        - returns: The record of each planned run, in the order planned, as its experiment sees it.
        """
        listener = board or SilentBoard()
        planned = self.keyed()
        different: dict[str, PlannedRun] = {}
        for key, run in planned:
            different.setdefault(key, run)
            mark_use(self._folder_of(key), run.use)
        remove_partial_files(self.folder)
        todo = [(key, run) for key, run in different.items() if not self.is_done(key)]
        listener.planned(list(different.values()), len(different) - len(todo))
        collect(self.folder)
        try:
            self._do_all(todo, workers, listener)
        finally:
            listener.ended()
        return [read_run(self._folder_of(key)).used_by(run.use) for key, run in planned]

    def _do_all(self, todo: Sequence[tuple[str, PlannedRun]], workers: int, board: Board) -> None:
        for key, run, record in self._do(todo, workers, board):
            if not record.ok:
                record.write(self._folder_of(key) / FAILURE)
            append(self.folder, read_run(self._folder_of(key)))
            board.run_ended(run, record)
        # A run that failed before has two lines by now, unless everything was done already.
        if todo:
            collect(self.folder)

    def _do(
        self, todo: Sequence[tuple[str, PlannedRun]], workers: int, board: Board
    ) -> Iterator[tuple[str, PlannedRun, RunRecord]]:
        runs = dict(todo)
        jobs = [self._job(key, run) for key, run in todo]

        def started(job: Job[RunJob]) -> None:
            board.run_started(runs[job.name], self._folder_of(job.name) / STATUS)

        engine = current_engine()
        for job, record in engine.run(do_run, jobs, workers, device=self.device, started=started):
            yield job.name, runs[job.name], record

    def _job(self, key: str, run: PlannedRun) -> Job[RunJob]:
        # Absolute, since the job may be done by a process elsewhere.
        dataset, folder = self.dataset.absolute(), self._folder_of(key).absolute()
        return Job(key, (dataset, folder), RunJob(key, run, dataset, self.name, folder, self.device))

    def _folder_of(self, key: str) -> Path:
        return self.folder / RUNS / key


@dataclass(frozen=True)
class RunJob:
    """What a process needs to know to do one run of a study.

    - ``key``: The run's id.
    - ``run``: With every default of its options filled in.
    - ``dataset``, ``name``: The dataset's folder and what to call it.
    - ``folder``: The run's.
    """

    key: str
    run: PlannedRun
    dataset: Path
    name: str
    folder: Path
    device: str


def do_run(job: RunJob) -> RunRecord:
    """Do one planned run; a failure becomes a record too."""
    run, folder = job.run, job.folder
    start = time.perf_counter()
    status = StatusFile(folder / STATUS)
    try:
        dataset = open_once(job.dataset, verify="sizes")
        task = RunTask(dataset, run.config, run.variant, folder, job.device, job.name, status)
        record = PROCEDURES[run.procedure](task)
    except Exception as error:  # noqa: BLE001 - a run that fails must not stop the others, whatever the reason
        known = isinstance(error, ManyDGError)
        record = RunRecord(
            run=job.key,
            algorithm=run.config.algorithm,
            seed=run.config.seed,
            dataset=job.name,
            config=run.config,
            code_version=code_version(),
            seconds=time.perf_counter() - start,
            status="failed",
            error=str(error) if known else "".join(traceback.format_exception(error)),
        )
    finally:
        status.remove()
    marked = record.replace(
        run=job.key, experiment=run.experiment, variant=dict(run.variant), folder=f"{RUNS}/{job.key}"
    )
    if marked.ok:
        marked.write(folder / RUN_RECORD)
    return marked


def grid(
    experiment: str, algorithms: Iterable[str], seeds: Iterable[int], options: Options | TrainingConfig
) -> list[PlannedRun]:
    """Every algorithm with every seed, all algorithms of one seed before the next seed."""
    names, asked = list(algorithms), as_options(options)
    return [PlannedRun(experiment, asked.of(name, seed)) for seed in seeds for name in names]


CONTEXTS = ContextCache()
"""Of this process: its runs of one split, one after the other, make the patients' context once."""
_opened: dict[tuple[Path, int], DomainDataset] = {}


def open_once(folder: str | Path, verify: Verify = "auto") -> DomainDataset:
    """A dataset folder, opened anew only if another one was opened since or if it was written anew."""
    path = Path(folder)
    description = path / DESCRIPTION
    key = (path.resolve(), description.stat().st_mtime_ns if description.exists() else 0)
    if key not in _opened:
        data = open_dataset(path, verify=verify)
        _opened.clear()
        _opened[key] = data
    return _opened[key]


@dataclass(frozen=True)
class Plan:
    """Planned runs, which of them are done, and how long the others will take one after the other.

    - ``runs``: Different ones only: a run that serves several experiments is here once.
    - ``seconds``: ``None`` where no run of the same kind was done before.
    """

    runs: list[PlannedRun]
    done: list[bool]
    seconds: float | None


def plan_study(study: Study) -> Plan:
    """What a study would do, and how long it would take by the runs in its folder."""
    runs = dict(study.keyed())
    done = {key: study.is_done(key) for key in runs}
    dataset = open_once(study.dataset)
    rates = _seconds_per_sample(dataset, read_runs(study.folder))
    total: float | None = 0.0
    for key, run in runs.items():
        rate = rates.get((run.config.algorithm, run.config.backbone))
        if not done[key]:
            total = None if total is None or rate is None else total + rate * _samples_shown(run, dataset)
    return Plan(list(runs.values()), list(done.values()), total)


def _seconds_per_sample(dataset: DomainDataset, records: Iterable[RunRecord]) -> dict[tuple[str, str], float]:
    """Mean seconds of a training sample in an epoch, by algorithm and backbone."""
    content = dataset.content_hash()
    rates: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.ok and record.dataset_hash == content and record.seconds is not None and not record.curve:
            shown = record.samples.train * max(1, record.epochs)
            rates.setdefault((record.algorithm, record.config.backbone), []).append(record.seconds / shown)
    return {kind: sum(values) / len(values) for kind, values in rates.items()}


def _samples_shown(run: PlannedRun, dataset: DomainDataset) -> float:
    """Training samples times epochs."""
    train, val, test = run.config.ratios
    share = train / (train + val + test)
    patients = run.variant.get("training patients")
    if isinstance(patients, int | float):
        share = min(share, patients / dataset.n_patients)
    epochs = float(run.config.epochs)
    if run.procedure == "continual":
        # Half of the patients at the start; later each step shows a tenth of the others and a little of the rest.
        epochs = epochs / 2 + STEPS * tuning_epochs(run.config) * 0.15
    return len(dataset) * share * epochs


# How a planned run is done: a procedure takes the data and the run's options and returns a record


@dataclass(frozen=True, eq=False)
class RunTask:
    """One run to do.

    - ``variant``: What is special about the run, by name.
    - ``folder``: Where it leaves what it makes.
    - ``name``: The dataset's.
    """

    dataset: DomainDataset
    config: TrainingConfig
    variant: Variant
    folder: Path
    device: str
    name: str
    reporter: Reporter


# Continual learning: patients arrive in order; the model is tuned on the new ones and a few samples of the old.


STEPS = 10
SAMPLES_KEPT = 4
PAPER_SIZES = (1000, 100)
REPLAY = "replay"
"""The variant's key: how many samples of each earlier patient join every step."""
Rows = npt.NDArray[np.int64]


def patients_by_step(available: int) -> tuple[int, int]:
    """Patients at the start and in each step: the paper's, or half of all and tenths of the rest where there are fewer.

    Examples
    --------
    >>> patients_by_step(2162), patients_by_step(62), patients_by_step(8)
    ((1000, 100), (32, 3), (2, 1))
    """
    first, each = PAPER_SIZES
    if available >= first + STEPS * each:
        return first, each
    each = max(1, available // (2 * STEPS))
    return max(2, available - STEPS * each), each


def tuning_epochs(config: TrainingConfig) -> int:
    """Epochs of each step: a fifth of those of the pre-training."""
    return max(1, config.epochs // 5)


def learn_continually(task: RunTask) -> RunRecord:
    """Pre-train on the first patients by id, then go on in steps; the test patients stay the same.

    The variant says how many samples of each earlier patient join every step. The record's ``curve`` holds the test
    metrics after each step.
    """
    device, reporter = pick_device(task.device), task.reporter
    first_use = warm_up(device)
    start = time.perf_counter()
    dataset, config = task.dataset, task.config
    split = draw_split(dataset, config)
    sides = sides_of(dataset, split)
    scorer = _Scorer(dataset, config, split, sides, task.name, str(device))
    train, val, arrival = sides["train"], sides["val"], order_of_arrival(sides["train"])
    (first, each), replay = patients_by_step(train.n_patients), int(task.variant[REPLAY])
    reporter.started(config.algorithm, STEPS + 1, 1)
    fitted = fit(config, _only(train, np.flatnonzero(arrival < first)), val, device)
    curve = [scorer.point(fitted, 0, first, reporter)]
    rng = np.random.default_rng([config.seed, 11])
    for step in range(1, STEPS + 1):
        seen = first + (step - 1) * each
        rows = np.flatnonzero((arrival >= seen) & (arrival < seen + each))
        if not len(rows):
            break
        rows = np.concatenate([rows, sample_of_each(train.domains.cpu().numpy(), arrival < seen, replay, rng)])
        # A single sample cannot train a network with batch normalisation; it is left out.
        if len(rows) > 1:
            tuning = config.replace(epochs=tuning_epochs(config), seed=config.seed + 1000 * step)
            fitted = fit_further(fitted, tuning, _only(train, rows), val, device)
        curve.append(scorer.point(fitted, step, seen + each, reporter))
    record = scorer.record(fitted, time.perf_counter() - start, task.folder)
    return record.replace(curve=tuple(curve), first_use_seconds=first_use)


def order_of_arrival(train: DomainDataset) -> Rows:
    """Each sample's patient as a rank by id: numbers in the order of their value, text in the order of the alphabet."""
    names = train.patients.tolist()
    key = (lambda name: (int(name), "")) if all(name.isdigit() for name in names) else (lambda name: (0, name))
    order = sorted(range(len(names)), key=lambda code: key(names[code]))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return np.asarray(rank[train.domains.cpu().numpy()], np.int64)


def sample_of_each(domains: Rows, among: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Rows:
    """Up to ``count`` random samples of each patient, of the samples marked."""
    rows = np.flatnonzero(among)
    rows = rows[np.lexsort((rng.random(len(rows)), domains[rows]))]
    new = np.r_[True, domains[rows][1:] != domains[rows][:-1]] if len(rows) else np.zeros(0, bool)
    rank = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    return np.asarray(rows[rank < count], np.int64)


def _only(train: DomainDataset, rows: Rows) -> DomainDataset:
    """Some rows of the training patients, each patient under the code it has among all of them."""
    chosen = train.select(rows)
    return dataclasses.replace(chosen, domains=train.domains[torch.from_numpy(rows)], patients=train.patients)


@dataclass(frozen=True)
class _Scorer:
    """Scores the model of each step on the same test patients."""

    dataset: DomainDataset
    config: TrainingConfig
    split: Split
    sides: Mapping[str, DomainDataset]
    name: str
    device: str

    def point(self, fitted: Fitted, step: int, seen: int, reporter: Reporter) -> CurvePoint:
        record = self._score(fitted, predict_held_out(fitted.algorithm, self.dataset, self.split), 0.0)
        losses = fitted.history[-1].losses if fitted.history else {}
        reporter.epoch_ended(EpochEntry(step + 1, losses, record.val, 0.0))
        people = min(seen, self.sides["train"].n_patients)
        return CurvePoint(step, people, record.val, record.test)

    def record(self, fitted: Fitted, seconds: float, folder: Path) -> RunRecord:
        """The record of the last step's model, whose predictions are kept."""
        predictions = predict_held_out(fitted.algorithm, self.dataset, self.split)
        write_predictions(folder / PREDICTIONS, predictions)
        return self._score(fitted, predictions, seconds)

    def _score(self, fitted: Fitted, predictions: Mapping[str, Predictions], seconds: float) -> RunRecord:
        return make_record(
            self.config,
            self.dataset,
            self.sides,
            predictions,
            fitted,
            name=self.name,
            run="",
            seconds=seconds,
            device=self.device,
        )


def train_once(task: RunTask) -> RunRecord:
    """Train on the split of the seed and score the test patients."""
    return _train(task, None)


def train_on_fewer(task: RunTask) -> RunRecord:
    """Train on so many patients; whatever their number and the seed, the test patients are the same."""
    return _train(task, fewer_patients(task.dataset, task.config, int(task.variant["training patients"])))


def _train(task: RunTask, split: Split | None) -> RunRecord:
    with sharing_context(CONTEXTS):
        run = train(
            task.dataset, task.config,
            split=split, out=task.folder, device=task.device, name=task.name, reporter=task.reporter,
        )  # fmt: skip
    return run.record


def fewer_patients(dataset: DomainDataset, config: TrainingConfig, count: int) -> Split:
    """A split with ``count`` training patients.

    The test patients are those of seed 0. The seed decides which of the others train and validate; smaller sets of
    training patients lie within larger ones.
    """
    test = draw_split(dataset, config.replace(seed=0)).patients("test")
    others = dataset.subset(sorted(set(dataset.patients.tolist()) - set(test.tolist())))
    train_share, val_share, _ = config.ratios
    split = split_patients(others, (train_share, val_share, 0.0), config.seed)
    order = np.random.default_rng([config.seed, 13]).permutation(np.sort(split.patients("train")))
    return split_named(dataset, train=order[:count], val=split.patients("val"), test=test)


PROCEDURES: dict[str, Callable[[RunTask], RunRecord]] = {
    "train": train_once,
    "timing": train_once,
    "limited-data": train_on_fewer,
    "continual": learn_continually,
}
"""Plain training under the name ``timing`` is never shared with runs that may have gone on side by side."""


# What an experiment is: runs to plan, and a way to aggregate their records into figures


Record = RunRecord


@dataclass(frozen=True)
class Request:
    """What a user asks of an experiment.

    - ``options``: Options of the runs; the experiment sets the algorithm, the settings it varies and the seed.
    - ``seeds``: Number of patient splits.
    - ``algorithms``: Algorithms to set against one another, where the experiment compares any.
    - ``timed_epochs``: Epochs to time in the running-time experiment.
    - ``label_delay``: How long it takes until the label of an unseen patient's sample is known, in the unit of the
      dataset's times.
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

    compared: ClassVar[tuple[str, ...]] = ()
    """Which algorithms of the main comparison it looks at; those asked for where it names none."""

    def plan(self, request: Request) -> list[PlannedRun]:
        """The runs, by default of the main comparison; those that another experiment has done are not done again."""
        return grid("compare", self.compared or request.algorithms, range(request.seeds), request.options)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        """Figures for the report, by file name; none where the records say it all.

        - ``records``: Of the runs that ended well, at least one.
        - ``folder``: The results folder.
        """
        return {}

    def scaled(self, request: Request) -> str:
        """What was made smaller than in the paper because the dataset is, as a sentence; empty where nothing was."""
        return ""


def ok(records: Sequence[Record]) -> list[Record]:
    """The records of runs that did not fail."""
    return [record for record in records if record.ok]


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
