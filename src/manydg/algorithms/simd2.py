"""SimD2: the simple decomposition model with losses like ManyDG's, which are all of one scale.

The second control of the ManyDG paper's appendix: SimD1's architecture, with cosines in place of squared errors.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from manydg.algorithms._families import DecompositionSettings, SimpleDecomposition, squared_frobenius


class SimD2(SimpleDecomposition):
    """Cosine of v and its reconstruction, cosine of two domain factors, Frobenius norm of factors of unit length.

    The rows of Z and U are normalised first, so that the norm is between 0 and 1 as the other terms are between -1
    and 1.
    """

    title, order = "SimD2", 100
    summary = "A simple decomposition with cosines."

    Settings = DecompositionSettings
    settings: DecompositionSettings

    def reconstruction_loss(self, features: Tensor, reconstruction: Tensor) -> Tensor:
        return -functional.cosine_similarity(features, reconstruction, dim=-1).mean()

    def similarity_loss(self, first: Tensor, second: Tensor) -> Tensor:
        return -functional.cosine_similarity(first, second, dim=-1).mean()

    def orthogonality_loss(self, domain_factor: Tensor, label_factor: Tensor) -> Tensor:
        return squared_frobenius(
            functional.normalize(domain_factor, dim=-1), functional.normalize(label_factor, dim=-1)
        )
