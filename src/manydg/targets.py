"""Kinds of labels: for each its loss, label prototype, probabilities and default metrics.

A target is a module, so that what is fitted to the labels of the training patients (mean and deviation of a measured
value) is saved with the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.data.info import TargetSpec
from manydg.errors import ConfigError, DataError

_LOWER_IS_BETTER = frozenset({"mae", "rmse"})
_LEAST = 1e-6


class Target(nn.Module, ABC):
    """A kind of label.

    Every kind has ``K`` logits, one per class or label, and ``K`` prototypes. Where classes exclude one another
    (``exclusive``) the logits go through a softmax, else through a sigmoid each. A ``numeric`` target has one logit,
    the standardised value, and what other kinds call probabilities is the value in its own unit.

    Parameters
    ----------
    spec : TargetSpec
    """

    kind: ClassVar[str]
    exclusive: ClassVar[bool] = True
    numeric: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]]
    """Default metrics, as the paper reports them, in order."""
    selection: ClassVar[str]
    """The validation metric that chooses the epoch."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def patient_metric(self) -> str:
        """The metric that patients are compared by, one with another; the selection's unless it says little of few
        samples."""
        return self.selection

    @property
    def unit(self) -> float:
        """What a difference of one logit makes in the predictions, at most: 1 in probabilities, a training deviation
        in values."""
        return 1.0

    @property
    def size(self) -> int:
        """Number of logits and prototypes, K."""
        return self.spec.size

    def fit(self, targets: Tensor) -> None:
        """Fit what depends on the labels of the training patients, before training; nothing by default."""

    @abstractmethod
    def distribution(self, targets: Tensor) -> Tensor:
        """The label as weights over the K classes, ``(batch, K)``; a number as the standardised value."""

    def loss_per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Supervised loss of each sample, ``(batch,)``."""
        return -(self.distribution(targets) * functional.log_softmax(logits, dim=-1)).sum(dim=-1)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean supervised loss, L_sup."""
        return self.loss_per_sample(logits, targets).mean()

    def negative_log_likelihood(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean of -log p(all of a sample's labels): the loss where classes exclude one another, K times the
        mean over labels where they do not."""
        return self.loss(logits, targets) if self.exclusive else self.size * self.loss(logits, targets)

    def label_prototype(self, prototypes: Tensor, targets: Tensor) -> Tensor:
        """The label as the decoder gets it: the mean prototype of its classes, ``(batch, dim)``."""
        weights = self.distribution(targets)
        total = weights.sum(dim=-1, keepdim=True).clamp_min(1.0)
        return (weights / total).to(prototypes.dtype) @ prototypes

    def probabilities(self, logits: Tensor) -> Tensor:
        """``(batch, K)``; they sum to one where classes exclude one another."""
        return logits.softmax(dim=-1)

    def pooled(self, logits: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of the mean prediction of several members, ``(batch, members, K)``."""
        mean = self.probabilities(logits).mean(dim=1)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()

    def truth(self, targets: Tensor) -> Tensor:
        """The reference for metrics: class codes or values ``(batch,)``, or label indicators ``(batch, K)``."""
        return targets

    def check(self, targets: Tensor) -> None:
        """Raise if the targets do not fit the kind."""
        if targets.ndim != 1 or targets.is_floating_point():
            raise DataError(f"{self.kind} targets are whole numbers, one per sample; got {tuple(targets.shape)}")
        _check_not_empty(targets)
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self.size:
            raise DataError(f"target {low if low < 0 else high} is outside 0 to {self.size - 1} ({self.size} classes)")


class Classes(Target):
    """One of K classes."""

    kind = "classes"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "kappa", "f1_macro")
    selection = "kappa"

    def distribution(self, targets: Tensor) -> Tensor:
        return functional.one_hot(targets, self.size).to(torch.float32)

    def loss_per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets, reduction="none")

    def label_prototype(self, prototypes: Tensor, targets: Tensor) -> Tensor:
        return prototypes[targets]


class Votes(Target):
    """Expert votes over K classes.

    The label set S holds the classes with strictly more than half of the highest vote count; the loss is the mean
    cross-entropy over S, and metrics use the class with the most votes (the first, where several tie).

    Examples
    --------
    >>> votes = Votes(TargetSpec("votes", tuple("abcdef")))
    >>> votes.distribution(torch.tensor([[8.0, 0, 5, 3, 2, 1]])).tolist()
    [[0.5, 0.0, 0.5, 0.0, 0.0, 0.0]]
    """

    kind = "votes"
    metrics = Classes.metrics
    selection = Classes.selection

    def distribution(self, targets: Tensor) -> Tensor:
        valid = (targets > targets.amax(dim=-1, keepdim=True) / 2).to(torch.float32)
        return valid / valid.sum(dim=-1, keepdim=True)

    def truth(self, targets: Tensor) -> Tensor:
        return targets.argmax(dim=-1)

    def check(self, targets: Tensor) -> None:
        _check_matrix(self, targets)
        if bool((targets < 0).any()) or bool((targets.sum(dim=-1) <= 0).any()):
            raise DataError("every sample needs at least one vote, and votes cannot be negative")


class Binary(Classes):
    """One of two classes, as a softmax over two prototypes."""

    kind = "binary"
    metrics = ("auprc", "f1", "kappa", "auroc")
    selection = "auprc"


class MultiLabel(Target):
    """Any number of K labels at once: a sigmoid each, and the mean of the K binary losses.

    The decoder sees the mean of the present labels' prototypes, and zero for a sample with none.
    """

    kind = "multilabel"
    exclusive = False
    metrics = ("jaccard", "auprc_samples", "f1_samples")
    selection = "auprc_samples"

    def distribution(self, targets: Tensor) -> Tensor:
        return targets.to(torch.float32)

    def loss_per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        indicators = targets.to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits, indicators, reduction="none").mean(dim=-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def pooled(self, logits: Tensor) -> Tensor:
        return self.probabilities(logits).mean(dim=1).logit(_LEAST)

    def check(self, targets: Tensor) -> None:
        _check_matrix(self, targets)
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise DataError("multi-label targets hold only 0 and 1")


class Regression(Target):
    """A measured value, such as a length of stay or a laboratory value.

    Models learn and predict it standardised by the mean and the standard deviation of the training patients' samples
    (:meth:`fit`), so that losses are of one size whatever the unit; :meth:`probabilities` gives the value in its unit.
    With ``loss="huber"`` an error beyond one standard deviation counts linearly, not squared.

    Examples
    --------
    >>> stay = Regression(TargetSpec("regression", ("days",)))
    >>> stay.fit(torch.tensor([1.0, 3.0]))
    >>> stay.loss_per_sample(torch.tensor([[1.0], [0.0]]), torch.tensor([3.0, 4.0])).tolist()
    [0.0, 4.0]
    >>> stay.probabilities(torch.tensor([[1.0], [0.0]])).tolist()
    [[3.0], [2.0]]
    """

    kind = "regression"
    exclusive = False
    numeric = True
    metrics = ("r2", "mae", "rmse")
    selection = "r2"
    centre: Tensor
    scale: Tensor

    def __init__(self, spec: TargetSpec, loss: str = "squared") -> None:
        super().__init__(spec)
        self.huber = loss == "huber"
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    @property
    def patient_metric(self) -> str:
        return "mae"

    @property
    def unit(self) -> float:
        return float(self.scale)

    def fit(self, targets: Tensor) -> None:
        values = targets.to(torch.float64)
        self.centre.copy_(values.mean())
        self.scale.copy_(values.std(correction=0))

    def distribution(self, targets: Tensor) -> Tensor:
        centre, scale = self.centre.to(targets.device), self.scale.to(targets.device)
        return ((targets - centre) / scale).unsqueeze(-1)

    def loss_per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = functional.huber_loss if self.huber else functional.mse_loss
        return loss(logits, self.distribution(targets).to(logits.dtype), reduction="none").squeeze(-1)

    def label_prototype(self, prototypes: Tensor, targets: Tensor) -> Tensor:
        raise ConfigError("a measured value has no classes, and so no prototypes")

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits * self.scale.to(logits.device) + self.centre.to(logits.device)

    def pooled(self, logits: Tensor) -> Tensor:
        return logits.mean(dim=1)

    def check(self, targets: Tensor) -> None:
        if targets.ndim != 1 or not targets.is_floating_point():
            raise DataError(f"regression targets are measured values, one per sample; got {tuple(targets.shape)}")
        _check_not_empty(targets)
        if not bool(torch.isfinite(targets).all()):
            raise DataError("some regression targets are missing or not finite: leave those samples out")


def oriented(metric: str, value: float) -> float:
    """A metric's value such that higher is better: an error, such as the mean absolute one, counts negative.

    Examples
    --------
    >>> oriented("kappa", 0.7), oriented("mae", 0.7)
    (0.7, -0.7)
    """
    return -value if metric in _LOWER_IS_BETTER else value


def _check_matrix(target: Target, targets: Tensor) -> None:
    if targets.ndim != 2 or targets.shape[1] != target.size:
        raise DataError(f"{target.kind} targets have shape (rows, {target.size}); got {tuple(targets.shape)}")
    _check_not_empty(targets)
    if not bool(torch.isfinite(targets).all()):
        raise DataError(f"some {target.kind} targets are missing or not finite: leave those samples out")


def _check_not_empty(targets: Tensor) -> None:
    if len(targets) == 0:
        raise DataError("there is not a single target: no samples were given")


_KINDS: dict[str, type[Target]] = {kind.kind: kind for kind in (Classes, Votes, Binary, MultiLabel)}


def target_of(spec: TargetSpec, loss: str = "auto") -> Target:
    """The kind of label that a dataset's specification names.

    Parameters
    ----------
    spec : TargetSpec
    loss : {"auto", "squared", "huber"}
        Supervised loss of a regression target; other kinds have one loss each, and take ``auto`` alone.
    """
    if spec.kind == Regression.kind:
        return Regression(spec, "squared" if loss == "auto" else loss)
    if loss != "auto":
        raise ConfigError(f"the loss '{loss}' is for regression targets, and this target is {spec.kind}: leave it out")
    return _KINDS[spec.kind](spec)
