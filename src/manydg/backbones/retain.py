"""RETAIN: two attentions that a reversed recurrent network gives to visits or events."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Backbone, Inputs
from manydg.backbones._layout import Layout
from manydg.backbones._steps import PatientFeatures, step_encoder
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema


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
        steps = layout.spread_reversed(self.dropout(vectors))
        weights = self._weights(steps, layout)
        gates = torch.tanh(self.gate(self.gate_states(steps)[0]))
        context = (weights * gates * steps).sum(dim=1)
        features: Tensor = self.patient(self.dropout(context), inputs)
        return features

    def attention(self, inputs: Inputs) -> Tensor:
        """Weight alpha of each step, latest first, ``(batch, longest)``; zero where there is no step."""
        vectors, layout = self.steps(inputs)
        return self._weights(layout.spread_reversed(vectors), layout).squeeze(-1)

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.steps.fit(dataset)
        self.patient.fit(dataset)

    def _weights(self, steps: Tensor, layout: Layout) -> Tensor:
        scores = self.weight(self.weight_states(steps)[0])
        present = layout.present.unsqueeze(-1)
        # A finite mask, so that a row without steps gives zeros and no NaN.
        weights: Tensor = scores.masked_fill(~present, torch.finfo(scores.dtype).min).softmax(dim=1)
        return weights * present
