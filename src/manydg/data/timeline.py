"""Each patient's samples in the order of time, and running sums over them without a loop over patients.

Running sums are made by doubling: first of two neighbouring rows, then of four, eight and so on, never across the
border of a segment (a patient or a session). So nothing of another patient enters a sum, not even a rounding error,
nothing later enters an earlier one, and sums over the last 1, 2, 4, 8, ... rows are by-products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.data.dataset import CONTEXT, DomainDataset
from manydg.errors import ConfigError, DataError, unknown_name
from manydg.files import Json, ParsedJson

ORDER, PAUSE = f"{CONTEXT}_order", f"{CONTEXT}_pause"
"""The columns that :func:`add_order` adds."""
DIRECTIONS = ("offline", "causal")
SEQUENCES = {"gru": 1, "transformer": 2, "conv": 7}
"""The networks that read a session's samples in order, and how many layers they have by default."""
MOST = 10_000.0
_LONGEST_PAUSE = 10.0
_SIZES = {"crop": (2, 1 << 20), "width": (1, 1 << 14), "layers": (1, 32)}
_ROWS = 500_000
_COLUMNS_AT_ONCE = 16

Combine = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Rows sorted by patient, then time, then position in the dataset. All attributes are in sorted order.

    Attributes
    ----------
    order : Tensor ``(rows,)``
        The dataset's row at each position.
    times : Tensor ``(rows,)`` float64
        Zeros where the dataset has none.
    patient, session : Tensor ``(rows,)``
        Position of the first row of the patient, and of the session (samples without a long gap).
    last, session_last : Tensor ``(rows,)``
        Position of the last row of the patient and of the session.
    before, after : Tensor ``(rows,)``
        Position of the last row that is strictly earlier, and of the first strictly later; outside the patient or the
        session where there is none. Samples of the same time are neither before nor after one another.
    """

    order: Tensor
    times: Tensor
    patient: Tensor
    last: Tensor
    session: Tensor
    session_last: Tensor
    before: Tensor
    after: Tensor

    @staticmethod
    def of(domains: Tensor, times: Tensor | None, gap: float | None) -> Timeline:
        """Sort samples; a pause longer than ``gap`` begins a new session."""
        clock = torch.zeros_like(domains, dtype=torch.float64) if times is None else times.to(torch.float64)
        by_time = torch.argsort(clock, stable=True)
        order = by_time[torch.argsort(domains[by_time], stable=True)]
        who, clock = domains[order], clock[order]
        pause = torch.diff(clock)
        new_patient = _begins(who[1:] != who[:-1])
        new_session = new_patient if gap is None else new_patient | _begins(pause > gap)
        new_time = new_patient | _begins(pause > 0)
        patient, last = _bounds(new_patient)
        session, session_last = _bounds(new_session)
        first_of_time, last_of_time = _bounds(new_time)
        return Timeline(order, clock, patient, last, session, session_last, first_of_time - 1, last_of_time + 1)

    def __len__(self) -> int:
        return len(self.order)

    def trust(self, mode: str, strength: float) -> Tensor:
        """``m / (m + strength)`` for ``m`` other samples in the context, ``(rows, 1)`` in the order of the dataset."""
        others = self.last - self.patient if mode == "offline" else self.before - self.patient + 1
        weight = torch.empty(len(self), 1, device=self.order.device)
        weight[self.order] = (others / (others + strength)).to(torch.float32).unsqueeze(1)
        return weight

    def reversed(self) -> Timeline:
        """The same rows from the last to the first, for what comes after a sample."""
        end = len(self) - 1
        flip = {
            "patient": end - self.last.flip(0),
            "last": end - self.patient.flip(0),
            "session": end - self.session_last.flip(0),
            "session_last": end - self.session.flip(0),
            "before": end - self.after.flip(0),
            "after": end - self.before.flip(0),
        }
        return Timeline(self.order.flip(0), -self.times.flip(0), **flip)

    def earlier(self, running: Tensor, start: Tensor, nothing: float = 0.0) -> Tensor:
        """A running quantity ``(rows, n)`` as of the last strictly earlier row from ``start`` on."""
        previous = running[self.before.clamp_min(0)]
        return torch.where((self.before >= start).unsqueeze(-1), previous, nothing)


def _begins(differs: Tensor) -> Tensor:
    """Where a segment begins: at the first row, and where a row differs from the one before."""
    return torch.cat([differs.new_ones(1), differs])


def _bounds(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the first and the last row of each row's segment."""
    starts = torch.nonzero(begins).squeeze(1)
    segment = torch.cumsum(begins, 0) - 1
    ends = torch.cat([starts[1:], starts.new_tensor([len(begins)])]) - 1
    return starts[segment], ends[segment]


def running(values: Tensor, start: Tensor, combine: Combine = torch.add) -> Tensor:
    """Combination of each row ``(rows, n)`` with all rows before it from ``start`` on, itself included.

    Parameters
    ----------
    values : Tensor ``(rows, n)``
    start : Tensor ``(rows,)``
        Position of the first row of each row's segment.
    """
    rank, step, current = _rank_in_segment(start), 1, values
    longest = int(rank.max()) + 1 if len(values) else 0
    while step < longest:
        current, step = _double(current, rank, step, combine), 2 * step
    return current


def windows(values: Tensor, start: Tensor, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """Sums of the last rows of each row's segment, itself included, by the number of rows; sizes are powers of two."""
    rank, step, current, kept = _rank_in_segment(start), 1, values, {}
    while True:
        if step in sizes:
            kept[step] = current
        if step >= max(sizes, default=0):
            return kept
        current, step = _double(current, rank, step, torch.add), 2 * step


def _rank_in_segment(start: Tensor) -> Tensor:
    return torch.arange(len(start), device=start.device) - start


def _double(current: Tensor, rank: Tensor, step: int, combine: Combine) -> Tensor:
    """From combinations over the last ``step`` rows to those over the last ``2 * step``."""
    reaches = (rank[step:] >= step).unsqueeze(-1)
    joined = torch.where(reaches, combine(current[step:], current[:-step]), current[step:])
    return torch.cat([current[:step], joined])


@dataclass(frozen=True)
class SequenceOptions:
    """How a patient's samples are read in order.

    Parameters
    ----------
    kind : {"gru", "transformer", "conv"}
        The network that reads the samples of a session: gated recurrent units; attention to neighbours by content and
        distance; or dilated convolutions.
    direction : {"offline", "causal"}
        Whether the output of a sample draws on the whole session, or on the samples up to it.
    crop : int
        Consecutive samples that training reads at a time, about; predictions read whole sessions.
    width : int
        Values of a layer, for each direction.
    layers : int
        By default 1 for ``gru``, 2 for ``transformer`` and 7 for ``conv``.
    dropout : float
        Between layers, and before the output.
    gap : float, optional
        A pause longer than this begins a new session, which is read anew. By default the dataset's setting
        ``session_gap``; without one, all samples of a patient are one session.
    pause : float, optional
        The usual time from one sample to the next, by default the median of the training patients.
    """

    kind: str = "gru"
    direction: str = "offline"
    crop: int = 128
    width: int = 128
    layers: int = 1
    dropout: float = 0.3
    gap: float | None = None
    pause: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("kind", tuple(SEQUENCES)), ("direction", DIRECTIONS)):
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

    @staticmethod
    def from_mapping(kind: str, given: ParsedJson) -> SequenceOptions:
        """Options by name, as a configuration has them."""
        names = {field.name for field in dataclasses.fields(SequenceOptions)} - {"kind"}
        for name in given:
            if name not in names:
                raise unknown_name("option of sequence", name, names)
        return SequenceOptions(kind, **{"layers": SEQUENCES.get(kind, 1), **given})

    @staticmethod
    def from_json(value: ParsedJson) -> SequenceOptions:
        return SequenceOptions.from_mapping(value["kind"], {name: v for name, v in value.items() if name != "kind"})

    def to_json(self) -> dict[str, Json]:
        return dataclasses.asdict(self)


def add_order(dataset: DomainDataset, options: SequenceOptions, training: Tensor | None = None) -> DomainDataset:
    """The dataset with two more columns, by which a network can read each session's samples in the order of time.

    ``context_order`` numbers the samples: the next sample of the same session has the next number, and between two
    sessions a number is left out, so that two rows belong together where their numbers follow one another. Samples of
    the same time are in the order of the dataset. ``context_pause`` is the logarithm of the time since the session's
    last sample, in units of the usual pause; 0 for the first.

    Parameters
    ----------
    dataset : DomainDataset
        With times.
    options : SequenceOptions
    training : Tensor, optional
        Rows of the training patients, whose median pause is the usual one where the options give none; by default all.
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


def samples_until_known(values: Tensor, domains: Tensor, times: Tensor | None = None) -> float | None:
    """The number of neighbouring samples whose mean estimates a patient's mean as well as the population's mean does.

    Each patient's samples are cut in time into pieces of 1, 2, 4, 8, ... samples. The error of a piece's mean is its
    squared distance from the patient's mean; the error of the population's mean is the variance of patients' means.
    Where the two are equal, each deserves half of the weight: that is the ``strength`` of
    :class:`manydg.data.context.ContextOptions`. Where neighbouring samples are alike (epochs of one stage of sleep) it
    takes many; where values differ more between patients than within one (most laboratory values), one is enough.

    Parameters
    ----------
    values : Tensor ``(rows, n)``
        NaN is ignored.
    domains, times : Tensor ``(rows,)``

    Returns
    -------
    float or None
        Between 1 and 10,000, the median over columns; ``None`` where fewer than three patients have two samples.

    Examples
    --------
    >>> who = torch.arange(40).repeat_interleave(64)
    >>> noise = torch.randn(40 * 64, 1, generator=torch.Generator().manual_seed(0))
    >>> samples_until_known(noise + who[:, None], who)
    1.0
    """
    line = Timeline.of(domains, times, None)
    count = line.last - line.patient + 1
    if int(((line.patient == torch.arange(len(line), device=domains.device)) & (count > 1)).sum()) < 3:
        return None
    order = line.order
    pieces = [values[:, start : start + _COLUMNS_AT_ONCE] for start in range(0, values.shape[1], _COLUMNS_AT_ONCE)]
    errors = torch.cat([_errors(piece[order].to(torch.float64), line, count) for piece in pieces], dim=1)
    ratios = torch.stack([row.nanmedian() for row in errors]).tolist()
    return min(max(_crossing(ratios), 1.0), MOST)


def rows_of_some_patients(dataset: DomainDataset) -> Tensor:
    """Rows of a subset of the patients, at most about 500,000 rows: enough to estimate a single number from."""
    counts = torch.bincount(dataset.domains, minlength=dataset.n_patients)
    every = max(1, math.ceil(len(dataset) / _ROWS))
    present = torch.nonzero(counts).squeeze(1)
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    chosen[present[::every]] = True
    return torch.nonzero(chosen[dataset.domains]).squeeze(1)


def _errors(values: Tensor, line: Timeline, count: Tensor) -> Tensor:
    """Mean squared error of pieces of 1, 2, 4, ... rows, over the variance of patients' means: ``(sizes, n)``.

    NaN for a column in which all patients have the same mean, or no piece is complete.
    """
    known = ~torch.isnan(values)
    centred = torch.where(known, values - values.nanmean(dim=0), 0.0)
    # Prefix sums over all rows: their differences are the sums over any range of rows.
    sums, seen = (_prefix_sums(each) for each in (centred, known.to(torch.float64)))
    start, last = line.patient, line.last + 1
    mean = (sums[last] - sums[start]) / (seen[last] - seen[start])
    first = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    first[line.patient] = True
    of_patients = mean[first]
    spread = (of_patients - of_patients.nanmean(dim=0)).square().nanmean(dim=0)
    spread = torch.where(spread > 1e-12 * values.square().nanmean(dim=0), spread, torch.nan)
    rank = _rank_in_segment(line.patient)
    errors, size = [], 1
    while 2 * size <= int(count.max()):
        ends = torch.nonzero(((rank + 1) % size == 0) & (count >= 2 * size)).squeeze(1) + 1
        complete = seen[ends] - seen[ends - size] == size
        error = ((sums[ends] - sums[ends - size]) / size - mean[ends - 1]).square()
        errors.append(torch.where(complete, error, torch.nan).nanmean(dim=0) / spread)
        size *= 2
    return torch.stack(errors)


def _prefix_sums(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, 2, ... rows: ``(rows + 1, n)``."""
    return torch.cat([values.new_zeros(1, values.shape[1]), values.cumsum(dim=0)])


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
