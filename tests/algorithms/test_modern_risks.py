"""CORAL, V-REx, GroupDRO and EQRM: what each makes of the environments of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.algorithms._families import cluster_patients, patient_means
from manydg.algorithms.coral import CORAL, CORALSettings, spread_of_moments
from manydg.algorithms.eqrm import EQRM, EQRMSettings, kernel_quantile
from manydg.algorithms.groupdro import GroupDRO, GroupDROSettings
from manydg.algorithms.vrex import VREx, VRExSettings
from manydg.backbones import Backbone
from manydg.data.dataset import Batch, DomainDataset, from_arrays
from manydg.data.info import TargetSpec
from manydg.targets import target_of
from manydg.training.record import pack_optimizer, unpack_optimizer

Given = Callable[[int], Backbone]
TARGET = target_of(TargetSpec("classes", ("a", "b", "c")))
DOMAINS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 4, 4])


def batch_of(features: Tensor) -> Batch:
    return Batch({"x": features}, torch.arange(len(features)) % 3, DOMAINS)


def risk_of(algorithm: Algorithm, batch: Batch, rows: Tensor) -> Tensor:
    each = TARGET.loss_per_sample(algorithm.predict(batch.inputs), batch.targets)
    return each[rows].mean()


def test_coral_is_the_mean_over_pairs_of_environments_of_both_moments() -> None:
    features = 3 + torch.randn(15, 4, dtype=torch.float64)
    # The fifth environment, of a single row, is left out.
    groups = torch.tensor([*DOMAINS.tolist(), 6, 0, 4])
    parts = [features[groups == group].numpy() for group in (0, 1, 3, 4)]
    wanted = [
        ((a.mean(axis=0) - b.mean(axis=0)) ** 2).mean() + ((np.cov(a.T) - np.cov(b.T)) ** 2).mean()
        for a, b in combinations(parts, 2)
    ]
    assert spread_of_moments(features, groups).item() == pytest.approx(np.mean(wanted))
    assert spread_of_moments(features[:3], groups[:3]).item() == pytest.approx(0.0, abs=1e-12)


def test_coral_sees_covariance_where_means_agree(given: Given) -> None:
    model = CORAL(given(4), TARGET, 5, CORALSettings(weight=1.0))
    narrow = torch.randn(500, 4)
    domains = torch.arange(500) % 2
    same = Batch({"x": narrow}, torch.zeros(500, dtype=torch.int64), domains)
    wide = Batch({"x": torch.where(domains[:, None] == 1, 3 * narrow, narrow)}, same.targets, domains)
    assert model.losses(same)["alignment"].item() < 0.1
    assert model.losses(wide)["alignment"].item() > 1.0


def test_vrex_adds_the_variance_of_the_environments_risks(given: Given) -> None:
    model = VREx(given(4), TARGET, 5, VRExSettings(weight=7.0, anneal=0.1))
    batch = batch_of(torch.randn(12, 4))
    risks = torch.stack([risk_of(model, batch, e == DOMAINS) for e in (0, 1, 3, 4)]).detach()
    for progress, weight in ((0.05, 1.0), (0.1, 7.0), (0.5, 7.0)):
        model.progress.fill_(progress)
        terms = model.losses(batch)
        torch.testing.assert_close(terms["supervised"].detach(), risks.mean())
        torch.testing.assert_close(terms["variance"].detach(), weight * risks.var(correction=0))


def test_groupdro_raises_the_weight_of_the_worst_group(given: Given) -> None:
    model = GroupDRO(given(4), TARGET, 5, GroupDROSettings(groups=3, speed=0.5)).train()
    batch = batch_of(torch.randn(12, 4))
    risks = torch.stack([risk_of(model, batch, e == DOMAINS % 3) for e in (0, 1)]).detach()
    loss = model.losses(batch)["worst_groups"].detach()
    # Patients 0 and 3 are of group 0, patients 1 and 4 of group 1, and nobody here of group 2.
    raised = torch.exp(0.5 * torch.cat([risks, torch.zeros(1)]))
    torch.testing.assert_close(model.emphasis, raised / raised.sum())
    weights = raised[:2] / raised[:2].sum()
    torch.testing.assert_close(loss, (weights * risks).sum())
    for _ in range(400):
        model.losses(batch)
    assert float(model.emphasis[int(risks.argmax())]) > 0.9


def test_groupdro_finds_patients_that_look_alike(given: Given) -> None:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(12), 20)
    kind = np.arange(12) // 4
    x = 10 * np.eye(3)[kind][who] + rng.normal(size=(240, 3))
    dataset = from_arrays(x.astype(np.float32), rng.integers(0, 3, 240), who, kind="classes")
    model = GroupDRO(given(3), TARGET, 12, GroupDROSettings(groups=3))
    model.domains_of(dataset)
    alike = model.group[:, None] == model.group[None, :]
    order = np.array([int(name) for name in dataset.patients]) // 4
    assert torch.equal(alike, torch.from_numpy(order[:, None] == order[None, :]))
    assert patient_means(given(3), dataset, torch.device("cpu")).shape == (12, 3)


def test_groupdro_groups_the_patients_that_training_goes_on_with(given: Given) -> None:
    rng = np.random.default_rng(0)
    who, kind = np.repeat(np.arange(24), 10), np.arange(24) % 3
    x = (10 + 10 * np.eye(3)[kind][who] + rng.normal(size=(240, 3))).astype(np.float32)
    whole = from_arrays(x, rng.integers(0, 3, 240), [f"p{code:02d}" for code in who], kind="classes")
    model = GroupDRO(given(3), TARGET, 24, GroupDROSettings(groups=3))
    for patients in (np.arange(12), np.arange(12, 24)):
        rows = np.flatnonzero(np.isin(who, patients))
        part = whole.select(rows)
        # Under the codes that they have among all patients, as in continual learning.
        part = replace(part, domains=whole.domains[torch.from_numpy(rows)], patients=whole.patients)
        model.emphasis.copy_(torch.tensor([0.8, 0.1, 0.1]))
        assert torch.equal(model.domains_of(part), part.domains)
        groups, kinds = model.group[patients], kind[patients]
        alike = torch.from_numpy(kinds[:, None] == kinds[None, :])
        assert torch.equal(groups[:, None] == groups[None, :], alike)
        torch.testing.assert_close(model.emphasis, torch.full((3,), 1 / 3))


def test_no_feature_decides_the_clusters_by_its_unit() -> None:
    kind = torch.arange(20) % 2
    noise = 1000 * torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    groups = cluster_patients(torch.cat([noise, kind[:, None].repeat(1, 4).float()], dim=1), 2)
    assert torch.equal(groups == groups[0], kind == kind[0])


def test_patients_all_alike_are_one_cluster() -> None:
    assert cluster_patients(torch.ones(6, 2), 4).tolist() == [0] * 6


@pytest.mark.parametrize("alpha", [0.3, 0.75, 0.95])
def test_the_kernel_quantile_is_that_of_scipy(alpha: float) -> None:
    values = np.random.default_rng(1).gamma(2.0, size=9)
    risks = torch.tensor([*values, 50.0], dtype=torch.float64)
    present = torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64)
    found = kernel_quantile(risks, present, torch.tensor(values.var()), alpha)
    # SciPy's bandwidth is a factor on the sample deviation.
    width = 1.06 * values.std() * 9**-0.2
    estimate = stats.gaussian_kde(values, bw_method=width / values.std(ddof=1))
    wanted = optimize.brentq(lambda x: estimate.integrate_box_1d(-np.inf, x) - alpha, -5, 20)
    assert float(found) == pytest.approx(wanted, abs=1e-4)


def test_the_gradient_of_the_kernel_quantile_is_the_numeric_one(
    numeric_gradient: Callable[[Callable[[Tensor], float], Tensor], Tensor],
) -> None:
    risks = torch.tensor([0.2, 0.5, 0.9, 1.4], dtype=torch.float64)
    present = torch.ones(4, dtype=torch.float64)

    def quantile(values: Tensor) -> Tensor:
        return kernel_quantile(values, present, values.var(correction=0), 0.8)

    point = risks.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(quantile(point), point)
    slopes = numeric_gradient(lambda values: float(quantile(values)), risks)
    torch.testing.assert_close(gradient, slopes, atol=1e-4, rtol=1e-3)
    # It is the worst patients that are learnt from.
    assert float(gradient[3]) > float(gradient[0])


def test_eqrm_minimises_the_mean_first_and_the_quantile_then(given: Given) -> None:
    model = EQRM(given(4), TARGET, 5, EQRMSettings(alpha=0.9, burn_in=0.3))
    batch = batch_of(torch.randn(12, 4))
    risks = torch.stack([risk_of(model, batch, p == DOMAINS) for p in (0, 1, 3, 4)]).detach()
    model.progress.fill_(0.1)
    torch.testing.assert_close(model.losses(batch)["risk"].detach(), risks.mean())
    model.progress.fill_(0.9)
    loss = model.losses(batch)["risk"].item()
    wanted = kernel_quantile(risks, torch.ones(4), risks.var(correction=0), 0.9)
    assert loss == pytest.approx(float(wanted), rel=1e-4)
    assert loss > float(risks.mean())


def test_eqrm_leaves_the_burn_in_once_with_a_fresh_adam_and_a_lower_learning_rate(given: Given) -> None:
    model = EQRM(given(4), TARGET, 5, EQRMSettings(burn_in=0.5, late_lr=0.1))
    optimizers, batch = model.optimizers(1e-2, 0.0), batch_of(torch.randn(12, 4))
    seen = []
    for progress in (0.0, 0.4, 0.5, 0.9):
        model.progress.fill_(progress)
        model.step(batch, optimizers)
        steps = [float(state["step"]) for state in optimizers["main"].state.values()]
        seen.append((optimizers["main"].param_groups[0]["lr"], max(steps)))
    assert [lr for lr, _ in seen] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert [step for _, step in seen] == [1, 2, 1, 2]
    # What a checkpoint keeps of an optimiser is enough to go on without leaving it again.
    again = model.optimizers(1e-2, 0.0)
    tensors, meta = pack_optimizer("main", optimizers["main"])
    unpack_optimizer("main", again["main"], tensors, json.loads(json.dumps(meta)))
    model.step(batch, again)
    assert max(float(state["step"]) for state in again["main"].state.values()) == 3
    assert again["main"].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_one_patient_s_quantile_is_the_patient_s_risk(given: Given, dataset_of: Callable[..., DomainDataset]) -> None:
    dataset = dataset_of("classes", patients=1, samples=20)
    model = EQRM(given(6), TARGET, 1, EQRMSettings(burn_in=0.0))
    batch = dataset.take(torch.arange(20))
    assert model.losses(batch)["risk"].item() == pytest.approx(
        TARGET.loss(model.predict(batch.inputs), batch.targets).item(), abs=2e-3
    )
