"""Dense columns as one table of numbers, its scaling by statistics of training patients, and levels of categories."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manydg.backbones import Backbone, Inputs
from manydg.data.columns import CATEGORIES, take
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError, ManyDGWarning

_VALUES_OF_A_PIECE = 2**20
_VALUES_OF_A_BLOCK = 2**24
_FEATURES_NAMED = 5


class TableBackbone(Backbone):
    """A backbone of a table of measurements: all dense columns, flattened and joined.

    - ``**options``: Whatever else the subclass was given, to build another like it.
    - ``names``: The columns that are joined.
    - ``features``: How many numbers they hold.
    - ``levels``: Of the categorical features, where there are any.
    """

    def __init__(self, schema: InputSchema, **options: Any) -> None:
        super().__init__()
        ragged = [name for name, column in schema.columns.items() if column.nesting]
        if ragged:
            raise ConfigError(
                f"the {type(self).__name__} backbone takes dense inputs only; {ragged} have rows of different lengths"
            )
        measured = schema.measurements()
        self.names = tuple(measured)
        self.features = sum(torch.Size(column.shape).numel() for column in measured.values())
        sizes = tuple(schema.categories().values())
        self.levels = Levels(sizes) if sizes else None
        self._made_from = schema, options

    def for_samples_alone(self) -> Backbone:
        """Without the columns of the context: hundreds of constants would act as one bias that learns far too fast."""
        schema, options = self._made_from
        return type(self)(schema.without_context(), **options)

    def fit_levels(self, dataset: DomainDataset) -> None:
        """Learn which levels of categories the training patients have."""
        if self.levels is not None:
            self.levels.fit(dataset)


def join(inputs: Inputs, names: Sequence[str]) -> Tensor:
    """The named dense columns flattened and side by side, ``(rows, features)`` in float32."""
    if not names:
        codes = inputs[CATEGORIES]
        assert isinstance(codes, Tensor)
        return torch.zeros(codes.shape[0], 0, device=codes.device)
    flat = [column.flatten(1).to(torch.float32) for name in names if isinstance(column := inputs[name], Tensor)]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def pieces_of_rows(dataset: DomainDataset, names: Sequence[str]) -> Iterator[Tensor]:
    """The same of a whole dataset, some rows at a time."""
    columns = [column for name in names if isinstance(column := dataset.columns[name], Tensor)]
    if not columns:
        return
    width = sum(column.shape[1:].numel() for column in columns)
    for stored in torch.split(_stored(dataset, torch.arange(len(dataset))), max(1, _VALUES_OF_A_PIECE // width)):
        yield join({name: take(dataset.columns[name], stored) for name in names}, names)


def blocks_of_features(dataset: DomainDataset, names: Sequence[str], rows: Tensor) -> Iterator[Tensor]:
    """Some rows of a dataset, a few features at a time, ``(rows, some features)`` in float32."""
    stored, width = _stored(dataset, rows), max(1, _VALUES_OF_A_BLOCK // max(1, len(rows)))
    for name in names:
        column = dataset.columns[name]
        if not isinstance(column, Tensor):
            continue
        flat = column.flatten(1)
        for start in range(0, flat.shape[1], width):
            yield flat[:, start : start + width][stored].to(torch.float32)


def _stored(dataset: DomainDataset, rows: Tensor) -> Tensor:
    """Where rows of a dataset, which may be a selection, are stored."""
    there = rows.to(dataset.device)
    return there if dataset.rows is None else dataset.rows[there]


class Levels(nn.Module):
    """Maps codes of levels that training patients do not share to code 0, unseen.

    A level of a single training patient counts as unseen: it says who the patient is and nothing of others, and it
    shows in training what becomes of new levels.

    - ``sizes``: Number of levels of each categorical feature.
    """

    known: Tensor
    first: Tensor
    size: Tensor

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.total = sizes, sum(sizes)
        self.register_buffer("known", torch.ones(self.total, dtype=torch.bool))
        self.register_buffer("size", torch.tensor(sizes), persistent=False)
        self.register_buffer("first", torch.tensor(sizes).cumsum(0) - torch.tensor(sizes), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Codes ``(batch, features)``, 0 where they are not known."""
        codes = inputs[CATEGORIES]
        assert isinstance(codes, Tensor)
        inside = torch.where((codes < 0) | (codes >= self.size), 0, codes)
        return torch.where(self.known[inside + self.first], inside, 0)

    def fit(self, dataset: DomainDataset) -> None:
        """Learn which levels two training patients have or more."""
        codes, patients = dataset.column(CATEGORIES), dataset.domains
        assert isinstance(codes, Tensor)
        known = torch.zeros(self.total, dtype=torch.bool, device=codes.device)
        for column, (first, size) in enumerate(zip(self.first.tolist(), self.sizes, strict=True)):
            pairs = torch.unique(codes[:, column] * (int(patients.max()) + 1) + patients)
            counts = torch.bincount(pairs // (int(patients.max()) + 1), minlength=size)[:size]
            known[first : first + size] = counts > 1
        self.known.copy_(known)


class LevelEmbeddings(nn.Module):
    """A learned vector for each level of each categorical feature; that of unseen levels starts at zero."""

    def __init__(self, levels: Levels, width: int) -> None:
        super().__init__()
        self.size = len(levels.sizes) * width
        vectors = torch.empty(levels.total, width).uniform_(-1, 1)
        vectors[levels.first] = 0.0
        self.vectors = nn.Parameter(vectors)

    def forward(self, codes: Tensor, levels: Levels) -> Tensor:
        """``(batch, features, width)`` of codes ``(batch, features)``."""
        return nn.functional.embedding(codes + levels.first, self.vectors)


def feature_names(dataset: DomainDataset, names: Iterable[str]) -> list[str]:
    """What messages call each feature of the named columns."""
    listed: list[str] = []
    for name in names:
        column = dataset.columns[name]
        if not isinstance(column, Tensor):
            continue
        width = column[:1].flatten(1).shape[1]
        given = dataset.info.settings.get("features") if name == "x" else dataset.info.settings.get(name)
        known = [str(entry) for entry in given] if isinstance(given, list | dict) else []
        plain = [f"{name}[{number}]" for number in range(width)] if width > 1 else [name]
        listed += known if len(known) == width else plain
    return listed


def note_left_out(missing: Sequence[str], count: int) -> None:
    """Warn of features that no training patient has."""
    shown = ", ".join(missing[:_FEATURES_NAMED]) + (", ..." if len(missing) > _FEATURES_NAMED else "")
    warnings.warn(
        f"{len(missing)} of {count} columns have no value for any training patient and are left out of this "
        f"training: {shown}",
        ManyDGWarning,
        stacklevel=4,
    )


class RunningMoments:
    """Mean and variance of values that come in pieces, in float64.

    Pieces are merged by the update of Chan, Golub and LeVeque, which loses no digits where the mean is large.

    - ``like``: Has the shape and the device of the mean.
    """

    def __init__(self, like: Tensor) -> None:
        self.count = torch.zeros_like(like, dtype=torch.float64)
        self.mean, self._squares = torch.zeros_like(self.count), torch.zeros_like(self.count)

    def add(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Add a piece: number of its values, their mean, and the sum of their squared distances from it."""
        count, mean, squares = (part.to(self.count) for part in (count, mean, squares))
        total = (self.count + count).clamp_min(1)
        apart = mean - self.mean
        self.mean = self.mean + apart * count / total
        self._squares = self._squares + squares + apart.square() * self.count * count / total
        self.count = self.count + count

    @property
    def variance(self) -> Tensor:
        """Mean squared distance from the mean; zero where there are no values."""
        return self._squares / self.count.clamp_min(1)


class Standardize(nn.Module):
    """Subtract the mean and divide by the standard deviation of each feature in the training patients.

    A feature that is constant there carries nothing a model could learn and is set to zero everywhere.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def fit(self, pieces: Iterable[Tensor]) -> None:
        """Learn from values ``(rows, size)`` that come in pieces of some rows, on any device; NaN is passed over."""
        moments = RunningMoments(self.mean)
        for piece in pieces:
            known = ~torch.isnan(piece)
            count = known.sum(dim=0).to(torch.float64)
            exact = torch.where(known, piece, 0.0).to(torch.float64)
            mean = exact.sum(dim=0) / count.clamp_min(1)
            moments.add(count, mean, torch.where(known, exact - mean, 0.0).square().sum(dim=0))
        mean, variance = moments.mean, moments.variance
        constant = variance <= 1e-12 * mean.square().clamp_min(1e-12)
        if bool(constant.any()):
            positions = torch.nonzero(constant).squeeze(1).tolist()
            warnings.warn(
                f"{len(positions)} input features are constant in the training patients and are ignored: "
                f"positions {positions[:10]}",
                ManyDGWarning,
                stacklevel=2,
            )
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(constant, 0.0, variance.clamp_min(1e-300).rsqrt()))

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.mean) * self.scale
