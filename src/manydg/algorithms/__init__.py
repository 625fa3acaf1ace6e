"""Algorithms: what one is, how to get one by name, and the parts that several share.

One file each; ``CONTRIBUTING.md`` shows how to add one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from manydg.backbones import Backbone, Inputs
from manydg.config import SEARCHED, Choices, Range
from manydg.data.dataset import Batch, DomainDataset
from manydg.errors import ConfigError, unknown_name
from manydg.files import Json, ParsedJson
from manydg.registry import Registry
from manydg.targets import Target

Sampling = Literal["samples", "pairs", "random-pairs", "episodes", "environments", "whole"]
Optimizers = dict[str, Optimizer]
Objective = tuple[Tensor, dict[str, Tensor]]
"""The sum that a step descends on, and its terms, detached."""


@dataclass(frozen=True)
class Hyperparameters:
    """Base of every algorithm's settings: a frozen dataclass whose fields are made by :func:`setting` or
    :func:`choice`."""


_LEAST = "least"
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def setting(default: Any, low: float, high: float, help: str, *, log: bool = True, least: int | None = None) -> Any:
    """A hyperparameter with its default and the range that ``manydg tune`` draws from.

    - ``least``: The smallest value that makes sense; by default 1 for a whole number that is never drawn as 0, else 0.
    """
    drawn_from = Range(low, high, log, whole=isinstance(default, int))
    if least is None:
        least = int(drawn_from.whole and low >= 1)
    return dataclasses.field(default=default, metadata={SEARCHED: drawn_from, "help": help, _LEAST: least})


def choice(default: str, options: tuple[str, ...], help: str) -> Any:
    """A hyperparameter that takes one of a few names; ``manydg tune`` draws from them."""
    return dataclasses.field(default=default, metadata={SEARCHED: Choices(options), "help": help})


class Algorithm(nn.Module):
    """Base class of algorithms.

    A subclass is a file in this package; the file's name is the algorithm's name. It sets ``Settings`` and
    ``sampling``, creates its modules in :meth:`build`, and implements :meth:`losses` and :meth:`predict`. A subclass
    with several optimisers or a custom training step overrides :meth:`optimizers` and :meth:`step`.

    Parameters
    ----------
    backbone : Backbone
        x -> v.
    target : Target
    n_domains : int
        Number of training patients.
    settings : Hyperparameters, optional
        An instance of the class's ``Settings``; its defaults if not given.

    Attributes
    ----------
    progress : Tensor
        Share of training completed, from 0 to 1, a scalar; the training loop sets it before every step.
    """

    title: ClassVar[str] = ""
    """As it is printed in tables and reports; made from its name where it has none."""
    summary: ClassVar[str] = ""
    """What it does, in one line."""
    order: ClassVar[int] = 500
    """Where it stands in a table: the plain model and the controls first, ManyDG last."""
    in_paper: ClassVar[bool] = False
    """Whether it is one of the methods that the paper's main tables compare."""
    is_control: ClassVar[bool] = False
    """Whether it is ManyDG without one of its ideas, to see what that idea is worth."""
    Settings: ClassVar[type[Hyperparameters]] = Hyperparameters
    sampling: Sampling = "samples"
    """Which rows a step gets: plain samples, same-patient pairs, random pairs, or several samples of each of several
    patients (``episodes``, and ``environments`` of one size). An algorithm with ``whole`` is not trained by steps but
    sees the training set once, in :meth:`fit_whole`. An algorithm may set it from its settings."""
    static_step: ClassVar[bool] = True
    """Whether a step launches the same kernels on every batch of a shape and never reads a value on the host, so that
    it can be captured as a CUDA graph."""
    uses_patients: ClassVar[bool] = False
    """Whether a prediction uses the patient's other samples; then :meth:`predict_patients` gets whole patients."""
    context: ClassVar[Literal["none", "offline", "causal"]] = "none"
    """The patient context of the inputs where a configuration leaves it at ``auto``."""
    requires: ClassVar[tuple[str, str] | None] = None
    """A package that training needs and a plain installation lacks, and the extra that has it; predictions do not need
    it."""
    indivisible: ClassVar[str] = ""
    """Why several processes cannot share a step; empty where only the backbone sees the inputs, so that each process
    can run it on a part of the rows."""
    progress: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """What an algorithm is called and where it stands is its own, not that of the algorithm it derives from."""
        super().__init_subclass__(**kwargs)
        for name in ("title", "summary", "order", "in_paper", "is_control"):
            if name not in vars(cls):
                setattr(cls, name, getattr(Algorithm, name))

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: Hyperparameters | None = None
    ) -> None:
        super().__init__()
        if reason := self.refuses(target, backbone):
            raise ConfigError(f"{type(self).__name__} cannot be used here: {reason}")
        self.backbone, self.target, self.n_domains = backbone, target, n_domains
        self.settings = settings if settings is not None else self.Settings()
        self.register_buffer("progress", torch.zeros(()), persistent=False)
        self._evaluator: Callable[[Batch], Objective] | None = None
        self.build()

    def build(self) -> None:
        """Create the modules besides the backbone; called once, with ``backbone``, ``target`` and ``settings`` set."""

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        """The reason why this algorithm cannot be used with a target or backbone; ``None`` if it can."""
        return None

    @classmethod
    def lacks(cls) -> str | None:
        """The missing package that this algorithm needs for training; ``None`` if none is missing."""
        if cls.requires is None or importlib.util.find_spec(cls.requires[0]) is not None:
            return None
        package, extra = cls.requires
        return f"it needs the package '{package}': pip install 'manydg[{extra}]'"

    @classmethod
    def settings_from(cls, given: Mapping[str, Json]) -> Hyperparameters:
        """Settings from values by name, after checking each."""
        fields = {field.name: field for field in dataclasses.fields(cls.Settings)}
        for name, value in given.items():
            if name not in fields:
                raise unknown_name(f"setting of {cls.__name__}", name, fields)
            _check_setting(f"{cls.__name__}.{name}", value, fields[name])
        return cls.Settings(**cast("ParsedJson", given))

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named scalar terms, weighted; their sum is minimised. A term that is switched off is not computed."""

    def watched(self, batch: Batch) -> dict[str, Tensor]:
        """Unweighted terms to report on validation patients, including those that are switched off; none by default.

        They are for learning curves only: nothing is trained or selected by them.
        """
        return {}

    @abstractmethod
    def predict(self, inputs: Inputs) -> Tensor:
        """Logits ``(batch, K)``, without information about the patients."""

    def predict_patients(self, inputs: Inputs, patients: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of whole patients, given only which rows belong to the same patient.

        Parameters
        ----------
        inputs : mapping of str to column
        patients : Tensor ``(batch,)`` int64
            A code per patient, equal for samples of the same patient.
        """
        return self.predict(inputs)

    def fit_inputs(self, train: DomainDataset) -> None:
        """Fit what depends only on the inputs of training patients, before training; by default, the backbone."""
        self.backbone.fit_inputs(train)

    def domains_of(self, train: DomainDataset) -> Tensor:
        """What ``domains`` of a batch holds for each training sample: by default the code of its patient.

        Codes are from 0 to fewer than the number of training patients. Called once, before the first step.
        """
        return train.domains

    def start(self, inputs: Inputs) -> None:
        """Set what depends on the scale of untrained features, from one batch of training samples; by default, nothing.

        Called once before the first step, without gradients; random state and batch statistics are restored afterwards.
        """

    def epoch_ended(self, train: DomainDataset) -> None:
        """Fit what needs all training samples at once, after the steps of every epoch; by default, nothing.

        Called before validation. The algorithm is in training mode, and must remain so.
        """

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        """Embeddings to inspect, by name; ``v`` is always among them."""
        return {"v": self.backbone(inputs)}

    def optimizers(self, lr: float, weight_decay: float) -> Optimizers:
        """The optimisers of a training run, by name."""
        return {"main": Adam(self.parameters(), lr=lr, weight_decay=weight_decay, fused=True)}

    def objective(self, batch: Batch) -> Objective:
        """The sum of all terms, which a step minimises, and the terms, detached."""
        terms = self.losses(batch)
        return cast("Tensor", sum(terms.values())), {name: term.detach() for name, term in terms.items()}

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        """One update; returns the terms, detached."""
        total, terms = self.evaluate(batch)
        descend(total, optimizers["main"])
        return terms

    def evaluate(self, batch: Batch) -> Objective:
        """The :meth:`objective`, by whatever training evaluates it with: compiled, say, or shared by processes."""
        return self.objective(batch) if self._evaluator is None else self._evaluator(batch)

    @contextmanager
    def evaluated_by(self, evaluator: Callable[[Batch], Objective]) -> Iterator[None]:
        """Within it steps get their objective from another callable that computes the same."""
        before, self._evaluator = self._evaluator, evaluator
        try:
            yield
        finally:
            self._evaluator = before

    def fit_whole(self, train: DomainDataset, seed: int, rounds: Rounds | None = None) -> None:
        """Fit to the whole training set at once; only for algorithms whose ``sampling`` is ``whole``.

        Parameters
        ----------
        train : DomainDataset
        seed : int
        rounds : Rounds, optional
            Called back with the rounds; says how many to keep; all are kept if not given.
        """
        raise ConfigError(f"{type(self).__name__} is trained by steps")


class Rounds:
    """Follows an algorithm that learns in rounds from the whole training set, and says how many of them to keep.

    This one keeps all. Training has one that scores the validation patients and keeps the best number.

    Attributes
    ----------
    val : DomainDataset or None
        The validation patients, where there are any.
    """

    val: DomainDataset | None = None

    def started(self, total: int) -> None:
        """Called before the first round with how many there are to be."""

    def ended(self, number: int, losses: Mapping[str, float], logits: Tensor) -> None:
        """Called after some of the rounds, and after the last.

        Parameters
        ----------
        number : int
            How many rounds are done.
        losses : mapping of str to float
            Terms of the training loss.
        logits : Tensor ``(samples, K)``
            Of the validation patients; empty without any.
        """

    def kept(self, total: int) -> int:
        """How many of the rounds to keep."""
        return total


class Adam(torch.optim.Adam):
    """Torch's Adam without its marks for the compiler: no update is compiled here, and importing the compiler for the
    sake of the marks takes seconds of every start."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


def descend(loss: Tensor, optimizer: Optimizer) -> None:
    """One gradient step."""
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    optimizer.step()


def _check_setting(name: str, value: Json, field: dataclasses.Field[Any]) -> None:
    searched = field.metadata.get(SEARCHED)
    if isinstance(searched, Choices):
        if value not in searched.options:
            raise unknown_name(f"value of {name}", str(value), map(str, searched.options))
        return
    default = field.default
    expected = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, expected) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(f"{name} is {value!r}; it must be {_KINDS[type(default)]}, such as {default!r}")
    least = field.metadata.get(_LEAST, 0)
    if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number of at least {least}")


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Hyperparameters",
    "Objective",
    "Optimizers",
    "Perceptron",
    "Rounds",
    "algorithm_order",
    "build_algorithm",
    "choice",
    "controls",
    "descend",
    "paper_methods",
    "setting",
]

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", __name__, Algorithm)


def build_algorithm(
    name: str, backbone: Backbone, target: Target, n_domains: int, settings: Mapping[str, Json] | None = None
) -> Algorithm:
    """Build an algorithm by name and check its settings."""
    cls = ALGORITHMS.get(name)
    return cls(backbone, target, n_domains, cls.settings_from(settings or {}))


def paper_methods() -> tuple[str, ...]:
    """The algorithms that the paper's main tables compare, in their order."""
    return _in_order(name for name in ALGORITHMS.names() if ALGORITHMS.get(name).in_paper)


def controls() -> tuple[str, ...]:
    """The algorithms that show what an idea of ManyDG is worth, in their order."""
    return _in_order(name for name in ALGORITHMS.names() if ALGORITHMS.get(name).is_control)


def algorithm_order(name: str) -> int:
    """Where an algorithm stands in a table; one that is not installed stands among those of other packages."""
    try:
        return ALGORITHMS.get(name).order
    except ConfigError:
        return Algorithm.order


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=algorithm_order))


# Parts that several algorithms share: networks, gradient reversal, and statistics of groups within a batch


class Perceptron(nn.Sequential):
    """Linear layers with a ReLU between them.

    Parameters
    ----------
    *widths : int
        Of the inputs, of each hidden layer and of the outputs.

    Examples
    --------
    >>> [tuple(p.shape) for p in Perceptron(8, 4, 2).parameters()]
    [(4, 8), (4,), (2, 4), (2,)]
    """

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        super().__init__(*layers[:-1])


FIRST_LOGITS = 0.5
"""Largest root mean square of a head's first logits: the first loss is then near a uniform guess's (docs/method.md)."""


def first_scale(logits: Tensor) -> Tensor:
    """The factor, 1 at most, that brings logits ``(batch, K)`` of untrained features down to :data:`FIRST_LOGITS`.

    Examples
    --------
    >>> round(first_scale(torch.tensor([[7.0, -7.0]])).item(), 3)
    0.071
    """
    return (FIRST_LOGITS / logits.square().mean().sqrt().clamp_min(1e-6)).clamp_max(1)


class PrototypeHead(nn.Module):
    """Similarity of features to one learned prototype per class, over a temperature.

    - ``classes``, ``width``: K prototypes of the features' width.
    - ``similarity`` {"cosine", "inner"}: The paper writes an inner product; its authors' code normalises both sides.
    """

    def __init__(self, classes: int, width: int, temperature: float, similarity: str) -> None:
        super().__init__()
        # A cosine ignores the length; inner products with standard normal prototypes would start in the tens.
        length = 1.0 if similarity == "cosine" else width**-0.5
        self.prototypes = nn.Parameter(length * torch.randn(classes, width))
        self.temperature, self.similarity = temperature, similarity

    def start(self, features: Tensor) -> None:
        """Prefer no class at first: prototypes at right angles to the mean feature, with logits of order one.

        Untrained features of one network are a hundred times as long as another's, and share a mean direction. Logits
        in the tens, or a class that all samples prefer, cost the first epochs, which must undo them. A cosine does not
        depend on the length of the prototypes.
        """
        if self.similarity == "inner":
            mean = functional.normalize(features.mean(dim=0), dim=0)
            self.prototypes.sub_(torch.outer(self.prototypes @ mean, mean))
            self.prototypes.mul_(first_scale(self(features)))

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of features ``(batch, width)``."""
        prototypes: Tensor = self.prototypes
        if self.similarity == "cosine":
            features, prototypes = functional.normalize(features, dim=-1), functional.normalize(prototypes, dim=-1)
        return features @ prototypes.T / self.temperature

    def label(self, target: Target, targets: Tensor) -> Tensor:
        """The labels as a decoder gets them, ``(batch, width)``."""
        return target.label_prototype(self.prototypes, targets)


class ValueHead(nn.Module):
    """A linear head for a measured value, in place of prototypes.

    What a decoder gets of the label is a learned embedding of the standardised value.

    - ``width``: Of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.embedding = Perceptron(1, width, width)

    def start(self, features: Tensor) -> None:
        """Predict values near the training patients' mean at first, whatever the length of untrained features."""
        centred = features - features.mean(dim=0)
        self.linear.weight.mul_(first_scale(centred @ self.linear.weight.T))
        self.linear.bias.copy_(-(self.linear.weight @ features.mean(dim=0)))

    def forward(self, features: Tensor) -> Tensor:
        """Standardised values ``(batch, 1)`` of features ``(batch, width)``."""
        values: Tensor = self.linear(features)
        return values

    def label(self, target: Target, targets: Tensor) -> Tensor:
        """The labels as a decoder gets them, ``(batch, width)``."""
        embedded: Tensor = self.embedding(target.distribution(targets).to(self.linear.weight.dtype))
        return embedded


def label_head(target: Target, width: int, temperature: float, similarity: str) -> PrototypeHead | ValueHead:
    """The head that reads a label off features: prototypes of classes, or a linear head for a measured value."""
    return ValueHead(width) if target.numeric else PrototypeHead(target.size, width, temperature, similarity)


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, strength: Tensor | float) -> Tensor:
        ctx.strength = strength
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse_gradient(features: Tensor, strength: Tensor | float) -> Tensor:
    """The features unchanged; in the backward pass their gradient is negated and scaled.

    Examples
    --------
    >>> v = torch.ones(2, requires_grad=True)
    >>> reverse_gradient(v, 0.5).sum().backward()
    >>> v.grad
    tensor([-0.5000, -0.5000])
    """
    reversed_features: Tensor = _ReverseGradient.apply(features, strength)  # type: ignore[no-untyped-call]
    return reversed_features


def ramp(progress: Tensor) -> Tensor:
    """2 / (1 + exp(-10 p)) - 1: from 0 at the beginning of training to almost 1 at its end.

    Examples
    --------
    >>> ramp(torch.tensor([0.0, 0.1, 1.0]))
    tensor([0.0000, 0.4621, 0.9999])
    """
    return 2 / (1 + torch.exp(-10 * progress)) - 1


def domain_entropy(domains: Tensor) -> Tensor:
    """Entropy in nats of the batch's patients: the loss of a discriminator that knows only their frequencies.

    Examples
    --------
    >>> round(domain_entropy(torch.tensor([4, 4, 9, 9])).item(), 4)
    0.6931
    """
    shares = torch.bincount(domains).to(torch.float64) / len(domains)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy


def group_sums(values: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Sum of the rows of each group.

    - ``values`` ``(batch, ...)``
    - ``groups``: Tensor ``(batch,)`` int64, from 0 to ``n_groups - 1``
    - returns ``(n_groups, ...)``
    """
    return values.new_zeros(n_groups, *values.shape[1:]).index_add(0, groups, values)


def group_counts(groups: Tensor, n_groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Number of rows of each group, ``(n_groups,)``, as floating-point numbers."""
    return group_sums(torch.ones(len(groups), dtype=dtype, device=groups.device), groups, n_groups)


def group_risks(losses: Tensor, groups: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Risk of each group, R_e: the mean loss of its rows.

    - ``losses`` ``(batch,)``
    - ``groups`` ``(batch,)``
    - returns ``risks`` ``(n_groups,)``: Zero for a group without a row.
    - returns ``present`` ``(n_groups,)``: 1 for the groups that have a row, else 0.
    """
    counts = group_counts(groups, n_groups, losses.dtype)
    return group_sums(losses, groups, n_groups) / counts.clamp_min(1), (counts > 0).to(losses.dtype)


def mean_and_variance(values: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of the values that are present; both arguments ``(n,)``."""
    number = present.sum().clamp_min(1)
    mean = (values * present).sum() / number
    return mean, ((values - mean).square() * present).sum() / number
