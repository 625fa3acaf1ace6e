"""DANN: features from which a discriminator cannot tell the patient, by gradient reversal.

Ganin et al., "Domain-Adversarial Training of Neural Networks", JMLR 17 (2016), turned from adaptation to
generalisation by letting the discriminator know training patients only.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
G_f, G_y, G_d           ``backbone``, ``head``, ``discriminator``
R (reversal layer)      :func:`~manydg.algorithms.reverse_gradient`
lambda_p                ``weight`` times the ramp 2 / (1 + exp(-10 p)) - 1, where p is the training's progress
======================  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from manydg.algorithms import Perceptron, ramp, reverse_gradient, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class DANNSettings(BaseSettings):
    weight: float = setting(0.1, 0.01, 1.0, "strength of the reversed gradient at the end of training")
    discriminator_hidden: int = setting(128, 32, 512, "width of the discriminator's hidden layer")


class DANN(Base):
    """Base with a discriminator of patients behind a gradient-reversal layer.

    The discriminator itself learns at full strength from the beginning, as the paper has it; only what reaches the
    features is weighted, and grows with the training.
    """

    title, order = "DANN", 40
    summary = "An adversary that tells patients apart by features."
    in_paper = True

    Settings = DANNSettings
    settings: DANNSettings

    def build(self) -> None:
        super().build()
        self.discriminator = Perceptron(self.backbone.output_size, self.settings.discriminator_hidden, self.n_domains)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        terms = {"supervised": self.target.loss(self.head(features), batch.targets)}
        if self.settings.weight:
            hidden = reverse_gradient(features, self.settings.weight * ramp(self.progress))
            terms["domain"] = functional.cross_entropy(self.discriminator(hidden), batch.domains)
        return terms
