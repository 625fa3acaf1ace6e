"""What the page says about a difference follows from the test and the interval, and from nothing else."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.algorithms import ALGORITHMS
from manydg.config import TrainingConfig
from manydg.evaluation.statistics import Interval
from manydg.report.charts import rank_diagram
from manydg.report.results_folder import (
    RivalTest,
    defined_metric,
    epoch_curve,
    patient_values,
    seconds_per_epoch,
    spread,
)
from manydg.report.sections import similarity_in_words
from manydg.report.sections.comparison import difference_in_words, reading
from manydg.report.words import low_values, plural
from manydg.studies.figure_data import SimilarityRow
from manydg.training.record import EpochEntry, RunRecord

RECORD = RunRecord(run="f0", algorithm="manydg", seed=0, dataset="d", config=TrainingConfig())


def difference(gap: float, low: float, high: float, p: float) -> RivalTest:
    return RivalTest("base", gap, Interval(gap, low, high), p / 10, p, p, 1.0, 5, "")


@pytest.mark.parametrize(
    ("test", "said", "short"),
    [
        (difference(0.02, 0.01, 0.03, 0.01), "is larger than chance would explain (p = 0.010", "clearly better"),
        (difference(-0.02, -0.03, -0.01, 0.0001), "larger than chance would explain (p < 0.001", "clearly worse"),
        (difference(0.02, -0.01, 0.05, 0.01), "may or may not be more than chance", "not certain"),
        (difference(0.02, 0.01, 0.03, 0.2), "may or may not be more than chance", "not certain"),
        (difference(0.002, -0.01, 0.01, 0.8), "too small to tell from chance (p = 0.800", "no clear difference"),
        (difference(0.02, math.nan, math.nan, math.nan), "could not be tested", "not tested"),
        (difference(0.02, 0.01, 0.03, math.nan), "could not be tested", "not tested"),
    ],
)
def test_words_follow_test_and_interval(test: RivalTest, said: str, short: str) -> None:
    assert said in difference_in_words(test)
    assert reading(test) == short


@settings(max_examples=60)
@given(
    st.floats(-0.2, 0.2), st.floats(0, 0.2), st.floats(0, 0.2), st.one_of(st.floats(0, 1), st.just(math.nan))
)  # fmt: skip
def test_clearly_is_never_said_of_a_difference_that_chance_explains(
    gap: float, below: float, above: float, p: float
) -> None:
    test = difference(gap, gap - below, gap + above, p)
    if "clearly" in reading(test):
        assert p < 0.05
        assert gap - below > 0 or gap + above < 0
    if math.isnan(p) or p >= 0.05:
        assert "larger than chance would explain" not in difference_in_words(test)


def test_z_that_is_alike_for_all_patients_is_called_so() -> None:
    alike = similarity_in_words([SimilarityRow("test patients", 0.992, 0.989)])
    apart = similarity_in_words([SimilarityRow("test patients", 0.9, 0.3)])
    assert "hardly tells them apart" in alike
    assert "more alike within a patient" in apart


def test_spread_leaves_out_what_is_undefined() -> None:
    result = spread([1.0, None, math.nan, 2.0])
    assert (result.mean, result.count) == (1.5, 2)
    assert result.sd == pytest.approx(math.sqrt(0.5))
    assert math.isnan(spread([None]).mean)


def test_a_patient_counts_once_however_many_splits_tested_him() -> None:
    runs = [
        RECORD.replace(per_patient={"P-00aa": {"kappa": 0.2}, "P-00ab": {"kappa": None}}),
        RECORD.replace(seed=1, per_patient={"P-00aa": {"kappa": 0.4}}),
    ]
    assert patient_values({"manydg": runs}, "kappa") == {"manydg": {"P-00aa": pytest.approx(0.3)}}


def test_a_metric_that_most_patients_lack_is_passed_over() -> None:
    people = {f"P-00{n:02d}": {"auprc": None if n else 0.5, "kappa": 0.1} for n in range(4)}
    runs = {"manydg": [RECORD.replace(per_patient=people)]}
    assert defined_metric(runs, ["auprc", "kappa"]) == "kappa"
    assert defined_metric(runs, ["auprc"]) is None


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0.0, 0.0004, 0.1, 0.25, 0.5, 0.7512, 1.0]), min_size=1, max_size=40))
def test_what_is_said_of_the_worst_off_patients_is_true_by_counting(values: list[float]) -> None:
    words = low_values(values, "kappa")
    shown = [round(value, 3) for value in values]
    lowest = min(shown)
    if match := re.match(r"(\d+) of (\d+) patients have kappa above ([\d.]+); the lowest has ([\d.]+)$", words):
        bound = float(match[3])
        assert (int(match[1]), int(match[2])) == (sum(value > bound for value in shown), len(values))
        assert shown.count(bound) < 2
        assert float(match[4]) == lowest < bound
    elif match := re.match(r"(\d+) of (\d+) patients have kappa ([\d.]+) or less; the lowest has ([\d.]+)$", words):
        bound = float(match[3])
        assert (int(match[1]), int(match[2])) == (sum(value <= bound for value in shown), len(values))
        assert float(match[4]) == lowest < bound
    elif match := re.match(r"(\d+) of (\d+) patients share the lowest kappa, ([\d.]+)$", words):
        assert (int(match[1]), int(match[2]), float(match[3])) == (shown.count(lowest), len(values), lowest)
    elif match := re.match(r"the lowest kappa of (\d+) patients is ([\d.]+)$", words):
        assert (int(match[1]), float(match[2])) == (len(values), lowest)
    else:
        assert words == f"every one of {plural(len(values), 'patient')} has kappa {lowest:.3f}"
        assert set(shown) == {lowest}


def test_nothing_is_above_a_quantile_that_a_fifth_of_the_patients_share() -> None:
    words = low_values([0.0] * 6 + [0.5 + 0.01 * n for n in range(24)], "kappa")
    assert words == "6 of 30 patients share the lowest kappa, 0.000"


def test_an_epoch_curve_is_the_mean_of_the_runs_that_reached_the_epoch() -> None:
    runs = [
        RECORD.replace(history=(EpochEntry(1, {}, {"kappa": 0.2}, 1.0), EpochEntry(2, {}, {"kappa": 0.6}, 1.0))),
        RECORD.replace(history=(EpochEntry(1, {}, {"kappa": 0.4}, 1.0),)),
    ]
    x, mean, *_ = epoch_curve(runs, lambda entry: entry.val["kappa"])
    assert x.tolist() == [1, 2]
    assert mean.tolist() == pytest.approx([0.3, 0.6])


@pytest.mark.parametrize(("epochs", "mean"), [([9.0], 9.0), ([9.0, 5.0, 1.0], 1.0), ([9.0, 5.0, 3.0, 1.0, 2.0], 1.5)])
def test_the_first_epochs_are_left_out_of_the_time_of_one(epochs: list[float], mean: float) -> None:
    history = tuple(EpochEntry(number, {}, {}, seconds) for number, seconds in enumerate(epochs, start=1))
    assert seconds_per_epoch(RECORD.replace(history=history)) == mean


def test_every_algorithm_has_a_name_to_be_read() -> None:
    assert all(ALGORITHMS.get(name).title and ALGORITHMS.get(name).summary for name in ALGORITHMS.names())


def test_of_models_that_no_bar_joins_only_neighbours_are_said_to_differ() -> None:
    """The first and the last may be alike where both differ from the one between them."""
    assert rank_diagram("Ranks", ["a", "b", "c"], [1.2, 1.9, 2.9], []).words.endswith("Every two neighbours differ.")
