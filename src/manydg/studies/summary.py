"""From records to the table of a comparison: means, intervals over patients, paired tests, the worst patients.

Records alone are enough; with the runs' predictions every metric gets a patient-bootstrap interval.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from manydg.algorithms import algorithm_order, controls
from manydg.algorithms.best import LEAST_SHARE
from manydg.errors import DataError, ManyDGWarning, unknown_name
from manydg.evaluation.clinical import ClinicalResult, evaluate
from manydg.evaluation.metrics import Predictions, read_predictions
from manydg.evaluation.statistics import (
    Interval,
    PairedComparison,
    PatientResampling,
    compare_paired,
    holm,
    mean_difference,
    mean_over_runs,
    shared_patient_values,
)
from manydg.files import Json, write_atomically
from manydg.studies import summary_text as tables
from manydg.studies.paper_figures import beside
from manydg.studies.records import REFERENCE, RUN_RECORD, read_description, read_results, views
from manydg.studies.tuning import kept_tuning
from manydg.targets import Target, oriented, target_of
from manydg.training.record import KNOWN_LABELS, Counts, RunRecord, cautions, check_files
from manydg.training.run import PREDICTIONS, decide_threshold, silence_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Entry:
    """One row of the table at one metric, on unseen patients.

    - ``values``: By seed; NaN where undefined.
    - ``mean``, ``sd``: Over seeds; the standard deviation of a sample, NaN for one seed.
    - ``interval``: Patient bootstrap of the mean over seeds.
    - ``by_patient``: The metric of each patient for whom it exists with every row that has it at all, so that rows are
      compared on the same patients; each counted once, by the mean over the runs that tested the patient.
    - ``worst_tenth``: The 10th percentile of these values, or the 90th of an error; NaN where there are none, or where
      it would mislead.
    - ``worst_tenth_note``: Why there is none.
    - ``comparison``: The reference minus this row over the seeds they share.
    - ``difference``: Patient bootstrap of the same difference.
    - ``adjusted``: Holm-corrected p of each test (``t``, ``wilcoxon``, ``corrected``) over the rows compared.
    - ``rank``: 1 for the best mean, 2 for the second, 0 for the rest and for a row that lacks splits that another has:
      a mean of fewer splits is of other patients.
    """

    row: str
    metric: str
    values: dict[int, float]
    mean: float
    sd: float
    interval: Interval | None
    by_patient: Mapping[str, float]
    worst_tenth: float
    worst_tenth_note: str = ""
    comparison: PairedComparison | None = None
    difference: Interval | None = None
    adjusted: Mapping[str, float] | None = None
    rank: int = 0

    @property
    def splits(self) -> int:
        """How many splits the mean is of."""
        return sum(not math.isnan(value) for value in self.values.values())


@dataclass(frozen=True)
class Pair:
    """Two rows at the primary metric over the seeds they share: ``first`` minus ``second``.

    - ``difference``: Patient bootstrap of the same difference.
    - ``adjusted``: Holm-corrected p of each test over all pairs of rows.
    """

    first: str
    second: str
    comparison: PairedComparison
    difference: Interval | None
    adjusted: Mapping[str, float]


@dataclass(frozen=True)
class Summary:
    """The table of one experiment on one dataset.

    - ``primary``: The metric that chose the epochs.
    - ``patient_metric``: The metric that patients are compared by.
    - ``reference``: The row the others are tested against; None where it is not among the rows.
    - ``entries``: By (row, metric).
    - ``tested_patients``: How many different patients were tested, in whatever split.
    - ``synthetic``: Whether the patients are known to be made up; every table says so.
    - ``pairs``: Every two rows at the primary metric.
    - ``costs``: Time, size and needs of each row.
    - ``recommendation``: The row to use, chosen on validation patients; None where there is nothing to choose from.
    - ``split``: What a split divides: ``patient``, or whole ``site``.
    - ``patients``, ``samples``: Training, validation and test patients of the first run, and their samples.
    - ``test_shares``: Test patients over training patients of each row, the mean over its splits.
    - ``rules``: How epochs and thresholds were chosen.
    - ``notes``: Failed runs, missing seeds and whatever else a reader must know.
    """

    experiment: str
    dataset: str
    metrics: tuple[str, ...]
    primary: str
    patient_metric: str
    reference: str | None
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    entries: Mapping[tuple[str, str], Entry]
    tested_patients: int
    synthetic: bool
    pairs: tuple[Pair, ...]
    costs: Mapping[str, Cost]
    recommendation: Recommendation | None
    split: str
    patients: Counts
    samples: Counts
    test_shares: Mapping[str, float | None]
    rules: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Median time of a run of each row, without imports and first calls."""
        return {row: cost.seconds for row, cost in self.costs.items()}

    @property
    def title(self) -> str:
        """What the table is of."""
        return f"{self.experiment} on {self.dataset}{' (synthetic data)' if self.synthetic else ''}"

    def to_rich(self, width: int | None = None) -> Table:
        """A table for a terminal of some width; by default that of this one."""
        return tables.to_rich(self, width)

    def to_markdown(self) -> str:
        """The tables and notes as Markdown."""
        return tables.to_markdown(self)

    def to_latex(self) -> str:
        """The tables for LaTeX, with the package booktabs."""
        return tables.to_latex(self)

    def to_csv(self) -> str:
        """Every number, one line for each row and metric."""
        return tables.to_csv([self])


Record = RunRecord


@dataclass(frozen=True)
class Selection:
    """The runs of one experiment on one dataset that count, and what has to be said about the others.

    - ``rows``: Row of the table to seed to record, rows in the order they are shown; at least one row has a record.
    - ``seeds``: Every seed that any row was asked to run.
    """

    experiment: str
    dataset: str
    target: Target
    rows: dict[str, dict[int, Record]]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The target's metrics; then after an event's onset and, unless the first are those, before it."""
        event, own = self.records[0].event, self.target.metrics
        apart = () if event is None else ("after",) if event.foresee else ("before", "after")
        return (*own, *(f"{metric}_{when}" for when in apart for metric in own))

    @property
    def records(self) -> list[Record]:
        """Every run that counts."""
        return [record for runs in self.rows.values() for record in runs.values()]

    @property
    def primary(self) -> str:
        """The metric that chose the epochs."""
        return deciding_metric(self.records, self.target)


def deciding_metric(records: Iterable[Record], target: Target) -> str:
    """The metric that chose the epochs of some runs; the target's own where they differ."""
    named = {record.config.selection or target.selection for record in records}
    return named.pop() if len(named) == 1 else target.selection


def group_records(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by experiment and dataset, in the order they are met; a run that serves several stands in each."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in views(records):
        groups.setdefault((record.experiment, record.dataset), []).append(record)
    return groups


def row_name(record: Record) -> str:
    """What a run is called in a table: its algorithm, what varies in the experiment, and whether it knew labels.

    Examples
    --------
    >>> from manydg.config import TrainingConfig
    >>> config = TrainingConfig(settings={"mmd": 0.1})
    >>> row_name(Record(run="f0", algorithm="manydg", variant={"mmd": 0.1}, seed=0, dataset="d", config=config))
    'manydg (mmd 0.1)'
    """
    details = [value if isinstance(value, str) else f"{key} {value}" for key, value in record.variant.items()]
    detail = ", ".join(filter(None, [*details, KNOWN_LABELS[record.known_labels]]))
    return f"{record.algorithm} ({detail})" if detail else record.algorithm


def select(records: Sequence[Record]) -> Selection:
    """Choose the runs that count among the records of one experiment on one dataset.

    - raises DataError: If the records are of several experiments or datasets, or no run ended well.
    """
    groups = group_records(records)
    if len(groups) > 1:
        names = "; ".join(f"{experiment} on {dataset}" for experiment, dataset in groups)
        raise DataError(f"a summary is of one experiment on one dataset; these records are of {names}")
    good = [record for record in records if record.ok and record.test]
    if not good:
        errors = list(dict.fromkeys(_last_line(record) for record in records if record.status == "failed"))
        raise DataError("no run ended well, so there is nothing to sum up" + "".join(f"; {e}" for e in errors[:3]))
    kept, notes = _of_one_dataset_version(good)
    failed = [record for record in records if record.status == "failed"]
    rows, again = _by_row(kept, failed)
    seeds = tuple(sorted({record.seed for record in records}))
    notes += again + _absences(records, rows, seeds)
    versions = {record.code_version for record in kept}
    if len(versions) > 1:
        notes.append(f"the runs come from {len(versions)} versions of the code")
    if len({record.known_labels for record in kept}) > 1:
        notes.append("some rows knew labels of the patients they were tested on: compare them with each other alone")
    experiment, dataset = next(iter(groups))
    return Selection(experiment, dataset, _target(kept[-1]), rows, seeds, tuple(notes))


def counted(finished: Sequence[Record]) -> list[Record]:
    """Those of the finished runs of one experiment that its table counts, in their order.

    Of a row and a seed it is the last run, and all are on the last run's version of the dataset.
    """
    kept, _ = _of_one_dataset_version(finished) if finished else ([], [])
    last = {(row_name(record), record.seed): record.run for record in kept}
    return [record for record in kept if last[row_name(record), record.seed] == record.run]


def _target(record: Record) -> Target:
    if record.target is None:
        raise DataError(f"the record of run {record.run} does not say what its target is: run it again")
    return target_of(record.target)


def _of_one_dataset_version(good: Sequence[Record]) -> tuple[list[Record], list[str]]:
    newest = good[-1].dataset_hash
    kept = [record for record in good if record.dataset_hash == newest]
    left = len(good) - len(kept)
    note = f"{left} run{'s' if left > 1 else ''} on another version of the dataset left out"
    return kept, [note] if left else []


def _by_row(records: Sequence[Record], failed: Sequence[Record]) -> tuple[dict[str, dict[int, Record]], list[str]]:
    """Runs by row and seed; a row of which every run failed stays in the table, empty."""
    rows: dict[str, dict[int, Record]] = {row_name(record): {} for record in failed}
    notes = []
    for record in records:
        seeds = rows.setdefault(row_name(record), {})
        if record.seed in seeds:
            notes.append(f"{row_name(record)}, seed {record.seed} was run more than once: the last run counts")
        seeds[record.seed] = record
    algorithms = {row_name(record): record.algorithm for record in [*records, *failed]}
    # Variants by their numbers (3 patients, 14, 29), others in the order of their runs.
    ordered = sorted(rows, key=lambda row: (algorithm_order(algorithms[row]), _numbers(row)))
    return {row: dict(sorted(rows[row].items())) for row in ordered}, list(dict.fromkeys(notes))


def _numbers(row: str) -> list[float]:
    """The numbers in a row's variant; a variant without numbers comes after those that have some."""
    variant = row.partition(" (")[2]
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", variant)]
    return numbers or ([math.inf] if variant else [])


def _absences(records: Sequence[Record], rows: Mapping[str, Mapping[int, Record]], seeds: Sequence[int]) -> list[str]:
    """One line for each failed run that no later run replaced, and for each row that lacks seeds."""
    failed: dict[tuple[str, int], str] = {}
    for record in records:
        row, counting = row_name(record), rows.get(row_name(record), {}).get(record.seed)
        if record.status == "failed":
            failed[row, record.seed] = _last_line(record)
        elif counting is not None and counting.run == record.run:
            failed.pop((row, record.seed), None)
    lines = [
        f"{row}, seed {seed} failed: {error}{'; an earlier run counts' if seed in rows[row] else ''}"
        for (row, seed), error in failed.items()
    ]
    for row, runs in rows.items():
        missing = [str(seed) for seed in seeds if seed not in runs and (row, seed) not in failed]
        if missing:
            lines.append(f"{row} has no run for seed{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    return lines


def mixed_settings(chosen: Selection) -> list[str]:
    """A sentence for each row whose splits were not all run with the same options."""
    notes = []
    for row, runs in chosen.rows.items():
        options = [record.config.to_json() for record in runs.values()]
        differ = {name for other in options for name in other if other[name] != options[0].get(name)}
        if named := sorted(differ - {"seed", "precision", "execution"}):
            notes.append(f"the runs of {row} differ in {', '.join(named)}: its mean is of no one configuration")
    return notes


def _last_line(record: Record) -> str:
    lines = (record.error or "no reason given").strip().splitlines()
    return lines[-1][:200]


def value_of(record: Record, metric: str) -> float:
    """A test metric; NaN where it is undefined or absent."""
    value = record.test.get(metric)
    return math.nan if value is None else float(value)


def same_patients(first: Record, second: Record) -> bool:
    """Whether two runs were tested on the same people; runs that do not say are trusted."""
    ours, theirs = first.per_patient, second.per_patient
    return not ours or not theirs or set(ours) == set(theirs)


def load_predictions(folder: str | Path, record: Record, side: str = "test") -> Predictions | None:
    """Predictions of a run of a results folder on its test (or ``val``) patients; None where they are not here.

    - raises StorageError: If a file is damaged or was changed.
    """
    path = Path(folder) / record.folder / PREDICTIONS
    if not record.ok or not path.is_file() or not path.with_name(RUN_RECORD).is_file():
        return None
    again = f"delete {path.parent} and run the study again"
    check_files(path.with_name(RUN_RECORD), again, names=[path.name])
    return read_predictions(path, side, _target(record), record.threshold)


def clinical_results(
    folder: str | Path, *, at: str | None = None, silence: str | None = None, resamples: int = 1000
) -> dict[str, ClinicalResult]:
    """Alarms, decisions and groups of each model of a run folder or a results folder, on its test patients.

    A model's runs are those that the first table with the model counts; on each of several datasets it is another.

    - ``at``: Choose each run's threshold anew on its validation patients, as ``sensitivity=.9``; by default it is the
      run's.
    - ``silence``: After an alarm, such as ``6h``; by default the run's.
    - ``resamples``: Of the patient bootstrap.
    """
    path = Path(folder)
    alone = (path / RUN_RECORD).is_file()
    records = [RunRecord.read(path / RUN_RECORD).replace(folder=".")] if alone else read_results(path)
    models: dict[str, list[Predictions]] = {}
    rules: dict[str, list[str]] = {}
    quiet: dict[str, float | None] = {}
    counting = _of_models([each for each in records if each.ok])
    for name, record in counting:
        run, val = (load_predictions(path, record, side) for side in ("test", "val"))
        if run is None or val is None or not len(run.scored().truth):
            continue
        changes = {name: text for name, text in (("at", at), ("silence", silence)) if text is not None}
        config = record.config.replace(**changes)
        quiet[name] = silence_of(config, record.event)
        threshold, rule = (record.threshold, record.threshold_rule) if at is None else decide_threshold(config, val)
        models.setdefault(name, []).append(replace(run, threshold=threshold))
        rules.setdefault(name, []).append(rule)
    if not models:
        nothing = "has no predictions of a finished run on samples that count"
        raise DataError(f"{folder} {nothing}: name a run folder or a results folder")
    sites = {name: sites_of(record for other, record in counting if other == name) for name in models}
    results = {
        name: evaluate(runs, silence=quiet[name], resamples=resamples, site_of=sites[name])
        for name, runs in models.items()
    }
    return {name: replace(result, rule="; ".join(dict.fromkeys(rules[name]))) for name, result in results.items()}


def sites_of(records: Iterable[Record]) -> dict[str, Json]:
    """The site of each test patient, where whole sites were split."""
    return {name: site for record in records for name, site in record.sites.items()}


def _of_models(finished: Sequence[Record]) -> list[tuple[str, Record]]:
    """Each model's name and run, one for a split."""
    several = len({record.dataset for record in finished}) > 1
    runs: dict[tuple[str, int], Record] = {}
    for (_, dataset), records in group_records(finished).items():
        for record in counted(records):
            name = row_name(record) + (f" on {dataset}" if several else "")
            runs.setdefault((name, record.seed), record)
    return [(name, record) for (name, _), record in runs.items()]


FloatArray = npt.NDArray[np.float64]
PLAUSIBLE_EFFECT = 0.1
"""What methods on the same data may plausibly differ by, of metrics from 0 to 1."""


def composition(chosen: Selection) -> list[str]:
    """What rows of several learners are made of, a sentence each: mean weights over the splits, the largest first."""
    notes = []
    for row, by_seed in chosen.rows.items():
        shares: dict[str, list[float]] = {}
        for member in (member for record in by_seed.values() for member in record.members):
            shares.setdefault(member.name, []).append(member.share)
        if not shares:
            continue
        means = sorted(((sum(each) / len(by_seed), name) for name, each in shares.items()), reverse=True)
        parts = ", ".join(f"{name} {share:.0%}" for share, name in means if share >= LEAST_SHARE)
        alone = sum(
            max((member.share for member in record.members), default=0) > 1 - LEAST_SHARE for record in by_seed.values()
        )
        dominated = f"; one of them alone on {alone} of {len(by_seed)}" if alone else ""
        notes.append(f"{row} weighs its candidates, on average over the splits: {parts}{dominated}")
    return notes


def wide_differences(metric: str, differences: Mapping[str, Interval]) -> list[str]:
    """A sentence for each row whose difference from the reference these patients cannot tell; none for an error, whose
    unit is that of the values."""
    if oriented(metric, 1.0) < 0:
        return []
    return [
        f"{row}: the interval of the difference in {metric}, {interval.low:.2f} to {interval.high:.2f}, is "
        f"wider than methods plausibly differ by ({PLAUSIBLE_EFFECT:g} either way): these patients cannot tell"
        for row, interval in differences.items()
        if interval.low <= 0 <= interval.high and interval.high - interval.low > 2 * PLAUSIBLE_EFFECT
    ]


SAMPLE_MEANS = ("accuracy", "jaccard", "f1_samples")
"""Metrics that are means over samples, so that per-patient values give back the whole without predictions."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Every run's metrics under one set of resampled patients."""

    plan: PatientResampling
    runs: Mapping[str, Mapping[str, FloatArray]]
    """Run id to metric to values under every row of the plan's weights."""

    def mean(self, records: Sequence[Record], metric: str) -> FloatArray | None:
        """Mean over runs, or None where one of them has no such values."""
        values = self._of(records, metric)
        return mean_over_runs(values)[metric] if values else None

    def interval(self, values: FloatArray | None, records: Sequence[Record]) -> Interval | None:
        """Of a statistic of some runs; without bounds where these tested fewer than three patients, or sites."""
        if values is None:
            return None
        names = np.array(sorted({name for record in records for name in record.per_patient}))
        return self.plan.interval(values, units=self.plan.units_of(names) if len(names) else None)

    def difference(self, records: Sequence[Record], others: Sequence[Record], metric: str) -> FloatArray | None:
        """Mean over pairs of runs of the first minus the second, or None where one of them has no such values."""
        ours, theirs = self._of(records, metric), self._of(others, metric)
        return mean_difference(ours, theirs)[metric] if ours and theirs else None

    def _of(self, records: Sequence[Record], metric: str) -> list[dict[str, FloatArray]]:
        """One metric of each run; none at all where one of them lacks it."""
        values = [self.runs.get(record.run, {}) for record in records]
        return [{metric: each[metric]} for each in values] if all(metric in each for each in values) else []


def resample_runs(
    chosen: Selection, predictions: Mapping[str, Predictions], resamples: int
) -> tuple[Draws | None, list[str]]:
    """Resample the patients of all runs together, and say how many runs lack predictions.

    - returns ``draws``: None where no run names a patient.
    """
    records = chosen.records
    known = {record.run: predictions.get(record.run) for record in records}
    names = {str(name) for run in known.values() if run is not None for name in run.names}
    names |= {name for record in records for name in record.per_patient}
    lacking = sum(run is None for run in known.values())
    note = f"{lacking} of {len(known)} runs have no predictions here, so that some intervals cannot be given"
    if not names:
        return None, [note] if lacking else []
    plan = PatientResampling.of(np.array(sorted(names)), sites_of(records), resamples=resamples)
    runs = {}
    for record in records:
        run = known[record.run]
        runs[record.run] = _from_patients(record, plan) if run is None else _evaluate(run, plan)
    notes = [note] if lacking else []
    if plan.unit == "site":
        notes.append(f"intervals draw the {plan.units} tested sites first, then patients within them")
    return Draws(plan, runs), notes


def _evaluate(run: Predictions, plan: PatientResampling) -> dict[str, FloatArray]:
    """Every metric under resampled patients, also before and after an event's onset apart."""
    values = plan.evaluate(run.scored())
    for when, part in run.around_onset().items():
        foreseen = run.timing is not None and run.timing.event.foresee and when == "before"
        part_values = values if foreseen else plan.evaluate(part)
        values |= {f"{name}_{when}": part_values[name] for name in run.target.metrics}
    return values


def _from_patients(record: Record, plan: PatientResampling) -> dict[str, FloatArray]:
    """Metrics that are means over samples, resampled from a record's per-patient values."""
    people = record.per_patient
    columns = np.searchsorted(plan.names, list(people))
    draws = {}
    for metric in SAMPLE_MEANS:
        values = [entry.get(metric) for entry in people.values()]
        if people and all(value is not None for value in values):
            samples = np.array([float(entry["samples"] or 0) for entry in people.values()])
            weights = plan.weights[:, columns]
            total = weights @ samples
            hits = weights @ (samples * np.array(values, float))
            draws[metric] = np.divide(hits, total, out=np.full(len(total), np.nan), where=total > 0)
    return draws


__all__ = ["Entry", "Summary", "summarize", "summarize_folder", "write_summary"]

TESTS = ("t", "wilcoxon", "corrected")
_WITHIN_A_PATIENT = (
    "no 10th percentile over patients: it would exceed the value over all samples, because a metric within one patient "
    "leaves out how patients differ, and classes that the patient does not have"
)


def summarize(
    records: Sequence[Record],
    predictions: Mapping[str, Predictions] | None = None,
    reference: str = REFERENCE,
    *,
    resamples: int = 1000,
    tuned: bool = False,
) -> Summary:
    """Sum up the runs of one experiment on one dataset.

    - ``records``: As in ``results.jsonl``.
    - ``predictions``: Test predictions by run id.
    - ``reference``: The row that the others are tested against; where there is none of that name, the method with
      context, if it has one row.
    - ``resamples``: Of the patient bootstrap.
    - ``tuned``: Whether every split has settings of its own by search; otherwise it is said where they differ.
    - raises DataError: If no run ended well, or the records are of several experiments or datasets.
    """
    chosen = select(records)
    against = _reference(chosen.rows, reference)
    notes = [*chosen.notes, *(() if tuned else mixed_settings(chosen))]
    if against is None and len(chosen.rows) > 1:
        notes.append(f"no tests: there is no run of the reference {reference}; --reference names another")
    draws, missing = resample_runs(chosen, predictions or {}, resamples)
    notes += missing
    entries = _entries(chosen, against, draws, notes)
    notes += composition(chosen) + cautions(chosen.records, chosen.target.patient_metric) + _undecided(chosen, entries)
    return Summary(
        experiment=chosen.experiment,
        dataset=chosen.dataset,
        metrics=chosen.metrics,
        primary=chosen.primary,
        patient_metric=chosen.target.patient_metric,
        reference=against,
        rows=tuple(chosen.rows),
        seeds=chosen.seeds,
        entries=entries,
        tested_patients=len({name for record in chosen.records for name in record.per_patient}),
        synthetic=any(record.synthetic for record in chosen.records),
        pairs=_pairs(chosen, entries, draws),
        costs=(costs := {row: Cost.of(runs.values()) for row, runs in chosen.rows.items()}),
        recommendation=_recommended(chosen, costs, draws),
        split=chosen.records[0].config.split,
        patients=chosen.records[0].patients,
        samples=chosen.records[0].samples,
        test_shares={row: _test_share(runs) for row, runs in chosen.rows.items()},
        rules=_rules(chosen),
        notes=tuple(dict.fromkeys(notes)),
    )


def _entries(
    chosen: Selection, against: str | None, draws: Draws | None, notes: list[str]
) -> dict[tuple[str, str], Entry]:
    """Every row's entry at every metric, with tests where there is a reference; adds to the notes."""
    entries = {}
    for metric in chosen.metrics:
        column = _column(chosen, metric, draws)
        if metric == chosen.target.patient_metric:
            notes += [entry.worst_tenth_note for entry in column.values() if entry.worst_tenth_note]
        if against is not None:
            column = _with_tests(column, chosen, against, draws, notes)
        for row, entry in _ranked(column).items():
            entries[row, metric] = entry
    return entries


def _undecided(chosen: Selection, entries: Mapping[tuple[str, str], Entry]) -> list[str]:
    """What these patients cannot tell at the primary metric."""
    metric = chosen.primary
    gaps = {row: gap for row in chosen.rows if (gap := entries[row, metric].difference) is not None}
    return wide_differences(metric, gaps)


def _reference(rows: Iterable[str], wanted: str) -> str | None:
    """The row of that name, or the only one of the method with context."""
    names = list(rows)
    ours = [row for row in names if row.partition(" (")[0] == "manydg-context"]
    if wanted in names:
        return wanted
    return ours[0] if len(ours) == 1 else None


def _column(chosen: Selection, metric: str, draws: Draws | None) -> dict[str, Entry]:
    """Every row's entry at a metric, without tests."""
    runs = {row: {seed: record.per_patient for seed, record in seeds.items()} for row, seeds in chosen.rows.items()}
    by_patient = shared_patient_values(runs, metric)
    column = {row: _entry(chosen, row, metric, by_patient[row], draws) for row in chosen.rows}
    if any(oriented(metric, entry.worst_tenth - entry.mean) > 1e-9 for entry in column.values()):
        column = {
            row: replace(entry, worst_tenth=math.nan, worst_tenth_note=_WITHIN_A_PATIENT)
            for row, entry in column.items()
        }
    return column


def _entry(chosen: Selection, row: str, metric: str, by_patient: Mapping[str, float], draws: Draws | None) -> Entry:
    runs = chosen.rows[row]
    values = {seed: value_of(record, metric) for seed, record in runs.items()}
    known = [value for value in values.values() if not math.isnan(value)]
    resampled = draws.mean(list(runs.values()), metric) if draws else None
    return Entry(
        row=row,
        metric=metric,
        values=values,
        mean=float(np.mean(known)) if known else math.nan,
        sd=float(np.std(known, ddof=1)) if len(known) > 1 else math.nan,
        interval=draws.interval(resampled, list(runs.values())) if draws else None,
        by_patient=by_patient,
        worst_tenth=worst_tenth(list(by_patient.values()), metric),
    )


def worst_tenth(values: Sequence[float], metric: str) -> float:
    """What a tenth of the patients do worse than: the 10th percentile, or the 90th of an error; NaN without values."""
    return float(np.percentile(list(values), 10 if oriented(metric, 1.0) > 0 else 90)) if values else math.nan


def _with_tests(
    column: dict[str, Entry], chosen: Selection, reference: str, draws: Draws | None, notes: list[str]
) -> dict[str, Entry]:
    """Compare every row with the reference at one metric, and correct the tests for their number."""
    base = chosen.rows[reference]
    rivals = [row for row in column if row != reference]
    compared = {}
    for row in rivals:
        shared = [seed for seed in chosen.rows[row] if seed in base]
        paired = _paired_seeds(chosen, reference, row)
        if len(paired) < len(shared):
            apart = len(shared) - len(paired)
            notes.append(f"{row}: at {apart} seeds other test patients than {reference}, so these are not paired")
        ours, theirs = ([entry.values[seed] for seed in paired] for entry in (column[reference], column[row]))
        entry = replace(column[row], comparison=compare_paired(ours, theirs, _test_share(base)))
        compared[row] = replace(entry, difference=_difference(chosen, row, reference, paired, entry.metric, draws))
    adjusted = {test: holm([getattr(compared[row].comparison, f"{test}_p") for row in rivals]) for test in TESTS}
    for i, row in enumerate(rivals):
        compared[row] = replace(compared[row], adjusted={test: adjusted[test][i] for test in TESTS})
    return {row: compared.get(row, entry) for row, entry in column.items()}


def _paired_seeds(chosen: Selection, first: str, second: str) -> list[int]:
    """Seeds at which both rows were tested on the same patients."""
    ours, theirs = chosen.rows[first], chosen.rows[second]
    return [seed for seed in theirs if seed in ours and same_patients(theirs[seed], ours[seed])]


def _pairs(chosen: Selection, entries: Mapping[tuple[str, str], Entry], draws: Draws | None) -> tuple[Pair, ...]:
    """Every two rows at the primary metric, corrected for the number of pairs."""
    metric, pairs = chosen.primary, []
    for first, second in combinations(chosen.rows, 2):
        seeds = _paired_seeds(chosen, first, second)
        ours, theirs = ([entries[row, metric].values[seed] for seed in seeds] for row in (first, second))
        comparison = compare_paired(ours, theirs, _test_share(chosen.rows[first]))
        pairs.append(Pair(first, second, comparison, _difference(chosen, second, first, seeds, metric, draws), {}))
    adjusted = {test: holm([getattr(pair.comparison, f"{test}_p") for pair in pairs]) for test in TESTS}
    return tuple(replace(pair, adjusted={test: adjusted[test][i] for test in TESTS}) for i, pair in enumerate(pairs))


def _recommended(chosen: Selection, costs: Mapping[str, Cost], draws: Draws | None) -> Recommendation | None:
    """The row to use, and what choosing so is worth on test patients; a control is there to be compared with alone."""
    metric, known = chosen.primary, controls()
    validation = {
        row: {seed: math.nan if (value := run.val.get(metric)) is None else float(value) for seed, run in runs.items()}
        for row, runs in chosen.rows.items()
        if not any(run.algorithm in known for run in runs.values())
    }
    choice = recommend(validation, costs, _test_share(next(runs for runs in chosen.rows.values() if runs)), metric)
    if choice is None or draws is None:
        return choice
    values = draws.mean([chosen.rows[row][seed] for seed, row in choice.by_split.items()], metric)
    return choice if values is None else replace(choice, of_procedure=draws.plan.interval(values))


def _difference(
    chosen: Selection, row: str, reference: str, seeds: Sequence[int], metric: str, draws: Draws | None
) -> Interval | None:
    if draws is None or not seeds:
        return None
    ours, theirs = ([chosen.rows[name][seed] for seed in seeds] for name in (reference, row))
    return draws.interval(draws.difference(ours, theirs, metric), ours)


def _test_share(runs: Mapping[int, Record]) -> float | None:
    """Test patients over training patients of some runs, the mean over them."""
    counts = [record.patients for record in runs.values()]
    shares = [count.test / count.train for count in counts if count.train and count.test]
    return float(np.mean(shares)) if shares else None


def _ranked(column: dict[str, Entry]) -> dict[str, Entry]:
    most = max((entry.splits for entry in column.values()), default=0)
    whole = {row: round(entry.mean, 10) for row, entry in column.items() if most and entry.splits == most}
    metric = next(iter(column.values())).metric
    levels = sorted(set(whole.values()), key=lambda mean: -oriented(metric, mean))
    ranks = {level: rank for rank, level in enumerate(levels[:2], start=1)}
    return {row: replace(entry, rank=ranks.get(whole.get(row, math.nan), 0)) for row, entry in column.items()}


def _rules(chosen: Selection) -> tuple[str, ...]:
    """Every rule by which an epoch or a threshold was chosen, each once."""
    records = chosen.records
    rules = [f"Epoch: {record.selection_rule}." for record in records if record.selection_rule]
    rules += [f"Decision: {record.threshold_rule}." for record in records if record.threshold_rule]
    return tuple(dict.fromkeys(rules))


def check_reference(reference: str, algorithms: Iterable[str]) -> None:
    """Raise if the method that the others are to be tested against is none of those compared."""
    if reference not in (known := set(algorithms)):
        raise unknown_name("reference", reference, known)


def summarize_folder(results: str | Path, reference: str | None = None, *, resamples: int = 1000) -> list[Summary]:
    """One summary for each experiment and dataset of a results folder, with intervals from the runs' predictions.

    A group of which no run ended well is left out, unless it is the only one. Without a ``reference`` rows are tested
    against that of the folder, which ``compare --reference`` sets.
    """
    summaries, problems, described = [], [], read_description(results)
    for records in group_records(read_results(results)).values():
        loaded = {record.run: load_predictions(results, record) for record in records}
        if lost := lost_predictions(Path(results), records):
            text = f"{len(lost)} of {len(records)} runs have lost {PREDICTIONS}, so that some intervals cannot be given"
            warnings.warn(f"{text}: delete {lost[0]} and run the study again", ManyDGWarning, stacklevel=2)
        predictions = {run: value for run, value in loaded.items() if value is not None}
        try:
            against = reference or described.reference_on(records[0].dataset)
            compared = records[0].experiment == "compare"
            tuning = kept_tuning(results, records[0].dataset) if compared else None
            summary = summarize(records, predictions, against, resamples=resamples, tuned=tuning is not None)
            if tuning is not None:
                summary = replace(summary, rules=(tuning.budget(summary.rows), *summary.rules))
            about = described.datasets.get(summary.dataset)
            summaries.append(replace(summary, synthetic=True) if about is not None and about.synthetic else summary)
        except DataError as error:
            problems.append(str(error))
    if not summaries:
        raise DataError(f"{results}: " + (problems[0] if problems else "results.jsonl is empty; run the study again"))
    return summaries


def lost_predictions(folder: Path, records: Iterable[Record]) -> list[Path]:
    """Folders of finished runs whose predictions are gone; runs whose whole folder is elsewhere are not among them."""
    runs = (folder / record.folder for record in records if record.ok)
    return [run for run in runs if (run / RUN_RECORD).is_file() and not (run / PREDICTIONS).is_file()]


def write_summary(results: str | Path, summaries: Sequence[Summary] | None = None) -> list[Path]:
    """Write ``summary.csv`` and ``summary.md`` into a results folder, with the paper's figures beside real patients'.

    - ``summaries``: Those of the folder, where they are known already.
    - returns: The files written.
    """
    shown = summarize_folder(results) if summaries is None else summaries
    csv, markdown = Path(results) / "summary.csv", Path(results) / "summary.md"
    described = read_description(results)
    sections = []
    for summary in shown:
        sections.append(tables.to_markdown(summary))
        about = described.datasets.get(summary.dataset)
        paper = beside(summary, source=None if about is None else about.source)
        if paper is not None:
            sections.append(paper.to_markdown())
    write_atomically(csv, tables.to_csv(shown))
    write_atomically(markdown, "\n".join(sections))
    return [csv, markdown]


# Which of several models to use: chosen on validation patients, and a cheap one of those that chance cannot separate


@dataclass(frozen=True)
class Cost:
    """What a model costs to make and to use.

    - ``seconds``: Median time of a training run; NaN where it was not recorded.
    - ``parameters``: Trained parameters; None for trees, which have none.
    - ``predict_ms``: Milliseconds to predict a thousand samples, reading and patient context apart; NaN where it was
      not recorded.
    - ``context``: Which other samples of a patient a prediction needs: ``none``, ``offline`` (all) or ``causal``
      (earlier ones).
    - ``device``: What these times were taken on.
    """

    seconds: float
    parameters: int | None
    predict_ms: float
    context: str
    device: str

    @staticmethod
    def of(records: Iterable[RunRecord]) -> Cost:
        """The cost of one model, from its runs."""
        runs = list(records)
        return Cost(
            seconds=_median([float(run.seconds) for run in runs if run.seconds is not None]),
            parameters=max((run.parameters or 0 for run in runs), default=0) or None,
            predict_ms=1000 * _median([run.predict_seconds for run in runs if run.predict_seconds is not None]),
            context=next((str(run.context.get("mode", "none")) for run in runs if run.context), "none"),
            device=", ".join(dict.fromkeys(run.device for run in runs if run.device)),
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the cheaper model first."""
        return self.context != "none", self.seconds if math.isfinite(self.seconds) else math.inf

    def exceeds(self, other: Cost) -> bool:
        """Whether this model costs clearly more: it alone needs context, or it trains for more than a second and more
        than twice as long.

        Seconds differ from run to run, and what is recommended should not.
        """
        needs, seconds = self.rank
        return needs > other.rank[0] or (needs == other.rank[0] and seconds > 2 * max(other.rank[1], 0.5))


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


@dataclass(frozen=True)
class Recommendation:
    """The model to use, and why.

    - ``row``: The model.
    - ``best``: The one with the best mean validation metric.
    - ``validation``: Mean validation metric of each model.
    - ``errors``: Standard error of the best minus each model on validation patients; NaN for one split.
    - ``tied``: The models within one standard error of the best, itself included.
    - ``by_split``: The model that the validation patients of each split alone would have chosen.
    - ``of_procedure``: Test metric of these choices: what choosing on validation patients, as a procedure, is worth on
      new patients.
    """

    row: str
    best: str
    validation: Mapping[str, float]
    errors: Mapping[str, float]
    tied: tuple[str, ...]
    splits: int
    by_split: Mapping[int, str]
    of_procedure: Interval | None = None

    def gap(self, row: str) -> float:
        """How far a model's mean validation metric is from the best."""
        return abs(self.validation[self.best] - self.validation[row])


def recommend(
    validation: Mapping[str, Mapping[int, float]], costs: Mapping[str, Cost], test_share: float | None, metric: str = ""
) -> Recommendation | None:
    """Choose among models; None where there are no two that were validated on the same splits.

    A model with fewer than half of the splits that another has takes no part: it failed on the others, or is not done.

    - ``validation``: Model to seed to its validation metric; NaN where it is undefined.
    - ``costs``: Model to its cost.
    - ``test_share``: Test patients over training patients, for the correction of the standard error.
    - ``metric``: The metric; of an error, lower is better.

    Examples
    --------
    >>> costs = {"a": Cost(9, 1, 1, "none", ""), "b": Cost(1, 1, 1, "none", "")}
    >>> recommend({"a": {0: 0.71, 1: 0.72, 2: 0.70}, "b": {0: 0.70, 1: 0.73, 2: 0.69}}, costs, 0.25).row
    'b'
    """
    known = {
        row: {seed: value for seed, value in values.items() if math.isfinite(value)}
        for row, values in validation.items()
    }
    most = max(map(len, known.values()), default=0)
    rows = [row for row, values in known.items() if values and 2 * len(values) >= most]
    seeds = sorted(set.intersection(*(set(known[row]) for row in rows))) if rows else []
    if len(rows) < 2 or not seeds:
        return None
    table = {row: np.array([known[row][seed] for seed in seeds]) for row in rows}
    means = {row: float(values.mean()) for row, values in table.items()}
    best = max(rows, key=lambda row: oriented(metric, means[row]))
    errors = {row: _standard_error(table[best] - table[row], test_share) for row in rows}
    tied = [row for row in rows if row == best or abs(means[best] - means[row]) <= np.nan_to_num(errors[row])]
    cheapest = costs[min(tied, key=lambda row: costs[row].rank)]
    row = max((row for row in tied if not costs[row].exceeds(cheapest)), key=lambda row: oriented(metric, means[row]))
    return Recommendation(
        row=row,
        best=best,
        validation=means,
        errors=errors,
        tied=tuple(tied),
        splits=len(seeds),
        by_split={seed: max(rows, key=lambda row: oriented(metric, known[row][seed])) for seed in seeds},
    )


def _standard_error(gaps: np.typing.NDArray[np.float64], test_share: float | None) -> float:
    """Of a mean difference over splits that share patients; NaN for one split."""
    if len(gaps) < 2:
        return math.nan
    return float(gaps.std(ddof=1) * math.sqrt(1 / len(gaps) + (test_share or 0.0)))
