"""Where the data live during training: on the GPU where they fit, and worked out once where that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset
from manydg.training.distributed import processes_here
from manydg.training.memory import memory_of_machine

_SHARE_OF_MEMORY = 8


def place(dataset: DomainDataset, algorithm: Algorithm, device: torch.device) -> DomainDataset:
    """The dataset ready for many epochs: on the GPU where it fits in half of its free memory, else where it is.

    What the backbone works out of its inputs before the first weight (a spectrogram) is worked out now, where it fits:
    on a GPU in half of the free memory, else in an eighth of the machine's.
    """
    if device.type != "cuda":
        return algorithm.backbone.precompute(
            dataset, device, memory_of_machine() // (_SHARE_OF_MEMORY * processes_here())
        )
    # Convolutions of few channels are fastest with the channels last, in the data and in the weights.
    algorithm.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    free, _ = torch.cuda.mem_get_info(device)
    ready = algorithm.backbone.precompute(dataset, device, free // 2)
    if ready.device.type == "cuda":
        return ready
    free, _ = torch.cuda.mem_get_info(device)
    return ready.to(device) if _bytes_of(ready) < free / 2 else ready


def _bytes_of(dataset: DomainDataset) -> int:
    share = 1.0 if dataset.rows is None else len(dataset) / max(1, _rows_stored(dataset))
    return int(share * sum(_bytes(column) for column in dataset.columns.values()))


def _rows_stored(dataset: DomainDataset) -> int:
    return len(next(iter(dataset.columns.values())))


def _bytes(column: Column) -> int:
    total = 0
    while isinstance(column, Ragged):
        total, column = total + column.offsets.nbytes, column.values
    assert isinstance(column, Tensor)
    return int(total + column.nbytes)
