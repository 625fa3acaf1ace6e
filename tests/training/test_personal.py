"""A few labels of a new patient: posteriors are what their equations say, and nothing of others or of later enters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError, DataError, StorageError
from manydg.estimator import EstimatorError, ManyDGClassifier
from manydg.targets import target_of
from manydg.training.personal import (
    DEFAULTS,
    LEARNERS,
    PERSONAL,
    Outputs,
    Population,
    Strengths,
    fit_population,
    personal_logits,
)
from manydg.training.record import read_tensors, write_tensors
from manydg.training.run import Run, open_run, train

PATIENTS, SAMPLES = 40, 30
THREE = target_of(TargetSpec("classes", ("a", "b", "c")))
STRONG = {name: dataclasses.replace(value, intercept=1.0, head=0.5, drift=1.0, length=3.0, steps=20)
          for name, value in DEFAULTS.items()}  # fmt: skip


def people(seed: int = 0) -> DomainDataset:
    """Whether a patient is ill depends on an input and on an intercept of the patient's own."""
    rng = np.random.default_rng(seed)
    who, time = np.repeat(np.arange(PATIENTS), SAMPLES), np.tile(np.arange(SAMPLES, dtype=float), PATIENTS)
    x = rng.normal(size=(len(who), 4))
    ill = x[:, 0] + 2 * rng.normal(size=PATIENTS)[who] > 0
    return from_arrays(x, np.where(ill, "ill", "well"), who, times=time)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run") / "run"
    options: Any = {"ratios": (0.5, 0.25, 0.25), "backbone_options": {"hidden": 16, "width": 8}}
    return train(people(), algorithm="base", backbone="mlp", epochs=3, lr=1e-2, out=folder, device="cpu", **options)


def outputs(rows: int = 12, seed: int = 0) -> Outputs:
    rng = np.random.default_rng(seed)
    return Outputs(rng.normal(size=(rows, 3)), rng.normal(size=(rows, 5)), np.arange(rows, dtype=float))


def population(**strengths: Strengths) -> Population:
    rng = np.random.default_rng(1)
    means, spread = rng.normal(size=(3, 5)), rng.uniform(0.1, 1.0, 5)
    return Population(np.zeros(5), np.eye(5), means, spread, np.full(3, 1 / 3), {**STRONG, **strengths}, 0)


def shown(labels: list[int]) -> np.ndarray:
    return np.eye(3)[labels]


def test_effects_are_at_the_mode_of_the_posterior() -> None:
    """The same as the best intercepts and slopes that a general optimiser finds."""
    given, truth = outputs(), shown([0, 1, 2, 0, 0, 1, 2, 0])
    strengths = Strengths(intercept=0.7, slope=0.4)
    centred = given.logits - given.logits.mean(axis=1, keepdims=True)

    def logits(effects: np.ndarray) -> np.ndarray:
        return given.logits + effects[:3] + effects[3:] * centred

    def loss(effects: np.ndarray) -> float:
        known = logits(effects)[:8]
        likelihood = (truth * known).sum() - np.log(np.exp(known).sum(axis=1)).sum()
        return float(-likelihood + (effects[:3] ** 2).sum() / 2 / 0.7**2 + (effects[3:] ** 2).sum() / 2 / 0.4**2)

    best = logits(minimize(loss, np.zeros(6), tol=1e-10).x)
    # Where all of a patient's samples may use all labels; the last ones are labelled, so that these are not the first.
    known = np.arange(8)
    ours = personal_logits(
        given, np.zeros(12, int), known, truth, population(**{"intercept-first": strengths}), THREE, "intercept"
    )
    np.testing.assert_allclose(ours, best, atol=1e-3)


def test_prototypes_move_to_the_mean_of_a_gaussian_posterior() -> None:
    given, truth = outputs(), shown([0, 0, 1, 1, 1, 2])
    people = population(**{"prototypes-first": Strengths(prototypes=2.0, temper=0.3)})
    ours = personal_logits(given, np.zeros(12, int), np.arange(6), truth, people, THREE, "prototypes")
    expected = given.logits.copy()
    for label, rows in enumerate(([0, 1], [2, 3, 4], [5])):
        prior, variance = people.means[label], 2.0 * people.spread
        precision = 1 / variance + len(rows)
        posterior = (prior / variance + given.features[rows].sum(axis=0)) / precision
        gain = ((given.features - prior) ** 2 - (given.features - posterior) ** 2).sum(axis=1) / 2
        expected[:, label] += 0.3 * gain
    np.testing.assert_allclose(ours, expected)


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_label_counts_for_its_own_patient_alone_and_causally_for_later_samples_alone(learner: str) -> None:
    given, patients = outputs(), np.repeat([0, 1], 6)
    known, truth = np.array([0, 2, 4, 7]), [0, 1, 2, 0]
    other, later = [0, 1, 2, 2], [0, 1, 0, 0]
    personal = population()

    def logits(labels: list[int], **options: Any) -> np.ndarray:
        return personal_logits(given, patients, known, shown(labels), personal, THREE, learner, **options)

    np.testing.assert_array_equal(logits(truth)[:6], logits(other)[:6])
    assert (logits(truth)[6:] != logits(other)[6:]).any()
    first, second = logits(truth, causal=True), logits(later, causal=True)
    np.testing.assert_array_equal(first[:5], second[:5])
    assert (first[5] != second[5]).any()
    # Before the first label, and until a label is known, nothing changes.
    np.testing.assert_array_equal(first[0], given.logits[0])
    np.testing.assert_array_equal(logits(truth, causal=True, delay=3.0)[:4], given.logits[:4])


def test_strengths_come_from_validation_patients_and_are_none_where_labels_tell_nothing(run: Run) -> None:
    assert run.population is not None
    assert run.population.patients == 8
    assert run.population.strengths["effects"] != Strengths()
    assert run.population.strengths["intercept"].intercept > 0
    rng, data = np.random.default_rng(0), people()
    exchanged = dataclasses.replace(data, targets=data.targets[rng.permutation(len(data))])
    halves = [exchanged.select(np.flatnonzero(data.domains.numpy() % 2 == side)) for side in (0, 1)]
    share = float(exchanged.targets.float().mean())
    fitted = fit_population(run.algorithm, *halves, np.tile(np.float32([1 - share, share]), (len(halves[1]), 1)))
    assert fitted is not None
    used = [name for name, strengths in fitted.strengths.items() if strengths != Strengths()]
    assert len(used) <= 2, used


def test_a_few_labels_help_where_patients_differ_and_samples_with_labels_are_not_predicted(run: Run) -> None:
    new = people(1)
    names = np.array(new.target.names)[new.targets.numpy()]
    labels = [name if time < 10 else None for name, time in zip(names, new.times.numpy(), strict=True)]
    rest = np.array([label is None for label in labels])
    plain = (run.predict_proba(new).argmax(axis=1) == new.targets.numpy())[rest].mean()
    probabilities = run.personalise(new, labels)
    assert np.isnan(probabilities[~rest]).all()
    assert (probabilities[rest].argmax(axis=1) == new.targets.numpy()[rest]).mean() > plain + 0.1


def test_an_opened_run_personalises_the_same_and_a_damaged_file_is_named(run: Run, tmp_path: Path) -> None:
    new = people(1)
    labels = ["ill" if row % 3 == 0 else None for row in range(len(new))]
    assert run.folder is not None
    np.testing.assert_array_equal(open_run(run.folder).personalise(new, labels), run.personalise(new, labels))
    tensors, meta = read_tensors(run.folder / PERSONAL)
    kept = (run.folder / PERSONAL).read_bytes()
    meta["strengths"]["effects"]["head"] = -1.0
    write_tensors(run.folder / PERSONAL, tensors, meta)
    with pytest.raises(StorageError, match=r"personal\.safetensors is damaged or was changed"):
        open_run(run.folder)
    (run.folder / PERSONAL).unlink()
    with pytest.raises(ConfigError, match="train it again"):
        open_run(run.folder).personalise(new, labels)
    (run.folder / PERSONAL).write_bytes(kept)


def test_labels_that_do_not_fit_are_errors(run: Run) -> None:
    new = people(1)
    with pytest.raises(DataError, match="there are 1 labels, but 1200 samples"):
        run.personalise(new, ["ill"])
    with pytest.raises(DataError, match="row 0: 'sick' is not one of the model's labels"):
        run.personalise(new, ["sick"] * len(new))
    with pytest.raises(ConfigError, match="did you mean 'effects'"):
        run.personalise(new, ["ill"] + [None] * (len(new) - 1), learner="efects")


def test_the_estimator_is_personalised_after_loading_too(tmp_path: Path) -> None:
    data = people()
    x, who = data.columns["x"].numpy(), data.domains.numpy()
    y = np.array(data.target.names)[data.targets.numpy()]
    train_rows, new = np.flatnonzero(who < 30), np.flatnonzero(who >= 30)
    known, rest = new[new % SAMPLES < 10], new[new % SAMPLES >= 10]
    model = ManyDGClassifier("base", epochs=3, validation_share=0.3, random_state=0)
    model.fit(x[train_rows], y[train_rows], groups=who[train_rows])
    personal = model.personalise(x[known], y[known], who[known])
    gained = np.mean(personal.predict(x[rest], who[rest]) == y[rest]) - model.score(x[rest], y[rest])
    assert gained > 0.1
    model.save(tmp_path / "model")
    again = ManyDGClassifier.load(tmp_path / "model").personalise(x[known], y[known], who[known])
    np.testing.assert_array_equal(again.predict_proba(x[rest], who[rest]), personal.predict_proba(x[rest], who[rest]))
    # Of a stranger the labels say nothing; of nobody in particular nothing is known.
    stranger = personal.predict_proba(x[rest], [-1] * len(rest))
    np.testing.assert_allclose(stranger, model.predict_proba(x[rest]), atol=1e-6)
    with pytest.raises(EstimatorError, match="labelled samples were given with groups"):
        personal.predict_proba(x[rest])
    with pytest.raises(EstimatorError, match="is not saved"):
        personal.save(tmp_path / "other")


@pytest.mark.parametrize("kind", ["votes", "multilabel"])
def test_other_kinds_of_labels_are_used_too(dataset_of: Any, kind: str) -> None:
    data = dataset_of(kind, patients=20, samples=24)
    fitted = train(data, algorithm="prototype", epochs=1, ratios=(0.5, 0.3, 0.2), device="cpu")
    assert fitted.population is not None
    fitted = dataclasses.replace(fitted, population=dataclasses.replace(fitted.population, strengths=DEFAULTS))
    name = data.target.names[0]
    labels = [[name] if kind == "multilabel" else name] * 4 + [None] * (len(data) - 4)
    probabilities = fitted.personalise(data, labels)
    assert (probabilities[4:24] != fitted.predict_proba(data)[4:24]).any()
    np.testing.assert_allclose(probabilities[24:], fitted.predict_proba(data)[24:], atol=1e-5)
