"""Backbones: what turns inputs x into features v, and what those of tables share.

One file each; ``CONTRIBUTING.md`` shows how to add one.
"""

from __future__ import annotations

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from manydg.config import Choices, Range, Searched
from manydg.data.columns import CATEGORIES, Column, take
from manydg.data.dataset import TRUST, ColumnSchema, DomainDataset, InputSchema
from manydg.errors import ConfigError, ManyDGWarning, unknown_name
from manydg.files import JsonObject
from manydg.registry import Registry

Inputs = Mapping[str, Column]
SEARCHED_OPTIONS: Mapping[str, Searched] = {"width": Choices((64, 128, 256)), "dropout": Range(0.0, 0.6)}
"""What ``manydg tune`` draws from, for every backbone that has the option."""


class Backbone(nn.Module):
    """Base class of backbones, h: x -> v.

    The first argument of a subclass is the dataset's :class:`~manydg.data.dataset.InputSchema`; its options are
    keywords with defaults. It sets ``output_size``.

    Attributes
    ----------
    output_size : int
        Width of the features v.
    """

    output_size: int
    takes_padded: bool = False
    """Whether ragged columns may come in batches of fixed shape, with leftovers after the last row (see
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
        """Fit what must come from training patients only (scaling, quantiles, known codes), before training.

        The result is kept in buffers of fixed shape, so that it is saved and loaded with the weights.
        """

    def for_samples_alone(self) -> Backbone:
        """A network like this one for samples that come without the context of their patients.

        A copy, unless the backbone can do without the columns of the context. For the copy they are 0.
        """
        return deepcopy(self)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        """The dataset with everything that can be computed once instead of at every step, on a device.

        Parameters
        ----------
        dataset : DomainDataset
        device : torch.device
            Where the backbone is.
        budget : int
            Maximum size of the result in bytes; if it would be larger, the dataset is returned unchanged.
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


def build_backbone(name: str, schema: InputSchema, options: JsonObject | None = None) -> Backbone:
    """Build a backbone by its name, or any trusted ``nn.Module`` class by ``package.module:Class``.

    The class is called with the options given, and with ``schema`` if it names that parameter.
    """
    cls: type[nn.Module] = BACKBONES.get(name)
    if not issubclass(cls, nn.Module):
        raise ConfigError(f"backbone '{name}' is not an nn.Module: derive it from torch.nn.Module or manydg.Backbone")
    parameters = inspect.signature(cls).parameters
    given: dict[str, object] = dict(options or {})
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


# Dense columns as one table of numbers, its scaling by statistics of training patients, and levels of categories


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
