"""What the report reads of a results folder, checked: records, datasets, figures, predictions; and statistics of runs.

Means by method, variant, epoch and patient, and how far each difference can be trusted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from manydg.algorithms import controls
from manydg.errors import DataError, ManyDGWarning
from manydg.evaluation.metrics import Predictions
from manydg.evaluation.statistics import ALPHA, Interval, PairedComparison, shared_patient_values
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
from manydg.studies.summary import (
    Entry,
    Summary,
    check_reference,
    counted,
    deciding_metric,
    load_predictions,
    lost_predictions,
    summarize,
)
from manydg.studies.tuning import Tuning, kept_tuning
from manydg.targets import Target, oriented, target_of
from manydg.training.record import EpochEntry, RunRecord
from manydg.training.run import PREDICTIONS

FIRST = ("manydg", "base", *controls())
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
    """Aggregate values over seeds; undefined ones are left out.

    Examples
    --------
    >>> spread([1.0, 3.0, None]).mean
    2.0
    """
    known = np.array([value for value in values if value is not None and math.isfinite(value)], float)
    if not len(known):
        return Spread(math.nan, math.nan, 0)
    return Spread(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan, len(known))


def grouped(records: Iterable[RunRecord], key: Callable[[RunRecord], Key]) -> dict[Key, list[RunRecord]]:
    """Records by a key, in the order in which the keys first occur."""
    groups: dict[Key, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def by_algorithm(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Records by algorithm: ManyDG, Base and the controls first, then the rivals in the order of their runs."""
    groups = grouped(records, lambda record: record.algorithm)
    names = [name for name in FIRST if name in groups] + [name for name in groups if name not in FIRST]
    return {name: groups[name] for name in names}


def metric_spread(records: Iterable[RunRecord], metric: str) -> Spread:
    """A test metric over several runs."""
    return spread(record.test.get(metric) for record in records)


def epoch_curve(
    records: Sequence[RunRecord], value_of: Callable[[EpochEntry], float | None]
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Epochs, and the mean, low and high over the runs that reached each, all ``(epochs,)``."""
    values: dict[int, list[float | None]] = {}
    for record in records:
        for entry in record.history:
            values.setdefault(entry.epoch, []).append(value_of(entry))
    spreads = {epoch: spread(values[epoch]) for epoch in sorted(values)}
    rows = [(epoch, each.mean, each.low, each.high) for epoch, each in spreads.items() if each.count]
    x, mean, low, high = np.array(rows, float).reshape(-1, 4).T
    return x, mean, low, high


def patient_values(groups: Mapping[str, Sequence[RunRecord]], metric: str) -> dict[str, dict[str, float]]:
    """Each patient's metric with each method, on the patients and runs for which it exists with all of them."""
    runs = {name: {record.seed: record.per_patient for record in records} for name, records in groups.items()}
    return shared_patient_values(runs, metric)


def tested_patients(groups: Mapping[str, Sequence[RunRecord]]) -> int:
    """How many different patients were tested."""
    return len({name for records in groups.values() for record in records for name in record.per_patient})


def patient_samples(records: Iterable[RunRecord]) -> dict[str, int]:
    """Each tested patient's number of samples."""
    counts: dict[str, int] = {}
    for record in records:
        counts |= {name: int(entry.get("samples") or 0) for name, entry in record.per_patient.items()}
    return counts


def defined_metric(groups: Mapping[str, Sequence[RunRecord]], metrics: Sequence[str]) -> str | None:
    """The first metric that exists for at least half of the tested patients with every method; None without one."""
    half = tested_patients(groups) / 2
    for metric in metrics if half else ():
        if all(len(values) >= half for values in patient_values(groups, metric).values()):
            return metric
    return None


def seconds_per_epoch(record: RunRecord) -> float | None:
    """Mean seconds of an epoch without the first three, or of the last where there are no more; None without epochs."""
    seconds = [entry.seconds for entry in record.history]
    return float(np.mean(seconds[min(3, len(seconds) - 1) :])) if seconds else None


@dataclass(frozen=True)
class RivalTest:
    """The reference method minus one rival at one metric; p-values are two-sided, Holm's over the rivals.

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
    metric: str = ""

    def turned(self, rival: str) -> RivalTest:
        """The same test, seen from the other of the two."""
        bounds = self.interval
        back = (
            None if bounds is None else replace(bounds, estimate=-bounds.estimate, low=-bounds.high, high=-bounds.low)
        )
        return replace(self, rival=rival, difference=-self.difference, interval=back, effect=-self.effect)

    @property
    def p(self) -> float:
        """The p-value that decides: of the corrected t-test, or the plain one where that could not be made."""
        return self.t_p if math.isnan(self.corrected_p) else self.corrected_p

    @property
    def gain(self) -> float:
        """The difference such that above zero the reference is better: of an error, with the other sign."""
        return oriented(self.metric, self.difference)

    @property
    def excludes_zero(self) -> bool:
        """Whether the patient-bootstrap interval of the difference is on one side of zero."""
        return self.interval is not None and (self.interval.low > 0 or self.interval.high < 0)

    @property
    def has_interval(self) -> bool:
        """Whether the interval is defined."""
        return self.interval is not None and math.isfinite(self.interval.low)

    @property
    def verdict(self) -> str:
        """``clear`` if test and interval agree, ``unsure`` if only one shows a difference, ``none`` if neither does,
        ``untested`` if no test could be made."""
        if math.isnan(self.p):
            return "untested"
        significant = self.p < ALPHA
        if significant and (self.excludes_zero or not self.has_interval):
            return "clear"
        return "unsure" if significant or self.excludes_zero else "none"


@dataclass(frozen=True)
class Comparison:
    """A summary of the main comparison with its rows in the order of the page: ManyDG, Base and the controls first."""

    summary: Summary
    rows: Sequence[str]

    @staticmethod
    def of(summary: Summary) -> Comparison:
        order = dict.fromkeys([summary.reference, *FIRST, *summary.rows])
        return Comparison(summary, [row for row in order if row in summary.rows])

    @property
    def first(self) -> str:
        """The reference method: ManyDG, or another where it was not run."""
        return self.rows[0]

    def entry(self, row: str, metric: str) -> Entry:
        """One cell of the table."""
        return self.summary.entries[row, metric]

    def test(self, metric: str, rival: str) -> RivalTest | None:
        """The reference method against a rival; None where no test was made."""
        entry = self.summary.entries.get((rival, metric))
        if entry is None or entry.comparison is None:
            return None
        return _test(metric, rival, entry.comparison, entry.difference, entry.adjusted or {})

    def tests(self, metric: str) -> list[RivalTest]:
        """Tests against all rivals, in the order of the rows."""
        return [test for row in self.rows if (test := self.test(metric, row)) is not None]

    def pair(self, first: str, second: str) -> RivalTest | None:
        """One row minus another at the primary metric, corrected for all pairs; None where no test was made."""
        for pair in self.summary.pairs:
            if {pair.first, pair.second} == {first, second}:
                test = _test(self.summary.primary, pair.second, pair.comparison, pair.difference, pair.adjusted)
                return test if pair.first == first else test.turned(second)
        return None

    def rows_of(self, algorithm: str) -> list[str]:
        """The rows of an algorithm, one for each of its variants."""
        return [row for row in self.rows if row.partition(" (")[0] == algorithm]


def _test(
    metric: str, rival: str, paired: PairedComparison, interval: Interval | None, adjusted: Mapping[str, float]
) -> RivalTest:
    return RivalTest(
        rival=rival,
        difference=paired.difference,
        interval=interval,
        t_p=adjusted.get("t", math.nan),
        wilcoxon_p=adjusted.get("wilcoxon", math.nan),
        corrected_p=adjusted.get("corrected", math.nan),
        effect=paired.hedges_g,
        splits=paired.pairs,
        note=paired.note,
        metric=metric,
    )


# The folder, a chapter for each dataset


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

    @cached_property
    def metric(self) -> str:
        """The metric that chose the epochs, and that the chapter's first sentence is about."""
        if self.choice is not None:
            return self.choice.summary.primary
        return deciding_metric([record for record in self.records if record.ok], self.target)

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
        # All of them: the summary says which it leaves out.
        runs = [record for record in self.uses() if record.experiment == experiment]
        if not runs:
            return None
        predictions = {run.run: each for run in runs if (each := self.whole_predictions(run)) is not None}
        tuned = self.tuning is not None and experiment == "compare"
        return Comparison.of(summarize(runs, predictions, self.reference, tuned=tuned))

    def runs(self, experiment: str) -> list[RunRecord]:
        """Finished runs of an experiment that its table counts."""
        return counted([record for record in self.uses() if record.experiment == experiment])

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
        """Test predictions that a run is scored on (:meth:`Predictions.scored`); None without any or without folder."""
        whole = self.whole_predictions(record)
        scored = None if whole is None else whole.scored()
        return scored if scored is not None and len(scored.truth) else None

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
    # A dataset that was prepared anew may have other patients, classes and splits.
    newest = {record.dataset: record.dataset_hash for record in records if record.ok}
    current = [record for record in records if not record.ok or record.dataset_hash == newest[record.dataset]]
    if left := len(records) - len(current):
        message = f"{left} runs in {folder / RESULTS} are on another version of their dataset and are left out"
        warnings.warn(message, ManyDGWarning, stacklevel=3)
    for figure in figures:
        if figure.dataset not in (names if len(names) > 1 else (*names, None)):
            raise DataError(
                f"the figure '{figure.title}' does not say which dataset it is of (datasets here: {', '.join(names)})"
            )
    chapters = [
        Chapter(
            dataset=name,
            folder=folder,
            records=[record for record in current if record.dataset == name],
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
    if lost := lost_predictions(folder, records):
        yield f"{lost[0]} has lost its {PREDICTIONS}, so that intervals are without it until the folder is deleted"


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
