"""Pairs of samples of one patient: which sample meets which in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.errors import ConfigError, DataError

Domains = TypeVar("Domains", npt.NDArray[Any], Tensor)
Indices = npt.NDArray[np.int64]


def fold_pairs(domains: Domains, seed: int | Sequence[int]) -> tuple[Domains, Domains]:
    """Pair the samples of each patient at random, each sample at least once.

    The samples of a patient are put in a random order, which is folded in two. Where their number is odd, the one left
    over is paired with a random other sample of the patient, which so occurs twice. A patient with a single sample does
    not occur at all (see :func:`lone_samples`). Each of a patient's possible pairs is equally likely.

    Parameters
    ----------
    domains : array or Tensor ``(samples,)``
        Whose sample each one is.
    seed : int or sequence of int
        The same seed gives the same pairs; ``(seed, epoch)`` gives each epoch its own.

    Returns
    -------
    first, second : array or Tensor ``(pairs,)``
        Positions in ``domains``, int64, of the kind (and on the device) that was given; the pairs of a patient stand
        together.

    Examples
    --------
    >>> first, second = fold_pairs(np.array([7, 7, 7, 9, 5, 5]), seed=0)
    >>> len(first), sorted({*first.tolist(), *second.tolist()})
    (3, [0, 1, 2, 4, 5])
    """
    codes = _flat(domains)
    rng = _generator(seed)
    order, counts = _shuffled_within(codes, rng)
    half = counts // 2
    # The odd one out makes one pair more; a lone sample makes none.
    pairs = np.where(counts >= 2, counts - half, 0)
    group_start = np.repeat(_starts(counts), pairs)
    place = np.arange(len(group_start)) - np.repeat(_starts(pairs), pairs)
    half = np.repeat(half, pairs)
    first = np.where(place < half, place, 2 * half)
    second = place + half
    left_over = np.flatnonzero(place == half)
    second[left_over] = rng.integers(0, 2 * half[left_over])
    return _like(order[group_start + first], domains), _like(order[group_start + second], domains)


def lone_samples(domains: Domains) -> Domains:
    """Positions of the samples whose patient has no other, in rising order, of the kind that was given.

    Examples
    --------
    >>> lone_samples(np.array(["ann", "bob", "ann"])).tolist()
    [1]
    """
    _, first, counts = np.unique(_flat(domains), return_index=True, return_counts=True)
    return _like(np.sort(first[counts == 1]), domains)


def _shuffled_within(codes: npt.NDArray[Any], rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Positions grouped by patient, in a random order within each, and the size of each group."""
    # A stable sort of a random permutation: no random keys that might tie, and no second sort.
    shuffled = rng.permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    grouped = codes[order]
    ends = np.flatnonzero(grouped[1:] != grouped[:-1]) + 1
    bounds = np.concatenate(([0], ends, [len(codes)])) if len(codes) else np.zeros(1, np.int64)
    return order, np.diff(bounds)


def _starts(counts: Indices) -> Indices:
    return cast("Indices", np.cumsum(counts) - counts)


def _flat(domains: npt.NDArray[Any] | Tensor) -> npt.NDArray[Any]:
    array = domains.detach().cpu().numpy() if isinstance(domains, Tensor) else np.asarray(domains)
    if array.ndim != 1:
        raise DataError(f"pairs need one patient per sample; the patients have shape {array.shape}")
    return np.unique(array.astype(str), return_inverse=True)[1] if array.dtype.kind == "O" else array


def _like(indices: Indices, domains: Domains) -> Domains:
    if isinstance(domains, Tensor):
        return torch.from_numpy(indices).to(domains.device)
    return indices


def _generator(seed: int | Sequence[int]) -> np.random.Generator:
    try:
        return np.random.default_rng(seed)
    except (ValueError, TypeError):
        raise ConfigError(f"a seed is a whole number from 0 on, or several of them; got {seed!r}") from None
