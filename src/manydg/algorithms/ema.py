"""EMA: Base, predicting with an exponential moving average of its weights.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; the exponential form as in Tarvainen
and Valpola, "Mean Teachers Are Better Role Models", NeurIPS 2017. After each step the average moves towards the weights
by 1 - ``decay``, and by more in the beginning: it never reaches back further than about a tenth of the steps done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import setting
from manydg.algorithms._families import AveragedBase
from manydg.algorithms.base import BaseSettings

_EARLY_STEPS = 10


@dataclass(frozen=True)
class EMASettings(BaseSettings):
    decay: float = setting(0.999, 0.9, 0.9999, "share of the old average that is kept at each step")


class EMA(AveragedBase):
    """Base with exponentially averaged weights for prediction; training itself is Base's."""

    title, order = "EMA", 110
    summary = "Exponentially averaged weights."

    Settings = EMASettings
    settings: EMASettings
    steps: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("steps", torch.zeros(()))

    def next_share(self) -> Tensor:
        share = (_EARLY_STEPS / (_EARLY_STEPS + self.steps)).clamp_min(1 - min(self.settings.decay, 1.0))
        self.steps += 1
        return share
