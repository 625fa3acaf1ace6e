"""The bootstrap resamples patients; its metrics, intervals and coverage are checked against slow references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from manydg.data.info import TargetSpec
from manydg.errors import DataError
from manydg.evaluation.metrics import PatientMetrics, Predictions, score
from manydg.evaluation.statistics import (
    PatientResampling,
    bca_interval,
    patient_difference,
    patient_intervals,
    patient_weights,
    percentile_interval,
    shared_patient_values,
    site_weights,
)
from manydg.targets import Target, target_of


def _target(kind: str) -> Target:
    return target_of(TargetSpec(kind, tuple("abc"[: 2 if kind == "binary" else 3])))


def _predictions(kind: str, seed: int = 0, patients: int = 6, rows: int = 90, skill: float = 1.0) -> Predictions:
    rng = np.random.default_rng(seed)
    target = _target(kind)
    who = rng.integers(0, patients, rows)
    if kind == "multilabel":
        truth = (rng.random((rows, 3)) < 0.4).astype(int)
        probabilities = np.clip(rng.random((rows, 3)) * 0.6 + 0.3 * truth * skill, 0, 1)
    else:
        truth = rng.integers(0, target.size, rows)
        raw = 0.1 + rng.random((rows, target.size)).round(1)
        raw += skill * np.eye(target.size)[truth] * rng.random((rows, 1))
        probabilities = (raw / raw.sum(axis=1, keepdims=True)).round(1)  # ties
    return Predictions(target, truth, probabilities, np.array([f"P-{i}" for i in who]), threshold=0.45)


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_weighted_metrics_equal_metrics_of_the_repeated_patients_samples(kind: str) -> None:
    run = _predictions(kind)
    weights = patient_weights(len(run.names), 7, seed=3)
    found = PatientMetrics(run).weighted(weights)
    for i, row in enumerate(weights):
        rows = np.repeat(np.arange(len(run.truth)), row[run.groups])
        wanted = score(run.target, run.truth[rows], run.probabilities[rows], run.threshold)
        np.testing.assert_allclose([found[name][i] for name in wanted], list(wanted.values()), rtol=1e-9)


def test_every_resample_draws_as_many_patients_as_there_are() -> None:
    weights = patient_weights(9, 50, seed=0)
    assert weights.shape == (50, 9)
    assert (weights.sum(axis=1) == 9).all()
    assert (patient_weights(9, 50, seed=0) == weights).all()
    assert (patient_weights(9, 50, seed=1) != weights).any()


@pytest.mark.parametrize(("patients", "groups"), [(9, 9), (450, 200)])
def test_the_jackknife_leaves_every_patient_out_once(patients: int, groups: int) -> None:
    plan = PatientResampling(np.arange(patients), resamples=5)
    left_out = plan.weights[6:]
    assert len(left_out) == groups
    assert ((left_out == 0).sum(axis=0) == 1).all()
    assert (left_out == 0).any(axis=1).all()
    assert (plan.weights[0] == 1).all()


def test_the_bca_interval_is_that_of_scipy() -> None:
    """For a mean over patients with one value each, scipy's BCa differs only in its random draws."""
    values = np.random.default_rng(5).exponential(size=25)
    plan = PatientResampling(np.arange(25), resamples=40_000, seed=1)
    ours = plan.interval(plan.weights @ values / plan.weights.sum(axis=1))
    theirs = stats.bootstrap((values,), np.mean, n_resamples=40_000, method="BCa", rng=np.random.default_rng(2))
    assert ours.estimate == pytest.approx(values.mean())
    width = ours.high - ours.low
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02 * width)
    assert ours.high - ours.estimate > ours.estimate - ours.low  # skewed data: longer above


def test_the_percentile_interval_is_the_middle_of_the_draws() -> None:
    interval = percentile_interval(np.arange(101.0), 50.0, level=0.9)
    assert (interval.low, interval.high) == pytest.approx((5.0, 95.0))


def test_samples_of_one_patient_do_not_make_the_interval_narrow() -> None:
    """Copying every sample a hundred times adds no patient, so it must add no certainty."""
    few = _predictions("classes", patients=8, rows=80)
    many = Predictions(
        few.target, np.repeat(few.truth, 100), np.repeat(few.probabilities, 100, axis=0), np.repeat(few.patients, 100)
    )
    once, hundredfold = patient_intervals([few])["accuracy"], patient_intervals([many])["accuracy"]
    assert (once.low, once.high) == pytest.approx((hundredfold.low, hundredfold.high))


def _study(rng: np.random.Generator, patients: int, samples: int, alike: float = 1.0) -> Predictions:
    """Patients whose accuracies follow a beta distribution with mean 8/11; the smaller ``alike``, the more spread."""
    right = (rng.random((patients, samples)) < rng.beta(8 * alike, 3 * alike, patients)[:, None]).ravel()
    probabilities = np.where(right[:, None], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1])
    return Predictions(_target("classes"), np.zeros(len(right), int), probabilities, np.arange(len(right)) // samples)


def _covers(run: Predictions) -> bool:
    interval = patient_intervals([run], resamples=400)["accuracy"]
    return interval.low <= 8 / 11 <= interval.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    covered = np.mean([_covers(_study(rng, patients=40, samples=12)) for _ in range(300)])
    assert 0.92 <= covered <= 0.98


def test_resampling_samples_instead_of_patients_would_not_cover() -> None:
    """The control of the test above: call every sample a patient of its own and coverage falls."""
    rng = np.random.default_rng(12)
    runs = [_study(rng, patients=40, samples=8, alike=0.1) for _ in range(40)]
    as_samples = [Predictions(run.target, run.truth, run.probabilities, np.arange(len(run.truth))) for run in runs]
    assert np.mean([_covers(run) for run in as_samples]) < 0.8
    assert np.mean([_covers(run) for run in runs]) > 0.85


def test_a_person_tested_in_two_seeds_gets_one_weight() -> None:
    """Two identical runs of the same people are no more certain than one of them."""
    run = _predictions("classes", patients=10)
    one, two = patient_intervals([run]), patient_intervals([run, run])
    assert one["kappa"] == two["kappa"]


def test_a_person_s_weight_is_the_same_in_runs_of_other_people() -> None:
    """A run of the later half of the people has their columns of the weights, not the first ones."""
    run = _predictions("classes", patients=6)
    plan = PatientResampling(run.names, resamples=20)
    late = np.isin(run.patients, run.names[3:])
    part = Predictions(run.target, run.truth[late], run.probabilities[late], run.patients[late])
    wanted = PatientMetrics(part).weighted(plan.weights[:, 3:])["accuracy"]
    np.testing.assert_array_equal(plan.evaluate(part)["accuracy"], wanted)


def test_the_paired_difference_of_a_model_with_itself_is_nothing() -> None:
    run = _predictions("binary", patients=10)
    interval = patient_difference([run], [run])["auprc"]
    assert (interval.estimate, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_a_run_in_which_one_model_has_no_value_is_left_out_of_the_paired_difference() -> None:
    """Without a positive the F1 of a model that raises no alarm is undefined, and of one that does it is zero."""
    who, none, some = np.array(list("abcdefgh")), np.zeros(8, int), np.array([1, 0] * 4)
    target, always = _target("binary"), np.eye(2)[np.ones(8, int)]
    quiet, loud = (Predictions(target, none, np.eye(2)[[code] * 8], who) for code in (0, 1))
    right, wrong = (Predictions(target, some, each, np.char.add(who, "2")) for each in (np.eye(2)[some], always))
    assert patient_difference([quiet, right], [loud, wrong])["f1"].estimate == pytest.approx(1 - 2 / 3)


def test_the_paired_difference_is_tighter_than_the_difference_of_two_intervals() -> None:
    better = _predictions("classes", patients=20, rows=400, skill=1.2)
    worse_probabilities = better.probabilities.copy()
    worse_probabilities[::15] = np.roll(worse_probabilities[::15], 1, axis=1)
    worse = Predictions(better.target, better.truth, worse_probabilities, better.patients)
    gap = patient_difference([better], [worse])["accuracy"]
    alone = patient_intervals([better])["accuracy"]
    assert gap.estimate > 0
    assert gap.low > 0
    assert gap.high - gap.low < alone.high - alone.low


@pytest.mark.parametrize("patients", [1, 2])
def test_one_or_two_patients_give_no_interval_and_say_so(patients: int) -> None:
    run = _predictions("classes", patients=patients)
    interval = patient_intervals([run])["accuracy"]
    assert math.isnan(interval.low)
    assert f"{patients} patient" in interval.note


def test_a_metric_undefined_for_all_patients_has_no_interval() -> None:
    run = Predictions(_target("binary"), np.zeros(12, int), np.tile([0.7, 0.3], (12, 1)), np.arange(12))
    interval = patient_intervals([run], resamples=20)["auroc"]
    assert math.isnan(interval.estimate)
    assert "undefined" in interval.note


def test_draws_that_are_all_equal_give_an_interval_of_no_width() -> None:
    interval = bca_interval(np.ones(20), 1.0, np.ones(5))
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_draws_that_equal_the_estimate_count_half_for_the_bias() -> None:
    """Ten draws below, eighty equal, ten above: no bias, so the interval is the plain one where nothing is skewed."""
    draws = np.r_[np.zeros(10), np.ones(80), np.full(10, 2.0)]
    found = bca_interval(draws, 1.0, np.array([0.9, 1.0, 1.0, 1.1]), level=0.9)
    plain = percentile_interval(draws, 1.0, level=0.9)
    assert (found.low, found.high) == (plain.low, plain.high) == (0.0, 2.0)
    assert found.note == ""
    # Forty below and sixty equal: the bias is that of 0.7, and the interval moves up.
    skewed = np.r_[np.linspace(0, 0.9, 40), np.ones(60)]
    moved = bca_interval(skewed, 1.0, np.array([0.9, 1.0, 1.0, 1.1]), level=0.9)
    tails = stats.norm.cdf(2 * stats.norm.ppf(0.7) + stats.norm.ppf([0.05, 0.95]))
    assert (moved.low, moved.high) == pytest.approx(tuple(np.quantile(skewed, tails)))


def test_the_interval_does_not_depend_on_how_sums_are_rounded() -> None:
    """Tenths cannot be written in binary: draws of other patients with the same mean differ in the last bit."""
    plan, counts = PatientResampling(np.arange(7), resamples=4000), np.arange(1.0, 8.0)
    whole, tenths = plan.interval(plan.weights @ counts / 70), plan.interval(plan.weights @ (counts / 10) / 7)
    assert (tenths.low, tenths.high) == pytest.approx((whole.low, whole.high))


def test_an_estimate_outside_all_draws_falls_back_to_percentiles() -> None:
    assert bca_interval(np.arange(1.0, 21.0), 0.0, np.arange(5.0)).note.startswith("percentile interval")


def test_no_patients_cannot_be_resampled() -> None:
    with pytest.raises(DataError, match="needs patients"):
        PatientResampling(np.arange(0))


def test_a_patient_counts_once_by_the_mean_of_the_runs_that_tested_him() -> None:
    runs = {
        0: {"P-0": {"kappa": 0.0}, "P-1": {"kappa": 0.1}},
        1: {"P-0": {"kappa": 0.4}, "P-11": {"kappa": None}, "P-12": {"kappa": math.nan}},
    }
    assert shared_patient_values({"ours": runs}, "kappa")["ours"] == {"P-0": pytest.approx(0.2), "P-1": 0.1}
    assert shared_patient_values({"ours": {0: {}}}, "kappa") == {"ours": {}}
    assert shared_patient_values({}, "kappa") == {}


def test_models_are_compared_on_patients_and_runs_that_all_of_them_have() -> None:
    ours = {0: {"P-0": {"f1": 0.9}, "P-1": {"f1": 0.5}}, 1: {"P-0": {"f1": 0.1}, "P-2": {"f1": 0.3}}}
    theirs = {0: {"P-0": {"f1": 0.8}, "P-1": {"f1": None}}, 1: {"P-2": {"f1": 0.2}}}
    nowhere = {0: {"P-0": {"f1": None}}}
    values = shared_patient_values({"ours": ours, "theirs": theirs, "nowhere": nowhere}, "f1")
    # Of P-0 only the run counts that both have; P-1 is undefined for one of them.
    assert values == {"ours": {"P-0": 0.9, "P-2": 0.3}, "theirs": {"P-0": 0.8, "P-2": 0.2}, "nowhere": {}}


def test_sites_are_drawn_first_and_then_their_patients() -> None:
    sites = np.array(["A"] * 2 + ["B"] * 3 + ["C"] * 1)
    weights = site_weights(sites, 4000, seed=0)
    per_site = np.stack([weights[:, sites == name].sum(axis=1) for name in "ABC"], axis=1)
    # Every draw of a site brings as many draws of its patients as it has patients: whole sites come and go.
    drawn = per_site / np.array([2, 3, 1])
    assert (drawn == drawn.round()).all()
    assert (drawn.sum(axis=1) == 3).all()
    assert {tuple(row) for row in drawn.tolist()} >= {(1, 1, 1), (3, 0, 0), (0, 1, 2)}
    np.testing.assert_allclose(weights.mean(axis=0), 1.0, atol=0.06)
    # Within a site that is drawn once, patients differ from draw to draw.
    once = weights[drawn[:, 1] == 1][:, sites == "B"]
    assert {tuple(row) for row in once.tolist()} >= {(1, 1, 1), (3, 0, 0), (0, 1, 2)}


def test_where_sites_differ_intervals_for_new_sites_are_wider_than_for_new_patients() -> None:
    rng = np.random.default_rng(0)
    names, sites = np.array([f"P-{number:03d}" for number in range(200)]), np.repeat(np.arange(10), 20)
    value = rng.normal(size=10)[sites] + 0.1 * rng.normal(size=200)

    def width(plan: PatientResampling) -> float:
        means = (plan.weights @ value) / plan.weights.sum(axis=1)
        interval = plan.interval(means)
        return interval.high - interval.low

    by_patient, by_site = PatientResampling(names), PatientResampling(names, sites=sites)
    assert by_site.units == 10
    assert width(by_site) > 2 * width(by_patient)
    # About the width that ten independent means have.
    expected = 2 * 1.96 * np.array([value[sites == site].mean() for site in range(10)]).std() / math.sqrt(10)
    assert width(by_site) == pytest.approx(expected, rel=0.35)


def test_two_sites_give_no_interval() -> None:
    plan = PatientResampling(np.array(["P-1", "P-2", "P-3"]), sites=np.array(["A", "B", "B"]))
    assert plan.interval(np.ones(len(plan.weights))).note == "no interval: 2 sites"
