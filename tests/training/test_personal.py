"""A few labels of a new patient: posteriors are what their equations say, and nothing of others or of later enters."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.info import TargetSpec
from manydg.data.splits import split_named
from manydg.errors import ConfigError, DataError, StorageError
from manydg.estimator import EstimatorError, ManyDGClassifier
from manydg.targets import target_of
from manydg.training.personal import (
    AUTO,
    DEFAULTS,
    LEARNERS,
    MARKOV,
    PERSONAL,
    Chain,
    Outputs,
    Population,
    Strengths,
    _choose_chain,
    _choose_reach,
    _most_likely,
    _People,
    _spread_rows,
    count_transitions,
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
    shares = np.array([0.5, 0.3, 0.2])
    chain = Chain(np.full((3, 3), 0.1) + 0.7 * np.eye(3), shares, emission=0.8, prior=0.5, sharpness=0.9)
    known = {**STRONG, **strengths}
    return Population(np.zeros(5), np.eye(5), means, spread, shares, known, 0, chain, MARKOV)


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

    def logits(labels: list[int], where: np.ndarray = known, given: Outputs = given, **options: Any) -> np.ndarray:
        return personal_logits(given, patients, where, shown(labels), personal, THREE, learner, **options)

    np.testing.assert_array_equal(logits(truth)[:6], logits(other)[:6])
    assert (logits(truth)[6:] != logits(other)[6:]).any()
    first, second = logits(truth, causal=True), logits(later, causal=True)
    np.testing.assert_array_equal(first[:5], second[:5])
    assert (first[5] != second[5]).any()
    # Before the first label, and until a label is known, nothing changes.
    unlabelled = personal_logits(given, patients, known[:0], np.zeros((0, 3)), personal, THREE, learner, causal=True)
    np.testing.assert_array_equal(first[0], unlabelled[0])
    np.testing.assert_allclose(logits(truth, causal=True, delay=3.0)[:4], unlabelled[:4])
    if learner not in (MARKOV, AUTO):
        np.testing.assert_array_equal(unlabelled, given.logits)
    # Nor do later inputs, or those of another patient.
    moved = given.logits.copy()
    moved[3:] += [2.0, 0.0, -1.0]
    later_inputs = logits(truth, given=dataclasses.replace(given, logits=moved), causal=True)
    np.testing.assert_allclose(later_inputs[:3], first[:3])
    moved[:6] = given.logits[:6]
    others = logits(truth, given=dataclasses.replace(given, logits=moved))
    np.testing.assert_allclose(others[:6], logits(truth)[:6])


@pytest.mark.parametrize("causal", [False, True])
def test_the_chain_is_the_sum_over_all_paths_of_classes(causal: bool) -> None:
    """Smoothed, and filtered, probabilities by enumeration, with a label, an equal time and a long pause."""
    times = np.array([0.0, 1.0, 3.0, 3.0, 40.0, 41.0])
    given = dataclasses.replace(outputs(6), times=times)
    personal, label = population(markov=Strengths(), **{"markov-first": Strengths()}), 2
    ours = personal_logits(
        given, np.zeros(6, int), np.array([1]), shown([label]), personal, THREE, MARKOV, causal=causal
    )
    chain, usual = personal.chain, personal.shares
    assert chain is not None
    evidence = np.exp(0.8 * (given.logits - 0.5 * np.log(usual)))
    moves = [None, chain.transitions, np.linalg.matrix_power(chain.transitions, 2), None, None, chain.transitions]
    for row in range(6):
        # Whether it is labelled itself does not count in its own prediction where labels must be earlier.
        last = row if causal else 5
        totals = np.zeros(3)
        for path in itertools.product(range(3), repeat=last + 1):
            chance = 1.0
            for at, state in enumerate(path):
                move = moves[at]
                chance *= usual[state] if move is None else move[path[at - 1], state]
                clamped = at == 1 and (row != 1 if causal else True)
                chance *= float(state == label) if clamped else evidence[at, state]
            totals[path[row]] += chance
        expected = np.maximum(totals / totals.sum(), 1e-6)
        np.testing.assert_allclose(ours[row], 0.9 * np.log(expected), atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_chain_of_labels_alone_adds_what_the_labels_say_by_all_paths_of_classes(causal: bool) -> None:
    times = np.array([0.0, 1.0, 3.0, 4.0, 40.0])
    given = dataclasses.replace(outputs(5), times=times)
    personal, label = population(markov=Strengths(), **{"markov-first": Strengths()}), 2
    assert personal.chain is not None
    personal = dataclasses.replace(personal, chain=dataclasses.replace(personal.chain, emission=0.0))
    assert personal.chain is not None
    usual, move = personal.shares, personal.chain.transitions
    nobody = np.zeros(5, int), np.zeros(0, int), np.zeros((0, 3))
    np.testing.assert_array_equal(personal_logits(given, *nobody, personal, THREE, MARKOV, causal=causal), given.logits)
    ours = personal_logits(
        given, np.zeros(5, int), np.array([1]), shown([label]), personal, THREE, MARKOV, causal=causal
    )
    # What the label makes likely of a sample, over what the chain has there without it; the last is too far away. What
    # a causal chain has without labels is read from the labelled sample on, as it is with them.
    start = usual if causal else usual @ move
    for row, power in ((2, 2), (3, 3)):
        moved = np.linalg.matrix_power(move, power)
        expected = given.logits[row] + 0.9 * np.log(moved[label] / (start @ moved))
        np.testing.assert_allclose(ours[row], expected, atol=1e-9)
    np.testing.assert_allclose(ours[4], given.logits[4])
    before = usual * move[:, label]
    expected = given.logits[0] + (0.0 if causal else 0.9 * np.log(before / before.sum() / usual))
    np.testing.assert_allclose(ours[0], expected, atol=1e-9)


@pytest.mark.parametrize(("patients", "level", "signal", "bout", "seed"), [(20, 2.0, 0.5, 15, 0), (8, 1.0, 1.0, 8, 1)])
def test_a_chain_that_does_not_help_without_labels_is_not_chosen_for_what_it_gains_with_many(
    patients: int, level: float, signal: float, bout: int, seed: int
) -> None:
    """Of patients with a level of their own, neighbours' evidence repeats one error, while their labels say much."""
    rng, samples = np.random.default_rng(seed), 120
    ill = np.zeros((patients, samples), int)
    for own in ill:
        at, state = 0, int(rng.random() < 0.3)
        while at < samples:
            length = int(rng.geometric(1 / bout))
            own[at : at + length], at, state = state, at + length, 1 - state
    score = signal * (2 * ill - 1) + level * rng.normal(size=(patients, 1)) + rng.normal(size=ill.shape)
    logits, who = np.stack([-score / 2, score / 2], axis=-1).reshape(-1, 2), np.repeat(np.arange(patients), samples)
    given = Outputs(logits, np.zeros((len(who), 1)), np.tile(np.arange(float(samples)), patients))
    follows = np.diff(who) == 0
    shares, none = np.bincount(ill.ravel()) / ill.size, {"markov": Strengths(), "markov-first": Strengths()}
    chain = Chain(count_transitions(ill.ravel(), follows, 2), shares)
    start = Population(np.zeros(1), np.eye(1), np.zeros((2, 1)), np.ones(1), shares, DEFAULTS | none, 0, chain, MARKOV)
    two = target_of(TargetSpec("classes", ("well", "ill")))
    trials = list(_People(given, np.eye(2)[ill.ravel()], who, two).trials())
    chosen = _choose_chain(start, trials, causal=True).chain
    assert chosen is not None
    assert chosen.emission == 0


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_label_that_is_longer_ago_than_it_was_seen_to_help_does_not_count(learner: str) -> None:
    given, patients, known = outputs(), np.repeat([0, 1], 6), np.array([0, 1, 6])
    personal = population()
    reached = {name: dataclasses.replace(value, reach=2.0) for name, value in personal.strengths.items()}
    short = dataclasses.replace(personal, strengths=reached)
    labels = known, shown([0, 1, 2])
    (without,) = [personal_logits(given, patients, known[:0], np.zeros((0, 3)), personal, THREE, learner, causal=True)]
    far, near = (
        personal_logits(given, patients, *labels, one, THREE, learner, causal=True) for one in (personal, short)
    )
    np.testing.assert_array_equal(near[[0, 1, 2, 3, 6, 7, 8]], far[[0, 1, 2, 3, 6, 7, 8]])
    np.testing.assert_allclose(near[[4, 5, 9, 10, 11]], without[[4, 5, 9, 10, 11]])
    assert (far[[4, 5, 9, 10, 11]] != without[[4, 5, 9, 10, 11]]).any(axis=1).all()
    # It ends where labels are known late, too, and does not where all labels count, earlier or not.
    late = personal_logits(given, patients, *labels, short, THREE, learner, causal=True, delay=3.0)
    np.testing.assert_allclose(late, without)
    offline = [personal_logits(given, patients, *labels, one, THREE, learner) for one in (personal, short)]
    np.testing.assert_array_equal(*offline)


@pytest.mark.parametrize(("bout", "reach"), [(10, 5.0), (60, 20.0), (10**6, 0.0)])
def test_labels_count_for_as_long_as_they_help_on_validation_patients(bout: int, reach: float) -> None:
    """A patient's state lasts for so many samples on average, or for ever."""
    rng, patients, samples = np.random.default_rng(0), 60, 200
    ill = np.zeros((patients, samples), int)
    for own in ill:
        ends = np.cumsum(rng.geometric(1 / bout, samples))
        own[:] = (np.searchsorted(ends, np.arange(samples), side="right") + rng.integers(2)) % 2
    who = np.repeat(np.arange(patients), samples)
    score = 0.5 * (2 * ill.ravel() - 1) + rng.normal(size=ill.size)
    given = Outputs(
        np.stack([-score / 2, score / 2], axis=-1),
        np.zeros((len(who), 1)),
        np.tile(np.arange(float(samples)), patients),
    )
    strong = dict.fromkeys(DEFAULTS, Strengths()) | {"intercept-first": Strengths(intercept=1.0)}
    start = Population(np.zeros(1), np.eye(1), np.zeros((2, 1)), np.ones(1), np.array([0.5, 0.5]), strong, 0)
    two = target_of(TargetSpec("classes", ("well", "ill")))
    trials = [trial for trial in _People(given, np.eye(2)[ill.ravel()], who, two).trials() if trial.first]
    chosen = _choose_reach(start, trials, 1.0).strengths
    assert chosen["intercept-first"] == Strengths(intercept=1.0, reach=reach)
    assert chosen["effects-first"] == Strengths()


def test_what_loses_with_one_number_of_labels_is_not_chosen_for_what_it_gains_with_another() -> None:
    def judged(likelihood: float, *metrics: float) -> Any:
        return [SimpleNamespace(likelihood=np.array([likelihood]), metric=metric) for metric in metrics]

    before = judged(-0.5, 0.4, 0.4)
    options = [("none", before), ("harmful", judged(-0.1, 0.3, 0.9)), ("harmless", judged(-0.2, 0.4, 0.6))]
    assert _most_likely(options, before) == "harmless"
    assert _most_likely(options[:2], before) == "none"


def test_a_chain_is_learnt_where_classes_last_and_a_run_of_an_earlier_version_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    who, time = np.repeat(np.arange(40), 60), np.tile(np.arange(60.0), 40)
    y = (time // 10 + who) % 2
    x = y[:, None] + 2.0 * rng.normal(size=(len(who), 2))
    data = from_arrays(x, np.where(y > 0, "ill", "well"), who, times=time)
    options: Any = {"ratios": (0.5, 0.25, 0.25), "backbone_options": {"hidden": 16, "width": 8}}
    run = train(data, algorithm="base", backbone="mlp", epochs=3, lr=1e-2, out=tmp_path / "r", device="cpu", **options)
    assert run.population is not None
    assert run.population.chain is not None
    assert run.population.chain.transitions.diagonal().min() > 0.8
    assert run.population.best == MARKOV
    labels = ["ill" if y[row] else "well" for row in range(0, len(data), 20)]
    given = [labels[row // 20] if row % 20 == 0 else None for row in range(len(data))]
    rest = np.arange(len(data)) % 20 > 0
    by = {name: run.personalise(data, given, learner=name) for name in ("effects", MARKOV, AUTO)}
    right = {name: (values.argmax(axis=1) == data.targets.numpy())[rest].mean() for name, values in by.items()}
    assert right[MARKOV] > right["effects"] + 0.05
    np.testing.assert_array_equal(by[AUTO], by[MARKOV])
    np.testing.assert_array_equal(open_run(tmp_path / "r").personalise(data, given, learner=AUTO), by[AUTO])
    old = dataclasses.replace(run.population, strengths={"effects": Strengths(), "effects-first": Strengths()})
    with pytest.raises(ConfigError, match="trained before there was the learner 'markov': train it again"):
        dataclasses.replace(run, population=old).personalise(data, given, learner=MARKOV)


def test_strengths_come_from_validation_patients_and_are_none_where_labels_tell_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.population is not None
    assert run.population.patients == 10
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
    # Nor are they used with a variance of intercepts that training estimated.
    monkeypatch.setattr(run.algorithm, "intercept_variance", torch.tensor(4.0), raising=False)
    own = fit_population(run.algorithm, *halves, np.tile(np.float32([1 - share, share]), (len(halves[1]), 1)))
    assert own is not None
    assert own.strengths["intercept"] == own.strengths["intercept-first"] == Strengths()
    assert fit_population(run.algorithm, halves[0], None, None).strengths["intercept"] == Strengths(intercept=2**0.5)  # type: ignore[union-attr]


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


def test_a_run_opens_where_no_sample_looked_at_has_any_of_the_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Sixty of the training patients are looked at, and one in forty has a label.
    labels = (np.arange(200)[:, None] % 40 == [3, 17]).astype(int)
    data = from_arrays(rng.normal(size=(200, 4)), labels, np.arange(200), kind="multilabel", names=["a", "b"])
    split = split_named(data, train=map(str, range(120)), val=map(str, range(120, 160)), test=map(str, range(160, 200)))
    folder, looked_at = tmp_path / "run", _spread_rows(data.select(split.train), 60, 200)
    assert not data.select(split.train).targets[looked_at].any()
    train(data, split=split, algorithm="base", epochs=1, out=folder, device="cpu")
    outcome = open_run(folder).personalise(rng.normal(size=(2, 4)), [["a"], None], patients=["new", "new"])
    assert np.isfinite(outcome[1]).all()


def test_labels_of_a_column_of_pandas_are_taken_in_their_order(run: Run) -> None:
    rng, given = np.random.default_rng(0), ["ill", None, "well", "ill"]
    samples, times = rng.normal(size=(4, 4)), np.arange(4.0)

    def personal(labels: Any) -> np.ndarray:
        return run.personalise(samples, labels, patients=["new"] * 4, times=times)

    for kind in (object, "string", "category"):
        np.testing.assert_array_equal(personal(pd.Series(given, index=[3, 2, 1, 0], dtype=kind)), personal(given))


def test_labels_that_do_not_fit_are_errors(run: Run) -> None:
    new = people(1)
    with pytest.raises(DataError, match="there are 1 labels, but 1200 samples"):
        run.personalise(new, ["ill"])
    with pytest.raises(DataError, match="row 0: 'sick' is not one of the model's labels"):
        run.personalise(new, ["sick"] * len(new))
    with pytest.raises(ConfigError, match="did you mean 'effects'"):
        run.personalise(new, ["ill"] + [None] * (len(new) - 1), learner="efects")


def test_of_a_measured_value_no_labels_are_used(dataset_of: Any) -> None:
    data = dataset_of("regression", patients=6, samples=4)
    with pytest.raises(ConfigError, match="labels of a patient cannot be used for regression targets"):
        train(data, algorithm="base", epochs=1).personalise(data, ["1.0"] + [None] * (len(data) - 1))


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
