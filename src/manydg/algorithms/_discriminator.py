"""Parts of the methods that set a discriminator of patients against the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: Tensor | float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse_gradient(features: Tensor, strength: Tensor | float) -> Tensor:
    """The features as they are; on the way back their gradient is turned round and scaled.

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
    """Entropy in nats of the batch's patients: the loss of a discriminator that knows only how frequent each is.

    Examples
    --------
    >>> round(domain_entropy(torch.tensor([4, 4, 9, 9])).item(), 4)
    0.6931
    """
    shares = torch.bincount(domains).to(torch.float64) / len(domains)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy
