"""GRU: a recurrent network over visits or events."""

from __future__ import annotations

from torch import Tensor, nn

from manydg.backbones import Backbone, Inputs
from manydg.backbones._records import PatientFeatures, step_encoder
from manydg.data.dataset import DomainDataset, InputSchema


class GRU(Backbone):
    """The state after the last visit or event, joined with the patient's features.

    Parameters
    ----------
    schema : InputSchema
        Of visits or of events.
    width : int
        Width of the steps, the state and the features v.
    layers : int
    dropout : float
    max_events : int
        A stay's last events that are kept.
    """

    def __init__(
        self, schema: InputSchema, width: int = 128, layers: int = 1, dropout: float = 0.25, max_events: int = 300
    ) -> None:
        super().__init__()
        self.steps = step_encoder(schema, width, max_events)
        self.dropout = nn.Dropout(dropout)
        self.recurrent = nn.GRU(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.patient = PatientFeatures(schema, width)
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        vectors, layout = self.steps(inputs)
        states = layout.run(self.recurrent, self.dropout(vectors))
        features: Tensor = self.patient(self.dropout(layout.last(states)), inputs)
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.steps.fit(dataset)
        self.patient.fit(dataset)
