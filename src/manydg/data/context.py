"""Patient context: statistics of a patient's own unlabelled samples as further input columns of each sample.

Only inputs and times of the same patient are read. Labels and other patients cannot enter, and causal context never
reads a sample that is later, or of the same time. The columns are ordinary inputs, so any learner can use them.

:func:`table_context` sets each measurement beside the patient's mean and its neighbours in time;
:func:`spectral_context` gives the patient's mean and scale at each channel and frequency of a signal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manydg.data.columns import Ragged
from manydg.data.dataset import TRUST, DomainDataset
from manydg.data.timeline import Timeline, rows_of_some_patients, running, samples_until_known, windows
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json, ParsedJson

Spectrum = Callable[[Tensor], Tensor]
"""From signals ``(rows, channels, samples)`` to log spectrograms ``(rows, channels, frequencies, frames)``."""

COLUMN = "context"
DEFAULT_STRENGTH = 5.0
MODES = ("offline", "causal")
PARTS = {
    "offline": ("relative", "before", "after", "before-level", "after-level", "extremes", "age", "difference", "clock"),
    "causal": ("relative", "before", "before-level", "extremes", "age", "difference", "clock"),
}
DEFAULT_PARTS = {
    "offline": ("relative", "before-level", "after-level"),
    "causal": ("relative", "difference", "before", "extremes", "age", "clock"),
}
_MAX_DEVIATION = 10.0
"""Deviations from the patient's mean are clipped at this many standard deviations."""
_MIN_VARIANCE = 1e-10
"""Values vary if their variance is more than this share of their mean square."""
# Chunk sizes, which bound the memory of intermediate results.
_TABLE_COLUMNS, _SPECTRUM_ROWS, _SPECTRUM_COLUMNS = 16, 256, 64


_ENDLESS = 1e18


@dataclass(frozen=True)
class ContextOptions:
    """Which context to add.

    Parameters
    ----------
    mode : {"offline", "causal"}
        All samples of the patient, or only strictly earlier ones.
    parts : tuple of str, optional
        ``relative``: the value in the patient's own standard deviations from the patient's own mean; ``difference``:
        the same in its own unit; ``before`` and ``after``: means of the nearest samples minus the value;
        ``before-level`` and ``after-level``: those means in the patient's own units; ``extremes``: distance from the
        lowest and the highest value so far; ``age``: time since the value changed; ``clock``: time since the start.
    scales : tuple of int
        How many neighbouring samples are averaged; powers of two.
    strength : float, optional
        With ``m`` other samples, the patient's mean has the weight ``m / (m + strength)``. The default is 5; a training
        run without it estimates it from its training patients (:func:`estimate_strength`), and its model keeps that
        number.
    gap : float, optional
        A pause longer than this begins a new session, across which no neighbours are taken. By default the
        dataset's setting ``session_gap``, if it has one.
    """

    mode: str = "offline"
    parts: tuple[str, ...] | None = None
    scales: tuple[int, ...] = (1, 4, 16)
    strength: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown_name("kind of context", self.mode, (*MODES, "none"))
        for part in self.parts or ():
            if part not in PARTS[self.mode]:
                raise unknown_name(f"part of {self.mode} context", part, PARTS[self.mode])
        if any(scale < 1 or scale & (scale - 1) for scale in self.scales):
            raise ConfigError(f"the scales of context are powers of two (1, 2, 4, ...); got {list(self.scales)}")
        if self.gap is not None and not 0 <= self.gap < _ENDLESS:
            raise ConfigError(f"the gap of context is {self.gap}; it must be a number of at least 0")
        if self.strength is not None and not 0 < self.strength < _ENDLESS:
            raise ConfigError(f"the strength of context is {self.strength}; it must be positive")

    @staticmethod
    def from_mapping(mode: str, given: ParsedJson) -> ContextOptions:
        """Options by name, as a configuration or a model file has them."""
        names = {field.name for field in dataclasses.fields(ContextOptions)} - {"mode"}
        for name in given:
            if name not in names:
                raise unknown_name("option of context", name, names)
        values: ParsedJson = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        return ContextOptions(mode, **values)

    @staticmethod
    def from_json(value: ParsedJson) -> ContextOptions:
        return ContextOptions.from_mapping(value["mode"], {name: v for name, v in value.items() if name != "mode"})

    def to_json(self) -> dict[str, Json]:
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def add_context(
    dataset: DomainDataset, mode: str = "offline", *, spectrum: Spectrum | None = None, **options: Any
) -> DomainDataset:
    """The dataset with further columns: the context of each sample.

    Measurements get the column ``context`` ``(rows, n)``. Signals get ``context_mean`` and ``context_scale``, with
    which a spectrogram network normalises each channel and frequency for the patient. Both get ``context_weight``, the
    weight of the patient's statistics (:data:`manydg.data.dataset.TRUST`). Context is 0 where nothing is known, so that
    it grows smoothly with the samples of the patient.

    Parameters
    ----------
    dataset : DomainDataset
        Dense columns of numbers; NaN is ignored. Order does not matter, times do. Without times, samples have no
        neighbours: offline context is then the ``relative`` part alone, and causal context an error.
    mode : {"offline", "causal"}
    spectrum : callable, optional
        From signals ``(rows, channels, samples)`` to log spectrograms; needed where there are signals.
    **options
        Of :class:`ContextOptions`.

    Examples
    --------
    >>> from manydg.data.dataset import from_arrays
    >>> data = from_arrays(torch.tensor([[1.0], [3.0], [8.0]]), [0, 1, 0], [7, 7, 9], times=torch.tensor([1, 2, 1]))
    >>> add_context(data, parts=("relative",), strength=1).columns["context"].tolist()
    [[-0.5], [0.5], [0.0]]
    """
    return apply_context(dataset, ContextOptions.from_mapping(mode, options), spectrum)


def apply_context(dataset: DomainDataset, options: ContextOptions, spectrum: Spectrum | None = None) -> DomainDataset:
    """:func:`add_context` with options that are checked already."""
    if has_context(dataset):
        raise DataError(f"the dataset has a column '{COLUMN}' already: context is added once")
    if reason := unsupported(dataset):
        raise DataError(f"no context can be made: {reason}")
    chosen = _with_defaults(dataset, options)
    strength = chosen.strength or DEFAULT_STRENGTH
    timeline = Timeline.of(dataset.domains, dataset.times, chosen.gap)
    whole = dataset.compact()
    added: dict[str, Tensor] = {}
    tables = [column.flatten(1) for column in _columns(whole, 1, 2)]
    if tables:
        added[COLUMN] = _assemble(torch.cat(tables, dim=1), timeline, chosen, strength)
        added[TRUST] = timeline.trust(chosen.mode, strength)
    for signal in _columns(whole, 3, 4):
        if spectrum is None and signal.ndim == 3:
            raise DataError("context of signals is made of their spectrograms: give the transform as spectrum=")
        added |= spectral_context(signal, timeline, chosen.mode, strength, spectrum or torch.Tensor)
    info = dataclasses.replace(dataset.info, settings={**dataset.info.settings, "context": chosen.to_json()})
    return dataclasses.replace(whole, columns={**whole.columns, **added}, info=info, stored_hash=None)


def has_context(dataset: DomainDataset) -> bool:
    """Whether context was added to a dataset."""
    return "context" in dataset.info.settings or COLUMN in dataset.columns


def limit_context(dataset: DomainDataset, others: int) -> DomainDataset:
    """The same samples with each patient cut in time into pieces of ``others + 1`` samples, each a patient of its own.

    The context of a sample is then ``others`` samples, fewer in the last piece.

    Examples
    --------
    >>> from manydg.data.dataset import from_arrays
    >>> data = from_arrays(torch.zeros(5, 1), [0, 1, 0, 1, 0], ["p"] * 5, times=torch.tensor([5, 4, 3, 2, 1]))
    >>> limit_context(data, 1).domains.tolist()
    [2, 1, 1, 0, 0]
    """
    if others < 0:
        raise ConfigError(f"the number of context samples is {others}; it cannot be negative")
    timeline = Timeline.of(dataset.domains, dataset.times, None)
    rank = torch.arange(len(timeline), device=dataset.device) - timeline.patient
    piece = torch.cumsum(rank % (others + 1) == 0, 0) - 1
    domains = torch.empty_like(piece)
    domains[timeline.order] = piece
    names = np.array([f"piece {number}" for number in range(int(piece.max()) + 1)])
    return dataclasses.replace(dataset, domains=domains, patients=names, stored_hash=None)


def estimate_strength(dataset: DomainDataset, spectrum: Spectrum | None = None) -> float | None:
    """The strength of context that suits a dataset of training patients, from inputs and times alone.

    See :func:`manydg.data.timeline.samples_until_known`.
    """
    part = dataset.select(rows_of_some_patients(dataset)).compact()
    columns = [column.flatten(1) for column in _columns(part, 1, 2)]
    if spectrum is not None:
        columns += [mean_spectra(signal, spectrum) for signal in _columns(part, 3, 4)]
    return samples_until_known(torch.cat(columns, dim=1), part.domains, part.times) if columns else None


def unsupported(dataset: DomainDataset) -> str | None:
    """The reason why no context can be made for a dataset; ``None`` if it can."""
    ragged = sorted(name for name, column in dataset.columns.items() if isinstance(column, Ragged))
    if ragged:
        return f"{ragged} have rows of different lengths; records of visits and events carry their history already"
    signals = len(_columns(dataset, 3, 4))
    if signals > 1:
        return f"it is made for one column of signals, and there are {signals}"
    if not signals and not _columns(dataset, 1, 2):
        return f"it is made of measurements or signals, and {sorted(dataset.columns)} are neither"
    return None


def has_signals(dataset: DomainDataset) -> bool:
    """Whether the context of a dataset is made of spectrograms."""
    return any(column.ndim == 3 for column in _columns(dataset, 3, 4))


def _columns(dataset: DomainDataset, fewest: int, most: int) -> list[Tensor]:
    """The dense columns of real numbers whose number of dimensions, rows included, is in a range."""
    dense = [column for column in dataset.columns.values() if isinstance(column, Tensor)]
    return [column for column in dense if column.is_floating_point() and fewest <= column.ndim <= most]


def _with_defaults(dataset: DomainDataset, options: ContextOptions) -> ContextOptions:
    """The options with every default filled in."""
    parts = options.parts
    if dataset.times is None:
        if options.mode == "causal":
            raise DataError("causal context needs the time of every sample, and the dataset has none")
        parts = parts or ("relative",)
        ordered = sorted(set(parts) - {"relative", "difference"})
        if ordered:
            raise DataError(f"the parts {ordered} of context need the time of every sample, and the dataset has none")
    gap = options.gap if options.gap is not None else dataset.info.session_gap
    strength = DEFAULT_STRENGTH if options.strength is None else options.strength
    return dataclasses.replace(options, parts=parts or DEFAULT_PARTS[options.mode], gap=gap, strength=strength)


def _assemble(values: Tensor, timeline: Timeline, options: ContextOptions, strength: float) -> Tensor:
    """Context in the order of the dataset, float32 ``(rows, n)``."""
    parts = options.parts or ()
    blocks = [_clock(timeline, options.mode)] if "clock" in parts else []
    blocks += list(table_context(values, timeline, options.mode, parts, options.scales, strength))
    context = blocks[0].new_empty(len(timeline), sum(block.shape[1] for block in blocks))
    start = 0
    for block in blocks:
        context[timeline.order, start : start + block.shape[1]] = block
        start += block.shape[1]
    return context


def _clock(timeline: Timeline, mode: str) -> Tensor:
    """Time since the session and the patient began and, offline, until the session ends."""
    since = timeline.times - timeline.times[timeline.session]
    columns = [since, since.log1p(), (timeline.times - timeline.times[timeline.patient]).log1p()]
    if mode == "offline":
        left = timeline.times[timeline.session_last] - timeline.times
        columns += [left, left.log1p()]
    return torch.stack(columns, dim=1).to(torch.float32)


@dataclass(frozen=True, eq=False)
class PatientStatistics:
    """A patient's mean and scale, as known at each row.

    Attributes
    ----------
    mean, scale : Tensor ``(rows, n)``
        ``scale`` is one over the standard deviation; 0 where the patient's values do not vary.
    weight : Tensor ``(rows, n)``
        ``m / (m + strength)`` for ``m`` other known values.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor


def table_context(
    values: Tensor, timeline: Timeline, mode: str, parts: tuple[str, ...], scales: tuple[int, ...], strength: float
) -> Iterator[Tensor]:
    """Blocks of context columns, float32 ``(rows, ...)`` in sorted order, sixteen input columns at a time.

    Parameters
    ----------
    values : Tensor ``(rows, n)``
        In the order of the dataset; NaN is a missing value. Where nothing is known the context is 0.
    """
    for start in range(0, values.shape[1], _TABLE_COLUMNS):
        piece = values[:, start : start + _TABLE_COLUMNS][timeline.order].to(torch.float64)
        blocks = _TableContext(piece, timeline, mode, strength).blocks(parts, scales)
        yield torch.cat([block.to(torch.float32) for block in blocks], dim=1)


class _TableContext:
    """Context of a few columns of measurements, part by part."""

    def __init__(self, values: Tensor, timeline: Timeline, mode: str, strength: float) -> None:
        self.timeline, self.mode, self.strength = timeline, mode, strength
        self.known = ~torch.isnan(values)
        # One column serves for all where nothing is missing.
        self.seen = (self.known[:, :1] if bool(self.known.all()) else self.known).to(torch.float64)
        # Relative to the patient's first known value, which is never later than any row that uses it.
        self.values = torch.where(self.known, values - _first_known(values, self.known, timeline), 0.0)
        self.statistics = self._statistics()

    def blocks(self, parts: tuple[str, ...], scales: tuple[int, ...]) -> Iterator[Tensor]:
        patient = self.statistics
        difference = torch.where(self.known, patient.weight * (self.values - patient.mean), 0.0)
        if "relative" in parts:
            yield (difference * patient.scale).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
        if "difference" in parts:
            yield difference
        if "extremes" in parts:
            yield from self._extremes()
        if "age" in parts:
            yield self._age()
        for side, timeline in (("before", self.timeline), ("after", self.timeline.reversed())):
            if side in parts or f"{side}-level" in parts:
                yield from self._neighbours(timeline, side, parts, scales)

    def _statistics(self) -> PatientStatistics:
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
        varies = variance > _MIN_VARIANCE * squares / number
        scale = torch.where(varies, variance.clamp_min(1e-300).rsqrt(), 0.0)
        others = (count - self.seen).clamp_min(0.0)
        return PatientStatistics(mean, scale, others / (others + self.strength))

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
        """Means of the last few rows strictly before (after): minus the value, or in the patient's own units."""
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
                patient = self.statistics
                level = patient.weight * (mean - patient.mean) * patient.scale
                yield torch.where(count > 0, level, 0.0).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)


def _first_known(values: Tensor, known: Tensor, timeline: Timeline) -> Tensor:
    """Each patient's first known value of each column at all rows of the patient; 0 where none is known."""
    position = torch.arange(len(values), device=values.device).unsqueeze(-1).expand_as(values)
    absent = len(values)
    # Running from the patient's start: a row before the first known value has no use for it.
    first = running(torch.where(known, position, absent), timeline.patient, torch.minimum)
    value = torch.gather(values, 0, first.clamp_max(absent - 1))
    return torch.where(first < absent, value, 0.0)


def spectral_context(
    signal: Tensor, timeline: Timeline, mode: str, strength: float, spectrum: Spectrum
) -> dict[str, Tensor]:
    """Mean and scale of the patient's log spectrogram per channel and frequency, and their weight.

    Parameters
    ----------
    signal : Tensor ``(rows, channels, samples)``, or spectrograms ``(rows, channels, frequencies, frames)``
    spectrum : callable
        From signals to log spectrograms.

    Returns
    -------
    dict of str to Tensor
        ``context_mean`` and ``context_scale`` ``(rows, channels, frequencies)``, the latter one over the standard
        deviation, and ``context_weight`` ``(rows, 1)``; all are 0 where nothing is known.
    """
    firsts, seconds, shape = _moments(signal, spectrum)
    mean, square = (_mean_over_context(moment, timeline, mode) for moment in (firsts, seconds))
    variance = square - mean.square()
    varies = variance > 1e-9 * square.clamp_min(1.0)
    weight = timeline.trust(mode, strength)
    scale = torch.where(varies, variance.clamp_min(1e-12).rsqrt(), 0.0)
    known = weight > 0
    return {
        "context_mean": torch.where(known, mean, 0.0).to(torch.float32).reshape(shape),
        "context_scale": torch.where(known, scale, 0.0).to(torch.float32).reshape(shape),
        TRUST: weight,
    }


def mean_spectra(signal: Tensor, spectrum: Spectrum) -> Tensor:
    """Mean over time of each sample's log spectrogram, ``(rows, channels * frequencies)``."""
    return _moments(signal, spectrum)[0]


def _moments(signal: Tensor, spectrum: Spectrum) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Mean and mean square over the frames of each sample's spectrogram, ``(rows, channels * frequencies)`` each."""
    firsts, seconds, shape = [], [], signal.shape[1:3]
    with torch.no_grad():
        for piece in torch.split(signal, _SPECTRUM_ROWS):
            spectrogram = spectrum(piece) if piece.ndim == 3 else piece
            shape = spectrogram.shape[1:3]
            exact = spectrogram.to(torch.float64)
            firsts.append(exact.mean(dim=-1).flatten(1))
            seconds.append(exact.square().mean(dim=-1).flatten(1))
    return torch.cat(firsts), torch.cat(seconds), (len(signal), *shape)


def _mean_over_context(moments: Tensor, timeline: Timeline, mode: str) -> Tensor:
    """Mean of a moment over the samples in each row's context, itself included, in the order of the dataset."""
    means = torch.empty_like(moments)
    for start in range(0, moments.shape[1], _SPECTRUM_COLUMNS):
        own = moments[:, start : start + _SPECTRUM_COLUMNS][timeline.order]
        total = running(own, timeline.patient)
        if mode == "offline":
            total, count = total[timeline.last], timeline.last - timeline.patient + 1
        else:
            total, count = timeline.earlier(total, timeline.patient) + own, timeline.before - timeline.patient + 2
        piece = torch.empty_like(own)
        piece[timeline.order] = total / count.unsqueeze(-1)
        means[:, start : start + _SPECTRUM_COLUMNS] = piece
    return means
