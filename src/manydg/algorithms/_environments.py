"""Environments: groups of patients that methods compare with one another inside a batch, without a loop over them."""

from __future__ import annotations

import torch
from torch import Tensor


def group_sums(values: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Sum of the rows of each group.

    Parameters
    ----------
    values : Tensor ``(batch, ...)``
    groups : Tensor ``(batch,)`` int64, from 0 to ``n_groups - 1``

    Returns
    -------
    Tensor ``(n_groups, ...)``
    """
    return values.new_zeros(n_groups, *values.shape[1:]).index_add(0, groups, values)


def group_counts(groups: Tensor, n_groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Number of rows of each group, ``(n_groups,)``, as numbers that can be divided by."""
    return group_sums(torch.ones(len(groups), dtype=dtype, device=groups.device), groups, n_groups)


def group_risks(losses: Tensor, groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Risk of each group, R_e: the mean loss of its rows.

    Parameters
    ----------
    losses : Tensor ``(batch,)``
    groups : Tensor ``(batch,)`` int64

    Returns
    -------
    risks : Tensor ``(n_groups,)``
        Zero for a group without a row.
    present : Tensor ``(n_groups,)``
        1 for the groups that have a row, else 0.
    """
    counts = group_counts(groups, n_groups, losses.dtype)
    return group_sums(losses, groups, n_groups) / counts.clamp_min(1), (counts > 0).to(losses.dtype)


def mean_and_variance(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (by the number of values) of the values that are present; both arguments ``(n,)``."""
    number = present.sum().clamp_min(1)
    mean = (values * present).sum() / number
    return mean, ((values - mean).square() * present).sum() / number
