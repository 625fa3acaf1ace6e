"""CORAL: features whose mean and covariance are the same in all environments.

Sun and Saenko, "Deep CORAL: Correlation Alignment for Deep Domain Adaptation", ECCV workshops 2016, turned from
adaptation to generalisation by aligning training environments with one another, their means included.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
C_S, C_T                covariance of the features v in each environment, a group of patients
l_CORAL                 mean over all pairs of environments of the mean squared difference of their C's
lambda                  ``weight``
======================  =====================================================================================

As in IRM, a patient's environment is its code modulo the number of environments. Those with fewer than two rows in the
batch are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from manydg.algorithms import setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class CORALSettings(BaseSettings):
    weight: float = setting(1.0, 0.1, 10.0, "weight of the differences between environments")
    environments: int = setting(8, 2, 32, "number of groups of patients")


class CORAL(Base):
    """Base with the differences of the environments' feature means and covariances as a penalty."""

    title, order = "CORAL", 130
    summary = "Means and covariances of features alike in all environments."

    Settings = CORALSettings
    settings: CORALSettings

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        terms = {"supervised": self.target.loss(self.head(features), batch.targets)}
        if self.settings.weight:
            number = max(self.settings.environments, 1)
            means, covariances, present = moments(features, batch.domains % number, number)
            difference = spread(means, present) + spread(covariances.flatten(1), present)
            terms["alignment"] = self.settings.weight * difference
        return terms


def moments(features: Tensor, groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and second moments of the features in each group.

    Parameters
    ----------
    features : Tensor ``(batch, dim)``
    groups : Tensor ``(batch,)`` int64

    Returns
    -------
    means : Tensor ``(n_groups, dim)``
    covariances : Tensor ``(n_groups, dim, dim)``
    present : Tensor ``(n_groups,)``
        1 for the groups of two rows or more, else 0.
    """
    member = functional.one_hot(groups, n_groups).to(features.dtype).T
    counts = member.sum(dim=1)
    means = member @ features / counts.clamp_min(1).unsqueeze(1)
    centred = features - means[groups]
    # One product per group with its rows masked in: outer products of every row would be dim times larger.
    scatter = (member.unsqueeze(2) * centred).transpose(1, 2) @ centred
    return means, scatter / (counts - 1).clamp_min(1)[:, None, None], (counts > 1).to(features.dtype)


def spread(values: Tensor, present: Tensor) -> Tensor:
    """Mean squared difference of two groups' values, averaged over all pairs of present groups; zero without a pair.

    Parameters
    ----------
    values : Tensor ``(n_groups, n)``
    present : Tensor ``(n_groups,)``
    """
    number = present.sum()
    centre = (values * present.unsqueeze(1)).sum(dim=0) / number.clamp_min(1)
    # The sum over pairs of squared differences is the number of groups times that of squared distances from the centre.
    total = ((values - centre).square().mean(dim=1) * present).sum()
    return 2 * total / (number - 1).clamp_min(1)
