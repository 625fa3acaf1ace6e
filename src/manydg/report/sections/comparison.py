"""The main comparison: its tables and tests, and what they say in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from manydg.algorithms import controls
from manydg.evaluation.statistics import ALPHA, Interval, compare_ranks
from manydg.report import charts
from manydg.report.results_folder import (
    Chapter,
    Comparison,
    RivalTest,
    by_algorithm,
    defined_metric,
    patient_values,
)
from manydg.report.sections import Block, Cell, Column, Figure, Part, Section, Table, Text
from manydg.report.words import (
    algorithm_name,
    interval,
    listed,
    metric_name,
    noted,
    number,
    plural,
    probability,
    sentence,
    signed,
    worst_values,
)
from manydg.studies.summary import Entry
from manydg.targets import oriented

_READING = {"unsure": "not certain", "none": "no clear difference", "untested": "not tested"}


class MainComparison(Section):
    """Table of all methods, their forest plot, and the tests; and the chapter's first sentence."""

    order = 200
    experiments = expected = ("compare",)

    def build(self, chapter: Chapter) -> Iterator[Part]:
        comparison = chapter.comparison
        if comparison is None:
            return
        blocks: list[Block] = [_table(chapter, comparison), _forest(chapter, comparison)]
        if comparison.tests(chapter.metric):
            blocks.append(Text(_tests_in_words(chapter, comparison)))
            blocks += [_tests(comparison, metric) for metric in chapter.metrics]
            blocks.append(Text(_caution(comparison), "note"))
        if len(comparison.rows) > 2:
            blocks.append(_matrix(comparison))
            blocks += _ranks(chapter)
        yield Part("compare", "Main results", blocks, chapter.command("compare"))

    def headline(self, chapter: Chapter) -> str:
        return "" if chapter.comparison is None else _headline(chapter, chapter.comparison)

    def findings(self, chapter: Chapter) -> list[str]:
        if (comparison := chapter.comparison) is None:
            return []
        # Without Base beside it, it says no more than the table.
        first = _headline(chapter, comparison) if comparison.test(chapter.metric, "base") else ""
        points = (first, _best(chapter, comparison), _controls(chapter, comparison), _worst_tenth(chapter, comparison))
        return [point for point in points if point]


def _table(chapter: Chapter, comparison: Comparison) -> Table:
    metrics = chapter.target.metrics
    columns = [Column("Method", numeric=False), *(Column(sentence(metric_name(name))) for name in metrics)]
    within = chapter.patient_metric
    percentile = 10 if oriented(within, 1.0) > 0 else 90
    tenths = {row: comparison.entry(row, within).worst_tenth for row in comparison.rows}
    with_tenths = any(map(math.isfinite, tenths.values()))
    columns += [Column(f"{percentile}th percentile of patients, {metric_name(within)}")] if with_tenths else []
    rows = []
    for row, tenth in tenths.items():
        cells = []
        for entry in (comparison.entry(row, metric) for metric in metrics):
            text = number(entry.mean) + (f" ± {number(entry.sd)}" if math.isfinite(entry.sd) else "")
            rank = {1: "best", 2: "second"}.get(entry.rank, "")
            cells.append(Cell(text, entry.mean, bounds_text(entry.interval), rank))
        rows.append([Cell(algorithm_name(row)), *cells, *([Cell(number(tenth), tenth)] if with_tenths else [])])
    splits = len(comparison.summary.seeds)
    note = (
        f"Mean ± standard deviation over {plural(splits, 'split')} of the patients; below it the 95% interval, from "
        "drawing patients (not samples) again and again. Bold: best mean; underlined: second best. Neither says that a "
        "difference is more than chance: see the tests below."
    )
    if with_tenths:
        known = max(len(comparison.entry(row, within).by_patient) for row in comparison.rows)
        tested = comparison.summary.tested_patients
        people = f"the {known} of {tested} test patients" if known < tested else f"all {plural(tested, 'test patient')}"
        shown = f"over {people} for whom {metric_name(within)} exists with every method"
        note += f" The {percentile}th percentile is {shown}."
    # The text of an error is left out: it may hold anything.
    notes = [noted(text) for text in comparison.summary.notes if " failed: " not in text]
    return Table("Performance on patients never seen in training", columns, rows, " ".join([note, *notes]))


def bounds_text(bounds: Interval | None) -> str:
    """The bounds of an interval; empty where there are none."""
    return interval(bounds.low, bounds.high) if bounds else ""


def _forest(chapter: Chapter, comparison: Comparison) -> Figure:
    panels = []
    for metric in chapter.metrics[:2]:
        entries = [comparison.entry(row, metric) for row in comparison.rows]
        names = [algorithm_name(row) for row in comparison.rows]
        around = [entry.interval or Interval(math.nan, math.nan, math.nan) for entry in entries]
        means, low, high = [e.mean for e in entries], [each.low for each in around], [each.high for each in around]
        panels.append(charts.forest(sentence(metric_name(metric)), names, means, low, high, metric_name(metric)))
    return Figure("Means over the splits with 95% intervals over patients.", panels)


def _tests_in_words(chapter: Chapter, comparison: Comparison) -> str:
    metric, name = metric_name(chapter.metric), algorithm_name(comparison.first)
    tests = comparison.tests(chapter.metric)
    groups = {
        "better": [test for test in tests if test.verdict == "clear" and test.gain > 0],
        "worse": [test for test in tests if test.verdict == "clear" and test.gain < 0],
        "unsure": [test for test in tests if test.verdict == "unsure"],
        "none": [test for test in tests if test.verdict == "none"],
        "untested": [test for test in tests if test.verdict == "untested"],
    }
    words = {
        "better": f"In {metric}, {name} is clearly better than {{}}",
        "worse": f"in {metric}, {name} is clearly worse than {{}}",
        "unsure": "the evidence is mixed against {}",
        "none": "no clear difference could be shown to {}",
        "untested": "it was not tested against {}",
    }
    rivals = {key: listed([algorithm_name(test.rival) for test in group]) for key, group in groups.items() if group}
    return sentence("; ".join(words[key].format(names) for key, names in rivals.items())) + "."


def _tests(comparison: Comparison, metric: str) -> Table:
    name = algorithm_name(comparison.first)
    numbers = ("Difference", "t-test p", "Corrected t p", "Wilcoxon p", "Effect size")
    columns = [Column(f"{name} against", numeric=False), *map(Column, numbers), Column("Reading", numeric=False)]
    rows = []
    for test in comparison.tests(metric):
        rows.append([
            Cell(algorithm_name(test.rival)),
            Cell(signed(test.difference), test.difference, bounds_text(test.interval)),
            Cell(probability(test.t_p), test.t_p),
            Cell(probability(test.corrected_p), test.corrected_p),
            Cell(probability(test.wilcoxon_p), test.wilcoxon_p),
            Cell(number(test.effect, 2), test.effect),
            Cell(reading(test), whole=True),
        ])  # fmt: skip
    return Table(f"{name} minus each rival: {metric_name(metric)}", columns, rows)


def reading(test: RivalTest) -> str:
    """What a test allows one to say."""
    if test.verdict != "clear":
        return _READING[test.verdict]
    return "clearly better" if test.gain > 0 else "clearly worse"


def _caution(comparison: Comparison) -> str:
    seeds = max(test.splits for test in comparison.tests(comparison.summary.primary))
    text = (
        "Difference: mean over the splits, and the 95% interval over patients. All p-values are two-sided, paired over "
        f"{plural(seeds, 'split')}, and adjusted (Holm) for the number of rivals. Splits share patients, which makes "
        "the plain t-test too ready to see a difference; the corrected one (Nadeau and Bengio) allows for that. Effect "
        "size: Hedges’ g. “Clearly” is said only where the corrected t-test is below 0.05 and the interval excludes "
        "zero; where only one of them holds it reads “not certain”. “No clear difference” does not mean that there is "
        "none."
    )
    if 2 <= seeds <= 5:
        least = number(2 * 0.5**seeds, 4)
        text += f" With {plural(seeds, 'split')} the Wilcoxon p cannot fall below {least}, even before correction."
    return text


def _matrix(comparison: Comparison) -> Table:
    """Every model against every other at the primary metric: difference and p, corrected over all pairs."""
    rows = []
    for first in comparison.rows:
        tests = [None if first == second else comparison.pair(first, second) for second in comparison.rows]
        rows.append([Cell(algorithm_name(first), whole=True), *map(_pair_cell, tests)])
    columns = [Column("Row minus column", numeric=False), *(Column(algorithm_name(row)) for row in comparison.rows)]
    pairs = len(comparison.summary.pairs)
    note = (
        f"Mean difference over the splits, and below it the p of the corrected t-test (Nadeau and Bengio), adjusted "
        f"(Holm) for all {pairs} pairs: stricter than the tests above, which count the reference’s rivals alone. An "
        "asterisk marks p below 0.05."
    )
    return Table(f"Every pair of models: {metric_name(comparison.summary.primary)}", columns, rows, note)


def _pair_cell(test: RivalTest | None) -> Cell:
    if test is None:
        return Cell("")
    return Cell(signed(test.difference), test.difference, f"p {probability(test.p)}{' *' if test.p < ALPHA else ''}")


def _ranks(chapter: Chapter) -> list[Block]:
    """The critical-difference diagram, over patients or, where no metric exists within them, over splits."""
    groups = by_algorithm(chapter.runs("compare"))
    metric = defined_metric(groups, [chapter.patient_metric, *chapter.metrics])
    if metric is not None:
        values = {name: list(each.values()) for name, each in patient_values(groups, metric).items()}
        blocks, unit = plural(len(next(iter(values.values()))), "test patient"), "patient"
    else:
        metric, comparison = chapter.metric, chapter.comparison
        entries = {} if comparison is None else {row: comparison.entry(row, metric).values for row in comparison.rows}
        shared = sorted(set.intersection(*map(set, entries.values()))) if entries else []
        values = {row: [each[seed] for seed in shared] for row, each in entries.items()}
        values = {row: each for row, each in values.items() if not any(map(math.isnan, each))}
        blocks, unit = plural(len(shared), "split"), "split"
    ranks = compare_ranks({name: [oriented(metric, value) for value in each] for name, each in values.items()})
    if ranks is None or len(ranks.names) < 3:
        return []
    names = [algorithm_name(name) for name in ranks.names]
    joined = [(ranks.names.index(group[0]), ranks.names.index(group[-1])) for group in ranks.groups]
    panel = charts.rank_diagram(f"Mean rank by {metric_name(metric)}, over {blocks}", names, ranks.ranks, joined)
    note = (
        f"Within each {unit} the models are ranked by {metric_name(metric)}, 1 being best. Vertical bars join models "
        f"between which no difference could be shown: Wilcoxon’s signed-rank test over {unit}s, adjusted (Holm) for "
        f"all pairs, p of 0.05 or more. That all models are alike has p {_p_text(ranks.friedman_p)} (Friedman’s test)."
    )
    return [Figure("Critical-difference diagram.", [panel], note)]


def _p_text(p: float) -> str:
    return f"= {number(p)}" if p >= 0.001 else "< 0.001"


def _headline(chapter: Chapter, comparison: Comparison) -> str:
    metric, name = chapter.metric, comparison.first
    value = value_text(comparison.entry(name, metric))
    people = "synthetic patients" if chapter.synthetic else "patients"
    text = f"On {people} it has never seen, {algorithm_name(name)} reached {metric_name(metric)} {value}"
    test = comparison.test(metric, "base")
    if test is None:
        return f"{text}."
    plain = f"the plain model ({algorithm_name('base')}) {value_text(comparison.entry('base', metric))}"
    return f"{text}; {plain}. {difference_in_words(test)}"


def value_text(entry: Entry) -> str:
    """A mean with its interval."""
    around = bounds_text(entry.interval)
    return number(entry.mean) + (f" (95% interval {around})" if around else "")


def difference_in_words(test: RivalTest) -> str:
    """A difference and how sure one can be of it."""
    around = bounds_text(test.interval)
    facts = f"The difference, {signed(test.difference)}" + (f" (95% interval {around})" if around else "")
    p = f"p {_p_text(test.p)}"
    if test.verdict == "untested":
        return f"{facts}, could not be tested: {test.note or 'too few splits'}."
    if test.verdict == "clear":
        return f"{facts}, is larger than chance would explain ({p} after correction)."
    if test.verdict == "unsure":
        return f"{facts}, may or may not be more than chance: test and interval disagree ({p} after correction)."
    return f"{facts}, is too small to tell from chance ({p} after correction)."


def _best(chapter: Chapter, comparison: Comparison) -> str:
    metric = chapter.metric
    # A mean of fewer splits is of other patients.
    most = max(comparison.entry(row, metric).splits for row in comparison.rows)
    known = [row for row in comparison.rows if most and comparison.entry(row, metric).splits == most]
    if len(known) < 2:
        return ""
    best = max(known, key=lambda row: oriented(metric, comparison.entry(row, metric).mean))
    name, label = algorithm_name(best), metric_name(metric)
    most_or_least = "highest" if oriented(metric, 1.0) > 0 else "lowest"
    test = comparison.test(metric, best)
    if test is None:
        return f"{name} had the {most_or_least} mean {label} of {plural(len(known), 'method')}."
    gap = f"{algorithm_name(comparison.first)} minus {name}: {signed(test.difference)}, {reading(test)}"
    return f"the {most_or_least} mean {label} was that of {name}, {value_text(comparison.entry(best, metric))} ({gap})."


def _controls(chapter: Chapter, comparison: Comparison) -> str:
    """Where a gain comes from: the two controls that lack the method's central idea."""
    if comparison.first != "manydg":
        return ""
    tests = [test for name in controls() if (test := comparison.test(chapter.metric, name))]
    if not tests:
        return ""
    parts = [f"{algorithm_name(test.rival)} ({signed(test.difference)}, {reading(test)})" for test in tests]
    return f"ManyDG against the controls that lack its central idea: {listed(parts)}."


def _worst_tenth(chapter: Chapter, comparison: Comparison) -> str:
    within = chapter.patient_metric
    entry = comparison.entry(comparison.first, within)
    if not math.isfinite(entry.worst_tenth):
        return ""
    return f"with {algorithm_name(comparison.first)}, {worst_values(list(entry.by_patient.values()), within)}."
