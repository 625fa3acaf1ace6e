"""A summary as text: CSV for machines, Markdown for pages, rich for the terminal."""

from __future__ import annotations

import csv
import io
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from manydg.evaluation.statistics import Interval
from manydg.files import csv_text, printable
from manydg.targets import oriented

if TYPE_CHECKING:
    from manydg.studies.summary import Entry, Summary


NONE = "–"
APART = ("before", "after")
METRIC_NAMES = {
    "accuracy": "Accuracy",
    "kappa": "Kappa",
    "f1_macro": "Macro F1",
    "auprc": "AUPRC",
    "auroc": "AUROC",
    "f1": "F1",
    "jaccard": "Jaccard",
    "auprc_samples": "AUPRC per sample",
    "f1_samples": "F1 per sample",
    "r2": "R²",
    "mae": "MAE",
    "rmse": "RMSE",
}
METRIC_NAMES |= {f"{key}_{when}": f"{name} {when} onset" for key, name in METRIC_NAMES.items() for when in APART}
_COLUMNS = (
    "experiment", "dataset", "synthetic", "row", "metric", "seeds", "mean", "sd", "low", "high", "rank", "worst_tenth",
    "worst_tenth_patients", "tested_patients", "reference", "reference_minus_row", "reference_minus_row_low",
    "reference_minus_row_high", "t_p", "t_p_holm", "wilcoxon_p", "wilcoxon_p_holm", "corrected_p", "corrected_p_holm",
    "cohens_d", "hedges_g", "seconds", "note",
)  # fmt: skip


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table; an en dash where there is none."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def p_text(value: float | None) -> str:
    """A p-value for a table.

    Examples
    --------
    >>> p_text(0.00001), p_text(0.0312), p_text(None)
    ('<0.001', '0.031', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def interval_text(interval: Interval | None, digits: int = 3) -> str:
    """Bounds in brackets, or an en dash."""
    if interval is None or math.isnan(interval.low):
        return NONE
    return f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _signed(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:+.3f}"


def mean_text(entry: Entry, digits: int = 4) -> str:
    """Mean and standard deviation over seeds."""
    if math.isnan(entry.mean):
        return NONE
    return number(entry.mean, digits) + ("" if math.isnan(entry.sd) else f" ± {number(entry.sd, digits)}")


def seeds_text(summary: Summary, row: str) -> str:
    """How many seeds stand behind a row, and of how many."""
    done = len(summary.entries[row, summary.primary].values)
    return str(done) if done == len(summary.seeds) else f"{done} of {len(summary.seeds)}"


def to_csv(summaries: Sequence[Summary]) -> str:
    """Every number of several summaries, one line for each row and metric; an undefined one is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for summary in summaries:
        for (row, metric), entry in summary.entries.items():
            head = [summary.experiment, summary.dataset, "yes" if summary.synthetic else "", row, metric]
            writer.writerow([*map(csv_text, head), *_csv_values(summary, entry)])
    return text.getvalue()


def _csv_values(summary: Summary, entry: Entry) -> list[str]:
    interval, gap, tests = entry.interval, entry.difference, entry.comparison
    adjusted = entry.adjusted or {}
    values: list[float | None] = [entry.mean, entry.sd, interval.low if interval else None]
    values += [interval.high if interval else None, entry.rank or None, entry.worst_tenth]
    values += [len(entry.by_patient), summary.tested_patients]
    compared: list[float | None] = [tests.difference if tests else None]
    compared += [gap.low if gap else None, gap.high if gap else None]
    for test in ("t", "wilcoxon", "corrected"):
        compared += [getattr(tests, f"{test}_p") if tests else None, adjusted.get(test)]
    compared += [tests.cohens_d if tests else None, tests.hedges_g if tests else None, summary.seconds.get(entry.row)]
    notes = [interval.note if interval else "", tests.note if tests else "", entry.worst_tenth_note]
    note = "; ".join(filter(None, notes))
    reference = csv_text(summary.reference or "") if tests else ""
    seeds = " ".join(str(seed) for seed in entry.values)
    return [seeds, *map(_plain, values), reference, *map(_plain, compared), csv_text(note)]


def _plain(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.10g}"


def to_markdown(summary: Summary) -> str:
    """The results, the tests against the reference, how to read them, and what is missing."""
    parts = [f"## {summary.title}", "", _cohort(summary), "", *_results(summary)]
    if advice := recommendation_text(summary):
        parts += ["", advice]
    if summary.reference and len(summary.rows) > 1:
        data = "; synthetic data" if summary.synthetic else ""
        title = f"Against {summary.reference} (difference = {summary.reference} minus row{data}):"
        parts += ["", title, "", *_tests(summary)]
    parts += ["", *_reading(summary)]
    if summary.notes:
        parts += ["", "Missing or worth knowing:", "", *(f"- {note}" for note in summary.notes)]
    return "\n".join(parts) + "\n"


def recommendation_text(summary: Summary) -> str:
    """Which row to use and why, in a sentence or two; empty where there is nothing to choose from."""
    choice, metric = summary.recommendation, METRIC_NAMES.get(summary.primary, summary.primary)
    if choice is None:
        return ""
    entry = summary.entries[choice.row, summary.primary]
    best = f"the best mean validation {metric}, {number(choice.validation[choice.best])}"
    if choice.row == choice.best:
        why = f"it has {best}"
    else:
        gap, error = number(choice.gap(choice.row)), number(choice.errors[choice.row])
        why = f"{choice.best} has {best}; this is within one standard error ({gap} of {error}) and costs less"
    seeds = len(summary.seeds)
    if choice.splits < seeds:
        why += f", over the {choice.splits} of {seeds} splits that all models have"
    elif seeds == 1:
        why += ", and only one split was run"
    bounds = interval_text(entry.interval)
    expected = number(entry.mean) + ("" if bounds == NONE else f" {bounds}")
    return f"Recommended: {choice.row} ({why}). {metric} on test patients, who had no part in the choice: {expected}."


def _cohort(summary: Summary) -> str:
    sides = ", ".join(
        f"{number:,} {verb}"
        for number, verb in (
            (summary.patients.train, "train"),
            (summary.patients.val, "validate"),
            (summary.patients.test, "are unseen until the test"),
        )
        if number
    )
    seeds = len(summary.seeds)
    splits = f"{seeds} split{'s' if seeds > 1 else ''} by {summary.split}"
    return f"{splits}; of the patients of a split {sides}." if sides else f"{splits}."


def _results(summary: Summary) -> Iterable[str]:
    names = [METRIC_NAMES.get(metric, metric) for metric in summary.metrics]
    name = METRIC_NAMES.get(summary.patient_metric, summary.patient_metric)
    tenth = f"{name}, {_worst_percentile(summary)}th percentile of {_patients_of_tenth(summary)} patients"
    yield markdown_row(["", "Seeds", *names, tenth, "Seconds a run"])
    yield markdown_row(["---", "---:", *("---" for _ in names), "---:", "---:"])
    for row in summary.rows:
        cells = [_markdown_cell(summary.entries[row, metric]) for metric in summary.metrics]
        worst = number(summary.entries[row, summary.patient_metric].worst_tenth)
        yield markdown_row([row, seeds_text(summary, row), *cells, worst, number(summary.seconds.get(row), 1)])


def _worst_percentile(summary: Summary) -> int:
    """The percentile that the worst tenth of the patients begins at: high of an error, else low."""
    return 10 if oriented(summary.patient_metric, 1.0) > 0 else 90


def _patients_of_tenth(summary: Summary) -> str:
    """How many of the tested patients the 10th percentile rests on."""
    most = max(len(summary.entries[row, summary.patient_metric].by_patient) for row in summary.rows)
    return str(most) if most == summary.tested_patients else f"{most} of {summary.tested_patients}"


def _markdown_cell(entry: Entry) -> str:
    marks = {1: ("**", "**"), 2: ("<u>", "</u>")}.get(entry.rank, ("", ""))
    bounds = interval_text(entry.interval)
    return f"{marks[0]}{mean_text(entry)}{marks[1]}" + ("" if bounds == NONE else f"<br>{bounds}")


def _tests(summary: Summary) -> Iterable[str]:
    yield markdown_row(
        ["Metric", "", "Difference", "95% over patients", "p (t)", "p (Wilcoxon)", "p (corrected t)", "Hedges g"]
    )
    yield markdown_row(["---", "---", "---:", "---", "---:", "---:", "---:", "---:"])
    for metric in summary.metrics:
        for row in summary.rows:
            entry = summary.entries[row, metric]
            if entry.comparison is None or entry.adjusted is None:
                continue
            tests = [
                f"{p_text(getattr(entry.comparison, f'{name}_p'))} ({p_text(entry.adjusted[name])})"
                for name in ("t", "wilcoxon", "corrected")
            ]
            gap = [number(entry.comparison.difference), interval_text(entry.difference, 4)]
            yield markdown_row(
                [METRIC_NAMES.get(metric, metric), row, *gap, *tests, number(entry.comparison.hedges_g, 2)]
            )


def _reading(summary: Summary) -> Iterable[str]:
    yield "Mean ± standard deviation over seeds on unseen patients; **best**, <u>second</u>."
    yield "Brackets: 95% interval of that mean over patients (BCa bootstrap that resamples patients, not samples)."
    yield f"{_worst_percentile(summary)}th percentile: over the patients for whom the metric exists with every row, "
    yield "each counted once."
    yield "Seconds: median over the runs of a row, without the program's imports and first calls."
    if summary.synthetic:
        yield "The patients are synthetic (made up): the figures say nothing about real ones, and the paper's, which"
        yield "are of real patients, are not put beside them."
    if summary.reference and len(summary.rows) > 1:
        yield "All p-values are two-sided and paired over seeds; in parentheses after Holm's correction for the number"
        yield "of rows compared at the metric. Splits share patients, which makes the plain t-test optimistic; the"
        yield "corrected t-test (Nadeau and Bengio) allows for it."
        if 2 <= len(summary.seeds) <= 5:
            yield f"With {len(summary.seeds)} seeds the Wilcoxon p cannot fall below {2 / 2 ** len(summary.seeds):g}."
    yield from summary.rules


def markdown_row(cells: Iterable[str]) -> str:
    """Cells as a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# A summary for a paper: tables for LaTeX with the package booktabs.

_TEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--",
    "−": "$-$", "<": "$<$", ">": "$>$",
}  # fmt: skip


def to_latex(summary: Summary) -> str:
    """The results, the tests against the reference and every pair of rows, as LaTeX tables for booktabs."""
    parts = [_latex_results(summary)]
    if summary.reference and len(summary.rows) > 1:
        parts.append(_latex_tests(summary))
    if len(summary.rows) > 2:
        parts.append(_latex_pairs(summary))
    return "\n".join(parts)


def tex(text: str) -> str:
    """Text as LaTeX prints it.

    Examples
    --------
    >>> print(tex("f1_macro ± 5%"))
    f1\\_macro $\\pm$ 5\\%
    """
    return "".join(_TEX.get(character, character) for character in text)


def _latex_table(caption: str, label: str, columns: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{tex(caption)}}}", rf"\label{{tab:{label}}}"]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(map(tex, head)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex_results(summary: Summary) -> str:
    rows = []
    for row in summary.rows:
        cells = [_latex_cell(summary.entries[row, metric]) for metric in summary.metrics]
        rows.append([tex(row), *cells])
    names = [METRIC_NAMES.get(metric, metric) for metric in summary.metrics]
    over = (
        f"mean ± standard deviation over {len(summary.seeds)} patient splits" if len(summary.seeds) > 1 else "one split"
    )
    caption = f"{summary.title}: unseen patients, {over}; in brackets 95% intervals over patients. Bold: best mean."
    return _latex_table(caption, _label(summary, "results"), "l" + "c" * len(names), ["", *names], rows)


def _latex_cell(entry: Entry) -> str:
    text, bounds = tex(mean_text(entry, 3)), interval_text(entry.interval)
    shown = rf"\textbf{{{text}}}" if entry.rank == 1 else text
    return shown if bounds == NONE else f"{shown} {tex(bounds)}"


def _latex_tests(summary: Summary) -> str:
    rows = []
    for row in summary.rows:
        entry = summary.entries[row, summary.primary]
        if entry.comparison is not None and entry.adjusted is not None:
            tests = [p_text(entry.adjusted[name]) for name in ("corrected", "t", "wilcoxon")]
            gap = f"{_signed(entry.comparison.difference)} {interval_text(entry.difference)}"
            rows.append([tex(cell) for cell in (row, gap, *tests, number(entry.comparison.hedges_g, 2))])
    primary = METRIC_NAMES.get(summary.primary, summary.primary)
    caption = (
        f"{summary.reference} minus each row, {primary}: difference with 95% interval over patients; Holm-corrected p "
        "of the corrected resampled t-test (Nadeau and Bengio), the paired t-test and Wilcoxon's test over splits."
    )
    head = ("", "Difference", "p corrected t", "p t", "p Wilcoxon", "Hedges g")
    return _latex_table(caption, _label(summary, "tests"), "lccccc", head, rows)


def _latex_pairs(summary: Summary) -> str:
    known = {}
    for pair in summary.pairs:
        p, gap = pair.adjusted["corrected"], pair.comparison.difference
        known[pair.first, pair.second] = f"{_signed(gap)} ({p_text(p)})"
        known[pair.second, pair.first] = f"{_signed(-gap)} ({p_text(p)})"
    rows = [[tex(row), *(tex(known.get((row, other), "")) for other in summary.rows)] for row in summary.rows]
    caption = (
        f"Row minus column, {METRIC_NAMES.get(summary.primary, summary.primary)}; in brackets p of the corrected "
        "resampled t-test over splits, Holm-corrected for all pairs."
    )
    columns = "l" + "c" * len(summary.rows)
    return _latex_table(caption, _label(summary, "pairs"), columns, ["", *summary.rows], rows)


def _label(summary: Summary, what: str) -> str:
    """A label that LaTeX takes: letters, digits and hyphens."""
    text = f"{summary.experiment}-{summary.dataset}-{what}".lower()
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)


# A summary for the terminal: what matters always, the rest as far as the width goes.


@dataclass(frozen=True)
class _Column:
    header: str
    cells: list[Text]
    justify: str = "right"

    @property
    def width(self) -> int:
        lines = [*self.header.splitlines(), *(line for cell in self.cells for line in cell.plain.splitlines())]
        return max(map(len, lines), default=0) + 2


def to_rich(summary: Summary, width: int | None = None) -> Table:
    """The results for a terminal; tests of the primary metric only, the rest is in the files.

    - ``width``: Characters to fill; the terminal's by default. Columns of lesser weight are left out where it is too
      small.
    """
    available = width or shutil.get_terminal_size((100, 24)).columns
    columns = list(_needed(summary))
    for extra in _extras(summary):
        if sum(column.width for column in [*columns, extra]) + 2 <= available:
            columns.append(extra)
    table = Table(
        title=Text(printable(_title(summary)), style="table.title"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index, column in enumerate(columns):
        # Names of rows are never cut: where it is too narrow, numbers go over two lines.
        justify: Literal["left", "right"] = "left" if column.justify == "left" else "right"
        table.add_column(Text(column.header), justify=justify, no_wrap=index == 0)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    if summary.notes:
        table.caption = Text("\n".join(map(printable, summary.notes)), style="table.caption")
    return table


def _title(summary: Summary) -> str:
    seeds = len(summary.seeds)
    over = f"mean ± sd over {seeds} seeds" if seeds > 1 else "one seed"
    return f"{summary.title}: unseen patients, {over} [95% over patients]"


def _needed(summary: Summary) -> Iterator[_Column]:
    yield _Column("", [Text(printable(row)) for row in summary.rows], "left")
    # Before and after the onset of an event, the first metric is enough for a screen; the files have all.
    others = {f"{metric}_{when}" for metric in summary.metrics for when in APART if metric != summary.primary}
    for metric in summary.metrics:
        if metric not in others:
            cells = [_metric_cell(summary.entries[row, metric]) for row in summary.rows]
            yield _Column(METRIC_NAMES.get(metric, metric).replace(" ", "\n", 1), cells, "left")
    if any(len(summary.entries[row, summary.primary].values) < len(summary.seeds) for row in summary.rows):
        yield _Column("seeds", [Text(seeds_text(summary, row)) for row in summary.rows])
    if summary.reference and len(summary.rows) > 1:
        primary = METRIC_NAMES.get(summary.primary, summary.primary)
        header = f"p vs {printable(summary.reference)}\n{primary}, Holm\nt, corrected"
        yield _Column(header, [_test_cell(summary.entries[row, summary.primary]) for row in summary.rows])


def _extras(summary: Summary) -> Iterator[_Column]:
    entries = [summary.entries[row, summary.primary] for row in summary.rows]
    name = "" if summary.patient_metric == summary.primary else f"{METRIC_NAMES[summary.patient_metric]}, "
    tenth = f"{name}{_worst_percentile(summary)}th pct. of\n{_patients_of_tenth(summary)}\npatients"
    worst = [summary.entries[row, summary.patient_metric].worst_tenth for row in summary.rows]
    yield _Column(tenth, [Text(number(value, 3)) for value in worst])
    if summary.reference and len(summary.rows) > 1:
        gaps = [_signed(entry.comparison.difference) if entry.comparison else NONE for entry in entries]
        yield _Column(f"{printable(summary.reference)}\nminus row", [Text(gap) for gap in gaps])
        sizes = [number(entry.comparison.hedges_g, 2) if entry.comparison else NONE for entry in entries]
        yield _Column("Hedges\ng", [Text(size) for size in sizes])
    yield _Column("s/run", [Text(number(summary.seconds.get(row), 1)) for row in summary.rows])


def _metric_cell(entry: Entry) -> Text:
    cell = Text(mean_text(entry, 3), style={1: "bold", 2: "underline"}.get(entry.rank, ""))
    bounds = interval_text(entry.interval)
    return cell if bounds == NONE else Text("\n").join([cell, Text(bounds, style="dim")])


def _test_cell(entry: Entry) -> Text:
    adjusted = entry.adjusted or {}
    if entry.comparison is None:
        return Text(NONE)
    return Text(f"{p_text(adjusted.get('t'))}\n{p_text(adjusted.get('corrected'))}")
