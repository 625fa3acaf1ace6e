"""Steps of sequences in a batch of fixed shape: nothing is asked of the device, so that a step may be replayed."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from manydg.backbones._layout import Layout
from manydg.data.columns import Ragged


class FixedLayout(Layout):
    """How a flat list of steps is divided into rows, where the list has leftovers behind the last row.

    Leftover steps are laid out nowhere and counted in no sum, so that nothing reaches them and no gradient comes back.

    Parameters
    ----------
    offsets : Tensor ``(rows + 1,)``
    longest : int
        No row has more steps.
    steps : int
        Length of the flat list.
    """

    def __init__(self, offsets: Tensor, longest: int, steps: int) -> None:
        self.offsets, self.lengths = offsets, offsets[1:] - offsets[:-1]
        self.rows, self.longest, self.steps = offsets.shape[0] - 1, max(1, longest), steps
        flat = torch.arange(steps, device=offsets.device)
        row = torch.searchsorted(offsets[1:], flat, right=True)
        self.inside = row < self.rows
        self.row = row.clamp_max(self.rows - 1)
        self.position = (flat - offsets[self.row]).clamp(0, self.longest - 1)

    def spread(self, vectors: Tensor) -> Tensor:
        return self._lay_out(vectors, self.position)

    def total(self, vectors: Tensor) -> Tensor:
        sums = vectors.new_zeros(self.rows + 1, vectors.shape[-1])
        return sums.index_add(0, torch.where(self.inside, self.row, self.rows), vectors)[: self.rows]

    def _run(self, network: nn.GRU, vectors: Tensor, time: Tensor) -> Tensor:
        # Rows are laid out from their first step on: what a network makes of the padding comes too late to matter.
        time = time.clamp(0, self.longest - 1)
        states, _ = network(self._lay_out(vectors, time))
        flat: Tensor = states.flatten(0, 1).index_select(0, self.row * self.longest + time)
        return flat

    def _lay_out(self, vectors: Tensor, time: Tensor) -> Tensor:
        spare = self.rows * self.longest
        place = torch.where(self.inside, self.row * self.longest + time, spare)
        filled = vectors.new_zeros(spare + 1, vectors.shape[-1]).index_copy(0, place, vectors)
        return filled[:spare].reshape(self.rows, self.longest, -1)

    @cached_property
    def present(self) -> Tensor:
        return torch.arange(self.longest, device=self.offsets.device) < self.lengths.unsqueeze(-1)


def layout_of(column: Ragged, host_lengths: list[int] | None = None) -> Layout:
    """The layout of a column's items, fixed where the column is.

    Parameters
    ----------
    host_lengths : list of int, optional
        Number of items of each row, where it is known already.
    """
    if column.longest is not None:
        return FixedLayout(column.offsets, column.longest, len(column.values))
    return Layout(column.offsets, host_lengths)
