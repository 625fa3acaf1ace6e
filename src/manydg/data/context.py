"""Patient context: statistics of a patient's own unlabelled samples as further input columns of each sample.

Only inputs and times of the same patient are read. Labels and other patients cannot enter, and causal context never
reads a sample that is later, or of the same time. The columns are ordinary inputs, so any learner can use them.

:func:`manydg.data.timeline.assemble` sets each measurement beside the patient's mean and its neighbours in time;
:func:`spectral_context` gives the patient's mean and scale at each channel and frequency of a signal;
:func:`record_context` sums up the patient's earlier visits or stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from manydg.data.columns import Ragged, unnest
from manydg.data.dataset import TRUST, DomainDataset, InputSchema
from manydg.data.timeline import (
    DEFAULT_PARTS,
    DEFAULT_STRENGTH,
    ORDER,
    PAUSE,
    REMEMBERED,
    ContextOptions,
    PatientState,
    SequenceOptions,
    Timeline,
    assemble,
    running,
    samples_until_known,
    some_patients,
)
from manydg.errors import ConfigError, DataError
from manydg.files import ParsedJson

Spectrum = Callable[[Tensor], Tensor]
"""From signals ``(rows, channels, samples)`` to log spectrograms ``(rows, channels, frequencies, frames)``."""

COLUMN = "context"
_LONGEST_PAUSE = 10.0
# Chunk sizes, which bound the memory of intermediate results.
_SPECTRUM_ROWS, _SPECTRUM_COLUMNS = 256, 64
_BUCKETS = 32
"""Positions that the codes of a column of records are hashed to."""
_COUNTED = 4
"""Earlier visits that are distinguished one by one."""
_RECORD_STRENGTH = 1.0
"""Of context of records: a stay of hundreds of events tells nearly all of what a patient's stays have in common."""


def add_context(
    dataset: DomainDataset, mode: str = "offline", *, spectrum: Spectrum | None = None, **options: Any
) -> DomainDataset:
    """The dataset with further columns: the context of each sample.

    Measurements get the column ``context`` ``(rows, n)``. Signals get ``context_mean`` and ``context_scale``, with
    which a spectrogram network normalises each channel and frequency for the patient. Both get ``context_weight``, the
    weight of the patient's statistics (:data:`manydg.data.dataset.TRUST`). Context is 0 where nothing is known, so that
    it grows smoothly with the samples of the patient.

    - ``dataset``: Dense columns of numbers; NaN is ignored. Order matters among samples of one time alone. Without
      times, samples have no neighbours: offline context is then the ``relative`` part alone, and causal context an
      error.
    - ``mode`` {"offline", "causal"}
    - ``spectrum``: From signals ``(rows, channels, samples)`` to log spectrograms; needed where there are signals.
    - ``**options``: Of :class:`ContextOptions`.

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
    if reason := unsupported(dataset, options.mode):
        raise DataError(f"no context can be made: {reason}")
    if options.strength is None and has_records(dataset):
        options = dataclasses.replace(options, strength=_RECORD_STRENGTH)
    chosen = options.settled(dataset.times is not None, dataset.info.session_gap)
    strength = chosen.strength or DEFAULT_STRENGTH
    timeline = Timeline.of(dataset.domains, dataset.times, chosen.gap)
    whole = dataset.compact()
    added: dict[str, Tensor] = {}
    tables = [column.flatten(1) for column in _columns(whole, 1, 2)]
    if has_records(dataset):
        added[COLUMN] = record_context(whole, timeline, strength)
        added[TRUST] = timeline.trust(chosen.mode, strength)
    elif tables:
        added[COLUMN] = _of_tables(torch.cat(tables, dim=1), timeline, chosen, strength)
        added[TRUST] = timeline.trust(chosen.mode, strength)
    for signal in _columns(whole, 3, 4):
        if spectrum is None and signal.ndim == 3:
            raise DataError(
                "context of signals is made of their spectrograms, which takes a network that makes them and the "
                "signals' sampling rate (manydg prepare arrays --rate), or from Python the transform as spectrum="
            )
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


def with_session_gap(dataset: DomainDataset, gap: float | None) -> DomainDataset:
    """The dataset with its sessions as far apart as those of the data that a model was trained on.

    Preparing puts twice the dataset's own gap between two sessions whose distance is not known, and the model takes
    them for one where that is less than the gap it was trained with.

    - ``gap``: The setting ``session_gap`` of the training data.

    Examples
    --------
    >>> from manydg.data.dataset import from_arrays
    >>> info = {"settings": {"session_gap": 2.0}}
    >>> data = from_arrays(torch.zeros(4, 1), [0, 1, 0, 1], [7] * 4, times=torch.tensor([0, 2, 6, 7]), info=info)
    >>> with_session_gap(data, 10.0).times.tolist()
    [0.0, 2.0, 22.0, 23.0]
    """
    own = dataset.info.session_gap
    if dataset.times is None or own is None or gap is None or own == gap:
        return dataset
    line = Timeline.of(dataset.domains, dataset.times, own)
    pause = torch.diff(line.times, prepend=line.times[:1])
    position = torch.arange(len(line), device=dataset.device)
    begins = (line.session == position) & (line.patient != position)
    # A pause of another length was measured: it stays where it is long enough.
    measured = (pause > 2 * own * (1 + 1e-6)) & (pause > gap)
    later = torch.where(begins & ~measured, 2 * gap - pause, 0.0).unsqueeze(1)
    times = torch.empty_like(line.times)
    times[line.order] = line.times + running(later, line.patient).squeeze(1)
    info = dataclasses.replace(dataset.info, settings={**dataset.info.settings, "session_gap": gap})
    return dataclasses.replace(dataset, times=times, info=info, stored_hash=None)


def estimate_strength(dataset: DomainDataset, spectrum: Spectrum | None = None) -> float | None:
    """The strength of context that suits a dataset of training patients, from inputs and times alone.

    See :func:`manydg.data.timeline.samples_until_known`.
    """
    if has_records(dataset):
        return _RECORD_STRENGTH
    part = dataset.select(some_patients(dataset.domains.cpu().numpy())).compact()
    columns = [column.flatten(1) for column in _columns(part, 1, 2)]
    if spectrum is not None:
        columns += [mean_spectra(signal, spectrum) for signal in _columns(part, 3, 4)]
    return samples_until_known(torch.cat(columns, dim=1), part.domains, part.times) if columns else None


def fitting_parts(dataset: DomainDataset, mode: str) -> tuple[str, ...]:
    """The parts of context that suit a dataset of training patients.

    Where most measurements are missing at most times, causal context also remembers the last ones.
    """
    if mode != "causal" or not dataset.info.settings.get("missing"):
        return DEFAULT_PARTS[mode]
    tables = _columns(dataset.select(some_patients(dataset.domains.cpu().numpy())).compact(), 1, 2)
    missing = sum(int(torch.isnan(table).sum()) for table in tables)
    sparse = 2 * missing > sum(table.numel() for table in tables)
    return (*DEFAULT_PARTS[mode], *(REMEMBERED if sparse else ()))


def unstreamed(schema: InputSchema) -> str | None:
    """Why the context of a model cannot be made from samples that come one by one; ``None`` where it can."""
    if cast("ParsedJson", schema.settings["context"])["mode"] != "causal":
        return "offline context needs the patient's later samples"
    given = schema.without_context().columns
    if records := sorted(name for name, column in given.items() if column.nesting):
        return f"the context of records ({', '.join(records)}) is made of all earlier ones"
    if signals := sorted(name for name, column in given.items() if len(column.shape) > 1):
        return f"the context of signals ({', '.join(signals)}) is made of their spectrograms"
    return None


def stream_of(schema: InputSchema) -> tuple[PatientState, list[str]]:
    """How the context of a model is made of samples that come one by one, and the columns that it is made of."""
    given = schema.without_context().columns
    names = [name for name, column in given.items() if getattr(torch, column.dtype).is_floating_point]
    width = sum(math.prod(given[name].shape) for name in names)
    return PatientState(ContextOptions.from_json(cast("ParsedJson", schema.settings["context"])), width), names


def unsupported(dataset: DomainDataset, mode: str = "offline") -> str | None:
    """The reason why no context of a mode can be made for a dataset; ``None`` if it can."""
    if has_records(dataset):
        if mode == "causal":
            return None
        return (
            "of visits and stays only earlier ones can be context, later ones tell what became of the patient: causal"
        )
    signals = len(_columns(dataset, 3, 4))
    if signals > 1:
        return f"it is made for one column of signals, and there are {signals}"
    if not signals and not _columns(dataset, 1, 2):
        return f"it is made of measurements or signals, and {sorted(dataset.columns)} are neither"
    return None


def has_records(dataset: DomainDataset) -> bool:
    """Whether samples are visits or stays, with lists of codes and events."""
    return any(isinstance(column, Ragged) for column in dataset.columns.values())


def has_signals(dataset: DomainDataset) -> bool:
    """Whether the context of a dataset is made of spectrograms."""
    return any(column.ndim == 3 for column in _columns(dataset, 3, 4))


def _columns(dataset: DomainDataset, fewest: int, most: int) -> list[Tensor]:
    """The dense columns of real numbers whose number of dimensions, rows included, is in a range."""
    dense = [column for column in dataset.columns.values() if isinstance(column, Tensor)]
    return [column for column in dense if column.is_floating_point() and fewest <= column.ndim <= most]


def _of_tables(values: Tensor, timeline: Timeline, options: ContextOptions, strength: float) -> Tensor:
    """Context of measurements; on the CPU by NumPy, so that it is bit for bit that of ``PatientContext``."""
    given: Any = values
    if values.device.type == "cpu":
        arrays = {field.name: getattr(timeline, field.name).numpy() for field in dataclasses.fields(Timeline)}
        given, timeline = values.numpy(), Timeline(**arrays)
    return torch.as_tensor(assemble(given, timeline, options, strength))


def record_context(dataset: DomainDataset, timeline: Timeline, strength: float) -> Tensor:
    """What a patient's earlier visits or stays were like, float32 ``(rows, n)`` in the order of the dataset.

    For each column of codes a sample is summed up by how often each code occurs, hashed to a fixed number of positions
    with a sign (Weinberger et al., "Feature Hashing", ICML 2009), and by the logarithm of how many there are. The
    context is the mean of these over strictly earlier samples, times the weight of the patient's statistics, and how
    many samples are earlier: the logarithm, and whether there is one, are two, ... at least. Without any it is 0.
    """
    columns = [dataset.columns[name] for name in sorted(dataset.columns)]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    own = torch.cat([_hashed(column) for column in ragged if not unnest(column)[1].is_floating_point()], dim=1)
    own = own[timeline.order].to(torch.float64)
    count = (timeline.before - timeline.patient + 1).clamp_min(0).to(torch.float64).unsqueeze(-1)
    mean = timeline.earlier(running(own, timeline.patient), timeline.patient) / count.clamp_min(1.0)
    at_least = count >= torch.arange(1, _COUNTED + 1, device=own.device)
    context = torch.empty(len(own), own.shape[1] + 1 + _COUNTED, device=own.device)
    made = torch.cat([count / (count + strength) * mean, count.log1p(), at_least], dim=1)
    context[timeline.order] = made.to(torch.float32)
    return context


def _hashed(column: Ragged) -> Tensor:
    """The codes of each row, ``(rows, buckets + 1)``."""
    levels, codes = unnest(column)
    bounds = levels[0]
    for offsets in levels[1:]:
        bounds = offsets[bounds]
    lengths = torch.diff(bounds)
    # A multiplicative hash: its upper bits choose the position, a lower one the sign.
    mixed = (codes.flatten().to(torch.int64) + 1) * 0x9E3779B1 & 0xFFFFFFFF
    position, sign = (mixed >> 16) % _BUCKETS, ((mixed >> 12) & 1) * 2.0 - 1.0
    row = torch.repeat_interleave(torch.arange(len(lengths), device=codes.device), lengths)
    counts = torch.zeros(len(lengths) * _BUCKETS, device=codes.device).index_add_(0, row * _BUCKETS + position, sign)
    shares = counts.reshape(-1, _BUCKETS) / lengths.clamp_min(1).sqrt().unsqueeze(-1)
    return torch.cat([shares, lengths.to(torch.float32).log1p().unsqueeze(-1)], dim=1)


def spectral_context(
    signal: Tensor, timeline: Timeline, mode: str, strength: float, spectrum: Spectrum
) -> dict[str, Tensor]:
    """Mean and scale of the patient's log spectrogram per channel and frequency, and their weight.

    - ``signal``: Tensor ``(rows, channels, samples)``, or spectrograms ``(rows, channels, frequencies, frames)``
    - ``spectrum``: From signals to log spectrograms.
    - returns: ``context_mean`` and ``context_scale`` ``(rows, channels, frequencies)``, the latter one over the
      standard deviation, and ``context_weight`` ``(rows, 1)``; all are 0 where nothing is known.
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


def add_order(dataset: DomainDataset, options: SequenceOptions, training: Tensor | None = None) -> DomainDataset:
    """The dataset with two more columns, by which a network can read each session's samples in the order of time.

    ``context_order`` numbers the samples: the next sample of the same session has the next number, and between two
    sessions a number is left out, so that two rows belong together where their numbers follow one another. Samples of
    the same time are in the order of the dataset. ``context_pause`` is the logarithm of the time since the session's
    last sample, in units of the usual pause; 0 for the first.

    - ``dataset``: With times.
    - ``training``: Rows of the training patients, whose median pause is the usual one where the options give none; by
      default all.
    """
    if dataset.times is None:
        raise DataError(
            "a sequence model needs the time of every sample, and the dataset has none: prepare it with times (--time)"
        )
    whole = dataset.compact()
    gap = options.gap if options.gap is not None else dataset.info.session_gap
    timeline = Timeline.of(whole.domains, whole.times, gap)
    position = torch.arange(len(timeline), device=whole.device)
    first = timeline.session == position
    since = torch.where(first, 0.0, torch.diff(timeline.times, prepend=timeline.times[:1]))
    within = ~first
    if training is not None:
        known = torch.zeros_like(first)
        known[training.to(whole.device)] = True
        within &= known[timeline.order]
    usual = options.pause
    if usual is None:
        usual = float(since[within].median()) if bool(within.any()) else 1.0
    order, pause = torch.empty_like(position), torch.empty(len(timeline), 1, device=whole.device)
    order[timeline.order] = position + torch.cumsum(first, 0)
    relative = (since / (usual if usual > 0 else 1.0)).log1p().clamp_max(_LONGEST_PAUSE)
    pause[timeline.order] = relative.to(torch.float32).unsqueeze(1)
    chosen = dataclasses.replace(options, gap=gap, pause=usual)
    info = dataclasses.replace(whole.info, settings={**whole.info.settings, "sequence": chosen.to_json()})
    return dataclasses.replace(
        whole, columns={**whole.columns, ORDER: order, PAUSE: pause}, info=info, stored_hash=None
    )
