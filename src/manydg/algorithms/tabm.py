"""TabM: many perceptrons in one, which share their weights and are trained and averaged as an ensemble.

Gorishniy, Kotelnikov and Babenko, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling", ICLR
2025; the adapters are those of Wen, Tran and Ba, "BatchEnsemble", ICLR 2020.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
k                       ``members``
W                       weights of a layer, shared by all members
r_i, s_i, b_i           a member's scale of the layer's inputs and outputs, and its bias
======================  =====================================================================================

A member's layer is s_i * (W (r_i * x)) + b_i. The first r_i are signs at random, which tell the members apart; all
other scales start at 1. Each member has an output layer of its own. The loss is the mean over the members, a
prediction the mean of their probabilities. The paper's members start at the inputs x; here at the features v of the
backbone, so that they work for every kind of input and encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, Hyperparameters, setting
from manydg.backbones import Inputs
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class TabMSettings(Hyperparameters):
    members: int = setting(32, 4, 64, "number k of perceptrons")
    hidden: int = setting(128, 32, 512, "width of their hidden layers")
    layers: int = setting(2, 1, 4, "number of their hidden layers")
    head_dropout: float = setting(0.1, 0.0, 0.5, "dropout after every hidden layer", log=False)


class TabM(Algorithm):
    """An ensemble of perceptrons with shared weights on the backbone's features."""

    title, order = "TabM", 210
    summary = "An ensemble of perceptrons that share their weights."

    Settings = TabMSettings
    settings: TabMSettings

    def build(self) -> None:
        members, width, wide = max(1, self.settings.members), max(1, self.settings.hidden), self.backbone.output_size
        layers: list[nn.Module] = []
        for number in range(self.settings.layers):
            layers += [SharedLinear(members, wide, width, signs=number == 0), nn.ReLU()]
            layers.append(nn.Dropout(min(self.settings.head_dropout, 0.99)))
            wide = width
        self.members = nn.Sequential(*layers, MemberLinear(members, wide, self.target.size))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.member_logits(batch.inputs)
        targets = batch.targets.repeat_interleave(logits.shape[1], dim=0)
        return {"supervised": self.target.loss(logits.flatten(0, 1), targets)}

    def predict(self, inputs: Inputs) -> Tensor:
        return self.target.pooled(self.member_logits(inputs))

    def member_logits(self, inputs: Inputs) -> Tensor:
        """Logits of every member, ``(batch, members, K)``."""
        features = self.backbone(inputs).unsqueeze(1)
        logits: Tensor = self.members(features.expand(-1, max(1, self.settings.members), -1))
        return logits


class SharedLinear(nn.Module):
    """A linear layer of all members: ``(batch, members, wide)`` to ``(batch, members, narrow)``.

    - ``signs``: Whether the scales of the inputs start as random signs instead of 1.
    """

    def __init__(self, members: int, wide: int, narrow: int, *, signs: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(_uniform(wide, narrow, wide))
        self.bias = nn.Parameter(_uniform(wide, members, narrow))
        first = torch.randint(0, 2, (members, wide)) * 2.0 - 1 if signs else torch.ones(members, wide)
        self.scale_in, self.scale_out = nn.Parameter(first), nn.Parameter(torch.ones(members, narrow))

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = (values * self.scale_in) @ self.weight.T * self.scale_out + self.bias
        return outputs


class MemberLinear(nn.Module):
    """A linear layer for each member: ``(batch, members, wide)`` to ``(batch, members, narrow)``."""

    def __init__(self, members: int, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_uniform(wide, members, wide, narrow))
        self.bias = nn.Parameter(_uniform(wide, members, narrow))

    def forward(self, values: Tensor) -> Tensor:
        return torch.einsum("bmw,mwn->bmn", values, self.weight) + self.bias


def _uniform(fan_in: int, *shape: int) -> Tensor:
    """The usual start of a linear layer."""
    return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5)
