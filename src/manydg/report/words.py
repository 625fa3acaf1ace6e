"""Names, numbers and sentences as a clinician would want to read them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from manydg.algorithms import ALGORITHMS
from manydg.studies.summary_text import METRIC_NAMES
from manydg.targets import oriented

MINUS = "\N{MINUS SIGN}"

METRICS = {
    **METRIC_NAMES,
    # Within a sentence.
    "accuracy": "accuracy", "kappa": "kappa", "f1_macro": "macro F1", "mae": "mean absolute error",
    "rmse": "root mean squared error",
}  # fmt: skip
MEANING = {
    "accuracy": "The share of samples given the right class.",
    "kappa": "Agreement with the reference beyond what chance alone would give; 0 is chance, 1 is perfect.",
    "f1_macro": "Balance of missed and false findings, averaged over classes, rare ones counting as much.",
    "auprc": "Average precision over all thresholds; chance gives the share of positive samples, 1 is perfect.",
    "auroc": "How often a positive sample is ranked above a negative one; 0.5 is chance, 1 is perfect.",
    "f1": "Balance of missed and false alarms at the threshold that was chosen on validation patients.",
    "jaccard": "Of all labels predicted or true for a sample, the share that are both; the mean over samples.",
    "auprc_samples": "Average precision of a sample’s ranked labels; then the mean over samples.",
    "f1_samples": "Balance of missed and false labels of a sample; then the mean over samples.",
    "r2": "Share of the variance of the true values that the predictions explain: 1 is perfect, 0 is as good as always "
    "predicting the mean, and worse than that is negative.",
    "mae": "How far predictions are off on average, in the unit of the value; lower is better.",
    "rmse": "The same with large errors weighing more (root of the mean squared error); lower is better.",
}
LOSSES = {
    "supervised": "supervised",
    "mmd": "discrepancy (MMD)",
    "reconstruction": "reconstruction",
    "similarity": "similarity of z",
}


def algorithm_name(name: str) -> str:
    """The name to show for an algorithm; what follows a comma says more of it and stays as it is.

    Examples
    --------
    >>> algorithm_name("manydg, offline context"), algorithm_name("my-idea")
    ('ManyDG, offline context', 'My idea')
    """
    algorithm, comma, more = name.partition(", ")
    return (_title(algorithm) or sentence(algorithm.replace("-", " ").replace("_", " "))) + comma + more


def algorithm_summary(name: str) -> str:
    """What an algorithm does, in one line; empty for one that does not say or is not installed."""
    return ALGORITHMS.get(name).summary if name in ALGORITHMS.names() else ""


def row_title(row: str) -> str:
    """The name to show for a row of a comparison: the algorithm, and what varies.

    Examples
    --------
    >>> row_title("base (no context)"), row_title("base")
    ('Base, no context', 'Base')
    """
    algorithm, bracket, more = row.partition(" (")
    return algorithm_name(f"{algorithm}, {more.removesuffix(')')}" if bracket else algorithm)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    Examples
    --------
    >>> duration(0.42), duration(75.2), duration(1500), duration(9000), duration(float("nan"))
    ('0.4 s', '75 s', '25 min', '2.5 h', '–')
    """
    if not math.isfinite(seconds):
        return "\N{EN DASH}"
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def algorithm_or_text(text: str) -> str:
    """The name to show for an algorithm, and any other text as it is."""
    return _title(text) or text


@cache
def _title(algorithm: str) -> str:
    """An algorithm's own title; empty for one that has none or is not installed."""
    return ALGORITHMS.get(algorithm).title if algorithm in ALGORITHMS.names() else ""


def metric_name(name: str) -> str:
    """The name to show for a metric."""
    return METRICS.get(name) or name.replace("_", " ")


def number(value: float | None, digits: int = 3) -> str:
    """A number in fixed digits, with a true minus sign; an en dash where it is undefined.

    Examples
    --------
    >>> number(-0.1234), number(None), number(-0.0001)
    ('−0.123', '–', '0.000')
    """
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign.

    Examples
    --------
    >>> signed(0.01), signed(-0.01), signed(0.0)
    ('+0.010', '−0.010', '0.000')
    """
    text = number(value, digits)
    return f"+{text}" if value is not None and math.isfinite(value) and float(f"{value:.{digits}f}") > 0 else text


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    """An interval in words, empty where it is undefined.

    Examples
    --------
    >>> interval(0.7, 0.8)
    '0.700 to 0.800'
    """
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"{number(low, digits)} to {number(high, digits)}"


def probability(value: float | None) -> str:
    """A p-value, never rounded to nought.

    Examples
    --------
    >>> probability(0.0002), probability(0.0421), probability(None)
    ('< 0.001', '0.042', '–')
    """
    if value is not None and math.isfinite(value) and value < 0.001:
        return "< 0.001"
    return number(value)


def count(value: float | None) -> str:
    """A whole number with separators between thousands.

    Examples
    --------
    >>> count(415089)
    '415,089'
    """
    return "\N{EN DASH}" if value is None else f"{value:,.0f}"


def listed(items: Sequence[str], last: str = "and") -> str:
    """Items as a phrase.

    Examples
    --------
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def plural(amount: int, one: str) -> str:
    """An amount with its noun.

    Examples
    --------
    >>> plural(1, "patient"), plural(2, "patient")
    ('1 patient', '2 patients')
    """
    return f"{count(amount)} {one if amount == 1 else one + 's'}"


def sentence(text: str) -> str:
    """Text with a capital first letter."""
    return text[:1].upper() + text[1:]


def noted(text: str) -> str:
    """A note of the records as a sentence, with the metrics' names as the page has them.

    Examples
    --------
    >>> noted("auprc is undefined within 3 of 9 patients")
    'AUPRC is undefined within 3 of 9 patients.'
    """
    return sentence(re.sub(r"\b\w+\b", lambda word: METRICS.get(word[0], word[0]), text)) + "."


def worst_values(values: Sequence[float], metric: str) -> str:
    """How the worst-off patients do: those with the lowest values of a metric, or with the highest of an error.

    Examples
    --------
    >>> worst_values([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], "mae")
    '9 of 10 patients have mean absolute error of 9.100 or less; the highest has 10.000'
    >>> worst_values([0.2, 0.5], "kappa")
    'the lowest kappa of 2 patients is 0.200'
    """
    label = metric_name(metric)
    if oriented(metric, 1.0) > 0:
        return low_values(values, label)
    total, highest, tenth = len(values), max(values), float(np.quantile(values, 0.9))
    if total < 10:
        return f"the highest {label} of {plural(total, 'patient')} is {number(highest)}"
    below = sum(value <= tenth for value in values)
    return f"{below} of {total} patients have {label} of {number(tenth)} or less; the highest has {number(highest)}"


def low_values(values: Sequence[float], label: str) -> str:
    """How the worst-off patients do, in counts that are true whatever ties there are.

    Examples
    --------
    >>> low_values([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], "kappa")
    '9 of 10 patients have kappa above 0.190; the lowest has 0.100'
    >>> low_values([0.0, 0.0, 0.0, 0.5, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9], "kappa")
    '3 of 10 patients share the lowest kappa, 0.000'
    >>> low_values([0.2, 0.5], "kappa")
    'the lowest kappa of 2 patients is 0.200'
    """
    shown = sorted(round(value, 3) for value in values)
    total, lowest, tenth = len(shown), shown[0], round(float(np.quantile(values, 0.1)), 3)
    if shown[-1] == lowest:
        return f"every one of {plural(total, 'patient')} has {label} {number(lowest)}"
    if (equal := shown.count(lowest)) > 1 and (total < 10 or tenth == lowest):
        return f"{equal} of {total} patients share the lowest {label}, {number(lowest)}"
    if total < 10:
        return f"the lowest {label} of {total} patients is {number(lowest)}"
    if shown.count(tenth) > 1:
        few = sum(value <= tenth for value in shown)
        return f"{few} of {total} patients have {label} {number(tenth)} or less; the lowest has {number(lowest)}"
    above = sum(value > tenth for value in shown)
    return f"{above} of {total} patients have {label} above {number(tenth)}; the lowest has {number(lowest)}"
