"""What a backbone is: it turns inputs x into features v."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from manydg.data.columns import Column
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError

Inputs = Mapping[str, Column]


class Backbone(nn.Module):
    """Base class of backbones, h: x -> v.

    A subclass takes the dataset's :class:`~manydg.data.schema.InputSchema` first and its own options as keywords with
    defaults, and sets ``output_size``.

    Attributes
    ----------
    output_size : int
        Width of the features v.
    """

    output_size: int

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Features of a batch of inputs, ``(batch, output_size)``."""

    def fit_inputs(self, dataset: DomainDataset) -> None:
        """Learn what must come from training patients alone (scaling, quantiles, known codes), before training.

        Whatever it learns is kept in buffers of fixed shape, so that it is saved and loaded with the weights.
        """


class SingleInput(Backbone):
    """Gives any ``nn.Module`` that maps one tensor to ``(batch, width)`` the place of a backbone."""

    def __init__(self, schema: InputSchema, module: nn.Module) -> None:
        super().__init__()
        if len(schema.columns) != 1:
            raise ConfigError(
                f"{type(module).__name__} takes one tensor, but the dataset has the inputs {sorted(schema.columns)}: "
                "derive it from manydg.Backbone and pick them in forward(inputs)"
            )
        ((self.column, column),) = schema.columns.items()
        self.module = module
        width = getattr(module, "output_size", None)
        self.output_size = width if isinstance(width, int) else _width_of(module, column.shape)

    def forward(self, inputs: Inputs) -> Tensor:
        return cast("Tensor", self.module(inputs[self.column]))


def _width_of(module: nn.Module, shape: tuple[int, ...]) -> int:
    was_training = module.training
    module.eval()
    with torch.no_grad():
        output = module(torch.zeros(2, *shape))
    module.train(was_training)
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise ConfigError(f"{type(module).__name__} must map (batch, {shape}) to (batch, width)")
    return int(output.shape[1])


def as_backbone(module: nn.Module, schema: InputSchema) -> Backbone:
    """A backbone as it is, any other module wrapped."""
    return module if isinstance(module, Backbone) else SingleInput(schema, module)
