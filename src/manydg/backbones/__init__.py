"""Backbones: what turns inputs x into features v. One file each; ``CONTRIBUTING.md`` shows how to add one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from manydg.config import Choices, Range, Searched
from manydg.data.columns import Column
from manydg.data.dataset import TRUST, ColumnSchema, DomainDataset, InputSchema
from manydg.errors import ConfigError, unknown_name
from manydg.registry import Registry

Inputs = Mapping[str, Column]
SEARCHED_OPTIONS: Mapping[str, Searched] = {"width": Choices((64, 128, 256)), "dropout": Range(0.0, 0.6)}
"""What ``manydg tune`` draws from, for every backbone that has the option."""


class Backbone(nn.Module):
    """Base class of backbones, h: x -> v.

    A subclass takes the dataset's :class:`~manydg.data.dataset.InputSchema` first and its own options as keywords with
    defaults, and sets ``output_size``.

    Attributes
    ----------
    output_size : int
        Width of the features v.
    """

    output_size: int
    takes_padded: bool = False
    """Whether ragged columns may come in batches of fixed shape, with leftovers behind the last row (see
    :meth:`manydg.data.columns.Ragged.take_padded`), so that a GPU may replay a step."""
    fast_precision: str = "tf32"
    """The arithmetic that trains fastest on a GPU and as well as any: ``float32``, ``tf32`` or ``bf16``."""
    compiled_precision: str = "tf32"
    """The same for compiled steps."""
    compiled_gain: float = 0.0
    """Seconds that a compiled step takes less than a captured one, on an H200 with the paper's batch size; 0 where
    compiling gains nothing or was not measured."""
    fixed_shapes: bool = True
    """Whether batches of as many rows are computed by the same kernels, whatever the rows are."""
    crop: int | None = None
    """How many consecutive samples training shows it at a time, where it reads samples in order, so that those of a
    session influence each other; ``None`` where each sample has its features alone."""
    with_context: bool = False
    """Whether the inputs come with the context of their patients; set where the backbone is built."""
    autocast_dtype: torch.dtype | None = None
    """The type of fewer bits that training steps compute in where it is safe; see :meth:`executed`."""
    caller: Callable[[Inputs], Tensor] | None = None
    """What training calls instead of :meth:`compute`, such as the same outside of the compiler; see
    :meth:`executed`."""

    def __call__(self, inputs: Inputs) -> Tensor:
        """The features in float32, whatever they were computed in."""
        return self.compute(inputs) if self.caller is None else self.caller(inputs)

    def compute(self, inputs: Inputs) -> Tensor:
        """Call :meth:`forward` in the precision that is set."""
        if self.autocast_dtype is None:
            return cast("Tensor", super().__call__(inputs))
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=self.autocast_dtype):
            return cast("Tensor", super().__call__(inputs)).float()

    @contextmanager
    def executed(
        self, *, dtype: torch.dtype | None = None, caller: Callable[[Inputs], Tensor] | None = None
    ) -> Iterator[None]:
        """Within it the backbone computes in another type or is called in another way; ``None`` changes nothing."""
        before = self.autocast_dtype, self.caller
        self.autocast_dtype, self.caller = dtype or before[0], caller or before[1]
        try:
            yield
        finally:
            self.autocast_dtype, self.caller = before

    @abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Features of a batch of inputs, ``(batch, output_size)``."""

    def fit_inputs(self, dataset: DomainDataset) -> None:
        """Learn what must come from training patients alone (scaling, quantiles, known codes), before training.

        Whatever it learns is kept in buffers of fixed shape, so that it is saved and loaded with the weights.
        """

    def for_samples_alone(self) -> Backbone:
        """A network like this one for samples that come without the context of their patients.

        A copy, unless the backbone can do without the columns of the context. For the copy they are 0.
        """
        return deepcopy(self)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        """The dataset with whatever can be worked out once instead of at every step, on a device.

        Parameters
        ----------
        dataset : DomainDataset
        device : torch.device
            Where the backbone is.
        budget : int
            Bytes that the result may take; where it would take more, the dataset is given back as it is.
        """
        return dataset


class SingleInput(Backbone):
    """Wraps any ``nn.Module`` that maps one tensor to ``(batch, width)`` as a backbone."""

    def __init__(self, schema: InputSchema, module: nn.Module) -> None:
        super().__init__()
        if len(schema.columns) != 1:
            raise ConfigError(
                f"{type(module).__name__} takes one tensor, but the dataset has the inputs {sorted(schema.columns)}: "
                "derive it from manydg.Backbone and pick them in forward(inputs)"
            )
        ((self.column, column),) = schema.columns.items()
        if column.nesting:
            raise ConfigError(
                f"{type(module).__name__} takes one tensor, but the rows of '{self.column}' differ in length: "
                "derive it from manydg.Backbone, whose forward(inputs) gets ragged columns"
            )
        self.module = module
        self.output_size = _width_of(module, column)
        promised = getattr(module, "output_size", self.output_size)
        if promised != self.output_size:
            raise ConfigError(
                f"{type(module).__name__} gives features of width {self.output_size}, but its output_size is {promised}"
            )

    def forward(self, inputs: Inputs) -> Tensor:
        return cast("Tensor", self.module(inputs[self.column]))


def _width_of(module: nn.Module, column: ColumnSchema) -> int:
    """Width of a module's output, measured with two rows of zeros."""
    name, shape = type(module).__name__, ("batch", *column.shape)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros(2, *column.shape, dtype=getattr(torch, column.dtype)))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{name} cannot take an input of shape {shape}: {reason}") from error
    for part, mode in modes.items():
        part.training = mode
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[0] != 2:
        shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"{name} must map {shape} to (batch, width); two rows give {shown}")
    return int(output.shape[1])


def as_backbone(module: nn.Module, schema: InputSchema) -> Backbone:
    """A backbone as it is, any other module wrapped."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a backbone is an nn.Module; got {type(module).__name__}")
    if not isinstance(module, Backbone):
        return SingleInput(schema, module)
    width = getattr(module, "output_size", None)
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"{type(module).__name__} must set output_size, the width of its features; it is {width!r}")
    module.with_context = TRUST in schema.columns
    return module


__all__ = [
    "BACKBONES",
    "SEARCHED_OPTIONS",
    "Backbone",
    "Inputs",
    "SingleInput",
    "as_backbone",
    "auto_backbone",
    "build_backbone",
]

BACKBONES: Registry[Backbone] = Registry("backbone", __name__, Backbone)


def build_backbone(name: str, schema: InputSchema, options: Mapping[str, Any] | None = None) -> Backbone:
    """Build a backbone by its name, or any trusted ``nn.Module`` class by ``package.module:Class``.

    The class is called with the options given, and with ``schema`` if it names that parameter.
    """
    cls: type[nn.Module] = BACKBONES.get(name)
    if not issubclass(cls, nn.Module):
        raise ConfigError(f"backbone '{name}' is not an nn.Module: derive it from torch.nn.Module or manydg.Backbone")
    parameters = inspect.signature(cls).parameters
    given = dict(options or {})
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            raise unknown_name(f"option of backbone {name}", key, [p for p in parameters if p != "schema"])
    if "schema" in parameters:
        given["schema"] = schema
    try:
        module = cls(**given)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        asked = ", ".join(f"{key}={value!r}" for key, value in (options or {}).items()) or "no options"
        raise ConfigError(f"backbone '{name}' cannot be built with {asked}: {error}") from error
    return as_backbone(module, schema)


def auto_backbone(schema: InputSchema) -> str:
    """The backbone that fits the inputs: the paper's for its four tasks, and a table's for anything dense.

    Examples
    --------
    >>> from manydg.data.dataset import ColumnSchema
    >>> auto_backbone(InputSchema({"x": ColumnSchema("float32", (48,))}))
    'mlp'
    """
    if "diagnoses" in schema.columns:
        return "gamenet"
    if "event_codes" in schema.columns:
        return "event-transformer"
    signal = schema.columns.get("signal") or schema.columns.get("spectrogram")
    if signal is not None:
        return "sleep-cnn" if signal.shape[0] <= 4 else "seizure-cnn"
    return "tabular" if schema.settings.get("missing") else "mlp"
