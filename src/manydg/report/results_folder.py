"""What the report reads: a results folder's records, descriptions of its datasets, figures and predictions, checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from manydg.errors import DataError, ManyDGWarning
from manydg.evaluation.metrics import Predictions
from manydg.report.run_statistics import Comparison
from manydg.studies.figure_data import FIGURES, PSEUDONYM, CosineTable, FigureData, read_figures
from manydg.studies.paper_figures import task_on
from manydg.studies.records import (
    REFERENCE,
    RESULTS,
    RUN_RECORD,
    RUNS,
    STUDY,
    StudiedDataset,
    read_description,
    read_results,
    views,
)
from manydg.studies.summary import check_reference, load_predictions, summarize
from manydg.studies.tuning import Tuning, kept_tuning
from manydg.targets import Target, target_of
from manydg.training.record import RunRecord
from manydg.training.run import PREDICTIONS


@dataclass(frozen=True)
class Chapter:
    """All that a results folder has on one dataset.

    - ``folder``: The results folder.
    - ``records``: Finished and failed runs in the order they were written; of a run with two records, the last.
    - ``about``: The dataset's entry of ``study.json``; None where there is none.
    - ``commands``: Experiment to the command that made it.
    - ``tuning``: The searches whose choices the comparison uses.
    - ``reference``: The method that the others are tested against.
    """

    dataset: str
    folder: Path
    records: Sequence[RunRecord]
    about: StudiedDataset | None = None
    figures: Sequence[FigureData] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning | None = None
    reference: str = REFERENCE
    _predictions: dict[str, Predictions | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def target(self) -> Target:
        """The kind of label, from the first record that has one."""
        described = None if self.about is None else self.about.target
        spec = next((record.target for record in self.records if record.target), described)
        if spec is None:
            raise DataError(f"no run on {self.dataset} ended well, so there is nothing to report on it")
        return target_of(spec)

    @property
    def synthetic(self) -> bool:
        """Whether the patients are known to be made up."""
        return any(record.synthetic for record in self.records) or (self.about is not None and self.about.synthetic)

    @property
    def title(self) -> str:
        """The dataset's name, and that it is synthetic where it is."""
        return f"{self.dataset} (synthetic data)" if self.synthetic else self.dataset

    @property
    def metric(self) -> str:
        """The metric that chose the epochs, and that the chapter's first sentence is about."""
        return self.target.selection

    @property
    def patient_metric(self) -> str:
        """The metric that patients are compared by."""
        return self.target.patient_metric

    @property
    def metrics(self) -> list[str]:
        """The target's metrics, the one that chose the epochs first."""
        return list(dict.fromkeys([self.metric, *self.target.metrics]))

    @cached_property
    def comparison(self) -> Comparison | None:
        """The summary of the runs of ``manydg compare``; None where none ended well."""
        return self._compared("compare")

    @cached_property
    def choice(self) -> Comparison | None:
        """What the recommendation is made from: the main comparison, or that with and without context."""
        return self.comparison or self._compared("context-rivals")

    def _compared(self, experiment: str) -> Comparison | None:
        runs = self.runs(experiment)
        if not runs:
            return None
        predictions = {run.run: each for run in runs if (each := self.whole_predictions(run)) is not None}
        return Comparison.of(summarize(runs, predictions, self.reference))

    def runs(self, experiment: str) -> list[RunRecord]:
        """Finished runs of an experiment."""
        return [record for record in self.uses() if record.experiment == experiment]

    def compared(self) -> list[RunRecord]:
        """Finished runs of the main comparison, or of those with context, or of ``manydg train``."""
        with_context = [run for run in self.runs("context-rivals") if run.context.get("mode", "none") != "none"]
        return self.runs("compare") or with_context or self.runs("train")

    def uses(self) -> list[RunRecord]:
        """Finished runs as each of their experiments sees them: a run of several experiments occurs several times."""
        return views(record for record in self.records if record.ok)

    def failed(self) -> list[RunRecord]:
        """Runs that ended in an error."""
        return [record for record in self.records if not record.ok]

    def experiments(self) -> list[str]:
        """Names of all experiments with finished runs or figures, with repeats."""
        return [record.experiment for record in self.uses()] + [figure.experiment for figure in self.figures]

    def command(self, experiment: str) -> str:
        """The command that makes an experiment again; empty where it is not known."""
        made_by = "norms" if experiment == "embedding" else experiment
        return self.commands.get(experiment) or self.commands.get(made_by, "")

    def figures_of(self, experiment: str) -> list[FigureData]:
        """Figures that belong to an experiment."""
        figures = [figure for figure in self.figures if figure.experiment == experiment]
        source = None if self.about is None else self.about.source
        if task_on(source) is not None and not self.synthetic:
            return figures
        # The paper's values are of other patients.
        plain = [replace(each.data, rows=[replace(row, paper=None) for row in each.data.rows])
                 if isinstance(each.data, CosineTable) else each.data for each in figures]  # fmt: skip
        return [replace(figure, data=data) for figure, data in zip(figures, plain, strict=True)]

    def validation(self, record: RunRecord) -> Predictions | None:
        """Predictions of a run on its validation patients; None where the run's folder is not here."""
        return load_predictions(self.folder, record, "val")

    def predictions(self, record: RunRecord) -> Predictions | None:
        """Test predictions that a run is judged by (:meth:`Predictions.scored`); None without the run's folder."""
        whole = self.whole_predictions(record)
        return None if whole is None else whole.scored()

    def whole_predictions(self, record: RunRecord) -> Predictions | None:
        """All test predictions of a run, those after an event's onset too; None where the run's folder is not here."""
        if record.run not in self._predictions:
            read = load_predictions(self.folder, record)
            if read is not None and not all(PSEUDONYM.fullmatch(str(name)) for name in read.names):
                message = "name a patient by something other than a pseudonym"
                raise DataError(f"the predictions of run {record.run} {message}")
            self._predictions[record.run] = read
        return self._predictions[record.run]


@dataclass(frozen=True)
class ResultsFolder:
    """A results folder: one chapter per dataset, in the order of the records."""

    chapters: Sequence[Chapter]
    created: str = ""
    code_version: str = ""

    @property
    def finished_runs(self) -> int:
        return sum(record.ok for chapter in self.chapters for record in chapter.records)


def read_results_folder(path: str | Path, reference: str | None = None) -> ResultsFolder:
    """Read and check a results folder.

    - ``reference``: The method that the others are tested against; by default the one that the comparison was made
      with.
    - raises StorageError: If there is no ``results.jsonl``, or a file cannot be read.
    - raises DataError: If a patient is named by anything but a pseudonym, or a figure does not belong to a dataset of
      the folder.
    """
    folder = Path(path)
    records, about = _read_records(folder), read_description(folder)
    for lack in _what_lacks(folder, records):
        warnings.warn(f"{lack}: run the command that made the results again", ManyDGWarning, stacklevel=3)
    figures = read_figures(folder / FIGURES)
    names = list(dict.fromkeys(record.dataset for record in records))
    for figure in figures:
        if figure.dataset not in (names if len(names) > 1 else (*names, None)):
            raise DataError(
                f"the figure '{figure.title}' does not say which dataset it is of (datasets here: {', '.join(names)})"
            )
    chapters = [
        Chapter(
            dataset=name,
            folder=folder,
            records=[record for record in records if record.dataset == name],
            about=about.datasets.get(name),
            figures=[figure for figure in figures if figure.dataset in (None, name)],
            commands={key: text for key, text in about.commands_on(name).items() if text},
            tuning=kept_tuning(folder, name),
            reference=reference or about.reference_on(name),
        )
        for name in names
    ]
    if reference is not None:
        check_reference(reference, [record.algorithm for record in records if record.ok])
    versions = dict.fromkeys(record.code_version for record in records)
    return ResultsFolder(chapters, about.created, about.code_version or ", ".join(filter(None, versions)))


def _what_lacks(folder: Path, records: Sequence[RunRecord]) -> Iterator[str]:
    """What a report of a folder leaves out because files are gone, in sentences without an end."""
    if not (folder / STUDY).exists():
        yield f"{folder / STUDY} is missing, so that the report does not describe the data"
    listed = {record.run for record in records}
    runs = [path.parent for path in folder.glob(f"{RUNS}/*/{RUN_RECORD}")]
    if unlisted := sum(path.name not in listed for path in runs):
        yield f"{folder / RESULTS} lacks {unlisted} of the finished runs in {folder / RUNS}, which are left out"
    predictions = folder.glob(f"{RUNS}/*/{PREDICTIONS}")
    if alone := sum(not path.with_name(RUN_RECORD).is_file() for path in predictions):
        yield f"{alone} of the runs in {folder / RUNS} have lost their {RUN_RECORD}, so that predictions are left out"


def _read_records(folder: Path) -> list[RunRecord]:
    records: dict[str, RunRecord] = {}
    for line, record in enumerate(read_results(folder), start=1):
        if not all(PSEUDONYM.fullmatch(name) for name in record.per_patient):
            raise DataError(
                f"results.jsonl line {line} names a patient by something other than a pseudonym (P- and hex digits); "
                "run it again with a current manydg rather than let an identifier reach a page"
            )
        records.pop(record.run, None)
        records[record.run] = record
    if not records:
        raise DataError(f"{folder / 'results.jsonl'} holds no record of a run: run 'manydg compare' first")
    return list(records.values())
