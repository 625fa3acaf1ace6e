"""A Markov chain of the classes over samples in time: a hidden Markov model whose evidence is a model's own output.

Rabiner, "A Tutorial on Hidden Markov Models", 1989. Transitions come from training patients, and how far the output of
a single sample counts is chosen on validation patients. See ``docs/method.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.data.columns import Column
from manydg.data.dataset import DomainDataset
from manydg.data.timeline import ORDER, PAUSE
from manydg.targets import Target

LEAST_PROBABILITY = 1e-6
EMISSIONS, PRIORS, SHARPNESSES = (0.3, 0.5, 1.0), (0.0, 0.3, 0.6), (0.2, 0.3, 0.5, 0.7, 1.0)
_MOST_PAUSES = 10
"""A longer pause, in usual ones, begins the chain anew."""
_FOLDS = 5

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain of the classes over a patient's samples in time.

    - ``transitions`` ``(K, K)``: Probability of each class one usual pause after each other, of training patients.
    - ``shares`` ``(K,)``: Of the classes, of training patients.
    - ``pause``: Usual time from one sample of a patient to the next.
    - ``emission``, ``prior``, ``sharpness``: What a sample's own logits count for, which part of the classes' usual log
      shares is taken out of them, and the factor of the resulting log probabilities.
    """

    transitions: Array
    shares: Array
    pause: float = 1.0
    emission: float = 0.5
    prior: float = 0.3
    sharpness: float = 0.5

    def read(
        self,
        sessions: Sequence[Array],
        pauses: Sequence[Array],
        labels: Sequence[Array] | None = None,
        *,
        causal: bool,
    ) -> list[Array]:
        """Log probabilities of the classes by the forward-backward algorithm, or by its first half alone if ``causal``.

        All sessions go through the recursion together, each padded to the longest.

        - ``sessions`` ``(samples, K)``: Logits of each, in the order of time.
        - ``pauses`` ``(samples,)``: Time since the sample before; NaN for the first.
        - ``labels`` ``(samples, K)``: 1 for the class of a sample that is known, all 0 where it is not.
        """
        usual = np.maximum(self.shares, LEAST_PROBABILITY) / np.maximum(self.shares, LEAST_PROBABILITY).sum()
        shape = max(map(len, sessions)), len(sessions), len(usual)
        evidence, counts = np.ones(shape), np.ones(shape[:2], np.int64)
        for column, (logits, since) in enumerate(zip(sessions, pauses, strict=True)):
            own = self.emission * (logits - self.prior * np.log(usual))
            own = np.exp(own - own.max(axis=1, keepdims=True))
            if labels is not None:
                own = np.where(labels[column].any(axis=1, keepdims=True), labels[column], own)
            # A sample without an output says nothing.
            evidence[: len(own), column] = np.where(np.isfinite(own).all(axis=1, keepdims=True), own, 1.0)
            steps = np.rint(since / self.pause)
            # After a long pause, and between samples of the same time, nothing is carried over.
            counts[: len(own), column] = np.where((steps >= 1) & (steps <= _MOST_PAUSES), steps, 0)
        powers = [np.linalg.matrix_power(self.transitions, count) for count in range(1, _MOST_PAUSES + 1)]
        moves = np.stack([np.tile(usual, (len(usual), 1)), *powers])
        chance = _forward_backward(evidence, counts, moves, usual, causal=causal)
        whole = np.log(np.maximum(chance / chance.sum(axis=2, keepdims=True), LEAST_PROBABILITY)) * self.sharpness
        return [whole[: len(logits), column] for column, logits in enumerate(sessions)]


def _forward_backward(
    evidence: Array, counts: npt.NDArray[np.int64], moves: Array, start: Array, *, causal: bool
) -> Array:
    """Chances of the classes, not normalised, ``(steps, sessions, K)``.

    - ``counts`` ``(steps, sessions)``: Which of the ``moves`` ``(moves, K, K)`` comes before each step.
    """
    # Mostly all of them have the same pause: one product of matrices.
    alike = np.where((counts == counts[:, :1]).all(axis=1), counts[:, 0], -1)
    chance, belief = np.empty(evidence.shape), np.tile(start, (evidence.shape[1], 1))
    for row in range(len(evidence)):
        moved = belief @ moves[alike[row]] if alike[row] >= 0 else (belief[:, None] @ moves[counts[row]])[:, 0]
        belief = moved * evidence[row]
        belief /= belief.sum(axis=1, keepdims=True)
        chance[row] = belief
    belief = np.ones(evidence.shape[1:])
    for row in range(len(evidence) - 1, 0, -1) if not causal else ():
        belief = belief * evidence[row]
        same = alike[row] >= 0
        belief = belief @ moves[alike[row]].T if same else (moves[counts[row]] @ belief[:, :, None])[:, :, 0]
        belief /= belief.max(axis=1, keepdims=True)
        chance[row - 1] *= belief
    return chance


class ClassChain(nn.Module):
    """A chain as the last part of a model that predicts whole sessions.

    - ``causal``: Whether a sample's output may draw on earlier samples alone.
    """

    transitions: Tensor
    shares: Tensor
    strengths: Tensor

    def __init__(self, chain: Chain, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.register_buffer("transitions", torch.from_numpy(chain.transitions))
        self.register_buffer("shares", torch.from_numpy(chain.shares))
        self.register_buffer("strengths", torch.tensor([chain.emission, chain.prior, chain.sharpness]).double())

    @staticmethod
    def empty(classes: int, *, causal: bool) -> ClassChain:
        """One with room for the numbers of a file."""
        return ClassChain(Chain(np.zeros((classes, classes)), np.zeros(classes)), causal=causal)

    def forward(self, logits: Tensor, order: Column, pause: Column) -> Tensor:
        """Log probabilities ``(rows, K)``; samples whose numbers in ``order`` follow one another are a session."""
        chain = Chain(self.transitions.cpu().numpy(), self.shares.cpu().numpy(), 1.0, *self.strengths.tolist())
        sessions = _Sessions.of(logits, order, pause)
        answer = sessions.joined(chain.read(sessions.logits, sessions.pauses, causal=self.causal))
        # Without an output of its own a sample has none here either.
        finite = torch.isfinite(logits).all(dim=-1, keepdim=True)
        return torch.where(finite, torch.from_numpy(answer).to(logits), torch.nan)


@dataclass(frozen=True, eq=False)
class _Sessions:
    """Logits of samples by session, in the order of time, and the time since the sample before in usual pauses."""

    rows: list[npt.NDArray[np.int64]]
    logits: list[Array]
    pauses: list[Array]

    @staticmethod
    def of(logits: Tensor, order: Column, pause: Column) -> _Sessions:
        assert isinstance(order, Tensor)
        assert isinstance(pause, Tensor)
        numbers = order.cpu().numpy()
        by_time = np.argsort(numbers, kind="stable")
        begins = np.flatnonzero(np.diff(numbers[by_time], prepend=-2) != 1)
        values = logits.detach().log_softmax(dim=-1).double().cpu().numpy()
        since = np.expm1(pause.double().squeeze(-1).cpu().numpy())
        rows = np.split(by_time, begins[1:])
        pauses = [np.concatenate([[np.nan], since[own[1:]]]) for own in rows]
        return _Sessions(rows, [values[own] for own in rows], pauses)

    def joined(self, parts: list[Array]) -> Array:
        """What was worked out by session, in the order of the samples."""
        whole = np.empty((sum(map(len, self.rows)), parts[0].shape[1]))
        whole[np.concatenate(self.rows)] = np.concatenate(parts)
        return whole


@dataclass(frozen=True, eq=False)
class Chained:
    """A chain that helps on validation patients, and what it makes of their outputs, chosen on the other folds."""

    chain: Chain
    out_of_fold: Tensor


def fit_chain(
    target: Target, train: DomainDataset, val: DomainDataset, logits: Tensor, seed: int, *, causal: bool
) -> Chained | None:
    """Choose a chain by the likelihood of validation patients; ``None`` where it does not rise by a standard error.

    - ``train``, ``val``: With the columns of order.
    - ``logits`` ``(samples, K)``: Of the validation patients.
    - ``seed``: Of the folds of patients.
    """
    start = Chain(*_statistics(target, train))
    grid = [replace(start, emission=e, prior=p, sharpness=1.0) for e, p in itertools.product(EMISSIONS, PRIORS)]
    sessions = _Sessions.of(logits, val.column(ORDER), val.column(PAUSE))
    outputs, options = [logits.double().log_softmax(dim=-1)], [start]
    for chain in grid:
        read = torch.from_numpy(sessions.joined(chain.read(sessions.logits, sessions.pauses, causal=causal)))
        outputs += [sharpness * read for sharpness in SHARPNESSES]
        options += [replace(chain, sharpness=sharpness) for sharpness in SHARPNESSES]
    truth = target.truth(val.targets).cpu()
    _, patients = torch.unique(val.domains.cpu(), return_inverse=True)
    losses = torch.stack([_patient_losses(one, truth, patients) for one in outputs])
    fold = torch.from_numpy(np.random.default_rng([seed, 11]).permutation(losses.shape[1]) % _FOLDS)
    chosen = _best(losses)
    if chosen == 0:
        return None
    held = torch.empty_like(outputs[0])
    for number in torch.unique(fold):
        own = (fold == number)[patients]
        held[own] = outputs[_best(losses[:, fold != number])][own]
    return Chained(options[chosen], held)


def _best(losses: Tensor) -> int:
    """The option ``(options, patients)`` with the smallest loss; 0, no chain, where it gains less than its error."""
    if losses.shape[1] < 2:
        return 0
    best = int(losses.mean(dim=1).argmin())
    gains = losses[0] - losses[best]
    return best if float(gains.mean()) > float(gains.std()) / len(gains) ** 0.5 else 0


def _patient_losses(logits: Tensor, truth: Tensor, patients: Tensor) -> Tensor:
    """Mean loss of each patient's samples ``(patients,)``; what is not finite counts for nothing."""
    loss = nn.functional.cross_entropy(logits, truth, reduction="none").nan_to_num(0.0)
    return torch.bincount(patients, loss) / torch.bincount(patients)


def _statistics(target: Target, train: DomainDataset) -> tuple[Array, Array]:
    """How often each class follows each after a usual pause within a session, and the classes' shares."""
    order, pause = (train.column(name) for name in (ORDER, PAUSE))
    assert isinstance(order, Tensor)
    assert isinstance(pause, Tensor)
    by_time = torch.argsort(order)
    usual = (pause.squeeze(-1)[by_time][1:].expm1() - 1).abs() <= 0.5
    classes = target.truth(train.targets)[by_time].cpu().numpy()
    follows = ((torch.diff(order[by_time]) == 1) & usual).cpu().numpy()
    return count_transitions(classes, follows, target.size), np.bincount(classes, minlength=target.size) / len(train)


def count_transitions(classes: npt.NDArray[np.int64], follows: npt.NDArray[np.bool_], size: int) -> Array:
    """How often each class follows each, ``(K, K)``.

    - ``classes`` ``(samples,)``: In the order of time.
    - ``follows`` ``(samples - 1,)``: Whether the next sample counts as following this one.
    """
    # As if each had been seen to follow each a little: nothing is impossible.
    counts = np.full((size, size), 1 / size)
    np.add.at(counts, (classes[:-1][follows], classes[1:][follows]), 1)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))
