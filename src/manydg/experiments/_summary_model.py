"""What a summary holds: one entry for each row and metric, and what a reader must know about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manydg.evaluation.significance import PairedComparison
from manydg.evaluation.statistics import Interval
from manydg.experiments import _summary_tables as tables

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Entry:
    """One row of the table at one metric, on unseen patients.

    Attributes
    ----------
    values : dict of int to float
        By seed; NaN where undefined.
    mean, sd : float
        Over seeds; the standard deviation of a sample, NaN for one seed.
    interval : Interval, optional
        Patient bootstrap of the mean over seeds.
    worst_tenth : float
        The 10th percentile over patients, each counted once.
    worst_tenth_patients : int
        How many patients it rests on.
    comparison : PairedComparison, optional
        This row minus the reference over the seeds they share.
    difference : Interval, optional
        Patient bootstrap of the same difference.
    adjusted : dict of str to float
        Holm-corrected p of each test (``t``, ``wilcoxon``, ``corrected``) over the rows compared.
    rank : int
        1 for the best mean, 2 for the second, 0 for the rest.
    """

    row: str
    metric: str
    values: dict[int, float]
    mean: float
    sd: float
    interval: Interval | None
    worst_tenth: float
    worst_tenth_patients: int
    comparison: PairedComparison | None = None
    difference: Interval | None = None
    adjusted: Mapping[str, float] | None = None
    rank: int = 0


@dataclass(frozen=True)
class Summary:
    """The table of one experiment on one dataset.

    Attributes
    ----------
    metrics : tuple of str
    primary : str
        The metric that chose the epochs.
    reference : str or None
        The row the others are tested against; None where it is not among the rows.
    entries : dict
        By (row, metric).
    seconds : dict of str to float
        Mean time of a run of each row.
    patients, samples : dict of str to int
        Training, validation and test patients of the first run, and their samples.
    target_kind, target_names
        What is predicted.
    rules : tuple of str
        How epochs and thresholds were chosen.
    notes : tuple of str
        Failed runs, missing seeds and whatever else a reader must know.
    """

    experiment: str
    dataset: str
    metrics: tuple[str, ...]
    primary: str
    reference: str | None
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    entries: Mapping[tuple[str, str], Entry]
    seconds: Mapping[str, float]
    patients: Mapping[str, int]
    samples: Mapping[str, int]
    target_kind: str
    target_names: tuple[str, ...]
    rules: tuple[str, ...]
    notes: tuple[str, ...]

    def to_rich(self, width: int | None = None) -> Table:
        """A table for a terminal of some width; by default that of this one."""
        from manydg.experiments._summary_screen import to_rich

        return to_rich(self, width)

    def to_markdown(self) -> str:
        """The tables and notes as Markdown."""
        return tables.to_markdown(self)

    def to_csv(self) -> str:
        """Every number, one line for each row and metric."""
        return tables.to_csv([self])
