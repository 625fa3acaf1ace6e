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
from torch.nn import functional

from manydg.algorithms._algorithm import setting
from manydg.algorithms._parts import perceptron
from manydg.algorithms.ema import EMA, EMASettings
from manydg.algorithms.manydg import orthogonal_projection
from manydg.backbones import Backbone, Inputs
from manydg.data.columns import Column
from manydg.data.dataset import Batch
from manydg.targets import Target

_CONTEXT = "context"


@dataclass(frozen=True)
class ManyDGContextSettings(EMASettings):
    """A weight or share of 0 switches a part off."""

    hide: float = setting(0.1, 0.02, 0.5, "share of the training samples whose context is hidden")
    contrast: float = setting(0.0, 0.0, 1.0, "weight of telling patients apart by z", log=False)
    temperature: float = setting(0.1, 0.02, 0.5, "temperature of the contrast")
    directions: int = setting(0, 0, 8, "number of directions q(v) that are projected out of v", log=False)


class ManyDGContext(EMA):
    """A head on features of the sample and its patient's context, predicted with averaged weights.

    In a share of the training samples the context is hidden, so that a patient of whom nothing is known yet is
    predicted as by a model without context. The domain factor z is there only where it is asked for, by a weight of the
    contrast or by directions to project out: neither was found to help prediction.
    """

    Settings = ManyDGContextSettings
    settings: ManyDGContextSettings
    context: ClassVar[str] = "offline"
    """The context that is made where a configuration leaves it open."""

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: ManyDGContextSettings | None = None
    ) -> None:
        super().__init__(backbone, target, n_domains, settings)
        if self.settings.contrast:
            self.sampling = "pairs"
        if self._has_factors:
            width = backbone.output_size
            self.domain_encoder = perceptron(width, width, max(1, self.settings.directions) * width)
            self.keep_average("domain_encoder")

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(hide_context(batch.inputs, self.settings.hide))
        terms = {"supervised": self.target.loss(self._logits(features), batch.targets)}
        if self.settings.contrast and batch.pairs:
            factor = self._factors(features).mean(dim=1)
            loss = patient_contrast(factor, batch.domains, batch.pairs, self.settings.temperature)
            terms["contrast"] = self.settings.contrast * loss
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        return self._logits(self.run("backbone", inputs))

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        features = self.run("backbone", inputs)
        if not self._has_factors:
            return {"v": features}
        factor = self._factors(features).mean(dim=1)
        parallel, orthogonal = orthogonal_projection(features, factor)
        return {"v": features, "z": factor, "parallel": parallel, "orthogonal": orthogonal}

    @property
    def _has_factors(self) -> bool:
        return bool(self.settings.contrast or self.settings.directions)

    def _factors(self, features: Tensor) -> Tensor:
        """Domain factors z ``(batch, directions or 1, width)``."""
        return self.run("domain_encoder", features).reshape(len(features), -1, features.shape[1])

    def _logits(self, features: Tensor) -> Tensor:
        kept = project_out(features, self._factors(features)) if self.settings.directions else features
        return self.run("head", kept)


def hide_context(inputs: Mapping[str, Column], share: float) -> dict[str, Column]:
    """The inputs with the context columns of a random share of the samples set to 0, which means that nothing is
    known."""
    names = [name for name in inputs if name.startswith(_CONTEXT)]
    found = dict(inputs)
    if names and share:
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
