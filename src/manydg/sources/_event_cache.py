"""Tables that are already read, kept beside the dataset in the making so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manydg.data.storage import disk_error
from manydg.sources._events import EventStore
from manydg.sources._resume import Job, WorkFolder

_COLUMNS = {"local": np.uint16, "time": np.int32, "word": np.int32, "value": np.float32}


class TableCache:
    """Keeps each table's rows of an :class:`EventStore` as plain binary files.

    Parameters
    ----------
    work : WorkFolder
        Its small JSON file of a table is written last, so that a table is there whole or not at all.
    """

    def __init__(self, work: WorkFolder) -> None:
        self._work = work

    def read(
        self,
        name: str,
        fields: Sequence[str],
        files: Sequence[Path],
        store: EventStore,
        read: Callable[[], dict[str, int]],
    ) -> dict[str, int]:
        """Put a table's rows into the store, from the files kept or by reading it; returns its counts.

        Parameters
        ----------
        name : str
            The table.
        fields : sequence of str
            The store's fields that come from it.
        files : sequence of Path
            What the rows depend on; when one of them changes the table is read again.
        store : EventStore
        read : callable
            Reads the table into the store.
        """
        job = Job(name, tuple(files), None)
        kept = self._work.load(job)
        if kept is not None and self._restore(name, kept, store):
            return {key: int(count) for key, count in kept["counts"].items()}
        counts = read()
        try:
            pieces = self._keep(name, fields, store)
        except OSError as error:
            raise disk_error(error, self._work.path) from error
        self._work.save(job, {"counts": counts, "words": store.words_of(fields), "pieces": pieces})
        return counts

    def _keep(self, name: str, fields: Sequence[str], store: EventStore) -> list[list[Any]]:
        self._work.path.mkdir(parents=True, exist_ok=True)
        pieces = list(store.pieces_of(fields))
        for at, column in enumerate(_COLUMNS):
            with self._file(name, column).open("wb") as file:
                for piece in pieces:
                    piece.arrays[at].tofile(file)
        return [[piece.field, piece.block, len(piece.arrays[0])] for piece in pieces]

    def _restore(self, name: str, kept: dict[str, Any], store: EventStore) -> bool:
        lengths = np.array([length for _, _, length in kept["pieces"]], np.int64)
        try:
            columns = [np.fromfile(self._file(name, column), kind) for column, kind in _COLUMNS.items()]
        except OSError:
            return False
        if any(len(column) != lengths.sum() for column in columns):
            return False
        ends = np.cumsum(lengths)
        store.set_words(kept["words"])
        for (field, block, length), end in zip(kept["pieces"], ends, strict=True):
            store.put(field, block, [column[end - length : end] for column in columns])
        return True

    def _file(self, name: str, column: str) -> Path:
        return self._work.path / f"{name}.{column}.bin"
