"""The estimator with patient context: groups at prediction, and nothing known without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manydg.estimator import ManyDGClassifier

pytestmark = pytest.mark.filterwarnings("ignore:.*constant in the training patients")


def people(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The label is whether the first value is high for its person."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(20), 30)
    usual = 4 * rng.normal(size=(20, 2))
    values = usual[who] + rng.normal(size=(600, 2))
    return values, (values[:, 0] > usual[who, 0]).astype(int), who, np.tile(np.arange(30), 20)


@pytest.fixture(scope="module")
def model() -> ManyDGClassifier:
    X, y, who, _ = people()
    return ManyDGClassifier("manydg-context", epochs=8, lr=1e-2, random_state=0).fit(X, y, groups=who)


@pytest.mark.filterwarnings("ignore:this model draws on:manydg.errors.ManyDGWarning")
def test_knowing_whose_samples_they_are_makes_predictions_better(model: ManyDGClassifier) -> None:
    X, y, who, _ = people(1)
    known = (model.predict(X, groups=who) == y).mean()
    unknown = (model.predict(X) == y).mean()
    assert known > 0.9
    assert 0.5 < unknown < known - 0.1


@pytest.mark.filterwarnings("ignore:this model draws on:manydg.errors.ManyDGWarning")
def test_without_groups_every_sample_is_of_a_patient_of_its_own(model: ManyDGClassifier) -> None:
    X = people(1)[0]
    assert np.array_equal(model.predict_proba(X), model.predict_proba(X, groups=np.arange(len(X))))
    np.testing.assert_allclose(model.predict_proba(X)[:3], model.predict_proba(X[:3]), atol=1e-6)


def test_a_loaded_model_makes_the_same_use_of_groups(model: ManyDGClassifier, tmp_path: Path) -> None:
    X, _, who, _ = people(2)
    model.save(tmp_path)
    assert np.array_equal(ManyDGClassifier.load(tmp_path).predict_proba(X, groups=who), model.predict_proba(X, who))


def test_causal_context_takes_times_and_a_later_sample_changes_no_earlier_prediction() -> None:
    X, y, who, times = people(3)
    model = ManyDGClassifier("base", context="causal", epochs=2, random_state=0).fit(X, y, groups=who, times=times)
    later = np.where(times[:, None] >= 15, 99.0, X)
    before, after = (model.predict_proba(values, groups=who, times=times) for values in (X, later))
    np.testing.assert_allclose(before[times < 15], after[times < 15], atol=1e-6)
    with pytest.raises(ValueError, match="time of every sample"):
        model.predict_proba(X, groups=who)


def test_an_algorithm_without_context_makes_no_use_of_groups() -> None:
    X, y, who, _ = people(4)
    model = ManyDGClassifier("base", epochs=1, random_state=0).fit(X, y, groups=who)
    assert np.array_equal(model.predict_proba(X), model.predict_proba(X, groups=who))


@pytest.mark.slow
def test_those_held_back_have_no_say_in_how_far_context_is_trusted() -> None:
    X, y, who, times = people(4)
    X -= np.array([X[who == person].mean(axis=0) for person in range(20)])[who]
    X += 0.3 * np.random.default_rng(5).normal(size=(20, 2))[who]

    def strength(values: np.ndarray) -> float:
        model = ManyDGClassifier("base", context="offline", epochs=1, validation_share=0.5, random_state=0)
        model.fit(values, y, groups=who, times=times)
        assert "validation" in model.selection_rule_
        found: float = model._run_.schema.settings["context"]["strength"]
        return found

    before = strength(X)
    alike = [person for person in range(20) if strength(np.where((who == person)[:, None], X + 50.0, X)) == before]
    assert len(alike) == 10
