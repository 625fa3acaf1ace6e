"""RETAIN: two attentions that a reversed recurrent network gives to visits or events."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manydg.backbones import Backbone, Inputs
from manydg.backbones._records import PatientFeatures, step_encoder
from manydg.backbones._sequences import Layout
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, InputSchema


class Retain(Backbone):
    """A sum of the steps' own vectors, weighted per step and per dimension.

    Choi et al., "RETAIN: an interpretable predictive model for healthcare using reverse time attention mechanism",
    NeurIPS 2016. One recurrent network gives each step a weight alpha, another each of its dimensions a gate beta; both
    read from the latest step to the first.

    Parameters
    ----------
    schema : InputSchema
        Of visits or of events.
    width : int
        Width of the steps, the states and the features v.
    dropout : float
    max_events : int
        A stay's last events that are kept.
    """

    def __init__(self, schema: InputSchema, width: int = 128, dropout: float = 0.25, max_events: int = 300) -> None:
        super().__init__()
        self.steps = step_encoder(schema, width, max_events)
        self.dropout = nn.Dropout(dropout)
        self.weight_states = nn.GRU(width, width, batch_first=True)
        self.gate_states = nn.GRU(width, width, batch_first=True)
        # No bias: a softmax would cancel it.
        self.weight = nn.Linear(width, 1, bias=False)
        self.gate = nn.Linear(width, width)
        self.patient = PatientFeatures(schema, width)
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        vectors, layout = self.steps(inputs)
        vectors = self.dropout(vectors)
        weights = self._weights(vectors, layout).unsqueeze(-1)
        gates = torch.tanh(self.gate(layout.run_backwards(self.gate_states, vectors)))
        context = layout.total(weights * gates * vectors)
        features: Tensor = self.patient(self.dropout(context), inputs)
        return features

    def attention(self, inputs: Inputs) -> Ragged:
        """Weight alpha of each sample's visits or events, in their order; they add up to 1."""
        vectors, layout = self.steps(inputs)
        return Ragged(self._weights(vectors, layout), layout.offsets)

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.steps.fit(dataset)
        self.patient.fit(dataset)

    def _weights(self, vectors: Tensor, layout: Layout) -> Tensor:
        states = layout.run_backwards(self.weight_states, vectors)
        return layout.softmax(self.weight(states).squeeze(-1))
