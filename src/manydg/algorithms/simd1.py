"""SimD1: the simple decomposition model with the losses of domain separation networks.

The first control of the ManyDG paper's appendix. It takes its losses from Bousmalis et al., "Domain Separation
Networks", NeurIPS 2016, and the scale-invariant error from Eigen et al., "Depth Map Prediction from a Single Image
using a Multi-Scale Deep Network", NeurIPS 2014. They are of different scales and need weights; the defaults are of the
size that the former paper uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from manydg.algorithms import setting
from manydg.algorithms._families import DecompositionSettings, SimpleDecomposition, squared_frobenius


@dataclass(frozen=True)
class SimD1Settings(DecompositionSettings):
    reconstruction: float = setting(0.1, 0.01, 1.0, "weight of the mean squared error of the reconstruction")
    similarity: float = setting(0.25, 0.01, 1.0, "weight of the scale-invariant error between two domain factors")
    orthogonality: float = setting(0.075, 0.01, 1.0, "weight of the squared Frobenius norm of Z^T U")


class SimD1(SimpleDecomposition):
    """Mean squared error, scale-invariant mean squared error, squared Frobenius norm."""

    title, order = "SimD1", 90
    summary = "A simple decomposition with mean squared errors."

    Settings = SimD1Settings
    settings: SimD1Settings

    def reconstruction_loss(self, features: Tensor, reconstruction: Tensor) -> Tensor:
        return functional.mse_loss(reconstruction, features)

    def similarity_loss(self, first: Tensor, second: Tensor) -> Tensor:
        return scale_invariant_error(first, second).mean()

    def orthogonality_loss(self, domain_factor: Tensor, label_factor: Tensor) -> Tensor:
        return squared_frobenius(domain_factor, label_factor)


def scale_invariant_error(first: Tensor, second: Tensor) -> Tensor:
    """Mean squared difference less the squared mean difference, ``(rows,)`` of ``(rows, width)``.

    Two vectors that differ by a constant have none; it is the variance of their difference.
    """
    difference = first - second
    return difference.square().mean(dim=-1) - difference.mean(dim=-1).square()
