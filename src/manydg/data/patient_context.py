"""Patient context of tables, without torch: for any learner of scikit-learn's kind, and sample by sample.

:class:`PatientContext` is a transformer, and :class:`PatientStream` its streaming form. Training makes its context with
the same functions (:mod:`manydg.data.timeline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from manydg.data.timeline import (
    DEFAULT_STRENGTH,
    REMEMBERED,
    TABLE_COLUMNS,
    ContextOptions,
    PatientState,
    Timeline,
    assemble,
    clock_of,
    ids_in,
    is_missing,
    samples_until_known,
    some_patients,
)
from manydg.errors import ConfigError, DataError


class PatientContext(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Add columns computed from the same patient's other samples, without labels, to each sample.

    The columns equal those of ``manydg train --context`` bit for bit, and come after the columns of ``X``. Use it
    before any classifier or regressor. A row never depends on another patient or, with ``mode="causal"``, on a sample
    at the same or a later time.

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
            strength = samples_until_known(values[rows], domains[rows], clock)
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
        timeline = Timeline.of(domains, times, options.gap)
        context: Any = assemble(values, timeline, options, self.strength_)
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

    def stream(self, exact: bool = True) -> PatientStream:
        """The same for samples that come one by one; causal context only."""
        check_is_fitted(self, "_options_")
        return PatientStream(self._options_, exact, self.n_features_in_)

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
        ids = ids_in(groups)
        domains = np.unique(ids.astype(str) if ids.dtype.kind == "O" else ids, return_inverse=True)[1]
        if time is None:
            return values, domains, None
        check_consistent_length(values, time)
        return values, domains, clock_of(time)

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


class PatientStream:
    """Context of samples that come one by one: the same numbers as :meth:`PatientContext.transform` of all of them.

    Made by :meth:`PatientContext.stream`.

    Parameters
    ----------
    options : ContextOptions
    exact : bool
        Bit for bit the same, for which some sums are kept for every sample. Otherwise a patient takes a fixed amount of
        memory, and the last digit may differ.
    features : int, optional
        How many each sample has; by default as many as the first one.

    Examples
    --------
    >>> context = PatientContext(parts=["difference"], strength=1).fit([[1.0], [3.0]], groups=["p", "p"], time=[1, 2])
    >>> stream = context.stream()
    >>> stream.update("new", [5.0], 1).tolist(), stream.update("new", [9.0], 2).tolist()
    ([5.0, 0.0], [9.0, 1.0])
    """

    def __init__(self, options: ContextOptions, exact: bool = True, features: int | None = None) -> None:
        self.options, self.exact, self._features = options, exact, features
        self._layout = PatientState(options, features or 0)
        self._states: dict[Any, Vector] = {}
        self._sums: dict[Any, _RunningSum] = {}

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
        row, moment = self._checked(group, x, time)
        layout, state = self._layout, self._states.get(group)
        if state is None:
            state = np.zeros((1, layout.size))
        elif moment[0] < state[0, 0]:
            raise DataError(f"a sample of time {moment[0]:g} comes after one of {state[0, 0]:g}: give them in order")
        context, _, state = layout.step(state, row, moment)
        if self.exact:
            self._add_exactly(group, state, row)
        self._states[group] = state
        return np.concatenate([row[0], context[0]])

    def _checked(self, group: Any, x: Any, time: Any) -> tuple[npt.NDArray[np.float32], Vector]:
        """A sample ``(1, features)`` and its time ``(1,)``; nothing of a wrong one is kept."""
        if is_missing(group):
            raise DataError("the sample says not whose it is: give its patient")
        row = np.asarray(x, np.float32)[None]
        if self._features is None:
            self._features, self._layout = row.shape[-1], PatientState(self.options, row.shape[-1])
        if row.shape != (1, self._features):
            raise DataError(f"the sample has the shape {row.shape[1:]}, and samples have {self._features} features")
        if np.isinf(row).any():
            raise DataError("the sample has an infinite value, or one too large for float32: replace it")
        return row, clock_of([time])

    def _add_exactly(self, group: Any, state: Vector, row: npt.NDArray[np.float32]) -> None:
        start, width = self._layout.fields["count"].start, row.shape[1]
        known = ~np.isnan(row[0])
        values = np.where(known, row[0] - self._layout.part(state, "first")[0], 0.0)
        own = np.concatenate([known, values, np.square(values)])
        state[0, start : start + 3 * width] = self._sums.setdefault(group, _RunningSum()).add(own)

    def forget(self, group: Any) -> None:
        """Drop what is known of a patient."""
        self._states.pop(group, None)
        self._sums.pop(group, None)
