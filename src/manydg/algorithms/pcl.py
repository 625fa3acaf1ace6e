"""PCL: samples are drawn to their class's proxy, never to each other.

Yao et al., "PCL: Proxy-Based Contrastive Learning for Domain Generalization", CVPR 2022. The paper finds that pulling
two samples of one
class but different domains together hurts; so the only positive of a sample is its class's proxy, and
its negatives are the proxies of the other classes and the batch's samples of other classes.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
F, z                    ``backbone``, ``features``
w_c                     ``proxies``: the classifier's weight vectors
projection heads        ``project_samples`` (three layers) and ``project_proxies`` (one), used in training only
alpha                   ``scale``
======================  =====================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.algorithms import Algorithm, Hyperparameters, Perceptron, setting
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch
from manydg.targets import Target


@dataclass(frozen=True)
class PCLSettings(Hyperparameters):
    weight: float = setting(1.0, 0.1, 10.0, "weight of the contrastive loss beside the cross-entropy")
    scale: float = setting(12.0, 4.0, 32.0, "scale alpha of the cosines, one over a temperature")


class PCL(Algorithm):
    """A linear classifier whose weights are also the proxies of a contrastive loss.

    Expert votes train the classifier as votes; in the contrastive loss a sample's class is the one with the most.
    """

    title, order = "PCL", 70
    summary = "Contrast of samples with the proxies of the classes."
    in_paper = True

    Settings = PCLSettings
    settings: PCLSettings

    def build(self) -> None:
        width = self.backbone.output_size
        self.proxies = nn.Parameter(torch.randn(self.target.size, width) / math.sqrt(width))
        self.project_samples = Perceptron(width, width, width, width)
        self.project_proxies = nn.Linear(width, width, bias=False)

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if target.exclusive:
            return None
        if target.numeric:
            return "its loss contrasts classes, and a measured value has none"
        return "its loss needs one class per sample, and a multi-label sample may have several or none"

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        terms = {"supervised": self.target.loss(features @ self.proxies.T, batch.targets)}
        if self.settings.weight:
            samples = functional.normalize(self.project_samples(features), dim=-1)
            proxies = functional.normalize(self.project_proxies(self.proxies), dim=-1)
            loss = proxy_contrast(samples, proxies, self.target.truth(batch.targets), self.settings.scale)
            terms["contrastive"] = self.settings.weight * loss
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.backbone(inputs) @ self.proxies.T
        return logits


def proxy_contrast(samples: Tensor, proxies: Tensor, classes: Tensor, scale: float) -> Tensor:
    """Cross-entropy of a sample's own proxy among all proxies and the samples of other classes.

    - ``samples``: Tensor ``(batch, width)``, of unit length
    - ``proxies``: Tensor ``(K, width)``, of unit length
    - ``classes`` ``(batch,)``
    """
    to_proxies = scale * samples @ proxies.T
    same_class = classes[:, None] == classes[None, :]
    to_samples = (scale * samples @ samples.T).masked_fill(same_class, -torch.inf)
    return functional.cross_entropy(torch.cat([to_proxies, to_samples], dim=-1), classes)
