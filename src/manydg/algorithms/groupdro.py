"""GroupDRO: the worst group of patients decides.

Sagawa, Koh, Hashimoto and Liang, "Distributionally Robust Neural Networks for Group Shifts", ICLR 2020 (the online
algorithm).

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
g                       a cluster of patients that look alike
q                       ``emphasis``: weight of each group, raised by exp(eta_q R_g) at every step
eta_q                   ``speed``
======================  =====================================================================================

The groups are made before training and without labels (:mod:`manydg.algorithms._families`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import group_risks, setting
from manydg.algorithms._families import cluster_patients, patient_means
from manydg.algorithms.base import Base, BaseSettings
from manydg.data.dataset import Batch, DomainDataset


@dataclass(frozen=True)
class GroupDROSettings(BaseSettings):
    groups: int = setting(8, 2, 32, "number of clusters of patients")
    speed: float = setting(0.01, 0.001, 0.1, "step size eta_q of the groups' weights")


class GroupDRO(Base):
    """Base whose loss leans towards the groups of patients that it does worst on.

    A batch's groups share the weight among those that have a row in it.
    """

    title, order = "GroupDRO", 150
    summary = "More weight on the groups of patients that do worst."

    Settings = GroupDROSettings
    settings: GroupDROSettings
    group: Tensor
    emphasis: Tensor

    def build(self) -> None:
        super().build()
        self.n_groups = max(1, min(self.settings.groups, self.n_domains))
        self.register_buffer("group", torch.arange(self.n_domains) % self.n_groups)
        self.register_buffer("emphasis", torch.full((self.n_groups,), 1 / self.n_groups))

    def domains_of(self, train: DomainDataset) -> Tensor:
        # Of the patients that have samples: where training goes on with others, the groups are theirs.
        met = torch.unique(train.domains.cpu())
        means = patient_means(self.backbone, train, self.progress.device)[met]
        self.group[met] = cluster_patients(means, self.n_groups).to(self.group.device)
        self.emphasis.fill_(1 / self.n_groups)
        return train.domains

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        each = self.target.loss_per_sample(self.predict(batch.inputs), batch.targets)
        risks, present = group_risks(each, self.group[batch.domains], self.n_groups)
        if self.training:
            self._raise_emphasis(risks.detach())
        weights = self.emphasis * present
        return {"worst_groups": (weights * risks).sum() / weights.sum()}

    @torch.no_grad()
    def _raise_emphasis(self, risks: Tensor) -> None:
        """Raise the weights of groups by their risks; a group without a row has a risk of zero here."""
        raised = self.emphasis * torch.exp(self.settings.speed * risks)
        # No group is lost for good, and no weight overflows.
        self.emphasis.copy_((raised / raised.sum()).clamp_min(1e-6))
