"""Parts that several algorithms share: networks, gradient reversal, and statistics of groups within a batch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.targets import Target


class Perceptron(nn.Sequential):
    """Linear layers of these widths with a ReLU between them.

    Examples
    --------
    >>> [tuple(p.shape) for p in Perceptron(8, 4, 2).parameters()]
    [(4, 8), (4,), (2, 4), (2,)]
    """

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(*layers[:-1])


FIRST_LOGITS = 0.5
"""Largest root mean square of a head's first logits: the first loss is then near a uniform guess's (docs/method.md)."""


def first_scale(logits: Tensor) -> Tensor:
    """The factor, 1 at most, that brings logits ``(batch, K)`` of untrained features down to :data:`FIRST_LOGITS`.

    Examples
    --------
    >>> round(first_scale(torch.tensor([[7.0, -7.0]])).item(), 3)
    0.071
    """
    return (FIRST_LOGITS / logits.square().mean().sqrt().clamp_min(1e-6)).clamp_max(1)


class PrototypeHead(nn.Module):
    """Similarity of features to one learned prototype per class, over a temperature.

    - ``classes``, ``width``: K prototypes of the features' width.
    - ``similarity`` {"cosine", "inner"}: The paper writes an inner product; its authors' code normalises both sides.
    """

    def __init__(self, classes: int, width: int, temperature: float, similarity: str) -> None:
        super().__init__()
        # A cosine ignores the length; inner products with standard normal prototypes would start in the tens.
        length = 1.0 if similarity == "cosine" else width**-0.5
        self.prototypes = nn.Parameter(length * torch.randn(classes, width))
        self.temperature, self.similarity = temperature, similarity

    def start(self, features: Tensor) -> None:
        """Prefer no class at first: prototypes at right angles to the mean feature, with logits of order one.

        Untrained features of one network are a hundred times as long as another's, and share a mean direction. Logits
        in the tens, or a class that all samples prefer, cost the first epochs, which must undo them. A cosine does not
        depend on the length of the prototypes.
        """
        if self.similarity == "inner":
            mean = functional.normalize(features.mean(dim=0), dim=0)
            self.prototypes.sub_(torch.outer(self.prototypes @ mean, mean))
            self.prototypes.mul_(first_scale(self(features)))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of features ``(batch, width)``."""
        prototypes: Tensor = self.prototypes
        if self.similarity == "cosine":
            features, prototypes = functional.normalize(features, dim=-1), functional.normalize(prototypes, dim=-1)
        return features @ prototypes.T / self.temperature

    def label(self, target: Target, targets: Tensor) -> Tensor:
        """The labels as a decoder gets them, ``(batch, width)``."""
        return target.label_prototype(self.prototypes, targets)


class ValueHead(nn.Module):
    """A linear head for a measured value, in place of prototypes.

    What a decoder gets of the label is a learned embedding of the standardised value.

    - ``width``: Of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.embedding = Perceptron(1, width, width)

    def start(self, features: Tensor) -> None:
        """Predict values near the training patients' mean at first, whatever the length of untrained features."""
        centred = features - features.mean(dim=0)
        self.linear.weight.mul_(first_scale(centred @ self.linear.weight.T))
        self.linear.bias.copy_(-(self.linear.weight @ features.mean(dim=0)))

    def forward(self, features: Tensor) -> Tensor:
        """Standardised values ``(batch, 1)`` of features ``(batch, width)``."""
        values: Tensor = self.linear(features)
        return values

    def label(self, target: Target, targets: Tensor) -> Tensor:
        """The labels as a decoder gets them, ``(batch, width)``."""
        embedded: Tensor = self.embedding(target.distribution(targets).to(self.linear.weight.dtype))
        return embedded


def label_head(target: Target, width: int, temperature: float, similarity: str) -> PrototypeHead | ValueHead:
    """The head that reads a label off features: prototypes of classes, or a linear head for a measured value."""
    return ValueHead(width) if target.numeric else PrototypeHead(target.size, width, temperature, similarity)


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: Tensor | float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse_gradient(features: Tensor, strength: Tensor | float) -> Tensor:
    """The features unchanged; in the backward pass their gradient is negated and scaled.

    Examples
    --------
    >>> v = torch.ones(2, requires_grad=True)
    >>> reverse_gradient(v, 0.5).sum().backward()
    >>> v.grad
    tensor([-0.5000, -0.5000])
    """
    reversed_features: Tensor = _ReverseGradient.apply(features, strength)  # type: ignore[no-untyped-call]
    return reversed_features


def ramp(progress: Tensor) -> Tensor:
    """2 / (1 + exp(-10 p)) - 1: from 0 at the beginning of training to almost 1 at its end.

    Examples
    --------
    >>> ramp(torch.tensor([0.0, 0.1, 1.0]))
    tensor([0.0000, 0.4621, 0.9999])
    """
    return 2 / (1 + torch.exp(-10 * progress)) - 1


def domain_entropy(domains: Tensor) -> Tensor:
    """Entropy in nats of the batch's patients: the loss of a discriminator that knows only their frequencies.

    Examples
    --------
    >>> round(domain_entropy(torch.tensor([4, 4, 9, 9])).item(), 4)
    0.6931
    """
    shares = torch.bincount(domains).to(torch.float64) / len(domains)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy


def group_sums(values: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Sum of the rows of each group.

    - ``values`` ``(batch, ...)``
    - ``groups``: Tensor ``(batch,)`` int64, from 0 to ``n_groups - 1``
    - returns ``(n_groups, ...)``
    """
    return values.new_zeros(n_groups, *values.shape[1:]).index_add(0, groups, values)


def group_counts(groups: Tensor, n_groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Number of rows of each group, ``(n_groups,)``, as floating-point numbers."""
    return group_sums(torch.ones(len(groups), dtype=dtype, device=groups.device), groups, n_groups)


def group_risks(losses: Tensor, groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Risk of each group, R_e: the mean loss of its rows.

    - ``losses`` ``(batch,)``
    - ``groups`` ``(batch,)``
    - returns ``risks`` ``(n_groups,)``: Zero for a group without a row.
    - returns ``present`` ``(n_groups,)``: 1 for the groups that have a row, else 0.
    """
    counts = group_counts(groups, n_groups, losses.dtype)
    return group_sums(losses, groups, n_groups) / counts.clamp_min(1), (counts > 0).to(losses.dtype)


def mean_and_variance(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of the values that are present; both arguments ``(n,)``."""
    number = present.sum().clamp_min(1)
    mean = (values * present).sum() / number
    return mean, ((values - mean).square() * present).sum() / number
