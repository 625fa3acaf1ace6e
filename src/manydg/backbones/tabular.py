"""Tabular: a strong network for tables of measurements, with gaps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manydg.backbones._backbone import Inputs
from manydg.backbones._quantiles import PiecewiseLinear, rows_for_quantiles
from manydg.backbones._tables import TableBackbone, blocks_of_features, join
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError


class _ResidualLayer(nn.Module):
    """A layer whose output is added to its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.ELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        summed: Tensor = hidden + self.layers(hidden)
        return summed


class Tabular(TableBackbone):
    """Each value in quantile bins, embedded by a map of its own; all joined, through residual layers.

    All dense columns are flattened and joined. A value that is missing (NaN) has an embedding of its own, learned for
    its feature. Bins come from training patients, so that units, skewness and outliers do not matter.

    Parameters
    ----------
    schema : InputSchema
    bins : int
        Quantile bins per value.
    embedding : int
        Width of one value's embedding.
    hidden : int
        Width of the layers.
    layers : int
        Number of residual layers.
    width : int
        Width of the features v.
    dropout : float
        Within the layers.
    feature_dropout : float
        Share of the values whose whole embedding is hidden from the network in training.
    """

    def __init__(
        self,
        schema: InputSchema,
        bins: int = 12,
        embedding: int = 4,
        hidden: int = 128,
        layers: int = 1,
        width: int = 128,
        dropout: float = 0.5,
        feature_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            schema, bins=bins, embedding=embedding, hidden=hidden, layers=layers, width=width, dropout=dropout,
            feature_dropout=feature_dropout,
        )  # fmt: skip
        if bins < 1 or embedding < 1:
            raise ConfigError(
                f"the tabular backbone needs one bin and one embedding width or more; got {bins}, {embedding}"
            )
        features = self.features
        self.encoding = PiecewiseLinear(features, bins)
        self.feature_dropout = nn.Dropout1d(feature_dropout)
        self.bin_vectors = nn.Parameter(torch.empty(features, bins, embedding).uniform_(-1, 1) * bins**-0.5)
        self.bias = nn.Parameter(torch.empty(features, embedding).uniform_(-1, 1) * bins**-0.5)
        self.missing = nn.Parameter(torch.empty(features, embedding).uniform_(-1, 1) * bins**-0.5)
        self.network = nn.Sequential(
            nn.Linear(features * embedding, hidden),
            *(_ResidualLayer(hidden, dropout) for _ in range(layers)),
            nn.LayerNorm(hidden),
            nn.ELU(),
            nn.Linear(hidden, width),
        )
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        embedded = self.feature_dropout(self._embed(join(inputs, self.names)))
        features: Tensor = self.network(embedded.flatten(1))
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        rows = rows_for_quantiles(len(dataset))
        self.encoding.fit(blocks_of_features(dataset, self.names, rows))

    def _embed(self, values: Tensor) -> Tensor:
        """Embeddings ``(batch, features, embedding)`` of values ``(batch, features)``."""
        absent = torch.isnan(values)
        encoded = self.encoding(values.masked_fill(absent, 0.0))
        mapped = torch.bmm(encoded.transpose(0, 1), self.bin_vectors).transpose(0, 1) + self.bias
        return torch.where(absent.unsqueeze(-1), self.missing, mapped).relu()
