"""Linear probes on embeddings in which labels and patients lie where we put them."""

from __future__ import annotations

import numpy as np
import pytest

from manydg.errors import DataError
from manydg.evaluation.probes import ROWS, random_cosine, scale_dimensions, weight_cosines


def _embeddings(kind: str = "classes") -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Labels live in dimensions 0 to 3, patients in 4 to 7; ``parallel`` holds the patients, ``orthogonal`` labels."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(10), 60)
    label = rng.integers(0, 2 if kind == "binary" else 3, len(who))
    v = rng.normal(size=(len(who), 12))
    v[:, :4] += 3 * rng.normal(size=(3, 4))[label]
    v[:, 4:8] += 3 * rng.normal(size=(10, 4))[who]
    parallel = v.copy()
    parallel[:, :4] = rng.normal(size=(len(who), 4))
    orthogonal = v.copy()
    orthogonal[:, 4:8] = rng.normal(size=(len(who), 4))
    labels = np.eye(3, dtype=int)[label] if kind == "multilabel" else label
    return {"v": v, "parallel": parallel, "orthogonal": orthogonal}, labels, who


@pytest.mark.parametrize("kind", ["classes", "binary", "multilabel"])
def test_separate_label_and_patient_directions_show_in_the_four_rows(kind: str) -> None:
    found = weight_cosines(*_embeddings(kind))
    same_labels, same_domains, crossed, parallel_labels = (found.mean[row] for row in ROWS)
    assert same_labels > 0.8
    assert same_domains > 0.8
    assert abs(crossed) < 0.1
    assert parallel_labels < 0.5
    assert found.absolute[ROWS[2]] < found.absolute[ROWS[0]]
    assert found.converged


def test_probes_say_how_well_each_part_tells_labels_and_patients() -> None:
    found = weight_cosines(*_embeddings())
    assert found.accuracy["labels from orthogonal"] > 0.9
    assert found.accuracy["domains from parallel"] > 0.8
    assert found.accuracy["labels from parallel"] < 0.55
    assert found.accuracy["domains from orthogonal"] < 0.3
    assert found.chance["domains"] < 0.2


def test_a_part_compared_with_itself_has_cosine_one() -> None:
    embeddings, labels, who = _embeddings()
    found = weight_cosines(dict.fromkeys(embeddings, embeddings["v"]), labels, who)
    assert [found.mean[row] for row in (ROWS[0], ROWS[1], ROWS[3])] == pytest.approx([1, 1, 1])


def test_the_signed_label_by_patient_cosine_is_near_zero_even_where_directions_coincide() -> None:
    """Why the absolute cosine is reported too: here the label is the patient, and the signed mean hides it."""
    rng = np.random.default_rng(1)
    who = np.repeat(np.arange(4), 60)
    v = rng.normal(size=(240, 6)) + 3 * rng.normal(size=(4, 6))[who]
    found = weight_cosines({"v": v, "parallel": v, "orthogonal": v}, who, who)
    assert abs(found.mean[ROWS[2]]) < 0.1
    assert found.absolute[ROWS[2]] > 0.4


def test_scaling_divides_by_the_standard_deviation_and_survives_a_constant() -> None:
    values = np.array([[1.0, 5.0, 0.1], [3.0, 5.0, 0.3], [5.0, 5.0, 0.5]])
    scaled = scale_dimensions(values)
    assert scaled.std(axis=0) == pytest.approx([1, 0, 1])


def test_the_scale_of_a_dimension_does_not_matter() -> None:
    embeddings, labels, who = _embeddings()
    stretched = {name: values * np.logspace(-2, 2, 12) for name, values in embeddings.items()}
    first, second = weight_cosines(embeddings, labels, who), weight_cosines(stretched, labels, who)
    assert [first.mean[row] for row in ROWS] == pytest.approx([second.mean[row] for row in ROWS], abs=1e-3)


def test_random_directions_have_the_expected_absolute_cosine() -> None:
    units = np.random.default_rng(0).normal(size=(2, 20_000, 20))
    units /= np.linalg.norm(units, axis=-1, keepdims=True)
    assert random_cosine(20) == pytest.approx(np.abs((units[0] * units[1]).sum(axis=-1)).mean(), rel=0.02)


def test_many_patients_and_samples_are_drawn_down_to_the_limits() -> None:
    found = weight_cosines(*_embeddings(), max_patients=4, max_samples=150)
    assert (found.domains, found.samples) == (4, 150)


def test_one_patient_or_one_label_is_refused() -> None:
    embeddings, labels, who = _embeddings()
    with pytest.raises(DataError, match="two patients and two labels"):
        weight_cosines(embeddings, labels, np.zeros_like(who))
    with pytest.raises(DataError, match="two patients and two labels"):
        weight_cosines(embeddings, np.zeros_like(labels), who)
