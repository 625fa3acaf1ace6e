"""MLP: fully connected layers on a table of measurements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from manydg.backbones import Inputs, LevelEmbeddings, Standardize, TableBackbone, join, pieces_of_rows
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import DataError

_LEVEL_WIDTH = 8
"""Width of the vector of one level of a category."""


class MLP(TableBackbone):
    """Standardised inputs through linear layers with batch normalisation, ELU and dropout.

    All dense columns are flattened and joined. Their mean and standard deviation come from training patients. Levels of
    categories have learned vectors beside them.

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
        super().__init__(schema, hidden=hidden, layers=layers, width=width, dropout=dropout)
        self.scale = Standardize(self.features)
        blocks: list[nn.Module] = []
        self.categories = None if self.levels is None else LevelEmbeddings(self.levels, _LEVEL_WIDTH)
        wide = self.scale.size + (0 if self.categories is None else self.categories.size)
        for _ in range(layers):
            blocks += [nn.Linear(wide, hidden), nn.BatchNorm1d(hidden), nn.ELU(), nn.Dropout(dropout)]
            wide = hidden
        # Without the last ELU a batch's mean feature would be zero, and ManyDG's discrepancy is relative to that mean.
        self.network = nn.Sequential(*blocks, nn.Linear(wide, width), nn.BatchNorm1d(width), nn.ELU())
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        values: Tensor = self.scale(join(inputs, self.names))
        if self.categories is not None and self.levels is not None:
            values = torch.cat([values, self.categories(self.levels(inputs), self.levels).flatten(1)], dim=1)
        features: Tensor = self.network(values)
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.fit_levels(dataset)
        self.scale.fit(_without_gaps(pieces_of_rows(dataset, self.names)))


def _without_gaps(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    for piece in pieces:
        if bool(torch.isnan(piece).any()):
            raise DataError("the MLP cannot take missing values: use the backbone 'tabular', which can")
        yield piece
