"""The simple decomposition model of the ManyDG paper's appendix, which SimD1 and SimD2 give different losses.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
v                       ``features``, from the backbone
z                       ``domain_factor``, from ``domain_encoder``
u                       ``label_factor``, from ``label_encoder``; the label is predicted from it
v^                      ``reconstruction`` of v from its own z and u, by ``decoder``
======================  =====================================================================================
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, Hyperparameters, Sampling, setting
from manydg.algorithms._parts import Perceptron, first_scale
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch
from manydg.targets import Target


@dataclass(frozen=True)
class DecompositionSettings(Hyperparameters):
    """Weights of the four objectives; a weight of 0 switches the objective off."""

    supervised: float = setting(1.0, 0.1, 10.0, "weight of the supervised loss")
    reconstruction: float = setting(1.0, 0.01, 10.0, "weight of the reconstruction of v from z and u")
    similarity: float = setting(1.0, 0.01, 10.0, "weight of the agreement of a patient's two domain factors")
    orthogonality: float = setting(1.0, 0.01, 10.0, "weight of the orthogonality of z and u")


class SimpleDecomposition(Algorithm):
    """Two encoders decompose v into z and u, and a decoder reconstructs it."""

    Settings: ClassVar[type[Hyperparameters]] = DecompositionSettings
    settings: DecompositionSettings
    sampling: Sampling = "pairs"

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: DecompositionSettings | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)
        width = backbone.output_size
        self.domain_encoder = Perceptron(width, width, width, width)
        self.label_encoder = Perceptron(width, width, width, width)
        self.decoder = Perceptron(2 * width, width, width, width)
        self.head = nn.Linear(width, target.size)

    def start(self, inputs: Inputs) -> None:
        # As ManyDG's predictor starts, with logits of order one at most: a linear layer's own are mostly smaller.
        scale = first_scale(self.predict(inputs))
        for parameter in self.head.parameters():
            parameter.mul_(scale)

    @abstractmethod
    def reconstruction_loss(self, features: Tensor, reconstruction: Tensor) -> Tensor:
        """Discrepancy of v and its reconstruction, both ``(rows, width)``."""

    @abstractmethod
    def similarity_loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Discrepancy of the domain factors of two samples of one patient, both ``(pairs, width)``."""

    @abstractmethod
    def orthogonality_loss(self, domain_factor: Tensor, label_factor: Tensor) -> Tensor:
        """How far from orthogonal z and u are, both ``(rows, width)``."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        weights, pairs = self.settings, batch.pairs
        features = self.backbone(batch.inputs)
        domain_factor, label_factor = self.domain_encoder(features), self.label_encoder(features)
        terms = {}
        if weights.supervised:
            loss = self.target.loss(self.head(label_factor), batch.targets)
            terms["supervised"] = weights.supervised * loss
        if weights.reconstruction:
            reconstruction = self.decoder(torch.cat([domain_factor, label_factor], dim=-1))
            terms["reconstruction"] = weights.reconstruction * self.reconstruction_loss(features, reconstruction)
        if weights.similarity and pairs:
            loss = self.similarity_loss(domain_factor[:pairs], domain_factor[pairs : 2 * pairs])
            terms["similarity"] = weights.similarity * loss
        if weights.orthogonality:
            terms["orthogonality"] = weights.orthogonality * self.orthogonality_loss(domain_factor, label_factor)
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.head(self.label_encoder(self.backbone(inputs)))
        return logits

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        features = self.backbone(inputs)
        return {"v": features, "z": self.domain_encoder(features), "u": self.label_encoder(features)}


def squared_frobenius(domain_factor: Tensor, label_factor: Tensor) -> Tensor:
    """||Z^T U||_F^2 over the squared number of rows, so that it does not grow with the batch."""
    rows = domain_factor.shape[0]
    return (domain_factor.T @ label_factor).square().sum() / rows**2
