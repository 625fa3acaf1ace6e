"""CondAdv: a discriminator of patients that also sees the predicted label.

Zhao et al., "Learning Sleep Stages from Radio Signals: A Conditional Adversarial Architecture", ICML 2017. Given the
label's probabilities, the discriminator gains nothing from a patient's distribution of labels, so that fooling it does
not cost the features information about the label.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
E, F, D                 ``backbone``, ``head``, ``discriminator``
P_y(. | x)              ``probabilities`` of the label, detached: the game is played through E(x) alone
L_f - lambda L_d        the terms ``supervised`` and ``domain``; D has an optimiser of its own that minimises L_d
H(s)                    entropy of the batch's patients: D is trained until its loss is below it
======================  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from manydg.algorithms import Adam, Optimizers, Perceptron, descend, domain_entropy, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Backbone
from manydg.data.dataset import Batch
from manydg.targets import Target


@dataclass(frozen=True)
class CondAdvSettings(BaseSettings):
    weight: float = setting(0.1, 0.01, 1.0, "weight lambda of the discriminator's loss in the extractor's objective")
    discriminator_lr: float = setting(5e-3, 5e-4, 5e-2, "learning rate of the discriminator")
    discriminator_hidden: int = setting(128, 32, 512, "width of the discriminator's hidden layer")
    inner_steps: int = setting(5, 1, 10, "most steps of the discriminator for one of the extractor")


class CondAdv(Base):
    """Base whose extractor plays against a discriminator conditioned on features and label probabilities.

    The discriminator moves first, on the features of the same forward pass, so that the extractor plays against one
    that is up to date.
    """

    title, order = "CondAdv", 30
    summary = "An adversary that tells patients apart by features and predicted labels."
    in_paper = True

    Settings = CondAdvSettings
    settings: CondAdvSettings
    static_step = False
    indivisible = "how often its discriminator steps hangs on values that processes may round differently"

    def build(self) -> None:
        super().build()
        width = self.backbone.output_size + self.target.size
        self.discriminator = Perceptron(width, self.settings.discriminator_hidden, self.n_domains)

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if target.numeric:
            return "its discriminator is given the probabilities of the classes, and a measured value has none"
        return None

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        return self._terms(features, self.head(features), batch)

    def optimizers(self, lr: float, weight_decay: float) -> Optimizers:
        players = [*self.backbone.parameters(), *self.head.parameters()]
        return {
            "main": Adam(players, lr=lr, weight_decay=weight_decay),
            "discriminator": Adam(
                self.discriminator.parameters(), lr=self.settings.discriminator_lr, weight_decay=weight_decay
            ),
        }

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        logits = self.head(features)
        if self.settings.weight:
            self.train_discriminator(features.detach(), logits.detach(), batch.domains, optimizers["discriminator"])
        terms = self._terms(features, logits, batch)
        descend(torch.stack(list(terms.values())).sum(), optimizers["main"])
        return {name: term.detach() for name, term in terms.items()}

    def train_discriminator(self, features: Tensor, logits: Tensor, domains: Tensor, optimizer: Optimizer) -> int:
        """Train while the loss is above the entropy of the batch's patients; returns the number of steps taken.

        - ``features`` ``(batch, width)``, ``logits`` ``(batch, K)``: Detached.
        """
        bound = domain_entropy(domains)
        for taken in range(self.settings.inner_steps):
            loss = self.discriminator_loss(features, logits, domains)
            if bool(loss <= bound):
                return taken
            descend(loss, optimizer)
        return self.settings.inner_steps

    def discriminator_loss(self, features: Tensor, logits: Tensor, domains: Tensor) -> Tensor:
        """L_d: cross-entropy of the patient given features and label probabilities."""
        probabilities = self.target.probabilities(logits.detach())
        guess = self.discriminator(torch.cat([features, probabilities.to(features.dtype)], dim=-1))
        return functional.cross_entropy(guess, domains)

    def _terms(self, features: Tensor, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        terms = {"supervised": self.target.loss(logits, batch.targets)}
        if self.settings.weight:
            terms["domain"] = -self.settings.weight * self.discriminator_loss(features, logits, batch.domains)
        return terms
