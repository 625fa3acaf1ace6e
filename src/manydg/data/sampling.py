"""The plan of an epoch: which rows each step sees, made at once from a seed.

A plan holds single samples, pairs of samples of one patient (:func:`fold_pairs`), or several samples of each of several
patients (episodes, environments). For networks that read samples in order, all of them are made of crops: runs of
consecutive samples of one session (:class:`Crops`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.errors import ConfigError, DataError

PATIENTS_PER_EPISODE = 10
CROPS_PER_STEP = 8
"""A step of crops has about so many at least, so that it sees several patients."""
_SMALL_BATCH = 6
_SORTED_STEPS = 32
"""Samples are sorted by length within this many steps."""

Domains = TypeVar("Domains", npt.NDArray[Any], Tensor)
Indices = npt.NDArray[np.int64]


def fold_pairs(domains: Domains, seed: int | Sequence[int]) -> tuple[Domains, Domains]:
    """Pair the samples of each patient at random, each sample at least once.

    The samples of a patient are put in a random order, which is folded in two. If their number is odd, the remaining
    one is paired with another random sample of the patient, which occurs twice. A patient with a single sample is left
    out (see :func:`lone_samples`). Each of a patient's possible pairs is equally likely.

    Parameters
    ----------
    domains : array or Tensor ``(samples,)``
        The patient of each sample.
    seed : int or sequence of int
        The same seed gives the same pairs; ``(seed, epoch)`` gives each epoch its own.

    Returns
    -------
    first, second : array or Tensor ``(pairs,)``
        Positions in ``domains``, int64, of the type (and on the device) of ``domains``; the pairs of a patient are
        adjacent.

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
    number = np.arange(len(group_start)) - np.repeat(_starts(pairs), pairs)
    half = np.repeat(half, pairs)
    first = np.where(number < half, number, 2 * half)
    second = number + half
    left_over = np.flatnonzero(number == half)
    second[left_over] = rng.integers(0, 2 * half[left_over])
    return _like(order[group_start + first], domains), _like(order[group_start + second], domains)


def lone_samples(domains: Domains) -> Domains:
    """Positions of the samples whose patient has no other, in ascending order, of the type of ``domains``.

    Examples
    --------
    >>> lone_samples(np.array(["ann", "bob", "ann"])).tolist()
    [1]
    """
    _, first, counts = np.unique(_flat(domains), return_index=True, return_counts=True)
    return _like(np.sort(first[counts == 1]), domains)


@dataclass(frozen=True)
class EpochPlan:
    """The rows of every step of an epoch, one after the other.

    - ``indices`` ``(rows,)``: Positions in the training set, step after step. A step of pairs lists the first samples
      of its pairs, then their partners in the same order, then the unpaired samples.
    - ``bounds``: Where each step begins, and where the last one ends.
    - ``pairs``: How many pairs each step holds.
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


@dataclass(frozen=True, eq=False)
class Crops:
    """The order in which a network reads samples, and how many of them it reads at a time in training.

    - ``order`` ``(samples,)``: The column of :func:`manydg.data.context.add_order`: numbers of one session follow one
      another.
    """

    order: Indices
    length: int

    def take(self, rows: Indices) -> Crops:
        """The same for some of the samples."""
        return Crops(self.order[rows], self.length)

    def cut(self, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """All rows in order, and where each crop begins among them, with the end of the last.

        Each session is cut at a random offset and every ``length`` samples from there. What would be shorter than half
        of that at an end of the session stays with its neighbour, so that crops have 0.5 to 2 lengths, or are whole
        sessions.
        """
        rows = np.argsort(self.order, kind="stable")
        begins = np.flatnonzero(np.r_[True, np.diff(self.order[rows]) != 1])
        sizes = np.diff(np.r_[begins, len(rows)])
        session = np.repeat(np.arange(len(begins)), sizes)
        rank = np.arange(len(rows)) - begins[session]
        offset = rng.integers(0, self.length, len(begins))[session]
        short = self.length // 2
        inside = (rank >= short) & (sizes[session] - rank >= short) & ((rank + offset) % self.length == 0)
        return rows, np.r_[np.flatnonzero(inside | (rank == 0)), len(rows)]


def plan_epoch(
    sampling: str,
    domains: Tensor,
    batch_size: int,
    seed: int,
    epoch: int,
    lengths: Indices | None = None,
    crops: Crops | None = None,
) -> EpochPlan:
    """Plan one epoch.

    Every sample occurs in every epoch. Steps have the same number of rows, so that a GPU can replay one for the other;
    only the last two share what is left, so that no small last batch upsets batch statistics. (Those of episodes differ
    by a patient's run of samples.) No step has a single row.

    An episode never cuts a patient's run of samples. Environments do where a step is full, and so have steps of one
    size; the runs of a patient are spread over the epoch.

    Where samples have lengths, those of similar length go together, so that little is padded: the shuffled samples (or
    pairs, by the longer one) are sorted by length within buckets of up to 32 steps, and the steps are then shuffled.
    Which samples share a step is random within a bucket; over an epoch each sample still counts once, but the gradient
    of a single step leans towards what samples of one length have in common. Epochs of fewer than eight steps are not
    sorted.

    - ``sampling``: {"samples", "pairs", "random-pairs", "episodes", "environments"}
    - ``domains`` ``(samples,)``: Patient codes of the training samples, or codes of their environments.
    - ``batch_size``: Rows of a step: ``batch_size / 2`` pairs, or ``batch_size`` single samples.
    - ``lengths`` ``(samples,)``: How long each sample is: its number of visits or events.
    - ``crops``: Steps are made of crops then, about eight at least; where a step is full, a crop is cut in two.
      Episodes and environments are crops of several patients. Pairs are two crops of one patient, sample by sample;
      where one is longer, the rest of it is unpaired. A patient with a single crop has its two halves paired.
    """
    if batch_size < 2:
        raise ConfigError(f"batch_size is {batch_size}; a step needs at least two samples")
    who = domains.cpu().numpy()
    rng = np.random.default_rng([seed, epoch, 7])
    if crops is not None:
        return _plan_crops(sampling, who, batch_size, crops, rng)
    if sampling == "samples":
        return _plan_samples(rng.permutation(len(who)), batch_size, lengths, rng)
    if sampling == "pairs":
        return _plan_pairs(who, batch_size, lengths, rng)
    if sampling == "random-pairs":
        return _plan_pairs(np.zeros_like(who), batch_size, lengths, rng)
    if sampling == "episodes":
        return _plan_episodes(who, batch_size, rng)
    if sampling == "environments":
        return _plan_environments(who, batch_size, rng)
    raise ConfigError(f"unknown kind of sampling '{sampling}'")


def _plan_samples(order: Indices, batch_size: int, lengths: Indices | None, rng: np.random.Generator) -> EpochPlan:
    bounds = _equal_bounds(len(order), batch_size)
    parts = [order]
    if lengths is not None:
        order = _by_length(order, lengths[order], bounds)
        parts = _shuffle_steps(np.split(order, bounds[1:-1]), rng)
    return EpochPlan(torch.from_numpy(np.concatenate(parts)), tuple(bounds.tolist()), (0,) * (len(bounds) - 1))


def _plan_pairs(who: Indices, batch_size: int, lengths: Indices | None, rng: np.random.Generator) -> EpochPlan:
    first, second = fold_pairs(who, int(rng.integers(2**31)))
    lone = rng.permutation(lone_samples(who))
    shuffled = rng.permutation(len(first))
    first, second = first[shuffled], second[shuffled]
    pair_bounds, lone_bounds = _pair_bounds(len(first), len(lone), batch_size)
    if lengths is not None:
        order = _by_length(np.arange(len(first)), np.maximum(lengths[first], lengths[second]), pair_bounds)
        first, second = first[order], second[order]
        lone = _by_length(lone, lengths[lone], lone_bounds)
    parts, counts = _cut_pairs(first, second, lone, pair_bounds, lone_bounds)
    if lengths is not None:
        order = _step_order(len(parts), rng)
        parts, counts = [parts[step] for step in order], counts[order]
    bounds = np.cumsum([0, *map(len, parts)])
    return EpochPlan(torch.from_numpy(np.concatenate(parts)), tuple(bounds.tolist()), tuple(counts.tolist()))


def _pair_bounds(pairs: int, lone: int, batch_size: int) -> tuple[Indices, Indices]:
    """Where each step begins among the pairs, and among the unpaired rows."""
    rows = 2 * pairs + lone
    # An even number of rows, half of which at most are pairs: then every step can have the same number of rows.
    row_bounds = _equal_bounds(rows, max(2, batch_size - batch_size % 2))
    pair_bounds = row_bounds * pairs // max(rows, 1)
    lone_bounds = np.maximum.accumulate((row_bounds - 2 * pair_bounds).clip(0, lone))
    if len(row_bounds) <= 3 or batch_size < _SMALL_BATCH:
        # Pairs fill a step for which too few unpaired rows are left; larger ones, and many, can do with a row less.
        pair_bounds = (row_bounds - lone_bounds + 1) // 2
    return pair_bounds, lone_bounds


def _cut_pairs(
    first: Indices, second: Indices, lone: Indices, pair_bounds: Indices, lone_bounds: Indices
) -> tuple[list[Indices], Indices]:
    """The rows of each step, and how many pairs it holds."""
    parts: list[Indices] = []
    for step in range(len(pair_bounds) - 1):
        of_pairs = slice(pair_bounds[step], pair_bounds[step + 1])
        lone_part = lone[lone_bounds[step] : lone_bounds[step + 1]]
        parts.append(np.concatenate([first[of_pairs], second[of_pairs], lone_part]))
    return parts, np.diff(pair_bounds)


def _by_length(order: Indices, lengths: Indices, bounds: Indices) -> Indices:
    """The same order, sorted stably by length within buckets of several steps."""
    steps = len(bounds) - 1
    bucket_steps = min(_SORTED_STEPS, steps // 4)
    if bucket_steps < 2:
        return order
    bucket = np.repeat(np.arange(steps), np.diff(bounds)) // bucket_steps
    sorted_order: Indices = order[np.lexsort((lengths, bucket))]
    return sorted_order


def _shuffle_steps(parts: list[Indices], rng: np.random.Generator) -> list[Indices]:
    return [parts[step] for step in _step_order(len(parts), rng)]


def _step_order(steps: int, rng: np.random.Generator) -> Indices:
    """A random order of the steps that keeps the last two, which may be smaller, at the end."""
    moved = max(0, steps - 2)
    return np.concatenate([rng.permutation(moved), np.arange(moved, steps)])


def _plan_episodes(who: Indices, batch_size: int, rng: np.random.Generator) -> EpochPlan:
    """Runs of one patient's samples, shuffled, so that a step holds several samples of each of several patients."""
    order, _, new_run = _runs(who, batch_size, rng)
    run = np.cumsum(new_run) - 1
    rank_of_run = rng.permutation(run[-1] + 1)
    shuffled = np.argsort(rank_of_run[run], kind="stable")
    first_of_run = np.flatnonzero(np.diff(run[shuffled], prepend=-1))
    wanted = _even_bounds(len(who), _steps(len(who), batch_size))[1:-1]
    nearest = first_of_run[np.searchsorted(first_of_run, wanted).clip(max=len(first_of_run) - 1)]
    bounds = _without_single_rows(np.unique(np.r_[0, nearest, len(who)]))
    return EpochPlan(torch.from_numpy(order[shuffled]), tuple(bounds.tolist()), (0,) * (len(bounds) - 1))


def _plan_environments(who: Indices, batch_size: int, rng: np.random.Generator) -> EpochPlan:
    """Runs of one environment's samples one after the other, cut into steps of one size."""
    order, counts, new_run = _runs(who, batch_size, rng)
    run = np.cumsum(new_run) - 1
    first = np.flatnonzero(new_run)
    environment = np.repeat(np.arange(len(counts)), counts)[first]
    runs = np.bincount(environment)
    number = np.arange(len(first)) - _starts(runs)[environment]
    # An environment's r-th of n runs falls into the r-th n-th of the epoch: a step seldom holds two runs of one.
    when = (number + rng.random(len(first))) / runs[environment]
    complete = np.diff(first, append=len(who)) == _run_length(batch_size)
    # Complete runs first, so that steps begin where runs do; the shorter ones fill steps of their own.
    rank = np.argsort(np.lexsort((when, ~complete)))
    shuffled = order[np.argsort(rank[run], kind="stable")]
    bounds = _equal_bounds(len(who), batch_size)
    parts = _shuffle_steps(np.split(shuffled, bounds[1:-1]), rng)
    return EpochPlan(torch.from_numpy(np.concatenate(parts)), tuple(bounds.tolist()), (0,) * (len(bounds) - 1))


def _runs(who: Indices, batch_size: int, rng: np.random.Generator) -> tuple[Indices, Indices, npt.NDArray[np.bool_]]:
    """Positions grouped by patient, in random order within each; the size of each group; where a new run begins."""
    order = np.lexsort((rng.random(len(who)), who))
    counts = np.unique(who, return_counts=True)[1]
    within = np.arange(len(who)) - np.repeat(_starts(counts), counts)
    return order, counts, within % _run_length(batch_size) == 0


def _run_length(batch_size: int) -> int:
    return max(2, batch_size // PATIENTS_PER_EPISODE)


def _plan_crops(sampling: str, who: Indices, batch_size: int, crops: Crops, rng: np.random.Generator) -> EpochPlan:
    rows, bounds = crops.cut(rng)
    pieces = np.split(rows, bounds[1:-1])
    step_rows = max(batch_size, round(CROPS_PER_STEP * len(rows) / len(pieces)))
    if sampling in ("samples", "episodes", "environments"):
        order = np.concatenate([pieces[number] for number in rng.permutation(len(pieces))])
        return _plan_samples(order, step_rows, None, rng)
    if sampling not in ("pairs", "random-pairs"):
        raise ConfigError(f"unknown kind of sampling '{sampling}'")
    owners = who[rows[bounds[:-1]]] if sampling == "pairs" else np.zeros(len(pieces), np.int64)
    ones, others = fold_pairs(owners, int(rng.integers(2**31)))
    units: list[tuple[Indices, ...]] = [(pieces[a], pieces[b]) for a, b in zip(ones, others, strict=True)]
    # A patient with a single crop has its halves paired.
    units += [tuple(np.split(pieces[number], [len(pieces[number]) // 2])) for number in lone_samples(owners)]
    units = [units[number] for number in rng.permutation(len(units))]
    common = [min(len(one), len(other)) for one, other in units]
    first = np.concatenate([one[:count] for (one, _), count in zip(units, common, strict=True)])
    second = np.concatenate([other[:count] for (_, other), count in zip(units, common, strict=True)])
    rest = np.concatenate([side[count:] for unit, count in zip(units, common, strict=True) for side in unit])
    parts, counts = _cut_pairs(first, second, rest, *_pair_bounds(len(first), len(rest), step_rows))
    ends = np.cumsum([0, *map(len, parts)])
    return EpochPlan(torch.from_numpy(np.concatenate(parts)), tuple(ends.tolist()), tuple(counts.tolist()))


def _without_single_rows(bounds: Indices) -> Indices:
    """The same bounds, a step of one row joined to the step before it (the first to the step after it)."""
    kept = [int(bounds[0])]
    for bound in bounds[1:-1].tolist():
        if bound - kept[-1] >= 2 and bounds[-1] - bound >= 2:
            kept.append(bound)
    return np.array([*kept, bounds[-1]], np.int64)


def _steps(rows: int, batch_size: int) -> int:
    """How many steps an epoch has: no step holds more than ``batch_size`` rows on average, or less than two."""
    return max(1, min(-(-rows // batch_size), rows // 2))


def _equal_bounds(rows: int, batch_size: int) -> Indices:
    """Steps of ``batch_size`` rows; the last two share what is left, so that each has more than half of that."""
    steps = _steps(rows, batch_size)
    if steps < 3:
        bounds = 2 * _even_bounds(rows // 2, steps)
        bounds[-1] = rows
        return bounds
    last_two = (steps - 2) * batch_size
    middle = last_two + (rows - last_two + 1) // 4 * 2
    return np.concatenate([np.arange(steps - 1) * batch_size, [middle, rows]])


def _even_bounds(count: int, parts: int) -> Indices:
    return np.linspace(0, count, parts + 1).round().astype(np.int64)


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
