"""Parts that several algorithms share."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with a ReLU between each two.

    Examples
    --------
    >>> [tuple(p.shape) for p in perceptron(8, 4, 2).parameters()]
    [(4, 8), (4,), (2, 4), (2,)]
    """
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PrototypeHead(nn.Module):
    """Similarity of features to one learned prototype per class, over a temperature.

    Parameters
    ----------
    classes, width : int
        K prototypes of the features' width.
    temperature : float
    similarity : {"cosine", "inner"}
        The paper writes an inner product; its authors' code normalises both sides.
    """

    def __init__(self, classes: int, width: int, temperature: float, similarity: str) -> None:
        super().__init__()
        # A cosine does not see the length; inner products with standard normal prototypes would start in the tens.
        length = 1.0 if similarity == "cosine" else width**-0.5
        self.prototypes = nn.Parameter(length * torch.randn(classes, width))
        self.temperature, self.similarity = temperature, similarity

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of features ``(batch, width)``."""
        prototypes: Tensor = self.prototypes
        if self.similarity == "cosine":
            features, prototypes = functional.normalize(features, dim=-1), functional.normalize(prototypes, dim=-1)
        return features @ prototypes.T / self.temperature
