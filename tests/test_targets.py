"""Each kind of label: loss, prototype, probabilities, and what does not fit; with the paper's examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from manydg.data.info import TargetSpec
from manydg.errors import ConfigError, DataError
from manydg.targets import Binary, Classes, MultiLabel, Regression, Target, Votes, oriented, target_of

LABELS = ("seizure", "lpd", "gpd", "lrda", "grda", "other")
PAPERS_VOTES = torch.tensor([[8.0, 0.0, 5.0, 3.0, 2.0, 1.0]])
few = settings(max_examples=30, deadline=None)


def votes() -> Votes:
    return Votes(TargetSpec("votes", LABELS))


def logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probabilities(values: torch.Tensor) -> np.ndarray:
    """A softmax's logarithm in plain NumPy."""
    array = values.numpy()
    return array - np.log(np.exp(array).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("kind", "cls"), [("classes", Classes), ("votes", Votes), ("binary", Binary), ("multilabel", MultiLabel)]
)
def test_a_dataset_gets_the_target_of_its_kind(kind: str, cls: type[Target]) -> None:
    target = target_of(TargetSpec(kind, ("no", "yes")))
    assert type(target) is cls
    assert (target.kind, target.size) == (kind, 2)
    assert target.selection in target.metrics


def test_each_kind_reports_the_papers_metrics() -> None:
    assert Classes.metrics == Votes.metrics == ("accuracy", "kappa", "f1_macro")
    assert Binary.metrics[:3] == ("auprc", "f1", "kappa")
    assert MultiLabel.metrics == ("jaccard", "auprc_samples", "f1_samples")


# One class of several


def test_the_loss_of_classes_is_minus_the_log_probability_of_the_label() -> None:
    target = Classes(TargetSpec("classes", LABELS))
    values, labels = logits(4, 6), torch.tensor([0, 5, 2, 2])
    expected = [-log_probabilities(values)[row, label] for row, label in enumerate(labels.tolist())]
    assert target.loss_per_sample(values, labels).tolist() == pytest.approx(expected)
    assert float(target.loss(values, labels)) == pytest.approx(np.mean(expected))


def test_the_prototype_of_a_class_is_its_own() -> None:
    target = Classes(TargetSpec("classes", LABELS))
    prototypes = logits(6, 3)
    assert torch.equal(target.label_prototype(prototypes, torch.tensor([4, 0])), prototypes[[4, 0]])
    assert target.truth(torch.tensor([4, 0])).tolist() == [4, 0]
    assert target.probabilities(logits(5, 6)).sum(dim=1).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 6], "target 6 is outside 0 to 5"),
        ([0, -1], "target -1 is outside"),
        ([0.0, 1.0], "whole numbers"),
        ([[0], [1]], r"one per sample; got \(2, 1\)"),
    ],
)
def test_labels_outside_the_classes_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Classes(TargetSpec("classes", LABELS)).check(torch.tensor(labels))


# Expert votes


def test_the_papers_votes_make_the_first_and_third_class_valid() -> None:
    assert votes().distribution(PAPERS_VOTES).tolist() == [[0.5, 0, 0.5, 0, 0, 0]]
    assert votes().truth(PAPERS_VOTES).tolist() == [0]


def test_exactly_half_of_the_top_votes_is_not_valid() -> None:
    tied = torch.tensor([[8.0, 4.0, 5.0, 0.0, 0.0, 0.0], [7.0, 4.0, 3.0, 0.0, 0.0, 0.0]])
    assert votes().distribution(tied).tolist() == [[0.5, 0, 0.5, 0, 0, 0], [0.5, 0.5, 0, 0, 0, 0]]


def test_whole_number_votes_are_halved_without_rounding() -> None:
    # Half of 5 is 2.5: two votes are too few, three are enough.
    whole = torch.tensor([[5, 2, 3, 0, 0, 0]])
    assert votes().distribution(whole).tolist() == [[0.5, 0, 0.5, 0, 0, 0]]


def test_the_loss_of_votes_is_the_mean_cross_entropy_over_the_valid_classes() -> None:
    values = logits(1, 6)
    expected = -(log_probabilities(values)[0, 0] + log_probabilities(values)[0, 2]) / 2
    assert float(votes().loss(values, PAPERS_VOTES)) == pytest.approx(expected)


@few
@given(st.integers(0, 5), st.integers(1, 30), st.integers(0, 100))
def test_votes_that_agree_reduce_to_cross_entropy(label: int, count: int, seed: int) -> None:
    given_votes = torch.zeros(1, 6)
    given_votes[0, label] = count
    values = logits(1, 6, seed)
    expected = functional.cross_entropy(values, torch.tensor([label]))
    assert float(votes().loss(values, given_votes)) == pytest.approx(float(expected))


@few
@given(st.lists(st.lists(st.integers(0, 12), min_size=6, max_size=6).filter(any), min_size=1, max_size=5))
def test_the_valid_classes_are_those_with_more_than_half_of_the_most_votes(rows: list[list[int]]) -> None:
    found = votes().distribution(torch.tensor(rows, dtype=torch.float32))
    for row, weights in zip(rows, found.tolist(), strict=True):
        valid = {number for number, count in enumerate(row) if 2 * count > max(row)}
        assert {number for number, weight in enumerate(weights) if weight > 0} == valid
        assert sum(weights) == pytest.approx(1.0)


def test_the_prototype_of_votes_is_the_mean_over_the_valid_classes() -> None:
    prototypes = logits(6, 3)
    found = votes().label_prototype(prototypes, PAPERS_VOTES)
    assert found[0].tolist() == pytest.approx(((prototypes[0] + prototypes[2]) / 2).tolist())


@pytest.mark.parametrize(
    ("given_votes", "message"),
    [
        ([[0.0] * 6], "at least one vote"),
        ([[1.0, -1.0, 3, 0, 0, 0]], "cannot be negative"),
        ([[1.0, math.nan, 3, 0, 0, 0]], "not finite"),
        ([[1.0, 2.0]], r"shape \(rows, 6\); got \(1, 2\)"),
        ([1.0, 2.0], r"shape \(rows, 6\)"),
    ],
)
def test_impossible_votes_are_refused(given_votes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        votes().check(torch.tensor(given_votes))


# Yes or no


def test_binary_is_a_softmax_over_two_prototypes_without_a_further_sigmoid() -> None:
    target = Binary(TargetSpec("binary", ("stays out", "readmitted")))
    values = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]], dtype=torch.float64)
    assert target.probabilities(values).tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([0.5, 0.5])]
    loss = target.loss_per_sample(values, torch.tensor([1, 0]))
    assert loss.tolist() == pytest.approx([-math.log(0.75), -math.log(0.5)])
    # The same as the paper's binary cross-entropy of the softmax's column.
    expected = functional.binary_cross_entropy(values.softmax(dim=1)[:, 1], torch.tensor([1.0, 0.0]).double())
    assert float(target.loss(values, torch.tensor([1, 0]))) == pytest.approx(float(expected))
    assert target.exclusive
    with pytest.raises(DataError, match="target 2 is outside 0 to 1"):
        target.check(torch.tensor([0, 2]))


# Several labels at once


def drugs() -> MultiLabel:
    return MultiLabel(TargetSpec("multilabel", ("N02B", "B01A", "C09A")))


def test_the_loss_of_several_labels_is_a_binary_cross_entropy_each() -> None:
    values, labels = logits(3, 3), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
    chance = 1 / (1 + np.exp(-values.numpy()))
    each = -(labels.numpy() * np.log(chance) + (1 - labels.numpy()) * np.log(1 - chance))
    assert drugs().loss_per_sample(values, labels).tolist() == pytest.approx(each.mean(axis=1).tolist())
    assert drugs().probabilities(values).numpy() == pytest.approx(chance)
    assert not drugs().exclusive


def test_the_decoder_sees_the_mean_prototype_of_the_present_labels_and_zero_for_none() -> None:
    prototypes = logits(3, 4)
    found = drugs().label_prototype(prototypes, torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]]))
    assert found[0].tolist() == pytest.approx(((prototypes[0] + prototypes[2]) / 2).tolist())
    assert found[1].tolist() == pytest.approx(prototypes[1].tolist())
    assert found[2].tolist() == [0, 0, 0, 0]


def test_labels_other_than_0_and_1_are_refused() -> None:
    with pytest.raises(DataError, match="only 0 and 1"):
        drugs().check(torch.tensor([[1.0, 0.5, 0.0]]))
    with pytest.raises(DataError, match=r"shape \(rows, 3\)"):
        drugs().check(torch.tensor([1.0, 0.0, 0.0]))


# What holds for all of them


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_losses_are_finite_and_smooth_for_extreme_logits(kind: str) -> None:
    target = target_of(TargetSpec(kind, ("a", "b")))
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) if kind in ("votes", "multilabel") else torch.tensor([0, 1])
    values = torch.tensor([[500.0, -500.0], [500.0, -500.0]], requires_grad=True)
    loss = target.loss(values, labels)
    loss.backward()
    assert math.isfinite(loss.item())
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_half_precision_logits_give_a_loss(kind: str) -> None:
    target = target_of(TargetSpec(kind, ("a", "b")))
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) if kind in ("votes", "multilabel") else torch.tensor([0, 1])
    assert math.isfinite(float(target.loss(torch.zeros(2, 2, dtype=torch.bfloat16), labels)))
    prototypes = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert target.label_prototype(prototypes, labels).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["classes", "votes", "binary", "multilabel"])
def test_no_targets_at_all_is_an_error(kind: str) -> None:
    empty = torch.zeros(0, 2) if kind in ("votes", "multilabel") else torch.zeros(0, dtype=torch.int64)
    with pytest.raises(DataError, match="not a single target"):
        target_of(TargetSpec(kind, ("a", "b"))).check(empty)


# A measured value


def days(loss: str = "squared") -> Regression:
    target = Regression(TargetSpec("regression", ("days",)), loss)
    target.fit(torch.tensor([1.0, 2.0, 6.0]))
    return target


def test_the_loss_of_a_value_is_of_errors_in_training_deviations() -> None:
    mean, deviation = 3.0, np.std([1.0, 2.0, 6.0])
    values, truth = torch.tensor([[-0.3], [-2.0], [4.0]]), torch.tensor([1.0, 2.0, 6.0])
    errors = values.numpy()[:, 0] - (truth.numpy() - mean) / deviation
    assert days().loss_per_sample(values, truth).tolist() == pytest.approx((errors**2).tolist(), rel=1e-5)
    huber = np.where(np.abs(errors) < 1, errors**2 / 2, np.abs(errors) - 0.5)
    assert (np.abs(errors) < 1).any()
    assert (np.abs(errors) > 1).any()
    assert days("huber").loss_per_sample(values, truth).tolist() == pytest.approx(huber.tolist(), rel=1e-5)


def test_a_prediction_is_in_the_unit_of_the_training_values_and_is_saved_with_the_model() -> None:
    target = days()
    truth = torch.tensor([4.0, -1.0])
    torch.testing.assert_close(target.probabilities(target.distribution(truth))[:, 0], truth)
    assert target.probabilities(torch.zeros(1, 1)).item() == pytest.approx(3.0)
    again = Regression(target.spec)
    again.load_state_dict(target.state_dict())
    torch.testing.assert_close(again.probabilities(torch.ones(1, 1)), target.probabilities(torch.ones(1, 1)))


def test_a_value_s_loss_is_the_same_in_every_unit() -> None:
    hours = Regression(TargetSpec("regression", ("hours",)))
    hours.fit(24 * torch.tensor([1.0, 2.0, 6.0]))
    values, truth = logits(3, 1).float(), torch.tensor([5.0, 1.0, 2.0])
    torch.testing.assert_close(hours.loss(values, 24 * truth), days().loss(values, truth))


def test_values_that_are_missing_or_no_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="not finite"):
        days().check(torch.tensor([1.0, math.nan]))
    with pytest.raises(DataError, match="one per sample"):
        days().check(torch.tensor([[1.0]]))
    with pytest.raises(DataError, match="one name"):
        TargetSpec("regression", ("a", "b"))


def test_a_loss_is_for_values_alone() -> None:
    with pytest.raises(ConfigError, match="the loss 'huber' is for regression targets, and this target is binary"):
        target_of(TargetSpec("binary", ("no", "yes")), "huber")


def test_of_an_error_lower_is_better() -> None:
    assert [oriented(metric, 1.0) for metric in Regression.metrics] == [1.0, -1.0, -1.0]
    assert all(oriented(metric, 1.0) == 1.0 for kind in (Classes, Binary, MultiLabel) for metric in kind.metrics)
