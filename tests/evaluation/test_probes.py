"""Embedding probes against brute force over all pairs, and on embeddings built to have a known answer."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.errors import DataError
from manydg.evaluation.probes import domain_similarity, half_sessions, norms, patient_retrieval


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 25), st.integers(1, 6))
def test_similarity_from_sums_equals_the_mean_over_all_pairs(seed: int, samples: int, people: int) -> None:
    rng = np.random.default_rng(seed)
    z, who = rng.normal(size=(samples, 4)) + 1, rng.integers(0, people, samples)
    inside = [_cosine(z[i], z[j]) for i, j in combinations(range(samples), 2) if who[i] == who[j]]
    across = [_cosine(z[i], z[j]) for i, j in combinations(range(samples), 2) if who[i] != who[j]]
    found = domain_similarity(z, who)
    assert found.within == pytest.approx(np.mean(inside) if inside else math.nan, nan_ok=True)
    assert found.across == pytest.approx(np.mean(across) if across else math.nan, nan_ok=True)


def test_similarity_is_over_pairs_so_that_a_patient_with_many_samples_counts_more() -> None:
    z = np.array([[1.0, 0], [1, 0], [1, 0], [1, 0], [1, 0], [0, 1]])
    who = np.array([0, 0, 0, 0, 1, 1])
    assert domain_similarity(z, who).within == pytest.approx(6 / 7)  # six pairs of cosine 1, one of cosine 0


def test_zero_embeddings_have_no_direction_and_are_left_out() -> None:
    found = domain_similarity(np.array([[1.0, 0], [1, 0], [0, 0]]), np.array([0, 0, 0]))
    assert found.within == pytest.approx(1.0)
    assert math.isnan(found.across)
    assert math.isnan(domain_similarity(np.zeros((2, 3)), np.arange(2)).within)


def test_embeddings_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="finite"):
        domain_similarity(np.array([[1.0, np.nan]]), np.array([0]))


def test_norms_by_hand() -> None:
    found = norms(np.array([[3.0, 0], [0, 4]]), np.array([[0, 4.0], [3, 0]]))
    assert found.parallel.tolist() == [3, 4]
    assert found.orthogonal.tolist() == [4, 3]
    assert found.parallel_larger == 0.5


def test_half_sessions_keep_the_order_of_each_patients_samples() -> None:
    assert half_sessions(np.array([7, 3, 7, 7, 3, 7, 9])).tolist() == [0, 0, 0, 1, 1, 1, 0]


def _people(signal: float, people: int = 30, samples: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings of two nights each: a person's own direction times ``signal`` plus noise."""
    rng = np.random.default_rng(4)
    who = np.repeat(np.arange(people), 2 * samples)
    night = np.tile(np.repeat([0, 1], samples), people)
    return signal * rng.normal(size=(people, 16))[who] + rng.normal(size=(len(who), 16)), who, night


def test_people_with_a_direction_of_their_own_are_found_again_on_another_night() -> None:
    found = patient_retrieval(*_people(2.0))
    assert found.rate > 0.95
    assert (found.chance, found.queries) == (pytest.approx(1 / 59), 60)


def test_people_without_a_direction_are_found_no_more_often_than_by_chance() -> None:
    assert patient_retrieval(*_people(0.0)).rate < 0.15


def test_a_signal_of_the_night_alone_does_not_count_as_the_person() -> None:
    """A strong direction of each night draws neighbours to the own session, which is never asked."""
    _, who, night = _people(0.0)
    rng = np.random.default_rng(0)
    embeddings = 5 * rng.normal(size=(60, 16))[who * 2 + night] + rng.normal(size=(len(who), 16))
    assert patient_retrieval(embeddings, who, night).rate < 0.15


def test_a_patient_with_one_session_cannot_be_found_but_can_mislead() -> None:
    z = np.array([[1.0, 0], [0, 1], [-0.1, 1.1]])
    found = patient_retrieval(z, np.array(["a", "a", "b"]), np.array([0, 1, 0]))
    assert (found.rate, found.queries) == (0.5, 2)
    alone = patient_retrieval(z, np.array(["a", "b", "c"]), np.zeros(3, int))
    assert math.isnan(alone.rate)
    assert alone.queries == 0


def test_similarity_does_not_depend_on_how_the_samples_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    z, who = rng.normal(size=(50, 3)), rng.integers(0, 6, 50)
    whole = domain_similarity(z, who)
    monkeypatch.setattr("manydg.evaluation.probes._SLICE", 7)
    sliced = domain_similarity(z, who)
    assert (sliced.within, sliced.across) == pytest.approx((whole.within, whole.across))
