"""The main comparison: the summary of ``manydg compare``, and how far each difference can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manydg.evaluation.statistics import Interval
from manydg.experiments.summary import Entry, Summary, summarize
from manydg.report._runs import FIRST
from manydg.report._study import Chapter

ALPHA = 0.05


@dataclass(frozen=True)
class Test:
    """The page's first row, ManyDG, minus one rival at one metric; p-values are two-sided, Holm's over the rivals.

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

    @property
    def p(self) -> float:
        """The p-value that decides: of the corrected t-test, or the plain one where that could not be made."""
        return self.t_p if math.isnan(self.corrected_p) else self.corrected_p

    @property
    def excludes_zero(self) -> bool:
        """Whether the patient-bootstrap interval of the difference lies on one side of zero."""
        return self.interval is not None and (self.interval.low > 0 or self.interval.high < 0)

    @property
    def has_interval(self) -> bool:
        """Whether the interval could be given."""
        return self.interval is not None and math.isfinite(self.interval.low)

    @property
    def verdict(self) -> str:
        """``clear`` if test and interval agree, ``unsure`` if only one says so, ``none`` if neither does."""
        tested = self.p < ALPHA
        if tested and (self.excludes_zero or not self.has_interval):
            return "clear"
        return "unsure" if tested or self.excludes_zero else "none"


@dataclass(frozen=True)
class Comparison:
    """A summary with its rows in the order of the page: whom the tests are about, Base, the controls first."""

    summary: Summary
    rows: Sequence[str]

    @property
    def first(self) -> str:
        """The row the page is about: ManyDG, or another where it was not run."""
        return self.rows[0]

    def entry(self, row: str, metric: str) -> Entry:
        """One cell of the table."""
        return self.summary.entries[row, metric]

    def test(self, metric: str, rival: str) -> Test | None:
        """ManyDG minus a rival; None where no test was made."""
        entry = self.summary.entries.get((rival, metric))
        if entry is None or entry.comparison is None:
            return None
        paired, bounds, adjusted = entry.comparison, entry.difference, entry.adjusted or {}
        # The summary has the rival minus ManyDG; a reader asks it the other way round.
        turned = None if bounds is None else Interval(-bounds.estimate, -bounds.high, -bounds.low, bounds.level)
        return Test(
            rival=rival,
            difference=-paired.difference,
            interval=turned,
            t_p=adjusted.get("t", math.nan),
            wilcoxon_p=adjusted.get("wilcoxon", math.nan),
            corrected_p=adjusted.get("corrected", math.nan),
            effect=-paired.hedges_g,
            splits=paired.pairs,
            note=paired.note,
        )

    def tests(self, metric: str) -> list[Test]:
        """Tests against all rivals, in the order of the rows."""
        return [test for row in self.rows if (test := self.test(metric, row)) is not None]


def compare(chapter: Chapter) -> Comparison | None:
    """Sum up the runs of ``manydg compare``; None where none ended well."""
    runs = chapter.runs("compare")
    if not runs:
        return None
    known = {str(run["run"]): found for run in runs if (found := chapter.predictions(run)) is not None}
    summary = summarize(runs, known)
    order = dict.fromkeys([summary.reference, *FIRST, *summary.rows])
    return Comparison(summary, [row for row in order if row in summary.rows])
