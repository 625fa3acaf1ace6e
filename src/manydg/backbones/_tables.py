"""Dense columns as one table of numbers, whole for a batch, and in pieces for a dataset that may exceed the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manydg.backbones._backbone import Inputs
from manydg.data.columns import take
from manydg.data.dataset import DomainDataset

_VALUES_OF_A_PIECE = 2**20
_VALUES_OF_A_BLOCK = 2**24


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
