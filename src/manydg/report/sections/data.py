"""What was asked, and of whom: the task, the cohort, and the runs that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from manydg.data.info import CohortStep
from manydg.report import charts
from manydg.report.content import Block, Bullets, Cell, Column, Figure, Section, Table, Text
from manydg.report.study import Chapter, by_algorithm
from manydg.report.words import algorithm_name, count, listed, metric_name, plural, sentence
from manydg.studies.records import StudiedDataset
from manydg.training.record import RunRecord

_MOST_LABELS = 15
_TASK = {
    "classes": "say which of {n} classes each sample belongs to: {names}",
    "votes": "say which of {n} classes most experts chose for each sample: {names}",
    "binary": "say how likely each sample is to be “{last}” rather than “{first}”",
    "multilabel": "say which of {n} labels each sample carries (several may): {names}",
}


def question(chapter: Chapter) -> Section:
    """The task, the models and how they were judged, in plain words."""
    names = list(chapter.target.spec.names)
    shown = listed(names) if len(names) <= 8 else listed([*names[:6], f"{len(names) - 6} others"])
    task = _TASK[chapter.target.kind].format(n=len(names), names=shown, first=names[0], last=names[-1])
    done = [record for record in chapter.records if record.ok]
    blocks: list[Block] = [
        Text(
            f"The task is to {task}. A model learns from some patients and is then judged on patients it has never "
            "seen: nobody is on both sides, so a good score cannot come from recognising a patient."
        )
    ]
    compared = chapter.runs("compare")
    if compared:
        blocks.append(Text(_protocol(compared)))
    blocks.append(Bullets(_rules(done)))
    return Section("question", "What was asked", blocks)


def _protocol(records: Sequence[RunRecord]) -> str:
    names = [algorithm_name(name) for name in by_algorithm(records)]
    seeds = len({record.seed for record in records})
    sides = records[0].patients
    shares = ((sides.train, "learn from"), (sides.val, "choose settings"), (sides.test, "be judged on"))
    people = listed([f"{count(number)} to {verb}" for number, verb in shares if number])
    again = f"The patients were divided {seeds} times at random" if seeds > 1 else "The patients were divided once"
    methods = f"{len(names)} methods were compared: {listed(names)}" if len(names) > 1 else f"{names[0]} was trained"
    return f"{again} ({people}), the same way for every method. {methods}."


def _rules(records: Sequence[RunRecord]) -> list[str]:
    chosen = dict.fromkeys(record.selection_rule for record in records if record.selection_rule)
    cuts = dict.fromkeys(record.threshold_rule for record in records if record.threshold_rule)
    devices = dict.fromkeys(record.device for record in records if record.device)
    lines = [f"Which epoch of training is used: {listed(list(chosen))}." if chosen else ""]
    lines.append(f"How probabilities become decisions: {listed(list(cuts))}." if cuts else "")
    lines.append("The test patients were scored once, after all choices had been made on validation patients.")
    lines.append(f"Computed on: {listed(list(devices))}." if devices else "")
    return [line for line in lines if line]


def cohort(chapter: Chapter) -> Section | None:
    """Who is in the data, after which steps, with which labels."""
    about = chapter.about
    if about is None:
        return None
    people, samples = about.patients, about.samples
    blocks: list[Block] = []
    if people and samples:
        blocks.append(Text(f"{count(samples)} samples of {count(people)} patients.{_per_patient(about)}"))
    flow = [step for step in about.cohort_flow if step.step]
    if flow:
        blocks.extend(_flow(flow))
    if about.label_counts:
        blocks.append(_labels(about.label_counts, samples))
    source = _source(about)
    if source:
        blocks.append(Text(source, "note"))
    return Section("cohort", "Who the data come from", blocks) if blocks else None


def _per_patient(about: StudiedDataset) -> str:
    quantiles = {float(key): value for key, value in about.samples_per_patient.items()}
    if not {0.0, 0.5, 1.0} <= set(quantiles):
        return ""
    low, middle, high = (count(quantiles[key]) for key in (0.0, 0.5, 1.0))
    return f" A patient has between {low} and {high} samples, {middle} in the middle (median)."


def _flow(flow: Sequence[CohortStep]) -> list[Block]:
    """The flow as a table of all counts, and as bars where patients are counted throughout."""
    units = list(dict.fromkeys(unit for step in flow for unit in step.counts))
    rows = [
        [Cell(f"{place}. {sentence(step.step)}", float(place)), *(_count(step.counts.get(unit)) for unit in units)]
        for place, step in enumerate(flow, start=1)
    ]
    columns = [Column("Step", numeric=False), *(Column(sentence(unit.replace("_", " "))) for unit in units)]
    return [Table("Cohort flow: what is left after each step", columns, rows)]


def _count(value: int | None) -> Cell:
    return Cell(count(value), float(value)) if value is not None else Cell("\N{EN DASH}", None)


def _labels(labels: Mapping[str, int], samples: int) -> Figure:
    ordered = sorted(labels.items(), key=lambda entry: -entry[1]) if len(labels) > _MOST_LABELS else labels.items()
    shown = dict(list(ordered)[:_MOST_LABELS])
    total = max(samples or sum(labels.values()), 1)
    share = np.array(list(shown.values()), float) / total * 100
    panel = charts.bars("How common each label is", list(shown), share.tolist(), "% of samples", digits=1)
    rest = len(labels) - len(shown)
    note = f"The {_MOST_LABELS} most common; {plural(rest, 'other')} not shown." if rest else ""
    return Figure("Share of samples that carry each label.", [panel], note)


def _source(about: StudiedDataset) -> str:
    words = []
    origin = about.provenance
    if origin and origin.source:
        words.append(f"Prepared from {origin.source} files by {origin.program or 'manydg'}.")
    if about.hash:
        words.append(f"Fingerprint of the content: {about.hash}.")
    return " ".join(words)


def failures(chapter: Chapter) -> Section | None:
    """Runs that ended in an error; an unforeseen error's text is kept out, since nobody vouches for what it says."""
    failed = chapter.failed()
    if not failed:
        return None
    columns = [Column(title, numeric=False) for title in ("Run", "Experiment", "Method", "Seed", "What happened")]
    rows = [
        [
            Cell(record.run),
            Cell(record.experiment),
            Cell(algorithm_name(record.algorithm)),
            Cell(str(record.seed), float(record.seed)),
            Cell(_what_happened(record.error or "")),
        ]
        for record in failed
    ]
    missing = "They are left out of every table and figure; a method with a failed run rests on fewer splits."
    return Section("failed", "Runs that failed", [Text(missing), Table("Failed runs", columns, rows)])


def _what_happened(error: str) -> str:
    if not error.startswith("Traceback"):
        return error or "no reason was recorded"
    kind = error.strip().splitlines()[-1].split(":")[0]
    return f"{kind}, an error that manydg did not foresee; the run's folder has the details"


def metric_list(chapter: Chapter) -> str:
    """The chapter's metrics in words."""
    return listed([metric_name(name) for name in chapter.target.metrics])
