"""What sequence networks share: steps from visits or events, and the patient's own features."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Inputs
from manydg.backbones._events import EventSteps
from manydg.backbones._scaling import Standardize
from manydg.backbones._visits import VisitSteps
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, DataError, ManyDGWarning


def step_encoder(schema: InputSchema, width: int, max_events: int) -> VisitSteps | EventSteps:
    """The encoder that turns a dataset's visits or events into steps of a sequence."""
    if "event_codes" in schema.columns:
        return EventSteps(schema, width, max_events)
    if "diagnoses" in schema.columns:
        return VisitSteps(schema, width)
    raise ConfigError(
        "this backbone takes sequences: stays of events (a column 'event_codes') or visits (a column 'diagnoses'); "
        f"the dataset has {sorted(schema.columns)}"
    )


class PatientFeatures(nn.Module):
    """Joins what a sequence says with the patient's features, the dense column ``static``, where there is one.

    The features are standardised over training patients and go through a small net; a missing one counts as average.

    Parameters
    ----------
    schema : InputSchema
    width : int
        Of the sequence's vector and of the output.
    """

    def __init__(self, schema: InputSchema, width: int) -> None:
        super().__init__()
        column = schema.columns.get("static")
        self.size = 0 if column is None or column.nesting else torch.Size(column.shape).numel()
        hidden = width // 4 if self.size else 0
        if self.size:
            self.scale = Standardize(self.size)
            self.net = nn.Sequential(nn.Linear(self.size, hidden), nn.ELU())
        self.out = nn.Linear(width + hidden, width)

    def forward(self, sequence: Tensor, inputs: Inputs) -> Tensor:
        """Features ``(batch, width)`` from the sequence's vector ``(batch, width)``."""
        if self.size:
            static = torch.nan_to_num(self.scale(_static(inputs)), nan=0.0)
            sequence = torch.cat([sequence, self.net(static)], dim=-1)
        features: Tensor = self.out(sequence)
        return features

    def fit(self, dataset: DomainDataset) -> None:
        if self.size:
            with warnings.catch_warnings():
                # A rare group that no training patient belongs to is nothing to warn about.
                warnings.simplefilter("ignore", ManyDGWarning)
                self.scale.fit([_static({"static": dataset.column("static")})])


def _static(inputs: Inputs) -> Tensor:
    column = inputs["static"]
    if not isinstance(column, Tensor):
        raise DataError("the input 'static' must be dense: one row of patient features a sample")
    return column.flatten(1).to(torch.float32)
