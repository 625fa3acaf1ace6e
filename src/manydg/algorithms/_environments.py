"""Environments: what methods that compare training domains take for a domain, and penalties that set in late.

A patient with enough samples is an environment. Patients with fewer share one with those who look alike: the means of
each patient's features under the untrained backbone, a random projection of the inputs, are standardised and clustered
by k-means. No label takes part.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from manydg.algorithms import Hyperparameters, Optimizers, Sampling
from manydg.algorithms._parts import group_counts, group_sums
from manydg.algorithms.base import Base
from manydg.backbones import Backbone
from manydg.data.dataset import Batch, DomainDataset
from manydg.targets import Target

SAMPLES_OF_AN_ENVIRONMENT = 8
"""A patient with fewer samples shares an environment with others."""
_SAMPLES_OF_A_CLUSTER = 64
_MOST_CLUSTERS = 64
_SAMPLES_OF_A_PATIENT = 8
_ROWS_AT_ONCE = 1024


class OverEnvironments(Base):
    """Base of algorithms whose steps hold several samples of each of several environments.

    The domains of a batch are codes of environments, from 0 to fewer than ``n_domains``.
    """

    sampling: Sampling = "environments"

    def domains_of(self, train: DomainDataset) -> Tensor:
        patients = environments_of(self.backbone, train, self.progress.device)
        return patients.to(train.device)[train.domains]


class Annealed(OverEnvironments):
    """Base of algorithms whose penalty counts for 1 at first, and for its weight when a share of training is done.

    Adam is reset at that step, as in the authors' code: its running averages are of gradients of another size.
    """

    annealed: Tensor

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: Hyperparameters | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)  # type: ignore[arg-type]
        self.register_buffer("annealed", torch.zeros((), dtype=torch.bool))

    def annealed_weight(self, weight: float, anneal: float) -> Tensor:
        """The penalty's weight at this step, a scalar."""
        return torch.where(self.progress < anneal, min(weight, 1.0), weight)

    def step_annealed(self, batch: Batch, optimizers: Optimizers, anneal: float) -> dict[str, Tensor]:
        """One update, from a fresh Adam at the first step after the annealing."""
        over = self.progress >= anneal
        reset_adam(optimizers["main"], over & ~self.annealed)
        self.annealed.logical_or_(over)
        return super().step(batch, optimizers)


def reset_adam(optimizer: Optimizer, when: Tensor) -> None:
    """Forget the running averages of Adam if ``when``, a scalar on the device, is true; nothing waits for its value."""
    kept = torch.where(when, 0.0, 1.0)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        values = [state[key] for state in optimizer.state.values() if key in state]
        if values:
            torch._foreach_mul_(values, kept.to(values[0].device))


def environments_of(backbone: Backbone, train: DomainDataset, device: torch.device) -> Tensor:
    """Environment of each training patient, ``(patients,)`` int64, numbered from 0.

    Parameters
    ----------
    backbone : Backbone
        Untrained.
    train : DomainDataset
    device : torch.device
        Where the backbone is.
    """
    counts = torch.bincount(train.domains.cpu(), minlength=train.n_patients)
    few = counts < SAMPLES_OF_AN_ENVIRONMENT
    environments = (~few).cumsum(0) - 1
    if not bool(few.any()):
        return environments
    samples = int(counts[few].sum())
    number = min(max(1, samples // _SAMPLES_OF_A_CLUSTER), _MOST_CLUSTERS)
    of_few = few.to(train.device)[train.domains]
    clusters = cluster_patients(patient_means(backbone, train.select(of_few), device), number)
    # A patient without a single sample is never met.
    environments[few & (counts > 0)] = clusters + int((~few).sum())
    return environments.clamp_min(0)


@torch.no_grad()
def patient_means(backbone: Backbone, train: DomainDataset, device: torch.device) -> Tensor:
    """Mean features of a few samples of each patient, ``(patients, dim)``, on the CPU."""
    domains = train.domains.cpu()
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(domains)))
    order = shuffled[torch.argsort(domains[shuffled], stable=True)]
    counts = torch.bincount(domains, minlength=train.n_patients)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[domains[order]]
    rows = order[rank < _SAMPLES_OF_A_PATIENT].to(train.device)
    mode = backbone.training
    backbone.eval()
    features = torch.cat(
        [backbone(train.take(piece).to(device).inputs).float().cpu() for piece in torch.split(rows, _ROWS_AT_ONCE)]
    )
    backbone.train(mode)
    who = domains[rows.cpu()]
    counted = group_counts(who, train.n_patients).clamp_min(1).unsqueeze(1)
    return group_sums(features, who, train.n_patients) / counted


def cluster_patients(means: Tensor, n_groups: int) -> Tensor:
    """Cluster of each patient, ``(patients,)`` int64, by k-means on standardised means ``(patients, dim)``."""
    from sklearn.cluster import KMeans

    deviation = means.std(dim=0, correction=0)
    values = ((means - means.mean(dim=0)) / torch.where(deviation > 0, deviation, 1.0)).numpy()
    number = min(n_groups, len(np.unique(values, axis=0)))
    labels = KMeans(number, n_init=4, random_state=0).fit(values).labels_
    return torch.from_numpy(np.asarray(labels, np.int64))
