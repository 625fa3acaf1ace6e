"""Metrics against scikit-learn, computed the slow way."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from manydg.data.info import TargetSpec
from manydg.errors import DataError
from manydg.evaluation.metrics import choose_threshold, decide, score, score_patients
from manydg.files import as_json
from manydg.targets import Target, target_of

KINDS = ["classes", "binary", "multilabel"]


def _target(kind: str, size: int) -> Target:
    return target_of(TargetSpec(kind, tuple(f"c{i}" for i in range(size))))


def _exclusive(seed: int, rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, classes)) + np.eye(classes)[truth]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return truth, probabilities.round(2) if seed % 2 else probabilities  # rounding makes ties


def _many_labels(seed: int, rows: int, labels: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = (rng.random((rows, labels)) < 0.3).astype(int)
    probabilities = 1 / (1 + np.exp(-(rng.normal(size=(rows, labels)) + 2 * truth - 1)))
    return truth, probabilities.round(2) if seed % 2 else probabilities


@pytest.mark.parametrize("kind", ["classes", "votes"])
@pytest.mark.parametrize("seed", [0, 1])
def test_class_metrics_are_those_of_scikit_learn(kind: str, seed: int) -> None:
    truth, probabilities = _exclusive(seed, 200, 4)
    found = score(_target(kind, 4), truth, probabilities)
    chosen = probabilities.argmax(axis=1)
    assert found == {
        "accuracy": pytest.approx(sk.accuracy_score(truth, chosen)),
        "kappa": pytest.approx(sk.cohen_kappa_score(truth, chosen)),
        "f1_macro": pytest.approx(sk.f1_score(truth, chosen, average="macro")),
    }


def test_macro_f1_leaves_out_a_class_absent_from_truth_and_prediction() -> None:
    truth, probabilities = np.array([0, 1]), np.array([[0.9, 0.1, 0.0], [0.1, 0.9, 0.0]])
    assert score(_target("classes", 3), truth, probabilities)["f1_macro"] == 1.0


def test_binary_metrics_use_the_second_class_and_the_threshold() -> None:
    truth, probabilities = _exclusive(3, 300, 2)
    found = score(_target("binary", 2), truth, probabilities, threshold=0.7)
    chosen = probabilities[:, 1] >= 0.7
    assert found == {
        "auprc": pytest.approx(sk.average_precision_score(truth, probabilities[:, 1])),
        "f1": pytest.approx(sk.f1_score(truth, chosen)),
        "kappa": pytest.approx(sk.cohen_kappa_score(truth, chosen)),
        "auroc": pytest.approx(sk.roc_auc_score(truth, probabilities[:, 1])),
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_multilabel_metrics_are_means_of_each_samples_scikit_learn_value(seed: int) -> None:
    truth, probabilities = _many_labels(seed, 60, 7)
    truth[0], probabilities[0] = 0, 0.1
    found = score(_target("multilabel", 7), truth, probabilities, threshold=0.4)
    chosen = (probabilities >= 0.4).astype(int)
    with_label = [i for i in range(60) if truth[i].any()]
    jaccard = [sk.jaccard_score(t, c, zero_division=1.0) for t, c in zip(truth, chosen, strict=True)]
    f1 = [sk.f1_score(t, c, zero_division=1.0) for t, c in zip(truth, chosen, strict=True)]
    auprc = [sk.average_precision_score(truth[i], probabilities[i]) for i in with_label]
    assert found["jaccard"] == pytest.approx(np.mean(jaccard))
    assert found["f1_samples"] == pytest.approx(np.mean(f1))
    assert found["auprc_samples"] == pytest.approx(np.mean(auprc))


def test_a_sample_empty_in_truth_and_prediction_counts_as_one() -> None:
    truth, probabilities = np.zeros((1, 3), int), np.full((1, 3), 0.1)
    found = score(_target("multilabel", 3), truth, probabilities)
    assert (found["jaccard"], found["f1_samples"]) == (1.0, 1.0)
    assert math.isnan(found["auprc_samples"])


@pytest.mark.parametrize("truth", [np.zeros(5, int), np.ones(5, int)])
def test_one_class_only_is_undefined_and_not_a_warning(truth: np.ndarray) -> None:
    probabilities = np.tile([0.2, 0.8], (5, 1)) if truth[0] else np.tile([0.8, 0.2], (5, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = score(_target("binary", 2), truth, probabilities)
        alone = score_patients(_target("binary", 2), truth, probabilities, np.zeros(5, int))[0]
    assert [name for name, value in as_json(found).items() if value is None][:1] == ["auprc"]
    assert math.isnan(found["auroc"])
    assert math.isnan(found["kappa"])
    np.testing.assert_equal({k: v for k, v in alone.items() if k != "samples"}, found)


def test_no_samples_give_undefined_metrics() -> None:
    found = score(_target("classes", 3), np.zeros(0, int), np.zeros((0, 3)))
    assert all(math.isnan(value) for value in found.values())
    assert score_patients(_target("binary", 2), np.zeros(0, int), np.zeros((0, 2)), np.zeros(0, int)) == {}


def test_probabilities_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 samples are not finite"):
        score(_target("binary", 2), np.array([0, 1]), np.array([[0.5, 0.5], [np.nan, 0.1]]))


def test_truth_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(DataError, match="multilabel metrics need"):
        score(_target("multilabel", 3), np.zeros(4, int), np.zeros((4, 3)))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(2, 60), st.integers(1, 9), st.sampled_from(["classes", "binary", "multilabel"])
)
def test_per_patient_metrics_equal_the_metrics_of_each_patient_alone(
    seed: int, rows: int, people: int, kind: str
) -> None:
    target = _target(kind, 2 if kind == "binary" else 3)
    make = _many_labels if kind == "multilabel" else _exclusive
    truth, probabilities = make(seed, rows, target.size)
    patients = np.random.default_rng(seed).integers(0, people, rows) * 7
    found = score_patients(target, truth, probabilities, patients, threshold=0.4)
    assert list(found) == sorted(set(patients.tolist()))
    for code, values in found.items():
        mine = patients == code
        assert values["samples"] == mine.sum()
        alone = score(target, truth[mine], probabilities[mine], threshold=0.4)
        np.testing.assert_allclose([values[name] for name in alone], list(alone.values()), rtol=1e-9, atol=1e-12)


def test_ties_count_half_within_each_patient_and_never_between_patients() -> None:
    """Scores of one decimal, the same in both patients: values are scikit-learn's, and two of them by hand."""
    rng = np.random.default_rng(2)
    truth, scores, who = rng.integers(0, 2, 60), rng.integers(3, 7, 60) / 10, np.arange(60) % 2
    found = score_patients(_target("binary", 2), truth, np.stack([1 - scores, scores], axis=1), who)
    for code in (0, 1):
        mine = who == code
        assert found[code]["auroc"] == pytest.approx(sk.roc_auc_score(truth[mine], scores[mine]))
        assert found[code]["auprc"] == pytest.approx(sk.average_precision_score(truth[mine], scores[mine]))
    # One positive and one negative of the same score, then the same and a negative below: 1/2, and (1/2 + 1) / 2.
    truth, scores, who = np.array([0, 1, 1, 0, 0]), np.array([0.6, 0.6, 0.6, 0.6, 0.2]), np.array([0, 0, 1, 1, 1])
    by_hand = score_patients(_target("binary", 2), truth, np.stack([1 - scores, scores], axis=1), who)
    assert (by_hand[0]["auroc"], by_hand[1]["auroc"]) == (0.5, 0.75)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_binary_threshold_has_the_highest_f1_of_all(seed: int) -> None:
    truth, probabilities = _exclusive(seed, 80, 2)
    threshold, rule = choose_threshold(_target("binary", 2), truth, probabilities)
    assert threshold is not None
    assert rule == "threshold with the highest F1 on validation patients"
    best = max(sk.f1_score(truth, probabilities[:, 1] >= cut) for cut in np.unique(probabilities[:, 1]))
    assert sk.f1_score(truth, probabilities[:, 1] >= threshold) == pytest.approx(best)


def test_where_everyone_is_positive_everyone_is_called_so() -> None:
    probabilities = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]])
    target = _target("binary", 2)
    threshold, _ = choose_threshold(target, np.array([1, 1, 1]), probabilities)
    assert decide(target, probabilities, threshold).tolist() == [1, 1, 1]


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_the_multilabel_threshold_is_the_best_of_a_fine_grid(seed: int) -> None:
    """Odd seeds have probabilities of two digits, which lie on the thresholds tried."""
    truth, probabilities = _many_labels(seed, 80, 6)
    target = _target("multilabel", 6)
    threshold, rule = choose_threshold(target, truth, probabilities)
    assert "mean F1 of a sample on validation patients" in rule
    chosen = score(target, truth, probabilities, threshold)["f1_samples"]
    grid = [score(target, truth, probabilities, cut)["f1_samples"] for cut in np.linspace(0.01, 0.99, 99)]
    assert chosen >= max(grid) - 1e-12


def test_the_multilabel_threshold_copes_with_badly_scaled_probabilities() -> None:
    truth, probabilities = _many_labels(2, 80, 6)
    target = _target("multilabel", 6)
    tiny = probabilities / 10_000
    threshold, _ = choose_threshold(target, truth, tiny)
    wanted, _ = choose_threshold(target, truth, probabilities)
    ours = score(target, truth, tiny, threshold)["f1_samples"]
    assert ours == pytest.approx(score(target, truth, probabilities, wanted)["f1_samples"], abs=0.02)


def test_exclusive_classes_need_no_threshold_and_no_positive_falls_back_to_a_half() -> None:
    truth, probabilities = _exclusive(0, 20, 3)
    assert choose_threshold(_target("classes", 3), truth, probabilities) == (None, "highest probability")
    threshold, rule = choose_threshold(_target("binary", 2), np.zeros(20, int), probabilities[:, :2])
    assert threshold == 0.5
    assert "no validation sample" in rule


def test_a_probability_on_the_threshold_is_positive() -> None:
    assert decide(_target("binary", 2), np.array([[0.5, 0.5]]), 0.5).tolist() == [1]


def _values(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.gamma(2.0, 3.0, rows) + 1e5
    return truth, truth[:, None] + rng.normal(size=(rows, 1)) * 2


def test_errors_of_values_are_those_of_scikit_learn() -> None:
    truth, predicted = _values(0, 60)
    found = score(_target("regression", 1), truth, predicted)
    assert found == {
        "r2": pytest.approx(sk.r2_score(truth, predicted)),
        "mae": pytest.approx(sk.mean_absolute_error(truth, predicted)),
        "rmse": pytest.approx(sk.root_mean_squared_error(truth, predicted)),
    }


def test_r2_is_undefined_within_a_patient_of_one_value_and_the_errors_are_not() -> None:
    truth, predicted = np.array([71.3, 71.3, 71.3, 20.0, 30.0]), np.array([[70.0], [72.0], [71.3], [20.0], [24.0]])
    found = score_patients(_target("regression", 1), truth, predicted, np.array(["b", "b", "b", "a", "a"]))
    assert math.isnan(found["b"]["r2"])
    assert found["b"]["mae"] == pytest.approx((1.3 + 0.7 + 0) / 3)
    assert found["a"]["r2"] == pytest.approx(sk.r2_score(truth[3:], predicted[3:]))
    assert found["a"]["rmse"] == pytest.approx(6 / math.sqrt(2))


def test_a_value_is_its_own_decision_and_has_no_threshold() -> None:
    target, (truth, predicted) = _target("regression", 1), _values(1, 5)
    assert choose_threshold(target, truth, predicted)[0] is None
    assert decide(target, predicted).tolist() == predicted[:, 0].tolist()
