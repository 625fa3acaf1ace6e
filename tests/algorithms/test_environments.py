"""Environments: patients, or clusters of patients with few samples, several samples of each in every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from manydg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from manydg.algorithms._families import SAMPLES_OF_AN_ENVIRONMENT, environments_of
from manydg.algorithms.irm import IRM, IRMSettings
from manydg.backbones import Backbone
from manydg.config import TrainingConfig
from manydg.data.columns import Column
from manydg.data.dataset import Batch, DomainDataset, from_arrays
from manydg.data.sampling import plan_epoch
from manydg.targets import target_of
from manydg.training.fit import fit

Given = Callable[[int], Backbone]
OVER_ENVIRONMENTS = [name for name in ALGORITHMS.names() if ALGORITHMS.get(name).sampling == "environments"]
CPU = torch.device("cpu")


def patients_with_effects(patients: int, samples: int, kinds: int = 0) -> DomainDataset:
    """Inputs that are the patient's own level and noise; with ``kinds``, the level is one of a few."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(patients), samples)
    levels = rng.normal(size=(patients, 3)) if not kinds else 10 * np.eye(kinds, 3)[np.arange(patients) % kinds]
    x = (levels[who] + 0.5 * rng.normal(size=(len(who), 3))).astype(np.float32)
    return from_arrays(x, rng.integers(0, 3, len(who)), who, kind="classes")


def batches(algorithm: Algorithm, data: DomainDataset, batch_size: int) -> list[Batch]:
    domains = algorithm.domains_of(data)
    seen = []
    for rows, pairs in plan_epoch(algorithm.sampling, domains, batch_size, 0, 1):
        batch = data.take(rows, pairs)
        seen.append(Batch(batch.inputs, batch.targets, domains[rows], pairs))
    return seen


def variance_of_means(codes: torch.Tensor, x: Column) -> float:
    assert isinstance(x, torch.Tensor)
    means = torch.stack([x[codes == code].mean(0) for code in torch.unique(codes)])
    return float(means.var(dim=0).mean())


def test_the_methods_that_compare_environments_are_given_some() -> None:
    assert OVER_ENVIRONMENTS == ["coral", "eqrm", "irm", "vrex"]


@pytest.mark.parametrize("name", OVER_ENVIRONMENTS)
def test_environments_vary_as_patients_do(name: str, given: Given) -> None:
    data = patients_with_effects(60, 40)
    x = data.column("x")
    assert isinstance(x, torch.Tensor)
    algorithm = build_algorithm(name, given(3), target_of(data.target), data.n_patients)
    between_patients = variance_of_means(data.domains, x)
    steps = [variance_of_means(batch.domains, batch.inputs["x"]) for batch in batches(algorithm, data, 64)]
    assert np.mean(steps) / between_patients == pytest.approx(1, abs=0.1)
    # Not so for what is sometimes called an environment: patients at random, by their codes.
    plain = [data.take(rows) for rows, _ in plan_epoch("samples", data.domains, 64, 0, 1)]
    modulo = [variance_of_means(batch.domains % 8, batch.inputs["x"]) for batch in plain]
    assert np.mean(modulo) / between_patients < 0.5


def test_a_patient_with_enough_samples_is_an_environment_and_others_share_one_with_those_alike(given: Given) -> None:
    rng = np.random.default_rng(0)
    counts = np.r_[[40] * 5, [1] * 90, [2] * 60]
    who = np.repeat(np.arange(len(counts)), counts)
    kind = np.arange(len(counts)) % 3
    x = (10 * np.eye(3)[kind][who] + rng.normal(size=(len(who), 3))).astype(np.float32)
    names = [f"p{code:03d}" for code in who]
    data = from_arrays(x, rng.integers(0, 2, len(who)), names, kind="binary")
    environments = environments_of(given(3), data, CPU)
    assert environments[:5].tolist() == [0, 1, 2, 3, 4]
    shared = environments[5:]
    assert bool((shared >= 5).all())
    # 210 samples make three clusters, which are the three kinds of patients here.
    alike = shared[:, None] == shared[None, :]
    assert torch.equal(alike, torch.from_numpy(kind[5:, None] == kind[None, 5:]))
    _, sizes = torch.unique(environments[data.domains], return_counts=True)
    assert int(sizes.min()) >= SAMPLES_OF_AN_ENVIRONMENT


def test_labels_take_no_part_in_the_environments(given: Given) -> None:
    data = patients_with_effects(150, 1, kinds=3)
    other = from_arrays(data.column("x"), 2 - data.targets, data.domains, kind="classes")
    first, second = (environments_of(given(3), dataset, CPU) for dataset in (data, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", OVER_ENVIRONMENTS)
def test_training_on_patients_of_one_sample_compares_clusters_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, seen = patients_with_effects(300, 1, kinds=3), []
    kind = ALGORITHMS.get(name)
    losses = kind.losses

    def watched(self: Algorithm, batch: Batch) -> dict[str, torch.Tensor]:
        seen.append(torch.unique(batch.domains, return_counts=True)[1])
        return losses(self, batch)

    monkeypatch.setattr(kind, "losses", watched)
    config = TrainingConfig(algorithm=name, backbone="mlp", epochs=1, batch_size=50)
    fit(config, data, None, CPU)
    assert len(seen) == 6
    assert all(len(counts) >= 2 and float(counts.float().mean()) >= 4 for counts in seen)


def test_the_penalty_sets_in_once_with_a_fresh_adam(given: Given) -> None:
    data = patients_with_effects(4, 10)
    model = IRM(given(3), target_of(data.target), 4, IRMSettings(weight=50.0, anneal=0.4))
    optimizers, batch = model.optimizers(1e-3, 0.0), data.take(torch.arange(40))
    weights, steps = [], []
    for progress in (0.0, 0.3, 0.4, 0.5, 0.9):
        model.progress.fill_(progress)
        with torch.no_grad():
            weights.append(float(model.annealed_weight()))
        model.step(batch, optimizers)
        steps.append(max(float(state["step"]) for state in optimizers["main"].state.values()))
    assert weights == [1.0, 1.0, 50.0, 50.0, 50.0]
    assert steps == [1, 2, 1, 2, 3]
    # A run that goes on from a checkpoint knows that it is over.
    again = IRM(given(3), target_of(data.target), 4, model.settings)
    again.load_state_dict(model.state_dict())
    assert bool(again.annealed)


def test_the_penalty_sets_in_anew_where_training_goes_on_with_other_patients(given: Given) -> None:
    data = patients_with_effects(4, 10)
    model = IRM(given(3), target_of(data.target), 4, IRMSettings(weight=50.0, anneal=0.4))
    batch, steps = data.take(torch.arange(40)), []
    for _ in ("first", "further"):
        optimizers = model.optimizers(1e-3, 0.0)
        for progress in (0.0, 0.3, 0.4, 0.9):
            model.progress.fill_(progress)
            model.step(batch, optimizers)
            steps.append(max(float(state["step"]) for state in optimizers["main"].state.values()))
    assert steps == 2 * [1, 2, 1, 2]


def test_a_fresh_adam_takes_the_step_that_a_new_one_would(given: Given) -> None:
    data = patients_with_effects(4, 10)
    model = IRM(given(3), target_of(data.target), 4, IRMSettings(weight=50.0, anneal=0.4))
    optimizers, batch = model.optimizers(1e-3, 0.0), data.take(torch.arange(40))
    for _ in range(3):
        model.step(batch, optimizers)
    model.progress.fill_(0.6)
    other = IRM(given(3), target_of(data.target), 4, model.settings)
    other.load_state_dict(model.state_dict())
    other.progress.fill_(0.6)
    model.step(batch, optimizers)
    other.step(batch, other.optimizers(1e-3, 0.0))
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, new)
