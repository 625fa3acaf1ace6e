"""EQRM: the risk that a new patient stays below with a given probability.

Eastwood et al., "Probable Domain Generalization via Quantile Risk Minimization", NeurIPS 2022.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
e, R^e                  an environment: a patient, or a cluster of patients with few samples; its mean loss
alpha                   ``alpha``: the probability that a new patient's risk is below what is minimised
F_n, h                  Gaussian kernel estimate of the risks' distribution, bandwidth 1.06 sd n^(-1/5)
F_n^(-1)(alpha)         :func:`kernel_quantile`
======================  =====================================================================================

Until the share ``burn_in`` of the training is done the mean of the risks is minimised. Then Adam starts anew at a lower
learning rate, as in the authors' code: 5e-5 before and 1e-6 after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from manydg.algorithms import Optimizers, group_risks, mean_and_variance, setting
from manydg.algorithms._families import OverEnvironments
from manydg.algorithms.base import BaseSettings
from manydg.data.dataset import Batch

_NARROWEST = 1e-3
_HALVINGS = 40


@dataclass(frozen=True)
class EQRMSettings(BaseSettings):
    alpha: float = setting(0.75, 0.5, 0.99, "quantile of the patients' risks that is minimised", log=False)
    burn_in: float = setting(0.5, 0.06, 0.63, "share of the training in which the mean risk is minimised")
    late_lr: float = setting(0.02, 0.002, 0.2, "learning rate after the burn-in, as a share of that before it")


class EQRM(OverEnvironments):
    """Base on a high quantile of the environments' risks instead of their mean.

    The kernel estimate has an entry for every environment; those without a row in the batch have no weight.
    """

    title, order = "EQRM", 160
    summary = "A high quantile of the patients' risks."

    Settings = EQRMSettings
    settings: EQRMSettings
    static_step = False

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        each = self.target.loss_per_sample(self.predict(batch.inputs), batch.targets)
        risks, present = group_risks(each, batch.domains, self.n_domains)
        mean, variance = mean_and_variance(risks, present)
        quantile = kernel_quantile(risks, present, variance, min(max(self.settings.alpha, 0.01), 0.99))
        return {"risk": torch.where(self.progress < self.settings.burn_in, mean, quantile)}

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        self._leave_burn_in(optimizers["main"])
        return super().step(batch, optimizers)

    def _leave_burn_in(self, optimizer: Optimizer) -> None:
        """Once, when the burn-in is over: a fresh Adam with the later learning rate."""
        groups = optimizer.param_groups
        # The first rate is kept with the optimiser, so that a run that goes on from a checkpoint knows.
        if any("initial_lr" in group for group in groups) or bool(self.progress < self.settings.burn_in):
            return
        optimizer.state.clear()
        for group in groups:
            group["initial_lr"] = group["lr"]
            group["lr"] = self.settings.late_lr * group["initial_lr"]


def kernel_quantile(risks: Tensor, present: Tensor, variance: Tensor, alpha: float) -> Tensor:
    """Quantile of a Gaussian kernel estimate, with its gradient in the risks.

    - ``risks``, ``present`` ``(n,)``: Values, and 1 where a value takes part, else 0.
    - ``variance``: Of the values that take part.
    - ``alpha``: Between 0 and 1.
    """
    number = present.sum().clamp_min(1)
    bandwidth = 1.06 * (variance + _NARROWEST**2).sqrt() * number**-0.2

    def share_below(risk: Tensor) -> Tensor:
        share: Tensor = (torch.special.ndtr((risk - risks) / bandwidth) * present).sum() / number
        return share

    with torch.no_grad():
        reach = 4 * bandwidth
        low = torch.where(present > 0, risks, torch.inf).min() - reach
        high = torch.where(present > 0, risks, -torch.inf).max() + reach
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = share_below(middle) < alpha
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        solution = (low + high) / 2
        steps = (solution - risks) / bandwidth
        density = (torch.exp(-steps.square() / 2) * present).sum() / (number * bandwidth * math.sqrt(2 * math.pi))
    # A Newton step from the solution does not move, but its gradient is that of the quantile (implicit function).
    return solution - (share_below(solution) - alpha) / density
