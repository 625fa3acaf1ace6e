"""Which patient context a run uses, in training and whenever its model predicts."""

from __future__ import annotations

from typing import Any

import torch

from manydg.algorithms import ALGORITHMS
from manydg.data.context import COLUMN, ContextOptions, add_context, unsupported
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.training.config import TrainingConfig

NONE, AUTO = "none", "auto"


def context_mode(config: TrainingConfig, dataset: DomainDataset) -> str:
    """``none``, ``offline`` or ``causal``.

    Left open, it is what the algorithm is made for, where the inputs allow it.
    """
    if config.context != AUTO:
        return config.context
    wanted: str = getattr(ALGORITHMS.get(config.algorithm), "context", NONE)
    return NONE if wanted == NONE or COLUMN in dataset.columns or unsupported(dataset) else wanted


def with_context(dataset: DomainDataset, config: TrainingConfig, device: torch.device) -> DomainDataset:
    """The dataset with the context that a configuration asks for; made on the GPU where it fits."""
    mode = context_mode(config, dataset)
    if mode == NONE:
        return dataset
    placed = dataset
    if device.type == "cuda":
        needed = 40 * sum(column.nbytes for column in dataset.columns.values() if isinstance(column, torch.Tensor))
        placed = dataset.to(device) if needed < torch.cuda.mem_get_info(device)[0] else dataset
    options = ContextOptions.from_mapping(mode, config.context_options).to_json()
    return add_context(placed, **options)


def as_trained(dataset: DomainDataset, schema: InputSchema) -> DomainDataset:
    """A dataset with the same context as the data that a model of this schema was trained on."""
    known: dict[str, Any] | None = schema.settings.get("context")
    if known is None or COLUMN in dataset.columns:
        return dataset
    return add_context(dataset, **known)
