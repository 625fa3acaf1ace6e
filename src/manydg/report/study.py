"""What a results folder holds: records, what is known of each dataset, figures' data and predictions, all checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from manydg.errors import DataError
from manydg.evaluation.predictions import Predictions
from manydg.evaluation.statistics import Interval
from manydg.studies.figure_data import FIGURES, PSEUDONYM, FigureData, read_figures
from manydg.studies.records import StudiedDataset, StudyDescription, read_description, read_results, views
from manydg.studies.summary import Entry, Summary, load_predictions, summarize
from manydg.targets import Target, target_of
from manydg.training.record import EpochEntry, RunRecord

Record = RunRecord


@dataclass(frozen=True)
class Chapter:
    """All that a study holds on one dataset.

    Parameters
    ----------
    dataset : str
    folder : Path
        The results folder.
    records : list of RunRecord
        Finished and failed runs, in the order they were written; of a run that stands twice the last counts.
    about : StudiedDataset, optional
        The dataset's entry of ``study.json``; None where there is none.
    figures : list of FigureData
    commands : dict
        Experiment to the command that made it.
    """

    dataset: str
    folder: Path
    records: Sequence[Record]
    about: StudiedDataset | None = None
    figures: Sequence[FigureData] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    _read: dict[str, Predictions | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def target(self) -> Target:
        """The kind of label, from the first record that says."""
        described = None if self.about is None else self.about.target
        spec = next((record.target for record in self.records if record.target), described)
        if spec is None:
            raise DataError(f"no run on {self.dataset} ended well, so there is nothing to report on it")
        return target_of(spec)

    @property
    def metric(self) -> str:
        """The metric that chose the epochs, and that the chapter's first sentence is about."""
        return self.target.selection

    def runs(self, experiment: str) -> list[Record]:
        """Finished runs of an experiment."""
        return [record for record in self.uses() if record.experiment == experiment]

    def uses(self) -> list[Record]:
        """Finished runs as each of their experiments sees them: a run that serves several stands here several times."""
        return list(views(record for record in self.records if record.ok))

    def failed(self) -> list[Record]:
        """Runs that ended in an error."""
        return [record for record in self.records if not record.ok]

    def command(self, experiment: str) -> str:
        """The command that makes an experiment again; empty where it is not known."""
        made_by = "norms" if experiment == "embedding" else experiment
        return self.commands.get(experiment) or self.commands.get(made_by, "")

    def figures_of(self, experiment: str) -> list[FigureData]:
        """Figures that belong to an experiment."""
        return [figure for figure in self.figures if figure.experiment == experiment]

    def predictions(self, record: Record) -> Predictions | None:
        """Test predictions of a run; None where the run's folder is not here."""
        key = record.run
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
    about = read_description(folder)
    figures = read_figures(folder / FIGURES)
    names = list(dict.fromkeys(record.dataset for record in records))
    for figure in figures:
        if (figure.dataset is None and len(names) > 1) or (figure.dataset is not None and figure.dataset not in names):
            raise DataError(
                f"the figure '{figure.title}' does not say which dataset it is of (datasets here: {', '.join(names)})"
            )
    chapters = [_chapter(name, folder, records, about, figures) for name in names]
    versions = list(dict.fromkeys(record.code_version for record in records))
    return Study(chapters, about.created, about.code_version or ", ".join(filter(None, versions)))


def _chapter(
    name: str, folder: Path, records: list[Record], about: StudyDescription, figures: list[FigureData]
) -> Chapter:
    return Chapter(
        dataset=name,
        folder=folder,
        records=[record for record in records if record.dataset == name],
        about=about.datasets.get(name),
        figures=[figure for figure in figures if figure.dataset in (None, name)],
        commands={key: text for key, text in about.commands_on(name).items() if text},
    )


def _read_records(folder: Path) -> list[Record]:
    found: dict[str, Record] = {}
    for place, record in enumerate(read_results(folder), start=1):
        if not all(PSEUDONYM.fullmatch(name) for name in record.per_patient):
            raise DataError(
                f"results.jsonl line {place} names a patient by something other than a pseudonym (P- and hex digits); "
                "run it again with a current manydg rather than let an identifier reach a page"
            )
        found.pop(record.run, None)
        found[record.run] = record
    if not found:
        raise DataError(f"{folder / 'results.jsonl'} holds no record of a run: run 'manydg compare' first")
    return list(found.values())


def _read_predictions(folder: Path, record: Record) -> Predictions | None:
    found = load_predictions(folder, record)
    if found is not None and not all(PSEUDONYM.fullmatch(str(name)) for name in found.names):
        raise DataError(f"the predictions of run {record.run} name a patient by something other than a pseudonym")
    return found


# Runs folded over seeds: means by method, by variant, by epoch and by patient.


FIRST = ("manydg", "base", "prototype", "manydg-random-pairs")
"""Shown first, in this order: the method, the plain model and the two controls."""
Key = TypeVar("Key", bound=Hashable)
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (NaN for one value) and number of values."""

    mean: float
    sd: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - (0.0 if math.isnan(self.sd) else self.sd)

    @property
    def high(self) -> float:
        return self.mean + (0.0 if math.isnan(self.sd) else self.sd)


def spread(values: Iterable[float | None]) -> Spread:
    """Fold values over seeds; undefined ones are left out.

    Examples
    --------
    >>> spread([1.0, 3.0, None]).mean
    2.0
    """
    known = np.array([value for value in values if value is not None and math.isfinite(value)], float)
    if not len(known):
        return Spread(math.nan, math.nan, 0)
    return Spread(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan, len(known))


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Records by a key, keys in the order they are first met."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def by_algorithm(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by algorithm: ManyDG, Base and the controls first, then the rivals as they come."""
    groups = grouped(records, lambda record: record.algorithm)
    names = [name for name in FIRST if name in groups] + [name for name in groups if name not in FIRST]
    return {name: groups[name] for name in names}


def metric_spread(records: Iterable[Record], metric: str, side: str = "test") -> Spread:
    """A metric of several runs."""
    return spread(getattr(record, side).get(metric) for record in records)


def epoch_curve(records: Sequence[Record], pick: Callable[[EpochEntry], float | None]) -> tuple[FloatArray, ...]:
    """Epochs, and mean, low and high over runs at each: ``(epochs,)`` four times."""
    values: dict[int, list[float | None]] = {}
    for record in records:
        for entry in record.history:
            values.setdefault(entry.epoch, []).append(pick(entry))
    folded = {epoch: spread(values[epoch]) for epoch in sorted(values)}
    folded = {epoch: found for epoch, found in folded.items() if found.count}
    columns = [(epoch, found.mean, found.low, found.high) for epoch, found in folded.items()]
    return tuple(np.array(columns, float).reshape(-1, 4).T)


def patient_means(records: Iterable[Record], metric: str) -> dict[str, float]:
    """Each patient's metric, the mean over the runs in which the patient was tested; undefined ones are left out."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, entry in record.per_patient.items():
            value = entry.get(metric)
            if value is not None and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(found)) for name, found in values.items()}


def patient_samples(records: Iterable[Record]) -> dict[str, int]:
    """Each tested patient's number of samples."""
    counts: dict[str, int] = {}
    for record in records:
        counts |= {name: int(entry.get("samples") or 0) for name, entry in record.per_patient.items()}
    return counts


def defined_metric(records: Sequence[Record], metrics: Sequence[str]) -> str | None:
    """The first metric that is defined for at least half of the tested patients; None where there is none."""
    people = len({name for record in records for name in record.per_patient})
    counts = {metric: len(patient_means(records, metric)) for metric in metrics}
    return next((metric for metric in metrics if people and counts[metric] >= people / 2), None)


def seconds_per_epoch(record: Record) -> float | None:
    """Mean seconds of an epoch, the first three left out where there are more; None where no time was noted."""
    seconds = [entry.seconds for entry in record.history]
    kept = seconds[3:] if len(seconds) > 3 else seconds
    return float(np.mean(kept)) if kept else None


# The main comparison: the summary of ``manydg compare``, and how far each difference can be trusted.


ALPHA = 0.05


@dataclass(frozen=True)
class Test:
    """The page's first row, ManyDG, minus one rival at one metric; p-values are two-sided, Holm's over the rivals.

    ``corrected_p`` allows for splits that share patients (Nadeau and Bengio), which the plain t-test does not.
    """

    rival: str
    difference: float
    interval: Interval | None
    t_p: float
    wilcoxon_p: float
    corrected_p: float
    effect: float
    splits: int
    note: str

    @property
    def p(self) -> float:
        """The p-value that decides: of the corrected t-test, or the plain one where that could not be made."""
        return self.t_p if math.isnan(self.corrected_p) else self.corrected_p

    @property
    def excludes_zero(self) -> bool:
        """Whether the patient-bootstrap interval of the difference lies on one side of zero."""
        return self.interval is not None and (self.interval.low > 0 or self.interval.high < 0)

    @property
    def has_interval(self) -> bool:
        """Whether the interval could be given."""
        return self.interval is not None and math.isfinite(self.interval.low)

    @property
    def verdict(self) -> str:
        """``clear`` if test and interval agree, ``unsure`` if only one says so, ``none`` if neither does."""
        tested = self.p < ALPHA
        if tested and (self.excludes_zero or not self.has_interval):
            return "clear"
        return "unsure" if tested or self.excludes_zero else "none"


@dataclass(frozen=True)
class Comparison:
    """A summary with its rows in the order of the page: whom the tests are about, Base, the controls first."""

    summary: Summary
    rows: Sequence[str]

    @property
    def first(self) -> str:
        """The row the page is about: ManyDG, or another where it was not run."""
        return self.rows[0]

    def entry(self, row: str, metric: str) -> Entry:
        """One cell of the table."""
        return self.summary.entries[row, metric]

    def test(self, metric: str, rival: str) -> Test | None:
        """ManyDG minus a rival; None where no test was made."""
        entry = self.summary.entries.get((rival, metric))
        if entry is None or entry.comparison is None:
            return None
        paired, bounds, adjusted = entry.comparison, entry.difference, entry.adjusted or {}
        # The summary has the rival minus ManyDG; a reader asks it the other way round.
        turned = None if bounds is None else Interval(-bounds.estimate, -bounds.high, -bounds.low, bounds.level)
        return Test(
            rival=rival,
            difference=-paired.difference,
            interval=turned,
            t_p=adjusted.get("t", math.nan),
            wilcoxon_p=adjusted.get("wilcoxon", math.nan),
            corrected_p=adjusted.get("corrected", math.nan),
            effect=-paired.hedges_g,
            splits=paired.pairs,
            note=paired.note,
        )

    def tests(self, metric: str) -> list[Test]:
        """Tests against all rivals, in the order of the rows."""
        return [test for row in self.rows if (test := self.test(metric, row)) is not None]


def compare(chapter: Chapter) -> Comparison | None:
    """Sum up the runs of ``manydg compare``; None where none ended well."""
    runs = chapter.runs("compare")
    if not runs:
        return None
    known = {run.run: found for run in runs if (found := chapter.predictions(run)) is not None}
    summary = summarize(runs, known)
    order = dict.fromkeys([summary.reference, *FIRST, *summary.rows])
    return Comparison(summary, [row for row in order if row in summary.rows])
