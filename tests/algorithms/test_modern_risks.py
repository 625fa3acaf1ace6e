"""CORAL, V-REx, GroupDRO and EQRM: what each makes of the environments of a batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.algorithms.coral import CORAL, CORALSettings, moments, spread
from manydg.algorithms.eqrm import EQRM, EQRMSettings, kernel_quantile
from manydg.algorithms.groupdro import GroupDRO, GroupDROSettings, cluster_patients, patient_means
from manydg.algorithms.vrex import VREx, VRExSettings
from manydg.backbones import Backbone
from manydg.data.dataset import Batch, DomainDataset, from_arrays
from manydg.data.info import TargetSpec
from manydg.targets import target_of

Given = Callable[[int], Backbone]
TARGET = target_of(TargetSpec("classes", ("a", "b", "c")))
DOMAINS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 4, 4])


def batch_of(features: Tensor) -> Batch:
    return Batch({"x": features}, torch.arange(len(features)) % 3, DOMAINS)


def risk_of(algorithm: Algorithm, batch: Batch, rows: Tensor) -> Tensor:
    each = TARGET.loss_per_sample(algorithm.predict(batch.inputs), batch.targets)
    return each[rows].mean()


def test_coral_is_the_mean_over_pairs_of_environments_of_both_moments() -> None:
    features = torch.randn(12, 4, dtype=torch.float64)
    groups = DOMAINS % 3
    means, covariances, present = moments(features, groups, 5)
    assert present.tolist() == [1, 1, 0, 0, 0]
    parts = [features[groups == group].numpy() for group in (0, 1)]
    for group, part in enumerate(parts):
        np.testing.assert_allclose(means[group], part.mean(axis=0))
        np.testing.assert_allclose(covariances[group], np.cov(part.T))
    three = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    values = torch.randn(5, 7, dtype=torch.float64)
    pairs = [((values[i] - values[j]) ** 2).mean() for i, j in combinations((0, 1, 3), 2)]
    torch.testing.assert_close(spread(values, three), torch.stack(pairs).mean())


def test_coral_sees_covariance_where_means_agree(given: Given) -> None:
    model = CORAL(given(4), TARGET, 5, CORALSettings(environments=2, weight=1.0))
    narrow = torch.randn(500, 4)
    domains = torch.arange(500) % 2
    same = Batch({"x": narrow}, torch.zeros(500, dtype=torch.int64), domains)
    wide = Batch({"x": torch.where(domains[:, None] == 1, 3 * narrow, narrow)}, same.targets, domains)
    assert model.losses(same)["alignment"].item() < 0.1
    assert model.losses(wide)["alignment"].item() > 1.0


def test_vrex_adds_the_variance_of_the_environments_risks(given: Given) -> None:
    model = VREx(given(4), TARGET, 5, VRExSettings(environments=3, weight=7.0, warmup=0.1))
    batch = batch_of(torch.randn(12, 4))
    risks = torch.stack([risk_of(model, batch, e == DOMAINS % 3) for e in (0, 1)]).detach()
    model.progress.fill_(0.5)
    terms = model.losses(batch)
    torch.testing.assert_close(terms["supervised"].detach(), risks.mean())
    torch.testing.assert_close(terms["variance"].detach(), 7.0 * risks.var(correction=0))
    model.progress.fill_(0.05)
    assert float(model.losses(batch)["variance"].detach()) == 0.0


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
    kind = np.arange(12) % 3
    x = 10 * np.eye(3)[kind][who] + rng.normal(size=(240, 3))
    dataset = from_arrays(x.astype(np.float32), rng.integers(0, 3, 240), who, kind="classes")
    model = GroupDRO(given(3), TARGET, 12, GroupDROSettings(groups=3))
    model.fit_inputs(dataset)
    alike = model.group[:, None] == model.group[None, :]
    order = np.array([int(name) for name in dataset.patients]) % 3
    assert torch.equal(alike, torch.from_numpy(order[:, None] == order[None, :]))
    assert patient_means(given(3), dataset).shape == (12, 3)


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


def test_one_patient_s_quantile_is_the_patient_s_risk(given: Given, dataset_of: Callable[..., DomainDataset]) -> None:
    dataset = dataset_of("classes", patients=1, samples=20)
    model = EQRM(given(6), TARGET, 1, EQRMSettings(burn_in=0.0))
    batch = dataset.take(torch.arange(20))
    assert model.losses(batch)["risk"].item() == pytest.approx(
        TARGET.loss(model.predict(batch.inputs), batch.targets).item(), abs=2e-3
    )
