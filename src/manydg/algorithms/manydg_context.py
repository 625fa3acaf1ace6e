"""ManyDG with context: what is the patient's is read from a set of the patient's samples, not from one.

The inputs hold the patient's context (:mod:`manydg.data.context`), so that features v and domain factor z are functions
of a set of unlabelled samples of the patient. Where z is wanted it is kept from collapsing by telling patients apart:
of all samples in the batch, the partner of a sample is to have the z most like its own. See ``docs/method.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from manydg.algorithms._algorithm import Algorithm, Hyperparameters, Optimizers, Sampling, setting
from manydg.algorithms._parts import perceptron
from manydg.algorithms.manydg import orthogonal_projection
from manydg.backbones import Backbone, Inputs
from manydg.data.columns import Column
from manydg.data.dataset import Batch
from manydg.targets import Target

_CONTEXT = "context"


@dataclass(frozen=True)
class ManyDGContextSettings(Hyperparameters):
    """A weight or share of 0 switches a part off."""

    hidden: int = setting(32, 8, 128, "width of the head's hidden layer")
    average: float = setting(0.999, 0.99, 0.9999, "decay of the moving average of the weights that predict")
    hide: float = setting(0.1, 0.02, 0.5, "share of the training samples whose context is hidden")
    contrast: float = setting(0.0, 0.0, 1.0, "weight of telling patients apart by z", log=False)
    temperature: float = setting(0.1, 0.02, 0.5, "temperature of the contrast")
    directions: int = setting(0, 0, 8, "number of directions q(v) that are projected out of v", log=False)


class ManyDGContext(Algorithm):
    """A head on features of the sample and its patient's context, predicted with averaged weights.

    In a share of the training samples the context is hidden, so that a patient of whom nothing is known yet is
    predicted as by a model without context. The domain factor z is there only where it is asked for, by a weight of the
    contrast or by directions to project out: neither was found to help prediction.
    """

    Settings = ManyDGContextSettings
    settings: ManyDGContextSettings
    sampling: ClassVar[Sampling] = "pairs"
    context: ClassVar[str] = "offline"
    """The context that is made where a configuration leaves it open."""

    steps_done: Tensor

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: ManyDGContextSettings | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)
        width = backbone.output_size
        self.domain_encoder = perceptron(width, width, max(1, self.settings.directions) * width)
        self.head = perceptron(width, self.settings.hidden, target.size)
        self.register_buffer("steps_done", torch.zeros(()))
        for place, weights in enumerate(self.parameters()):
            self.register_buffer(f"average_{place}", weights.detach().clone())

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(batch, K)``, features v and domain factors z ``(batch, directions, width)``, of current weights."""
        features = self.backbone(inputs)
        if not self.settings.directions:
            return self.head(features), features, self.domain_encoder(features).unsqueeze(1)
        factors = self.domain_encoder(features).unflatten(1, (self.settings.directions, -1))
        return self.head(project_out(features, factors)), features, factors

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        inputs = hide_context(batch.inputs, self.settings.hide) if self.settings.hide else batch.inputs
        logits, _, factors = self(inputs)
        terms = {"supervised": self.target.loss(logits, batch.targets)}
        if self.settings.contrast and batch.pairs:
            factor = factors.mean(dim=1)
            loss = patient_contrast(factor, batch.domains, batch.pairs, self.settings.temperature)
            terms["contrast"] = self.settings.contrast * loss
        return terms

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        terms = super().step(batch, optimizers)
        self._update_average()
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        return self._evaluated(inputs)[0]

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        _, features, factors = self._evaluated(inputs)
        if not self.settings.contrast and not self.settings.directions:
            return {"v": features}
        factor = factors.mean(dim=1)
        parallel, orthogonal = orthogonal_projection(features, factor)
        return {"v": features, "z": factor, "parallel": parallel, "orthogonal": orthogonal}

    def _evaluated(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """What the averaged weights give, or the current ones while training or without an average."""
        if self.training or not self.settings.average:
            return cast("tuple[Tensor, Tensor, Tensor]", self(inputs))
        names = [name for name, _ in self.named_parameters()]
        averages = dict(zip(names, self._averages(), strict=True))
        return cast("tuple[Tensor, Tensor, Tensor]", functional_call(self, averages, (inputs,)))

    def _averages(self) -> list[Tensor]:
        return [self.get_buffer(f"average_{place}") for place in range(len(list(self.parameters())))]

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the averages towards the weights, faster in the first steps, whose weights are soon forgotten."""
        self.steps_done += 1
        share = 1 - (self.steps_done / (self.steps_done + 9)).clamp_max(self.settings.average)
        averages = self._averages()
        moves = torch._foreach_sub(list(self.parameters()), averages)
        torch._foreach_mul_(moves, share)
        torch._foreach_add_(averages, moves)


def hide_context(inputs: Mapping[str, Column], share: float) -> dict[str, Column]:
    """The inputs with the context columns of a random share of the samples set to 0, which means that nothing is
    known."""
    names = [name for name in inputs if name.startswith(_CONTEXT)]
    found = dict(inputs)
    if names:
        first = cast("Tensor", inputs[names[0]])
        shown = (torch.rand(len(first), device=first.device) >= share).to(first.dtype)
        for name in names:
            column = cast("Tensor", inputs[name])
            found[name] = column * shown.reshape(-1, *(1,) * (column.ndim - 1))
    return found


def project_out(v: Tensor, factors: Tensor) -> Tensor:
    """The part of v ``(batch, dim)`` at right angles to every one of the factors ``(batch, n, dim)``."""
    rest = v
    kept: list[Tensor] = []
    for factor in factors.unbind(dim=1):
        for earlier in kept:
            _, factor = orthogonal_projection(factor, earlier)
        kept.append(functional.normalize(factor, dim=-1))
        _, rest = orthogonal_projection(rest, kept[-1])
    return rest


def patient_contrast(factors: Tensor, domains: Tensor, pairs: int, temperature: float) -> Tensor:
    """Cross-entropy of finding each sample's partner among the samples of other patients, by cosine of z.

    Parameters
    ----------
    factors : Tensor ``(batch, dim)``
        Row ``i`` and row ``i + pairs`` are partners; rows from ``2 * pairs`` on have none and are left out.
    domains : Tensor ``(batch,)``
    """
    units, who = functional.normalize(factors[: 2 * pairs], dim=-1), domains[: 2 * pairs]
    place = torch.arange(2 * pairs, device=factors.device)
    partner = (place + pairs) % (2 * pairs)
    same_patient = who[:, None] == who[None, :]
    hidden = same_patient & (place[None, :] != partner[:, None])
    return functional.cross_entropy((units @ units.T / temperature).masked_fill(hidden, -torch.inf), partner)
