"""Experiments that vary something, and running times.

What an experiment varies is read from its records, so that an experiment without a section of its own is shown too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from manydg.files import Json
from manydg.report import charts
from manydg.report.charts import Panel, Series
from manydg.report.results_folder import Chapter, Spread, by_algorithm, grouped, metric_spread, seconds_per_epoch
from manydg.report.sections import (
    Block,
    Cell,
    Column,
    Figure,
    Part,
    Section,
    Table,
    Text,
    claimed_experiments,
    count_cell,
    figure_blocks,
    text_columns,
)
from manydg.report.words import LOSSES, algorithm_name, metric_name, number, sentence
from manydg.studies.figure_data import Bars, CellTable, Curve
from manydg.training.record import RunRecord

_LOG_RATIO = 20
_NUMBERS = "The same in numbers (mean ± standard deviation over splits)"
Entries = Sequence[tuple[str, float | None, Sequence[RunRecord]]]
"""What varies, its value on the axis where there is one, and the runs."""
_OTHERS, _RUNTIME = 700, 800
_FOREGROUND = ("full", "all four objectives", "manydg")
_AXES = {
    "patients": "training patients",
    "train_patients": "training patients",
    "fraction": "share of the training patients",
    "value": "weight (the others at 1)",
    "weight": "weight (the others at 1)",
    "step": "step",
}


_EXPERIMENTS = {
    "objectives": (
        "What each part of the method adds",
        "ManyDG adds three objectives to the plain supervised loss: features and patient factors alike in "
        "distribution (MMD), mutual reconstruction within a patient, and patient factors that agree within a patient. "
        "Here some are switched off.",
    ),
    "weights": (
        "How much the weights of the objectives matter",
        "One weight is varied from a tenth to ten times its default while the others stay at 1. A flat line means that "
        "the choice hardly matters.",
    ),
    "limited-data": (
        "With fewer patients to learn from",
        "The same test patients throughout; only the number of patients to learn from changes.",
    ),
    "continual": (
        "When new patients keep arriving",
        "A model trained on some patients goes on learning as groups of new ones arrive, revisiting a few samples of "
        "earlier patients, or none.",
    ),
    "decomposition": (
        "Simpler ways to take the patient out",
        "Two simpler decompositions of the features (SimD1, SimD2) against ManyDG’s reconstruction and projection.",
    ),
    "context": (
        "What a patient’s own unlabelled samples add",
        "Each input is joined with the same input seen against the rest of that patient’s samples. No label is used.",
    ),
    "context-rivals": (
        "Against every rival, without and with context",
        "Every algorithm twice: on a sample alone, and with the same unlabelled samples of the patient beside it.",
    ),
    "cold-start": (
        "How soon a new patient is known",
        "Performance by the number of unlabelled samples of the new patient that were at hand, and by the time since "
        "the recording or stay began.",
    ),
    "patient-probe": (
        "Is z a patient?",
        "How often the mean embedding of a session (a night, a stay) is most like that of another session of the same "
        "person, among the sessions of everyone.",
    ),
    "runtime": ("How long training takes", ""),
}
"""Title and introduction of each experiment, in the order of the page."""


class Ablations(Section):
    """The paper's experiments that vary something, running times, and whatever no section shows as its own."""

    order = 500
    experiments = tuple(_EXPERIMENTS)
    expected = ("objectives", "weights", "limited-data", "continual", "decomposition", "runtime")

    def build(self, chapter: Chapter) -> Iterator[Part]:
        others = [name for name in dict.fromkeys(chapter.experiments()) if name not in claimed_experiments()]
        for name in (*self.experiments, *others):
            if chapter.runs(name) or chapter.figures_of(name):
                yield _part(chapter, name)


def _part(chapter: Chapter, name: str) -> Part:
    about = _EXPERIMENTS.get(name)
    title, lead = about or (sentence(name.replace("-", " ")), "")
    order = _RUNTIME if name == "runtime" else None if about else _OTHERS
    blocks: list[Block] = [Text(lead)] if lead else []
    return Part(name, title, [*blocks, *_blocks(chapter, name)], chapter.command(name), order)


def _blocks(chapter: Chapter, name: str) -> list[Block]:
    runs, figures = chapter.runs(name), chapter.figures_of(name)
    if name == "continual" and figures:
        label = {id(each): each.data.y.label for each in figures if isinstance(each.data, Curve | Bars)}
        figures.sort(key=lambda figure: label.get(id(figure)) != chapter.metric)
        # The figures show every step; the runs' metrics are those after the last.
        last = [_table(chapter, _entries(_labelled(runs)), "After the last step")] if runs else []
        return [*figure_blocks(figures), *last]
    if not runs:
        return figure_blocks(figures)
    if name == "runtime":
        kept = [figure for figure in figures if not isinstance(figure.data, CellTable)]
        return [*_times(runs), *figure_blocks(kept)]
    axis = _axis(runs)
    made = _bars(chapter, runs) if axis is None else _curves(chapter, runs, axis)
    return [*made, *figure_blocks(figures)]


def _axis(runs: Sequence[RunRecord]) -> str | None:
    """The variant's key that is a number with at least three different values: the horizontal axis."""
    values: dict[str, set[float]] = {}
    for record in runs:
        for key, value in record.variant.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(float(value))
    counts = {key: len(numbers) for key, numbers in values.items() if len(numbers) > 2}
    return max(counts, key=lambda key: counts[key]) if counts else None


def _labelled(runs: Sequence[RunRecord], axis: str | None = None) -> dict[str, list[RunRecord]]:
    """Runs by label: the algorithm where there are several, and what varies besides the axis."""
    several = len({record.algorithm for record in runs}) > 1
    values: dict[str, set[str]] = {}
    for record in runs:
        for key, value in record.variant.items():
            values.setdefault(key, set()).add(json.dumps(value))
    varied = {key for key, texts in values.items() if key != axis and len(texts) > 1}
    ordered = [record for records in by_algorithm(runs).values() for record in records]
    groups = grouped(ordered, lambda record: _label(record, varied, several))
    if several:
        return groups
    # Runs are in the order in which they ended; variants are shown by name, the whole method last.
    return {name: groups[name] for name in sorted(groups, key=lambda name: (name.lower() in _FOREGROUND, name))}


def _label(record: RunRecord, varied: Collection[str], several: bool) -> str:
    variant = {key: value for key, value in record.variant.items() if key in varied}
    parts = [algorithm_name(record.algorithm)] if several or not variant else []
    return ", ".join(parts + [_in_words(key, value) for key, value in variant.items()])


def _in_words(key: str, value: Json) -> str:
    name = key.replace("_", " ")
    if isinstance(value, bool):
        return f"with {name}" if value else f"without {name}"
    if isinstance(value, str):
        return LOSSES.get(value, value)
    if isinstance(value, Mapping):
        return ", ".join(
            f"{LOSSES.get(part, part)} {entry:g}" if isinstance(entry, int | float) else f"{part} {entry}"
            for part, entry in value.items()
        )
    if isinstance(value, int | float):
        return f"{value:g} {name}" if name.split()[0].endswith("s") else f"{name} {value:g}"
    return f"{name} {json.dumps(value)}"


def _curves(chapter: Chapter, runs: Sequence[RunRecord], axis: str) -> list[Block]:
    along = [record for record in runs if isinstance(record.variant.get(axis), int | float)]
    series: list[Series] = []
    entries: list[tuple[str, float | None, Sequence[RunRecord]]] = []
    for name, records in _labelled(along, axis).items():
        points = grouped(records, lambda record: float(record.variant[axis]))
        x = np.array(sorted(points))
        spreads = [metric_spread(points[value], chapter.metric) for value in x]
        mean, low, high = np.array([(each.mean, each.low, each.high) for each in spreads]).T
        series.append(Series(sentence(name), x, mean, low, high))
        entries += [(name, float(value), points[value]) for value in x]
    label = _AXES.get(axis, axis.replace("_", " "))
    aside = [record for record in runs if record not in along]
    blocks: list[Block] = [_curve_figure(chapter, series, label), _table(chapter, entries, axis=label)]
    return blocks + (_beside_default(chapter, aside, along, axis) if aside else [])


def _curve_figure(chapter: Chapter, series: Sequence[Series], label: str) -> Figure:
    metric = metric_name(chapter.metric)
    every = np.concatenate([line.x for line in series])
    scale = "log" if every.min() > 0 and every.max() / every.min() >= _LOG_RATIO else "linear"
    title = f"{sentence(metric)} by {label.split(' (')[0]}"
    panels = charts.line_panels(title, series, label, metric, scale)
    return Figure(f"{title}.", panels, "Means over the splits; bands are one standard deviation.")


def _beside_default(chapter: Chapter, aside: Sequence[RunRecord], along: Sequence[RunRecord], axis: str) -> list[Block]:
    """Runs without a value on the axis, beside those in which everything is at 1."""
    # Whichever weight was varied, at 1 it is the same run: one for each seed is enough.
    same = {(record.algorithm, record.seed): record for record in along if record.variant[axis] == 1}
    default = [record.replace(variant={"set": "every weight at 1"}) for record in same.values()]
    texts = [", ".join(_in_words(*entry) for entry in record.variant.items()) for record in aside]
    named = [record.replace(variant={"set": text}) for record, text in zip(aside, texts, strict=True)]
    return _bars(chapter, [*default, *named])


def _spread_cells(spreads: Sequence[Spread]) -> list[Cell]:
    """Mean ± standard deviation of each metric, and the number of splits."""
    cells = []
    for each in spreads:
        sd = f" ± {number(each.sd)}" if each.count > 1 else ""
        cells.append(Cell(f"{number(each.mean)}{sd}", each.mean))
    return [*cells, Cell(str(spreads[0].count), float(spreads[0].count))]


def _bars(chapter: Chapter, runs: Sequence[RunRecord]) -> list[Block]:
    groups = {sentence(name): records for name, records in _labelled(runs).items()}
    panels = [_bar_panel(groups, metric) for metric in chapter.target.metrics]
    note = "Bars are means over the splits, whiskers one standard deviation."
    return [Figure("Performance on test patients.", panels, note), _table(chapter, _entries(groups))]


def _entries(groups: Mapping[str, Sequence[RunRecord]]) -> Entries:
    return [(name, None, records) for name, records in groups.items()]


def _bar_panel(groups: Mapping[str, Sequence[RunRecord]], metric: str) -> Panel:
    spreads = [metric_spread(records, metric) for records in groups.values()]
    means, low, high = ([getattr(each, part) for each in spreads] for part in ("mean", "low", "high"))
    shown, title = [name for name in groups if name.lower() in _FOREGROUND], sentence(metric_name(metric))
    return charts.bars(title, list(groups), means, metric_name(metric), low=low, high=high, foreground=shown or None)


def _table(chapter: Chapter, entries: Entries, caption: str = _NUMBERS, axis: str = "") -> Table:
    metrics = chapter.target.metrics
    titles = [*([sentence(axis)] if axis else []), *(sentence(metric_name(name)) for name in metrics), "Splits"]
    rows = []
    for name, value, records in entries:
        where = [] if value is None else [Cell(f"{value:g}", value)]
        rows.append([Cell(sentence(name)), *where, *_spread_cells([metric_spread(records, each) for each in metrics])])
    return Table(caption, [Column("Variant", numeric=False), *map(Column, titles)], rows)


def _times(runs: Sequence[RunRecord]) -> list[Block]:
    names, values, rows = [], [], []
    for name, records in by_algorithm(runs).items():
        seconds = [value for value in map(seconds_per_epoch, records) if value is not None]
        if seconds:
            first, mean = records[0], float(np.mean(seconds))
            names.append(algorithm_name(name))
            values.append(mean)
            cells = [Cell(names[-1]), Cell(number(mean, 2), mean), count_cell(first.parameters)]
            rows.append([*cells, count_cell(first.peak_memory_mb), Cell(first.device)])
    if not names:
        return []
    panel = charts.bars("Seconds per epoch", names, values, "seconds per epoch", digits=2, foreground=["ManyDG"])
    numbers = map(Column, ("Seconds per epoch", "Parameters", "Peak memory (MB)"))
    columns = [*text_columns("Method"), *numbers, *text_columns("Device")]
    few = any(0 < len(record.history) <= 3 for record in runs)
    fewer = ", or all but the last where there are no more," if few else ""
    lead = Text(f"Seconds per epoch. The first three epochs{fewer} are left out, since they may be unsteady.")
    return [lead, Figure("Mean time of an epoch.", [panel]), Table("Time and size", columns, rows)]
