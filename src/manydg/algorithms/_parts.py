"""Parts that several algorithms share."""

from __future__ import annotations

import importlib.util
import itertools
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDEST_IN_A_KERNEL = 128


class Perceptron(nn.Sequential):
    """Linear layers of these widths with a ReLU between each two.

    Examples
    --------
    >>> [tuple(p.shape) for p in Perceptron(8, 4, 2).parameters()]
    [(4, 8), (4,), (2, 4), (2,)]
    """

    fused: bool = False
    """Whether all layers are one GPU kernel, in TF32 and without second derivatives; set by the training loop, for
    those that :meth:`fit_a_kernel`."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(*layers[:-1])
        self.widths = widths

    def fit_a_kernel(self) -> bool:
        """Whether there is a kernel for these layers on this machine: for three of one width, 128 at most."""
        _, *widths = self.widths
        fitting = len(widths) == 3 and len(set(widths)) == 1 and widths[0] <= _WIDEST_IN_A_KERNEL
        return fitting and hasattr(torch.library, "triton_op") and importlib.util.find_spec("triton") is not None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.fused:
            return cast("Tensor", super().forward(inputs))  # type: ignore[no-untyped-call]
        # Triton comes with torch for GPUs only.
        from manydg.algorithms._perceptron_kernels import three_layers

        return three_layers(inputs, *self.parameters())


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
