"""Tabular: a strong network for tables of measurements with missing values, on piecewise-linear embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.backbones import (
    Inputs,
    LevelEmbeddings,
    TableBackbone,
    blocks_of_features,
    feature_names,
    join,
    note_left_out,
    pieces_of_rows,
)
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError, ManyDGWarning

_ROWS_FOR_QUANTILES = 200_000
_STEEPEST = float(np.finfo(np.float32).max)
"""An infinite slope would make the start of its bin NaN."""


class PiecewiseLinear(nn.Module):
    """How full each of a feature's bins is: 1 below the value's bin, the fraction reached within it, 0 above.

    The encoding of Gorishniy, Rubachev and Babenko, "On Embeddings for Numerical Features in Tabular Deep Learning",
    NeurIPS 2022, with bins of equal training mass. Values outside the range of the training patients count as its ends.
    A missing value (NaN) has an encoding of zeros. A feature with few distinct values has one bin between each two, and
    a constant one has none: its encoding is zero. A feature that no training patient has counts as missing everywhere:
    its slopes are -1.
    """

    start: Tensor
    slope: Tensor

    def __init__(self, features: int, bins: int) -> None:
        super().__init__()
        self.features, self.bins = features, bins
        # Before anything is learned each feature has its bins side by side from -2 to 2.
        edges = torch.linspace(-2.0, 2.0, bins + 1).expand(features, -1)
        self.register_buffer("start", edges[:, :-1].clone())
        self.register_buffer("slope", (edges[:, 1:] - edges[:, :-1]).reciprocal())

    def forward(self, values: Tensor) -> Tensor:
        """Encodings ``(batch, features, bins)`` of values ``(batch, features)`` without NaN."""
        # In place: these are the largest tensors of a step, and nothing before them has a gradient.
        return (values.unsqueeze(-1) - self.start).mul_(self.slope).clamp_(0.0, 1.0)

    def fit(self, blocks: Iterable[Tensor]) -> list[int]:
        """Place the bins from values ``(rows, features)`` that come in blocks ``(rows, some features)``.

        NaN is passed over; see :func:`rows_for_quantiles` for how many rows are enough. Returns the features without a
        value.
        """
        start, slope = np.zeros((self.features, self.bins)), np.zeros((self.features, self.bins))
        constant: list[int] = []
        unknown: list[int] = []
        values = (column for block in blocks for column in block.cpu().numpy().T)
        for feature, column in enumerate(values):
            edges = _edges(column, self.bins)
            count = max(len(edges) - 1, 0)
            if count == 0:
                (constant if len(edges) else unknown).append(feature)
                slope[feature] = 0.0 if len(edges) else -1.0
                continue
            start[feature, :count] = edges[:-1]
            slope[feature, :count] = np.minimum(1.0 / np.diff(edges), _STEEPEST)
        if constant:
            warnings.warn(
                f"{len(constant)} input features are constant in all training patients and only their missingness is "
                f"used: positions {constant[:10]}",
                ManyDGWarning,
                stacklevel=2,
            )
        self.start.copy_(torch.from_numpy(start))
        self.slope.copy_(torch.from_numpy(slope))
        return unknown

    @property
    def left_out(self) -> Tensor:
        """Which features no training patient has, ``(features,)``."""
        return self.slope[:, 0] < 0


def rows_for_quantiles(count: int) -> Tensor:
    """Positions spread evenly over so many rows, at most 200,000."""
    spread = torch.arange(min(count, _ROWS_FOR_QUANTILES))
    return spread * count // max(len(spread), 1)


def _edges(values: npt.NDArray[np.float32], bins: int) -> npt.NDArray[np.float64]:
    """Rising bin edges of one feature: its distinct values if they are few, else quantiles.

    A value so frequent that it would fill a bin alone (the zero of a change that seldom happens) is one edge, and the
    quantiles are those of the other values: they would all fall on it otherwise, and leave the rest in one bin.
    """
    known = values[~np.isnan(values)].astype(np.float64)
    distinct, counts = np.unique(known, return_counts=True)
    if len(distinct) <= bins + 1:
        return distinct
    frequent = counts * bins >= len(known)
    others = np.repeat(distinct[~frequent], counts[~frequent])
    levels = np.linspace(0.0, 1.0, bins + 1 - int(frequent.sum()))
    edges = np.unique(np.concatenate([distinct[frequent], np.quantile(others, levels)]))
    # Bins so narrow that float32 cannot divide by them hold nothing a model could tell apart.
    wide = np.diff(edges) > 1e-6 * max(np.abs(edges).max(), 1e-30)
    kept: npt.NDArray[np.float64] = edges[np.concatenate([[True], wide])]
    return kept


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
    its feature. Bins come from training patients, so that units, skewness and outliers do not matter. Levels of
    categories have learned vectors of the same width.

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
        self.categories = None if self.levels is None else LevelEmbeddings(self.levels, embedding)
        coded = 0 if self.categories is None else self.categories.size
        self.network = nn.Sequential(
            nn.Linear(features * embedding + coded, hidden),
            *(_ResidualLayer(hidden, dropout) for _ in range(layers)),
            nn.LayerNorm(hidden),
            nn.ELU(),
            nn.Linear(hidden, width),
        )
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        embedded = self._embed(join(inputs, self.names))
        if self.categories is not None and self.levels is not None:
            embedded = torch.cat([embedded, self.categories(self.levels(inputs), self.levels)], dim=1)
        features: Tensor = self.network(self.feature_dropout(embedded).flatten(1))
        return features

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.fit_levels(dataset)
        rows = rows_for_quantiles(len(dataset))
        unknown = self.encoding.fit(blocks_of_features(dataset, self.names, rows))
        if unknown and len(rows) < len(dataset):
            # A value that is rarer than the rows looked at.
            known = torch.stack(
                [~piece[:, unknown].isnan().all(dim=0) for piece in pieces_of_rows(dataset, self.names)]
            )
            rare = [feature for feature, some in zip(unknown, known.any(dim=0).tolist(), strict=True) if some]
            self.encoding.slope[rare] = 0.0
            unknown = [feature for feature in unknown if feature not in rare]
        if unknown:
            names = feature_names(dataset, self.names)
            note_left_out([names[feature] for feature in unknown], len(names))

    def _embed(self, values: Tensor) -> Tensor:
        """Embeddings ``(batch, features, embedding)`` of values ``(batch, features)``."""
        absent = torch.isnan(values) | self.encoding.left_out
        encoded = self.encoding(values.masked_fill(absent, 0.0))
        mapped = torch.bmm(encoded.transpose(0, 1), self.bin_vectors).transpose(0, 1) + self.bias
        return torch.where(absent.unsqueeze(-1), self.missing, mapped).relu()
