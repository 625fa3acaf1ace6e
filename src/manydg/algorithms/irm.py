"""IRM: features on which one classifier is optimal for every environment at once.

Arjovsky, Bottou, Gulrajani and Lopez-Paz, "Invariant Risk Minimization", 2019 (IRMv1).

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
Phi                     ``backbone`` and ``head`` together: x -> logits
w = 1.0                 a dummy scale on the logits, never built: its gradient has a closed form in the logits'
R^e                     mean loss of the environment e
lambda                  ``weight``, from the share ``anneal`` of the training on; 1 before it
======================  =====================================================================================

An environment is a patient, or a cluster of patients with few samples. Schedule and range of the weight are those of
DomainBed; its default of 100 cost validation patients of the sleep features .05 of kappa against 10.
The penalty ||grad_w R^e(w Phi)||^2 is estimated without bias: the paper multiplies the gradients of two halves of
the environment's rows, and the mean of that product over all ways to halve them is the mean of g_i g_j over all pairs
of different rows, which is what is computed here. Like the paper's, the estimate may fall below zero by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import setting
from manydg.algorithms._families import Annealed, AnnealedSettings
from manydg.data.dataset import Batch
from manydg.targets import Target


@dataclass(frozen=True)
class IRMSettings(AnnealedSettings):
    weight: float = setting(10.0, 0.1, 1e5, "weight lambda of the penalty")
    anneal: float = setting(0.1, 0.01, 0.9, "share of the training before the penalty has its full weight")


class IRM(Annealed):
    """Base with the IRMv1 penalty, averaged over the environments that a batch holds two rows of or more."""

    title, order = "IRM", 50
    summary = "One classifier that is optimal in every environment."
    in_paper = True

    Settings = IRMSettings
    settings: IRMSettings

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.predict(batch.inputs)
        terms = {"supervised": self.target.loss(logits, batch.targets)}
        if self.settings.weight:
            gradients = scale_gradients(self.target, logits, batch.targets)
            penalties, counted = squared_means(gradients, batch.domains, self.n_domains)
            terms["penalty"] = self.annealed_weight() * penalties.sum() / counted.sum().clamp_min(1)
        return terms


def scale_gradients(target: Target, logits: Tensor, targets: Tensor) -> Tensor:
    """Gradient of each sample's loss with respect to a scale w on its logits, at w = 1, ``(batch,)``.

    By the chain rule it is the inner product of the logits with the loss's gradient in them.
    """
    loss = target.loss_per_sample(logits, targets).sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    return (gradient * logits).sum(dim=-1)


def squared_means(values: Tensor, groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Unbiased estimate of each group's squared mean.

    - ``values`` ``(batch,)``
    - ``groups`` ``(batch,)``
    - returns ``squared`` ``(n_groups,)``: Mean of ``values[i] * values[j]`` over the pairs i != j of the group; zero
      where it has no pair.
    - returns ``counted`` ``(n_groups,)``: Which groups have a pair.
    """
    empty = values.new_zeros(n_groups)
    count = empty.index_add(0, groups, torch.ones_like(values))
    total = empty.index_add(0, groups, values)
    squares = empty.index_add(0, groups, values.square())
    return (total.square() - squares) / (count * (count - 1)).clamp_min(1), count > 1
