"""Context of tables of measurements: each value beside what is usual for the patient and what came before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.data._timeline import Timeline, running, windows

_AT_ONCE = 16
_LARGEST = 10.0
_SAME = 1e-10


@dataclass(frozen=True, eq=False)
class Usual:
    """What is usual for a patient, seen from each row.

    Attributes
    ----------
    mean, scale : Tensor ``(rows, n)``
        ``scale`` is one over the standard deviation; 0 where the patient's values do not vary.
    weight : Tensor ``(rows, n)``
        ``m / (m + strength)`` for ``m`` other known values: how far to trust it.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor


def table_context(
    values: Tensor, timeline: Timeline, mode: str, parts: tuple[str, ...], scales: tuple[int, ...], strength: float
) -> Iterator[Tensor]:
    """Blocks of context columns, float32 ``(rows, ...)`` in sorted order, sixteen values at a time.

    Parameters
    ----------
    values : Tensor ``(rows, n)``
        In the order of the dataset; NaN is a value that is missing. Wherever nothing is known the context is 0.
    """
    for start in range(0, values.shape[1], _AT_ONCE):
        piece = values[:, start : start + _AT_ONCE][timeline.order].to(torch.float64)
        blocks = _Piece(piece, timeline, mode, strength).blocks(parts, scales)
        yield torch.cat([block.to(torch.float32) for block in blocks], dim=1)


class _Piece:
    """Context of a few columns, made part by part."""

    def __init__(self, values: Tensor, timeline: Timeline, mode: str, strength: float) -> None:
        self.timeline, self.mode, self.strength = timeline, mode, strength
        self.known = ~torch.isnan(values)
        # One column says it for all where nothing is missing.
        self.seen = (self.known[:, :1] if bool(self.known.all()) else self.known).to(torch.float64)
        # Counted from the patient's first known value, which is never later than any row that uses it.
        self.values = torch.where(self.known, values - _first_known(values, self.known, timeline), 0.0)
        self.usual = self._usual()

    def blocks(self, parts: tuple[str, ...], scales: tuple[int, ...]) -> Iterator[Tensor]:
        usual = self.usual
        apart = torch.where(self.known, usual.weight * (self.values - usual.mean), 0.0)
        if "relative" in parts:
            yield (apart * usual.scale).clamp(-_LARGEST, _LARGEST)
        if "difference" in parts:
            yield apart
        if "extremes" in parts:
            yield from self._extremes()
        if "age" in parts:
            yield self._age()
        for side, timeline in (("before", self.timeline), ("after", self.timeline.reversed())):
            if side in parts or f"{side}-level" in parts:
                yield from self._neighbours(timeline, side, parts, scales)

    def _usual(self) -> Usual:
        line, sums = self.timeline, [self.seen, self.values, self.values.square()]
        totals = [running(one, line.patient) for one in sums]
        if self.mode == "offline":
            count, total, squares = (one[line.last] for one in totals)
        else:
            earlier = [line.earlier(one, line.patient) for one in totals]
            count, total, squares = (past + own for past, own in zip(earlier, sums, strict=True))
        number = count.clamp_min(1.0)
        mean = total / number
        variance = squares / number - mean.square()
        varies = variance > _SAME * squares / number
        scale = torch.where(varies, variance.clamp_min(1e-300).rsqrt(), 0.0)
        others = (count - self.seen).clamp_min(0.0)
        return Usual(mean, scale, others / (others + self.strength))

    def _extremes(self) -> Iterator[Tensor]:
        """Distance from the patient's lowest and highest value so far."""
        for combine, nothing in ((torch.minimum, torch.inf), (torch.maximum, -torch.inf)):
            candidates = torch.where(self.known, self.values, nothing)
            past = self.timeline.earlier(
                running(candidates, self.timeline.patient, combine), self.timeline.patient, nothing
            )
            yield torch.where(self.known, self.values - combine(past, candidates), 0.0)

    def _age(self) -> Tensor:
        """Logarithm of the time since the value last changed, or since the session began."""
        line = self.timeline
        previous = line.earlier(self.values, line.session)
        was_known = line.earlier(self.seen, line.session) > 0
        changed = (self.known != was_known) | (self.values != previous)
        now = line.times.unsqueeze(-1)
        when = torch.where(changed, now, -torch.inf)
        past = line.earlier(running(when, line.session, torch.maximum), line.session, -torch.inf)
        since = now - torch.maximum(past, when)
        return torch.where(torch.isfinite(since), since, 0.0).log1p()

    def _neighbours(
        self, timeline: Timeline, side: str, parts: tuple[str, ...], scales: tuple[int, ...]
    ) -> Iterator[Tensor]:
        """Means of the last few rows strictly before (after): their distance from here, or from what is usual."""
        backwards = side == "after"
        seen, values = self.seen, self.values
        if backwards:
            seen, values = seen.flip(0), values.flip(0)
        counts = windows(seen, timeline.session, scales)
        sums = windows(values, timeline.session, scales)
        for scale in scales:
            count = timeline.earlier(counts[scale], timeline.session)
            mean = timeline.earlier(sums[scale], timeline.session) / count.clamp_min(1.0)
            if backwards:
                count, mean = count.flip(0), mean.flip(0)
            if side in parts:
                yield torch.where(self.known & (count > 0), mean - self.values, 0.0)
            if f"{side}-level" in parts:
                level = self.usual.weight * (mean - self.usual.mean) * self.usual.scale
                yield torch.where(count > 0, level, 0.0).clamp(-_LARGEST, _LARGEST)


def _first_known(values: Tensor, known: Tensor, timeline: Timeline) -> Tensor:
    """Each patient's first known value of each column, at all rows of the patient; 0 where none is known."""
    position = torch.arange(len(values), device=values.device).unsqueeze(-1).expand_as(values)
    absent = len(values)
    # Running from the patient's start: a row before the first known value has no use for it.
    first = running(torch.where(known, position, absent), timeline.patient, torch.minimum)
    found = torch.gather(values, 0, first.clamp_max(absent - 1))
    return torch.where(first < absent, found, 0.0)
