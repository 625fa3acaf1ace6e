"""EQRM: the risk that a new patient stays below with a given probability.

Eastwood et al., "Probable Domain Generalization via Quantile Risk Minimization", NeurIPS 2022.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
e, R^e                  a patient, and the mean loss of the patient's rows in the batch
alpha                   ``alpha``: the probability that a new patient's risk is below what is minimised
F_n, h                  Gaussian kernel estimate of the risks' distribution, bandwidth 1.06 sd n^(-1/5)
F_n^(-1)(alpha)         :func:`kernel_quantile`
======================  =====================================================================================

Until the share ``burn_in`` of the training is done the mean of the risks is minimised, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import Sampling, setting
from manydg.algorithms._parts import group_risks, mean_and_variance
from manydg.algorithms.base import Base, BaseSettings
from manydg.data.dataset import Batch

_NARROWEST = 1e-3
_HALVINGS = 40


@dataclass(frozen=True)
class EQRMSettings(BaseSettings):
    alpha: float = setting(0.75, 0.5, 0.99, "quantile of the patients' risks that is minimised", log=False)
    burn_in: float = setting(0.3, 0.01, 0.6, "share of the training in which the mean risk is minimised")


class EQRM(Base):
    """Base on a high quantile of the patients' risks instead of their mean.

    A step holds several samples of each of several patients. The kernel estimate has an entry for every
    training patient; those without a row in the batch have no weight.
    """

    title, order = "EQRM", 160
    summary = "A high quantile of the patients' risks."

    Settings = EQRMSettings
    settings: EQRMSettings
    static_step = False
    sampling: Sampling = "episodes"

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        each = self.target.loss_per_sample(self.predict(batch.inputs), batch.targets)
        risks, present = group_risks(each, batch.domains, self.n_domains)
        mean, variance = mean_and_variance(risks, present)
        quantile = kernel_quantile(risks, present, variance, min(max(self.settings.alpha, 0.01), 0.99))
        return {"risk": torch.where(self.progress < self.settings.burn_in, mean, quantile)}


def kernel_quantile(risks: Tensor, present: Tensor, variance: Tensor, alpha: float) -> Tensor:
    """Quantile of a Gaussian kernel estimate, with its gradient in the risks.

    Parameters
    ----------
    risks, present : Tensor ``(n,)``
        Values, and 1 where a value takes part, else 0.
    variance : Tensor
        Of the values that take part.
    alpha : float
        Between 0 and 1.
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
