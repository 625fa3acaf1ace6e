"""Averages of weights over the training steps, with batch-normalisation statistics of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from manydg.algorithms import Hyperparameters, Optimizers
from manydg.algorithms.base import Base
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch
from manydg.targets import Target


class Average(nn.Module):
    """A running average of a module's weights, kept in buffers so that it is saved but never trained.

    Besides the weights it keeps the running statistics of batch normalisation *under the averaged weights*: the
    module's own statistics belong to other weights, and an average of them to none. They are updated by calling this
    in training mode. All other buffers (scaling, known codes) are the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {name: _key(name) for name, _ in module.named_parameters()}
        self.statistics = {
            f"{prefix}.{name}" if prefix else name: _key(f"{prefix}.{name}")
            for prefix, part in module.named_modules()
            if isinstance(part, _BatchNorm)
            for name, _ in part.named_buffers(recurse=False)
        }
        for name, tensor in module.named_parameters():
            self.register_buffer(self.weights[name], tensor.detach().clone())
        for name, key in self.statistics.items():
            self.register_buffer(key, module.get_buffer(name).clone())

    @torch.no_grad()
    def update(self, module: nn.Module, share: Tensor) -> None:
        """Move the average towards the module's weights by a share from 0 to 1, a scalar."""
        for name, weight in module.named_parameters():
            average: Tensor = getattr(self, self.weights[name])
            average.lerp_(weight.to(average.dtype), share.to(average.dtype))

    def forward(self, module: nn.Module, *arguments: Any) -> Tensor:
        """The module's output under the averaged weights."""
        values = {name: getattr(self, key) for name, key in {**self.weights, **self.statistics}.items()}
        recurrent = {module.get_parameter(name): values.pop(name) for name in _recurrent_weights(module)}
        with _values_swapped(recurrent):
            output: Tensor = functional_call(module, values, arguments)
        return output


def _recurrent_weights(module: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.RNNBase)
        for name, _ in part.named_parameters(recurse=False)
    ]


@contextmanager
def _values_swapped(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Within the block, parameters have other values, in the same memory.

    A recurrent network that is given other tensors moves its weights to new memory, while a captured CUDA graph keeps
    using the old.
    """
    before = [parameter.detach().clone() for parameter in values]
    for parameter, value in values.items():
        parameter.data.copy_(value)
    try:
        yield
    finally:
        for parameter, value in zip(values, before, strict=True):
            parameter.data.copy_(value)


def _key(name: str) -> str:
    return name.replace(".", "/")


class AveragedBase(Base):
    """Base that predicts with an average of its weights over the training steps; a subclass defines the average."""

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: Hyperparameters | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)  # type: ignore[arg-type]
        self.averages = nn.ModuleDict()
        self.keep_average("backbone")
        self.keep_average("head")

    def keep_average(self, part: str) -> None:
        """Also average the weights of this submodule from now on."""
        self.averages[part] = Average(self.get_submodule(part))

    @abstractmethod
    def next_share(self) -> Tensor:
        """Share of the newest weights in the average after this step, a scalar; called once per step."""

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        terms = super().step(batch, optimizers)
        share = self.next_share()
        for part, average in self.averages.items():
            cast("Average", average).update(self.get_submodule(part), share)
        average_backbone = cast("Average", self.averages["backbone"])
        if average_backbone.statistics:
            with torch.no_grad():
                average_backbone(self.backbone, batch.inputs)
        return terms

    def run(self, part: str, *arguments: Any) -> Tensor:
        """A submodule's output, in evaluation under its averaged weights."""
        module = self.get_submodule(part)
        output: Tensor = module(*arguments) if self.training else self.averages[part](module, *arguments)
        return output

    def predict(self, inputs: Inputs) -> Tensor:
        return self.run("head", self.run("backbone", inputs))

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"v": self.run("backbone", inputs)}
