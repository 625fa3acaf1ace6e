"""The rows of an IIIC part read in blocks: hashed, judged and handed on in one pass.

This module does not import torch, so that worker processes start quickly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data._behind import HashingThread
from manydg.data._files import LARGE_FILE, let_go
from manydg.errors import DataError
from manydg.sources._iiic_parts import Part, open_signals, read_votes, signal_block
from manydg.sources._iiic_rules import FEW_VOTES, KEPT, Rules, judge
from manydg.sources._provenance import describe_files, read_into, reading_errors

BLOCK = 32
"""Rows at a time: a few megabytes, which stay in the processor's cache between reading, judging and writing."""
LET_GO = 1 << 27
Block = tuple[slice, npt.NDArray[Any], npt.NDArray[np.uint8]]


class PartReading:
    """A part read once from end to end, for its checksum and for what becomes of each row.

    Parameters
    ----------
    part : Part
    rules : Rules
    """

    def __init__(self, part: Part, rules: Rules) -> None:
        self._part, self._rules = part, rules
        self._signals = open_signals(part)
        votes = read_votes(part, len(self._signals), rules)
        self._verdicts = np.where(votes.sum(axis=1) < rules.min_votes, FEW_VOTES, KEPT).astype(np.uint8)
        self._digest = hashlib.sha256()

    def blocks(self) -> Iterator[Block]:
        """Rows, their stored signals and verdicts, a block at a time.

        Blocks are hashed behind the caller's back, so that nobody may change them.
        """
        with closing(HashingThread()) as hashing:
            for rows, stored in self._stored_blocks(hashing):
                if rows.start == 0:
                    check_unit(self._part, stored, self._rules)
                block, judged = self._verdicts[rows], judge(stored, self._rules)
                block[block == KEPT] = judged[block == KEPT]
                yield rows, stored, block
            hashing.settle()

    def _stored_blocks(self, hashing: HashingThread) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        every = range(0, len(self._signals), BLOCK)
        if not self._signals.flags.c_contiguous:
            yield from ((rows, signal_block(self._part, rows)) for rows in (slice(at, at + BLOCK) for at in every))
            return
        head = int(getattr(self._signals, "offset", 0))
        # Where a file is too large to stay in memory, what has been read of it makes room for what comes.
        step = LET_GO if self._part.signals.stat().st_size >= LARGE_FILE else math.inf
        with reading_errors(self._part.signals), self._part.signals.open("rb", buffering=0) as file:
            self._digest.update(file.read(head))
            at = gone = head
            for start in every:
                rows = slice(start, min(start + BLOCK, len(self._signals)))
                # Read, not mapped: a copy costs less than a fault for every few pages.
                stored = np.empty((rows.stop - start, *self._signals.shape[1:]), self._signals.dtype)
                data = stored.reshape(-1).view(np.uint8).data
                read_into(file, data)
                at += len(data)
                if at - gone >= step:
                    let_go(file.fileno(), gone, at)
                    gone = at
                hashing.add(self._digest, data)
                yield rows, stored
            hashing.add(self._digest, memoryview(file.read()))

    def plan(self) -> dict[str, Any]:
        """What was found, once all blocks are read, as JSON values: ``verdicts`` (a digit for each row) and ``files``
        with their checksums."""
        path = self._part.signals
        entry = {"name": path.name, "bytes": path.stat().st_size, "checksum": self._digest.hexdigest()}
        if not self._signals.flags.c_contiguous:
            # Rows of a column-major file do not lie one after the other, so its bytes are read by themselves.
            (entry,) = describe_files([path])
        others = describe_files([file for file in self._part.files if file != path])
        return {"verdicts": "".join(map(str, self._verdicts.tolist())), "files": [entry, *others]}


def plan_part(argument: tuple[Part, Rules]) -> dict[str, Any]:
    """Read a part for its :meth:`PartReading.plan` alone."""
    reading = PartReading(*argument)
    for _ in reading.blocks():
        pass
    return reading.plan()


class PlannedReading:
    """A part whose plan is known: blocks without a single sample are not read."""

    def __init__(self, part: Part, plan: dict[str, Any]) -> None:
        self._part, self._plan = part, plan

    def blocks(self) -> Iterator[Block]:
        """As those of :class:`PartReading`."""
        verdicts = verdicts_in(self._plan)
        for start in range(0, len(verdicts), BLOCK):
            rows = slice(start, start + BLOCK)
            if (verdicts[rows] == KEPT).any():
                yield rows, signal_block(self._part, rows), verdicts[rows]

    def plan(self) -> dict[str, Any]:
        return self._plan


def verdicts_in(plan: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """What becomes of each row, ``(rows,)``."""
    return np.frombuffer(plan["verdicts"].encode(), np.uint8) - np.uint8(ord("0"))


def check_unit(part: Part, stored: npt.NDArray[Any], rules: Rules) -> None:
    """Raise if values are far too small for microvolts."""
    typical = float(np.nanmedian(np.abs(stored[:64].astype(np.float64)))) * rules.scale
    if 0 < typical < 1e-2:
        raise DataError(
            f"{part.signals}: a typical value is {typical:.1e}, far too small for microvolts. "
            "If the signals are in volts, say '--scale 1e6' (millivolts: 1e3)"
        )
