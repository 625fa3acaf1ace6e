"""Test-time batch-norm adaptation: Base whose batch statistics come from the new patient's own unlabelled samples.

Schneider et al., "Improving Robustness Against Common Corruptions by Covariate Shift Adaptation", NeurIPS 2020.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
mu_s, sigma_s           running statistics, of the training patients
mu_t, sigma_t           statistics of the samples of one new patient, n of them
N                       ``prior``: how many samples the training patients' statistics count for
mu, sigma^2             (N mu_s + n mu_t) / (N + n), and the same of the variances
======================  =====================================================================================

Training is Base's. With few samples of a patient the statistics stay near the training patients', and for a sample
alone (:meth:`predict`) they are the training patients'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manydg.algorithms import group_counts, group_sums, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Backbone, Inputs
from manydg.targets import Target


@dataclass(frozen=True)
class BNAdaptSettings(BaseSettings):
    prior: float = setting(16.0, 1.0, 512.0, "number of samples N that the training patients' statistics count for")


class BNAdapt(Base):
    """Base with batch normalisation adapted to each patient at prediction.

    It uses all given samples of the patient, including later ones, and no labels. It needs a backbone with
    batch normalisation over samples.
    """

    title, order = "Batch-norm adaptation", 180
    summary = "Batch normalisation adapted to each patient at prediction."

    Settings = BNAdaptSettings
    settings: BNAdaptSettings
    uses_patients = True

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if backbone.crop is not None:
            return "it adapts to whole patients at once, and a sequence model computes features some samples at a time"
        if batch_norms(backbone):
            return None
        return (
            f"it adapts the statistics of batch normalisation, and the backbone {type(backbone).__name__} has none: "
            "take another backbone, such as mlp or a convolutional one"
        )

    def predict_patients(self, inputs: Inputs, patients: Tensor) -> Tensor:
        _, groups = torch.unique(patients, return_inverse=True)
        with adapted(self.backbone, groups, self.settings.prior):
            return self.predict(inputs)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The layers of batch normalisation that keep running statistics."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]


@contextlib.contextmanager
def adapted(module: nn.Module, groups: Tensor, prior: float) -> Iterator[None]:
    """Within the block, batch normalisation uses statistics of each row's group, mixed with the running ones.

    - ``groups``: Tensor ``(batch,)`` int64, from 0
    - ``prior``: Number of rows that the running statistics count for.
    """
    number = int(groups.max()) + 1 if len(groups) else 0
    hook = partial(_normalise_groups, groups=groups, n_groups=number, prior=prior)
    handles = [layer.register_forward_hook(hook) for layer in batch_norms(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _normalise_groups(
    layer: _BatchNorm, arguments: tuple[Any, ...], output: Tensor, *, groups: Tensor, n_groups: int, prior: float
) -> Tensor:
    """The layer's output with each group's statistics; unchanged where its rows are not the samples."""
    values: Tensor = arguments[0]
    if len(values) != len(groups) or layer.running_mean is None or layer.running_var is None:
        return output
    counts = group_counts(groups, n_groups, values.dtype).unsqueeze(1)
    positions = tuple(range(2, values.ndim))

    def group_mean(of: Tensor) -> Tensor:
        rows = of.mean(dim=positions) if positions else of
        return group_sums(rows, groups, n_groups) / counts

    def at_rows(of: Tensor) -> Tensor:
        return of[groups].reshape(*values.shape[:2], *[1] * len(positions))

    mean = group_mean(values)
    variance = group_mean((values - at_rows(mean)).square())
    weight = counts / (counts + prior)
    mean, variance = torch.lerp(layer.running_mean, mean, weight), torch.lerp(layer.running_var, variance, weight)
    normal = (values - at_rows(mean)) * at_rows((variance + layer.eps).rsqrt())
    if not layer.affine:
        return normal
    shape = (1, -1, *[1] * len(positions))
    return normal * layer.weight.reshape(shape) + layer.bias.reshape(shape)
