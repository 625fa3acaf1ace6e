"""Events that are already read, kept beside the dataset in the making so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from manydg.data._files import disk_errors
from manydg.sources._event_rows import Array
from manydg.sources._events import EventStore

_COLUMNS = ("local", "time", "word", "value")


def keep_events(store: EventStore, place: Path) -> dict[str, Any]:
    """Write a store's rows as plain binary files, one a column.

    Parameters
    ----------
    store : EventStore
    place : path
        The files' common name, to which an ending is added.

    Returns
    -------
    dict of JSON values
        What :func:`put_back` needs besides the files; ``kept`` holds their names and sizes.
    """
    pieces = list(store.pieces())
    kinds = [np.result_type(*(piece.arrays[at].dtype for piece in pieces)).str for at in range(4)] if pieces else []
    kept: dict[str, int] = {}
    with disk_errors(place.parent):
        for at, kind in enumerate(kinds):
            path = _file(place, _COLUMNS[at])
            with path.open("wb") as file:
                for piece in pieces:
                    piece.arrays[at].astype(kind, copy=False).tofile(file)
            kept[path.name] = path.stat().st_size
    return {
        "kept": kept,
        "kinds": kinds,
        "words": store.words(),
        "pieces": [[piece.field, piece.block, len(piece.arrays[0])] for piece in pieces],
    }


def put_back(store: EventStore, found: Mapping[str, Any], place: Path) -> None:
    """Add the rows that :func:`keep_events` wrote to a store, whose words may be numbered otherwise."""
    with disk_errors(place.parent):
        # Mapped, not read: what was just written is still in memory, and each block is used once.
        columns = [
            np.asarray(np.memmap(_file(place, column), kind, "r"))
            for column, kind in zip(_COLUMNS, found["kinds"], strict=False)
        ]
    renumber = {
        field: _renumbering(store.word_ids(field, pl.Series(words, dtype=pl.String)))
        for field, words in found["words"].items()
    }
    start = 0
    for field, block, length in found["pieces"]:
        local, time, word, value = (column[start : start + length] for column in columns)
        store.put(field, block, [local, time, renumber[field](word), value])
        start += length


def _renumbering(numbers: npt.NDArray[np.int32]) -> Callable[[Array], Array]:
    if (numbers == np.arange(len(numbers))).all():
        return lambda word: word
    return lambda word: numbers[word]


def _file(place: Path, column: str) -> Path:
    return place.with_name(f"{place.name}.{column}.bin")
