"""Base: the backbone and a small non-linear head, trained on the pooled patients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manydg.algorithms import Algorithm, Hyperparameters, Perceptron, setting
from manydg.backbones import Inputs
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class BaseSettings(Hyperparameters):
    hidden: int = setting(32, 8, 128, "width of the head's hidden layer")


class Base(Algorithm):
    """Empirical risk minimisation: what every other method is measured against."""

    title, order = "Base", 0
    summary = "Empirical risk minimisation: the backbone and a head with one hidden layer."
    in_paper = True

    Settings = BaseSettings
    settings: BaseSettings

    def build(self) -> None:
        self.head = Perceptron(self.backbone.output_size, self.settings.hidden, self.target.size)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return {"supervised": self.target.loss(self.predict(batch.inputs), batch.targets)}

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.head(self.backbone(inputs))
        return logits
