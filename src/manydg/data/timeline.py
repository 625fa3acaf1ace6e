"""A patient's samples in the order of time: running statistics of tables, and how sequence models read them.

Nothing here imports torch or scikit-learn. Training (:mod:`manydg.data.context`) and the transformer for scikit-learn
(:mod:`manydg.data.patient_context`) make their context with the same functions. They take NumPy arrays and tensors
alike and do the same operations in the same order on both.

Running sums are made by doubling: first of two neighbouring rows, then of four, eight and so on, never across the
border of a segment (a patient or a session). So nothing of another patient enters a sum, not even a rounding error,
nothing later enters an earlier one, and sums over the last 1, 2, 4, 8, ... rows are by-products.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json, ParsedJson

Array = Any
"""A NumPy array or a tensor."""
ORDER, PAUSE = "context_order", "context_pause"
"""The columns by which a network reads samples in order; see :func:`manydg.data.context.add_order`."""
_NO_TIMES = (
    "and there are none: prepare it with --time, give times=, or an array 'time' in the .npz file of new samples"
)
DIRECTIONS = ("offline", "causal")
SEQUENCES = {"gru": 1, "transformer": 2, "conv": 7}
"""The networks that read a session's samples in order, and how many layers they have by default."""
CHAIN = "chain"
"""No network reads samples in order, but a Markov chain their classes (``best``)."""
_SIZES = {"crop": (2, 1 << 20), "width": (1, 1 << 14), "layers": (1, 32)}
Combine = Callable[[Any, Any], Any]
MOST = 10_000.0
DEFAULT_STRENGTH = 5.0
MODES = ("offline", "causal")
REMEMBERED = ("last", "since", "trend", "count")
"""Parts about values that are not measured at every sample."""
PARTS = {
    "offline": (
        *("relative", "before", "after", "before-level", "after-level", "extremes", "age", "difference", "clock"),
        *REMEMBERED,
    ),
    "causal": ("relative", "before", "before-level", "extremes", "age", "difference", "clock", *REMEMBERED),
}
DEFAULT_PARTS = {
    "offline": ("relative", "before-level", "after-level"),
    "causal": ("relative", "difference", "before", "extremes", "age", "clock"),
}
MAX_DEVIATION = 10.0
"""Deviations from the patient's mean are clipped at this many standard deviations."""
_MIN_VARIANCE = 1e-10
"""Values vary if their variance is more than this share of their mean square."""
TABLE_COLUMNS = 16
"""Input columns whose context is made at a time, which bounds the memory of intermediate results."""
_ROWS = 500_000
_ENDLESS = 1e18


class _NamedOptions:
    """Options by name, as configurations and model files have them; the first field is the kind of thing.

    - ``subject``: What messages call it.
    """

    subject: ClassVar[str]

    @classmethod
    def from_mapping(cls, kind: str, given: ParsedJson) -> Self:
        """Options by name, without the first."""
        names = [field.name for field in dataclasses.fields(cls)][1:]  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise unknown_name(f"option of {cls.subject}", name, names)
        return cls(kind, **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})  # type: ignore[call-arg]

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        first = dataclasses.fields(cls)[0].name  # type: ignore[arg-type]
        return cls.from_mapping(value[first], {name: v for name, v in value.items() if name != first})

    def to_json(self) -> dict[str, Json]:
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class ContextOptions(_NamedOptions):
    """Which context to add.

    - ``mode`` {"offline", "causal"}: All samples of the patient, or only strictly earlier ones.
    - ``parts``: ``relative``: the value in the patient's own standard deviations from the patient's own mean;
      ``difference``: the same in its own unit; ``before`` and ``after``: means of the nearest samples minus the value;
      ``before-level`` and ``after-level``: those means in the patient's own units; ``extremes``: distance from the
      lowest and the highest value so far; ``age``: time since the value changed; ``clock``: time since the start;
      ``last``: the value measured last at an earlier sample of the session; ``since``: how long ago; ``trend``: the
      change between the last two measurements by unit of time; ``count``: how many there were.
    - ``scales``: How many neighbouring samples are averaged; powers of two.
    - ``strength``: With ``m`` other samples, the patient's mean has the weight ``m / (m + strength)``. The default is
      5; a training run without it estimates it from its training patients (:func:`estimate_strength`), and its model
      keeps that number.
    - ``gap``: A pause longer than this begins a new session, across which no neighbours are taken. By default the
      dataset's setting ``session_gap``, if it has one.
    """

    subject: ClassVar = "context"
    mode: str = "offline"
    parts: tuple[str, ...] | None = None
    scales: tuple[int, ...] = (1, 4, 16)
    strength: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown_name("kind of context", self.mode, (*MODES, "none"))
        if not isinstance(self.parts, tuple | None) or not all(isinstance(part, str) for part in self.parts or ()):
            raise ConfigError(f"the parts of context are a list of names; got {self.parts!r}")
        if not isinstance(self.scales, tuple) or not all(isinstance(scale, Integral) for scale in self.scales):
            raise ConfigError(f"the scales of context are a list of whole numbers; got {self.scales!r}")
        for name in ("gap", "strength"):
            if not isinstance(getattr(self, name), Real | None):
                raise ConfigError(f"the {name} of context is a number; got {getattr(self, name)!r}")
        for part in self.parts or ():
            if part not in PARTS[self.mode]:
                raise unknown_name(f"part of {self.mode} context", part, PARTS[self.mode])
        if any(scale < 1 or scale & (scale - 1) for scale in self.scales):
            raise ConfigError(f"the scales of context are powers of two (1, 2, 4, ...); got {list(self.scales)}")
        if self.gap is not None and not 0 <= self.gap < _ENDLESS:
            raise ConfigError(f"the gap of context is {self.gap}; it must be a number of at least 0")
        if self.strength is not None and not 0 < self.strength < _ENDLESS:
            raise ConfigError(f"the strength of context is {self.strength}; it must be positive")

    def settled(self, timed: bool, session_gap: float | None = None) -> ContextOptions:
        """The options with every default filled in, for samples with or without times."""
        parts = self.parts
        if not timed:
            if self.mode == "causal":
                raise DataError(f"causal context needs the time of every sample, {_NO_TIMES}")
            parts = parts or ("relative",)
            if timed_parts := sorted(set(parts) - {"relative", "difference"}):
                raise DataError(f"the parts {timed_parts} of context need the time of every sample, {_NO_TIMES}")
        gap = self.gap if self.gap is not None else session_gap
        strength = DEFAULT_STRENGTH if self.strength is None else self.strength
        return dataclasses.replace(self, parts=parts or DEFAULT_PARTS[self.mode], gap=gap, strength=strength)


_LARGEST_EXACT = 2**53


def is_missing(value: Any) -> bool:
    """Whether a value is None; NaN or NaT, which are unequal to themselves; or NA of pandas, which is neither.

    Examples
    --------
    >>> is_missing(None), is_missing(math.nan), is_missing("a"), is_missing(["a", "b"])
    (True, True, False, False)
    """
    return value is None or str(value != value) in ("True", "<NA>")


def ids_in(patients: Any) -> npt.NDArray[Any]:
    """Whose each sample is, ``(rows,)``; raise where that is not said: samples of nobody are not one person's."""
    ids = np.asarray(patients)
    if ids.ndim != 1:
        raise DataError(f"patient ids must be one-dimensional, one per sample; they have shape {ids.shape}")
    if ids.dtype.kind == "O" and any(map(is_missing, ids)):
        raise DataError("some patient ids are missing; every sample must say whose it is")
    if ids.dtype.kind == "M" and np.isnat(ids).any():
        raise DataError("some patient ids are missing (NaT); every sample must say whose it is")
    if ids.dtype.kind != "f":
        return ids
    if not np.isfinite(ids).all():
        raise DataError("some patient ids are missing (NaN); every sample must say whose it is")
    if (np.abs(ids) >= _LARGEST_EXACT).any():
        raise DataError("some patient ids are numbers that a float cannot tell from their neighbours: give ids as text")
    return ids.astype(np.int64) if (ids == np.round(ids)).all() else ids


def clock_of(times: Any) -> npt.NDArray[np.float64]:
    """Times ``(rows,)`` as numbers: those that are stay, dates become seconds since 1970 and durations seconds.

    Raise where one is missing or infinite: where such a sample belongs in order is not known.

    Examples
    --------
    >>> clock_of([np.datetime64("1970-01-02")]).tolist(), clock_of([timedelta(minutes=1)]).tolist()
    ([86400.0], [60.0])
    """
    clock = np.asarray(times)
    if clock.dtype.kind in "mM":
        clock = (clock - clock.dtype.type(0, "s")) / np.timedelta64(1, "s")
    try:
        clock = np.array([_number(value) for value in clock] if clock.dtype.kind == "O" else clock, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"times are numbers, dates or durations ({error})") from None
    if clock.ndim != 1:
        raise DataError(f"times must be one-dimensional, one per sample; they have shape {clock.shape}")
    if len(bad := np.flatnonzero(~np.isfinite(clock))):
        what = "infinite" if np.isinf(clock[bad[0]]) else "missing"
        raise DataError(f"time is {what} in row {bad[0]} (the first row is 0): fill it in or leave the row out")
    return clock


def _number(value: Any) -> float:
    if is_missing(value):
        return math.nan
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date):
        moment = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(value)


def _namespace(array: Any) -> Any:
    """NumPy, or torch for a tensor."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def _positions(array: Any) -> Any:
    """The numbers 0, 1, 2, ... of the rows of an array, where the array is."""
    return _namespace(array).cumsum(_namespace(array).ones_like(array, dtype=_namespace(array).int64), 0) - 1


def _sorted_stably(array: Any) -> Any:
    return np.argsort(array, kind="stable") if isinstance(array, np.ndarray) else array.argsort(stable=True)


def _where_true(array: Any) -> Any:
    return np.flatnonzero(array) if isinstance(array, np.ndarray) else array.nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Rows sorted by patient, then time, then position in the dataset. All attributes are in sorted order.

    - ``order`` ``(rows,)``: The dataset's row at each position.
    - ``times`` ``(rows,)``: Zeros where the dataset has none.
    - ``patient``, ``session`` ``(rows,)``: Position of the first row of the patient, and of the session (samples
      without a long gap).
    - ``last``, ``session_last`` ``(rows,)``: Position of the last row of the patient and of the session.
    - ``before``, ``after`` ``(rows,)``: Position of the last row that is strictly earlier, and of the first strictly
      later; outside the patient or the session where there is none. Samples of the same time are neither before nor
      after one another.
    """

    order: Array
    times: Array
    patient: Array
    last: Array
    session: Array
    session_last: Array
    before: Array
    after: Array

    @staticmethod
    def of(domains: Array, times: Array | None, gap: float | None) -> Timeline:
        """Sort samples; a pause longer than ``gap`` begins a new session."""
        xp = _namespace(domains)
        clock = xp.zeros_like(domains, dtype=xp.float64) if times is None else xp.asarray(times, dtype=xp.float64)
        by_time = _sorted_stably(clock)
        order = by_time[_sorted_stably(domains[by_time])]
        who, clock = domains[order], clock[order]
        pause = xp.diff(clock)
        new_patient = _begins(who[1:] != who[:-1])
        new_session = new_patient if gap is None else new_patient | _begins(pause > gap)
        new_time = new_patient | _begins(pause > 0)
        patient, last = _bounds(new_patient)
        session, session_last = _bounds(new_session)
        first_of_time, last_of_time = _bounds(new_time)
        return Timeline(order, clock, patient, last, session, session_last, first_of_time - 1, last_of_time + 1)

    def __len__(self) -> int:
        return len(self.order)

    def trust(self, mode: str, strength: float) -> Array:
        """``m / (m + strength)`` for ``m`` other samples in the context, ``(rows, 1)`` in the order of the dataset."""
        others = self.last - self.patient if mode == "offline" else self.before - self.patient + 1
        xp = _namespace(self.order)
        exact = xp.asarray(others, dtype=xp.float64)
        weight: Array = xp.empty_like(exact, dtype=xp.float32)
        weight[self.order] = xp.asarray(exact / (exact + strength), dtype=xp.float32)
        return weight[:, None]

    def reversed(self) -> Timeline:
        """The same rows from the last to the first, for what comes after a sample."""
        turned = (self.last, self.patient, self.session_last, self.session, self.after, self.before)
        return Timeline(_flip(self.order), -_flip(self.times), *(len(self) - 1 - _flip(each) for each in turned))

    def earlier(self, running: Array, start: Array, nothing: float = 0.0) -> Array:
        """A running quantity ``(rows, n)`` as of the last strictly earlier row from ``start`` on."""
        xp = _namespace(running)
        previous = running[xp.clip(self.before, 0, None)]
        return xp.where((self.before >= start)[:, None], previous, nothing)


def _flip(array: Array) -> Array:
    return _namespace(array).flip(array, (0,))


def _begins(differs: Array) -> Array:
    """Where a segment begins: at the first row, and where a row differs from the one before."""
    xp = _namespace(differs)
    return xp.concatenate([xp.asarray([True], **_device(differs)), differs])


def _device(array: Any) -> dict[str, Any]:
    return {} if isinstance(array, np.ndarray) else {"device": array.device}


def _bounds(begins: Array) -> tuple[Array, Array]:
    """Position of the first and the last row of each row's segment."""
    xp = _namespace(begins)
    starts = _where_true(begins)
    segment = xp.cumsum(begins, 0) - 1
    ends = xp.concatenate([starts[1:], 0 * starts[:1] + len(begins)]) - 1
    return starts[segment], ends[segment]


def running(values: Array, start: Array, combine: Combine | None = None) -> Array:
    """Combination of each row ``(rows, n)`` with all rows before it from ``start`` on, itself included.

    - ``values`` ``(rows, n)``
    - ``start`` ``(rows,)``: Position of the first row of each row's segment.
    """
    combine = combine or _namespace(values).add
    rank, step, current = _positions(start) - start, 1, values
    longest = int(rank.max()) + 1 if len(values) else 0
    while step < longest:
        current, step = _double(current, rank, step, combine), 2 * step
    return current


def windows(values: Array, start: Array, sizes: tuple[int, ...]) -> dict[int, Array]:
    """Sums of the last rows of each row's segment, itself included, by the number of rows; sizes are powers of two."""
    rank, step, current, kept = _positions(start) - start, 1, values, {}
    while True:
        if step in sizes:
            kept[step] = current
        if step >= max(sizes, default=0):
            return kept
        current, step = _double(current, rank, step, _namespace(values).add), 2 * step


def _double(current: Array, rank: Array, step: int, combine: Combine) -> Array:
    """From combinations over the last ``step`` rows to those over the last ``2 * step``."""
    xp = _namespace(current)
    reaches = (rank[step:] >= step)[:, None]
    joined = xp.where(reaches, combine(current[step:], current[:-step]), current[step:])
    return xp.concatenate([current[:step], joined])


def assemble(values: Array, timeline: Timeline, options: ContextOptions, strength: float) -> Array:
    """Context in the order of the dataset, float32 ``(rows, n)``."""
    parts = options.parts or ()
    blocks = [_clock(timeline, options.mode)] if "clock" in parts else []
    blocks += list(table_context(values, timeline, options.mode, parts, options.scales, strength))
    xp = _namespace(values)
    width = sum(block.shape[1] for block in blocks)
    context: Array = xp.empty((len(timeline), width), dtype=xp.float32, **_device(values))
    start = 0
    for block in blocks:
        context[timeline.order, start : start + block.shape[1]] = block
        start += block.shape[1]
    return context


def _clock(timeline: Timeline, mode: str) -> Array:
    """Time since the session and the patient began and, offline, until the session ends."""
    since = timeline.times - timeline.times[timeline.session]
    xp = _namespace(since)
    columns = [since, xp.log1p(since), xp.log1p(timeline.times - timeline.times[timeline.patient])]
    if mode == "offline":
        left = timeline.times[timeline.session_last] - timeline.times
        columns += [left, xp.log1p(left)]
    return xp.asarray(xp.stack(columns, 1), dtype=xp.float32)


@dataclass(frozen=True, eq=False)
class PatientStatistics:
    """A patient's mean and scale, as known at each row.

    - ``mean``, ``scale`` ``(rows, n)``: ``scale`` is one over the standard deviation; 0 where the patient's values do
      not vary.
    - ``weight`` ``(rows, n)``: ``m / (m + strength)`` for ``m`` other known values.
    """

    mean: Array
    scale: Array
    weight: Array


def patient_statistics(count: Any, total: Any, squares: Any, seen: Any, strength: float) -> PatientStatistics:
    """Statistics from sums over the known values in a context, the row's own (``seen``) included."""
    xp = _namespace(total)
    number = xp.clip(count, 1.0, None)
    mean = total / number
    variance = squares / number - xp.square(mean)
    varies = variance > _MIN_VARIANCE * squares / number
    scale = xp.where(varies, 1.0 / xp.sqrt(xp.clip(variance, 1e-300, None)), 0.0)
    others = xp.clip(count - seen, 0.0, None)
    return PatientStatistics(mean, scale, others / (others + strength))


def table_context(
    values: Array, timeline: Timeline, mode: str, parts: tuple[str, ...], scales: tuple[int, ...], strength: float
) -> Iterator[Array]:
    """Blocks of context columns, float32 ``(rows, ...)`` in sorted order, sixteen input columns at a time.

    - ``values`` ``(rows, n)``: In the order of the dataset; NaN is a missing value. Where nothing is known the context
      is 0.
    """
    for start in range(0, values.shape[1], TABLE_COLUMNS):
        xp = _namespace(values)
        piece = xp.asarray(values[:, start : start + TABLE_COLUMNS][timeline.order], dtype=xp.float64)
        with np.errstate(all="ignore"):
            blocks = _TableContext(piece, timeline, mode, strength).blocks(parts, scales)
            yield xp.concatenate([xp.asarray(block, dtype=xp.float32) for block in blocks], 1)


class _Context(ABC):
    """Context of a few columns of measurements, part by part. What is known of other samples comes from a subclass.

    - ``known``, ``values`` ``(rows, n)``: Whether a value is there, and its difference from the patient's first known
      value ``first``; 0 where it is not.
    - ``now``, ``session_start`` ``(rows, 1)``: The time of each row, and that at which its session began.
    """

    xp: Any
    known: Array
    values: Array
    first: Array
    now: Array
    session_start: Array
    statistics: PatientStatistics

    @abstractmethod
    def earlier_extreme(self, candidates: Array, combine: Combine, nothing: float) -> Array:
        """The lowest or highest value at strictly earlier rows of the patient."""

    @abstractmethod
    def previous(self) -> tuple[Array, Array]:
        """The value at the row before in the session, and whether it was known there."""

    @abstractmethod
    def earlier_change(self, when: Array) -> Array:
        """When a value changed last at strictly earlier rows of the session; minus infinity for never."""

    @abstractmethod
    def measurement(self, which: str) -> tuple[Array, Array, Array]:
        """Whether there is a measurement in the session, its value and its time.

        The ``last`` one strictly before the row; with the row itself the most ``recent`` one, and the ``previous`` one
        before that.
        """

    @abstractmethod
    def measurements(self) -> Array:
        """How many measurements there were at strictly earlier rows of the session."""

    @abstractmethod
    def windows(self, side: str, scales: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
        """For each scale the number and the sum of the known values at so many rows strictly before or after."""

    def blocks(self, parts: tuple[str, ...], scales: tuple[int, ...]) -> Iterator[Array]:
        """Columns of context, ``(rows, n)`` each."""
        patient, xp = self.statistics, self.xp
        difference = xp.where(self.known, patient.weight * (self.values - patient.mean), 0.0)
        if "relative" in parts:
            yield xp.clip(difference * patient.scale, -MAX_DEVIATION, MAX_DEVIATION)
        if "difference" in parts:
            yield difference
        if "extremes" in parts:
            for combine, nothing in ((xp.minimum, math.inf), (xp.maximum, -math.inf)):
                candidates = xp.where(self.known, self.values, nothing)
                past = self.earlier_extreme(candidates, combine, nothing)
                yield xp.where(self.known, self.values - combine(past, candidates), 0.0)
        if "age" in parts:
            when = self.changes()
            since = self.now - xp.maximum(self.earlier_change(when), when)
            yield xp.log1p(xp.where(xp.isfinite(since), since, 0.0))
        yield from self._remembered(parts)
        for side in ("before", "after"):
            if side in parts or f"{side}-level" in parts:
                yield from self._neighbours(side, parts, scales)

    def changes(self) -> Array:
        """The row's time where the value is another one than before, minus infinity elsewhere."""
        previous, was_known = self.previous()
        return self.xp.where((self.known != was_known) | (self.values != previous), self.now, -math.inf)

    def _remembered(self, parts: tuple[str, ...]) -> Iterator[Array]:
        """The value measured last at an earlier sample of the session, how long ago, the trend, and how many.

        The trend is that of the last two measurements up to the sample. Before the first measurement, how long ago is
        counted from the session's beginning, and the rest is 0.
        """
        xp = self.xp
        if "last" in parts or "since" in parts:
            there, value, time = self.measurement("last")
            if "last" in parts:
                yield xp.where(there, value + self.first, 0.0)
            if "since" in parts:
                yield xp.log1p(self.now - xp.where(there, time, self.session_start))
        if "trend" in parts:
            (_, value, time), (there, before, then) = self.measurement("recent"), self.measurement("previous")
            yield xp.where(there, (value - before) / xp.clip(time - then, 1e-9, None), 0.0)
        if "count" in parts:
            yield xp.log1p(self.measurements())

    def _neighbours(self, side: str, parts: tuple[str, ...], scales: tuple[int, ...]) -> Iterator[Array]:
        """Means of the last few rows strictly before (after): minus the value, or in the patient's own units."""
        patient, xp = self.statistics, self.xp
        for count, total in self.windows(side, scales):
            mean = total / xp.clip(count, 1.0, None)
            if side in parts:
                yield xp.where(self.known & (count > 0), mean - self.values, 0.0)
            if f"{side}-level" in parts:
                level = patient.weight * (mean - patient.mean) * patient.scale
                yield xp.clip(xp.where(count > 0, level, 0.0), -MAX_DEVIATION, MAX_DEVIATION)


class _TableContext(_Context):
    """Context of whole records."""

    def __init__(self, values: Array, timeline: Timeline, mode: str, strength: float) -> None:
        self.timeline, self.mode, self.strength = timeline, mode, strength
        self.xp = _namespace(values)
        self.now, self.session_start = timeline.times[:, None], timeline.times[timeline.session][:, None]
        self.known = ~self.xp.isnan(values)
        # One column serves for all where nothing is missing.
        one = self.known[:, :1] if bool(self.known.all()) else self.known
        self.seen: Array = self.xp.asarray(one, dtype=self.xp.float64)
        # Relative to the patient's first known value, which is never later than any row that uses it.
        self.first = _first_known(values, self.known, timeline)
        self.values = self.xp.where(self.known, values - self.first, 0.0)
        self.statistics = self._statistics()

    def _statistics(self) -> PatientStatistics:
        line, sums = self.timeline, [self.seen, self.values, self.xp.square(self.values)]
        totals = [running(one, line.patient) for one in sums]
        if self.mode == "offline":
            count, total, squares = (one[line.last] for one in totals)
        else:
            earlier = [line.earlier(one, line.patient) for one in totals]
            count, total, squares = (past + own for past, own in zip(earlier, sums, strict=True))
        return patient_statistics(count, total, squares, self.seen, self.strength)

    def earlier_extreme(self, candidates: Array, combine: Combine, nothing: float) -> Array:
        line = self.timeline
        return line.earlier(running(candidates, line.patient, combine), line.patient, nothing)

    def previous(self) -> tuple[Array, Array]:
        line = self.timeline
        was_known = line.earlier(self.seen, line.session) > 0
        return line.earlier(self.values, line.session), was_known

    def earlier_change(self, when: Array) -> Array:
        line = self.timeline
        return line.earlier(running(when, line.session, self.xp.maximum), line.session, -math.inf)

    @cached_property
    def _measured(self) -> dict[str, Array]:
        """Positions of measurements, -1 for none."""
        line, xp = self.timeline, self.xp
        now = xp.where(self.known, _positions(self.values[:, 0])[:, None], -1)
        last = line.earlier(running(now, line.session, xp.maximum), line.session, -1)
        recent = xp.maximum(last, now)
        before = last[xp.clip(recent, 0, None), _positions(self.values[0])]
        return {"last": last, "recent": recent, "previous": xp.where(recent >= 0, before, -1)}

    def measurement(self, which: str) -> tuple[Array, Array, Array]:
        position = self._measured[which]
        row = self.xp.clip(position, 0, None)
        return position >= 0, self.values[row, _positions(self.values[0])], self.timeline.times[row]

    def measurements(self) -> Array:
        line, seen = self.timeline, self.xp.asarray(self.known, dtype=self.xp.float64)
        return line.earlier(running(seen, line.session), line.session)

    def windows(self, side: str, scales: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
        line, turn = (self.timeline.reversed(), _flip) if side == "after" else (self.timeline, self.xp.asarray)
        counts, sums = (windows(turn(one), line.session, scales) for one in (self.seen, self.values))
        for scale in scales:
            yield tuple(turn(line.earlier(one[scale], line.session)) for one in (counts, sums))


def _first_known(values: Array, known: Array, timeline: Timeline) -> Array:
    """Each patient's first known value of each column at all rows of the patient; 0 where none is known."""
    xp = _namespace(values)
    absent = len(values)
    position = _positions(values[:, 0])[:, None]
    # Running from the patient's start: a row before the first known value has no use for it.
    first = running(xp.where(known, position, absent), timeline.patient, xp.minimum)
    value = values[xp.clip(first, None, absent - 1), _positions(values[0])]
    return xp.where(first < absent, value, 0.0)


@dataclass(frozen=True)
class StateField:
    """A part of what is known of a patient.

    - ``initial``: Its value before the first sample.
    - ``of_session``: Whether it begins anew with a session.
    - ``parts``: The parts of context that need it; all, if it is empty.
    - ``start``: Position of its first number in the state.
    """

    name: str
    meaning: str
    initial: float = 0.0
    of_session: bool = False
    parts: tuple[str, ...] = ()
    start: int = 0
    shape: tuple[int, ...] = (1,)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Json]:
        """As an exported model describes it."""
        return {"name": self.name, "start": self.start, "shape": list(self.shape), "meaning": self.meaning}


_TIMES = (
    StateField("time", "time of the last sample", -math.inf),
    StateField("start", "time of the first sample"),
    StateField("session_start", "time of the first sample of the session"),
)
_FACTS = (
    StateField("count", "number of known values"),
    StateField("sum", "their sum, of each its difference from the first one"),
    StateField("squares", "sum of the squares of these differences"),
    StateField("lowest", "lowest of these differences", math.inf, parts=("extremes",)),
    StateField("highest", "highest of these differences", -math.inf, parts=("extremes",)),
    StateField("seen", "whether the last sample of the session has the value", of_session=True, parts=("age",)),
    StateField("value", "its difference from the first one", of_session=True, parts=("age",)),
    StateField("changed", "when it changed last in the session", -math.inf, of_session=True, parts=("age",)),
    StateField("last_value", "last measurement of the session, less the first one", 0.0, True, REMEMBERED),
    StateField("last_time", "its time", math.nan, True, REMEMBERED),
    StateField("previous_value", "the measurement before it, at an earlier time", 0.0, True, REMEMBERED),
    StateField("previous_time", "its time", math.nan, True, REMEMBERED),
    StateField("measured", "number of measurements in the session", 0.0, True, REMEMBERED),
)


class PatientState:
    """Causal context from a state: what is known of a patient, in as many numbers after every sample.

    Works on NumPy arrays and on tensors, for several patients at once. Zeros are the state of a patient of whom nothing
    is known. A pause longer than the options' gap begins a new session.

    - ``options``: Causal ones, with every default filled in.
    - ``width``: Number of features.
    """

    def __init__(self, options: ContextOptions, width: int) -> None:
        if options.mode != "causal":
            raise ConfigError("offline context needs later samples, which a stream does not have: use mode='causal'")
        self.options, self.parts = options, options.parts or ()
        self.scales = options.scales if {"before", "before-level"} & set(self.parts) else ()
        self.facts = [fact for fact in _FACTS if not fact.parts or set(fact.parts) & set(self.parts)]
        self.fields: dict[str, StateField] = {}
        self.size = 0
        for field in self._layout(width):
            self.fields[field.name] = dataclasses.replace(field, start=self.size)
            self.size += field.size
        latest, before = (self.fields[name].start for name in ("samples", "samples_before"))
        # What is known after the last sample, and what was before its time, in the same order.
        self.latest, self.before_time = slice(latest, before), slice(before, 2 * before - latest)
        of_field = [(each.initial, each.of_session, each.size) for each in self.fields.values()]
        initial, of_session, sizes = zip(*of_field, strict=True)
        self._initial, self._of_session = np.repeat(initial, sizes), np.repeat(of_session, sizes)

    def _layout(self, width: int) -> Iterator[StateField]:
        yield from _TIMES
        yield StateField("first", "first known value of each feature", shape=(width,))
        for suffix, when in (("", "at the last sample"), ("_before", "before the time of the last sample")):
            yield StateField(f"samples{suffix}", f"number of samples, {when}")
            for fact in self.facts:
                words = f"{fact.meaning}, {when}"
                yield dataclasses.replace(fact, name=fact.name + suffix, meaning=words, shape=(width,))
        if self.scales:
            words = "latest samples of the session, the last one last: whether each value is known, and its difference"
            yield StateField("recent", words, of_session=True, shape=(max(self.scales), 2, width))
            words = "for each scale the sum of so many of them, before the time of the last sample"
            yield StateField("windows", words, of_session=True, shape=(len(self.scales), 2, width))

    def part(self, state: Array, name: str) -> Array:
        """A part of states, ``(patients, *shape)``."""
        field = self.fields[name]
        flat = state[:, field.start : field.start + field.size]
        return flat if len(field.shape) == 1 else flat.reshape((state.shape[0], *field.shape))

    def parts_of(self, state: Array) -> dict[str, Array]:
        """All parts of states that a sample needs, ``(patients, *shape)`` each."""
        if _namespace(state) is np:
            return {name: self.part(state, name) for name in self.fields}
        # One operation in an exported graph, not one for each part.
        flat: Any = _namespace(state).split(state, [field.size for field in self.fields.values()], 1)
        shapes = ((state.shape[0], *field.shape) for field in self.fields.values())
        return {name: piece.reshape(shape) for name, piece, shape in zip(self.fields, flat, shapes, strict=True)}

    def step(self, state: Array, values: Array, times: Array) -> tuple[Array, Array, Array]:
        """The context of one further sample of each patient.

        - ``state`` ``(patients, size)`` float64
        - ``values`` ``(patients, features)``: NaN is a missing value.
        - ``times`` ``(patients,)`` float64: Not earlier than the patient's last.

        Gives the context ``(patients, columns)`` and its weight ``(patients, 1)`` (:meth:`Timeline.trust`), both
        float32, and the state with the sample in it.
        """
        xp = _namespace(state)
        exact = xp.asarray(values, dtype=xp.float64)
        with np.errstate(all="ignore"):
            sample = _SampleContext(self, self._advanced(state, times[:, None]), exact)
            columns = sample.clock() if "clock" in self.parts else []
            if blocks := list(sample.blocks(self.parts, self.options.scales)):
                table, rows = xp.stack(blocks, 1), state.shape[0]
                starts = range(0, exact.shape[1], TABLE_COLUMNS)
                columns += [table[:, :, start : start + TABLE_COLUMNS].reshape((rows, -1)) for start in starts]
            context, others = xp.concatenate(columns, 1), sample.before("samples")
            weight = others / (others + (self.options.strength or DEFAULT_STRENGTH))
            return xp.asarray(context, dtype=xp.float32), xp.asarray(weight, dtype=xp.float32), sample.after()

    def _advanced(self, state: Array, now: Array) -> Array:
        """The state at a time ``(patients, 1)``, before the sample of that time."""
        xp = _namespace(state)
        initial, of_session = (xp.asarray(each, **_device(state)) for each in (self._initial, self._of_session))
        fresh = self.part(state, "samples") == 0
        state = xp.where(fresh, initial, state)
        time, start, session_start = (self.part(state, name) for name in ("time", "start", "session_start"))
        later = now > time
        begins = fresh if self.options.gap is None else fresh | (now - time > self.options.gap)
        latest = state[:, self.latest]
        pieces = [now, xp.where(fresh, now, start), xp.where(begins, now, session_start), self.part(state, "first")]
        pieces += [latest, xp.where(later, latest, state[:, self.before_time])]
        if self.scales:
            recent, windows = self.fields["recent"].start, self.fields["windows"].start
            sums = xp.where(later, self._sums(self.part(state, "recent")), state[:, windows:])
            pieces += [state[:, recent:windows], sums]
        return xp.where(begins & of_session, initial, xp.concatenate(pieces, 1))

    def _sums(self, recent: Array) -> Array:
        """Sums over the last rows for each scale, added in the order in which :func:`windows` adds."""
        sums, size, kept = recent, 1, {1: recent[:, -1]}
        while sums.shape[1] > 1:
            sums, size = sums[:, 1::2] + sums[:, ::2], 2 * size
            kept[size] = sums[:, -1]
        flat: Array = _namespace(recent).stack([kept[scale] for scale in self.scales], 1)
        return flat.reshape((recent.shape[0], -1))


class _SampleContext(_Context):
    """Context of one sample of each patient."""

    def __init__(self, layout: PatientState, state: Array, values: Array) -> None:
        self.xp, self._layout, self._state = _namespace(state), layout, state
        self._parts = layout.parts_of(state)
        self.known = ~self.xp.isnan(values)
        self.first = self.xp.where(self.known & (self._parts["count"] == 0), values, self._parts["first"])
        self.values = self.xp.where(self.known, values - self.first, 0.0)
        self.seen = self.xp.asarray(self.known, dtype=self.xp.float64)
        self.now, self.session_start = self._parts["time"], self._parts["session_start"]
        sums = zip(("count", "sum", "squares"), (self.seen, self.values, self.xp.square(self.values)), strict=True)
        count, total, squares = (self.before(name) + own for name, own in sums)
        strength = layout.options.strength or DEFAULT_STRENGTH
        self.statistics = patient_statistics(count, total, squares, self.seen, strength)

    def before(self, name: str) -> Array:
        """What was known before the time of this sample."""
        return self._parts[f"{name}_before"]

    def clock(self) -> list[Array]:
        since = self.now - self.session_start
        return [since, self.xp.log1p(since), self.xp.log1p(self.now - self._parts["start"])]

    def earlier_extreme(self, candidates: Array, combine: Combine, nothing: float) -> Array:
        return self.before("lowest" if nothing > 0 else "highest")

    def previous(self) -> tuple[Array, Array]:
        return self.before("value"), self.before("seen") > 0

    def earlier_change(self, when: Array) -> Array:
        return self.before("changed")

    def measurement(self, which: str) -> tuple[Array, Array, Array]:
        name = "previous" if which == "previous" else "last"
        value, time = self.before(f"{name}_value"), self.before(f"{name}_time")
        if which != "last":
            last = self.before("last_value"), self.before("last_time")
            later = (self.values, self.now) if which == "recent" else last
            value, time = (self.xp.where(self.known, *pair) for pair in zip(later, (value, time), strict=True))
        return ~self.xp.isnan(time), value, time

    def measurements(self) -> Array:
        return self.before("measured")

    def windows(self, side: str, scales: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
        windows = self._parts["windows"]
        for position in range(len(scales)):
            yield windows[:, position, 0], windows[:, position, 1]

    def after(self) -> Array:
        """The state with this sample in it."""
        xp, layout, state = self.xp, self._layout, self._state
        pieces = [state[:, : len(_TIMES)], self.first, self._parts["samples"] + 1.0]
        pieces += [self._fact(fact.name) for fact in layout.facts]
        pieces.append(state[:, layout.before_time])
        if layout.scales:
            own = xp.stack([self.seen, self.values], 1)[:, None]
            recent = xp.concatenate([self._parts["recent"][:, 1:], own], 1)
            pieces += [recent.reshape((state.shape[0], -1)), state[:, layout.fields["windows"].start :]]
        return xp.concatenate(pieces, 1)

    def _fact(self, name: str) -> Array:
        """What is known with this sample."""
        xp, old = self.xp, self._parts[name]
        if name in ("seen", "value"):
            return self.seen if name == "seen" else self.values
        if name in ("lowest", "highest"):
            combine, nothing = (xp.minimum, math.inf) if name == "lowest" else (xp.maximum, -math.inf)
            return combine(old, xp.where(self.known, self.values, nothing))
        if name == "changed":
            return xp.maximum(old, self.changes())
        added = {"count": self.seen, "measured": self.seen, "sum": self.values, "squares": xp.square(self.values)}
        if name in added:
            return old + added[name]
        news = {"last_value": self.values, "last_time": self.now}
        new = news[name] if name in news else self.before(name.replace("previous", "last"))
        return xp.where(self.known, new, old)


def samples_until_known(values: Array, domains: Array, times: Array | None = None) -> float | None:
    """The number of neighbouring samples whose mean estimates a patient's mean as well as the population's mean does.

    Each patient's samples are cut in time into pieces of 1, 2, 4, 8, ... samples. The error of a piece's mean is its
    squared distance from the patient's mean; the error of the population's mean is the variance of patients' means.
    Where the two are equal, each deserves half of the weight: that is the ``strength`` of
    :class:`ContextOptions`. Where neighbouring samples are alike (epochs of one stage of sleep) it
    takes many; where values differ more between patients than within one (most laboratory values), one is enough.

    - ``values`` ``(rows, n)``: NaN is ignored.
    - ``domains``, ``times`` ``(rows,)``
    - returns: Between 1 and 10,000, the median over columns; ``None`` where fewer than three patients have two samples.

    Examples
    --------
    >>> who = np.repeat(np.arange(40), 64)
    >>> noise = np.random.default_rng(0).normal(size=(40 * 64, 1))
    >>> samples_until_known(noise + who[:, None], who)
    1.0
    """
    line = Timeline.of(domains, times, None)
    xp = _namespace(values)
    count = line.last - line.patient + 1
    if int(((line.patient == _positions(line.patient)) & (count > 1)).sum()) < 3:
        return None
    order = line.order
    pieces = [values[:, start : start + TABLE_COLUMNS] for start in range(0, values.shape[1], TABLE_COLUMNS)]
    with np.errstate(all="ignore"):
        errors = [_errors(xp.asarray(piece[order], dtype=xp.float64), line, count) for piece in pieces]
    known = [sorted(error for error in row.tolist() if not math.isnan(error)) for row in xp.concatenate(errors, 1)]
    # The middle one, or the lower of the middle two.
    ratios = [row[(len(row) - 1) // 2] if row else math.nan for row in known]
    return min(max(_crossing(ratios), 1.0), MOST)


def _errors(values: Array, line: Timeline, count: Array) -> Array:
    """Mean squared error of pieces of 1, 2, 4, ... rows, over the variance of patients' means: ``(sizes, n)``.

    NaN for a column in which all patients have the same mean, or no piece is complete.
    """
    xp = _namespace(values)
    known = ~xp.isnan(values)
    centred = xp.where(known, values - _nanmean(values), 0.0)
    # Prefix sums over all rows, ``(rows + 1, n)``: their differences are the sums over any range of rows.
    sums, seen = (
        xp.concatenate([xp.zeros_like(each[:1]), xp.cumsum(each, 0)])
        for each in (centred, xp.asarray(known, dtype=xp.float64))
    )
    start, last = line.patient, line.last + 1
    mean = (sums[last] - sums[start]) / (seen[last] - seen[start])
    of_patients = mean[line.patient == _positions(line.patient)]
    spread = _nanmean(xp.square(of_patients - _nanmean(of_patients)))
    spread = xp.where(spread > 1e-12 * _nanmean(xp.square(values)), spread, math.nan)
    rank = _positions(line.patient) - line.patient
    errors, size = [], 1
    while 2 * size <= int(count.max()):
        ends = _where_true(((rank + 1) % size == 0) & (count >= 2 * size)) + 1
        complete = seen[ends] - seen[ends - size] == size
        error = xp.square((sums[ends] - sums[ends - size]) / size - mean[ends - 1])
        errors.append(_nanmean(xp.where(complete, error, math.nan)) / spread)
        size *= 2
    return xp.stack(errors)


def _nanmean(values: Array) -> Array:
    """Mean of the known values of each column; NaN where there are none."""
    xp = _namespace(values)
    known = ~xp.isnan(values)
    return xp.where(known, values, 0.0).sum(0) / known.sum(0)


def _crossing(ratios: list[float]) -> float:
    """The size at which the ratio falls to 1: interpolated in logarithms, extrapolated in proportion."""
    size, previous = 1, math.nan
    for ratio in ratios:
        if math.isnan(ratio):
            break
        if ratio <= 1:
            if math.isnan(previous):
                return 1.0
            share = math.log(previous) / (math.log(previous) - math.log(max(ratio, 1e-300)))
            return size / 2 * 2**share
        size, previous = 2 * size, ratio
    return MOST if math.isnan(previous) else size / 2 * previous


def some_patients(domains: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows of a subset of the patients, at most about 500,000 rows: enough to estimate a single number from."""
    counts = np.bincount(domains)
    every = max(1, math.ceil(len(domains) / _ROWS))
    chosen = np.zeros(len(counts), bool)
    chosen[np.flatnonzero(counts)[::every]] = True
    return np.flatnonzero(chosen[domains])


@dataclass(frozen=True)
class SequenceOptions(_NamedOptions):
    """How a patient's samples are read in order.

    - ``kind`` {"gru", "transformer", "conv", "chain"}: The network that reads the samples of a session: gated recurrent
      units; attention to neighbours by content and distance; or dilated convolutions. Or none: a Markov chain of the
      classes, as the last part of ``best``, which has it beside a network too.
    - ``direction`` {"offline", "causal"}: Whether the output of a sample draws on the whole session, or on the samples
      up to it.
    - ``crop``: Consecutive samples that training reads at a time, about; predictions read whole sessions.
    - ``width``: Values of a layer, for each direction.
    - ``layers``: By default 1 for ``gru``, 2 for ``transformer`` and 7 for ``conv``.
    - ``dropout``: Between layers, and before the output.
    - ``gap``: A pause longer than this begins a new session, which is read anew. By default the dataset's setting
      ``session_gap``; without one, all samples of a patient are one session.
    - ``pause``: The usual time from one sample to the next, by default the median of the training patients.
    """

    subject: ClassVar = "sequence"
    kind: str = "gru"
    direction: str = "offline"
    crop: int = 128
    width: int = 128
    layers: int = 1
    dropout: float = 0.3
    gap: float | None = None
    pause: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("kind", (*SEQUENCES, CHAIN)), ("direction", DIRECTIONS)):
            if getattr(self, name) not in known:
                raise unknown_name(f"{name} of sequence", str(getattr(self, name)), known)
        for name, (fewest, most) in _SIZES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not fewest <= value <= most:
                raise ConfigError(
                    f"the {name} of a sequence is {value!r}; it must be a whole number from {fewest} to {most}"
                )
        for name, low, high in (("dropout", 0.0, 1.0), ("gap", 0.0, math.inf), ("pause", 0.0, math.inf)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"the {name} of a sequence is {value!r}; it must be a number")
            if value is not None and not low <= value < high:
                raise ConfigError(f"the {name} of a sequence is {value}; it must be from {low:g} to less than {high:g}")

    @classmethod
    def from_mapping(cls, kind: str, given: ParsedJson) -> Self:
        return super().from_mapping(kind, {"layers": SEQUENCES.get(kind, 1), **given})
