"""Identical samples on two sides of a split: the same recording under two patients' names, most often."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.splits import SIDES, Split
from manydg.errors import ManyDGWarning

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

EXAMPLES = 5
_CHUNK_BYTES = 1 << 22
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Occurrence:
    """Where a sample stands: its side of the split, its row in the dataset and its patient's pseudonym."""

    side: str
    row: int
    patient: str

    def __str__(self) -> str:
        return f"row {self.row} of {self.patient} ({self.side})"


@dataclass(frozen=True)
class Overlap:
    """What two sides of a split share; false where they share nothing.

    Attributes
    ----------
    samples : int
        Samples whose inputs also occur on another side.
    contents : int
        How many different inputs these are.
    examples : tuple of pairs of Occurrence
        The first few, each with a sample of another side.
    patients : tuple of str
        Pseudonyms of the patients concerned.
    """

    samples: int
    contents: int
    examples: tuple[tuple[Occurrence, Occurrence], ...]
    patients: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.samples > 0

    def __str__(self) -> str:
        if not self:
            return "no sample occurs on two sides of the split"
        shown = "; ".join(f"{left} = {right}" for left, right in self.examples)
        return (
            f"{self.samples} samples of {len(self.patients)} patients have inputs that also occur on another side of "
            f"the split ({self.contents} different ones): {shown}. Are some patients known by two names?"
        )


def find_overlap(dataset: DomainDataset, split: Split) -> Overlap:
    """Find samples with identical inputs on different sides of a split.

    Rows are compared by a 64-bit hash of all their input columns, and those that agree then value by value, so that
    what is reported is certain. Two missing values (NaN) are equal.

    Parameters
    ----------
    dataset : DomainDataset
    split : Split
        Of that dataset.

    Returns
    -------
    Overlap
    """
    rows = np.concatenate(list(split))
    sides = np.repeat(np.arange(len(SIDES)), [len(side) for side in split])
    shared, group = _shared(dataset, rows, sides)
    if len(shared) == 0:
        return Overlap(0, 0, (), ())
    pseudonyms = dataset.pseudonyms()
    codes = dataset.domains.cpu().numpy()
    patients = tuple(pseudonyms[code] for code in np.unique(codes[rows[shared]]))

    def occurrence(place: int) -> Occurrence:
        row = int(rows[place])
        return Occurrence(SIDES[sides[place]], row, pseudonyms[codes[row]])

    examples = []
    _, starts = np.unique(group, return_index=True)
    for start in starts[:EXAMPLES]:
        members = shared[group == group[start]]
        other = members[sides[members] != sides[members[0]]][0]
        examples.append((occurrence(members[0]), occurrence(other)))
    return Overlap(len(shared), len(starts), tuple(examples), patients)


def warn_of_overlap(dataset: DomainDataset, split: Split) -> Overlap:
    """Warn (:class:`ManyDGWarning`) if identical samples stand on two sides of a split."""
    overlap = find_overlap(dataset, split)
    if overlap:
        warnings.warn(str(overlap), ManyDGWarning, stacklevel=2)
    return overlap


def _shared(dataset: DomainDataset, rows: Indices, sides: Indices) -> tuple[Indices, Indices]:
    """Places in ``rows`` whose content occurs on two sides, sorted by content, and the number of that content."""
    hashes = _hash_samples(dataset, rows)
    places, group = _spanning(np.arange(len(rows)), hashes, sides)
    # Equal hashes are not yet equal samples: split each group by what its members really hold.
    content = np.full(len(places), -1, dtype=np.int64)
    found = 0
    while (undecided := np.flatnonzero(content < 0)).size:
        _, first, member = np.unique(group[undecided], return_index=True, return_inverse=True)
        left, right = rows[places[undecided]], rows[places[undecided[first]]][member]
        equal = np.concatenate([_equal(dataset, *pair) for pair in _chunks(dataset, left, right)])
        content[undecided[equal]] = found + member[equal]
        found += len(first)
    return _spanning(places, content, sides[places])


def _spanning(places: Indices, keys: npt.NDArray[np.integer], sides: Indices) -> tuple[Indices, Indices]:
    """Those of ``places`` whose key occurs on two sides, sorted by key and place, and a number for each key."""
    _, group = np.unique(keys, return_inverse=True)
    seen = np.zeros((len(SIDES), group.max(initial=-1) + 1), dtype=bool)
    seen[sides, group] = True
    chosen = np.flatnonzero((seen.sum(axis=0) > 1)[group])
    order = chosen[np.lexsort((places[chosen], group[chosen]))]
    return places[order], group[order]


def _chunks(dataset: DomainDataset, *rows: Indices) -> Iterator[tuple[Indices, ...]]:
    dense = [column for column in dataset.columns.values() if isinstance(column, Tensor)]
    width = sum(column[:1].nbytes for column in dense)
    step = max(1, min(1 << 16, _CHUNK_BYTES // max(width, 1)))
    for start in range(0, len(rows[0]), step):
        yield tuple(each[start : start + step] for each in rows)


def _hash_samples(dataset: DomainDataset, rows: Indices) -> Hashes:
    pieces = [_hash_rows(dataset, piece) for (piece,) in _chunks(dataset, rows)]
    return np.concatenate([np.zeros(0, dtype=np.uint64), *pieces])


def _hash_rows(dataset: DomainDataset, rows: Indices) -> Hashes:
    inputs = dataset.take(torch.from_numpy(rows).to(dataset.device)).inputs
    total = np.zeros(len(rows), dtype=np.uint64)
    for column in inputs.values():
        total = _mix(total * _MULTIPLIER + _hash_column(column.to("cpu")))
    return total


def _hash_column(column: Column) -> Hashes:
    """A hash of each row, ``(rows,)``; sums wrap around at 64 bits."""
    if not isinstance(column, Ragged):
        return _hash_dense(column)
    items = _hash_column(column.values)
    place = column.position_of_item().numpy().astype(np.uint64)
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mix(items + place * _MULTIPLIER), dtype=np.uint64)])
    offsets = column.offsets.numpy()
    lengths = column.lengths.numpy().astype(np.uint64)
    return _mix(running[offsets[1:]] - running[offsets[:-1]] + lengths)


def _hash_dense(column: Tensor) -> Hashes:
    flat = _flat(column).numpy()
    if flat.dtype.kind == "f":
        # Adding zero makes minus zero zero, which equals it; the bits of NaN may vary, so that it gets one value.
        flat = np.where(np.isnan(flat), np.float32(np.nan), flat + np.float32(0.0)).astype(np.float32).view(np.uint32)
    bits = flat.astype(np.uint64)
    place = np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * _MULTIPLIER
    # Each place has an odd multiplier of its own; the shift brings the product's well-mixed upper half down.
    bits *= _mix(place) | np.uint64(1)
    bits ^= bits >> np.uint64(32)
    return _mix(np.sum(bits, axis=1, dtype=np.uint64))


def _flat(column: Tensor) -> Tensor:
    return column.reshape(len(column), math.prod(column.shape[1:]))


def _mix(bits: Hashes) -> Hashes:
    """Spread every bit over all 64 (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = bits ^ (bits >> np.uint64(31))
    return mixed


def _equal(dataset: DomainDataset, left: Indices, right: Indices) -> npt.NDArray[np.bool_]:
    """Whether each row of the one list has the same inputs as the row beside it in the other."""
    mine = dataset.take(torch.from_numpy(left).to(dataset.device)).inputs
    theirs = dataset.take(torch.from_numpy(right).to(dataset.device)).inputs
    same = torch.stack([_equal_rows(mine[name], theirs[name]) for name in mine]).all(dim=0)
    return same.cpu().numpy()


def _equal_rows(left: Column, right: Column) -> Tensor:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        equal = left == right
        if left.is_floating_point():
            equal |= left.isnan() & right.isnan()
        return _flat(equal).all(dim=1)
    if not isinstance(left, Ragged) or not isinstance(right, Ragged):
        raise TypeError("both columns must be dense, or both ragged")
    equal = left.lengths == right.lengths
    where = torch.nonzero(equal).squeeze(1)
    mine, theirs = left.take(where), right.take(where)
    differing = torch.zeros(len(where), dtype=torch.int64, device=where.device)
    differing.index_add_(0, mine.row_of_item(), (~_equal_rows(mine.values, theirs.values)).to(torch.int64))
    equal[where] = differing == 0
    return equal
