"""Averages of weights along the training, with batch statistics of their own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from manydg.algorithms._algorithm import Hyperparameters, Optimizers
from manydg.algorithms.base import Base
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch
from manydg.targets import Target


class Average(nn.Module):
    """A running average of a module's weights, kept in buffers so that it is saved but never trained.

    Beside the weights it holds the running statistics of batch normalisation *under the averaged weights*: those of
    the module itself belong to other weights, and their average to none. They are learnt by calling this in training
    mode. All other buffers (scaling, known codes) are the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {name: _key(name) for name, _ in module.named_parameters()}
        self.statistics = {
            f"{place}.{name}" if place else name: _key(f"{place}.{name}")
            for place, part in module.named_modules()
            if isinstance(part, _BatchNorm)
            for name, _ in part.named_buffers(recurse=False)
        }
        for name, tensor in module.named_parameters():
            self.register_buffer(self.weights[name], tensor.detach().clone())
        for name, key in self.statistics.items():
            self.register_buffer(key, module.get_buffer(name).clone())

    @torch.no_grad()
    def take_in(self, module: nn.Module, share: Tensor) -> None:
        """Move the average towards the module's weights by a share from 0 to 1, a scalar."""
        for name, weight in module.named_parameters():
            average: Tensor = getattr(self, self.weights[name])
            average.lerp_(weight.to(average.dtype), share.to(average.dtype))

    def forward(self, module: nn.Module, *arguments: Any) -> Tensor:
        """What the module gives under the averaged weights."""
        names = {**self.weights, **self.statistics}
        output: Tensor = functional_call(module, {name: getattr(self, key) for name, key in names.items()}, arguments)
        return output


def _key(name: str) -> str:
    return name.replace(".", "/")


class AveragedBase(Base):
    """Base that predicts with an average of its weights over the training steps; a subclass says which average."""

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: Hyperparameters | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)  # type: ignore[arg-type]
        self.average_backbone, self.average_head = Average(self.backbone), Average(self.head)

    @abstractmethod
    def next_share(self) -> Tensor:
        """Share of the newest weights in the average after this step, a scalar; called once a step."""

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        terms = super().step(batch, optimizers)
        share = self.next_share()
        self.average_backbone.take_in(self.backbone, share)
        self.average_head.take_in(self.head, share)
        if self.average_backbone.statistics:
            with torch.no_grad():
                self.average_backbone(self.backbone, batch.inputs)
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        if self.training:
            return super().predict(inputs)
        return self.average_head(self.head, self.average_backbone(self.backbone, inputs))  # type: ignore[no-any-return]

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        if self.training:
            return super().embed(inputs)
        return {"v": self.average_backbone(self.backbone, inputs)}
