"""What was asked, and of whom: the task, the cohort, and the runs that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from manydg.data.info import CohortStep
from manydg.report import charts
from manydg.report.results_folder import Chapter, by_algorithm
from manydg.report.sections import (
    Block,
    Bullets,
    Cell,
    Column,
    Figure,
    Part,
    Section,
    Table,
    Text,
    count_cell,
    text_columns,
)
from manydg.report.words import algorithm_name, count, listed, noted, plural, sentence
from manydg.studies.records import StudiedDataset
from manydg.training.record import RunRecord

_MAX_LABELS = 15
_LAST = 900
_TASKS = {
    "classes": "say which of {n} classes each sample belongs to: {names}",
    "votes": "say which of {n} classes most experts chose for each sample: {names}",
    "binary": "say how likely each sample is to be “{last}” rather than “{first}”",
    "multilabel": "say which of {n} labels each sample carries (several may): {names}",
    "regression": "predict the value of {names} for each sample",
}


class Cohort(Section):
    """The task and the data at the head of a chapter, and failed runs at its end."""

    order = 100

    def build(self, chapter: Chapter) -> Iterator[Part]:
        yield _question(chapter)
        if chapter.about is not None and (blocks := _cohort(chapter.about)):
            yield Part("cohort", "Who the data come from", blocks)
        if failed := chapter.failed():
            yield _failures(failed)


def _question(chapter: Chapter) -> Part:
    """The task, the models and how they were evaluated, in plain words."""
    names = list(chapter.target.spec.names)
    shown = listed(names) if len(names) <= 8 else listed([*names[:6], f"{len(names) - 6} others"])
    task = _TASKS[chapter.target.kind].format(n=len(names), names=shown, first=names[0], last=names[-1])
    blocks: list[Block] = [
        Text(
            f"The task is to {task}. A model learns from some patients and is then judged on patients it has never "
            "seen: nobody is on both sides, so a good score cannot come from recognising a patient."
        )
    ]
    if compared := chapter.runs("compare"):
        blocks.append(Text(_protocol(compared)))
    blocks.append(Bullets(_rules([record for record in chapter.records if record.ok])))
    return Part("question", "What was asked", blocks)


def _protocol(records: Sequence[RunRecord]) -> str:
    names = [algorithm_name(name) for name in by_algorithm(records)]
    seeds = len({record.seed for record in records})
    split = records[0].patients
    shares = ((split.train, "learn from"), (split.val, "choose settings"), (split.test, "be judged on"))
    people = listed([f"{count(patients)} to {verb}" for patients, verb in shares if patients])
    config = records[0].config
    units = "Whole sites, each with all its patients," if config.split == "site" else "The patients"
    again = f"{units} were divided {f'{seeds} times at random' if seeds > 1 else 'once'}"
    if config.folds:
        deals = -(-seeds // config.folds)
        dealt = f"{units} were dealt at random into {config.folds} groups{f', {deals} times anew' if deals > 1 else ''}"
        again = f"{dealt}; each of {plural(seeds, 'split')} tests one group"
    methods = f"{len(names)} methods were compared: {listed(names)}" if len(names) > 1 else f"{names[0]} was trained"
    return f"{again} ({people}), the same way for every method. {methods}."


def _rules(records: Sequence[RunRecord]) -> list[str]:
    selection = dict.fromkeys(record.selection_rule for record in records if record.selection_rule)
    thresholds = dict.fromkeys(record.threshold_rule for record in records if record.threshold_rule)
    devices = dict.fromkeys(record.device for record in records if record.device)
    lines = [noted(f"Which epoch of training is used: {listed(list(selection))}") if selection else ""]
    lines.append(f"How probabilities become decisions: {listed(list(thresholds))}." if thresholds else "")
    lines.append("The test patients were scored once, after all choices had been made on validation patients.")
    lines.append(f"Computed on: {listed(list(devices))}." if devices else "")
    return [line for line in lines if line]


def _cohort(about: StudiedDataset) -> list[Block]:
    """Who is in the data, after which steps, with which labels."""
    blocks: list[Block] = []
    if about.patients and about.samples:
        people = "synthetic patients" if about.synthetic else "patients"
        amount = f"{count(about.samples)} samples of {count(about.patients)} {people}."
        blocks.append(Text(amount + _samples_per_patient(about) + _values(about)))
    if about.cohort_flow:
        blocks.append(_flow(about.cohort_flow))
    if about.label_counts:
        blocks.append(_labels(about.label_counts, about.samples))
    if origin := _origin(about):
        blocks.append(Text(origin, "note"))
    return blocks


def _samples_per_patient(about: StudiedDataset) -> str:
    quantiles = {float(key): value for key, value in about.samples_per_patient.items()}
    if not {0.0, 0.5, 1.0} <= set(quantiles):
        return ""
    low, middle, high = (count(quantiles[key]) for key in (0.0, 0.5, 1.0))
    return f" A patient has between {low} and {high} samples, {middle} in the middle (median)."


def _values(about: StudiedDataset) -> str:
    """The range of a regression target."""
    quantiles = {float(key): value for key, value in about.values.items()}
    if about.target is None or not {0.0, 0.25, 0.5, 0.75, 1.0} <= set(quantiles):
        return ""
    low, quarter, middle, upper, high = (f"{quantiles[key]:,.4g}" for key in (0.0, 0.25, 0.5, 0.75, 1.0))
    name = about.target.names[0]
    return (
        f" {sentence(name)} is between {low} and {high}; half of the samples are between {quarter} and {upper}, "
        f"the median is {middle}."
    )


def _flow(flow: Sequence[CohortStep]) -> Table:
    """What is left after each step of the preparation, in every unit that was counted."""
    units = list(dict.fromkeys(unit for step in flow for unit in step.counts))
    rows = [
        [Cell(f"{index}. {sentence(step.step)}", float(index)), *(count_cell(step.counts.get(unit)) for unit in units)]
        for index, step in enumerate(flow, start=1)
    ]
    columns = [Column("Step", numeric=False), *(Column(sentence(unit.replace("_", " "))) for unit in units)]
    return Table("Cohort flow: what is left after each step", columns, rows)


def _labels(labels: Mapping[str, int], samples: int) -> Figure:
    ordered = sorted(labels.items(), key=lambda entry: -entry[1]) if len(labels) > _MAX_LABELS else labels.items()
    shown = dict(list(ordered)[:_MAX_LABELS])
    total = max(samples or sum(labels.values()), 1)
    share = np.array(list(shown.values()), float) / total * 100
    panel = charts.bars("How common each label is", list(shown), share.tolist(), "% of samples", digits=1)
    rest = len(labels) - len(shown)
    note = f"The {_MAX_LABELS} most common; {plural(rest, 'other')} not shown." if rest else ""
    return Figure("Share of samples that carry each label.", [panel], note)


def _origin(about: StudiedDataset) -> str:
    sentences = []
    if (origin := about.provenance) and origin.source:
        kind = "synthetic " if origin.synthetic else ""
        sentences.append(f"Prepared from {kind}{origin.source} files by {origin.program or 'manydg'}.")
    if about.hash:
        sentences.append(f"Equal data have equal fingerprints; this one is {about.hash}.")
    return " ".join(sentences)


def _failures(failed: Sequence[RunRecord]) -> Part:
    """Runs that ended in an error."""
    columns = text_columns("Run", "Experiment", "Method", "Seed", "What happened")
    rows = []
    for record in failed:
        error = record.error or "no reason was recorded"
        if error.startswith("Traceback"):
            # Of an unforeseen error only the kind: its text may hold anything.
            kind = error.strip().splitlines()[-1].split(":")[0]
            error = f"{kind}, an error that manydg did not foresee; the run's folder has the details"
        named = [Cell(record.run), Cell(record.experiment), Cell(algorithm_name(record.algorithm))]
        rows.append([*named, Cell(str(record.seed), float(record.seed)), Cell(error)])
    missing = "They are left out of every table and figure; a method with a failed run rests on fewer splits."
    return Part("failed", "Runs that failed", [Text(missing), Table("Failed runs", columns, rows)], order=_LAST)
