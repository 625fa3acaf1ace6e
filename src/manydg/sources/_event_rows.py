"""Rows of events packed into sortable keys, and small tools for ragged layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.errors import DataError

BLOCK = 2048
"""Samples that are sorted together."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PackedRows:
    """Rows as sorted keys: the digits of a key are sample, time, kind and code, so that one sort orders them all."""

    key: npt.NDArray[np.int64]
    value: npt.NDArray[np.float32]
    bits: tuple[int, int, int]
    times: npt.NDArray[np.int64]
    """The times that a key's digit points to; a single one where the digit counts from it."""

    @staticmethod
    def pack(sample: Array, time: Array, kind: Array, code: Array, value: Array) -> PackedRows:
        """Pack columns ``(rows,)`` into keys, unsorted."""
        times = time[:1].astype(np.int64) if not len(time) else np.array([time.min()], np.int64)
        digits = time - times[0] if len(time) else time
        if _width(digits) + _width(kind) + _width(code) + BLOCK.bit_length() > 63:
            # A lifetime in seconds takes too many bits: number the times that occur instead.
            times, digits = np.unique(time.astype(np.int64), return_inverse=True)
        bits = (_width(digits), _width(kind), _width(code))
        if sum(bits) + BLOCK.bit_length() > 63:
            raise DataError("there are too many different codes and times in these data to be sorted")
        key = sample.astype(np.int64)
        for column, width in zip((digits, kind, code), bits, strict=True):
            key <<= width
            key |= column
        return PackedRows(key, value, bits, times)

    def arranged(self) -> PackedRows:
        """Sorted by key, then value, each row once."""
        order = _order(self.key)
        key, value = self.key[order], self.value[order]
        tied = same_as_before(key)
        if tied.any():
            # Only the rows that share all but the value need a second sort, and only where there are values.
            keep = ~tied
            among = np.flatnonzero(tied | np.append(tied[1:], False))
            group = np.cumsum(~tied[among]) - 1
            valued = np.bincount(group, ~np.isnan(value[among]))[group] > 0
            among, group = among[valued], group[valued]
            value[among], again = _sorted_within(group, value[among])
            keep[among] = ~again
            key, value = key[keep], value[keep]
        return PackedRows(key, value, self.bits, self.times)

    @property
    def event(self) -> npt.NDArray[np.int64]:
        """Sample, time and kind in one: rows of one event share it."""
        return self.key >> self.bits[2]

    def sample_time_kind(self, event: npt.NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """What an event's number says."""
        time_bits, kind_bits, _ = self.bits
        digit = (event >> kind_bits) & ((1 << time_bits) - 1)
        time = self.times[digit] if len(self.times) > 1 else digit + self.times.sum()
        return event >> (time_bits + kind_bits), time, event & ((1 << kind_bits) - 1)

    @property
    def code(self) -> npt.NDArray[np.int64]:
        return self.key & ((1 << self.bits[2]) - 1)


def _order(key: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What sorts keys that are not below 0, stably."""
    if not len(key):
        return np.zeros(0, np.int64)
    # Sixteen bits are sorted by counting; what is left then comes in runs, on which a stable sort is fast.
    first = np.argsort((key >> max(0, int(key.max()).bit_length() - 16)).astype(np.uint16), kind="stable")
    order: npt.NDArray[np.int64] = first[np.argsort(key[first], kind="stable")]
    return order


def _sorted_within(
    group: npt.NDArray[np.int64], value: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Values sorted within their groups, NaN last, and which of them repeat the one before."""
    bits = np.where(np.isnan(value), np.float32(np.nan), value).view(np.int32)
    # A float's bits order like an integer once those of negative numbers are turned round.
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) + (1 << 31)
    # Stable, which is fast here since all groups but for their insides stand in order already.
    both = np.sort((group << 32) | rank, kind="stable")
    low = ((both & 0xFFFFFFFF) - (1 << 31)).astype(np.int32)
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).view(np.float32), same_as_before(both)


def _width(digits: Array) -> int:
    return int(digits.max()).bit_length() if len(digits) else 0


def same_as_before(values: Array) -> npt.NDArray[np.bool_]:
    """Whether each value equals the one before it; the first never does."""
    same = np.zeros(len(values), bool)
    np.equal(values[1:], values[:-1], out=same[1:])
    return same


def ranges(starts: Array, lengths: Array) -> npt.NDArray[np.int64]:
    """The ranges from each start, of each length, one after the other."""
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    positions: npt.NDArray[np.int64] = np.arange(len(shift), dtype=np.int64) + shift
    return positions


def offsets_of(lengths: Array) -> torch.Tensor:
    """Row boundaries ``(rows + 1,)`` from row lengths."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
