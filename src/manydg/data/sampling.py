"""The plan of an epoch: which rows each step sees, made at once from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.pairing import fold_pairs, lone_samples
from manydg.errors import ConfigError

PATIENTS_PER_EPISODE = 10
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochPlan:
    """The rows of every step of an epoch, one after the other.

    Parameters
    ----------
    indices : Tensor ``(rows,)``
        Positions in the training set, step after step. A step of pairs lists the first samples of its pairs, then their
        partners in the same order, then the samples that stand alone.
    bounds : tuple of int
        Where each step begins, and where the last one ends.
    pairs : tuple of int
        How many pairs each step holds.
    """

    indices: Tensor
    bounds: tuple[int, ...]
    pairs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """The indices and the number of pairs of each step."""
        for step, pairs in enumerate(self.pairs):
            yield self.indices[self.bounds[step] : self.bounds[step + 1]], pairs

    def to(self, device: torch.device | str) -> EpochPlan:
        return replace(self, indices=self.indices.to(device))


def plan_epoch(sampling: str, domains: Tensor, batch_size: int, seed: int, epoch: int) -> EpochPlan:
    """Plan one epoch.

    Every sample occurs in every epoch. Steps differ by a few rows in size at most (those of episodes by a patient's
    run of samples), so that no small last batch upsets batch statistics, and none has a single row.

    Parameters
    ----------
    sampling : {"samples", "pairs", "random-pairs", "episodes"}
    domains : Tensor ``(samples,)``
        Patient codes of the training samples.
    batch_size : int
        Rows of a step: ``batch_size / 2`` pairs, or ``batch_size`` single samples.
    seed, epoch : int
    """
    if batch_size < 2:
        raise ConfigError(f"batch_size is {batch_size}; a step needs at least two samples")
    who = domains.cpu().numpy()
    rng = np.random.default_rng([seed, epoch, 7])
    if sampling == "samples":
        return _plan_samples(rng.permutation(len(who)), batch_size)
    if sampling == "pairs":
        return _plan_pairs(who, batch_size, rng)
    if sampling == "random-pairs":
        return _plan_pairs(np.zeros_like(who), batch_size, rng)
    if sampling == "episodes":
        return _plan_episodes(who, batch_size, rng)
    raise ConfigError(f"unknown kind of sampling '{sampling}'")


def _plan_samples(order: Index, batch_size: int) -> EpochPlan:
    bounds = _even_bounds(len(order), _steps(len(order), batch_size))
    return EpochPlan(torch.from_numpy(order), tuple(bounds.tolist()), (0,) * (len(bounds) - 1))


def _plan_pairs(who: Index, batch_size: int, rng: np.random.Generator) -> EpochPlan:
    first, second = fold_pairs(who, int(rng.integers(2**31)))
    lone = rng.permutation(lone_samples(who))
    shuffled = rng.permutation(len(first))
    first, second = first[shuffled], second[shuffled]
    steps = _steps(2 * len(first) + len(lone), batch_size)
    pair_bounds = _even_bounds(len(first), steps)
    # Lone samples fill the steps up to an even size; where pairs are few, a step of its own for each would be one row.
    wanted = _even_bounds(2 * len(first) + len(lone), steps) - 2 * pair_bounds
    lone_bounds = np.maximum.accumulate(wanted.clip(0, len(lone)))
    parts: list[Index] = []
    for step in range(steps):
        of_pairs = slice(pair_bounds[step], pair_bounds[step + 1])
        parts += [first[of_pairs], second[of_pairs], lone[lone_bounds[step] : lone_bounds[step + 1]]]
    bounds = 2 * pair_bounds + lone_bounds
    return EpochPlan(
        torch.from_numpy(np.concatenate(parts)), tuple(bounds.tolist()), tuple(np.diff(pair_bounds).tolist())
    )


def _plan_episodes(who: Index, batch_size: int, rng: np.random.Generator) -> EpochPlan:
    """Runs of one patient's samples, shuffled, so that a step holds several samples of each of several patients."""
    run_length = max(2, batch_size // PATIENTS_PER_EPISODE)
    order = np.lexsort((rng.random(len(who)), who))
    sorted_who = who[order]
    new_patient = np.r_[True, sorted_who[1:] != sorted_who[:-1]]
    start_of_patient = np.maximum.accumulate(np.where(new_patient, np.arange(len(who)), 0))
    new_run = (np.arange(len(who)) - start_of_patient) % run_length == 0
    run = np.cumsum(new_run) - 1
    place_of_run = rng.permutation(run[-1] + 1)
    shuffled = np.argsort(place_of_run[run], kind="stable")
    first_of_run = np.flatnonzero(np.diff(run[shuffled], prepend=-1))
    wanted = _even_bounds(len(who), _steps(len(who), batch_size))[1:-1]
    nearest = first_of_run[np.searchsorted(first_of_run, wanted).clip(max=len(first_of_run) - 1)]
    bounds = _without_single_rows(np.unique(np.r_[0, nearest, len(who)]))
    return EpochPlan(torch.from_numpy(order[shuffled]), tuple(bounds.tolist()), (0,) * (len(bounds) - 1))


def _without_single_rows(bounds: Index) -> Index:
    """The same bounds, a step of one row joined to the step before it (the first to the step after it)."""
    kept = [int(bounds[0])]
    for bound in bounds[1:-1].tolist():
        if bound - kept[-1] >= 2 and bounds[-1] - bound >= 2:
            kept.append(bound)
    return np.array([*kept, bounds[-1]], np.int64)


def _steps(rows: int, batch_size: int) -> int:
    """How many steps an epoch has: no step holds more than ``batch_size`` rows on average, or less than two."""
    return max(1, min(-(-rows // batch_size), rows // 2))


def _even_bounds(count: int, parts: int) -> Index:
    return np.linspace(0, count, parts + 1).round().astype(np.int64)
