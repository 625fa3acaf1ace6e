"""SWAD: Base, predicting with the plain mean of its weights over all steps of the later training.

Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima", NeurIPS 2021.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
t_s                     the first step from the share ``start`` of the training on
t_e                     the last step of the epoch whose *averaged* weights do best on validation patients
theta^(t_s:t_e)         the dense average: every step's weights count the same
======================  =====================================================================================

The paper chooses both ends by the validation loss after every few hundred steps. Here the end is chosen in the same
way, once an epoch, by the metric that chooses the epoch of every algorithm; the start is a setting. Before the start
predictions use the weights as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import setting
from manydg.algorithms._families import AveragedBase
from manydg.algorithms.base import BaseSettings


@dataclass(frozen=True)
class SWADSettings(BaseSettings):
    start: float = setting(0.3, 0.1, 0.8, "share of the training after which averaging begins", log=False)


class SWAD(AveragedBase):
    """Base with densely averaged weights for prediction; training itself is Base's."""

    title, order = "SWAD", 120
    summary = "Densely averaged weights."

    Settings = SWADSettings
    settings: SWADSettings
    averaged: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("averaged", torch.zeros(()))

    def next_share(self) -> Tensor:
        begun = (self.progress >= self.settings.start).to(self.averaged.dtype)
        self.averaged.copy_((self.averaged + 1) * begun)
        return 1 / self.averaged.clamp_min(1)
