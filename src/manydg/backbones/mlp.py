"""MLP: fully connected layers on a table of measurements."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Backbone, Inputs
from manydg.backbones._scaling import Standardize
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, DataError


class MLP(Backbone):
    """Standardised inputs through linear layers with batch normalisation, ELU and dropout.

    All dense columns are flattened and joined. Their mean and standard deviation come from training patients.

    Parameters
    ----------
    schema : InputSchema
    hidden : int
        Width of the hidden layers.
    layers : int
        Number of hidden layers.
    width : int
        Width of the features v.
    dropout : float
    """

    def __init__(
        self, schema: InputSchema, hidden: int = 256, layers: int = 2, width: int = 128, dropout: float = 0.3
    ) -> None:
        super().__init__()
        ragged = [name for name, column in schema.columns.items() if column.nesting]
        if ragged:
            raise ConfigError(f"the MLP takes dense inputs only; {ragged} have rows of different lengths")
        self.names = tuple(schema.columns)
        self.scale = Standardize(sum(torch.Size(column.shape).numel() for column in schema.columns.values()))
        widths = [self.scale.size] + [hidden] * layers
        blocks: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            blocks += [nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.ELU(), nn.Dropout(dropout)]
        # Without the last ELU a batch's mean feature would be zero, and ManyDG's discrepancy is relative to that mean.
        self.network = nn.Sequential(*blocks, nn.Linear(widths[-1], width), nn.BatchNorm1d(width), nn.ELU())
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        features: Tensor = self.network(self.scale(self._join(inputs)))
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        values = self._join({name: dataset.column(name) for name in self.names})
        if bool(torch.isnan(values).any()):
            raise DataError("the MLP cannot take missing values: use the backbone 'tabular', which can")
        self.scale.fit(values)

    def _join(self, inputs: Inputs) -> Tensor:
        flat = [
            column.flatten(1).to(torch.float32) for name in self.names if isinstance(column := inputs[name], Tensor)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
