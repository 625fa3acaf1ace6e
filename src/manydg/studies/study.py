"""Studies: runs planned first, cached by content, resumed after a kill, side by side on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from manydg.code_version import code_version
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ManyDGError, StorageError
from manydg.files import fingerprint, remove_partial_files, write_unsynced
from manydg.studies.engines import current_engine
from manydg.studies.procedures import PROCEDURES, Job
from manydg.studies.records import (
    FAILURE,
    RESULTS,
    RUN_RECORD,
    RUNS,
    STATUS,
    STUDY,
    append,
    collect,
    describe_study,
    mark_use,
    read_results,
    read_run,
)
from manydg.studies.settings import Options, as_options, spelled_out
from manydg.training.record import EpochEntry, Metrics, RunRecord, Use, Variant

# How far a run is, in a small file beside it: what the progress board reads, also from other processes.


@dataclass(frozen=True)
class RunStatus:
    """How far a run is: its last finished epoch."""

    epoch: int = 0
    epochs: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    val: Metrics = field(default_factory=dict)
    seconds: float = 0.0


class StatusFile:
    """A reporter of training runs that keeps the last epoch's figures in a file.

    A status that cannot be written is let go: it must not stop a run.

    Parameters
    ----------
    file : Path
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.epochs = 0

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        self.epochs = epochs
        self._write(RunStatus(first_epoch - 1, epochs))

    def epoch_ended(self, entry: EpochEntry) -> None:
        self._write(RunStatus(entry.epoch, self.epochs, entry.losses, entry.val, entry.seconds))

    def finished(self, record: RunRecord) -> None:
        pass

    def remove(self) -> None:
        """Take the file away at the end of the run."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _write(self, status: RunStatus) -> None:
        with contextlib.suppress(StorageError):
            write_unsynced(self.file, json.dumps(dataclasses.asdict(status)))


def read_status(file: Path) -> RunStatus:
    """What a status file says; nothing where there is none yet or no more."""
    try:
        return RunStatus(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return RunStatus()


__all__ = ["RESULTS", "STUDY", "Board", "PlannedRun", "Study", "describe_study", "grid", "read_results"]

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
        return replace(self, config=spelled_out(self.config, dataset))

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "config": self.config.to_json(),
            "variant": dict(self.variant),
            "procedure": self.procedure,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PlannedRun:
        config = TrainingConfig.from_mapping(value["config"])
        return PlannedRun(value["experiment"], config, value["variant"], value["procedure"])


class Board(Protocol):
    """Hears how a study is going."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        """``runs`` are all the different runs there are to be, of which ``done`` need not be done again."""

    def run_started(self, run: PlannedRun, status: Path) -> None:
        """``status`` is a small JSON file that says how far the run is; it comes and goes with the run."""

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None: ...

    def ended(self) -> None:
        """Nothing more will come, because all is done or because something stopped the study."""


class SilentBoard:
    """Says nothing."""

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
        data = open_dataset(self.dataset)
        hash_ = data.content_hash()
        settled = [run.settled(data) for run in self.runs]
        return [(run.identity(hash_), run) for run in settled]

    def is_done(self, key: str) -> bool:
        """Whether a run is over; one killed between its training and the study's marks on its record is not."""
        file = self._place(key) / RUN_RECORD
        return file.exists() and RunRecord.read(file).run == key

    def execute(self, workers: int = 1, board: Board | None = None) -> list[RunRecord]:
        """Do every run that is not done yet.

        Returns
        -------
        list of RunRecord
            The record of each planned run, in the order planned, as its experiment sees it.
        """
        hears = board or SilentBoard()
        planned = self.keyed()
        different: dict[str, PlannedRun] = {}
        for key, run in planned:
            different.setdefault(key, run)
            mark_use(self._place(key), run.use)
        remove_partial_files(self.folder)
        todo = [(key, run) for key, run in different.items() if not self.is_done(key)]
        hears.planned(list(different.values()), len(different) - len(todo))
        collect(self.folder)
        try:
            self._do_all(todo, workers, hears)
        finally:
            hears.ended()
        return [read_run(self._place(key)).used_by(run.use) for key, run in planned]

    def _do_all(self, todo: Sequence[tuple[str, PlannedRun]], workers: int, board: Board) -> None:
        for key, run, record in self._do(todo, workers, board):
            if not record.ok:
                record.write(self._place(key) / FAILURE)
            append(self.folder, read_run(self._place(key)))
            board.run_ended(run, record)
        # A run that failed before has two lines by now, unless everything was done already.
        if todo:
            collect(self.folder)

    def _do(
        self, todo: Sequence[tuple[str, PlannedRun]], workers: int, board: Board
    ) -> Iterator[tuple[str, PlannedRun, RunRecord]]:
        runs = dict(todo)
        jobs = [self._job(key, run) for key, run in todo]

        def started(job: Mapping[str, Any]) -> None:
            board.run_started(runs[job["key"]], self._place(job["key"]) / STATUS)

        for job, record in current_engine().run(do_run, jobs, started, workers):
            yield job["key"], runs[job["key"]], record

    def _job(self, key: str, run: PlannedRun) -> dict[str, Any]:
        return {
            "run": run.to_json(),
            "key": key,
            "dataset": str(self.dataset),
            "name": self.name,
            "folder": str(self._place(key)),
            "device": self.device,
        }

    def _place(self, key: str) -> Path:
        return self.folder / RUNS / key


def do_run(job: Mapping[str, Any]) -> RunRecord:
    """Do one planned run; a failure becomes a record too."""
    run, folder = PlannedRun.from_json(job["run"]), Path(job["folder"])
    start = time.perf_counter()
    status = StatusFile(folder / STATUS)
    try:
        dataset = open_dataset(job["dataset"], verify="sizes")
        record = PROCEDURES[run.procedure](
            Job(dataset, run.config, run.variant, folder, job["device"], job["name"], status)
        )
    except Exception as error:  # noqa: BLE001 - a run that fails must not stop the others, whatever the reason
        known = isinstance(error, ManyDGError)
        record = RunRecord(
            run=job["key"],
            algorithm=run.config.algorithm,
            seed=run.config.seed,
            dataset=job["name"],
            config=run.config,
            code_version=code_version(),
            seconds=time.perf_counter() - start,
            status="failed",
            error=str(error) if known else "".join(traceback.format_exception(error)),
        )
    finally:
        status.remove()
    marked = record.replace(
        run=job["key"], experiment=run.experiment, variant=dict(run.variant), folder=f"{RUNS}/{job['key']}"
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
