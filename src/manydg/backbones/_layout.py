"""Steps of sequences, from a flat list to a rectangle and back, with nothing that a batch mate could change."""

from __future__ import annotations

import torch
from torch import Tensor

from manydg.data.columns import Ragged, offsets_from_lengths


class Layout:
    """Where each step of a flat list lies in a rectangle whose rows begin at the left.

    Parameters
    ----------
    offsets : Tensor ``(rows + 1,)``
        Where each row's steps begin in the flat list.
    steps : int
        Number of steps in the flat list.
    longest : int, optional
        Length of the longest row, where it is known already: to find it, a GPU must be waited for.

    Attributes
    ----------
    lengths : Tensor ``(rows,)``
    longest : int
        Width of the rectangle, at least 1.
    position : Tensor ``(steps,)``
        Place of each step in its row, from 0.
    present : bool Tensor ``(rows, longest)``
    """

    def __init__(self, offsets: Tensor, steps: int, longest: int | None = None) -> None:
        flat = torch.arange(steps, device=offsets.device)
        column = Ragged(flat, offsets)
        self.offsets, self.lengths, self.rows = offsets, column.lengths, len(column)
        self.longest = max(1, longest_row(offsets) if longest is None else longest)
        self.row = column.row_of_item()
        self.position = flat - offsets[self.row]
        self.present = torch.arange(self.longest, device=offsets.device) < self.lengths.unsqueeze(-1)
        self._place = self.row * self.longest + self.position

    def spread(self, vectors: Tensor) -> Tensor:
        """Flat vectors ``(steps, width)`` in a rectangle ``(rows, longest, width)``, zero where there is no step."""
        empty = vectors.new_zeros(self.rows * self.longest, vectors.shape[-1])
        return empty.index_copy(0, self._place, vectors).reshape(self.rows, self.longest, -1)

    def spread_reversed(self, vectors: Tensor) -> Tensor:
        """The same with each row's last step first."""
        empty = vectors.new_zeros(self.rows * self.longest, vectors.shape[-1])
        place = self._place + self.lengths[self.row] - 1 - 2 * self.position
        return empty.index_copy(0, place, vectors).reshape(self.rows, self.longest, -1)

    def last(self, rectangle: Tensor) -> Tensor:
        """The vector of each row's last step, ``(rows, width)``; of a row without steps, its first place."""
        place = torch.arange(self.rows, device=self.lengths.device) * self.longest + (self.lengths - 1).clamp_min(0)
        return rectangle.flatten(0, 1).index_select(0, place)


def longest_row(offsets: Tensor) -> int:
    """Length of the longest row."""
    return int((offsets[1:] - offsets[:-1]).max()) if len(offsets) > 1 else 0


def last_steps(offsets: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Positions in the flat list of each row's last steps, at most ``limit``, and their offsets."""
    lengths = (offsets[1:] - offsets[:-1]).clamp_max(limit)
    kept = offsets_from_lengths(lengths)
    total = int(kept[-1])
    shift = torch.repeat_interleave(offsets[1:] - kept[1:], lengths, output_size=total)
    return torch.arange(total, device=offsets.device) + shift, kept
