"""Alarms, thresholds for a stated rule, net benefit and subgroups, against counts made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from manydg.config import DecisionRule, TrainingConfig, duration
from manydg.data.info import EventSpec, TargetSpec
from manydg.errors import ConfigError, DataError
from manydg.evaluation.clinical import (
    alarm_curve,
    calibration_by_patient,
    candidate_thresholds,
    compare_groups,
    count_alarms,
    decision_curve,
    evaluate,
    net_benefit,
    raise_alarms,
    rates_at_threshold,
    threshold_for,
)
from manydg.evaluation.metrics import Predictions, Timing, read_predictions, write_predictions
from manydg.evaluation.statistics import PatientResampling
from manydg.files import Json
from manydg.targets import target_of

BINARY = target_of(TargetSpec("binary", ("no", "yes")))
NAN = math.nan
# Ann: onset at hour 6, horizon 3; hour 6 itself is after. Bob: two stays, no event. Cid: ill from the first hour on.
WHO = ["ann"] * 7 + ["bob"] * 3 + ["bob"] * 2 + ["cid"] * 2
SESSION = [0] * 7 + [1] * 3 + [2] * 2 + [3] * 2
HOUR = [0.0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 40, 41, 0, 1]
ONSET = [6.0] * 7 + [NAN] * 5 + [0.0] * 2
SCORE = [0.9, 0.1, 0.6, 0.2, 0.7, 0.8, 0.99, 0.6, 0.7, 0.1, 0.1, 0.9, 0.95, 0.1]


def predictions(**changes: object) -> Predictions:
    event = EventSpec("onset", 3.0, 24.0)
    onset, hour = np.array(ONSET), np.array(HOUR)
    truth = (onset - hour <= 3).astype(int)
    scores = np.array(SCORE)
    timing = Timing(event, hour, onset, np.array(SESSION))
    run = Predictions(
        BINARY, truth, np.stack([1 - scores, scores], axis=1), np.array(WHO), 0.5, timing=timing,
        subgroups={"sex": np.array(["f"] * 7 + ["m"] * 7)},
    )  # fmt: skip
    return replace(run, **changes)  # type: ignore[arg-type]


def test_an_alarm_within_the_horizon_catches_the_event_and_all_others_before_onset_are_false() -> None:
    counts = count_alarms(predictions(), [0.5, 0.85], silence=0.001)
    # Watched: ann 0 to 5 and the hour after, bob's two stays, nothing of cid, who is ill already.
    np.testing.assert_allclose(counts.days * 24, [6, 3 + 2, 0])
    assert counts.events.tolist() == [1, 0, 0]
    # At .5 ann's alarms at 0 and 2 are false (more than 3 h ahead), those at 4 and 5 warn; bob has three.
    assert counts.caught.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert counts.warnings.tolist() == [[2, 0], [0, 0], [0, 0]]
    assert counts.false_alarms.tolist() == [[2, 1], [3, 1], [0, 0]]
    # The first warning is at hour 4, two hours ahead.
    assert counts.lead.tolist() == [[2, 0], [0, 0], [0, 0]]
    rates = counts.rates(np.ones((1, 3)))
    assert rates["events_caught"].tolist() == [[1, 0]]
    np.testing.assert_allclose(rates["false_alarms_per_day"], [[5 / (11 / 24), 2 / (11 / 24)]])
    assert rates["lead_hours"][0, 0] == 2
    assert rates["alarms_that_come_true"].tolist() == [[2 / 7, 0]]


def test_silence_after_an_alarm_counts_within_a_session_and_may_hide_a_warning() -> None:
    # Silent for 4 h from hour 0: the next alarm is at 4. Bob's stays are apart, so that both have one.
    counts = count_alarms(predictions(), 0.5, silence=4.0)
    assert counts.false_alarms[:, 0].tolist() == [1, 2, 0]
    assert counts.warnings[0, 0] == 1
    assert counts.lead[0, 0] == 2
    # Silent for 6 h: no alarm is raised before the onset, and the event is missed.
    assert count_alarms(predictions(), 0.5, silence=6.0).caught[0, 0] == 0
    # The horizon, 3 h, is what it is by default: alarms at 0 and 4.
    np.testing.assert_array_equal(count_alarms(predictions(), 0.5).lead, count_alarms(predictions(), 0.5, 3.0).lead)


def test_alarms_on_new_patients_keep_silence_within_each_session_in_the_order_of_time() -> None:
    event = EventSpec("onset", 3.0, 24.0)
    order = np.random.default_rng(0).permutation(len(HOUR))
    times, session, scores = (np.array(values)[order] for values in (HOUR, SESSION, SCORE))
    raised = np.empty(len(HOUR), bool)
    raised[order] = raise_alarms(event, times, session.astype(np.int64), scores, 0.5)
    # Ann: 0, then 4 (3 h of silence; 3 is below); bob: 0 and the other stay's 41; cid: 0.
    assert np.flatnonzero(raised).tolist() == [0, 4, 7, 11, 12]
    scores[order == 0] = np.nan
    raised[order] = raise_alarms(event, times, session.astype(np.int64), scores, 0.5)
    assert np.flatnonzero(raised).tolist() == [2, 5, 7, 11, 12]


def slowly(run: Predictions, threshold: float, silence: float) -> tuple[float, float, float, float]:
    """Events caught, warnings, false alarms and lead time by loops."""
    assert run.timing is not None
    caught, warnings, false, lead = 0, 0, 0, 0.0
    for session in np.unique(run.timing.session):
        rows = np.flatnonzero(run.timing.session == session)
        last, warned = -math.inf, False
        for row in rows[np.argsort(run.timing.times[rows], kind="stable")]:
            now, onset = run.timing.times[row], run.timing.onset[row]
            if now >= onset or run.probabilities[row, 1] < threshold or now - last < silence - 1e-9:
                continue
            last = now
            if onset - now <= run.timing.event.horizon + 1e-9:
                warnings += 1
                lead += 0.0 if warned else onset - now
                caught += not warned
                warned = True
            else:
                false += 1
    return caught, warnings, false, lead


@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.floats(0.5, 9.0))
@settings(max_examples=60, deadline=None)
def test_alarms_of_all_sessions_at_once_are_those_of_a_loop(seed: int, threshold: float, silence: float) -> None:
    rng = np.random.default_rng(seed)
    session = rng.integers(0, 7, 90)
    onset = np.where(rng.random(7) < 0.6, rng.integers(0, 30, 7), NAN)[session].astype(float)
    times, scores = rng.integers(0, 25, 90).astype(float), rng.random(90)
    timing = Timing(EventSpec("onset", 4.0, 24.0), times, onset, session)
    run = Predictions(
        BINARY, (onset - times <= 4).astype(int), np.stack([1 - scores, scores], axis=1), session // 2, timing=timing
    )
    counts = count_alarms(run, [0.99, threshold], silence)
    found = [each[:, 1].sum() for each in (counts.caught, counts.warnings, counts.false_alarms, counts.lead)]
    np.testing.assert_allclose(found, slowly(run, threshold, silence))


def test_the_curve_catches_no_fewer_events_for_more_false_alarms_and_keeps_each_budget() -> None:
    run = predictions()
    plan = PatientResampling(run.names, resamples=20)
    caught = [point.value.estimate for point in alarm_curve([run], plan, 0.001)["events_caught"]]
    assert caught == sorted(caught)
    # Ann's event costs the false alarms at .8 and above: one of hers and one of bob's, 4.4 a day.
    budgets = [point.at for point in alarm_curve([run], plan, 0.001)["events_caught"]]
    assert dict(zip(budgets, caught, strict=True))[4.0] == 0
    assert dict(zip(budgets, caught, strict=True))[8.0] == 1


def simple(scores: list[float], truth: list[int], threshold: float | None = None) -> Predictions:
    values = np.array(scores)
    who = np.array([f"P-{number % 3}" for number in range(len(scores))])
    return Predictions(BINARY, np.array(truth), np.stack([1 - values, values], axis=1), who, threshold)


VAL = simple([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], [1, 0, 1, 1, 0, 0, 1, 0])


@pytest.mark.parametrize(
    ("rule", "threshold", "words"),
    [
        # Three of four positives are at or above .6, all four at or above .3.
        ("sensitivity=.75", 0.55, "sensitivity=.75 on validation patients"),
        ("sensitivity=.76", 0.25, "sensitivity=.76 on validation patients"),
        # Precision from the top: 1, 1/2, 2/3, 3/4, 3/5, ...: the lowest threshold that keeps .7 is at .6.
        ("precision=.7", 0.55, "precision=.7 on validation patients"),
        ("precision=.76", 0.85, "precision=.76 on validation patients"),
    ],
)
def test_the_threshold_keeps_the_rule_on_validation_patients_at_the_least_cost(
    rule: str, threshold: float, words: str
) -> None:
    chosen, why = threshold_for(DecisionRule.parse(rule), VAL)
    assert chosen == pytest.approx(threshold)
    assert why == words
    decided = (VAL.probabilities[:, 1] >= chosen).astype(int)
    kept = recall_score if "sens" in rule else precision_score
    assert kept(VAL.truth, decided) >= DecisionRule.parse(rule).value


def test_of_thresholds_with_equal_sensitivity_a_precision_takes_the_one_with_the_fewest_false_positives() -> None:
    chosen, _ = threshold_for(DecisionRule.parse("precision=.3"), simple([0.9, 0.2, 0.1], [1, 0, 0]))
    assert chosen == pytest.approx(0.55)


def test_a_rule_that_no_threshold_keeps_is_said() -> None:
    val = simple([0.9, 0.8, 0.7], [0, 1, 0])
    chosen, why = threshold_for(DecisionRule.parse("precision=.9"), val)
    assert chosen == pytest.approx(0.75)
    assert why == (
        "precision=.9 is not reached on validation patients: the threshold with the highest precision there, 0.500"
    )
    with pytest.raises(DataError, match="no validation sample is positive"):
        threshold_for(DecisionRule.parse("sensitivity=.9"), simple([0.1, 0.2], [0, 0]))


def test_a_budget_of_alarms_buys_the_most_events_within_it() -> None:
    run = predictions()
    # .8 costs two false alarms in 11 h, 4.4 a day, and catches ann's event; .9 costs as many and catches none.
    chosen, why = threshold_for(DecisionRule.parse("alarms=5/day"), run, 0.001)
    assert chosen == 0.8
    assert why == "alarms=5/day (false alarms per patient-day) on validation patients"
    # No threshold costs less than two: the highest is taken, and it is said.
    chosen, why = threshold_for(DecisionRule.parse("alarms=1/day"), run, 0.001)
    assert chosen == 0.9
    assert "is exceeded at every threshold" in why
    assert "4.36 false alarms per patient-day" in why


@pytest.mark.parametrize(
    "text", ["sensitivity=90", "sensitivity=0", "recall=.9", "alarms=1", "precision=", "alarms=0/day"]
)
def test_a_rule_that_cannot_be_read_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sensitivity=.9, precision=.5"):
        TrainingConfig(at=text)


@pytest.mark.parametrize("text", ["6", "h", "-1h", "0min", "6 weeks"])
def test_a_silence_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 6h"):
        TrainingConfig(silence=text)
    assert duration("90min", "silence") == 5400


def test_rates_at_the_threshold_are_those_of_the_samples_before_onset() -> None:
    run = predictions()
    rates = {name: float(values[0]) for name, values in rates_at_threshold(run, np.ones((1, 3)), 0.001).items()}
    # Before onset: ann's hours 3, 4, 5 are positive, 4 and 5 reach .5; of 8 negative ones 5 reach it.
    assert rates["sensitivity"] == pytest.approx(2 / 3)
    assert rates["specificity"] == pytest.approx(3 / 8)
    assert rates["precision"] == pytest.approx(2 / 7)
    assert rates["negative_predictive_value"] == pytest.approx(3 / 4)
    assert rates["events_caught"] == 1
    # A patient counted twice counts twice.
    twice = rates_at_threshold(run, np.array([[2, 1, 1]]), 0.001)
    assert twice["specificity"][0] == pytest.approx((2 * 1 + 2) / (2 * 3 + 5))


def test_net_benefit_weighs_false_positives_by_the_odds_of_the_threshold() -> None:
    run = simple([0.9, 0.8, 0.3, 0.2], [1, 0, 1, 0])
    benefit = net_benefit(run, [0.25, 0.5], np.ones((1, 3)))
    # At .25: three acted on, two rightly: (2 - 1/3) / 4. At .5: one of two: (1 - 1) / 4.
    np.testing.assert_allclose(benefit["model"], [[(2 - 1 / 3) / 4, 0.0]])
    np.testing.assert_allclose(benefit["everybody"], [[(2 - 2 / 3) / 4, 0.0]])
    curve = decision_curve([run], PatientResampling(run.names, resamples=20))
    model, everybody, gain = (
        [point.value.estimate for point in curve[name]] for name in ("model", "everybody", "gain")
    )
    np.testing.assert_allclose(gain, np.array(model) - np.maximum(everybody, 0))


def grouped(seed: int = 0, shift: float = 0.0) -> Predictions:
    """Sixty patients of two groups; in the smaller one the scores may be of no use."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(60), 12)
    group = np.where(who < 40, "large", "small")
    truth = rng.integers(0, 2, len(who))
    score = np.clip(
        0.5 + (0.2 - shift * (group == "small")) * (2 * truth - 1) + rng.normal(0, 0.2, len(who)), 0.01, 0.99
    )
    names = np.array([f"P-{number:02d}" for number in who])
    return Predictions(BINARY, truth, np.stack([1 - score, score], axis=1), names, 0.5, subgroups={"g": group})


def test_groups_are_scored_by_themselves_and_tested_against_the_largest() -> None:
    run = grouped(shift=0.2)
    plan = PatientResampling(run.names, resamples=300)
    large, small = compare_groups([run], "g", plan)
    assert (large.group, large.patients, large.samples) == ("large", 40, 480)
    assert (small.group, small.patients, small.samples) == ("small", 20, 240)
    for part in (large, small):
        rows = run.subgroups["g"] == part.group
        wanted = roc_auc_score(run.truth[rows], run.probabilities[rows, 1])
        assert part.values["auroc"].estimate == pytest.approx(wanted)
        gap = run.probabilities[rows, 1].mean() - run.truth[rows].mean()
        assert part.values["calibration"].estimate == pytest.approx(gap)
        assert part.positive == pytest.approx(run.truth[rows].mean())
    assert not large.differences
    gap = small.differences["auroc"]
    assert gap.estimate == pytest.approx(small.values["auroc"].estimate - large.values["auroc"].estimate)
    assert gap.high < 0
    assert small.p["auroc"] < 0.05


def test_a_test_of_groups_that_do_not_differ_rejects_rarely() -> None:
    p = []
    for seed in range(40):
        run = grouped(seed)
        p.append(compare_groups([run], "g", PatientResampling(run.names, resamples=100))[1].p["auroc"])
    assert np.mean(np.array(p) < 0.05) <= 0.15


def test_a_group_of_one_or_two_patients_has_no_interval_and_no_p() -> None:
    """Drawn again and again, one patient is always the same: nothing would be surer than a group of one."""
    run = grouped()
    few = np.where(run.groups >= 58, "few", "many")
    plan = PatientResampling(run.names, resamples=50)
    small, _ = compare_groups([replace(run, subgroups={"g": few})], "g", plan)
    assert (small.group, small.patients) == ("few", 2)
    for interval in (small.values["auroc"], small.differences["auroc"], small.values["calibration"]):
        assert math.isfinite(interval.estimate)
        assert math.isnan(interval.low)
        assert interval.note == "no interval: 2 patients"
    assert all(math.isnan(p) for p in small.p.values())


def test_a_metric_that_exists_for_one_patient_of_a_group_has_no_interval_and_no_p() -> None:
    """Three runs test one patient of the group each; two of the three are never positive."""
    run = grouped()
    small = np.where(run.groups >= 57, "few", "many")
    truth = np.where(run.groups >= 58, 0, run.truth)
    whole = replace(run, truth=truth, subgroups={"g": small})
    runs = [whole.select((run.groups < 57) | (run.groups == number)) for number in (57, 58, 59)]
    few, _ = compare_groups(runs, "g", PatientResampling(run.names, resamples=50))
    assert (few.group, few.patients) == ("few", 3)
    for bounds in (few.values["auroc"], few.differences["auroc"]):
        assert math.isfinite(bounds.estimate)
        assert bounds.note == "no interval: 1 patient"
    assert math.isnan(few.p["auroc"])
    assert math.isfinite(few.values["calibration"].low)
    assert math.isfinite(few.p["calibration"])


def test_where_sites_were_split_they_are_drawn_first_here_too() -> None:
    run = grouped()
    sites: dict[str, Json] = {name: f"site {number // 20}" for number, name in enumerate(run.names.tolist())}
    by_patient, by_site = (evaluate([run], resamples=60, site_of=each) for each in (None, sites))
    few = evaluate([run], resamples=60, site_of=dict.fromkeys(sites, "one site"))
    whole = PatientResampling.of(run.names, sites, resamples=60)
    assert (whole.unit, whole.units, whole.drawn) == ("site", 3, "sites, then patients")
    assert by_site.at_threshold["sensitivity"] != by_patient.at_threshold["sensitivity"]
    assert few.at_threshold["sensitivity"].note == "no interval: 1 site"
    # Two of the three sites are of the large group, one of the small.
    assert by_site.subgroups["g"][1].values["auroc"].note == "no interval: 1 site"


def test_nothing_is_tested_against_a_group_of_one_site_however_many_patients_it_has() -> None:
    run = grouped()
    sites: dict[str, Json] = {
        name: "one" if number < 40 else f"site {number % 4}" for number, name in enumerate(run.names.tolist())
    }
    small = compare_groups([run], "g", PatientResampling.of(run.names, sites, resamples=60))[1]
    assert (small.group, small.differences["auroc"].note) == ("small", "no interval: 1 site")
    assert math.isfinite(small.values["auroc"].low)
    assert math.isnan(small.p["auroc"])


def test_groups_are_compared_on_the_runs_that_tested_both() -> None:
    """The small group is tested in the first run alone, and in the second the large one is easier."""
    run = grouped()
    large = run.select(run.subgroups["g"] == "large")
    easy = replace(large, probabilities=np.eye(2)[large.truth])
    alone = compare_groups([run], "g", PatientResampling(run.names, resamples=20))[1]
    both = compare_groups([run, easy], "g", PatientResampling(run.names, resamples=20))[1]
    assert both.differences["auroc"].estimate == pytest.approx(alone.differences["auroc"].estimate)


def test_calibration_of_a_patient_is_the_mean_probability_minus_what_came_true() -> None:
    run = Predictions(
        BINARY, np.array([1, 0, 1]), np.array([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]), np.array(["a", "a", "b"])
    )
    other = Predictions(BINARY, np.array([1]), np.array([[0.9, 0.1]]), np.array(["b"]))
    gaps = calibration_by_patient([run, other])
    assert gaps == {"a": pytest.approx(0.1), "b": pytest.approx((-0.5 - 0.9) / 2)}


def test_everything_is_json_and_survives_the_file_of_predictions(tmp_path: Path) -> None:
    run = predictions()
    write_predictions(tmp_path / "predictions.npz", {"val": run, "test": run})
    again = read_predictions(tmp_path / "predictions.npz", "test", BINARY, 0.5)
    first, second = (evaluate([each], resamples=20).to_json() for each in (run, again))
    assert first == second
    assert first["events"] == 1
    assert list(first["subgroups"]) == ["sex"]  # type: ignore[arg-type]
    # Several classes have no alarms and no net benefit, but groups and calibration.
    classes = target_of(TargetSpec("classes", ("a", "b", "c")))
    probabilities = np.tile([0.5, 0.3, 0.2], (14, 1))
    other = evaluate(
        [replace(run, target=classes, probabilities=probabilities, timing=None, threshold=None)], resamples=20
    )
    assert (other.at_threshold, other.alarms, other.decisions) == ({}, {}, {})
    # "a" is right of three of ann's seven hours, of all of bob's and of none of cid's.
    assert other.calibration["0.5"] == pytest.approx(0.5 - 3 / 7)


def test_predictions_after_the_onset_are_replaced_by_nothing_of_a_fold() -> None:
    run = predictions()
    kept = run.scored()
    changed = run.with_scored(np.full((len(kept.truth), 2), 0.5))
    begun = np.array(HOUR) >= np.array(ONSET)
    np.testing.assert_array_equal(changed.probabilities[begun], run.probabilities[begun])
    assert (changed.probabilities[~begun] == 0.5).all()


def test_candidates_are_scores_that_occur_the_highest_and_the_lowest_among_them() -> None:
    scores = np.random.default_rng(0).random(1000)
    cuts = candidate_thresholds(scores, 50)
    assert set(cuts) <= set(scores)
    assert (cuts[0], cuts[-1]) == (scores.min(), scores.max())
    assert (np.diff(cuts) > 0).all()
