"""Which of several models to use: chosen on validation patients, and the cheapest of those that chance cannot separate.

The rule is that of one standard error (Breiman and others 1984): the model with the best mean validation metric, or the
cheapest whose mean is within one standard error of it. Cheapest means: no patient context before any, then the shortest
training. The standard error is that of the paired difference over the splits, corrected for splits that share patients
(Nadeau and Bengio). Test patients have no part in the choice, so that their figures are not flattered by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from manydg.evaluation.statistics import Interval
from manydg.targets import oriented
from manydg.training.record import RunRecord


@dataclass(frozen=True)
class Cost:
    """What a model costs to make and to use.

    Attributes
    ----------
    seconds : float
        Median time of a training run; NaN where it was not recorded.
    parameters : int or None
        Trained parameters; None for trees, which have none.
    predict_ms : float
        Milliseconds to predict a thousand samples, reading and patient context apart; NaN where it was not recorded.
    context : str
        Which other samples of a patient a prediction needs: ``none``, ``offline`` (all) or ``causal`` (earlier ones).
    device : str
        What these times were taken on.
    """

    seconds: float
    parameters: int | None
    predict_ms: float
    context: str
    device: str

    @staticmethod
    def of(records: Iterable[RunRecord]) -> Cost:
        """The cost of one model, from its runs."""
        runs = list(records)
        return Cost(
            seconds=_median([float(run.seconds) for run in runs if run.seconds is not None]),
            parameters=max((run.parameters or 0 for run in runs), default=0) or None,
            predict_ms=1000 * _median([run.predict_seconds for run in runs if run.predict_seconds is not None]),
            context=next((str(run.context.get("mode", "none")) for run in runs if run.context), "none"),
            device=", ".join(dict.fromkeys(run.device for run in runs if run.device)),
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the cheaper model first."""
        return self.context != "none", self.seconds if math.isfinite(self.seconds) else math.inf


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


@dataclass(frozen=True)
class Recommendation:
    """The model to use, and why.

    Attributes
    ----------
    row : str
        The model.
    best : str
        The one with the best mean validation metric.
    validation : mapping of str to float
        Mean validation metric of each model.
    errors : mapping of str to float
        Standard error of the best minus each model on validation patients; NaN for one split.
    tied : tuple of str
        The models within one standard error of the best, itself included.
    splits : int
    by_split : mapping of int to str
        The model that the validation patients of each split alone would have chosen.
    of_procedure : Interval, optional
        Test metric of these choices: what choosing on validation patients, as a procedure, is worth on new patients.
    """

    row: str
    best: str
    validation: Mapping[str, float]
    errors: Mapping[str, float]
    tied: tuple[str, ...]
    splits: int
    by_split: Mapping[int, str]
    of_procedure: Interval | None = None

    def gap(self, row: str) -> float:
        """How far a model's mean validation metric is from the best."""
        return abs(self.validation[self.best] - self.validation[row])


def recommend(
    validation: Mapping[str, Mapping[int, float]],
    costs: Mapping[str, Cost],
    test_share: float | None,
    metric: str = "",
) -> Recommendation | None:
    """Choose among models; None where there are no two that were validated on the same splits.

    Parameters
    ----------
    validation : mapping
        Model to seed to its validation metric; NaN where it is undefined.
    costs : mapping
        Model to its cost.
    test_share : float, optional
        Test patients over training patients, for the correction of the standard error.
    metric : str
        The metric; of an error, lower is better.

    Examples
    --------
    >>> costs = {"a": Cost(9, 1, 1, "none", ""), "b": Cost(1, 1, 1, "none", "")}
    >>> recommend({"a": {0: 0.71, 1: 0.72, 2: 0.70}, "b": {0: 0.70, 1: 0.73, 2: 0.69}}, costs, 0.25).row
    'b'
    """
    known = {
        row: {seed: value for seed, value in values.items() if math.isfinite(value)}
        for row, values in validation.items()
    }
    rows = [row for row, values in known.items() if values]
    seeds = sorted(set.intersection(*(set(known[row]) for row in rows))) if rows else []
    if len(rows) < 2 or not seeds:
        return None
    table = {row: np.array([known[row][seed] for seed in seeds]) for row in rows}
    means = {row: float(values.mean()) for row, values in table.items()}
    best = max(rows, key=lambda row: oriented(metric, means[row]))
    errors = {row: _standard_error(table[best] - table[row], test_share) for row in rows}
    tied = [row for row in rows if row == best or abs(means[best] - means[row]) <= np.nan_to_num(errors[row])]
    row = min(tied, key=lambda row: costs[row].rank)
    return Recommendation(
        row=row,
        best=best,
        validation=means,
        errors=errors,
        tied=tuple(tied),
        splits=len(seeds),
        by_split={seed: max(rows, key=lambda row: oriented(metric, known[row][seed])) for seed in seeds},
    )


def _standard_error(gaps: np.typing.NDArray[np.float64], test_share: float | None) -> float:
    """Of a mean difference over splits that share patients; NaN for one split."""
    if len(gaps) < 2:
        return math.nan
    return float(gaps.std(ddof=1) * math.sqrt(1 / len(gaps) + (test_share or 0.0)))
