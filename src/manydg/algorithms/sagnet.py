"""SagNet: a content network that cannot lean on style, and an extractor that keeps style from telling the label.

Nam et al., "Reducing Domain Gap by Reducing Style Bias", CVPR 2021. The style of a sample is the mean and standard
deviation of each channel of its feature maps; its content is what is left when they are taken away.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
G_f                     ``backbone.maps``: the extractor, x -> feature maps
G_c                     ``backbone.features_of`` and ``head``: the content-biased network
G_s                     ``style``: the style-biased network, of the content network's own shape
SR, alpha               :func:`randomise_style`, one mixing weight per sample
CR                      :func:`randomise_content`
L_c                     ``supervised``: trains G_f and G_c
L_s                     ``style``: trains G_s alone, on detached maps
L_adv, lambda_adv       ``adversarial``, ``weight``: trains G_f alone to leave G_s undecided
======================  =====================================================================================
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from manydg.algorithms import Perceptron, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch
from manydg.targets import Target

_EPSILON = 1e-5


class WithMaps(Protocol):
    """A backbone in two parts, with ``forward(inputs) == features_of(maps(inputs))``."""

    def maps(self, inputs: Inputs) -> Tensor: ...

    def features_of(self, maps: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SagNetSettings(BaseSettings):
    weight: float = setting(0.1, 0.01, 10.0, "weight lambda_adv of the adversarial loss")


class SagNet(Base):
    """Base trained on maps of mixed style, against a network that reads the label from style.

    Prediction uses the maps as they are. It needs a backbone with feature maps, (batch, channels, positions...).
    """

    title, order = "SagNet", 60
    summary = "Feature maps with mixed style, against an adversary that reads style."
    in_paper = True

    Settings = SagNetSettings
    settings: SagNetSettings
    static_step = False
    indivisible = "it mixes the feature maps of all samples of a step"

    def build(self) -> None:
        super().build()
        self.style = _StyleNetwork(self.backbone, self.settings.hidden, self.target.size)

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if target.numeric:
            return "its extractor makes style tell every class alike, and a measured value has no classes"
        return without_maps(backbone)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        backbone = cast("WithMaps", self.backbone)
        maps = backbone.maps(batch.inputs)
        order = torch.randperm(len(maps), device=maps.device)
        mix = torch.rand(len(maps), device=maps.device, dtype=maps.dtype)
        content = backbone.features_of(randomise_style(maps, maps[order], mix))
        terms = {"supervised": self.target.loss(self.head(content), batch.targets)}
        if self.settings.weight:
            seen = maps.detach()
            terms["style"] = self.target.loss(self.style(randomise_content(seen, seen[order])), batch.targets)
            guess = self.style.frozen(randomise_content(maps, seen[order]))
            terms["adversarial"] = self.settings.weight * undecided_loss(self.target, guess)
        return terms


def without_maps(backbone: Backbone) -> str | None:
    """Why a method on the style of feature maps cannot use a backbone; ``None`` where it can."""
    if callable(getattr(backbone, "maps", None)) and callable(getattr(backbone, "features_of", None)):
        return None
    return (
        f"it mixes the style of feature maps, and the backbone {type(backbone).__name__} has none: take a "
        "convolutional backbone, or give yours maps(inputs) and features_of(maps)"
    )


class _StyleNetwork(nn.Module):
    """G_s, with the content network's architecture and weights of its own.

    It is a copy of the whole backbone, because where the extractor ends is the backbone's own business; the copied
    extractor is never called and so never learns.
    """

    def __init__(self, backbone: Backbone, hidden: int, classes: int) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(backbone)
        self.head = Perceptron(backbone.output_size, hidden, classes)

    def forward(self, maps: Tensor) -> Tensor:
        """Logits ``(batch, K)`` of maps ``(batch, channels, ...)``."""
        logits: Tensor = self.head(cast("WithMaps", self.backbone).features_of(maps))
        return logits

    def frozen(self, maps: Tensor) -> Tensor:
        """The same logits, whose gradient reaches the maps and none of this network's weights or statistics."""
        weights = {name: weight.detach() for name, weight in self.named_parameters()}
        statistics = {name: buffer.clone() for name, buffer in self.named_buffers()}
        logits: Tensor = functional_call(self, {**weights, **statistics}, (maps,))
        return logits


def randomise_style(maps: Tensor, others: Tensor, mix: Tensor) -> Tensor:
    """SR: content of ``maps``, style between theirs and the others'.

    - ``maps``, ``others``: Tensor ``(batch, channels, ...)``
    - ``mix`` ``(batch,)``: Share of the maps' own style, alpha, one per sample.
    """
    content, mean, deviation = content_and_style(maps)
    _, other_mean, other_deviation = content_and_style(others)
    share = mix.reshape(-1, *[1] * (maps.ndim - 1))
    return content * torch.lerp(other_deviation, deviation, share) + torch.lerp(other_mean, mean, share)


def randomise_content(maps: Tensor, others: Tensor) -> Tensor:
    """CR: style of ``maps``, content of the others; both ``(batch, channels, ...)``."""
    _, mean, deviation = content_and_style(maps)
    content, _, _ = content_and_style(others)
    return content * deviation + mean


def content_and_style(maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps without their channels' mean and deviation, and these two, ``(batch, channels, 1, ...)``."""
    positions = tuple(range(2, maps.ndim))
    mean = maps.mean(dim=positions, keepdim=True)
    deviation = (maps.var(dim=positions, correction=0, keepdim=True) + _EPSILON).sqrt()
    return (maps - mean) / deviation, mean, deviation


def undecided_loss(target: Target, logits: Tensor) -> Tensor:
    """Cross-entropy with a label that could be anything: uniform over classes, or even odds for each label."""
    if target.exclusive:
        return -functional.log_softmax(logits, dim=-1).mean()
    return -(functional.logsigmoid(logits) + functional.logsigmoid(-logits)).mean() / 2
