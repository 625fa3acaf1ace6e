"""Patient context of tables, without torch: for any learner of scikit-learn's kind, and sample by sample.

:class:`PatientContext` is a transformer, and :class:`PatientStream` its streaming form. Training makes its context with
the same functions (:mod:`manydg.data.timeline`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from manydg.data.timeline import (
    DEFAULT_STRENGTH,
    MAX_DEVIATION,
    REMEMBERED,
    TABLE_COLUMNS,
    ContextOptions,
    Timeline,
    assemble,
    patient_statistics,
    samples_until_known,
    some_patients,
)
from manydg.errors import ConfigError, DataError


class PatientContext(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Adds to each sample what the same patient's other samples tell, without any label.

    The columns are those that ``manydg train --context`` makes, bit for bit, and come after the columns of ``X``.
    Put it before any classifier or regressor; nothing of another patient enters a row, and with ``mode="causal"``
    nothing of a later sample, or one of the same time.

    Parameters
    ----------
    mode : {"causal", "offline"}
        Strictly earlier samples of the patient, or all of them.
    parts : sequence of str, optional
    scales : sequence of int
    strength : float, optional
        By default estimated in ``fit`` from the training patients.
    gap : float, optional
        These four are as in :class:`ContextOptions`.

    Attributes
    ----------
    strength_ : float
    n_features_in_ : int
    feature_names_in_ : array of str
        Where ``X`` was a table with named columns.

    Examples
    --------
    >>> X, patients, hours = np.array([[1.0], [3.0], [8.0]]), ["p", "p", "q"], [1, 2, 1]
    >>> context = PatientContext("offline", parts=["relative"], strength=1)
    >>> context.fit_transform(X, groups=patients, time=hours).tolist()
    [[1.0, -0.5], [3.0, 0.5], [8.0, 0.0]]
    >>> context.get_feature_names_out().tolist()
    ['x0', 'x0_relative']
    """

    n_features_in_: int

    def __init__(
        self,
        mode: str = "causal",
        *,
        parts: Sequence[str] | None = None,
        scales: Sequence[int] = (1, 4, 16),
        strength: float | None = None,
        gap: float | None = None,
    ) -> None:
        self.mode = mode
        self.parts = parts
        self.scales = scales
        self.strength = strength
        self.gap = gap

    def fit(self, X: Any, y: Any = None, groups: Any = None, time: Any = None) -> PatientContext:
        """Learn how many samples of a patient are enough to know the patient.

        Parameters
        ----------
        X : array or table ``(samples, features)``
            Numbers; NaN is a value that is missing.
        y : ignored
        groups : array ``(samples,)``
            Whose sample each one is.
        time : array ``(samples,)``, optional
            When each was taken, as numbers or dates; causal context needs it.
        """
        values, domains, times = self._checked(X, groups, time, reset=True)
        options = self._options().settled(times is not None)
        strength: float | None = self.strength
        if strength is None:
            rows = some_patients(domains)
            clock = None if times is None else times[rows]
            strength = samples_until_known(values[rows], domains[rows], clock)  # type: ignore[arg-type]
        self.strength_ = float(options.strength or DEFAULT_STRENGTH) if strength is None else float(strength)
        self._options_ = dataclasses.replace(options, strength=self.strength_)
        return self

    def transform(self, X: Any, groups: Any = None, time: Any = None) -> npt.NDArray[np.float32]:
        """The samples with their context, float32 ``(samples, features + context)``, each patient's made from ``X``."""
        check_is_fitted(self, "_options_")
        values, domains, times = self._checked(X, groups, time, reset=False)
        options = self._options_
        if times is None and set(options.parts or ()) - {"relative", "difference"}:
            raise ConfigError("this PatientContext was fitted with time: give transform the time of every sample")
        timeline = Timeline.of(domains, times, options.gap)  # type: ignore[arg-type]
        context: Any = assemble(values, timeline, options, self.strength_)  # type: ignore[arg-type]
        return np.concatenate([values, context], axis=1)

    def fit_transform(self, X: Any, y: Any = None, groups: Any = None, time: Any = None) -> Any:
        """:meth:`fit`, then :meth:`transform` of the same samples."""
        return self.fit(X, y, groups, time).transform(X, groups, time)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        """Names of the columns of :meth:`transform`, such as ``hr_relative`` and ``hr_before_4``."""
        check_is_fitted(self, "_options_")
        names = getattr(self, "feature_names_in_", input_features)
        names = [f"x{number}" for number in range(self.n_features_in_)] if names is None else list(names)
        return np.array([*names, *context_names(names, self._options_)], dtype=object)

    def stream(self) -> PatientStream:
        """The same for samples that come one by one; causal context only."""
        check_is_fitted(self, "_options_")
        return PatientStream(self._options_)

    def _options(self) -> ContextOptions:
        parts = None if self.parts is None else tuple(self.parts)
        return ContextOptions(self.mode, parts, tuple(self.scales), self.strength, self.gap)

    def _checked(
        self, X: Any, groups: Any, time: Any, *, reset: bool
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
        values = validate_data(self, X, dtype=np.float32, ensure_all_finite="allow-nan", reset=reset)
        if groups is None:
            raise ConfigError("PatientContext needs groups=: whose sample each row is")
        check_consistent_length(values, groups)
        domains = np.unique(np.asarray(groups), return_inverse=True)[1].reshape(-1)
        if time is None:
            return values, domains, None
        check_consistent_length(values, time)
        clock = np.asarray(time)
        if np.issubdtype(clock.dtype, np.datetime64) or np.issubdtype(clock.dtype, np.timedelta64):
            clock = (clock - clock.dtype.type(0, "s")) / np.timedelta64(1, "s")
        clock = clock.astype(np.float64)
        if not np.isfinite(clock).all():
            raise DataError(
                f"time is missing in row {int(np.flatnonzero(~np.isfinite(clock))[0])} (the first row is 0)"
            )
        return values, domains, clock

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def context_names(names: Sequence[str], options: ContextOptions) -> list[str]:
    """Names of the columns of context, in their order."""
    parts, clocks = options.parts or (), ["session_time", "log_session_time", "log_patient_time"]
    if options.mode == "offline":
        clocks += ["session_left", "log_session_left"]
    named = clocks if "clock" in parts else []
    suffixes: list[str] = [part for part in ("relative", "difference") if part in parts]
    suffixes += ["above_lowest", "below_highest"] if "extremes" in parts else []
    suffixes += [part for part in ("age", *REMEMBERED) if part in parts]
    for side in ("before", "after"):
        for scale in options.scales:
            suffixes += [f"{side}_{scale}"] if side in parts else []
            suffixes += [f"{side}_level_{scale}"] if f"{side}-level" in parts else []
    for start in range(0, len(names), TABLE_COLUMNS):
        named += [f"{name}_{suffix}" for suffix in suffixes for name in names[start : start + TABLE_COLUMNS]]
    return named


# Sample by sample

Vector = npt.NDArray[np.float64]


class _RunningSum:
    """Sums of rows that come one by one, added in the order in which :func:`running` adds them.

    ``_levels[k]`` has the sums over the last ``2**k`` rows, for as many rows; ``_totals`` those over all rows.
    """

    def __init__(self) -> None:
        self._levels: list[list[Vector]] = []
        self._totals: list[Vector] = []
        self._count = 0

    def add(self, row: Vector) -> Vector:
        if self._count == 1 << len(self._levels):
            self._levels.append(self._totals[: self._count])
        current = row
        for level, sums in enumerate(self._levels):
            at = self._count & ((1 << level) - 1)
            current, sums[at] = current + sums[at], current
        self._totals.append(current)
        self._count += 1
        return current


class _WindowSums:
    """Sums over the last 1, 2, 4, ... rows of a session, as :func:`windows` makes them."""

    def __init__(self, scales: tuple[int, ...]) -> None:
        self._scales, self._levels, self._count = scales, max(scales, default=1).bit_length() - 1, 0
        self._last: list[list[Vector]] = [[] for _ in range(self._levels)]

    def add(self, row: Vector) -> dict[int, Vector]:
        current, kept = row, {1: row}
        for level, sums in enumerate(self._last):
            step = 1 << level
            if self._count < step:
                sums.append(current)
            else:
                at = self._count & (step - 1)
                current, sums[at] = current + sums[at], current
            kept[2 * step] = current
        self._count += 1
        return {scale: kept[scale] for scale in self._scales}


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a patient after a sample."""

    session: int
    time: float
    totals: Vector
    windows: dict[int, Vector]
    lowest: Vector
    highest: Vector
    values: Vector
    seen: Vector
    changed: Vector
    measured: _Measured


@dataclass(frozen=True, eq=False)
class _Measured:
    """The last two measurements of each feature in a session, and how many there were; NaN times without any."""

    value: Vector
    time: Vector
    value_before: Vector
    time_before: Vector
    count: Vector

    @staticmethod
    def nothing(width: int) -> _Measured:
        zeros, never = np.zeros(width), np.full(width, math.nan)
        return _Measured(zeros, never, zeros, never, zeros)

    def then(self, known: npt.NDArray[np.bool_], values: Vector, time: float, latest: _Measured) -> _Measured:
        """With a further sample, where this is of strictly earlier ones and ``latest`` of all."""
        return _Measured(
            np.where(known, values, latest.value),
            np.where(known, time, latest.time),
            np.where(known, self.value, latest.value_before),
            np.where(known, self.time, latest.time_before),
            latest.count + known,
        )

    def columns(
        self, now: _Measured, first: Vector, time: float, start: float, parts: Sequence[str]
    ) -> Iterator[Vector]:
        """The parts of context, in their order; ``now`` has the sample itself, too."""
        if "last" in parts:
            yield np.where(np.isnan(self.time), 0.0, self.value + first)
        if "since" in parts:
            yield np.log1p(time - np.where(np.isnan(self.time), start, self.time))
        if "trend" in parts:
            rate = (now.value - now.value_before) / np.clip(now.time - now.time_before, 1e-9, None)
            yield np.where(np.isnan(now.time_before), 0.0, rate)
        if "count" in parts:
            yield np.log1p(self.count)


class _PatientSoFar:
    """One patient's samples, in the order of time."""

    def __init__(self, options: ContextOptions, width: int) -> None:
        self.options, self.width = options, width
        self.first = np.zeros(width)
        self.ever = np.zeros(width, bool)
        self.sums, self.windows = _RunningSum(), _WindowSums(options.scales)
        self.session = 0
        self.start = self.session_start = math.nan
        self.earlier: _Known | None = None
        self.latest: _Known | None = None

    def update(self, row: Vector, time: float) -> Vector:
        if self.latest is None:
            self.start = self.session_start = time
        elif time < self.latest.time:
            raise DataError(f"a sample of time {time:g} comes after one of {self.latest.time:g}: give them in order")
        elif time > self.latest.time:
            self.earlier = self.latest
            if self.options.gap is not None and time - self.latest.time > self.options.gap:
                self.session, self.session_start = self.session + 1, time
                self.windows = _WindowSums(self.options.scales)
        known = ~np.isnan(row)
        self.first = np.where(known & ~self.ever, row, self.first)
        self.ever = self.ever | known
        values = np.where(known, row - self.first, 0.0)
        with np.errstate(all="ignore"):
            context, changed = self._context(known, values, time)
        self.latest = self._after(known, values, time, changed)
        return context

    def _context(self, known: npt.NDArray[np.bool_], values: Vector, time: float) -> tuple[Vector, Vector]:
        """The columns of context, and when each value last changed."""
        options, past, n = self.options, self.earlier, self.width
        parts, seen = options.parts or (), known.astype(np.float64)
        own = np.concatenate([seen, values, np.square(values)])
        count, total, squares = np.split(own if past is None else past.totals + own, 3)
        patient: Any = patient_statistics(count, total, squares, seen, options.strength or DEFAULT_STRENGTH)
        difference = np.where(known, patient.weight * (values - patient.mean), 0.0)
        blocks = []
        if "relative" in parts:
            blocks.append(np.clip(difference * patient.scale, -MAX_DEVIATION, MAX_DEVIATION))
        if "difference" in parts:
            blocks.append(difference)
        if "extremes" in parts:
            low, high = (np.full(n, math.inf), np.full(n, -math.inf)) if past is None else (past.lowest, past.highest)
            blocks.append(np.where(known, values - np.minimum(low, np.where(known, values, math.inf)), 0.0))
            blocks.append(np.where(known, values - np.maximum(high, np.where(known, values, -math.inf)), 0.0))
        session = past if past is not None and past.session == self.session else None
        was_seen, previous = (np.zeros(n), np.zeros(n)) if session is None else (session.seen, session.values)
        when = np.where((known != (was_seen > 0)) | (values != previous), time, -math.inf)
        changed = when if session is None else np.maximum(session.changed, when)
        if "age" in parts:
            since = time - changed
            blocks.append(np.log1p(np.where(np.isfinite(since), since, 0.0)))
        measured = _Measured.nothing(n) if session is None else session.measured
        now = measured.then(known, values, time, measured)
        blocks += measured.columns(now, self.first, time, self.session_start, parts)
        blocks += self._neighbours(session, known, values, patient, parts)
        table = np.stack(blocks) if blocks else np.zeros((0, n))
        columns = [table[:, start : start + TABLE_COLUMNS].ravel() for start in range(0, n, TABLE_COLUMNS)]
        clock = time - self.session_start
        if "clock" in parts:
            columns.insert(0, np.array([clock, np.log1p(clock), np.log1p(time - self.start)]))
        return np.concatenate(columns), when

    def _neighbours(
        self, session: _Known | None, known: npt.NDArray[np.bool_], values: Vector, patient: Any, parts: Sequence[str]
    ) -> Iterator[Vector]:
        for scale in self.options.scales:
            window = np.zeros(2 * self.width) if session is None else session.windows[scale]
            count, total = np.split(window, 2)
            mean = total / np.clip(count, 1.0, None)
            if "before" in parts:
                yield np.where(known & (count > 0), mean - values, 0.0)
            if "before-level" in parts:
                level = patient.weight * (mean - patient.mean) * patient.scale
                yield np.clip(np.where(count > 0, level, 0.0), -MAX_DEVIATION, MAX_DEVIATION)

    def _after(self, known: npt.NDArray[np.bool_], values: Vector, time: float, when: Vector) -> _Known:
        seen, last = known.astype(np.float64), self.latest
        low, high = np.where(known, values, math.inf), np.where(known, values, -math.inf)
        if last is not None:
            low, high = np.minimum(last.lowest, low), np.maximum(last.highest, high)
        if last is not None and last.session == self.session:
            when = np.maximum(last.changed, when)
        totals = self.sums.add(np.concatenate([seen, values, np.square(values)]))
        windows = self.windows.add(np.concatenate([seen, values]))
        latest = last.measured if last is not None and last.session == self.session else _Measured.nothing(self.width)
        past = self.earlier
        before = past.measured if past is not None and past.session == self.session else _Measured.nothing(self.width)
        measured = before.then(known, values, time, latest)
        return _Known(self.session, time, totals, windows, low, high, values, seen, when, measured)


class PatientStream:
    """Context of samples that come one by one: the same numbers as :meth:`PatientContext.transform` of all of them.

    Made by :meth:`PatientContext.stream`. It keeps some sums for every sample that it has seen.

    Examples
    --------
    >>> context = PatientContext(parts=["difference"], strength=1).fit([[1.0], [3.0]], groups=["p", "p"], time=[1, 2])
    >>> stream = context.stream()
    >>> stream.update("new", [5.0], 1).tolist(), stream.update("new", [9.0], 2).tolist()
    ([5.0, 0.0], [9.0, 1.0])
    """

    def __init__(self, options: ContextOptions) -> None:
        if options.mode != "causal":
            raise ConfigError("offline context needs later samples, which a stream does not have: use mode='causal'")
        self.options = options
        self._patients: dict[Any, _PatientSoFar] = {}

    def update(self, group: Any, x: Any, time: float) -> npt.NDArray[np.float32]:
        """The sample with its context ``(features + context,)``; the sample is then part of its patient's context.

        Parameters
        ----------
        group : hashable
            The patient.
        x : array ``(features,)``
        time : float
            Not earlier than the patient's last.
        """
        row = np.asarray(x, np.float32)
        patient = self._patients.get(group)
        if patient is None:
            patient = self._patients[group] = _PatientSoFar(self.options, len(row))
        context = patient.update(row.astype(np.float64), float(time))
        return np.concatenate([row, context.astype(np.float32)])

    def forget(self, group: Any) -> None:
        """Drop what is known of a patient."""
        self._patients.pop(group, None)
