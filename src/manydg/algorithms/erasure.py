"""Erasure: Base whose head never sees the directions in which patients differ, taken out in closed form.

After Belrose et al., "LEACE: Perfect Linear Concept Erasure in Closed Form", NeurIPS 2023; the concept is who the
patient is.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
X, Sigma_XX             features v of training samples, their covariance
W                       Sigma_XX^(-1/2)
P_(W Sigma_XZ)          projection on the whitened directions of the patients' differences, the first ``directions``
r(x)                    ``erased``: x - W^+ P W (x - E[X]), the nearest features without them
======================  =====================================================================================

The paper erases all that is correlated with the concept. With more patients than features that would be everything, so
that only the directions with the largest differences are erased here. How patients differ is estimated from pairs of
samples of one patient (their products have no share of the noise within a patient) after what the labels explain is
taken out, so that patients who differ in their labels alone are alike. All of it is fitted anew on training patients
after every epoch, and the head is then refitted to the newly erased features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manydg.algorithms import Adam, descend, group_counts, group_sums, setting
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import DomainDataset
from manydg.targets import Target

_SAMPLES, _ROWS_AT_ONCE = 20_000, 1024
_RIDGE = 1e-4
_REFIT_PASSES, _REFIT_BATCH, _REFIT_LR = 3, 256, 1e-3


@dataclass(frozen=True)
class ErasureSettings(BaseSettings):
    directions: int = setting(4, 1, 64, "number of directions that are erased, at most half of the features'")


class Erasure(Base):
    """Base on features without the directions in which training patients differ most."""

    title, order = "Subject erasure", 170
    summary = "Directions in which patients differ taken out of the features."

    Settings = ErasureSettings
    settings: ErasureSettings
    indivisible = "its head is refitted to features of the whole training set"
    removed: Tensor
    centre: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("removed", torch.zeros(self.backbone.output_size, self.backbone.output_size))
        self.register_buffer("centre", torch.zeros(self.backbone.output_size))

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if backbone.crop is not None:
            return "it is fitted to samples drawn at random, and a sequence model reads whole sessions"
        return None

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.head(self.erased(self.backbone(inputs)))
        return logits

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"v": self.erased(self.backbone(inputs))}

    def erased(self, features: Tensor) -> Tensor:
        """Features ``(batch, dim)`` without the patients' directions."""
        return features - (features - self.centre) @ self.removed.T

    def epoch_ended(self, train: DomainDataset) -> None:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:_SAMPLES]
        rows = order.sort().values.to(train.device)
        features = self._features(train, rows).to(torch.float64)
        labels = self.target.distribution(train.targets[rows]).cpu().to(torch.float64)
        patients = torch.unique(train.domains[rows].cpu(), return_inverse=True)[1]
        centre, removed = patient_directions(features, patients, labels, self.settings.directions)
        self.centre.copy_(centre)
        self.removed.copy_(removed)
        self._refit_head(self.erased(features.to(self.centre)), train.targets[rows].to(self.centre.device))

    def _refit_head(self, features: Tensor, targets: Tensor) -> None:
        """A few passes of the head alone, whose features have just lost other directions than before."""
        optimizer = Adam(self.head.parameters(), lr=_REFIT_LR)
        generator = torch.Generator().manual_seed(0)
        for _ in range(_REFIT_PASSES):
            for rows in torch.split(torch.randperm(len(features), generator=generator), _REFIT_BATCH):
                there = rows.to(features.device)
                descend(self.target.loss(self.head(features[there]), targets[there]), optimizer)
        self.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _features(self, train: DomainDataset, rows: Tensor) -> Tensor:
        self.eval()
        pieces = [
            self.backbone(train.take(piece).to(self.progress.device).inputs).cpu()
            for piece in torch.split(rows, _ROWS_AT_ONCE)
        ]
        self.train()
        return torch.cat(pieces)


def patient_directions(features: Tensor, patients: Tensor, labels: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """The centre of features and the matrix that takes the patients' directions out of what is centred.

    - ``features``: Tensor ``(samples, dim)`` float64
    - ``patients``: Tensor ``(samples,)`` int64, from 0
    - ``labels``: Tensor ``(samples, K)`` float64
    - ``directions``: At most so many directions, and no more than half of ``dim``; only those in which samples of one
      patient are alike.
    - returns ``centre`` ``(dim,)``
    - returns ``removed`` ``(dim, dim)``: Of lower rank; zero where no patient has two samples.
    """
    count, dim = features.shape
    centre = features.mean(dim=0)
    centred, known = features - centre, labels - labels.mean(dim=0)
    # A small ridge instead of least squares: indicators of classes sum up to 1.
    explained = torch.linalg.solve(known.T @ known + _RIDGE * torch.eye(known.shape[1]).to(known), known.T @ centred)
    covariance = centred.T @ centred / count
    scale, basis = torch.linalg.eigh(covariance + _RIDGE * covariance.trace() / dim * torch.eye(dim).to(covariance))
    whiten, colour = (basis * scale.clamp_min(1e-12) ** power @ basis.T for power in (-0.5, 0.5))
    white = (centred - known @ explained) @ whiten
    several = group_counts(patients, int(patients.max()) + 1)[patients] > 1
    if not bool(several.any()) or not directions:
        return centre, torch.zeros_like(covariance)
    white, patients = white[several], patients[several]
    number = int(patients.max()) + 1
    sums, counts = group_sums(white, patients, number), group_counts(patients, number, white.dtype)
    # Mean of x_i x_j^T over all pairs of different samples of one patient.
    alike = (sums.T @ sums - white.T @ white) / (counts * (counts - 1)).sum()
    strength, vectors = torch.linalg.eigh(alike)
    chosen = vectors[:, strength > 0][:, -max(1, min(directions, dim // 2)) :]
    return centre, colour @ chosen @ chosen.T @ whiten
