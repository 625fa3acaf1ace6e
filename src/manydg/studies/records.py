"""The files of a results folder: a record per run, however many experiments the run serves, and what the study is of.

A run's folder holds ``run.json`` or, if it failed, ``failed.json``, and one small file for each use of the run: the
experiment, and what distinguishes the run there. ``results.jsonl`` is made from them and lists every use of a run in
its record's ``experiments``. ``study.json`` describes the datasets and how the results were made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from manydg.data.dataset import DomainDataset
from manydg.data.info import CohortStep, Provenance, TargetSpec
from manydg.data.storage import refuse_dataset_folder
from manydg.errors import DataError, StorageError
from manydg.files import (
    Json,
    JsonObject,
    ParsedJson,
    append_line,
    code_version,
    fields_as_json,
    fingerprint,
    read_json,
    reading_errors,
    verify_checksum,
    with_checksum,
    write_atomically,
    write_json,
    write_unsynced,
)
from manydg.targets import target_of
from manydg.training.record import REMEDY, EpochEntry, Metrics, RunRecord, Use

RESULTS, RUNS, STUDY = "results.jsonl", "runs", "study.json"
RUN_RECORD, FAILURE, STATUS = "run.json", "failed.json", "status.json"
_USE = "use-"
REFERENCE = "manydg"
"""The method that the others are tested against, unless a comparison names another."""


def views(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Every record as each of its experiments sees it: a run that serves several is here several times.

    Examples
    --------
    >>> from manydg.config import TrainingConfig
    >>> config = TrainingConfig(algorithm="base")
    >>> uses = (Use("compare"), Use("weights", {"mmd": 1}))
    >>> record = RunRecord(run="f0", algorithm="base", seed=0, dataset="d", config=config, experiments=uses)
    >>> [view.experiment for view in views([record])]
    ['compare', 'weights']
    """
    return [record.used_by(use) for record in records for use in record.uses]


def mark_use(folder: Path, use: Use) -> None:
    """Note in a run's folder that an experiment uses the run; a use noted before is left as it is."""
    content = use.to_json()
    file = folder / _use_file(content)
    if not file.exists():
        write_json(file, content, indent=None)


def _use_file(content: JsonObject) -> str:
    return f"{_USE}{fingerprint(content)}.json"


def read_runs(folder: Path) -> list[RunRecord]:
    """Every run's record in a results folder with its uses, the finished and the failed, oldest first."""
    files = []
    for run_folder in (folder / RUNS).glob("*"):
        file = run_folder / RUN_RECORD if (run_folder / RUN_RECORD).exists() else run_folder / FAILURE
        if file.exists():
            files.append((file.stat().st_mtime_ns, run_folder.name, file))
    records = [(name, read_run(file.parent)) for _, name, file in sorted(files)]
    # A record that does not bear its folder's name was not yet marked as the study's when it was interrupted.
    return [record for name, record in records if record.run == name]


def read_run(folder: Path) -> RunRecord:
    """One run's record, finished or failed, with its uses."""
    done = folder / RUN_RECORD
    record = RunRecord.read(done if done.exists() else folder / FAILURE)
    own = Use(record.experiment, record.variant)
    others = sorted(
        (_read_use(file) for file in folder.glob(f"{_USE}*.json")),
        key=lambda use: (use.experiment, json.dumps(use.variant)),
    )
    return record.replace(experiments=(own, *(use for use in others if use != own)))


def _read_use(file: Path) -> Use:
    content = read_json(file, remedy=REMEDY)
    try:
        use = Use.from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{file} is damaged ({error}): {REMEDY}") from error
    if file.name != _use_file(content):
        raise StorageError(f"{file} is damaged, its content does not match its name: {REMEDY}")
    return use


def collect(folder: Path) -> None:
    """Write ``results.jsonl`` anew from the runs in the folder: it never misses one or holds one twice."""
    lines = [record.to_line() for record in read_runs(folder)]
    write_atomically(folder / RESULTS, "".join(line + "\n" for line in lines))


def append(folder: Path, record: RunRecord) -> None:
    """Add a run's record to ``results.jsonl``; writing all of it after each of thousands of runs would take longer."""
    append_line(folder / RESULTS, record.to_line())


def read_results(folder: str | Path) -> list[RunRecord]:
    """The records of ``results.jsonl``, one per run."""
    file = Path(folder) / RESULTS
    if not file.exists():
        raise StorageError(f"{folder} holds no results: it has no {RESULTS}. Make some with 'manydg compare'")
    remedy = "run the command that made it again"
    with reading_errors(file):
        lines = file.read_bytes().splitlines()
    return [RunRecord.from_line(line, f"{file}, line {number}", remedy) for number, line in enumerate(lines, start=1)]


@dataclass(frozen=True)
class RunStatus:
    """How far a run is: its last finished epoch."""

    epoch: int = 0
    epochs: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    val: Metrics = field(default_factory=dict)
    seconds: float = 0.0


class StatusFile:
    """A reporter of training that keeps the last epoch's figures in a file, for a progress board in any process.

    A status that cannot be written is skipped: it must not stop a run.
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


@dataclass(frozen=True)
class StudiedDataset:
    """A dataset of a study: what it holds, where it comes from, and the commands that were run on it.

    - ``hash``: Of the content.
    - ``label_counts``: How often each class or label occurs.
    - ``samples_per_patient``: Quantiles by level, as text: ``{"0.5": 120.0, ...}``.
    - ``values``: Quantiles of a regression target, likewise; empty for other targets.
    - ``provenance``: Without the raw files, whose names may hold patients' ids.
    - ``commands``: Experiment to the command that made it.
    - ``reference``: The method that the others are tested against; empty for the usual one.
    """

    name: str = ""
    hash: str = ""
    samples: int = 0
    patients: int = 0
    target: TargetSpec | None = None
    label_counts: Mapping[str, int] = field(default_factory=dict)
    samples_per_patient: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    cohort_flow: tuple[CohortStep, ...] = ()
    provenance: Provenance | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""

    @property
    def source(self) -> str | None:
        """What the dataset was prepared from; None where it does not say."""
        return self.provenance.source if self.provenance else None

    @property
    def synthetic(self) -> bool:
        """Whether the patients are known to be made up."""
        return self.provenance is not None and self.provenance.synthetic

    @staticmethod
    def of(data: DomainDataset, name: str, commands: Mapping[str, str], reference: str = "") -> StudiedDataset:
        """The description of a dataset."""
        counts, origin = data.domains.bincount().double(), data.info.provenance
        return StudiedDataset(
            name=name,
            hash=data.content_hash(),
            samples=len(data),
            patients=data.n_patients,
            target=data.target,
            label_counts=label_counts(data),
            samples_per_patient=_quantiles(counts),
            values=_quantiles(data.targets) if data.target.kind == "regression" else {},
            cohort_flow=data.info.cohort_flow,
            provenance=None if origin is None else replace(origin, files=()),
            commands=commands,
            reference=reference,
        )

    def to_json(self) -> dict[str, Json]:
        content = fields_as_json(self, "values", "reference")
        return content | {"provenance": content["provenance"] or {}}

    @staticmethod
    def from_json(value: ParsedJson, name: str = "") -> StudiedDataset:
        target, provenance = value.get("target"), value.get("provenance")
        return StudiedDataset(
            name=str(value.get("name") or name),
            hash=str(value.get("hash") or ""),
            samples=int(value.get("samples") or 0),
            patients=int(value.get("patients") or 0),
            target=TargetSpec.from_json(target) if target else None,
            label_counts={str(label): int(count) for label, count in (value.get("label_counts") or {}).items()},
            samples_per_patient=_parsed_quantiles(value.get("samples_per_patient")),
            values=_parsed_quantiles(value.get("values")),
            cohort_flow=tuple(CohortStep.from_json(step) for step in value.get("cohort_flow") or ()),
            provenance=Provenance.from_json(provenance) if provenance else None,
            commands=_commands(value.get("commands"), name),
            reference=str(value.get("reference") or ""),
        )


def _quantiles(values: Tensor) -> dict[str, float]:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return dict(zip(map(str, shares), np.quantile(values.cpu().double().numpy(), shares).tolist(), strict=True))


def _parsed_quantiles(value: ParsedJson | None) -> dict[str, float]:
    return {str(float(share)): float(quantile) for share, quantile in (value or {}).items()}


@dataclass(frozen=True)
class StudyDescription:
    """What the results of a folder are of and how they were made.

    - ``commands``: Experiment to the last command that made it, on any dataset.
    - ``datasets``: By name.
    - ``latest``: The dataset that was last worked on.
    """

    commands: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, StudiedDataset] = field(default_factory=dict)
    latest: str = ""
    code_version: str = ""
    created: str = ""

    def commands_on(self, dataset: str) -> Mapping[str, str]:
        """Experiment to the command that made it on a dataset."""
        described = self.datasets.get(dataset)
        return (described and described.commands) or self.commands

    def reference_on(self, dataset: str) -> str:
        """The method that the others are tested against on a dataset."""
        described = self.datasets.get(dataset)
        return (described and described.reference) or REFERENCE

    def to_json(self) -> dict[str, Json]:
        datasets = {name: dataset.to_json() for name, dataset in self.datasets.items()}
        return {
            "commands": self.commands,
            "datasets": datasets,
            "dataset": datasets.get(self.latest, {}),
            "code_version": self.code_version,
            "created": self.created,
        }

    @staticmethod
    def from_json(value: ParsedJson) -> StudyDescription:
        latest = value.get("dataset") or {}
        datasets = value.get("datasets") or ({latest["name"]: latest} if latest.get("name") else {})
        return StudyDescription(
            commands=_commands(value.get("commands")),
            datasets={name: StudiedDataset.from_json(entry, name) for name, entry in datasets.items()},
            latest=str(latest.get("name") or ""),
            code_version=str(value.get("code_version") or ""),
            created=str(value.get("created") or ""),
        )


def _commands(value: Any, dataset: str = "") -> dict[str, str]:
    """Commands by experiment; where they are sorted by dataset too, those of one."""
    commands = value or {}
    own = commands.get(dataset)
    chosen = own if isinstance(own, Mapping) else commands
    return {name: command for name, command in chosen.items() if isinstance(command, str)}


def read_description(folder: str | Path) -> StudyDescription:
    """What ``study.json`` says; empty where there is none."""
    file = Path(folder) / STUDY
    if not file.exists():
        return StudyDescription()
    content = read_json(file, remedy=REMEDY)
    try:
        description = StudyDescription.from_json(content)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, DataError) as error:
        raise StorageError(f"{file} is damaged ({error}): {REMEDY}") from error
    verify_checksum(content, file, REMEDY)
    return description


def describe_study(
    folder: Path, data: DomainDataset, name: str, commands: Mapping[str, str], reference: str | None = None
) -> None:
    """Note in ``study.json`` what the results are of and how they were made: experiment to command.

    A reference that is not given stays what it was.
    """
    refuse_dataset_folder(folder)
    known = read_description(folder)
    before = known.datasets.get(name, StudiedDataset())
    described = StudiedDataset.of(data, name, {**before.commands, **commands}, reference or before.reference)
    content = replace(
        known,
        commands={**known.commands, **commands},
        datasets={**known.datasets, name: described},
        latest=name,
        code_version=code_version(),
        created=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
    write_json(folder / STUDY, with_checksum(content.to_json()))


def label_counts(data: DomainDataset) -> dict[str, int]:
    """How often each class or label occurs; votes count their majority class, and a value has none."""
    target = target_of(data.target)
    if target.numeric:
        return {}
    truth = target.truth(data.targets)
    counts = truth.sum(dim=0) if truth.ndim == 2 else truth.bincount(minlength=data.target.size)
    return {name: int(count) for name, count in zip(data.target.names, counts.tolist(), strict=True)}
