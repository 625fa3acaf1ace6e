"""MLDG: a step on some patients must help on others.

Li, Yang, Song and Hospedales, "Learning to Generalize: Meta-Learning for Domain Generalization", AAAI 2018.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
S bar, S breve          the episode's meta-train and meta-test patients
F(Theta)                ``meta_train``: mean over the meta-train patients of their mean losses
Theta' = Theta -        ``fast`` weights: every weight of the model after ``loops`` steps of ``inner_lr`` on F,
  alpha grad F(Theta)   with the graph of those steps kept
G(Theta'), beta         ``meta_test``: the same loss of the meta-test patients under the fast weights; ``weight``
======================  =====================================================================================

F(Theta) + beta G(Theta') is minimised in Theta, so that second derivatives of F take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from manydg.algorithms import Sampling, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Inputs
from manydg.data.columns import take
from manydg.data.dataset import Batch

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class MLDGSettings(BaseSettings):
    weight: float = setting(1.0, 0.1, 10.0, "weight beta of the meta-test loss")
    inner_lr: float = setting(1e-3, 1e-4, 1e-1, "step size alpha of the fast weights")
    loops: int = setting(3, 1, 5, "number of inner steps")
    test_share: float = setting(0.1, 0.05, 0.5, "share of the episode's patients that are meta-test, at least one")


class MLDG(Base):
    """Base trained by episodes of patients.

    Batch normalisation learns its running statistics from the slow weights' pass alone. An episode that cannot be cut
    in two parts of two rows or more (a single patient, for one) is an ordinary step on the mean loss over patients.
    """

    title, order = "MLDG", 80
    summary = "Meta-learning over episodes of patients."
    in_paper = True

    Settings = MLDGSettings
    settings: MLDGSettings
    static_step = False
    indivisible = "its inner steps need gradients of single groups of patients"
    sampling: Sampling = "episodes"

    def forward(self, inputs: Inputs) -> Tensor:
        return self.predict(inputs)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        parts = split_episode(batch.domains, self.settings.test_share) if self.settings.weight else None
        with twice_differentiable(self):
            if parts is None:
                return {"meta_train": self.loss_under(dict(self.named_parameters()), batch)}
            train, test = (rows_of(batch, rows) for rows in parts)
            slow_loss = self.loss_under(dict(self.named_parameters()), train)
            fast = self.fast_weights(slow_loss, train)
            meta_test = self.loss_under(fast | self._statistics(), test)
        return {"meta_train": slow_loss, "meta_test": self.settings.weight * meta_test}

    def fast_weights(self, slow_loss: Tensor, train: Batch) -> Weights:
        """The weights after the inner steps, as functions of the slow ones.

        - ``slow_loss``: F(Theta), whose gradient is the first step's.
        - ``train``: The meta-train rows.
        """
        fast: Weights = {name: weight for name, weight in self.named_parameters() if weight.requires_grad}
        loss = slow_loss
        for loop in range(self.settings.loops):
            if loop:
                loss = self.loss_under(fast | self._statistics(), train)
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True, allow_unused=True)
            fast = {
                name: weight if gradient is None else weight - self.settings.inner_lr * gradient
                for (name, weight), gradient in zip(fast.items(), gradients, strict=True)
            }
        return fast

    def loss_under(self, weights: Weights, batch: Batch) -> Tensor:
        """Mean over the batch's patients of their mean losses, the model having these weights."""
        logits: Tensor = functional_call(self, weights, (batch.inputs,))
        return mean_over_groups(self.target.loss_per_sample(logits, batch.targets), batch.domains)

    def _statistics(self) -> Weights:
        """Copies of the buffers, so that a forward pass does not change them."""
        return {name: buffer.clone() for name, buffer in self.named_buffers()}


def split_episode(domains: Tensor, test_share: float) -> tuple[Tensor, Tensor] | None:
    """Row indices of the meta-train and of the meta-test patients, chosen at random.

    As many patients are meta-test as the share says, at least one, and more where those have a single row between them,
    because batch normalisation cannot take a single row. ``None`` if that leaves no two rows to train on.
    """
    _, patient, count = torch.unique(domains, return_inverse=True, return_counts=True)
    order = torch.randperm(len(count), device=domains.device)
    rows_so_far = count[order].cumsum(0)
    tested = max(1, round(test_share * len(count)))
    chosen = max(tested, 1 + int((rows_so_far < 2).sum()))
    if chosen >= len(count) or len(domains) - int(rows_so_far[chosen - 1]) < 2:
        return None
    is_test = torch.zeros_like(count, dtype=torch.bool)
    is_test[order[:chosen]] = True
    of_test = is_test[patient]
    return torch.nonzero(~of_test).squeeze(1), torch.nonzero(of_test).squeeze(1)


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch."""
    inputs = {name: take(column, rows) for name, column in batch.inputs.items()}
    return replace(batch, inputs=inputs, targets=batch.targets[rows], domains=batch.domains[rows], pairs=0)


def mean_over_groups(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of the groups' means of ``values`` ``(batch,)``; ``groups`` are any codes ``(batch,)``."""
    _, group, count = torch.unique(groups, return_inverse=True, return_counts=True)
    total: Tensor = (values / count[group]).sum()
    return total / len(count)


@contextlib.contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Within the block, recurrent and attention layers run on kernels whose gradient can be differentiated again."""
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
