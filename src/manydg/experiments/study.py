"""Studies: runs planned first, cached by content, resumed after a kill, side by side on one machine."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from manydg.data.storage import open_dataset, remove_leftovers, write_atomically
from manydg.errors import ManyDGError, StorageError, TrainingError, warn_plainly
from manydg.experiments.procedures import PROCEDURES
from manydg.training.config import TrainingConfig, fingerprint
from manydg.training.version import code_version

RESULTS, RUNS, STUDY = "results.jsonl", "runs", "study.json"
RUN_RECORD, FAILURE = "run.json", "failed.json"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: what to train, and what it is for.

    Parameters
    ----------
    experiment : str
        The experiment the run belongs to.
    config : TrainingConfig
    variant : dict
        What distinguishes the run within its experiment, as JSON values; the procedure may read it.
    procedure : str
        How the run is done: a name in :data:`manydg.experiments.procedures.PROCEDURES`.
    """

    experiment: str
    config: TrainingConfig
    variant: Mapping[str, Any] = field(default_factory=dict)
    procedure: str = "train"

    def identity(self, dataset_hash: str) -> str:
        """The run's id: the same code, data and options always give the same."""
        wanted = [self.procedure, dict(self.variant), self.config.to_json()]
        return fingerprint(code_version(), dataset_hash, wanted)

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

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None: ...

    def run_started(self, run: PlannedRun) -> None: ...

    def run_ended(self, run: PlannedRun, record: Mapping[str, Any]) -> None: ...


class SilentBoard:
    """Says nothing."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        pass

    def run_started(self, run: PlannedRun) -> None:
        pass

    def run_ended(self, run: PlannedRun, record: Mapping[str, Any]) -> None:
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

    def execute(self, workers: int = 1, board: Board | None = None) -> list[dict[str, Any]]:
        """Do every run that is not done yet; returns the records of this study's runs in the order planned."""
        hears = board or SilentBoard()
        hash_ = open_dataset(self.dataset).content_hash()
        places = {run.identity(hash_): run for run in self.runs}
        remove_leftovers(self.folder)
        todo = [(key, run) for key, run in places.items() if not self._is_done(key)]
        hears.planned(self.runs, len(places) - len(todo))
        self._collect()
        for key, run, record in self._do(todo, workers, hears):
            if record["status"] == "failed":
                write_atomically(self._place(key, FAILURE), json.dumps(record, indent=1))
            self._collect()
            hears.run_ended(run, record)
        return [self._read(key) for key in places]

    def _do(
        self, todo: Sequence[tuple[str, PlannedRun]], workers: int, board: Board
    ) -> Iterator[tuple[str, PlannedRun, dict[str, Any]]]:
        jobs = [(key, run, self._job(key, run)) for key, run in todo]
        if workers <= 1:
            for key, run, job in jobs:
                board.run_started(run)
                yield key, run, do_run(job)
            return
        context = multiprocessing.get_context("spawn")
        with (
            _killed_worker_named(self.folder),
            ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool,
        ):
            waiting: dict[Future[dict[str, Any]], tuple[str, PlannedRun]] = {}
            queue = iter(jobs)
            while True:
                for key, run, job in itertools.islice(queue, workers - len(waiting)):
                    board.run_started(run)
                    waiting[pool.submit(do_run, job)] = (key, run)
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    key, run = waiting.pop(future)
                    yield key, run, future.result()

    def _job(self, key: str, run: PlannedRun) -> dict[str, Any]:
        return {
            "run": run.to_json(),
            "key": key,
            "dataset": str(self.dataset),
            "name": self.name,
            "folder": str(self.folder / RUNS / key),
            "device": self.device,
        }

    def _is_done(self, key: str) -> bool:
        """Whether a run is over; one killed between its training and the study's marks on its record is not."""
        file = self._place(key, RUN_RECORD)
        return file.exists() and read_record(file).get("run") == key

    def _place(self, key: str, file: str) -> Path:
        return self.folder / RUNS / key / file

    def _read(self, key: str) -> dict[str, Any]:
        done = self._place(key, RUN_RECORD)
        return read_record(done if done.exists() else self._place(key, FAILURE))

    def _collect(self) -> None:
        """Write ``results.jsonl`` anew from the runs in the folder: it never misses one or holds one twice."""
        lines = [json.dumps(record) for record in read_runs(self.folder)]
        write_atomically(self.folder / RESULTS, "".join(line + "\n" for line in lines))


def do_run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do one planned run; a failure becomes a record too."""
    run, folder = PlannedRun.from_json(job["run"]), Path(job["folder"])
    start = time.perf_counter()
    place = f"{RUNS}/{job['key']}"
    marks = {"run": job["key"], "experiment": run.experiment, "variant": dict(run.variant), "folder": place}
    try:
        dataset = open_dataset(job["dataset"], verify="sizes")
        record = PROCEDURES[run.procedure](dataset, run.config, run.variant, folder, job["device"], job["name"])
    except Exception as error:  # noqa: BLE001 - a run that fails must not stop the others, whatever the reason
        known = isinstance(error, ManyDGError)
        return {
            "schema": 1,
            "algorithm": run.config.algorithm,
            "seed": run.config.seed,
            "dataset": job["name"],
            "config": run.config.to_json(),
            "code_version": code_version(),
            "seconds": time.perf_counter() - start,
            "status": "failed",
            "error": str(error) if known else "".join(traceback.format_exception(error)),
            **marks,
        }
    marked = {**record, **marks}
    write_atomically(folder / RUN_RECORD, json.dumps(marked, indent=1, allow_nan=False))
    return marked


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run's record in a study folder, the finished and the failed, oldest first."""
    found = []
    for place in (folder / RUNS).glob("*"):
        file = place / RUN_RECORD if (place / RUN_RECORD).exists() else place / FAILURE
        if file.exists():
            found.append((file.stat().st_mtime_ns, place.name, file))
    records = [(name, read_record(file)) for _, name, file in sorted(found)]
    # A record that does not bear its folder's name was not yet marked as the study's when it was interrupted.
    return [record for name, record in records if record.get("run") == name]


def read_record(file: Path) -> dict[str, Any]:
    """One run's record."""
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise StorageError(f"{file} is missing: run the same command again") from None
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError:
        raise StorageError(f"{file} is damaged: delete it and run the same command again") from None
    return record


def read_results(folder: str | Path) -> list[dict[str, Any]]:
    """The records of ``results.jsonl``."""
    file = Path(folder) / RESULTS
    if not file.exists():
        raise StorageError(f"{folder} holds no results: it has no {RESULTS}. Make some with 'manydg compare'")
    records = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise StorageError(f"{file}, line {number} is damaged: run the command that made it again") from None
    return records


def describe_study(folder: Path, dataset: Path, name: str, experiment: str, command: str) -> None:
    """Note in ``study.json`` what the results are of and how they were made; the report reads it."""
    file = folder / STUDY
    known = read_record(file) if file.exists() else {"commands": {}, "datasets": {}}
    data = open_dataset(dataset, verify="sizes")
    counts = data.domains.bincount().double()
    quantiles = {str(q): float(counts.quantile(q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0)}
    known["datasets"][name] = known["dataset"] = {
        "name": name,
        "hash": data.content_hash(),
        "samples": len(data),
        "patients": data.n_patients,
        "target": {"kind": data.target.kind, "names": list(data.target.names)},
        "label_counts": label_counts(data),
        "samples_per_patient": quantiles,
        "cohort_flow": data.info.get("cohort_flow", []),
        "provenance": data.info.get("provenance", {}),
    }
    known["commands"][experiment] = command
    known["code_version"] = code_version()
    known["created"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    write_atomically(file, json.dumps(known, indent=1))


def label_counts(data: Any) -> dict[str, int]:
    """How often each class or label occurs; votes count their majority class."""
    from manydg.targets import target_of

    target = target_of(data.target)
    truth = target.truth(data.targets)
    counts = truth.sum(dim=0) if truth.ndim == 2 else truth.bincount(minlength=data.target.size)
    return {name: int(count) for name, count in zip(data.target.names, counts.tolist(), strict=True)}


def finished_runs(folder: Path, dataset: Path, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those of the runs that are done already."""
    hash_ = open_dataset(dataset, verify="sizes").content_hash()
    return [run for run in runs if (folder / RUNS / run.identity(hash_) / RUN_RECORD).exists()]


def estimate_seconds(folder: Path, runs: Sequence[PlannedRun]) -> float | None:
    """How long runs will take, from the seconds per epoch of earlier ones in the folder; ``None`` without any."""
    costs: dict[str, list[float]] = {}
    for record in read_runs(folder):
        if record["status"] == "ok":
            costs.setdefault(record["algorithm"], []).append(record["seconds"] / max(1, record["epochs"]))
    if not costs:
        return None
    usual = sum(sum(values) / len(values) for values in costs.values()) / len(costs)
    mean = {name: sum(values) / len(values) for name, values in costs.items()}
    return sum(mean.get(run.config.algorithm, usual) * run.config.epochs for run in runs)


def grid(experiment: str, algorithms: Iterable[str], seeds: Iterable[int], config: TrainingConfig) -> list[PlannedRun]:
    """Every algorithm with every seed, all algorithms of one seed before the next seed."""
    names = list(algorithms)
    return [PlannedRun(experiment, config.replace(algorithm=name, seed=seed)) for seed in seeds for name in names]


@contextmanager
def _killed_worker_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise TrainingError(
            f"a worker process was killed, most likely for want of memory; finished runs are kept in {folder}: "
            "run the same command again, with fewer workers"
        ) from error


def _start_worker() -> None:
    """One thread per worker; its warnings are plain lines; and it ends with the process that started it."""
    import torch

    torch.set_num_threads(1)
    warn_plainly()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: Any) -> None:
    # A worker whose parent was killed would wait for work for ever, or write into a study that goes on elsewhere.
    parent.join()
    os._exit(1)
