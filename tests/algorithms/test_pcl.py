"""PCL's negatives: other classes' proxies and samples, and no sample of one's own class."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from manydg.algorithms.pcl import PCL, PCLSettings, proxy_contrast
from manydg.backbones import Backbone
from manydg.data.dataset import Batch
from manydg.data.info import TargetSpec
from manydg.targets import target_of

LABELS = torch.tensor([0, 0, 1, 2, 1, 0])


def unit(rows: int) -> torch.Tensor:
    return functional.normalize(torch.randn(rows, 5, dtype=torch.float64), dim=-1)


def test_the_loss_equals_the_paper_s_sum_over_negatives() -> None:
    samples, proxies, scale = unit(6), unit(3), 12.0
    z, w, y = samples.numpy(), proxies.numpy(), LABELS.tolist()
    rows = []
    for i in range(6):
        positive = np.exp(scale * z[i] @ w[y[i]])
        other_proxies = sum(np.exp(scale * z[i] @ w[k]) for k in range(3) if k != y[i])
        other_samples = sum(np.exp(scale * z[i] @ z[j]) for j in range(6) if y[j] != y[i])
        rows.append(-np.log(positive / (positive + other_proxies + other_samples)))
    assert proxy_contrast(samples, proxies, LABELS, scale).item() == pytest.approx(np.mean(rows), rel=1e-10)


def test_samples_of_one_class_neither_attract_nor_repel_each_other() -> None:
    samples, proxies = unit(6), unit(3)
    # All of one class: only the proxies are left, and the loss of a sample does not know the others.
    same = torch.zeros(6, dtype=torch.int64)
    alone = [proxy_contrast(samples[i : i + 1], proxies, same[:1], 12.0).item() for i in range(6)]
    assert proxy_contrast(samples, proxies, same, 12.0).item() == pytest.approx(np.mean(alone), rel=1e-12)


def test_a_sample_of_another_class_is_pushed_away() -> None:
    samples, proxies = unit(2).requires_grad_(), unit(3)
    (gradient,) = torch.autograd.grad(proxy_contrast(samples, proxies, torch.tensor([0, 1]), 12.0), samples)
    without = sum(proxy_contrast(samples[i : i + 1], proxies, torch.tensor([i]), 12.0) for i in range(2)) / 2
    assert isinstance(without, torch.Tensor)
    (from_proxies,) = torch.autograd.grad(without, samples)
    towards = samples.detach()[1] - samples.detach()[0]
    # Descending the loss moves the first sample against the direction of the second.
    assert float(-(gradient - from_proxies)[0] @ towards) < 0


def test_the_contrast_is_made_on_projections_of_unit_length(given: Callable[[int], Backbone]) -> None:
    target = target_of(TargetSpec("classes", ("a", "b", "c")))
    model = PCL(given(5), target, 4, PCLSettings(weight=0.7, scale=12.0))
    v = torch.randn(6, 5)
    terms = model.losses(Batch({"x": v}, LABELS, torch.zeros(6, dtype=torch.int64)))
    samples = functional.normalize(model.project_samples(v), dim=-1)
    proxies = functional.normalize(model.proxies @ model.project_proxies.weight.T, dim=-1)
    torch.testing.assert_close(terms["contrastive"], 0.7 * proxy_contrast(samples, proxies, LABELS, 12.0))
    torch.testing.assert_close(terms["supervised"], functional.cross_entropy(v @ model.proxies.T, LABELS))
