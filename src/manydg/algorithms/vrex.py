"""V-REx: risks that are nearly equal in all environments.

Krueger et al., "Out-of-Distribution Generalization via Risk Extrapolation (REx)", ICML 2021.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
R_e                     mean loss of the environment e: a patient, or a cluster of patients with few samples
beta                    ``weight``, from the share ``anneal`` of the training on; 1 before it
======================  =====================================================================================

The mean of the R_e plus beta times their variance is minimised, over the environments in the batch. Schedule and range
of the weight are those of DomainBed; its default of 10 cost validation patients of the sleep features .02 of kappa.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manydg.algorithms import group_risks, mean_and_variance, setting
from manydg.algorithms._families import Annealed, AnnealedSettings
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class VRExSettings(AnnealedSettings):
    weight: float = setting(1.0, 0.1, 1e5, "weight beta of the variance of the risks")
    anneal: float = setting(0.1, 0.01, 0.9, "share of the training before the variance has its full weight")


class VREx(Annealed):
    """Base with the variance of the environments' risks as a penalty."""

    title, order = "V-REx", 140
    summary = "Risks alike in all environments."

    Settings = VRExSettings
    settings: VRExSettings

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        each = self.target.loss_per_sample(self.predict(batch.inputs), batch.targets)
        mean, variance = mean_and_variance(*group_risks(each, batch.domains, self.n_domains))
        terms = {"supervised": mean}
        if self.settings.weight:
            terms["variance"] = self.annealed_weight() * variance
        return terms
