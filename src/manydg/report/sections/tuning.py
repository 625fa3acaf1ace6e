"""How the settings were searched: the budget, what was gained on validation patients, and what was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from manydg.report import charts
from manydg.report.charts import Series
from manydg.report.results_folder import FIRST, Chapter, spread
from manydg.report.sections import Block, Cell, Column, Figure, Part, Section, Table, Text, count_cell, text_columns
from manydg.report.words import algorithm_name, metric_name, number, plural, signed
from manydg.studies.tuning import FAILED, PRUNED, Search, Tuning, Value, values_of

Searches = dict[str, list[Search]]
"""The searches of each algorithm, one per split."""


class SearchedSettings(Section):
    """The searches whose choices the comparison uses."""

    order = 350

    def build(self, chapter: Chapter) -> Iterator[Part]:
        tuning = chapter.tuning
        searches = {} if tuning is None else _by_algorithm(tuning, chapter)
        if tuning is None or not searches:
            return
        label = f"validation {metric_name(chapter.metric)}"
        blocks: list[Block] = [
            Text(
                f"{tuning.budget(searches)} Test patients had no part in it: a split’s settings come from its own "
                "training and validation patients, and its test patients were scored once, with what was chosen."
            ),
            _curves(searches, label),
            _gains(searches, label),
            _choices(searches),
        ]
        yield Part("tuning", "How the settings were chosen", blocks, tuning.command)


def _by_algorithm(tuning: Tuning, chapter: Chapter) -> Searches:
    """The searches of the algorithms that were compared, those that the page shows first in front."""
    compared = {(record.algorithm, record.seed) for record in chapter.runs("compare")}
    groups: Searches = {}
    for search in tuning.searches:
        if (search.algorithm, search.seed) in compared:
            groups.setdefault(search.algorithm, []).append(search)
    return {name: groups[name] for name in dict.fromkeys([*FIRST, *groups]) if name in groups}


def _curves(searches: Searches, label: str) -> Figure:
    """The best score so far against trials, the mean over splits."""
    series = []
    for name, group in searches.items():
        spreads = [spread(values) for values in zip(*(search.best_so_far() for search in group), strict=False)]
        x = np.arange(1, len(spreads) + 1, dtype=float)
        mean, low, high = (np.array([getattr(each, part) for each in spreads]) for part in ("mean", "low", "high"))
        series.append(Series(algorithm_name(name), x, mean, low, high))
    title = f"Best {label} so far"
    note = (
        "Lines are means over the splits, bands one standard deviation. The first trial has the defaults. A line that "
        "still rises at the end says that more trials might help that method more than others."
    )
    return Figure(f"{title}, by the number of trials.", charts.line_panels(title, series, "trials", label), note)


def _gains(searches: Searches, label: str) -> Table:
    titles = ("Trials", "Stopped early", "Failed", "Epochs", f"Defaults, {label}", f"Chosen, {label}", "Gain")
    columns = [Column("Method", numeric=False), *map(Column, titles)]
    rows = []
    for name, group in searches.items():
        before = spread(search.trials[0].score if search.trials else None for search in group).mean
        after = spread(search.chosen.score if search.chosen else None for search in group).mean
        totals = (
            sum(len(search.trials) for search in group),
            *(sum(search.count(state) for search in group) for state in (PRUNED, FAILED)),
            sum(trial.epochs for search in group for trial in search.trials),
        )
        cells = list(map(count_cell, totals))
        cells += [Cell(number(value), value) for value in (before, after)]
        rows.append([Cell(algorithm_name(name)), *cells, Cell(signed(after - before), after - before)])
    note = (
        "Sums and means over the splits. Gains are on the patients that chose the settings, so they are larger than "
        "what carries over to others: the main results say what does."
    )
    return Table("What the search cost and gained", columns, rows, note)


def _choices(searches: Searches) -> Table:
    columns = text_columns("Method", "Setting", "Searched from", "Default", "Chosen")
    rows = []
    for name, group in searches.items():
        first = group[0]
        defaults = values_of(first.base, first.space)
        for setting, drawn in first.space.items():
            chosen = [search.chosen.values.get(setting) for search in group if search.chosen]
            cells = [Cell(setting.removeprefix(f"{name}.")), Cell(str(drawn)), Cell(_shown(defaults[setting]))]
            joined = "; ".join(_shown(value) for value in chosen if value is not None)
            rows.append([Cell(algorithm_name(name)), *cells, Cell(joined)])
    splits = plural(max(map(len, searches.values())), "split")
    return Table("What was searched and chosen", columns, rows, f"Chosen: one value for each of {splits}, in order.")


def _shown(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) and math.isfinite(value) else str(value)
