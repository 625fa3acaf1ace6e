"""Own algorithm: a loss of your own, trained and scored like any other

An algorithm says what its losses are and how it predicts. This one pulls the features of one patient's pairs of samples
together. Run it from another script or the command line with ``--algorithm own_algorithm:PairDistance``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import manydg
from manydg.algorithms import Algorithm, Hyperparameters, setting
from manydg.backbones import Inputs
from manydg.data.dataset import Batch
from manydg.synthetic import make_demo_dataset


@dataclass(frozen=True)
class PairDistanceSettings(Hyperparameters):
    """Settings that ``--set`` changes and ``manydg tune`` searches."""

    weight: float = setting(0.01, 0.001, 1.0, "weight of the distance between a patient's two samples")


class PairDistance(Algorithm):
    """Plain training, and a patient's two samples should have similar features."""

    Settings = PairDistanceSettings
    settings: PairDistanceSettings
    sampling = "pairs"

    def build(self) -> None:
        """A linear layer beside the backbone."""
        self.head = nn.Linear(self.backbone.output_size, self.target.size)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Supervised loss, and the distance between the two samples of each pair (rows i and i + pairs)."""
        features = self.backbone(batch.inputs)
        first, second = features[: batch.pairs], features[batch.pairs : 2 * batch.pairs]
        return {
            "supervised": self.target.loss(self.head(features), batch.targets),
            "distance": self.settings.weight * (first - second).square().mean(),
        }

    def predict(self, inputs: Inputs) -> Tensor:
        """Logits of each sample alone."""
        logits: Tensor = self.head(self.backbone(inputs))
        return logits


def main() -> None:
    data = make_demo_dataset(patients=40, samples=12)
    for algorithm in ("base", f"{__name__}:PairDistance"):
        run = manydg.train(data, algorithm=algorithm, epochs=3)
        print(f"{algorithm}: kappa {run.record.test['kappa']:.2f} on test patients")


if __name__ == "__main__":
    main()
