"""Epochs for data that do not fit in memory: patients who lie together on disk are read together.

Patients are cut into blocks of neighbours on disk. Every epoch puts the blocks in a new random order and takes several
at a time: a window, which is read in long stretches, fits in memory, and is shuffled as a small dataset would be.

What this does to training: every sample still occurs in every epoch, every pair is still of one patient, and which
blocks meet in a window changes from epoch to epoch. But the samples of a step come from the ``m`` patients of one
window instead of all. If the patients' mean gradients have variance ``s``, that of a step's gradient grows by about
``s / m``, and steps of one window lean the same way; over an epoch the leanings cancel, because the windows make up all
patients. With hundreds of patients to a window this is small beside the noise of sampling a batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import EpochPlan, plan_epoch

BLOCKS_PER_WINDOW = 8
_PAGE = 4096
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockPlan:
    """An epoch in windows.

    Parameters
    ----------
    plan : EpochPlan
    windows : tuple of array
        The rows of the training set that each window holds, in the order in which they lie on disk.
    first_steps : tuple of int
        The step at which each window begins.
    """

    plan: EpochPlan
    windows: tuple[Index, ...]
    first_steps: tuple[int, ...]


def plan_in_blocks(
    sampling: str, dataset: DomainDataset, batch_size: int, seed: int, epoch: int, window_rows: int
) -> BlockPlan:
    """Plan one epoch by windows of blocks of whole patients.

    Parameters
    ----------
    sampling : {"samples", "pairs", "random-pairs", "episodes"}
    dataset : DomainDataset
        The training patients. It helps if the samples of a patient lie together on disk, as 'prepare' writes them.
    batch_size, seed, epoch : int
    window_rows : int
        About how many rows fit in memory at a time.
    """
    blocks = cut_into_blocks(dataset, max(1, window_rows // BLOCKS_PER_WINDOW))
    order = np.random.default_rng([seed, epoch, 11]).permutation(len(blocks))
    count = max(1, round(sum(map(len, blocks)) / max(window_rows, 2 * batch_size)))
    groups = np.array_split(order, min(count, len(blocks)))
    windows = tuple(np.concatenate([blocks[block] for block in sorted(group.tolist())]) for group in groups)
    parts: list[EpochPlan] = []
    for place, window in enumerate(windows):
        rows = torch.from_numpy(window)
        # Each window its own stream of random numbers.
        part = plan_epoch(sampling, dataset.domains.cpu()[rows], batch_size, seed, epoch * 1_000_003 + place)
        parts.append(EpochPlan(rows[part.indices], part.bounds, part.pairs))
    starts = [0, *itertools.accumulate(len(part) for part in parts)]
    return BlockPlan(_join(parts), windows, tuple(starts[:-1]))


def cut_into_blocks(dataset: DomainDataset, rows: int) -> list[Index]:
    """Positions of the samples in blocks of about so many rows; patients are whole and neighbours on disk together."""
    who = dataset.domains.cpu().numpy()
    stored = np.arange(len(who)) if dataset.rows is None else dataset.rows.cpu().numpy()
    first = np.full(int(who.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, who, stored)
    order = np.lexsort((stored, first[who]))
    new_patient = np.flatnonzero(np.diff(who[order], prepend=-1))
    # A block ends with the patient who fills it.
    ends = np.flatnonzero(np.diff(new_patient // rows)) + 1
    return [block for block in np.split(order, new_patient[ends]) if len(block)]


def read_ahead(dataset: DomainDataset, positions: Index) -> int:
    """Bring rows from disk to memory in long stretches; returns how many bytes were looked at.

    Parameters
    ----------
    dataset : DomainDataset
        Its columns are memory maps.
    positions : array
    """
    stored = np.sort(positions if dataset.rows is None else dataset.rows.cpu().numpy()[positions])
    cuts = np.flatnonzero(np.diff(stored) > 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(stored, cuts) if len(run)]
    return sum(_touch(column, start, stop) for column in dataset.columns.values() for start, stop in runs)


def _touch(column: Column, start: int, stop: int) -> int:
    while isinstance(column, Ragged):
        start, stop = int(column.offsets[start]), int(column.offsets[stop])
        column = column.values
    part = column[start:stop]
    if part.numel() == 0 or not part.is_contiguous():
        return 0
    # A byte of every page: the kernel reads far ahead of whoever goes straight on.
    part.reshape(-1).view(torch.uint8)[::_PAGE].sum(dtype=torch.int64)
    return int(part.nbytes)


def _join(parts: list[EpochPlan]) -> EpochPlan:
    bounds: list[int] = [0]
    for part in parts:
        start = bounds[-1]
        bounds += [start + bound for bound in part.bounds[1:]]
    pairs = tuple(itertools.chain.from_iterable(part.pairs for part in parts))
    return EpochPlan(torch.cat([part.indices for part in parts]), tuple(bounds), pairs)


def bytes_per_row(dataset: DomainDataset) -> float:
    """How many bytes a row takes on disk, on average."""
    total = 0.0
    for column in dataset.columns.values():
        rows, inner = max(len(column), 1), column
        while isinstance(inner, Ragged):
            inner = inner.values
        assert isinstance(inner, Tensor)
        total += inner.nbytes / rows
    return total
