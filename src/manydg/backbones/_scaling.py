"""Scaling learned from training patients and kept with the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manydg.errors import ManyDGWarning


class Standardize(nn.Module):
    """Subtract the mean and divide by the standard deviation of each feature, as found in training patients.

    A feature that is constant there carries nothing a model could learn and is set to zero everywhere.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def fit(self, pieces: Iterable[Tensor]) -> None:
        """Learn from values ``(rows, size)`` that come in pieces of some rows, on any device; NaN is passed over."""
        count = torch.zeros_like(self.mean, dtype=torch.float64)
        mean, squares = torch.zeros_like(count), torch.zeros_like(count)
        for piece in pieces:
            more, its_mean, its_squares = (part.to(count.device) for part in _moments(piece))
            total = (count + more).clamp_min(1)
            apart = its_mean - mean
            mean = mean + apart * more / total
            squares = squares + its_squares + apart.square() * count * more / total
            count = count + more
        variance = squares / count.clamp_min(1)
        constant = variance <= 1e-12 * mean.square().clamp_min(1e-12)
        if bool(constant.any()):
            places = torch.nonzero(constant).squeeze(1).tolist()
            warnings.warn(
                f"{len(places)} input features are constant in the training patients and are ignored: "
                f"positions {places[:10]}",
                ManyDGWarning,
                stacklevel=2,
            )
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-300).rsqrt()))

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.mean) * self.scale


def _moments(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each feature: how many values are known, their mean, and the sum of squared distances from it."""
    known = ~torch.isnan(values)
    count = known.sum(dim=0).to(torch.float64)
    exact = torch.where(known, values, 0.0).to(torch.float64)
    mean = exact.sum(dim=0) / count.clamp_min(1)
    return count, mean, torch.where(known, exact - mean, 0.0).square().sum(dim=0)
