"""MixStyle: feature maps in the style of other samples, so that no style can be relied on.

Zhou, Yang, Qiao and Xiang, "Domain Generalization with MixStyle", ICLR 2021 (with random shuffle).

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
mu(x), sigma(x)         mean and deviation of each channel of a sample's feature maps, without gradient
lambda ~ Beta(a, a)     one mixing weight per sample; ``concentration`` a
gamma_mix, beta_mix     the two samples' deviations and means, mixed by lambda
p                       ``probability``: how often a batch is mixed at all
======================  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributions import Beta

from manydg.algorithms import setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.algorithms.sagnet import WithMaps, content_and_style, without_maps
from manydg.backbones import Backbone
from manydg.data.dataset import Batch
from manydg.targets import Target


@dataclass(frozen=True)
class MixStyleSettings(BaseSettings):
    probability: float = setting(0.5, 0.1, 1.0, "probability p that a batch is mixed")
    concentration: float = setting(0.1, 0.05, 1.0, "parameter a of the mixing weights' distribution Beta(a, a)")


class MixStyle(Base):
    """Base trained on feature maps whose style is mixed with that of a random other sample.

    Prediction uses the maps as they are. It needs a backbone with feature maps, (batch, channels, positions...).
    """

    title, order = "MixStyle", 170
    summary = "Feature maps with mixed style."

    Settings = MixStyleSettings
    settings: MixStyleSettings
    static_step = False
    indivisible = "it mixes the feature maps of all samples of a step"

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        return without_maps(backbone)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        backbone = cast("WithMaps", self.backbone)
        maps = backbone.maps(batch.inputs)
        concentration = maps.new_tensor(max(self.settings.concentration, 1e-3))
        own = Beta(concentration, concentration).sample((len(maps),))
        # A batch that is not mixed keeps all of its own style.
        own = torch.where(torch.rand((), device=maps.device) < self.settings.probability, own, 1.0)
        order = torch.randperm(len(maps), device=maps.device)
        features = backbone.features_of(mix_styles(maps, order, own))
        return {"supervised": self.target.loss(self.head(features), batch.targets)}


def mix_styles(maps: Tensor, order: Tensor, own: Tensor) -> Tensor:
    """Maps with their own content, in a style between their own and another sample's.

    - ``maps``: Tensor ``(batch, channels, ...)``
    - ``order`` ``(batch,)``: Which sample lends its style to each.
    - ``own`` ``(batch,)``: Share lambda of a sample's own style.
    """
    _, mean, deviation = content_and_style(maps.detach())
    share = own.reshape(-1, *[1] * (maps.ndim - 1))
    mixed_mean, mixed_deviation = (torch.lerp(part[order], part, share) for part in (mean, deviation))
    return (maps - mean) / deviation * mixed_deviation + mixed_mean
