"""Event Transformer: attention over the clinical events of a stay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.backbones import Backbone, Inputs
from manydg.backbones._records import EventSteps, PatientFeatures
from manydg.backbones._sequences import ByLength, FixedLayout, Layout
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError

_LARGEST_PACKED_HEAD = 256


class Attention(Protocol):
    """Attention of queries to the steps of their own row, heads apart.

    Queries, keys and values come as ``(..., heads, width of a head)`` in the shape in which the attention lays steps
    out; what it gives has the shape of the queries.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor: ...


class RectangleAttention:
    """Attention in rectangles: steps ``(rows, longest, ...)``, of which those past a row's end are not seen.

    A row without steps attends to its first position, to avoid 0 / 0; its output is not used.
    """

    def __init__(self, layout: Layout) -> None:
        first = torch.arange(layout.longest, device=layout.offsets.device) == 0
        self._mask = (layout.present | first)[:, None, None, :]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, self._mask, dropout)
        return attended.transpose(1, 2)


class PackedAttention:
    """Attention without padding: steps ``(steps, ...)``, one row after the other.

    Leftovers after the last row are cut into rows of their own, so that every step holds numbers and every gradient
    is defined. The kernel is that of torch's own attention over nested tensors.
    """

    def __init__(self, layout: FixedLayout) -> None:
        self._longest, self._rows = layout.longest, layout.rows
        leftovers = -(-layout.steps // layout.longest)
        cuts = torch.arange(1, leftovers + 1, device=layout.offsets.device) * layout.longest
        past_end = (layout.offsets[-1] + cuts).clamp_max(layout.steps)
        self._bounds = torch.cat([layout.offsets, past_end]).to(torch.int32)

    @staticmethod
    def suits(layout: Layout, steps: Tensor, head: int) -> bool:
        """Whether there is a kernel for these steps: of 16 bits, on a GPU, with heads of a width that it knows."""
        if not steps.is_cuda or not isinstance(layout, FixedLayout):
            return False
        half = torch.is_autocast_enabled("cuda") or steps.element_size() == 2
        return half and head % 8 == 0 and head <= _LARGEST_PACKED_HEAD

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        return self._attend(query, key, value, dropout, self._bounds, self._longest)

    def last_queries(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Attention of one query a row, ``(rows, ...)``."""
        bounds = torch.arange(len(self._bounds), device=query.device, dtype=torch.int32).clamp_max(self._rows)
        return self._attend(query, key, value, dropout, bounds, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, bounds: Tensor, most: int) -> Tensor:
        """Attention of queries between these bounds, at most so many of a row."""
        attended: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, bounds, self._bounds, most, self._longest, dropout, False, False
        )[0]
        return attended


class _EncoderLayer(nn.Module):
    """A Transformer encoder layer, normalised after each sum, for all or some of the queries."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm_attention, self.norm_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries: Tensor, steps: Tensor, attention: Attention) -> Tensor:
        """Output ``(..., width)`` of queries of that shape that attend to steps ``(..., width)``."""
        query = self._split(self.query(queries))
        key, value = (self._split(part) for part in self.key_value(steps).chunk(2, dim=-1))
        joined = attention(query, key, value, self.rate if self.training else 0.0).flatten(-2)
        hidden = self.norm_attention(queries + self.dropout(self.out(joined)))
        further = self.narrow(self.dropout(self.widen(hidden).relu()))
        output: Tensor = self.norm_hidden(hidden + self.dropout(further))
        return output

    def _split(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(*vectors.shape[:-1], self.heads, -1)


class EventTransformer(Backbone):
    """Events encoded by kind, with their positions, through attention; the last event's output is the stay's.

    Positions are counted back from the last event, so that neither padding nor the limit on events shifts them. A
    stay without a single event has a learned vector of its own in place of the last event's output.

    Parameters
    ----------
    schema : InputSchema
        Of stays of events.
    width : int
        Width of the events and of the features v.
    layers, heads : int
    hidden : int
        Width of the feed-forward layers.
    dropout : float
    max_events : int
        A stay's last events that are kept.
    """

    sinusoids: Tensor
    takes_padded: bool = True
    fast_precision: str = "bf16"
    compiled_precision: str = "bf16"

    def __init__(
        self,
        schema: InputSchema,
        width: int = 128,
        layers: int = 3,
        heads: int = 8,
        hidden: int = 64,
        dropout: float = 0.25,
        max_events: int = 300,
    ) -> None:
        super().__init__()
        if layers < 1 or width % heads or width % 2:
            raise ConfigError(
                f"the event Transformer needs a layer or more and a width that is even and a multiple of the heads; "
                f"got {layers} layers, width {width} and {heads} heads"
            )
        self.heads = heads
        self.steps = EventSteps(schema, width, max_events)
        self.register_buffer("sinusoids", _sinusoids(max_events, width), persistent=False)
        self.position = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_EncoderLayer(width, heads, hidden, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.no_events = nn.Parameter(torch.randn(width))
        self.patient = PatientFeatures(schema, width)
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        vectors, layout = self.steps(inputs)
        positions = self.position(self.sinusoids[: layout.longest])
        from_last = (layout.lengths[layout.row] - 1 - layout.position).clamp_min(0)
        steps = self.dropout(vectors + positions.index_select(0, from_last))
        if isinstance(layout, FixedLayout):
            packed = PackedAttention.suits(layout, steps, self.output_size // self.heads)
            stays = self._attend_packed(steps, layout) if packed else self._attend(steps, layout)
            return cast("Tensor", self.patient(stays, inputs))
        # Attention costs the square of the padded length, so that stays of similar length go together.
        order = ByLength.of(layout)
        steps = steps.index_select(0, order.steps)
        stays = torch.cat([self._attend(steps[group.steps], group.layout) for group in order.groups])
        features: Tensor = self.patient(stays.index_select(0, order.back), inputs)
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.steps.fit(dataset)
        self.patient.fit(dataset)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        if device.type != "cuda":
            return dataset
        columns = self.steps.shorten({name: dataset.column(name) for name in dataset.columns})
        return replace(dataset, columns=columns, rows=None)

    def _attend(self, vectors: Tensor, layout: Layout) -> Tensor:
        """The last event's output of each stay, ``(rows, width)``, computed in rectangles."""
        attention = RectangleAttention(layout)
        steps = layout.spread(vectors)
        for layer in self.layers[:-1]:
            steps = layer(steps, steps, attention)
        # Only the last event's output is read, so the last layer computes it alone.
        rows = torch.arange(layout.rows, device=vectors.device)
        last = steps[rows, (layout.lengths - 1).clamp_min(0)].unsqueeze(1)
        return self._output(self.layers[-1](last, steps, attention).squeeze(1), layout)

    def _attend_packed(self, steps: Tensor, layout: FixedLayout) -> Tensor:
        """The same without padding."""
        attention = PackedAttention(layout)
        for layer in self.layers[:-1]:
            steps = layer(steps, steps, attention)
        last = steps.index_select(0, (layout.offsets[1:] - 1).clamp_min(0))
        return self._output(self.layers[-1](last, steps, attention.last_queries), layout)

    def _output(self, last: Tensor, layout: Layout) -> Tensor:
        return torch.where((layout.lengths > 0).unsqueeze(-1), self.norm(last), self.no_events)


def _sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of falling frequency, ``(length, width)``."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
