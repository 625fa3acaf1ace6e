"""Studies: runs planned first, cached by content, resumed after a kill, done side by side.

A run's id is a hash of the code, the data and its options, so that a run which any experiment has done is not done
again.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from manydg.code_version import code_version
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.data.storage import DESCRIPTION, Verify
from manydg.errors import ManyDGError
from manydg.files import fingerprint, remove_partial_files
from manydg.jobs import Job, current_engine
from manydg.studies.procedures import PROCEDURES, STEPS, RunTask, tuning_epochs
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
from manydg.training.fit import trust_named
from manydg.training.record import RunRecord, Use, Variant

TRAIN = "train"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: what to train, and what it is for.

    Parameters
    ----------
    experiment : str
        The experiment the run belongs to.
    config : TrainingConfig
    variant : dict
        What distinguishes the run within its experiment, as JSON values. A procedure other than ``train`` may read it.
    procedure : str
        How the run is done: a name in :data:`manydg.studies.procedures.PROCEDURES`.
    """

    experiment: str
    config: TrainingConfig
    variant: Variant = field(default_factory=dict)
    procedure: str = TRAIN

    @property
    def use(self) -> Use:
        """What the run is to its experiment."""
        return Use(self.experiment, self.variant)

    def identity(self, dataset_hash: str) -> str:
        """The run's id: the same code, data and options always give the same, whatever experiment asks for them."""
        # To plain training the variant is a name for what the options say already.
        read = {} if self.procedure == TRAIN else dict(self.variant)
        return fingerprint(code_version(), dataset_hash, [self.procedure, read, self.config.to_json()])

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

    Parameters
    ----------
    folder : Path
        ``results.jsonl`` and a folder for each run are kept here. Several studies may share it.
    dataset : Path
        Dataset folder.
    runs : sequence of PlannedRun
    name : str
        What to call the dataset.
    device : str
    """

    folder: Path
    dataset: Path
    runs: Sequence[PlannedRun]
    name: str
    device: str = "auto"

    def keyed(self) -> list[tuple[str, PlannedRun]]:
        """The planned runs in order, each with its id; runs of the same content have the same."""
        data = open_once(self.dataset)
        hash_ = data.content_hash()
        settled = [run.settled(data) for run in self.runs]
        return [(run.identity(hash_), run) for run in settled]

    def is_done(self, key: str) -> bool:
        """Whether a run is over; one killed between its training and the study's marks on its record is not."""
        file = self._folder_of(key) / RUN_RECORD
        return file.exists() and RunRecord.read(file).run == key

    def execute(self, workers: int = 1, board: Board | None = None) -> list[RunRecord]:
        """Do every run that is not done yet.

        Returns
        -------
        list of RunRecord
            The record of each planned run, in the order planned, as its experiment sees it.
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

    Parameters
    ----------
    key : str
        The run's id.
    run : PlannedRun
        With every default of its options filled in.
    dataset, name
        The dataset's folder and what to call it.
    folder : Path
        The run's.
    device : str
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

    Attributes
    ----------
    runs : list of PlannedRun
        Different ones only: a run that serves several experiments is here once.
    done : list of bool
    seconds : float or None
        ``None`` where no run of the same kind was done before.
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
