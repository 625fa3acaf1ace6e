"""V-REx: risks that are nearly equal in all environments.

Krueger et al., "Out-of-Distribution Generalization via Risk Extrapolation (REx)", ICML 2021.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
R_e                     mean loss of the environment e, a group of patients
beta                    ``weight``, from the share ``warmup`` of the training on
======================  =====================================================================================

The mean of the R_e plus beta times their variance is minimised. As in IRM, a patient's environment is its code modulo
the number of environments; those without a row in the batch are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manydg.algorithms import setting
from manydg.algorithms._parts import group_risks, mean_and_variance
from manydg.algorithms.base import Base, BaseSettings
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class VRExSettings(BaseSettings):
    weight: float = setting(1.0, 0.1, 100.0, "weight beta of the variance of the risks")
    warmup: float = setting(0.1, 0.01, 0.5, "share of the training before the variance counts")
    environments: int = setting(8, 2, 32, "number of groups of patients")


class VREx(Base):
    """Base with the variance of the environments' risks as a penalty."""

    title, order = "V-REx", 140
    summary = "Risks alike in all environments."

    Settings = VRExSettings
    settings: VRExSettings

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        number = max(self.settings.environments, 1)
        each = self.target.loss_per_sample(self.predict(batch.inputs), batch.targets)
        mean, variance = mean_and_variance(*group_risks(each, batch.domains % number, number))
        terms = {"supervised": mean}
        if self.settings.weight:
            begun = (self.progress >= self.settings.warmup).to(variance.dtype)
            terms["variance"] = self.settings.weight * begun * variance
        return terms
