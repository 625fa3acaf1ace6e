"""Calibration against scikit-learn, by hand, and on simulated probabilities whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from manydg.data.info import TargetSpec
from manydg.errors import DataError
from manydg.evaluation.trust import (
    brier_score,
    fit_temperature,
    log_loss,
    patient_calibration,
    reliability,
    scale_temperature,
)
from manydg.targets import Target, target_of


def _target(kind: str, size: int) -> Target:
    return target_of(TargetSpec(kind, tuple(f"c{i}" for i in range(size))))


def _calibrated(kind: str, rows: int = 20_000) -> tuple[Target, np.ndarray, np.ndarray]:
    """Probabilities, and a truth drawn from them."""
    rng = np.random.default_rng(0)
    if kind == "multilabel":
        probabilities = special.expit(rng.normal(size=(rows // 4, 4)) * 1.5)
        return _target(kind, 4), (rng.random(probabilities.shape) < probabilities).astype(int), probabilities
    size = 2 if kind == "binary" else 4
    probabilities = special.softmax(rng.normal(size=(rows, size)) * 1.5, axis=1)
    truth = (rng.random((rows, 1)) > probabilities.cumsum(axis=1)).sum(axis=1).clip(max=size - 1)
    return _target(kind, size), truth, probabilities


KINDS = ["classes", "binary", "multilabel"]


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_probabilities_have_next_to_no_error(kind: str) -> None:
    target, truth, probabilities = _calibrated(kind)
    assert reliability(target, truth, probabilities).error < 0.015
    assert reliability(target, truth, scale_temperature(target, probabilities, 0.3)).error > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distortion", [0.4, 2.5])
def test_temperature_scaling_finds_the_distortion(kind: str, distortion: float) -> None:
    target, truth, probabilities = _calibrated(kind)
    distorted = scale_temperature(target, probabilities, distortion)
    temperature = fit_temperature(target, truth, distorted)
    assert temperature == pytest.approx(1 / distortion, rel=0.05)
    mended = scale_temperature(target, distorted, temperature)
    assert log_loss(target, truth, mended) < log_loss(target, truth, distorted)
    np.testing.assert_allclose(mended, probabilities, atol=0.02)


def test_temperature_scaling_keeps_the_top_class_and_sums_to_one() -> None:
    target, _, probabilities = _calibrated("classes", 500)
    scaled = scale_temperature(target, probabilities, 3.0)
    assert (scaled.argmax(axis=1) == probabilities.argmax(axis=1)).all()
    np.testing.assert_allclose(scaled.sum(axis=1), 1.0)
    np.testing.assert_allclose(scale_temperature(target, probabilities, 1.0), probabilities)


def test_a_temperature_of_two_takes_square_roots() -> None:
    """Logits halved: 0.8 and 0.2 stand as 2 to 1, and odds of 4 become odds of 2."""
    classes = scale_temperature(_target("classes", 2), np.array([[0.8, 0.2]]), 2.0)
    labels = scale_temperature(_target("multilabel", 2), np.array([[0.8, 0.2]]), 2.0)
    np.testing.assert_allclose(classes, [[2 / 3, 1 / 3]])
    np.testing.assert_allclose(labels, [[2 / 3, 1 / 3]])


def test_the_reliability_curve_is_that_of_scikit_learn() -> None:
    target, truth, probabilities = _calibrated("binary", 3000)
    curve = reliability(target, truth, probabilities, bins=10)
    observed, stated = calibration_curve(truth, probabilities[:, 1], n_bins=10)
    filled = curve.counts > 0
    np.testing.assert_allclose(curve.observed[filled], observed)
    np.testing.assert_allclose(curve.stated[filled], stated)
    assert curve.counts.sum() == 3000


def test_the_calibration_error_by_hand() -> None:
    """Stated 0.9, 0.9 and 0.6; right, wrong, right. Two bins: gaps |0.9 - 0.5| and |0.6 - 1|, weights 2/3 and 1/3."""
    truth = np.array([0, 1, 0])
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    assert reliability(_target("classes", 2), truth, probabilities, bins=10).error == pytest.approx(0.4)
    assert reliability(_target("classes", 2), truth, probabilities, bins=1).error == pytest.approx(abs(0.8 - 2 / 3))


def test_brier_scores_are_those_of_scikit_learn_and_by_hand() -> None:
    target, truth, probabilities = _calibrated("binary", 400)
    assert brier_score(target, truth, probabilities) == pytest.approx(sk.brier_score_loss(truth, probabilities[:, 1]))
    classes = np.array([[0.5, 0.3, 0.2]])
    assert brier_score(_target("classes", 3), np.array([0]), classes) == pytest.approx(0.25 + 0.09 + 0.04)
    labels = np.array([[1, 0]])
    assert brier_score(_target("multilabel", 2), labels, np.array([[0.8, 0.4]])) == pytest.approx((0.04 + 0.16) / 2)


def test_log_loss_is_that_of_scikit_learn() -> None:
    target, truth, probabilities = _calibrated("classes", 400)
    assert log_loss(target, truth, probabilities) == pytest.approx(sk.log_loss(truth, probabilities))


def test_a_patient_of_whom_the_model_is_too_sure_stands_out() -> None:
    truth, probabilities = np.array([0, 0, 0, 1, 1, 0]), np.tile([0.9, 0.1], (6, 1))
    found = patient_calibration(_target("classes", 2), truth, probabilities, np.array([3, 3, 3, 8, 8, 8]))
    assert found[3] == pytest.approx({"samples": 3, "stated": 0.9, "observed": 1.0, "brier": 0.02, "ece": 0.1})
    assert found[8]["stated"] == pytest.approx(0.9)
    assert found[8]["observed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_patient_s_calibration_error_is_that_of_the_patient_alone(kind: str) -> None:
    target, truth, probabilities = _calibrated(kind, 800)
    patients = np.random.default_rng(1).integers(0, 5, len(truth))
    found = patient_calibration(target, truth, probabilities, patients)
    for code in range(5):
        rows = patients == code
        assert found[code]["ece"] == pytest.approx(reliability(target, truth[rows], probabilities[rows]).error)
        assert found[code]["brier"] == pytest.approx(brier_score(target, truth[rows], probabilities[rows]))


def test_certainty_of_zero_and_one_is_scaled_without_overflow() -> None:
    target = _target("multilabel", 2)
    scaled = scale_temperature(target, np.array([[0.0, 1.0]], np.float32), 2.0)
    assert np.isfinite(scaled).all()
    assert 0 < scaled[0, 0] < 0.01
    assert math.isfinite(log_loss(target, np.array([[1, 0]]), np.array([[0.0, 1.0]])))


def test_no_samples_are_undefined_and_bad_settings_are_refused() -> None:
    target = _target("binary", 2)
    nothing = np.zeros(0, int), np.zeros((0, 2))
    assert math.isnan(brier_score(target, *nothing))
    assert math.isnan(reliability(target, *nothing).error)
    assert fit_temperature(target, *nothing) == 1.0
    with pytest.raises(DataError, match="above zero"):
        scale_temperature(target, np.ones((1, 2)) / 2, 0.0)
    with pytest.raises(DataError, match="at least one bin"):
        reliability(target, *nothing, bins=0)


def test_a_probability_of_one_is_in_the_last_bin() -> None:
    target, truth = _target("binary", 2), np.array([1, 1, 0, 0])
    probabilities = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    curve = reliability(target, truth, probabilities, bins=4)
    assert curve.counts.tolist() == [1, 0, 0, 3]
    assert curve.observed[[0, 3]].tolist() == pytest.approx([0.0, 2 / 3])
    assert curve.error == pytest.approx(1 / 4)
    # Two patients who are next to one another in the count of cells: neither takes the other's.
    both = patient_calibration(target, truth, probabilities, np.array([0, 0, 1, 1]))
    assert (both[0]["ece"], both[1]["ece"]) == (0.0, 0.5)
