"""Events gathered from several tables, in any order, and laid out as ragged columns sample by sample.

Rows arrive in batches. Each is kept as four numbers (sample, time, code, value) in the bin of its sample's block, so
that the whole of a large database fits in about 16 bytes a row and is sorted one block at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from manydg.data.columns import Column, Ragged
from manydg.data.storage import DatasetWriter
from manydg.errors import DataError
from manydg.files import disk_errors, prefetch_map

# Rows of events packed into sortable keys, and small tools for ragged layouts.


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
        """The digits of an event's number."""
        time_bits, kind_bits, _ = self.bits
        digit = (event >> kind_bits) & ((1 << time_bits) - 1)
        time = self.times[digit] if len(self.times) > 1 else digit + self.times.sum()
        return event >> (time_bits + kind_bits), time, event & ((1 << kind_bits) - 1)

    @property
    def code(self) -> npt.NDArray[np.int64]:
        return self.key & ((1 << self.bits[2]) - 1)


def _order(key: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The stable order of keys that are not negative."""
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
    # Stable, which is fast here since the groups are in order already.
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


UNKNOWN = "<unknown>"
_Piece = tuple[int, Array, Array, Array, Array]


@dataclass(frozen=True)
class Field:
    """One family of codes: its name and the number of the kind of event it belongs to."""

    name: str
    kind: int


@dataclass(frozen=True)
class CodeField:
    """The codes of a field: from ``start`` up to ``stop``, and the kind of event they belong to."""

    name: str
    kind: int
    start: int
    stop: int


@dataclass(frozen=True)
class Vocabulary:
    """All codes of all fields, in one numbering.

    - ``words``: ``<unknown>`` first, then ``field:word`` field by field, each field's words sorted.
    - ``fields``: The range of each field; not needed to look words up.
    """

    words: list[str]
    fields: tuple[CodeField, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Rows of one field in one block of samples: sample within the block, time, word and value."""

    field: str
    block: int
    arrays: list[Array]


class EventStore:
    """Collects the events of many samples.

    - ``samples``: How many samples there are; they are numbered from 0.
    """

    def __init__(self, fields: Sequence[Field], samples: int) -> None:
        self.fields, self.samples = list(fields), samples
        self._numbers = {field.name: number for number, field in enumerate(self.fields)}
        self._words: list[dict[str, int]] = [{} for _ in self.fields]
        # Several tables may be read at once: list.append and dict.setdefault are safe between threads.
        self._bins: dict[int, list[_Piece]] = {block: [] for block in range(samples // BLOCK + 1)}

    def word_ids(self, field: str, words: pl.Series) -> npt.NDArray[np.int32]:
        """Give words numbers within a field; null and empty are -1."""
        table = self._words[self._numbers[field]]
        ids = [-1 if not word else table.setdefault(word, len(table)) for word in words]
        return np.asarray(ids, np.int32)

    def add(self, field: str, sample: Array, time: Array, word: Array, value: Array | None = None) -> None:
        """Add rows of a field, all arrays ``(rows,)``, which the store keeps; rows whose word is -1 are skipped."""
        number = self._numbers[field]
        values = np.full(len(sample), np.nan, np.float32) if value is None else value.astype(np.float32, copy=False)
        keep = word >= 0
        if not keep.all():
            sample, time, word, values = sample[keep], time[keep], word[keep], values[keep]
        whole = sample // BLOCK
        local, word = (sample - whole * BLOCK).astype(np.uint16), word.astype(np.int32, copy=False)
        block = whole.astype(np.uint16)
        if not (block[1:] >= block[:-1]).all():
            order = np.argsort(block, kind="stable")
            block, local, time, word, values = block[order], local[order], time[order], word[order], values[order]
        bounds = np.searchsorted(block, np.arange(self.samples // BLOCK + 2))
        for at in np.flatnonzero(np.diff(bounds)):
            rows = slice(bounds[at], bounds[at + 1])
            self._bins[int(at)].append((number, local[rows], time[rows], word[rows], values[rows]))

    def pieces(self) -> Iterator[Piece]:
        """The rows in the pieces in which they were added."""
        for block, pieces in self._bins.items():
            for number, *arrays in pieces:
                yield Piece(self.fields[number].name, block, arrays)

    def words(self) -> dict[str, list[str]]:
        """The words of each field, in the order of their numbers."""
        return {field.name: list(table) for field, table in zip(self.fields, self._words, strict=True)}

    def put(self, field: str, block: int, arrays: Sequence[Array]) -> None:
        """Add a piece that :meth:`pieces` gave."""
        local, time, word, value = arrays
        self._bins[block].append((self._numbers[field], local, time, word, value))

    def vocabulary(self, min_count: int = 1) -> Vocabulary:
        """The words that occur at least so often among the rows kept."""
        counts = [np.zeros(len(table), np.int64) for table in self._words]
        for pieces in self._bins.values():
            for number, _, _, word, _ in pieces:
                counts[number] += np.bincount(word, minlength=len(counts[number]))
        words, ranges = [UNKNOWN], []
        for field, table, count in zip(self.fields, self._words, counts, strict=True):
            kept = sorted(word for word, index in table.items() if count[index] >= max(1, min_count))
            start = len(words)
            words.extend(f"{field.name}:{word}" for word in kept)
            ranges.append(CodeField(field.name, field.kind, start, len(words)))
        return Vocabulary(words, tuple(ranges))

    def blocks(
        self, vocabulary: Vocabulary, *, min_events: int = 1, max_events: int | None = None, ticks_per_minute: int = 1
    ) -> Iterator[EventBlock]:
        """Lay the samples out block by block, in order; a block's rows are freed once it is yielded."""
        code_of = {word: code for code, word in enumerate(vocabulary.words)}
        remap = [
            np.array([code_of.get(f"{field.name}:{word}", 0) for word in table], np.int64)
            for field, table in zip(self.fields, self._words, strict=True)
        ]
        kinds = np.array([field.kind for field in self.fields], np.int64)

        def block(at: int) -> EventBlock:
            rows, first = _gather(self._bins.pop(at, []), remap, kinds), at * BLOCK
            return lay_out(
                rows, samples=min(BLOCK, self.samples - first), first=first, min_events=min_events,
                max_events=max_events, ticks_per_minute=ticks_per_minute,
            )  # fmt: skip

        return prefetch_map(block, range((self.samples + BLOCK - 1) // BLOCK))


@dataclass(frozen=True)
class EventBlock:
    """Samples of one block that have enough events.

    - ``samples`` ``(rows,)``: Their numbers.
    - ``columns``: ``event_kind``, ``event_time``, ``event_codes`` and ``event_values``.
    - ``counts``: Rows and events left out, by reason.
    """

    samples: npt.NDArray[np.int64]
    columns: dict[str, Column]
    counts: dict[str, int]


def write_blocks(
    writer: DatasetWriter,
    blocks: Iterable[EventBlock],
    static: npt.NDArray[np.float32],
    targets: Array,
    patients: Array,
    times: Array,
) -> tuple[npt.NDArray[np.int64], Counter[str]]:
    """Write the samples of all blocks; the other arrays have a row for every sample there is.

    - returns: The numbers of the samples written, and the blocks' counts.
    """
    counts: Counter[str] = Counter()
    kept = [np.zeros(0, np.int64)]
    for block in blocks:
        counts.update(block.counts)
        if len(rows := block.samples):
            columns = block.columns | {"static": static[rows]}
            writer.append_immutable(columns, targets[rows], patients[rows], times[rows])
            kept.append(rows)
    return np.concatenate(kept), counts


def join_blocks(blocks: Iterable[EventBlock]) -> tuple[npt.NDArray[np.int64], dict[str, Column]]:
    """All blocks in one: the samples' numbers and their columns."""
    parts = list(blocks)
    columns: dict[str, Column] = {}
    for name in parts[0].columns if parts else ():
        columns[name] = _join([block.columns[name] for block in parts])
    return np.concatenate([block.samples for block in parts] or [np.zeros(0, np.int64)]), columns


def _join(parts: Sequence[Column]) -> Column:
    if not all(isinstance(part, Ragged) for part in parts):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    ragged = [part for part in parts if isinstance(part, Ragged)]
    lengths = torch.cat([part.lengths for part in ragged])
    return Ragged(_join([part.values for part in ragged]), offsets_of(lengths.numpy()))


def _gather(pieces: list[_Piece], remap: Sequence[Array], kinds: Array) -> PackedRows:
    if not pieces:
        empty = np.zeros(0, np.int64)
        return PackedRows.pack(empty, empty, empty, empty, np.zeros(0, np.float32))
    sample = np.concatenate([piece[1] for piece in pieces])
    time = np.concatenate([piece[2] for piece in pieces])
    kind = np.repeat(kinds[[piece[0] for piece in pieces]], [len(piece[1]) for piece in pieces])
    code = np.concatenate([remap[piece[0]][piece[3]] for piece in pieces])
    value = np.concatenate([piece[4] for piece in pieces])
    return PackedRows.pack(sample, time, kind, code, value)


def lay_out(
    rows: PackedRows, *, samples: int, first: int = 0, min_events: int = 1, max_events: int | None = None,
    ticks_per_minute: int = 1,
) -> EventBlock:  # fmt: skip
    """Sort rows into events: all codes of one kind at one time of a sample.

    Events are in the order of time, then kind; codes within an event in the order of their numbers. Repeated rows are
    dropped. Of a sample with more than ``max_events`` events the last ones are kept.
    """
    given = len(rows.key)
    rows = rows.arranged()
    event = rows.event
    starts = np.flatnonzero(~same_as_before(event))
    owner, time, kind = rows.sample_time_kind(event[starts])
    events = np.bincount(owner, minlength=samples)
    enough = events >= max(1, min_events)
    chosen = enough[owner]
    if max_events is not None:
        after = np.cumsum(events)[owner] - 1 - np.arange(len(owner))
        chosen = chosen & (after < max_events)
    lengths = np.diff(np.append(starts, len(event)))
    kept = slice(None) if chosen.all() else np.repeat(chosen, lengths)
    outer = offsets_of(np.bincount(owner[chosen], minlength=samples)[enough])
    inner = offsets_of(lengths[chosen])
    minutes = (time[chosen] / ticks_per_minute).astype(np.float32)
    columns: dict[str, Column] = {
        "event_kind": Ragged(torch.from_numpy(kind[chosen]), outer),
        "event_time": Ragged(torch.from_numpy(minutes), outer),
        "event_codes": Ragged(Ragged(torch.from_numpy(rows.code[kept]), inner), outer),
        "event_values": Ragged(Ragged(torch.from_numpy(rows.value[kept]), inner), outer),
    }
    counts = {
        "repeated_rows": given - len(rows.key),
        "short_samples": int(samples - enough.sum()),
        "events_beyond_limit": int(enough[owner].sum() - chosen.sum()),
        "events": int(chosen.sum()),
    }
    return EventBlock(np.flatnonzero(enough) + first, columns, counts)


# Events saved beside the dataset while it is prepared, so that a killed run goes on from there


_COLUMNS = ("local", "time", "word", "value")


@dataclass(frozen=True)
class SavedEvents:
    """What :func:`load_events` needs besides the files that :func:`save_events` wrote.

    - ``kept``: The files' names and sizes.
    - ``kinds``: The type of each column.
    - ``words``: The words of each field, in the order of their numbers.
    - ``pieces`` (str, int, int): Field, block and number of rows of each piece.
    - ``counts``: How many rows were read, and left out for which reason.
    """

    kept: dict[str, int]
    kinds: list[str]
    words: dict[str, list[str]]
    pieces: list[tuple[str, int, int]]
    counts: dict[str, int]


def save_events(store: EventStore, path: Path, counts: dict[str, int]) -> SavedEvents:
    """Write a store's rows as plain binary files, one per column; ``path`` is their common name."""
    pieces = list(store.pieces())
    kinds = [np.result_type(*(piece.arrays[at].dtype for piece in pieces)).str for at in range(4)] if pieces else []
    kept: dict[str, int] = {}
    for at, kind in enumerate(kinds):
        column = _file(path, _COLUMNS[at])
        with disk_errors(path.parent), column.open("wb") as file:
            for piece in pieces:
                piece.arrays[at].astype(kind, copy=False).tofile(file)
        kept[column.name] = column.stat().st_size
    shapes = [(piece.field, piece.block, len(piece.arrays[0])) for piece in pieces]
    return SavedEvents(kept, kinds, store.words(), shapes, counts)


def load_events(store: EventStore, saved: SavedEvents, path: Path) -> None:
    """Add the rows that :func:`save_events` wrote to a store, whose words may be numbered otherwise."""
    with disk_errors(path.parent):
        # Mapped, not read: what was just written is still in memory, and each block is used once.
        columns = [
            np.asarray(np.memmap(_file(path, column), kind, "r"))
            for column, kind in zip(_COLUMNS, saved.kinds, strict=False)
        ]
    words = {field: pl.Series(words, dtype=pl.String) for field, words in saved.words.items()}
    numbers = {field: store.word_ids(field, known) for field, known in words.items()}
    same = {field: bool((each == np.arange(len(each))).all()) for field, each in numbers.items()}
    start = 0
    for field, block, length in saved.pieces:
        local, time, word, value = (column[start : start + length] for column in columns)
        store.put(field, block, [local, time, word if same[field] else numbers[field][word], value])
        start += length


def _file(path: Path, column: str) -> Path:
    return path.with_name(f"{path.name}.{column}.bin")
