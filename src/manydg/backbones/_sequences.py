"""Sequences: their layout, and networks that read a patient's samples in order.

A layout is a flat list of steps, run through recurrent networks or laid out in padded rectangles. Nothing here lets one
sequence influence another's output. A :class:`FixedLayout` has a fixed shape and never waits for the device, so that a
training step on it may be captured. :class:`SequenceBackbone` is any backbone with a network on top that reads the
samples of a session in the order of time; :class:`Chain` reads what a model made of them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from manydg.backbones import Backbone, Inputs
from manydg.data.columns import Column, Ragged, offsets_from_lengths, take
from manydg.data.dataset import DomainDataset
from manydg.data.timeline import CHAIN, ORDER, PAUSE, SequenceOptions
from manydg.errors import ConfigError
from manydg.targets import Target

_SHORT = 16
_ROWS_AT_ONCE = 4096
_HEADS, _REACH = 4, 64
_MOST_PADDING = 4
"""A rectangle may be this many times as large as what it holds."""
LEAST_PROBABILITY = 1e-6
EMISSIONS, PRIORS, SHARPNESSES = (0.3, 0.5, 1.0), (0.0, 0.3, 0.6), (0.2, 0.3, 0.5, 0.7, 1.0)
_MOST_PAUSES = 10
"""A longer pause, in usual ones, begins the chain anew."""
_FOLDS = 5

Array = npt.NDArray[np.float64]


class Layout:
    """How a flat list of steps is divided into rows.

    The rows' lengths are asked of the device once; everything else follows from them without waiting for it.

    - ``offsets`` ``(rows + 1,)``: Where each row's steps begin in the flat list.
    - ``host_lengths``: Number of steps of each row, where it is known already.
    - ``lengths`` ``(rows,)``
    - ``longest``: At least 1.
    - ``row``, ``position`` ``(steps,)``: Row of each step and its position there, from 0.
    """

    def __init__(self, offsets: Tensor, host_lengths: list[int] | None = None) -> None:
        self.offsets, self.lengths = offsets, offsets[1:] - offsets[:-1]
        self.host_lengths: list[int] = self.lengths.tolist() if host_lengths is None else host_lengths
        self.rows, self.steps = len(self.host_lengths), sum(self.host_lengths)
        self.longest = max(1, *self.host_lengths) if self.rows else 1
        flat = torch.arange(self.steps, device=offsets.device)
        self.row = Ragged(flat, offsets).row_of_item()
        self.position = flat - offsets[self.row]

    @cached_property
    def present(self) -> Tensor:
        """Where a rectangle has a step, bool ``(rows, longest)``."""
        return torch.arange(self.longest, device=self.offsets.device) < self.lengths.unsqueeze(-1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Flat vectors ``(steps, width)`` in a rectangle ``(rows, longest, width)``: rows from the left, then zeros."""
        empty = vectors.new_zeros(self.rows * self.longest, vectors.shape[-1])
        filled = empty.index_copy_(0, self.row * self.longest + self.position, vectors)
        return filled.reshape(self.rows, self.longest, -1)

    def softmax(self, scores: Tensor) -> Tensor:
        """Weights of steps from their scores, ``(steps,)``, adding up to 1 in each row."""
        rectangle = self.spread(scores.unsqueeze(-1)).squeeze(-1)
        weights = rectangle.masked_fill(~self.present, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return weights[self.row, self.position]

    def total(self, vectors: Tensor) -> Tensor:
        """Sum of each row's vectors, ``(rows, width)``."""
        return vectors.new_zeros(self.rows, vectors.shape[-1]).index_add_(0, self.row, vectors)

    def last(self, vectors: Tensor) -> Tensor:
        """The vector of each row's last step, ``(rows, width)``; zero for a row without steps."""
        if self.steps == 0:
            return vectors.new_zeros(self.rows, vectors.shape[-1])
        last = vectors.index_select(0, (self.offsets[1:] - 1).clamp_min(0))
        return torch.where((self.lengths > 0).unsqueeze(-1), last, 0.0)

    def run(self, network: nn.GRU, vectors: Tensor) -> Tensor:
        """States of a recurrent network after each step, ``(steps, hidden)``; of both directions side by side.

        A GPU reads a rectangle about six times as fast as a packed sequence, which has no padded step.
        """
        if vectors.is_cuda and 0 < self.rows * self.longest <= _MOST_PADDING * self.steps:
            return self.run_padded(network, vectors)
        return self._run(network, vectors, self.position)

    def run_padded(self, network: nn.GRU, vectors: Tensor) -> Tensor:
        """The same in rectangles, one layer and direction after the other."""
        backwards = self.lengths[self.row] - 1 - self.position
        times = {"": self.position, "_reverse": backwards} if network.bidirectional else {"": self.position}
        for layer in range(network.num_layers):
            if layer:
                vectors = functional.dropout(vectors, network.dropout, network.training)
            states = [self._read(network, f"_l{layer}{name}", vectors, time) for name, time in times.items()]
            vectors = torch.cat(states, dim=-1)
        return vectors

    def _read(self, network: nn.GRU, part: str, vectors: Tensor, time: Tensor) -> Tensor:
        """States of one layer in one direction; padding comes after a row's last step and reaches none of its own."""
        cells = self.row * self.longest + time
        empty = vectors.new_zeros(self.rows * self.longest, vectors.shape[-1])
        rectangle = empty.index_copy_(0, cells, vectors).reshape(self.rows, self.longest, -1)
        weights = [getattr(network, name + part) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        start = vectors.new_zeros(1, self.rows, network.hidden_size)
        with warnings.catch_warnings():
            # The weights of one direction are copied together at every call, which takes no time to speak of.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            states, _ = torch.gru(rectangle, start, weights, True, 1, 0.0, network.training, False, True)
        flat: Tensor = states.flatten(0, 1).index_select(0, cells)
        return flat

    def run_backwards(self, network: nn.GRU, vectors: Tensor) -> Tensor:
        """The same, read from each row's last step to its first."""
        return self._run(network, vectors, self.lengths[self.row] - 1 - self.position)

    def _run(self, network: nn.GRU, vectors: Tensor, time: Tensor) -> Tensor:
        if self.steps == 0:
            return vectors.new_zeros(0, network.hidden_size)
        start, rank, sizes = self._time_table
        packed = start[time] + rank[self.row]
        states, _ = network(PackedSequence(torch.empty_like(vectors).index_copy_(0, packed, vectors), sizes))
        flat: Tensor = states.data.index_select(0, packed)
        return flat

    @cached_property
    def _time_table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of a packed sequence: where each time begins, the rank of each row, and the rows at each time."""
        lengths = np.array(self.host_lengths, dtype=np.int64)
        rank = np.empty(self.rows, dtype=np.int64)
        rank[np.argsort(-lengths, kind="stable")] = np.arange(self.rows)
        sizes = self.rows - np.cumsum(np.bincount(lengths, minlength=self.longest))[: self.longest]
        start = np.cumsum(sizes) - sizes
        device = self.offsets.device
        return torch.from_numpy(start).to(device), torch.from_numpy(rank).to(device), torch.from_numpy(sizes)


@dataclass(frozen=True)
class Group:
    """Rows of similar length, cut out of a flat list in which rows are ordered by length.

    - ``steps``: The group's steps in that list.
    """

    steps: slice
    layout: Layout


@dataclass(frozen=True)
class ByLength:
    """Rows in the order of their lengths, in groups, so that no short row is padded to a long one's length.

    - ``steps`` ``(steps,)``: The steps of the rows in that order, as positions in the flat list.
    - ``back`` ``(rows,)``: Where each row went.
    """

    steps: Tensor
    back: Tensor
    groups: list[Group]

    @staticmethod
    def of(layout: Layout) -> ByLength:
        """The longest first; none in a group is shorter than two thirds of its longest, unless all are short."""
        lengths = np.array(layout.host_lengths, dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        ordered = lengths[order]
        device = layout.offsets.device
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        steps = Ragged(torch.arange(layout.steps, device=device), layout.offsets).take(
            torch.from_numpy(order).to(device)
        )
        groups, row, first_step = [], 0, 0
        while row < len(ordered):
            limit = 0 if ordered[row] <= _SHORT else 2 * ordered[row] // 3
            stop = int(np.searchsorted(-ordered, -limit, side="right" if limit == 0 else "left"))
            own = ordered[row:stop].tolist()
            offsets = steps.offsets[row : stop + 1] - steps.offsets[row]
            groups.append(Group(slice(first_step, first_step + sum(own)), Layout(offsets, own)))
            row, first_step = stop, first_step + sum(own)
        assert isinstance(steps.values, Tensor)
        return ByLength(steps.values, torch.from_numpy(back).to(device), groups)


def last_steps(offsets: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Positions in the flat list of each row's last steps, at most ``limit``, and their offsets."""
    lengths = (offsets[1:] - offsets[:-1]).clamp_max(limit)
    kept = offsets_from_lengths(lengths)
    total = int(kept[-1])
    shift = torch.repeat_interleave(offsets[1:] - kept[1:], lengths, output_size=total)
    return torch.arange(total, device=offsets.device) + shift, kept


class FixedLayout(Layout):
    """How a flat list of steps is divided into rows, where the list has leftovers after the last row.

    Leftover steps are in no rectangle and no sum, so that they influence nothing and get no gradient.

    - ``offsets``: Tensor ``(rows + 1,)``
    - ``longest``: No row has more steps.
    - ``steps``: Length of the flat list.
    """

    def __init__(self, offsets: Tensor, longest: int, steps: int) -> None:
        self.offsets, self.lengths = offsets, offsets[1:] - offsets[:-1]
        self.rows, self.longest, self.steps = offsets.shape[0] - 1, max(1, longest), steps
        flat = torch.arange(steps, device=offsets.device)
        # Leftovers are in a row of their own after the others.
        self._any_row = torch.searchsorted(offsets[1:], flat, right=True)
        self.row = self._any_row.clamp_max(self.rows - 1)
        self.position = (flat - offsets[self._any_row]).clamp_max(self.longest - 1)

    def spread(self, vectors: Tensor) -> Tensor:
        return self._lay_out(vectors, self._cells)

    def total(self, vectors: Tensor) -> Tensor:
        sums = vectors.new_zeros(self.rows + 1, vectors.shape[-1])
        return sums.index_add_(0, self._any_row, vectors)[: self.rows]

    def run(self, network: nn.GRU, vectors: Tensor) -> Tensor:
        return self._run_over(network, vectors, self._cells)

    def run_backwards(self, network: nn.GRU, vectors: Tensor) -> Tensor:
        time = (self.lengths[self.row] - 1 - self.position).clamp_min(0)
        return self._run_over(network, vectors, self._any_row * self.longest + time)

    @cached_property
    def _cells(self) -> Tensor:
        """Where each step is in a rectangle of one row more, ``(steps,)``."""
        return self._any_row * self.longest + self.position

    def _run_over(self, network: nn.GRU, vectors: Tensor, cells: Tensor) -> Tensor:
        # Padding comes after a row's last step, so that its states reach none of the row's own.
        states, _ = network(self._lay_out(vectors, cells))
        flat: Tensor = states.flatten(0, 1).index_select(0, cells.clamp_max(self.rows * self.longest - 1))
        return flat

    def _lay_out(self, vectors: Tensor, cells: Tensor) -> Tensor:
        empty = vectors.new_zeros((self.rows + 1) * self.longest, vectors.shape[-1])
        filled = empty.index_copy_(0, cells, vectors)
        return filled[: self.rows * self.longest].reshape(self.rows, self.longest, -1)


def layout_of(column: Ragged, host_lengths: list[int] | None = None) -> Layout:
    """The layout of a column's items, fixed where the column is.

    - ``host_lengths``: Number of items of each row, where it is known already.
    """
    if column.longest is not None:
        return FixedLayout(column.offsets, column.longest, len(column.values))
    return Layout(column.offsets, host_lengths)


class SequenceBackbone(Backbone):
    """Features of each sample from any backbone, then a network that reads those of a session in the order of time.

    Rows of a batch whose numbers in the column ``context_order`` follow one another are one sequence; every other row
    begins a new one. Nothing passes from one sequence to another.

    - ``backbone``: Sees each sample alone, or with its patient's context.
    """

    def __init__(self, backbone: Backbone, options: SequenceOptions) -> None:
        super().__init__()
        self.samples, self.options = backbone, options
        self.crop = None if options.kind == CHAIN else options.crop
        self.reader = READERS[options.kind](backbone.output_size + 1, options)
        self.fixed_shapes = backbone.fixed_shapes and self.reader.fixed_shapes
        self.takes_padded = backbone.takes_padded
        self.output_size = self.reader.output_size
        self.with_context = backbone.with_context
        if hasattr(backbone, "spectrogram"):
            self.spectrogram = backbone.spectrogram

    def forward(self, inputs: Inputs) -> Tensor:
        order, pause = (inputs[name] for name in (ORDER, PAUSE))
        assert isinstance(order, Tensor)
        assert isinstance(pause, Tensor)
        features = torch.cat([self._features(without_order(inputs)), pause], dim=1)
        states: Tensor = self.reader(features, order)
        return states

    def _features(self, inputs: Inputs) -> Tensor:
        """Features of each sample; of a long session some samples at a time, where no gradient is needed."""
        rows = len(next(iter(inputs.values())))
        if self.training or rows <= _ROWS_AT_ONCE:
            return self.samples(inputs)
        device = next(iter(self.parameters())).device
        pieces = torch.split(torch.arange(rows, device=device), _ROWS_AT_ONCE)
        return torch.cat([self.samples({n: take(column, piece) for n, column in inputs.items()}) for piece in pieces])

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.samples.fit_inputs(dataset)

    def for_samples_alone(self) -> Backbone:
        """The same kind of network; without the columns of the context, each of its sequences is one sample."""
        return SequenceBackbone(self.samples.for_samples_alone(), self.options)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        return self.samples.precompute(dataset, device, budget)


def without_order(inputs: Inputs) -> dict[str, Column]:
    """The inputs of the samples, without what tells their order."""
    return {name: column for name, column in inputs.items() if name not in (ORDER, PAUSE)}


def sequences_in(order: Tensor) -> Layout:
    """How the rows of a batch are divided into sequences, by their numbers ``(rows,)``.

    Examples
    --------
    >>> sequences_in(torch.tensor([4, 5, 6, 9, 10, 2])).host_lengths
    [3, 2, 1]
    """
    begins = torch.cat([order.new_zeros(1), torch.nonzero(torch.diff(order) != 1).squeeze(1) + 1])
    return Layout(torch.cat([begins[: len(order)], begins.new_tensor([len(order)])]))


@dataclass(frozen=True)
class Steps:
    """Where each row of a batch is in its sequence, computed without waiting for the device.

    - ``sequence``, ``before``, ``after`` ``(rows,)``: Number of its sequence, and how many rows of it lie before and
      after.
    """

    sequence: Tensor
    before: Tensor
    after: Tensor

    @staticmethod
    def of(order: Tensor) -> Steps:
        """By the numbers of the rows.

        Examples
        --------
        >>> steps = Steps.of(torch.tensor([4, 5, 6, 9, 10, 2]))
        >>> steps.sequence.tolist(), steps.before.tolist(), steps.after.tolist()
        ([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0], [2, 1, 0, 1, 0, 0])
        """
        rows = torch.arange(len(order), device=order.device)
        border = torch.diff(order) != 1
        edge = border.new_ones(min(1, len(order)))
        begins, ends = torch.cat([edge, border]), torch.cat([border, edge])
        start = torch.cummax(torch.where(begins, rows, 0), 0).values
        stop = torch.cummin(torch.where(ends, rows, len(order)).flip(0), 0).values.flip(0)
        return Steps(torch.cumsum(begins, 0) - 1, rows - start, stop - rows)


class GRUReader(nn.Module):
    """A gated recurrent network: forwards, and for offline reading backwards too."""

    fixed_shapes = False

    def __init__(self, width: int, options: SequenceOptions) -> None:
        super().__init__()
        both = options.direction == "offline"
        between = options.dropout if options.layers > 1 else 0.0
        self.network = nn.GRU(width, options.width, options.layers, bidirectional=both, dropout=between)
        self.dropout = nn.Dropout(options.dropout)
        self.output_size = options.width * (2 if both else 1)

    def forward(self, vectors: Tensor, order: Tensor) -> Tensor:
        """States ``(rows, output_size)`` after the vectors ``(rows, width)`` of each sequence."""
        states: Tensor = self.dropout(sequences_in(order).run(self.network, vectors))
        return states


class ConvReader(nn.Module):
    """Residual layers that each see a sample and two others, 1, 2, 4, ... samples away.

    Offline one lies before and one after; causally both lie before. With 7 layers an output draws on 127 samples to
    each side, or on the 254 before. Beyond the ends of a session lie zeros.
    """

    fixed_shapes = True

    def __init__(self, width: int, options: SequenceOptions) -> None:
        super().__init__()
        self.causal, size = options.direction == "causal", options.width
        self.start = nn.Linear(width, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(options.layers))
        self.layers = nn.ModuleList(nn.Linear(3 * size, size) for _ in range(options.layers))
        self.dropout = nn.Dropout(options.dropout)
        self.end = nn.LayerNorm(size)
        self.output_size = size

    def forward(self, vectors: Tensor, order: Tensor) -> Tensor:
        """Features ``(rows, output_size)`` of the vectors ``(rows, width)`` of each sequence."""
        states: Tensor = self.start(vectors)
        steps = Steps.of(order)
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            shifts = (-2, -1, 0) if self.causal else (-1, 0, 1)
            normal = norm(states)
            seen = torch.cat([shifted(normal, steps, shift * 2**number) for shift in shifts], dim=1)
            states = states + self.dropout(functional.elu(layer(seen)))
        features: Tensor = functional.elu(self.end(states))
        return features


def shifted(vectors: Tensor, steps: Steps, by: int) -> Tensor:
    """The vector that lies so many steps after each step of its sequence (before it, where negative), or zero."""
    if by == 0:
        return vectors
    far = min(abs(by), len(vectors))
    if by < 0:
        moved, inside = functional.pad(vectors, (0, 0, far, 0))[: len(vectors)], steps.before >= -by
    else:
        moved, inside = functional.pad(vectors, (0, 0, 0, far))[far:], steps.after >= by
    # Not a product: what is not finite in another session would make it NaN.
    return torch.where(inside.unsqueeze(-1), moved, 0.0)


class TransformerReader(nn.Module):
    """Attention of each sample to those up to 64 before and after it, by content and by distance.

    Each layer reaches 64 samples further. What a distance is worth is learnt for each head (relative positions), so
    that sessions may have any length.
    """

    fixed_shapes = True

    def __init__(self, width: int, options: SequenceOptions) -> None:
        super().__init__()
        size, causal = options.width, options.direction == "causal"
        if size % _HEADS:
            raise ConfigError(f"the width of a sequence is {size}; for a transformer it must be a multiple of {_HEADS}")
        self.start = nn.Linear(width, size)
        self.layers = nn.ModuleList(_LocalAttention(size, options.dropout, causal) for _ in range(options.layers))
        self.end = nn.LayerNorm(size)
        self.output_size = size

    def forward(self, vectors: Tensor, order: Tensor) -> Tensor:
        """Features ``(rows, output_size)`` of the vectors ``(rows, width)`` of each sequence."""
        states: Tensor = self.start(vectors)
        sequence = Steps.of(order).sequence
        for layer in self.layers:
            states = layer(states, sequence)
        features: Tensor = functional.elu(self.end(states))
        return features


class _LocalAttention(nn.Module):
    """One layer of a Transformer on a flat list of steps, in blocks that each see their two neighbours."""

    def __init__(self, size: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.queries, self.keys_and_values = nn.Linear(size, size), nn.Linear(size, 2 * size)
        self.mixed = nn.Linear(size, size)
        self.by_distance = nn.Parameter(torch.zeros(_HEADS, 2 * _REACH + 1))
        self.perceptron = nn.Sequential(nn.Linear(size, 2 * size), nn.ELU(), nn.Linear(2 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, sequence: Tensor) -> Tensor:
        steps, size = states.shape
        blocks = max(1, -(-steps // _REACH))
        normal = functional.pad(self.first(states), (0, 0, 0, blocks * _REACH - steps))
        queries = self.queries(normal).reshape(blocks, _REACH, _HEADS, -1).transpose(1, 2)
        # What is not finite would reach the others in spite of a weight of 0.
        known = self.keys_and_values(normal).nan_to_num(0.0, 0.0, 0.0)
        around = functional.pad(known, (0, 0, _REACH, _REACH)).unfold(0, 3 * _REACH, _REACH)
        keys, values = around.reshape(blocks, 2, _HEADS, -1, 3 * _REACH).transpose(-1, -2).unbind(dim=1)
        read = functional.scaled_dot_product_attention(queries, keys, values, self._weights(sequence, blocks))
        read = read.transpose(1, 2).reshape(-1, size)[:steps]
        states = states + self.dropout(self.mixed(read))
        result: Tensor = states + self.dropout(self.perceptron(self.second(states)))
        return result

    def _weights(self, sequence: Tensor, blocks: int) -> Tensor:
        """What is added to the scores ``(blocks, heads, 64, 192)``: by distance, and nothing of other sequences."""
        device = sequence.device
        here = torch.arange(_REACH, device=device)
        distance = torch.arange(-_REACH, 2 * _REACH, device=device) - here.unsqueeze(1)
        near = (distance.abs() <= _REACH) & ((distance <= 0) | (not self.causal))
        owner = functional.pad(sequence, (_REACH, blocks * _REACH - len(sequence) + _REACH), value=-1)
        of_keys = owner.unfold(0, 3 * _REACH, _REACH)
        same = of_keys[:, _REACH : 2 * _REACH].unsqueeze(-1) == of_keys.unsqueeze(1)
        bias = self.by_distance[:, (distance + _REACH).clamp(0, 2 * _REACH)]
        return torch.where((same & near).unsqueeze(1), bias, -torch.inf)


class NoReader(nn.Module):
    """Leaves each sample its own features: the order is for what comes after them."""

    fixed_shapes = True

    def __init__(self, width: int, options: SequenceOptions) -> None:
        super().__init__()
        self.output_size = width - 1

    def forward(self, vectors: Tensor, order: Tensor) -> Tensor:
        """The vectors ``(rows, width)`` without the pause."""
        return vectors[:, :-1]


READERS: dict[str, type[GRUReader | ConvReader | TransformerReader | NoReader]] = {
    CHAIN: NoReader,
    "gru": GRUReader,
    "conv": ConvReader,
    "transformer": TransformerReader,
}


# A Markov chain of the classes over samples in time: a hidden Markov model whose evidence is a model's own output
# (Rabiner, "A Tutorial on Hidden Markov Models", 1989). See docs/method.md.


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain of the classes over a patient's samples in time.

    - ``transitions`` ``(K, K)``: Probability of each class one usual pause after each other, of training patients.
    - ``shares`` ``(K,)``: Of the classes, of training patients.
    - ``pause``: Usual time from one sample of a patient to the next.
    - ``emission``, ``prior``, ``sharpness``: What a sample's own logits count for, which part of the classes' usual log
      shares is taken out of them, and the factor of the resulting log probabilities.
    """

    transitions: Array
    shares: Array
    pause: float = 1.0
    emission: float = 0.5
    prior: float = 0.3
    sharpness: float = 0.5

    def read(
        self, sessions: Sequence[Array], pauses: Sequence[Array], labels: Sequence[Array] | None = None, *, causal: bool
    ) -> list[Array]:
        """Log probabilities of the classes by the forward-backward algorithm, or by its first half alone if ``causal``.

        All sessions go through the recursion together, each padded to the longest.

        - ``sessions`` ``(samples, K)``: Logits of each, in the order of time.
        - ``pauses`` ``(samples,)``: Time since the sample before; NaN for the first.
        - ``labels`` ``(samples, K)``: 1 for the class of a sample that is known, all 0 where it is not.
        """
        usual = np.maximum(self.shares, LEAST_PROBABILITY) / np.maximum(self.shares, LEAST_PROBABILITY).sum()
        shape = max(map(len, sessions)), len(sessions), len(usual)
        evidence, counts = np.ones(shape), np.ones(shape[:2], np.int64)
        for column, (logits, since) in enumerate(zip(sessions, pauses, strict=True)):
            own = self.emission * (logits - self.prior * np.log(usual))
            own = np.exp(own - own.max(axis=1, keepdims=True))
            if labels is not None:
                own = np.where(labels[column].any(axis=1, keepdims=True), labels[column], own)
            # A sample without an output says nothing.
            evidence[: len(own), column] = np.where(np.isfinite(own).all(axis=1, keepdims=True), own, 1.0)
            steps = np.rint(since / self.pause)
            # After a long pause, and between samples less than half a usual one apart, nothing is carried over.
            counts[: len(own), column] = np.where((steps >= 1) & (steps <= _MOST_PAUSES), steps, 0)
        powers = [np.linalg.matrix_power(self.transitions, count) for count in range(1, _MOST_PAUSES + 1)]
        moves = np.stack([np.tile(usual, (len(usual), 1)), *powers])
        chance = _forward_backward(evidence, counts, moves, usual, causal=causal)
        whole = np.log(np.maximum(chance / chance.sum(axis=2, keepdims=True), LEAST_PROBABILITY)) * self.sharpness
        return [whole[: len(logits), column] for column, logits in enumerate(sessions)]


def _forward_backward(
    evidence: Array, counts: npt.NDArray[np.int64], moves: Array, start: Array, *, causal: bool
) -> Array:
    """Chances of the classes, not normalised, ``(steps, sessions, K)``.

    - ``counts`` ``(steps, sessions)``: Which of the ``moves`` ``(moves, K, K)`` comes before each step.
    """
    # Mostly all of them have the same pause: one product of matrices.
    alike = np.where((counts == counts[:, :1]).all(axis=1), counts[:, 0], -1)
    chance, belief = np.empty(evidence.shape), np.tile(start, (evidence.shape[1], 1))
    for row in range(len(evidence)):
        moved = belief @ moves[alike[row]] if alike[row] >= 0 else (belief[:, None] @ moves[counts[row]])[:, 0]
        belief = moved * evidence[row]
        belief /= belief.sum(axis=1, keepdims=True)
        chance[row] = belief
    belief = np.ones(evidence.shape[1:])
    for row in range(len(evidence) - 1, 0, -1) if not causal else ():
        belief = belief * evidence[row]
        same = alike[row] >= 0
        belief = belief @ moves[alike[row]].T if same else (moves[counts[row]] @ belief[:, :, None])[:, :, 0]
        belief /= belief.max(axis=1, keepdims=True)
        chance[row - 1] *= belief
    return chance


class ClassChain(nn.Module):
    """A chain as the last part of a model that predicts whole sessions.

    - ``causal``: Whether a sample's output may draw on earlier samples alone.
    """

    transitions: Tensor
    shares: Tensor
    strengths: Tensor

    def __init__(self, chain: Chain, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.register_buffer("transitions", torch.from_numpy(chain.transitions))
        self.register_buffer("shares", torch.from_numpy(chain.shares))
        self.register_buffer("strengths", torch.tensor([chain.emission, chain.prior, chain.sharpness]).double())

    @staticmethod
    def empty(classes: int, *, causal: bool) -> ClassChain:
        """One with the shapes of the numbers in a file."""
        return ClassChain(Chain(np.zeros((classes, classes)), np.zeros(classes)), causal=causal)

    def forward(self, logits: Tensor, order: Column, pause: Column) -> Tensor:
        """Log probabilities ``(rows, K)``; samples whose numbers in ``order`` follow one another are a session."""
        chain = Chain(self.transitions.cpu().numpy(), self.shares.cpu().numpy(), 1.0, *self.strengths.tolist())
        sessions = _Sessions.of(logits, order, pause)
        answer = sessions.joined(chain.read(sessions.logits, sessions.pauses, causal=self.causal))
        # Without an output of its own a sample has none here either.
        finite = torch.isfinite(logits).all(dim=-1, keepdim=True)
        return torch.where(finite, torch.from_numpy(answer).to(logits), torch.nan)


@dataclass(frozen=True, eq=False)
class _Sessions:
    """Logits of samples by session, in the order of time, and the time since the sample before in usual pauses."""

    rows: list[npt.NDArray[np.int64]]
    logits: list[Array]
    pauses: list[Array]

    @staticmethod
    def of(logits: Tensor, order: Column, pause: Column) -> _Sessions:
        assert isinstance(order, Tensor)
        assert isinstance(pause, Tensor)
        numbers = order.cpu().numpy()
        by_time = np.argsort(numbers, kind="stable")
        begins = np.flatnonzero(np.diff(numbers[by_time], prepend=-2) != 1)
        values = logits.detach().log_softmax(dim=-1).double().cpu().numpy()
        since = np.expm1(pause.double().squeeze(-1).cpu().numpy())
        rows = np.split(by_time, begins[1:])
        pauses = [np.concatenate([[np.nan], since[own[1:]]]) for own in rows]
        return _Sessions(rows, [values[own] for own in rows], pauses)

    def joined(self, parts: list[Array]) -> Array:
        """What was worked out by session, in the order of the samples."""
        whole = np.empty((sum(map(len, self.rows)), parts[0].shape[1]))
        whole[np.concatenate(self.rows)] = np.concatenate(parts)
        return whole


@dataclass(frozen=True, eq=False)
class Chained:
    """A chain that helps on validation patients, and what it makes of their outputs, chosen on the other folds."""

    chain: Chain
    out_of_fold: Tensor


def fit_chain(
    target: Target, train: DomainDataset, val: DomainDataset, logits: Tensor, seed: int, *, causal: bool
) -> Chained | None:
    """Choose a chain by the likelihood of validation patients; ``None`` where it does not rise by a standard error.

    - ``train``, ``val``: With the columns of order.
    - ``logits`` ``(samples, K)``: Of the validation patients.
    - ``seed``: Of the folds of patients.
    """
    start = Chain(*_statistics(target, train))
    grid = [replace(start, emission=e, prior=p, sharpness=1.0) for e, p in itertools.product(EMISSIONS, PRIORS)]
    sessions = _Sessions.of(logits, val.column(ORDER), val.column(PAUSE))
    outputs, options = [logits.double().log_softmax(dim=-1)], [start]
    for chain in grid:
        read = torch.from_numpy(sessions.joined(chain.read(sessions.logits, sessions.pauses, causal=causal)))
        outputs += [sharpness * read for sharpness in SHARPNESSES]
        options += [replace(chain, sharpness=sharpness) for sharpness in SHARPNESSES]
    truth = target.truth(val.targets).cpu()
    _, patients = torch.unique(val.domains.cpu(), return_inverse=True)
    losses = torch.stack([_patient_losses(one, truth, patients) for one in outputs])
    fold = torch.from_numpy(np.random.default_rng([seed, 11]).permutation(losses.shape[1]) % _FOLDS)
    chosen = _best(losses)
    if chosen == 0:
        return None
    held = torch.empty_like(outputs[0])
    for number in torch.unique(fold):
        own = (fold == number)[patients]
        held[own] = outputs[_best(losses[:, fold != number])][own]
    return Chained(options[chosen], held)


def _best(losses: Tensor) -> int:
    """The option ``(options, patients)`` with the smallest loss; 0, no chain, where it gains less than its error."""
    if losses.shape[1] < 2:
        return 0
    best = int(losses.mean(dim=1).argmin())
    gains = losses[0] - losses[best]
    return best if float(gains.mean()) > float(gains.std()) / len(gains) ** 0.5 else 0


def _patient_losses(logits: Tensor, truth: Tensor, patients: Tensor) -> Tensor:
    """Mean loss of each patient's samples ``(patients,)``; what is not finite counts for nothing."""
    loss = functional.cross_entropy(logits, truth, reduction="none").nan_to_num(0.0)
    return torch.bincount(patients, loss) / torch.bincount(patients)


def _statistics(target: Target, train: DomainDataset) -> tuple[Array, Array]:
    """How often each class follows each after a usual pause within a session, and the classes' shares."""
    order, pause = (train.column(name) for name in (ORDER, PAUSE))
    assert isinstance(order, Tensor)
    assert isinstance(pause, Tensor)
    by_time = torch.argsort(order)
    usual = (pause.squeeze(-1)[by_time][1:].expm1() - 1).abs() <= 0.5
    classes = target.truth(train.targets)[by_time].cpu().numpy()
    follows = ((torch.diff(order[by_time]) == 1) & usual).cpu().numpy()
    return count_transitions(classes, follows, target.size), np.bincount(classes, minlength=target.size) / len(train)


def count_transitions(classes: npt.NDArray[np.int64], follows: npt.NDArray[np.bool_], size: int) -> Array:
    """How often each class follows each, ``(K, K)``.

    - ``classes`` ``(samples,)``: In the order of time.
    - ``follows`` ``(samples - 1,)``: Whether the next sample counts as following this one.
    """
    # As if each had been seen to follow each a little: nothing is impossible.
    counts = np.full((size, size), 1 / size)
    np.add.at(counts, (classes[:-1][follows], classes[1:][follows]), 1)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))
