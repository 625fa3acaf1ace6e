"""Best: several learners, weighed by how well they predict validation patients.

Wolpert, "Stacked Generalization", 1992; weights on the simplex as in Breiman, "Stacked Regressions", 1996. The
candidates are a network, the same network reading samples in order, and boosted trees with small and with large leaves,
each with and without patient context, as far as the data allow. Their log-probabilities are averaged with weights that
are fitted on validation patients; few of these keep equal weights, or one candidate, unless others are clearly ahead.
See ``docs/method.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS, Algorithm
from manydg.algorithms._forest import no_table
from manydg.algorithms.ema import EMA, EMASettings
from manydg.backbones import Backbone, Inputs
from manydg.backbones._sequences import ClassChain
from manydg.config import TrainingConfig
from manydg.data.columns import Column
from manydg.data.dataset import CONTEXT, DomainDataset, InputSchema
from manydg.data.timeline import CHAIN, ORDER, PAUSE
from manydg.files import Json
from manydg.targets import Target

_PULLS = (0.0, 0.01, 0.1, math.inf)
"""Strengths of the pull towards equal weights that are tried."""
_SCALE_PULL = 2.0
"""Pull of the logarithm of the scale towards 0, over the number of patients: as if every patient were one observation
and the logarithm were normal with a standard deviation of one half."""
_LEAST_GAIN = 1e-4
"""Smaller differences between losses do not count."""
_FEW = 30
"""Fewer validation patients than these choose equal weights or a single candidate in doubt, more the fitted ones."""
_FOLDS = 5
_MOST_ROWS = 5_000
"""Validation samples that weights are fitted on, evenly spread."""
PLAIN = ("ema+context", "ema")
"""Labels of the networks that read each sample by itself, with and without context."""
LEAST_SHARE = 0.01
"""A candidate with a smaller share of the weights is left out."""
_LARGE_LEAVES: Mapping[str, Json] = {
    "rounds": 300, "learning_rate": 0.05, "leaves": 16, "leaf_samples": 200, "l2": 10.0, "feature_share": 0.3,
}  # fmt: skip
"""Trees for patients with many samples, of whom twenty in a leaf may be one person."""
_ROWS_OF_A_TREE = 60_000
"""Of more training samples than these, LightGBM grows each tree on a random share: several trees cover all."""


@dataclass(frozen=True)
class Candidate:
    """A learner, and which columns of a dataset it reads.

    - ``options`` {"large-leaves", "context", "sequence"}: With ``context`` and ``sequence`` it reads the columns of
      patient context, and samples in order.
    """

    algorithm: str
    options: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Its name in records and among the weights of a model: ``lightgbm+context``."""
        return "+".join([self.algorithm, *sorted(self.options)])

    @staticmethod
    def of(label: str) -> Candidate:
        """The candidate of a label."""
        algorithm, *options = label.split("+")
        return Candidate(algorithm, frozenset(options))

    def configured(self, config: TrainingConfig, rows: int = 0) -> TrainingConfig:
        """The options of its training on so many samples."""
        settings = dict(_LARGE_LEAVES) if "large-leaves" in self.options else {}
        if self.algorithm == "lightgbm" and rows > _ROWS_OF_A_TREE:
            settings["sample_share"] = _ROWS_OF_A_TREE / rows
        return config.replace(algorithm=self.algorithm, settings=settings)

    def reads(self, column: str) -> bool:
        """Whether it gets an input column."""
        if column in (ORDER, PAUSE):
            return "sequence" in self.options
        return "context" in self.options or not column.startswith(CONTEXT)

    def schema(self, schema: InputSchema) -> InputSchema:
        """The part of a schema that it reads."""
        columns = {name: column for name, column in schema.columns.items() if self.reads(name)}
        return dataclasses.replace(schema, columns=columns, settings=self._settings(schema.settings))

    def view(self, dataset: DomainDataset) -> DomainDataset:
        """The part of a dataset that it reads."""
        columns = {name: column for name, column in dataset.columns.items() if self.reads(name)}
        info = dataclasses.replace(dataset.info, settings=self._settings(dataset.info.settings))
        return dataclasses.replace(dataset, columns=columns, info=info, stored_hash=None)

    def _settings(self, settings: Mapping[str, Json]) -> dict[str, Json]:
        left_out = {"context", "sequence"} - self.options
        return {name: value for name, value in settings.items() if name not in left_out}


def candidates(schema: InputSchema) -> list[Candidate]:
    """The learners that make sense for a dataset; the first is the network that reads everything there is, and plain
    networks come next.

    - ``schema``: With the columns of context and order, where there are any.
    """
    contexts = [frozenset(("context",)), frozenset()] if "context" in schema.settings else [frozenset[str]()]
    sequence = schema.settings.get("sequence")
    read = isinstance(sequence, Mapping) and sequence["kind"] != CHAIN
    orders = [frozenset(("sequence",)), frozenset()] if read else [frozenset[str]()]
    learners = [Candidate("ema", context | order) for order, context in itertools.product(orders, contexts)]
    if no_table(Candidate("").schema(schema)) is None:
        trees = "boosting" if ALGORITHMS.get("lightgbm").lacks() else "lightgbm"
        leaves = (frozenset(("large-leaves",)), frozenset[str]())
        learners += [Candidate(trees, context | size) for context, size in itertools.product(contexts, leaves)]
    return learners[:1] + sorted(learners[1:], key=lambda one: one.label not in PLAIN)


class Member(nn.Module):
    """A trained candidate within a model, and the ``weight`` that its log-probabilities are multiplied by."""

    weight: Tensor

    def __init__(self, algorithm: Algorithm, candidate: Candidate, weight: float) -> None:
        super().__init__()
        self.algorithm, self.candidate = algorithm, candidate
        self.register_buffer("weight", torch.tensor(weight))

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits ``(batch, K)`` from the columns that the candidate reads."""
        read: dict[str, Column] = {name: column for name, column in inputs.items() if self.candidate.reads(name)}
        return self.algorithm.predict(read)


class Best(EMA):
    """The first candidate itself, and after training the others beside it, each with a weight.

    Attributes
    ----------
    others : nn.ModuleDict
        The other candidates that count, by label.
    weight : Tensor
        What the log-probabilities of this network are multiplied by, a scalar; with those of the others the sum is one
        over a temperature.
    chain : ClassChain or None
        Reads the classes of each session in the order of time, where that helps.
    """

    title, order = "Best", 890
    summary = "A network, a sequence model and boosting, with and without context, weighed on validation patients."
    indivisible = "its candidates are trained one after the other, boosted trees among them"

    settings: EMASettings
    weight: Tensor

    def __init__(self, backbone: Backbone, target: Target, n_domains: int, settings: EMASettings | None = None) -> None:
        super().__init__(backbone, target, n_domains, settings)
        self.others = nn.ModuleDict()
        self.register_buffer("weight", torch.ones(()))
        self.chain: ClassChain | None = None

    def join(self, weight: float, others: Sequence[Member]) -> None:
        """Give the network a weight and put trained candidates beside it."""
        self.weight.fill_(weight)
        self.others = nn.ModuleDict({member.candidate.label: member for member in others})

    def predict(self, inputs: Inputs) -> Tensor:
        logits = self._mixture(inputs)
        return logits if self.chain is None else self.chain(logits, inputs[ORDER], inputs[PAUSE])

    def _mixture(self, inputs: Inputs) -> Tensor:
        own = super().predict(inputs)
        if not self.others:
            return self.weight * own
        terms = [self.weight * _normalised(self.target, own)]
        for member in self.others.values():
            assert isinstance(member, Member)
            terms.append(member.weight * _normalised(self.target, member(inputs)))
        return torch.stack(terms).sum(dim=0)


def _normalised(target: Target, logits: Tensor) -> Tensor:
    """Log-probabilities; of labels that do not exclude one another, the logits."""
    return logits.log_softmax(dim=-1) if target.exclusive else logits


@dataclass(frozen=True, eq=False)
class Stack:
    """Weights of candidates.

    - ``weights`` ``(candidates,)`` float64: Fitted on all validation patients; their sum is one over a temperature.
    - ``out_of_fold`` ``(rows, K)``: Logits of each validation patient with weights that were chosen and fitted on other
      patients.
    - ``reason``: Why it is a mixture, or one candidate alone.
    """

    weights: Tensor
    out_of_fold: Tensor
    reason: str

    @property
    def shares(self) -> list[float]:
        """The weights as shares of one."""
        shares: list[float] = (self.weights / self.weights.sum()).tolist()
        return shares

    @property
    def counting(self) -> list[bool]:
        """Which candidates count."""
        return [share >= LEAST_SHARE for share in self.shares]


def stack(target: Target, logits: Mapping[str, Tensor], targets: Tensor, patients: Tensor, seed: int) -> Stack:
    """Weigh candidates by validation patients: equal weights, one candidate alone, or fitted weights.

    With few patients candidates with context have equal weights to start with (all, where none has context); the best
    single candidate, and then fitted weights, replace what was chosen before only where the loss is smaller by more
    than one standard error over patients. With many patients the weights are fitted, and a single candidate replaces
    them by the same rule. Losses are out of fold, and folds are of patients. For the outputs out of fold this choice,
    too, is made without the fold.

    - ``logits`` ``(rows, K)``: Of each candidate, by its label.
    - ``targets``, ``patients``: Tensor ``(rows, ...)``, ``(rows,)``
    - ``seed``: Of the folds.
    """
    rows = _Rows.of(target, logits, targets, patients, seed)
    single = [_Option(label, (number,)) for number, label in enumerate(logits)]
    mixed = [_Option("a fitted mixture", tuple(range(len(logits))), pull) for pull in _PULLS if len(logits) > 1]
    informed = tuple(number for number, label in enumerate(logits) if "context" in Candidate.of(label).options)
    everyone = informed or tuple(range(len(logits)))
    start = single[everyone[0]] if len(everyone) == 1 else _Option("equal weights", everyone)
    held = torch.empty_like(rows.outputs[0])
    for number in torch.unique(rows.fold):
        own = rows.fold == number
        weights, _ = _choose(start, single, mixed, rows.take(~own))
        held[own] = _weighed(rows.outputs[:, own], weights)
    weights, reason = _choose(start, single, mixed, rows)
    return Stack(weights, held, reason)


def second_is_worse(target: Target, logits: Mapping[str, Tensor], targets: Tensor, patients: Tensor, seed: int) -> bool:
    """Whether the second of two candidates has a larger loss out of fold, by more than one standard error over
    patients; parameters as those of :func:`stack`."""
    rows = _Rows.of(target, logits, targets, patients, seed)
    if len(torch.unique(rows.fold)) < 2:
        return False
    first, second = (_Option(label, (number,)) for number, label in enumerate(logits))
    gain, error = _gain(first.losses(rows), second.losses(rows), len(targets))
    return gain > error


@dataclass(frozen=True, eq=False)
class _Rows:
    """Validation samples to choose weights by: outputs ``(candidates, rows, K)``, and the fold of a row's patient."""

    target: Target
    outputs: Tensor
    targets: Tensor
    patients: Tensor
    fold: Tensor

    @staticmethod
    def of(target: Target, logits: Mapping[str, Tensor], targets: Tensor, patients: Tensor, seed: int) -> _Rows:
        outputs = torch.stack([_normalised(target, one.to(torch.float64)) for one in logits.values()])
        _, codes = torch.unique(patients, return_inverse=True)
        fold = torch.from_numpy(np.random.default_rng(seed).permutation(int(codes.max()) + 1) % _FOLDS)[codes]
        return _Rows(target, outputs, targets, codes, fold)

    def take(self, own: Tensor) -> _Rows:
        return _Rows(self.target, self.outputs[:, own], self.targets[own], self.patients[own], self.fold[own])


@dataclass(frozen=True)
class _Option:
    """Weights to choose from: of some candidates, pulled towards equal ones."""

    name: str
    members: tuple[int, ...]
    pull: float = math.inf

    def fit(self, rows: _Rows) -> Tensor:
        """Weights ``(candidates,)`` times a scale."""
        weights = torch.zeros(len(rows.outputs), dtype=torch.float64)
        own, count = list(self.members), len(torch.unique(rows.patients))
        weights[own] = _fit_weights(rows.target, rows.outputs[own], rows.targets, self.pull, _SCALE_PULL / count)
        return weights

    def even(self, rows: _Rows) -> Tensor:
        """Equal weights ``(candidates,)``."""
        weights = torch.zeros(len(rows.outputs), dtype=torch.float64)
        weights[list(self.members)] = 1 / len(self.members)
        return weights

    def losses(self, rows: _Rows) -> Tensor:
        """Summed loss of each patient ``(patients,)`` by weights that were fitted on the other folds."""
        _, codes = torch.unique(rows.patients, return_inverse=True)
        sums = torch.zeros(int(codes.max()) + 1, dtype=torch.float64)
        for number in torch.unique(rows.fold):
            own = rows.fold == number
            held, weights = rows.take(own), self.fit(rows.take(~own))
            loss = held.target.loss_per_sample(_weighed(held.outputs, weights), held.targets)
            sums.index_add_(0, codes[own], loss.to(torch.float64))
        return sums


def _choose(start: _Option, single: Sequence[_Option], mixed: Sequence[_Option], rows: _Rows) -> tuple[Tensor, str]:
    """Weights by the rule of one standard error, and the reason in words.

    - ``start``: What few patients choose in doubt.
    """
    count, compared = len(torch.unique(rows.patients)), []
    if not mixed or len(torch.unique(rows.fold)) < 2:
        return start.even(rows), f"{start.name}: nothing to compare"
    losses = {option: option.losses(rows) for option in {start, *single, *mixed}}
    mixture, alone = (min(group, key=lambda one: float(losses[one].sum())) for group in (mixed, single))
    best, *rivals = (start, alone, mixture) if count < _FEW else (mixture, alone)
    for rival in rivals:
        if rival == best:
            continue
        gain, error = _gain(losses[rival], losses[best], len(rows.targets))
        compared.append(f"{rival.name} minus {best.name} {-gain:+.3g} ± {error:.2g}")
        if gain > max(error, _LEAST_GAIN):
            best = rival
    # A single one is used as it is: its temperature is fitted after training, as that of any algorithm.
    weights = best.fit(rows) if len(best.members) > 1 else best.even(rows)
    return weights, f"{best.name}, by the loss out of fold of {count} validation patients: {', '.join(compared)}"


def _gain(new: Tensor, old: Tensor, samples: int) -> tuple[float, float]:
    """How much smaller a loss is, per sample, and its standard error over patients; from each patient's summed loss."""
    gains = (old - new) * len(new) / samples
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(new))


def _weighed(outputs: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None, None] * outputs).sum(dim=0)


def _fit_weights(target: Target, outputs: Tensor, targets: Tensor, pull: float, scale_pull: float) -> Tensor:
    """Weights with the smallest loss plus ``pull`` times their distance from equal ones, times a scale.

    - ``outputs``: Tensor ``(candidates, rows, K)``
    - ``pull``: Of the Kullback-Leibler divergence; infinite for equal weights, so that the scale alone is fitted.
    - ``scale_pull``: Of the square of the scale's logarithm.
    """
    step = max(1, outputs.shape[1] // _MOST_ROWS)
    outputs, targets = outputs[:, ::step], targets[::step]
    free = torch.zeros(len(outputs), dtype=torch.float64, requires_grad=True)
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    equal = math.isinf(pull)
    optimizer = torch.optim.LBFGS([scale] if equal else [free, scale], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        shares = free.log_softmax(dim=0)
        value = target.loss(_weighed(outputs, scale.exp() * shares.exp()), targets) + scale_pull * scale.square().sum()
        if not equal:
            value = value - pull * (shares.mean() + math.log(len(outputs)))
        torch.autograd.backward(value)
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (scale.exp() * free.softmax(dim=0)).detach()
