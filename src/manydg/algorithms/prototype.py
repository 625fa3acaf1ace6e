"""Control: ManyDG's prototype head on the plain features, trained with the supervised loss alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manydg.algorithms import Algorithm, Hyperparameters, choice, label_head, setting
from manydg.backbones import Inputs
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class PrototypeSettings(Hyperparameters):
    temperature: float = setting(0.5, 0.05, 2.0, "temperature of the predictor")
    predictor: str = choice("inner", ("cosine", "inner"), "similarity to the prototypes")


class Prototype(Algorithm):
    """A prototype head alone (a linear one for a measured value): what ManyDG gains over it is not due to its head."""

    title, order = "Prototype head", 10
    summary = "ManyDG's prototype head without the rest of it."
    is_control = True

    Settings = PrototypeSettings
    settings: PrototypeSettings

    def build(self) -> None:
        self.predictor = label_head(
            self.target, self.backbone.output_size, self.settings.temperature, self.settings.predictor
        )

    def start(self, inputs: Inputs) -> None:
        self.predictor.start(self.backbone(inputs))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return {"supervised": self.target.loss(self.predict(batch.inputs), batch.targets)}

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.predictor(self.backbone(inputs))
        return logits
