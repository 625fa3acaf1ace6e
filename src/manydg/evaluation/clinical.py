"""What a model is worth in care: decisions at a threshold, alarms, net benefit, and groups of patients.

Everything here is of a binary target on patients the model has not seen, counted patient by patient, so that intervals
come from resampling patients (:mod:`manydg.evaluation.statistics`). Several runs, each with test patients and a
threshold of its own, are averaged. The equations are in ``docs/statistics.md``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manydg.config import DecisionRule
from manydg.data.info import EventSpec
from manydg.errors import DataError
from manydg.evaluation.metrics import Predictions, Timing, divide, group_sums
from manydg.evaluation.statistics import (
    MIN_PATIENTS,
    Interval,
    PatientResampling,
    holm,
    mean_difference,
    mean_over_runs,
)
from manydg.evaluation.trust import statements
from manydg.files import Json, fields_as_json

FloatArray = npt.NDArray[np.float64]
Values = dict[str, FloatArray]
BUDGETS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False alarms per patient-day at which the curve of alarms is given."""
_HOURS = 24.0
_CANDIDATES, _CELLS, _ROUNDING = 300, 2_000_000, 1e-9
_STEPS_OF_A_DECISION = 40


def _scores(run: Predictions) -> FloatArray:
    if run.target.kind != "binary":
        raise DataError(f"alarms and thresholds are of a binary target; this one is {run.target.kind}")
    return np.asarray(run.probabilities[:, 1], np.float64)


# Alarms


@dataclass(frozen=True, eq=False)
class AlarmCounts:
    """What alarms at some thresholds do for each patient.

    - ``thresholds`` (T,)
    - ``events`` (P,): Events with a sample within the horizon before their onset, so that they could be caught.
    - ``days`` (P,): Time under watch before an onset, or to the end.
    - ``caught``, ``warnings``, ``false_alarms`` (P, T): Events with an alarm within the horizon before onset; alarms
      within it; and all other alarms before onset.
    - ``lead`` (P, T): Time from the first alarm within the horizon to the onset, summed over the events caught, in
      hours.
    """

    thresholds: FloatArray
    events: FloatArray
    days: FloatArray
    caught: FloatArray
    warnings: FloatArray
    false_alarms: FloatArray
    lead: FloatArray

    def rates(self, weights: npt.ArrayLike) -> Values:
        """Rates under patient weights ``(W, P)``, ``(W, T)`` each."""
        each = np.asarray(weights, float)
        caught, false, warnings = (each @ counts for counts in (self.caught, self.false_alarms, self.warnings))
        return {
            "events_caught": divide(caught, (each @ self.events)[:, None]),
            "false_alarms_per_day": divide(false, (each @ self.days)[:, None]),
            "lead_hours": divide(each @ self.lead, caught),
            "alarms_that_come_true": divide(warnings, warnings + false),
        }


def count_alarms(run: Predictions, thresholds: npt.ArrayLike, silence: float | None = None) -> AlarmCounts:
    """Go through every session in the order of time and raise an alarm wherever the probability reaches a threshold.

    After an alarm there is silence for a while. Samples from the onset on raise none.

    - ``run``: With timing.
    - ``thresholds`` (T,)
    - ``silence``: In the unit of the times; by default the horizon.
    """
    if run.timing is None:
        raise DataError("alarms need an event: prepare the table with --event and --horizon")
    ahead = run.select(~run.timing.begun)
    assert ahead.timing is not None
    cuts, watched = np.atleast_1d(np.asarray(thresholds, float)), _Watch(ahead.timing, _scores(ahead))
    pause = run.timing.event.horizon if silence is None else silence
    step = max(1, _CELLS // max(1, watched.sessions))
    parts = [watched.alarms(cuts[start : start + step], pause) for start in range(0, len(cuts), step)]
    patient = np.zeros(watched.sessions, np.int64)
    patient[watched.session] = np.searchsorted(run.names, ahead.patients)
    count = len(run.names)
    caught, warnings, false, lead = (
        group_sums(np.concatenate([part[which] for part in parts], axis=1), patient, count) for which in range(4)
    )
    day = run.timing.event.day
    events, days = group_sums(np.stack([watched.events(), watched.duration() / day], axis=1), patient, count).T
    return AlarmCounts(cuts, events, days, caught, warnings, false, lead * _HOURS / day)


def raise_alarms(
    event: EventSpec,
    times: FloatArray,
    session: npt.NDArray[np.int64],
    scores: FloatArray,
    threshold: float,
    silence: float | None = None,
    last: FloatArray | None = None,
) -> npt.NDArray[np.bool_]:
    """Which samples raise an alarm, ``(rows,)``, where nothing is known of onsets yet.

    - ``times``, ``session``, ``scores`` (rows,): A probability that is NaN raises none.
    - ``silence``: In the unit of the times; by default the horizon.
    - ``last`` (rows,): When an alarm was raised last in the session of each sample, before all of these samples.
    """
    watch = _Watch(Timing(event, times, np.full(len(times), np.nan), session), np.nan_to_num(scores, nan=-1.0))
    return watch.raised(threshold, event.horizon if silence is None else silence, last)


class _Watch:
    """Samples before onset, in the order of time within their sessions.

    - ``scores`` (rows,)
    """

    def __init__(self, timing: Timing, scores: FloatArray) -> None:
        _, self.session = np.unique(timing.session, return_inverse=True)
        self.sessions = int(self.session.max()) + 1 if len(scores) else 0
        self.times, self.onset, self.scores = timing.times, timing.onset, scores
        horizon = timing.event.horizon * (1 + _ROUNDING)
        self.near = np.asarray(self.onset - self.times <= horizon)
        order = np.lexsort((self.times, self.session))
        begins = np.flatnonzero(np.diff(self.session[order], prepend=-1))
        position = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        # The first samples of all sessions, then the second ones, and so on.
        by_position = np.argsort(position, kind="stable")
        self.rounds = np.split(order[by_position], np.flatnonzero(np.diff(position[by_position])) + 1)

    def events(self) -> FloatArray:
        """Whether a session has an event that could be caught, ``(sessions,)``."""
        return np.minimum(np.bincount(self.session[self.near], minlength=self.sessions), 1).astype(float)

    def duration(self) -> FloatArray:
        """How long each session is watched, ``(sessions,)``: from its first sample to a usual pause after its last."""
        first, last = np.full(self.sessions, np.inf), np.full(self.sessions, -np.inf)
        np.minimum.at(first, self.session, self.times)
        np.maximum.at(last, self.session, self.times)
        order = np.lexsort((self.times, self.session))
        pauses = np.diff(self.times[order])[np.diff(self.session[order]) == 0]
        usual = float(np.median(pauses)) if len(pauses) else 0.0
        return np.asarray(last - first + usual, float)

    def raised(self, threshold: float, silence: float, before: FloatArray | None) -> npt.NDArray[np.bool_]:
        """Which samples raise an alarm, ``(rows,)``."""
        last, raised = np.full(self.sessions, -np.inf), np.zeros(len(self.scores), bool)
        if before is not None:
            last[self.session] = before
        for rows in self.rounds if self.sessions else ():
            who, now = self.session[rows], self.times[rows]
            raised[rows] = (self.scores[rows] >= threshold) & (now - last[who] >= silence * (1 - _ROUNDING))
            last[who] = np.where(raised[rows], now, last[who])
        return raised

    def alarms(self, thresholds: FloatArray, silence: float) -> tuple[FloatArray, ...]:
        """Events caught, warnings, false alarms and lead time of each session, ``(sessions, T)`` each."""
        shape = self.sessions, len(thresholds)
        last = np.full(shape, -np.inf)
        lead, warnings, false = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for rows in self.rounds if self.sessions else ():
            who, now = self.session[rows], self.times[rows][:, None]
            loud = (self.scores[rows][:, None] >= thresholds) & (now - last[who] >= silence * (1 - _ROUNDING))
            last[who] = np.where(loud, now, last[who])
            near = self.near[rows][:, None]
            first = loud & near & (warnings[who] == 0)
            lead[who] += np.where(first, self.onset[rows][:, None] - now, 0.0)
            warnings[who] += loud & near
            false[who] += loud & ~near
        return np.minimum(warnings, 1), warnings, false, lead


def candidate_thresholds(scores: npt.ArrayLike, count: int = _CANDIDATES) -> FloatArray:
    """Some of the scores that occur, from low to high, closer together near the top."""
    values = np.sort(np.asarray(scores, float))
    if not len(values):
        return np.array([0.5])
    rank = len(values) * (1 - np.geomspace(1 / len(values), 1, count))
    return np.unique(values[np.clip(np.round(rank).astype(int), 0, len(values) - 1)])


# The threshold for a stated sensitivity, precision or budget of alarms


def threshold_for(rule: DecisionRule, val: Predictions, silence: float | None = None) -> tuple[float, str]:
    """The threshold that keeps a rule on validation patients, and how it was chosen, in words.

    Of all thresholds that keep it, the one that costs least: the highest for a sensitivity, the one with the highest
    sensitivity (share of events caught) for a precision (a budget of alarms). Where none keeps it, the words say so.

    - ``val``: Validation patients, never test patients.
    - ``silence``: After an alarm, in the unit of the times; by default the horizon.
    """
    if rule.kind == "alarms":
        return _threshold_for_alarms(rule, val, silence)
    run = val.scored()
    truth, scores = np.asarray(run.truth) != 0, _scores(run)
    cuts = np.unique(scores)
    if not truth.any():
        raise DataError(f"'--at {rule.text}' cannot be chosen: no validation sample is positive; take more patients")
    # Of scores from high to low: how many positives and how many samples reach each.
    taken = np.searchsorted(np.sort(-scores), -cuts, side="right")
    hits = np.searchsorted(np.sort(-scores[truth]), -cuts, side="right")
    sensitivity, precision = hits / truth.sum(), hits / taken
    reached = sensitivity if rule.kind == "sensitivity" else precision
    kept = np.flatnonzero(reached >= rule.value - _ROUNDING)
    if len(kept):
        # With as many positives found, fewer false ones: the highest of the thresholds with the highest sensitivity.
        best = kept[-1] if rule.kind == "sensitivity" else kept[sensitivity[kept] == sensitivity[kept].max()][-1]
        return _just_below(cuts, best), f"{rule.text} on validation patients"
    best = int(np.argmax(reached))
    words = f"{rule.text} is not reached on validation patients: the threshold with the highest {rule.kind} there"
    return _just_below(cuts, best), f"{words}, {reached[best]:.3f}"


def _just_below(cuts: FloatArray, at: int) -> float:
    """Half-way to the next lower score, as far from both as can be."""
    return float((cuts[at] + (cuts[at - 1] if at else 0.0)) / 2)


def _threshold_for_alarms(rule: DecisionRule, val: Predictions, silence: float | None) -> tuple[float, str]:
    cuts = candidate_thresholds(_scores(val.scored()))
    counts = count_alarms(val, cuts, silence)
    rates = {name: values[0] for name, values in counts.rates(np.ones((1, len(val.names)))).items()}
    kept = np.flatnonzero(rates["false_alarms_per_day"] <= rule.value + _ROUNDING)
    if not len(kept):
        lowest = float(np.nanmin(rates["false_alarms_per_day"]))
        words = f"{rule.text} is exceeded at every threshold on validation patients: the highest threshold"
        return float(cuts[-1]), f"{words}, {lowest:.2f} false alarms per patient-day there"
    caught = np.nan_to_num(rates["events_caught"][kept])
    # With as many events caught, fewer alarms; with no event to catch, the whole budget.
    best = kept[np.flatnonzero(caught == caught.max())[-1 if caught.max() > 0 else 0]]
    return float(cuts[best]), f"{rule.text} (false alarms per patient-day) on validation patients"


# Rates at each run's own threshold


def rates_at_threshold(run: Predictions, weights: npt.ArrayLike, silence: float | None = None) -> Values:
    """Sensitivity, specificity and predictive values of the samples, and the alarms, at the run's threshold, ``(W,)``.

    - ``run``: All rows, those after an onset too.
    - ``weights`` (W, P): Of ``run.names``.
    """
    each, values = np.asarray(weights, float), run.rates(weights)
    if run.timing is not None and run.threshold is not None:
        values |= {name: rate[:, 0] for name, rate in count_alarms(run, run.threshold, silence).rates(each).items()}
    return values


@dataclass(frozen=True)
class CurvePoint:
    """A value with its interval at one point of a curve."""

    at: float
    value: Interval


def alarm_curve(
    runs: Sequence[Predictions], plan: PatientResampling, silence: float | None = None
) -> dict[str, list[CurvePoint]]:
    """Share of events caught, and mean hours of warning, against false alarms per patient-day.

    At each budget every run has the threshold that catches most within it on its own test patients: the curve shows
    what can be had, not how well a threshold can be chosen.
    """
    values: list[Values] = []
    for run in runs:
        # The last raises no alarm at all, which every budget allows.
        counts = count_alarms(run, [*candidate_thresholds(_scores(run.scored())), np.inf], silence)
        rates = counts.rates(_weights_of(run, plan))
        best = {budget: _within(budget, rates) for budget in BUDGETS}
        names = ("events_caught", "lead_hours")
        values.append({f"{name} {budget}": rates[name][:, at] for name in names for budget, at in best.items()})
    means = mean_over_runs(values)
    return {
        name: [CurvePoint(budget, plan.interval(means[f"{name} {budget}"])) for budget in BUDGETS]
        for name in ("events_caught", "lead_hours")
    }


def _within(budget: float, rates: Values) -> int:
    """The threshold that catches most events within a budget, under the first row of weights."""
    false, caught = rates["false_alarms_per_day"][0], rates["events_caught"][0]
    kept = np.flatnonzero(~(false > budget + _ROUNDING))
    return int(kept[np.argmax(np.nan_to_num(caught[kept]))])


# Net benefit


def net_benefit(run: Predictions, thresholds: npt.ArrayLike, weights: npt.ArrayLike) -> Values:
    """Net benefit of acting on a probability from each threshold on, and of acting on everybody, ``(W, T)`` each.

    - ``thresholds`` (T,): Above 0 and below 1: the probability at which acting and not acting are worth the same.
    - ``weights`` (W, P): Of ``run.names``.
    """
    cuts, each, counted = np.asarray(thresholds, float), np.asarray(weights, float), run.scored()
    truth, scores = np.asarray(counted.truth) != 0, _scores(counted)
    patient, count = np.searchsorted(run.names, counted.patients), len(run.names)
    acted = scores[:, None] >= cuts
    hits, false = (group_sums((acted & side[:, None]).astype(float), patient, count) for side in (truth, ~truth))
    sides = group_sums(np.stack([truth, ~truth], axis=1).astype(float), patient, count)
    odds, total = cuts / (1 - cuts), (each @ sides.sum(axis=1))[:, None]
    positive, negative = (each @ sides).T[..., None]
    return {
        "model": divide(each @ hits - odds * (each @ false), total),
        "everybody": divide(positive - odds * negative, total),
    }


def decision_curve(runs: Sequence[Predictions], plan: PatientResampling) -> dict[str, list[CurvePoint]]:
    """Net benefit of the model, of acting on everybody, and of the model over the better of everybody and nobody."""
    scores = np.concatenate([_scores(run.scored()) for run in runs])
    top = min(0.95, max(0.1, float(np.quantile(scores, 0.999))))
    cuts = np.linspace(0.01, top, _STEPS_OF_A_DECISION)
    values = []
    for run in runs:
        benefit = net_benefit(run, cuts, _weights_of(run, plan))
        benefit["gain"] = benefit["model"] - np.maximum(benefit["everybody"], 0.0)
        values.append({f"{name} {at}": each[:, at] for name, each in benefit.items() for at in range(len(cuts))})
    means = mean_over_runs(values)
    return {
        name: [CurvePoint(float(cut), plan.interval(means[f"{name} {at}"])) for at, cut in enumerate(cuts)]
        for name in ("model", "everybody", "gain")
    }


# Subgroups and calibration


@dataclass(frozen=True)
class GroupResult:
    """How a model does in one group of patients.

    - ``patients``, ``samples``: Of all runs' test patients, each counted once; of their samples, over all runs.
    - ``positive``: Share of positive samples of a binary target; NaN for others.
    - ``values``: Each metric, and ``calibration``: mean probability minus the share that came true.
    - ``differences``: The same, minus that of the largest group; empty for that group.
    - ``p``: Two-sided, of no difference, corrected for the number of groups (Holm); NaN where no test can be made.
    """

    group: str
    patients: int
    samples: int
    positive: float
    values: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    p: Mapping[str, float]


def compare_groups(runs: Sequence[Predictions], column: str, plan: PatientResampling) -> list[GroupResult]:
    """Every group of a column, against the one with most patients, on the same runs and resampled patients.

    A metric of fewer than three patients of a group, or sites where these are drawn, has neither interval nor p: its
    draws say nothing of others. Runs in which the group has no such value do not count.
    """
    counted = [run.scored() for run in runs]
    names = sorted({str(name) for run in counted for name in run.subgroups[column].tolist()}, key=_group_order)
    parts = {name: [run.select(run.subgroups[column] == name) for run in counted] for name in names}
    people = {name: {str(who) for part in group for who in part.names} for name, group in parts.items()}
    largest = max(names, key=lambda name: len(people[name]))
    by_run = {name: [_group_values(part, plan) for part in group] for name, group in parts.items()}
    draws = {name: mean_over_runs(group) for name, group in by_run.items()}
    gaps = {name: mean_difference(group, by_run[largest]) for name, group in by_run.items()}
    others = [name for name in names if name != largest]
    runs_of = {name: list(zip(parts[name], by_run[name], strict=True)) for name in names}
    units = {(name, key): _units(plan, runs_of[name], runs_of[name], key) for name in names for key in draws[name]}
    # The group with most patients may be of few sites.
    compared = {(name, key): _units(plan, runs_of[name], runs_of[largest], key) for name, key in units}
    p = {
        key: holm(
            [
                _bootstrap_p(gaps[name][key], plan) if compared[name, key] >= MIN_PATIENTS else math.nan
                for name in others
            ]
        )
        for key in draws[largest]
    }
    return [
        GroupResult(
            name,
            len(people[name]),
            sum(len(part.truth) for part in parts[name]),
            _positive(parts[name]),
            {key: plan.interval(values, units=units[name, key]) for key, values in draws[name].items()},
            {key: plan.interval(values, units=compared[name, key]) for key, values in gaps[name].items()}
            if name != largest
            else {},
            {key: each[others.index(name)] for key, each in p.items()} if name != largest else {},
        )
        for name in names
    ]


def _units(
    plan: PatientResampling,
    one: Sequence[tuple[Predictions, Values]],
    other: Sequence[tuple[Predictions, Values]],
    metric: str,
) -> int:
    """How many patients, or sites, of the smaller of two groups are in the runs in which both have a metric."""
    known = [
        (part.names, rest.names)
        for (part, values), (rest, others) in zip(one, other, strict=True)
        if not math.isnan(values[metric][0]) and not math.isnan(others[metric][0])
    ]
    return min((plan.units_of(np.concatenate(names)) for names in zip(*known, strict=True)), default=0)


def _positive(parts: Sequence[Predictions]) -> float:
    truth = np.concatenate([np.asarray(part.truth) for part in parts])
    return float(np.mean(truth != 0)) if parts[0].target.kind == "binary" else math.nan


def _group_order(name: str) -> tuple[bool, bool, float, str]:
    """Bands by their numbers, then names by the alphabet, the rest last."""
    number = re.match(r"\d+(\.\d+)?", name)
    return name in ("other", "unknown"), not name.startswith("under "), float(number[0]) if number else math.inf, name


def _group_values(part: Predictions, plan: PatientResampling) -> Values:
    gap, rows = (_weights_of(part, plan) @ _calibration_sums(part)).T
    return {**plan.evaluate(part), "calibration": divide(gap, rows)}


def _calibration_sums(run: Predictions) -> FloatArray:
    """Each patient's sum of what was stated minus what came true, and the number of samples, ``(patients, 2)``."""
    if run.target.kind == "regression":
        stated, true = np.asarray(run.probabilities, float), np.asarray(run.truth, float)[:, None]
    else:
        stated, true = statements(run.target, run.truth, run.probabilities)
    gaps = (stated - true).mean(axis=1)
    return group_sums(np.stack([gaps, np.ones(len(gaps))], axis=1), run.groups, len(run.names))


def _bootstrap_p(values: FloatArray, plan: PatientResampling) -> float:
    """Two-sided p of a difference of zero, from the share of bootstrap draws on either side of it."""
    draws = values[1 : 1 + plan.resamples]
    draws = draws[~np.isnan(draws)]
    if not len(draws) or math.isnan(values[0]):
        return math.nan
    below, above = (1 + (draws <= 0).sum()) / (len(draws) + 1), (1 + (draws >= 0).sum()) / (len(draws) + 1)
    return float(min(1.0, 2 * min(below, above)))


def calibration_by_patient(runs: Sequence[Predictions]) -> dict[str, float]:
    """Mean probability minus the share that came true within each patient, the mean over the runs that tested them."""
    gaps: dict[str, list[float]] = {}
    for run in (each.scored() for each in runs):
        for name, (gap, rows) in zip(run.names, _calibration_sums(run), strict=True):
            gaps.setdefault(str(name), []).append(float(gap / rows))
    return {name: float(np.mean(values)) for name, values in gaps.items()}


def _weights_of(run: Predictions, plan: PatientResampling) -> npt.NDArray[np.int64]:
    return plan.weights[:, np.searchsorted(plan.names, run.names)]


# All of it


RATE_NAMES = {
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
    "precision": "Precision",
    "negative_predictive_value": "Negative predictive value",
    "events_caught": "Events caught",
    "false_alarms_per_day": "False alarms per patient-day",
    "lead_hours": "Hours of warning",
    "alarms_that_come_true": "Alarms that come true",
}
"""Of :func:`rates_at_threshold`, in the order to show them."""


@dataclass(frozen=True)
class ClinicalResult:
    """Everything about one model, from the test predictions of its runs.

    - ``at_threshold``: :func:`rates_at_threshold`, each run at its own threshold.
    - ``events``, ``patient_days``: Events that could be caught and days watched, in the mean over runs; 0 without an
      event.
    - ``alarms``, ``decisions``: :func:`alarm_curve` and :func:`decision_curve`; the first is empty without an event.
    - ``subgroups``: Column to :func:`compare_groups`.
    - ``calibration``: Quantiles over patients, by level, of :func:`calibration_by_patient`.
    - ``rule``: How the thresholds were chosen, where it is known: every rule of the runs, once.
    """

    at_threshold: Mapping[str, Interval]
    events: float
    patient_days: float
    alarms: Mapping[str, list[CurvePoint]]
    decisions: Mapping[str, list[CurvePoint]]
    subgroups: Mapping[str, list[GroupResult]]
    calibration: Mapping[str, float]
    rule: str = ""

    def to_json(self) -> dict[str, Json]:
        """JSON values by name; null where a number is undefined."""
        return fields_as_json(self)


def evaluate(
    runs: Sequence[Predictions],
    *,
    silence: float | None = None,
    resamples: int = 1000,
    site_of: Mapping[str, Json] | None = None,
) -> ClinicalResult:
    """Alarms, net benefit, calibration and subgroups of a model on the test patients of its runs.

    - ``runs``: All rows of the test patients, with each run's threshold.
    - ``silence``: After an alarm, in the unit of the times; by default the horizon.
    - ``resamples``: Of the patient bootstrap.
    - ``site_of``: The site of each patient, where whole sites were split: then sites are drawn first.
    """
    everyone = np.concatenate([run.names for run in runs])
    plan = PatientResampling.of(everyone, site_of, resamples=resamples)
    binary, timed = runs[0].target.kind == "binary", all(run.timing is not None for run in runs)
    rates = [rates_at_threshold(run, _weights_of(run, plan), silence) for run in runs if binary]
    at = mean_over_runs(rates) if rates else {}
    watched = [count_alarms(run, 1.0, silence) for run in runs] if binary and timed else []
    columns = list(runs[0].subgroups)
    gaps = list(calibration_by_patient(runs).values())
    return ClinicalResult(
        {name: plan.interval(values) for name, values in at.items()},
        float(np.mean([counts.events.sum() for counts in watched])) if watched else 0.0,
        float(np.mean([counts.days.sum() for counts in watched])) if watched else 0.0,
        alarm_curve(runs, plan, silence) if watched else {},
        decision_curve(runs, plan) if binary else {},
        {name: compare_groups(runs, name, plan) for name in columns},
        {f"{level:g}": float(np.quantile(gaps, level)) for level in (0.1, 0.25, 0.5, 0.75, 0.9)},
    )
