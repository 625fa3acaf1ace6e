"""Distances of patients from those of the training, by hand and on simulated patients."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf

from manydg.errors import DataError
from manydg.evaluation.trust import fit_reference, novelty_threshold, shrunk_covariance

DIM = 6


def _patients(rng: np.random.Generator, count: int, samples: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Patients' means vary mostly along the first dimension, samples within a patient along the second."""
    means = rng.normal(size=(count, DIM)) * [5, 1, 1, 1, 1, 0.2] + shift * np.eye(DIM)[5]
    who = np.repeat(np.arange(count), samples)
    return means[who] + rng.normal(size=(len(who), DIM)) * [1, 4, 1, 1, 1, 0.2], who


def test_with_many_patients_the_distance_is_mahalanobis_of_means() -> None:
    rng = np.random.default_rng(0)
    values, who = _patients(rng, 3000, 4)
    reference = fit_reference(values, who)
    new, _ = _patients(rng, 1, 3)
    _, found = reference.distances(new, np.zeros(3, int))
    means = values.reshape(3000, 4, DIM).mean(axis=1)
    between = np.cov(means.T)
    apart = values - means[who]
    within = apart.T @ apart / (len(values) - 3000)
    offset = new.mean(axis=0) - means.mean(axis=0)
    wanted = np.sqrt(offset @ np.linalg.solve(between + within / 3, offset) / DIM)
    assert found[0] == pytest.approx(wanted, rel=0.02)


def test_a_direction_in_which_patients_hardly_differ_counts_most() -> None:
    rng = np.random.default_rng(1)
    values, who = _patients(rng, 60, 30)
    reference = fit_reference(values, who)
    usual, strange = np.zeros((30, DIM)), np.zeros((30, DIM))
    usual[:, 0], strange[:, 5] = 5.0, 5.0
    _, (near, far) = reference.distances(np.concatenate([usual, strange]), np.repeat([0, 1], 30))
    assert far > 5 * near


def test_patients_of_the_same_population_are_rarely_flagged_and_others_are() -> None:
    """50 training, 39 validation patients, 200 studies: false alarms at 5%, and those moved away are found."""
    rng = np.random.default_rng(2)
    alarms, found = [], []
    for _ in range(200):
        reference = fit_reference(*_patients(rng, 50, 10))
        limit, rate = novelty_threshold(reference.distances(*_patients(rng, 39, 10))[1])
        assert rate == 0.05
        alarms.append(reference.distances(*_patients(rng, 1, 10))[1][0] > limit)
        found.append(reference.distances(*_patients(rng, 1, 10, shift=3.0))[1][0] > limit)
    assert np.mean(alarms) < 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / 200)
    assert np.mean(found) > 0.95


def test_a_little_known_patient_is_not_strange_for_that() -> None:
    """One sample varies more than the mean of thirty; by the same limit both are flagged about as rarely."""
    rng = np.random.default_rng(3)
    reference = fit_reference(*_patients(rng, 200, 30))
    _, many = reference.distances(*_patients(rng, 500, 30))
    _, one = reference.distances(*_patients(rng, 500, 1))
    assert np.median(one) == pytest.approx(np.median(many), rel=0.15)


def test_the_limit_is_a_rank_among_validation_patients() -> None:
    distances = np.arange(1.0, 40.0)
    assert novelty_threshold(distances) == (38.0, 0.05)
    # Nineteen and a new one: 0.95 of twenty ranks is the nineteenth; with twenty it is the twentieth of twenty-one.
    assert novelty_threshold(np.arange(1.0, 20.0)) == (19.0, 0.05)
    assert novelty_threshold(np.arange(1.0, 21.0)) == (20.0, 0.05)
    # Eight patients can promise no better than one in nine.
    assert novelty_threshold(np.arange(1.0, 9.0)) == (8.0, pytest.approx(1 / 9))


def test_dimensions_that_never_vary_do_no_harm() -> None:
    rng = np.random.default_rng(4)
    values, who = _patients(rng, 20, 5)
    constant = np.concatenate([values, np.full((len(values), 2), 3.0)], axis=1)
    reference = fit_reference(constant, who)
    _, distances = reference.distances(constant, who)
    assert np.isfinite(distances).all()
    assert np.isfinite(fit_reference(np.ones((6, 2)), np.arange(6)).distances(np.ones((1, 2)), np.zeros(1))[1]).all()


def test_one_patient_is_too_few() -> None:
    with pytest.raises(DataError, match="two at least"):
        fit_reference(np.zeros((5, 2)), np.zeros(5))
    with pytest.raises(DataError, match="at least one validation patient"):
        novelty_threshold(np.zeros(0))


def test_the_distance_so_far_is_that_of_the_sample_and_strictly_earlier_ones() -> None:
    rng = np.random.default_rng(5)
    reference = fit_reference(*_patients(rng, 40, 10))
    values, who = _patients(rng, 3, 6)
    times = np.tile([0.0, 1.0, 1.0, 2.0, 5.0, 5.0], 3)
    found = reference.distances_so_far(values, who, times)
    for row in range(len(values)):
        known = (who == who[row]) & (times < times[row])
        known[row] = True
        _, alone = reference.distances(values[known], np.zeros(int(known.sum()), int))
        assert found[row] == pytest.approx(alone[0])


@pytest.mark.parametrize(("rows", "dim"), [(2, 3), (9, 1), (30, 64), (300, 17)])
def test_the_shrunk_covariance_is_scikit_learns_to_the_bit(rows: int, dim: int) -> None:
    rng = np.random.default_rng(rows)
    for values in (rng.normal(size=(rows, dim)) @ rng.normal(size=(dim, dim)), np.zeros((rows, dim))):
        centred = values - values.mean(axis=0)
        expected, _ = ledoit_wolf(centred, assume_centered=True)
        np.testing.assert_array_equal(shrunk_covariance(centred), expected)
