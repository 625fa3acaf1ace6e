"""ManyDG with context: the domain factor comes from a set of the patient's samples, not from one.

The inputs hold the patient's context (:mod:`manydg.data.context`), so that features v and domain factor z are functions
of a set of unlabelled samples of the patient. Two networks learn side by side, one from samples with their context and
one from the samples alone; a prediction moves from the second to the first as the patient's context grows. Where z is
used, a contrastive loss keeps it from collapsing: of all samples in the batch, the partner of a sample should have the
z most similar to its own. See ``docs/method.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from manydg.algorithms import Perceptron, setting
from manydg.algorithms.ema import EMA, EMASettings
from manydg.algorithms.manydg import orthogonal_projection
from manydg.backbones import Backbone, Inputs
from manydg.data.columns import Column
from manydg.data.dataset import CONTEXT, TRUST, Batch, DomainDataset

_FEW = 0.05
_TINY = 1e-6


@dataclass(frozen=True)
class ManyDGContextSettings(EMASettings):
    """A weight of 0 switches a part off."""

    contrast: float = setting(0.0, 0.0, 1.0, "weight of telling patients apart by z", log=False)
    temperature: float = setting(0.1, 0.02, 0.5, "temperature of the contrast")
    directions: int = setting(0, 0, 8, "number of directions q(v) that are projected out of v", log=False)


class TwoViews(Backbone):
    """The features of samples with their context, joined with those of the samples alone from a second network."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.informed, self.alone = backbone, backbone.for_samples_alone()
        self.output_size = 2 * backbone.output_size
        self.crop, self.fixed_shapes = backbone.crop, backbone.fixed_shapes
        self.takes_padded, self.compiled_gain = backbone.takes_padded, 2 * backbone.compiled_gain
        self.fast_precision, self.compiled_precision = backbone.fast_precision, backbone.compiled_precision
        if hasattr(backbone, "spectrogram"):
            self.spectrogram = backbone.spectrogram

    def forward(self, inputs: Inputs) -> Tensor:
        return torch.cat([self.informed(inputs), self.alone(without_context(inputs))], dim=1)

    def fit_inputs(self, dataset: DomainDataset) -> None:
        self.informed.fit_inputs(dataset)
        self.alone.fit_inputs(dataset)

    def precompute(self, dataset: DomainDataset, device: torch.device, budget: int) -> DomainDataset:
        return self.informed.precompute(dataset, device, budget)


class ManyDGContext(EMA):
    """Predictions from a sample and its patient's context, with averaged weights; from the sample alone where there is
    no context yet.

    With n samples in the patient's context and the number n' that nearly all training samples have or exceed, the two
    networks' logits are mixed by ``min(1, n / n')``. The domain factor z exists only with a weight of the
    contrast or with directions to project out: neither helped prediction in our experiments.
    """

    title, order = "ManyDG with context", 500
    summary = "A sample and its patient's other samples, with averaged weights."

    Settings = ManyDGContextSettings
    settings: ManyDGContextSettings
    context = "offline"
    usual_context: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("usual_context", torch.ones(()))
        width = self.backbone.output_size
        if self.settings.contrast:
            self.sampling = "pairs"
        if self._has_factors:
            self.domain_encoder = Perceptron(width, width, max(1, self.settings.directions) * width)
            self.keep_average("domain_encoder")
        if self.backbone.with_context:
            self.backbone = TwoViews(self.backbone)
            self.head_alone = Perceptron(width, self.settings.hidden, self.target.size)
            self.keep_average("backbone")
            self.keep_average("head_alone")

    def fit_inputs(self, train: DomainDataset) -> None:
        super().fit_inputs(train)
        if TRUST in train.columns:
            known = amount_of_context(cast("Tensor", train.column(TRUST)).flatten().to(torch.float64))
            self.usual_context.fill_(max(float(np.quantile(known.cpu().numpy(), _FEW)), _TINY))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self._views(batch.inputs)
        terms = {"supervised": self.target.loss(self._logits(features[0]), batch.targets)}
        if len(features) > 1:
            terms["alone"] = self.target.loss(self.run("head_alone", features[1]), batch.targets)
        if self.settings.contrast and batch.pairs:
            factor = self._factors(features[0]).mean(dim=1)
            loss = patient_contrast(factor, batch.domains, batch.pairs, self.settings.temperature)
            terms["contrast"] = self.settings.contrast * loss
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        features = self._views(inputs)
        informed = self._logits(features[0])
        if len(features) == 1:
            return informed
        known = amount_of_context(cast("Tensor", inputs[TRUST])) / self.usual_context
        return torch.lerp(self.run("head_alone", features[1]), informed, known.clamp_max(1.0))

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        features = self._views(inputs)[0]
        if not self._has_factors:
            return {"v": features}
        factor = self._factors(features).mean(dim=1)
        parallel, orthogonal = orthogonal_projection(features, factor)
        return {"v": features, "z": factor, "parallel": parallel, "orthogonal": orthogonal}

    @property
    def _has_factors(self) -> bool:
        return bool(self.settings.contrast or self.settings.directions)

    def _views(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Features v ``(batch, width)`` of the samples with context and, if there is any, of the samples alone."""
        features = self.run("backbone", inputs)
        return features.chunk(2, dim=1) if isinstance(self.backbone, TwoViews) else (features,)

    def _factors(self, features: Tensor) -> Tensor:
        """Domain factors z ``(batch, directions or 1, width)``."""
        return self.run("domain_encoder", features).reshape(len(features), -1, features.shape[1])

    def _logits(self, features: Tensor) -> Tensor:
        kept = project_out(features, self._factors(features)) if self.settings.directions else features
        return self.run("head", kept)


def amount_of_context(trust: Tensor) -> Tensor:
    """Number of samples in the context, in units of the context's strength.

    A context of n samples has the weight ``n / (n + strength)``, of which this is the odds, ``n / strength``: the
    weight itself is nearly 1 long before a patient has as much context as those of the training."""
    return trust / (1 - trust).clamp_min(_TINY)


def without_context(inputs: Inputs) -> dict[str, Column]:
    """The inputs with all context set to 0, as for the first sample of a patient."""
    return {
        name: torch.zeros_like(column) if name.startswith(CONTEXT) and isinstance(column, Tensor) else column
        for name, column in inputs.items()
    }


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
    """Cross-entropy of identifying each sample's partner among the samples of other patients, by cosine of z.

    - ``factors`` ``(batch, dim)``: Row ``i`` and row ``i + pairs`` are partners; rows from ``2 * pairs`` on have none
      and are left out.
    - ``domains`` ``(batch,)``
    """
    units, who = functional.normalize(factors[: 2 * pairs], dim=-1), domains[: 2 * pairs]
    index = torch.arange(2 * pairs, device=factors.device)
    partner = (index + pairs) % (2 * pairs)
    same_patient = who[:, None] == who[None, :]
    hidden = same_patient & (index[None, :] != partner[:, None])
    return functional.cross_entropy((units @ units.T / temperature).masked_fill(hidden, -torch.inf), partner)
