"""Dense columns as one table of numbers, whole for a batch, and in pieces for a dataset that may exceed the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manydg.backbones._backbone import Backbone, Inputs
from manydg.data.columns import take
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError

_VALUES_OF_A_PIECE = 2**20
_VALUES_OF_A_BLOCK = 2**24


class TableBackbone(Backbone):
    """A backbone of a table of measurements: all dense columns, flattened and joined.

    Parameters
    ----------
    schema : InputSchema
    **options
        Whatever else the subclass was given, to build another like it.

    Attributes
    ----------
    names : tuple of str
        The columns that are joined.
    features : int
        How many numbers they hold.
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
        self._made_from = schema, options

    def for_samples_alone(self) -> Backbone:
        """Without the columns of the context: hundreds of constants would act as one bias that learns far too fast."""
        schema, options = self._made_from
        return type(self)(schema.without_context(), **options)


def join(inputs: Inputs, names: Sequence[str]) -> Tensor:
    """The named dense columns flattened and side by side, ``(rows, features)`` in float32."""
    flat = [column.flatten(1).to(torch.float32) for name in names if isinstance(column := inputs[name], Tensor)]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def pieces_of_rows(dataset: DomainDataset, names: Sequence[str]) -> Iterator[Tensor]:
    """The same of a whole dataset, some rows at a time."""
    columns = [column for name in names if isinstance(column := dataset.columns[name], Tensor)]
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
