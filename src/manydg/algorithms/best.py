"""Best: several learners, weighed by how well they predict validation patients.

Wolpert, "Stacked Generalization", 1992; weights on the simplex as in Breiman, "Stacked Regressions", 1996. The
candidates are a network, the same network reading samples in order, and boosted trees with small and with large leaves,
each with and without patient context, as far as the data allow. Their log-probabilities are averaged with weights that
are fitted on validation patients; how far these are pulled towards equal ones is chosen out of fold by patient. See
``docs/method.md``.
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
from manydg.config import TrainingConfig
from manydg.data.columns import Column
from manydg.data.dataset import CONTEXT, DomainDataset, InputSchema
from manydg.data.timeline import ORDER, PAUSE
from manydg.files import Json
from manydg.targets import Target

_PULLS = (0.0, 0.01, 0.1, math.inf)
"""Strengths of the pull towards equal weights that are tried."""
_FOLDS = 5
_MOST_ROWS = 20_000
"""Validation samples that weights are fitted on, evenly spread."""
LEAST_SHARE = 0.01
"""A candidate with a smaller share of the weights is left out."""
_LARGE_LEAVES: Mapping[str, Json] = {
    "rounds": 300, "learning_rate": 0.05, "leaves": 16, "leaf_samples": 200, "l2": 10.0, "feature_share": 0.3,
}  # fmt: skip
"""Trees for patients with many samples, of whom twenty in a leaf may be one person."""
_ROWS_OF_A_TREE = 100_000
"""Of more training samples than these, LightGBM grows each tree on a random share: several trees cover all."""


@dataclass(frozen=True)
class Candidate:
    """A learner, and which columns of a dataset it reads.

    Parameters
    ----------
    options : frozenset of {"large-leaves", "context", "sequence"}
        ``context`` and ``sequence``: it reads the columns of patient context, and samples in order.
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
    """The learners that make sense for a dataset; the first is the network that reads everything there is.

    - ``schema``: With the columns of context and order, where there are any.
    """
    contexts = [frozenset(("context",)), frozenset()] if "context" in schema.settings else [frozenset[str]()]
    orders = [frozenset(("sequence",)), frozenset()] if "sequence" in schema.settings else [frozenset[str]()]
    found = [Candidate("ema", context | order) for order, context in itertools.product(orders, contexts)]
    if no_table(Candidate("").schema(schema)) is None:
        trees = "boosting" if ALGORITHMS.get("lightgbm").lacks() else "lightgbm"
        leaves = (frozenset(("large-leaves",)), frozenset[str]())
        found += [Candidate(trees, context | size) for context, size in itertools.product(contexts, leaves)]
    return found


class Member(nn.Module):
    """A trained candidate within a model.

    Parameters
    ----------
    weight : float
        What its log-probabilities are multiplied by.
    """

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

    def join(self, weight: float, others: Sequence[Member]) -> None:
        """Give the network a weight and put trained candidates beside it."""
        self.weight.fill_(weight)
        self.others = nn.ModuleDict({member.candidate.label: member for member in others})

    def predict(self, inputs: Inputs) -> Tensor:
        own = super().predict(inputs)
        if not self.others:
            return own
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

    Attributes
    ----------
    weights : Tensor ``(candidates,)`` float64
        Fitted on all validation patients; their sum is one over a temperature.
    out_of_fold : Tensor ``(rows, K)``
        Logits of each validation patient with weights that were fitted on other patients.
    """

    weights: Tensor
    out_of_fold: Tensor

    @property
    def shares(self) -> list[float]:
        """The weights as shares of one."""
        shares: list[float] = (self.weights / self.weights.sum()).tolist()
        return shares

    @property
    def counting(self) -> list[bool]:
        """Which candidates count."""
        return [share >= LEAST_SHARE for share in self.shares]


def stack(target: Target, logits: Sequence[Tensor], targets: Tensor, patients: Tensor, seed: int) -> Stack:
    """Weigh candidates by validation patients.

    Folds are of patients. The pull towards equal weights is the one with the smallest loss on folds that the weights
    were not fitted on; for the outputs out of fold it is chosen without the fold, too. With one patient the weights are
    equal.

    - ``logits`` ``(rows, K)``: Of each candidate.
    - ``targets``, ``patients``: Tensor ``(rows, ...)``, ``(rows,)``
    - ``seed``: Of the folds.
    """
    outputs = torch.stack([_normalised(target, one.to(torch.float64)) for one in logits])
    equal = torch.full((len(outputs),), 1 / len(outputs), dtype=torch.float64)
    _, codes = torch.unique(patients, return_inverse=True)
    count = int(codes.max()) + 1
    if count < 2 or len(outputs) == 1:
        return Stack(equal, _weighed(outputs, equal))
    fold = torch.from_numpy(np.random.default_rng(seed).permutation(count) % _FOLDS)[codes]
    held = torch.empty_like(outputs[0])
    for number in torch.unique(fold):
        own, rest = fold == number, fold != number
        held[own] = _weighed(outputs[:, own], _fit(target, outputs[:, rest], targets[rest], fold[rest]))
    return Stack(_fit(target, outputs, targets, fold), held)


def _fit(target: Target, outputs: Tensor, targets: Tensor, fold: Tensor) -> Tensor:
    """Weights with the pull that does best out of fold; equal ones, scaled, where all patients are of one fold."""
    numbers, best = torch.unique(fold), (math.inf, math.inf)
    for pull in _PULLS if len(numbers) > 1 else ():
        loss = 0.0
        for number in numbers:
            own, rest = fold == number, fold != number
            weights = _fit_weights(target, outputs[:, rest], targets[rest], pull)
            loss += float(target.loss_per_sample(_weighed(outputs[:, own], weights), targets[own]).sum())
        best = min(best, (loss, pull))
    return _fit_weights(target, outputs, targets, best[1])


def _weighed(outputs: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None, None] * outputs).sum(dim=0)


def _fit_weights(target: Target, outputs: Tensor, targets: Tensor, pull: float) -> Tensor:
    """Weights with the smallest loss plus ``pull`` times their distance from equal ones, times a scale.

    - ``outputs``: Tensor ``(candidates, rows, K)``
    - ``pull``: Of the Kullback-Leibler divergence; infinite for equal weights, so that the scale alone is fitted.
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
        value = target.loss(_weighed(outputs, scale.exp() * shares.exp()), targets)
        if not equal:
            value = value - pull * (shares.mean() + math.log(len(outputs)))
        torch.autograd.backward(value)
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (scale.exp() * free.softmax(dim=0)).detach()
