"""From records to the table of a comparison: means, intervals over patients, paired tests, the worst patients.

Records alone are enough; with the runs' predictions every metric gets a patient-bootstrap interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manydg.data.storage import write_atomically
from manydg.errors import DataError
from manydg.evaluation.significance import compare_paired, holm
from manydg.evaluation.statistics import Interval, Predictions, patient_percentile
from manydg.experiments import _summary_tables as tables
from manydg.experiments._summary_draws import Draws, resample_runs
from manydg.experiments._summary_model import Entry, Summary
from manydg.experiments._summary_runs import (
    Record,
    Selection,
    group_records,
    load_predictions,
    same_patients,
    select,
    value_of,
)
from manydg.experiments.study import STUDY, read_results

__all__ = ["Entry", "Summary", "summarize", "summarize_folder", "write_summary"]

TESTS = ("t", "wilcoxon", "corrected")


def summarize(
    records: Sequence[Record],
    predictions: Mapping[str, Predictions] | None = None,
    reference: str = "manydg",
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Summary:
    """Sum up the runs of one experiment on one dataset.

    Parameters
    ----------
    records : sequence of dict
        As in ``results.jsonl``.
    predictions : mapping, optional
        Test predictions by run id.
    reference : str
        The row that the others are tested against; where there is none of that name, the method with context, if it
        has one row.
    resamples, seed : int
        Of the patient bootstrap.

    Raises
    ------
    DataError
        If no run ended well, or the records are of several experiments or datasets.
    """
    chosen = select(records)
    against = _reference(chosen.rows, reference)
    notes = list(chosen.notes)
    if against is None and len(chosen.rows) > 1:
        notes.append(f"no tests: there is no run of the reference {reference}")
    draws, missing = resample_runs(chosen, predictions or {}, resamples, seed)
    notes += missing
    entries = {}
    for metric in chosen.target.metrics:
        column = {row: _entry(chosen, row, metric, draws) for row in chosen.rows}
        if against is not None:
            column = _with_tests(column, chosen, against, draws, notes)
        for row, entry in _ranked(column).items():
            entries[row, metric] = entry
    counts = [chosen.records[0].get(key) or {} for key in ("patients", "samples")]
    return Summary(
        experiment=chosen.experiment,
        dataset=chosen.dataset,
        metrics=tuple(chosen.target.metrics),
        primary=chosen.target.selection,
        reference=against,
        rows=tuple(chosen.rows),
        seeds=chosen.seeds,
        entries=entries,
        seconds={row: _mean_seconds(runs.values()) for row, runs in chosen.rows.items()},
        patients={side: int(count) for side, count in counts[0].items()},
        samples={side: int(count) for side, count in counts[1].items()},
        target_kind=chosen.target.kind,
        target_names=chosen.target.spec.names,
        rules=_rules(chosen),
        notes=tuple(dict.fromkeys(notes)),
    )


def _reference(rows: Iterable[str], wanted: str) -> str | None:
    """The row of that name, or the only one of the method with context."""
    names = list(rows)
    ours = [row for row in names if row.partition(" (")[0] == "manydg-context"]
    if wanted in names:
        return wanted
    return ours[0] if len(ours) == 1 else None


def _entry(chosen: Selection, row: str, metric: str, draws: Draws | None) -> Entry:
    runs = chosen.rows[row]
    values = {seed: value_of(record, metric) for seed, record in runs.items()}
    known = [value for value in values.values() if not math.isnan(value)]
    resampled = draws.mean(list(runs.values()), metric) if draws else None
    worst, people = patient_percentile([record.get("per_patient") or {} for record in runs.values()], metric)
    return Entry(
        row=row,
        metric=metric,
        values=values,
        mean=float(np.mean(known)) if known else math.nan,
        sd=float(np.std(known, ddof=1)) if len(known) > 1 else math.nan,
        interval=draws.plan.interval(resampled) if draws and resampled is not None else None,
        worst_tenth=worst,
        worst_tenth_patients=people,
    )


def _with_tests(
    column: dict[str, Entry], chosen: Selection, reference: str, draws: Draws | None, notes: list[str]
) -> dict[str, Entry]:
    """Compare every row with the reference at one metric, and correct the tests for their number."""
    base = chosen.rows[reference]
    rivals = [row for row in column if row != reference]
    compared = {}
    for row in rivals:
        shared = [seed for seed in chosen.rows[row] if seed in base]
        paired = [seed for seed in shared if same_patients(chosen.rows[row][seed], base[seed])]
        if len(paired) < len(shared):
            apart = len(shared) - len(paired)
            notes.append(f"{row}: at {apart} seeds other test patients than {reference}, so these are not paired")
        ours, theirs = ([entry.values[seed] for seed in paired] for entry in (column[row], column[reference]))
        entry = replace(column[row], comparison=compare_paired(ours, theirs, _test_share(base)))
        compared[row] = replace(entry, difference=_difference(chosen, row, reference, paired, entry.metric, draws))
    adjusted = {test: holm([getattr(compared[row].comparison, f"{test}_p") for row in rivals]) for test in TESTS}
    for i, row in enumerate(rivals):
        compared[row] = replace(compared[row], adjusted={test: adjusted[test][i] for test in TESTS})
    return {row: compared.get(row, entry) for row, entry in column.items()}


def _difference(
    chosen: Selection, row: str, reference: str, seeds: Sequence[int], metric: str, draws: Draws | None
) -> Interval | None:
    if draws is None or not seeds:
        return None
    ours, theirs = (draws.mean([chosen.rows[name][s] for s in seeds], metric) for name in (row, reference))
    return draws.plan.interval(ours - theirs) if ours is not None and theirs is not None else None


def _test_share(runs: Mapping[int, Record]) -> float | None:
    """Test patients over training patients of the reference's runs."""
    counts: list[Mapping[str, Any]] = [record.get("patients") or {} for record in runs.values()]
    shares = [count["test"] / count["train"] for count in counts if count.get("train") and count.get("test")]
    return float(np.mean(shares)) if shares else None


def _ranked(column: dict[str, Entry]) -> dict[str, Entry]:
    levels = sorted({round(entry.mean, 10) for entry in column.values() if not math.isnan(entry.mean)}, reverse=True)
    places = {level: place for place, level in enumerate(levels[:2], start=1)}
    return {row: replace(entry, rank=places.get(round(entry.mean, 10), 0)) for row, entry in column.items()}


def _mean_seconds(records: Any) -> float:
    times = [float(record["seconds"]) for record in records if record.get("seconds") is not None]
    return float(np.mean(times)) if times else math.nan


def _rules(chosen: Selection) -> tuple[str, ...]:
    """Every rule by which an epoch or a threshold was chosen, each once."""
    records = chosen.records
    found = [f"Epoch: {record['selection_rule']}." for record in records if record.get("selection_rule")]
    found += [f"Decision: {record['threshold_rule']}." for record in records if record.get("threshold_rule")]
    return tuple(dict.fromkeys(found))


def summarize_folder(results: str | Path, reference: str = "manydg", *, resamples: int = 1000) -> list[Summary]:
    """One summary for each experiment and dataset of a results folder, with intervals from the runs' predictions.

    A group of which no run ended well is left out, unless it is the only one.
    """
    groups = group_records(read_results(results))
    found, problems = [], []
    for records in groups.values():
        try:
            found.append(_summary_of(Path(results), json.dumps(list(records)), reference, resamples))
        except DataError as error:
            problems.append(str(error))
    if not found:
        raise DataError(f"{results}: " + (problems[0] if problems else "results.jsonl is empty; run the study again"))
    return found


@lru_cache(maxsize=64)
def _summary_of(results: Path, records: str, reference: str, resamples: int) -> Summary:
    """The summary of one group of records, as JSON; a command asks for the same one several times."""
    group: list[Record] = json.loads(records)
    told = {str(record["run"]): load_predictions(results, record) for record in group}
    known = {run: value for run, value in told.items() if value is not None}
    return summarize(group, known, reference, resamples=resamples)


def write_summary(results: str | Path, reference: str = "manydg") -> list[Path]:
    """Write ``summary.csv`` and ``summary.md`` into a results folder; the paper's figures stand beside ours.

    Returns
    -------
    list of Path
        The files written.
    """
    from manydg.experiments.paper_figures import beside

    summaries = summarize_folder(results, reference)
    csv, markdown = Path(results) / "summary.csv", Path(results) / "summary.md"
    sections = []
    for summary in summaries:
        sections.append(tables.to_markdown(summary))
        paper = beside(summary, source=_source(Path(results), summary.dataset))
        if paper is not None:
            sections.append(paper.to_markdown())
    write_atomically(csv, tables.to_csv(summaries))
    write_atomically(markdown, "\n".join(sections))
    return [csv, markdown]


def _source(results: Path, dataset: str) -> str | None:
    """What a dataset was prepared from, as ``study.json`` has it; None where it does not say."""
    try:
        study = json.loads((results / STUDY).read_text())
        found = study["datasets"][dataset]["provenance"]["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)
