"""Prediction sets: thresholds by hand, and what they promise on simulated patients who differ."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from manydg.data.info import TargetSpec
from manydg.errors import DataError
from manydg.evaluation.trust import (
    SetRule,
    conformal_scores,
    covered,
    fit_for_most_patients,
    fit_on_average,
    patient_coverage,
    prediction_interval,
    prediction_sets,
)
from manydg.targets import Target, target_of

KINDS = ["classes", "binary", "multilabel", "regression"]


def _target(kind: str, size: int) -> Target:
    return target_of(TargetSpec(kind, tuple(f"c{i}" for i in range(size))))


def _patients(rng: np.random.Generator, kind: str, count: int) -> tuple[Target, np.ndarray, np.ndarray, np.ndarray]:
    """Patients who differ in their number of samples and in how wrong the model is about them."""
    sizes = rng.integers(5, 40, count)
    who = np.repeat(np.arange(count), sizes)
    size = 2 if kind == "binary" else 3
    noise = rng.gamma(1.0, size=count)[who]
    if kind == "regression":
        truth = 50 + 10 * rng.normal(size=len(who))
        return _target(kind, 1), truth, (truth + noise * rng.normal(size=len(who)))[:, None], who
    logits = rng.normal(size=(len(who), size)) * 1.5
    shown = logits + noise[:, None] * rng.normal(size=logits.shape)
    if kind == "multilabel":
        truth = (rng.random(logits.shape) < special.expit(logits)).astype(int)
        return _target(kind, size), truth, special.expit(shown), who
    true = special.softmax(logits, axis=1).cumsum(axis=1)
    truth = (rng.random((len(who), 1)) > true).sum(axis=1).clip(max=size - 1)
    return _target(kind, size), truth, special.softmax(shown, axis=1), who


def test_scores_are_one_minus_the_probability_of_the_truth() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    np.testing.assert_allclose(conformal_scores(_target("classes", 3), np.array([0, 1]), probabilities), [[0.3], [0.7]])
    labels = conformal_scores(_target("multilabel", 3), np.array([[1, 0, 0], [0, 0, 1]]), probabilities)
    np.testing.assert_allclose(labels, [[0.3, 0.2, 0.1], [0.1, 0.3, 0.4]])


def test_the_average_rule_by_hand() -> None:
    """Two patients with 1 and 4 samples: masses 1/3 and 1/12 each, and a third of a mass at infinity."""
    target = _target("classes", 2)
    scores = np.array([0.5, 0.1, 0.2, 0.3, 0.4])
    probabilities = np.stack([1 - scores, scores], axis=1)
    who = np.array([7, 3, 3, 3, 3])
    truth = np.zeros(5, int)
    for coverage, threshold in ((1 / 12, 0.1), (0.25, 0.3), (1 / 3, 0.4), (0.34, 0.5), (0.6, 0.5)):
        rule = fit_on_average(target, truth, probabilities, who, coverage)
        assert rule.thresholds == pytest.approx([threshold])
        assert rule.level == coverage
    # Two patients cannot promise more than two thirds.
    assert fit_on_average(target, truth, probabilities, who, 0.9).level == pytest.approx(2 / 3)


def test_the_rule_for_most_patients_by_hand() -> None:
    """Four samples of each of four patients; half of each: the second smallest score of each, then 3 of 5."""
    target = _target("classes", 2)
    scores = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 0.05, 0.3, 0.4], [0.2, 0.35, 0.4, 0.45], [0.3, 0.4, 0.4, 0.5]])
    flat = scores.ravel()
    rule = fit_for_most_patients(
        target, np.zeros(16, int), np.stack([1 - flat, flat], axis=1), np.repeat(np.arange(4), 4), 0.5, 0.6
    )
    # Own thresholds 0.2, 0.05, 0.35 and 0.4: the third smallest is 0.35.
    assert rule.thresholds == pytest.approx([0.35])
    assert (rule.level, rule.share) == (0.5, pytest.approx(0.6))


def test_a_set_holds_what_is_within_the_threshold_and_always_the_likeliest() -> None:
    probabilities = np.array([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]])
    sets = prediction_sets(_target("classes", 3), probabilities, SetRule(np.array([0.7]), 0.9))
    assert sets.tolist() == [[True, True, False], [True, True, False]]
    strict = prediction_sets(_target("classes", 3), probabilities, SetRule(np.array([0.1]), 0.9))
    assert strict.tolist() == [[True, False, False], [True, False, False]]
    labels = prediction_sets(_target("multilabel", 3), probabilities, SetRule(np.array([0.0, 0.7, 0.8]), 0.9))
    assert labels.tolist() == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize("kind", KINDS)
def test_on_average_new_patients_are_covered_as_promised(kind: str) -> None:
    """400 studies of 20 calibration patients and one new one: the mean coverage of the new is 90% or a little more."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(400):
        target, truth, probabilities, who = _patients(rng, kind, 21)
        old, new = who < 20, who == 20
        rule = fit_on_average(target, truth[old], probabilities[old], who[old])
        found.append(covered(target, truth[new], probabilities[new], rule).mean())
    error = np.std(found) / np.sqrt(len(found))
    assert np.mean(found) > 0.9 - 2.5 * error
    # Not by sets that hold everything: with 20 patients the promise exceeds the level by a few points at most.
    assert np.mean(found) < 0.97


def test_a_rare_class_is_covered_as_promised_too() -> None:
    """One sample in ten is of the second class and the model hardly sees it; a rule for both would never name it."""
    rng = np.random.default_rng(8)
    target, found = _target("binary", 2), []
    for _ in range(200):
        who = np.repeat(np.arange(41), 30)
        truth = (rng.random(len(who)) < 0.1).astype(int)
        chance = special.expit(-2.5 + truth + rng.normal(size=41)[who] * 0.5 + rng.normal(size=len(who)))
        probabilities = np.stack([1 - chance, chance], axis=1)
        old = who < 40
        rule = fit_on_average(target, truth[old], probabilities[old], who[old])
        hit = covered(target, truth, probabilities, rule)[:, 0]
        together = SetRule(np.quantile(conformal_scores(target, truth, probabilities), [0.9]), 0.9)
        missed = covered(target, truth, probabilities, together)[:, 0]
        rare = ~old & (truth == 1)
        if rare.any():
            found.append([hit[rare].mean(), hit[~old & (truth == 0)].mean(), missed[rare].mean()])
    rare, common, together_rare = np.mean(found, axis=0)
    errors = np.std(found, axis=0) / np.sqrt(len(found))
    assert rare > 0.9 - 2.5 * errors[0]
    assert common > 0.9 - 2.5 * errors[1]
    assert together_rare < 0.5


def test_a_class_that_too_few_patients_have_is_never_ruled_out() -> None:
    who, truth = np.arange(30), np.r_[np.ones(8, int), np.zeros(22, int)]
    probabilities = np.tile([0.999, 0.001], (30, 1))
    rule = fit_on_average(_target("binary", 2), truth, probabilities, who)
    assert rule.thresholds[1] == 1.0
    assert prediction_sets(_target("binary", 2), probabilities, rule).all()


@pytest.mark.parametrize("kind", ["classes", "binary"])
def test_most_new_patients_are_covered_as_promised(kind: str) -> None:
    rng = np.random.default_rng(6)
    enough = []
    for _ in range(400):
        target, truth, probabilities, who = _patients(rng, kind, 20)
        old, new = who < 19, who == 19
        rule = fit_for_most_patients(target, truth[old], probabilities[old], who[old])
        enough.append(covered(target, truth[new], probabilities[new], rule).mean() >= 0.9)
    # Sixteen of twenty places: 0.8 exactly, but for ties and the likeliest class that every set holds.
    assert np.mean(enough) > 0.8 - 2.5 * np.sqrt(0.8 * 0.2 / 400)
    assert np.mean(enough) < 0.95


def test_counting_samples_instead_of_patients_would_promise_too_much() -> None:
    """A few patients with many easy samples must not hide that most patients are hard."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(200):
        hard = rng.random(31) < 0.8
        sizes = np.where(hard, 4, 400)
        who = np.repeat(np.arange(31), sizes)
        score = rng.random(len(who)) * np.where(hard[who], 1.0, 0.1)
        probabilities = np.stack([1 - score, score], axis=1)
        truth, target, old = np.zeros(len(who), int), _target("classes", 2), who < 30
        rule = fit_on_average(target, truth[old], probabilities[old], who[old])
        pooled = SetRule(np.quantile(score[old], [0.9]), 0.9)
        new = who == 30
        found.append([(score[new] <= one.thresholds[0]).mean() for one in (rule, pooled)])
    by_patient, by_sample = np.mean(found, axis=0)
    assert by_patient > 0.88
    assert by_sample < 0.5


def test_coverage_is_told_for_each_patient() -> None:
    target, rule = _target("classes", 3), SetRule(np.array([0.75]), 0.9)
    probabilities = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
    found = patient_coverage(target, np.array([1, 2, 0]), probabilities, np.array([4, 4, 9]), rule)
    assert found == {4: {"coverage": 0.5, "size": 2.0}, 9: {"coverage": 1.0, "size": 1.0}}


def test_what_cannot_be_calibrated_is_refused() -> None:
    target = _target("binary", 2)
    with pytest.raises(DataError, match="at least one calibration patient"):
        fit_on_average(target, np.zeros(0, int), np.zeros((0, 2)), np.zeros(0, int))
    with pytest.raises(DataError, match="lies between 0 and 1"):
        fit_on_average(target, np.zeros(1, int), np.ones((1, 2)), np.zeros(1, int), 1.0)


def test_the_rule_for_most_patients_ranks_the_new_patient_too() -> None:
    """One sample a patient, scores 0.1 to 0.5. Four fifths of five patients and a new one: the fifth of six ranks."""
    target, scores = _target("classes", 2), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    probabilities, truth = np.stack([1 - scores, scores], axis=1), np.zeros(5, int)
    rule = fit_for_most_patients(target, truth, probabilities, np.arange(5), share=0.8)
    assert rule.thresholds.tolist() == pytest.approx([0.5])
    assert rule.share == 0.8
    # Eight of ten ranks: the eighth of nine patients.
    many = np.arange(1, 10) / 20
    rule = fit_for_most_patients(target, np.zeros(9, int), np.stack([1 - many, many], axis=1), np.arange(9), share=0.8)
    assert rule.thresholds.tolist() == pytest.approx([0.4])


def test_two_patients_promise_two_thirds_at_most() -> None:
    target, probabilities = _target("classes", 2), np.array([[0.9, 0.1], [0.7, 0.3]])
    rule = fit_for_most_patients(target, np.zeros(2, int), probabilities, np.arange(2), share=0.8)
    assert rule.thresholds.tolist() == pytest.approx([0.3])
    assert rule.share == pytest.approx(2 / 3)
    assert fit_on_average(target, np.zeros(2, int), probabilities, np.arange(2)).level == pytest.approx(2 / 3)


def test_a_patient_s_own_threshold_covers_the_level_of_the_patient_s_samples() -> None:
    """Three samples, 0.9 of them: all three, so the largest score."""
    target, scores = _target("classes", 2), np.array([0.1, 0.2, 0.3])
    rule = fit_for_most_patients(target, np.zeros(3, int), np.stack([1 - scores, scores], axis=1), np.zeros(3, int))
    assert rule.thresholds.tolist() == pytest.approx([0.3])


def test_an_interval_is_the_prediction_plus_or_minus_the_threshold() -> None:
    target, rule = _target("regression", 1), SetRule(np.array([2.0]), 0.9)
    values = np.array([[10.0], [20.0]])
    assert prediction_interval(values, rule).tolist() == [[8.0, 12.0], [18.0, 22.0]]
    assert conformal_scores(target, np.array([13.0, 20.5]), values).tolist() == [[3.0], [0.5]]
    assert covered(target, np.array([13.0, 22.0]), values, rule).tolist() == [[False], [True]]
    told = patient_coverage(target, np.array([13.0, 22.0]), values, np.array([4, 4]), rule)
    assert told == {4: {"coverage": 0.5, "size": 4.0}}
