"""Which patient context a run uses, in training and whenever its model predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from manydg.algorithms import ALGORITHMS
from manydg.backbones import build_backbone
from manydg.config import TrainingConfig
from manydg.data.context import ContextOptions, apply_context, estimate_strength, has_context, has_signals, unsupported
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError
from manydg.training.fit import auto_backbone

NONE, AUTO, CAUSAL = "none", "auto", "causal"


def context_mode(config: TrainingConfig, dataset: DomainDataset) -> str:
    """``none``, ``offline`` or ``causal``.

    With ``auto`` it is what the algorithm is made for, where the inputs allow it.
    """
    if reason := looks_ahead(config.algorithm, config.context):
        raise ConfigError(f"{config.algorithm} cannot be used with causal context: {reason}")
    if config.context != AUTO:
        return config.context
    preferred = ALGORITHMS.get(config.algorithm).context
    return NONE if preferred == NONE or has_context(dataset) or unsupported(dataset) else preferred


def looks_ahead(algorithm: str, context: str) -> str | None:
    """The reason why an algorithm would see later samples despite causal context; ``None`` if it does not."""
    if context == CAUSAL and ALGORITHMS.get(algorithm).uses_patients:
        return "it adapts to all samples of a patient when it predicts, to later ones too; take 'offline' or 'none'"
    return None


def with_context(
    dataset: DomainDataset,
    config: TrainingConfig,
    device: torch.device,
    backbone: nn.Module | None = None,
    training: npt.NDArray[np.int64] | None = None,
) -> DomainDataset:
    """The dataset with the context of a configuration, computed on the GPU where it fits.

    Parameters
    ----------
    training : array, optional
        Rows of the training patients, from which the strength of context is estimated where the configuration does not
        give it; by default all rows.
    backbone : nn.Module, optional
        The network whose spectrograms the context of signals is made of; by default the configuration's.
    """
    mode = context_mode(config, dataset)
    if mode == NONE:
        return dataset
    spectrum = None
    if has_signals(dataset):
        spectrum = getattr(backbone or _backbone_of(config, dataset), "spectrogram", None)
        if spectrum is None and config.context == AUTO:
            return dataset
    data = dataset
    if device.type == "cuda" and spectrum is None:
        needed = 40 * sum(column.nbytes for column in dataset.columns.values() if isinstance(column, torch.Tensor))
        data = dataset.to(device) if needed < torch.cuda.mem_get_info(device)[0] else dataset
    options = ContextOptions.from_mapping(mode, config.context_options)
    if options.strength is None:
        known = data if training is None else data.select(training)
        options = dataclasses.replace(options, strength=estimate_strength(known, spectrum))
    return apply_context(data, options, spectrum)


def as_trained(dataset: DomainDataset, schema: InputSchema, backbone: nn.Module | None = None) -> DomainDataset:
    """A dataset with the same context as the training data of a model with this schema and backbone."""
    known = schema.settings.get("context")
    if not isinstance(known, Mapping) or has_context(dataset):
        return dataset
    return apply_context(dataset, ContextOptions.from_json(known), getattr(backbone, "spectrogram", None))


def _backbone_of(config: TrainingConfig, dataset: DomainDataset) -> nn.Module:
    schema = InputSchema.of(dataset)
    name = auto_backbone(schema) if config.backbone == AUTO else config.backbone
    return build_backbone(name, schema, config.backbone_options)
