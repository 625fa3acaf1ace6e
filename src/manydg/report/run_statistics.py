"""Statistics over runs: means by method, variant, epoch and patient, and how far each difference can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from manydg.algorithms import controls
from manydg.evaluation.statistics import Interval, PairedComparison, shared_patient_values
from manydg.studies.summary import Entry, Summary
from manydg.targets import oriented
from manydg.training.record import EpochEntry, RunRecord

ALPHA = 0.05
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
        """``clear`` if test and interval agree, ``unsure`` if only one shows a difference, ``none`` if neither does."""
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
                return test if pair.first == first else test.turned(first)
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
