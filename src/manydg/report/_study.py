"""What a results folder holds: records, what is known of each dataset, figures' data and predictions, all checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from manydg.data.dataset import TargetSpec
from manydg.errors import DataError, StorageError
from manydg.evaluation.statistics import Predictions
from manydg.experiments._summary_runs import load_predictions
from manydg.experiments.records import views
from manydg.experiments.study import read_results
from manydg.report.figure_data import PSEUDONYM, FigureData, read_figures
from manydg.targets import Target, target_of

Record = Mapping[str, Any]
_NEEDED = ("run", "experiment", "algorithm", "seed", "dataset", "status")


@dataclass(frozen=True)
class Chapter:
    """All that a study holds on one dataset.

    Parameters
    ----------
    dataset : str
    folder : Path
        The results folder.
    records : list of dict
        Finished and failed runs, in the order they were written; of a run that stands twice the last counts.
    about : dict
        The dataset's entry of ``study.json``; empty where there is none.
    figures : list of FigureData
    commands : dict
        Experiment to the command that made it.
    """

    dataset: str
    folder: Path
    records: Sequence[Record]
    about: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[FigureData] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    _read: dict[str, Predictions | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def target(self) -> Target:
        """The kind of label, from the first record that says."""
        told = [record["target"] for record in self.records if record.get("target")]
        found = told[0] if told else self.about.get("target")
        if not found:
            raise DataError(f"no run on {self.dataset} ended well, so there is nothing to report on it")
        return target_of(TargetSpec(found["kind"], tuple(found["names"])))

    @property
    def metric(self) -> str:
        """The metric that chose the epochs, and that the chapter's first sentence is about."""
        return self.target.selection

    def runs(self, experiment: str) -> list[Record]:
        """Finished runs of an experiment."""
        return [record for record in self.uses() if record["experiment"] == experiment]

    def uses(self) -> list[Record]:
        """Finished runs as each of their experiments sees them: a run that serves several stands here several times."""
        return list(views(record for record in self.records if record["status"] == "ok"))

    def failed(self) -> list[Record]:
        """Runs that ended in an error."""
        return [record for record in self.records if record["status"] != "ok"]

    def command(self, experiment: str) -> str:
        """The command that makes an experiment again; empty where it is not known."""
        made_by = "norms" if experiment == "embedding" else experiment
        return self.commands.get(experiment) or self.commands.get(made_by, "")

    def figures_of(self, experiment: str) -> list[FigureData]:
        """Figures that belong to an experiment."""
        return [figure for figure in self.figures if figure.experiment == experiment]

    def predictions(self, record: Record) -> Predictions | None:
        """Test predictions of a run; None where the run's folder is not here."""
        key = str(record["run"])
        if key not in self._read:
            self._read[key] = _read_predictions(self.folder, record)
        return self._read[key]


@dataclass(frozen=True)
class Study:
    """A results folder: one chapter per dataset, in the order of the records."""

    chapters: Sequence[Chapter]
    created: str = ""
    code_version: str = ""


def read_study(folder: str | Path) -> Study:
    """Read and check a results folder.

    Raises
    ------
    StorageError
        If there is no ``results.jsonl``, or a file cannot be read.
    DataError
        If a record lacks a key, or a patient is named by anything but a pseudonym.
    """
    folder = Path(folder)
    records = _read_records(folder)
    about = _read_about(folder / "study.json")
    figures = read_figures(folder / "figures")
    names = list(dict.fromkeys(str(record["dataset"]) for record in records))
    for figure in figures:
        if (figure.dataset is None and len(names) > 1) or (figure.dataset is not None and figure.dataset not in names):
            raise DataError(
                f"the figure '{figure.title}' does not say which dataset it is of (datasets here: {', '.join(names)})"
            )
    chapters = [_chapter(name, folder, records, about, figures) for name in names]
    versions = list(dict.fromkeys(str(record.get("code_version") or "") for record in records))
    version = about.get("code_version") or ", ".join(filter(None, versions))
    return Study(chapters, str(about.get("created") or ""), str(version))


def _chapter(
    name: str, folder: Path, records: list[Record], about: Mapping[str, Any], figures: list[FigureData]
) -> Chapter:
    entry, commands = _entry_of(name, about)
    return Chapter(
        dataset=name,
        folder=folder,
        records=[record for record in records if record["dataset"] == name],
        about=entry,
        figures=[figure for figure in figures if figure.dataset in (None, name)],
        commands=commands,
    )


def _entry_of(name: str, about: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The dataset's entry and commands: ``dataset`` is one entry, ``datasets`` has one by each name."""
    several = about.get("datasets") or {}
    entries = [*several.values(), about.get("dataset") or {}] if isinstance(several, dict) else several
    entry: dict[str, Any] = next((entry for entry in entries if entry.get("name") == name), {})
    commands = entry.get("commands") or about.get("commands") or {}
    own = commands.get(name)
    chosen = own if isinstance(own, dict) else commands
    return entry, {key: str(text) for key, text in chosen.items() if text and isinstance(text, str)}


def _read_records(folder: Path) -> list[Record]:
    found: dict[str, Record] = {}
    for place, record in enumerate(read_results(folder), start=1):
        missing = [key for key in _NEEDED if not isinstance(record, dict) or key not in record]
        if missing:
            raise DataError(f"results.jsonl line {place} lacks {', '.join(missing)}: it is no record of a run")
        if not all(PSEUDONYM.fullmatch(name) for name in record.get("per_patient") or {}):
            raise DataError(
                f"results.jsonl line {place} names a patient by something other than a pseudonym (P- and hex digits); "
                "run it again with a current manydg rather than let an identifier reach a page"
            )
        found.pop(str(record["run"]), None)
        found[str(record["run"])] = record
    if not found:
        raise DataError(f"{folder / 'results.jsonl'} holds no record of a run: run 'manydg compare' first")
    return list(found.values())


def _read_about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is no readable JSON ({error}); remove it or make it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def _read_predictions(folder: Path, record: Record) -> Predictions | None:
    found = load_predictions(folder, record)
    if found is not None and not all(PSEUDONYM.fullmatch(str(name)) for name in found.names):
        raise DataError(f"the predictions of run {record['run']} name a patient by something other than a pseudonym")
    return found
