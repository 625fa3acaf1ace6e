"""ARM: a model that learns to adapt to a patient from a batch of the patient's unlabelled samples.

Zhang et al., "Adaptive Risk Minimization: Learning to Adapt to Domain Shift", NeurIPS 2021 (ARM-CML, the contextual
meta-learner).

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
x_1 ... x_K             the rows of one patient in the batch; at prediction, all samples of the patient
h_cont                  ``context_network``: features v -> a vector for each sample
c                       its mean over the patient's rows, the context
g_pred                  ``head``, of the features and the context together
======================  =====================================================================================

The paper's context network reads x itself; this one reads the features v, so that it works for every kind of input. A
sample alone (:meth:`predict`) is its own context, the paper's case of K = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Perceptron, Sampling, group_counts, group_sums, setting
from manydg.algorithms.base import BaseSettings
from manydg.backbones import Inputs
from manydg.data.dataset import Batch


@dataclass(frozen=True)
class ARMSettings(BaseSettings):
    context_hidden: int = setting(64, 16, 256, "width of the context network's hidden layer")
    context_width: int = setting(32, 4, 128, "width of the context")


class ARM(Algorithm):
    """A head that sees, beside a sample's features, the mean context of its patient's samples.

    It is trained on episodes, several samples of each of several patients, and predicts with all given samples of the
    patient, including later ones, but never with their labels.
    """

    title, order = "ARM", 190
    summary = "A head that sees the mean context of the patient's samples."

    Settings = ARMSettings
    settings: ARMSettings
    sampling: Sampling = "episodes"
    static_step = False
    uses_patients = True

    def build(self) -> None:
        width, context = self.backbone.output_size, self.settings.context_width
        self.context_network = Perceptron(width, self.settings.context_hidden, context)
        self.head = Perceptron(width + context, self.settings.hidden, self.target.size)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return {"supervised": self.target.loss(self.predict_patients(batch.inputs, batch.domains), batch.targets)}

    def predict(self, inputs: Inputs) -> Tensor:
        features = self.backbone(inputs)
        return self._logits(features, self.context_network(features))

    def predict_patients(self, inputs: Inputs, patients: Tensor) -> Tensor:
        features = self.backbone(inputs)
        present, groups = torch.unique(patients, return_inverse=True)
        each = self.context_network(features)
        total = group_sums(each, groups, len(present))
        context = total / group_counts(groups, len(present), each.dtype).unsqueeze(1)
        return self._logits(features, context[groups])

    def _logits(self, features: Tensor, context: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([features, context], dim=1))
        return logits
