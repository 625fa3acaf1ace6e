"""CORAL: features whose mean and covariance are the same in all environments.

Sun and Saenko, "Deep CORAL: Correlation Alignment for Deep Domain Adaptation", ECCV workshops 2016, turned from
adaptation to generalisation by aligning training environments with one another, their means included.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
C_S, C_T                covariance of the features v in each environment: a patient, or a cluster of patients
l_CORAL                 mean over all pairs of environments of the mean squared difference of their C's
lambda                  ``weight``
======================  =====================================================================================

Environments with fewer than two rows in the batch are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manydg.algorithms import setting
from manydg.algorithms._families import OverEnvironments
from manydg.algorithms.base import BaseSettings
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class CORALSettings(BaseSettings):
    weight: float = setting(1.0, 0.1, 10.0, "weight of the differences between environments")


class CORAL(OverEnvironments):
    """Base with the differences of the environments' feature means and covariances as a penalty."""

    title, order = "CORAL", 130
    summary = "Means and covariances of features alike in all environments."

    Settings = CORALSettings
    settings: CORALSettings

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        terms = {"supervised": self.target.loss(self.head(features), batch.targets)}
        if self.settings.weight:
            terms["alignment"] = self.settings.weight * spread_of_moments(features, batch.domains)
        return terms


def spread_of_moments(features: Tensor, groups: Tensor) -> Tensor:
    """Squared difference of two groups' means and of their covariances, averaged over entries and pairs of groups.

    It takes products between the rows of a batch instead of a covariance for each group: memory does not grow with the
    number of groups, and a step is the same whatever that number is. Zero where fewer than two groups have two rows.

    - ``features`` ``(batch, dim)``
    - ``groups`` ``(batch,)``: Any codes.
    """
    dim = features.shape[1]
    same = (groups.unsqueeze(0) == groups.unsqueeze(1)).to(features.dtype)
    counts = same.sum(dim=1)
    usable = (counts > 1).to(features.dtype)
    number = (usable / counts).sum()
    means = same @ features / counts.unsqueeze(1)
    centre = (means * (usable / counts).unsqueeze(1)).sum(dim=0) / number.clamp_min(1)
    between = ((means - centre).square().mean(dim=1) * usable / counts).sum()
    # C_e is the sum of z z^T over its rows, so that |C_e|^2 is a sum of squared products of rows.
    scaled = (features - means) * (usable / (counts - 1).clamp_min(1)).sqrt().unsqueeze(1)
    norms = ((scaled @ scaled.T).square() * same).sum()
    norm_of_sum = (scaled.T @ scaled).square().sum()
    between_covariances = (norms - norm_of_sum / number.clamp_min(1)) / dim**2
    # Over pairs, squared differences sum up to the number of groups times the squared distances from the centre.
    return 2 * (between + between_covariances) / (number - 1).clamp_min(1)
