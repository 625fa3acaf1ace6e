"""The recommendation comes from validation patients; a clearly cheaper model within one standard error wins."""

from __future__ import annotations

import itertools
import math

import pytest

from manydg.config import TrainingConfig
from manydg.data.info import TargetSpec
from manydg.studies.summary import Cost, recommend, summarize
from manydg.studies.summary_text import recommendation_text
from manydg.training.record import Counts, RunRecord

CHEAP = Cost(10.0, 100, 1.0, "none", "cpu")
DEAR = Cost(90.0, 900, 9.0, "none", "cpu")
IN_CONTEXT = Cost(1.0, 10, 1.0, "offline", "cpu")


def test_a_model_that_is_better_on_every_split_is_recommended_whatever_it_costs() -> None:
    validation = {"dear": {0: 0.80, 1: 0.82, 2: 0.81}, "cheap": {0: 0.70, 1: 0.71, 2: 0.71}}
    choice = recommend(validation, {"dear": DEAR, "cheap": CHEAP}, 0.2)
    assert choice is not None
    assert (choice.row, choice.best, choice.tied) == ("dear", "dear", ("dear",))


def test_within_one_standard_error_the_cheaper_model_is_recommended() -> None:
    validation = {"dear": {0: 0.80, 1: 0.70, 2: 0.75}, "cheap": {0: 0.74, 1: 0.72, 2: 0.76}}
    choice = recommend(validation, {"dear": DEAR, "cheap": CHEAP}, 0.2)
    assert choice is not None
    gaps = [0.06, -0.02, -0.01]
    mean = sum(gaps) / 3
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2)
    assert choice.gap("cheap") == pytest.approx(mean)
    assert choice.errors["cheap"] == pytest.approx(spread * math.sqrt(1 / 3 + 0.2))
    assert (choice.row, choice.best) == ("cheap", "dear")
    assert choice.by_split == {0: "dear", 1: "cheap", 2: "cheap"}


def test_a_model_that_failed_on_most_splits_neither_wins_nor_takes_the_others_splits_away() -> None:
    validation = {"a": {0: 0.7, 1: 0.8, 2: 0.9}, "b": {0: 0.6, 1: 0.7, 2: 0.8}, "failed": {0: 0.95}}
    choice = recommend(validation, dict.fromkeys(validation, CHEAP), 0.2)
    assert choice is not None
    assert (choice.row, choice.splits) == ("a", 3)
    assert "failed" not in choice.validation
    half = recommend({**validation, "failed": {0: 0.95, 1: 0.95}}, dict.fromkeys(validation, CHEAP), 0.2)
    assert half is not None
    assert (half.row, half.splits) == ("failed", 2)


def test_seconds_that_differ_by_chance_decide_nothing() -> None:
    validation = {"good": {0: 0.80, 1: 0.70, 2: 0.75}, "other": {0: 0.74, 1: 0.72, 2: 0.76}}
    for good, other in ((10.0, 6.0), (10.0, 9.0), (10.0, 11.0), (10.0, 19.0), (0.1, 0.04), (0.9, 0.1)):
        choice = recommend(
            validation, {"good": Cost(good, 1, 1, "none", ""), "other": Cost(other, 1, 1, "none", "")}, 0.2
        )
        assert choice is not None
        assert (choice.row, choice.tied) == ("good", ("good", "other"))


def test_a_model_that_needs_context_is_never_the_cheaper_one() -> None:
    same = {0: 0.7, 1: 0.72}
    choice = recommend({"context": same, "dear": same}, {"context": IN_CONTEXT, "dear": DEAR}, None)
    assert choice is not None
    assert choice.row == "dear"


def test_one_split_has_no_standard_error_so_that_the_best_on_validation_is_recommended() -> None:
    choice = recommend({"dear": {0: 0.71}, "cheap": {0: 0.70}}, {"dear": DEAR, "cheap": CHEAP}, 0.2)
    assert choice is not None
    assert (choice.row, choice.tied) == ("dear", ("dear",))


def test_splits_that_a_model_lacks_are_left_out_for_all() -> None:
    validation = {"dear": {0: 0.9, 1: 0.5, 2: 0.5}, "cheap": {1: 0.6, 2: 0.6, 3: math.nan}, "none": {}}
    choice = recommend(validation, {"dear": DEAR, "cheap": CHEAP, "none": CHEAP}, None)
    assert choice is not None
    assert (choice.row, choice.splits) == ("cheap", 2)
    assert choice.validation == {"dear": 0.5, "cheap": pytest.approx(0.6)}


def test_a_single_model_is_no_choice() -> None:
    assert recommend({"dear": {0: 0.9}}, {"dear": DEAR}, None) is None


def record(algorithm: str, seed: int, val: float, test: float) -> RunRecord:
    return RunRecord(
        run=f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, dataset="d", config=TrainingConfig(algorithm),
        experiment="compare", target=TargetSpec("classes", ("a", "b", "c")), patients=Counts(60, 20, 20),
        samples=Counts(600, 200, 200), val={"kappa": val}, test={"kappa": test, "accuracy": test}, seconds=10.0,
        predict_seconds=0.5, parameters=1000,
    )  # fmt: skip


def test_test_patients_have_no_part_in_the_choice() -> None:
    records = [record("manydg", seed, 0.8, 0.1) for seed in range(3)] + [
        record("base", seed, 0.5, 0.9) for seed in range(3)
    ]
    choice = summarize(records).recommendation
    assert choice is not None
    assert choice.row == "manydg"


def test_models_are_compared_by_the_metric_that_chose_their_epochs() -> None:
    """By accuracy, where the runs say so; by the target's own, where they differ or say nothing."""

    def runs(*selection: str | None) -> list[RunRecord]:
        each = [record("manydg", seed, 0.8, 0.3) for seed in range(2)]
        each += [record("base", seed, 0.5, 0.9) for seed in range(2)]
        options = itertools.cycle(TrainingConfig(selection=metric) for metric in selection)
        return [
            run.replace(val={**run.val, "accuracy": 1 - float(run.val["kappa"] or 0)}, config=config)
            for run, config in zip(each, options, strict=False)
        ]

    for selection, metric, chosen in (
        (("accuracy",), "accuracy", "base"),
        (("accuracy", "f1_macro"), "kappa", "manydg"),
        ((None,), "kappa", "manydg"),
    ):
        summary = summarize(runs(*selection))
        assert summary.primary == metric
        assert summary.recommendation is not None
        assert summary.recommendation.row == chosen


def test_the_splits_that_a_choice_is_of_are_said() -> None:
    records = [record(name, seed, 0.8, 0.3) for name in ("manydg", "base") for seed in range(2)]
    failed = records[-1].replace(status="failed", error="out of memory", val={}, test={})
    for runs, said in (
        (records, ""),
        ([*records[:-1], failed], ", over the 1 of 2 splits that all models have"),
        (records[::2], ", and only one split was run"),
    ):
        assert recommendation_text(summarize(runs)).partition(", 0.8000")[2].startswith(f"{said}).")


def test_a_control_is_compared_with_and_never_recommended() -> None:
    values = {"manydg": 0.6, "base": 0.5, "prototype": 0.8, "manydg-random-pairs": 0.9}
    records = [record(name, seed, value, value) for name, value in values.items() for seed in range(3)]
    choice = summarize(records).recommendation
    assert choice is not None
    assert (choice.row, set(choice.validation)) == ("manydg", {"manydg", "base"})


def test_the_cost_of_a_model_is_that_of_its_runs() -> None:
    cost = Cost.of([record("base", seed, 0.5, 0.5) for seed in range(3)])
    assert (cost.seconds, cost.parameters, cost.context) == (10.0, 1000, "none")
    assert cost.predict_ms == pytest.approx(500.0)


def test_every_pair_is_tested_and_corrected_for_all_pairs() -> None:
    values = {"manydg": (0.70, 0.72, 0.75), "base": (0.60, 0.66, 0.64), "dann": (0.65, 0.60, 0.71)}
    records = [record(name, seed, value, value) for name, each in values.items() for seed, value in enumerate(each)]
    summary = summarize(records, reference="base")
    assert summary.reference == "base"
    assert {(pair.first, pair.second) for pair in summary.pairs} == {
        ("base", "dann"),
        ("base", "manydg"),
        ("dann", "manydg"),
    }
    raw = sorted(pair.comparison.corrected_p for pair in summary.pairs)
    adjusted = sorted(pair.adjusted["corrected"] for pair in summary.pairs)
    assert adjusted[0] == pytest.approx(3 * raw[0])
    against = {row: summary.entries[row, "kappa"].comparison for row in ("dann", "manydg")}
    for pair in summary.pairs:
        if pair.first == "base":
            assert pair.comparison == against[pair.second]
