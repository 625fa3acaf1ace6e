"""ManyDG: many-domain generalisation by mutual reconstruction and orthogonal projection.

Yang, Westover and Sun, "ManyDG: Many-domain Generalization for Healthcare Applications", ICLR 2023. The names
of steps and losses below are the paper's.

======================  =====================================================================================
the paper's letter      here
======================  =====================================================================================
h, v = h(x)             ``backbone``, ``features``: the universal feature extractor (step 1)
q, z = q(v)             ``domain_encoder``, ``domain_factor``: the patient's part of v (step 2)
p, v^ = p(z', w_y)      ``decoder``, ``reconstruction``: one sample's features from its partner's z and its own label
w_k                     ``predictor.prototypes``: one vector per class
v_||z, v_perp z         ``parallel``, ``orthogonal``: the parts of v along z and at right angles to it (step 3)
g, tau                  ``predictor``: similarity of the orthogonal part to the prototypes, over the temperature
x', y', v', z'          the partner: another sample of the same patient; row ``i`` and row ``i + pairs`` of a batch
S                       the classes of a sample of expert votes, over which L_sup is averaged
                        (:class:`~manydg.targets.Votes`); the decoder gets the mean of their prototypes
sg                      ``detach``, of the scale of L_MMD and of nothing else: every loss reaches all that it is made of
lambda_1, _2, _3        ``mmd``, ``reconstruction``, ``similarity`` of :class:`ManyDGSettings`
======================  =====================================================================================

The paper's q and p are networks of three layers, its g one layer without bias: the prototypes, by inner product. Its
decoder gets w_y in place of y. The scale of L_MMD has a floor that the paper has not (:func:`mean_discrepancy`).

The paper's labels are classes. Where the label is a measured value, g is linear and the decoder gets a learned
embedding of the value instead of w_y; temperature and form of the predictor have no effect (``docs/method.md``).
Of labels that do not exclude one another L_sup is the sum over them, -log p(y | x), as it is for classes: their mean is
too small beside the other objectives, and the model learns hardly more than how common each label is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from manydg.algorithms import Algorithm, Hyperparameters, Perceptron, Sampling, choice, label_head, setting
from manydg.backbones import Inputs
from manydg.data.dataset import Batch

_TINY = 1e-12
_LEAST_MEAN = 1e-3


@dataclass(frozen=True)
class ManyDGSettings(Hyperparameters):
    """Weights of the four objectives (a weight of 0 switches the objective off), and the predictor's form."""

    supervised: float = setting(1.0, 0.1, 10.0, "weight of the supervised loss, L_sup")
    mmd: float = setting(1.0, 0.1, 10.0, "weight of the discrepancy between v and z, L_MMD (lambda 1)")
    reconstruction: float = setting(1.0, 0.1, 10.0, "weight of the mutual reconstruction, L_rec (lambda 2)")
    similarity: float = setting(1.0, 0.1, 10.0, "weight of the agreement of domain factors, L_sim (lambda 3)")
    temperature: float = setting(0.5, 0.05, 2.0, "temperature tau of the predictor")
    predictor: str = choice("inner", ("cosine", "inner"), "similarity to the prototypes")


class ManyDG(Algorithm):
    """Every patient is a domain; the patient's own factor is estimated, and the label predicted from the rest.

    The number of parameters does not depend on the number of patients, and prediction needs no patient.
    """

    title, order = "ManyDG", 1000
    summary = "Every patient is a domain: factors of label and patient are separated."
    in_paper = True

    Settings = ManyDGSettings
    settings: ManyDGSettings
    sampling: Sampling = "pairs"

    def build(self) -> None:
        width = self.backbone.output_size
        self.domain_encoder = Perceptron(width, width, width, width)
        self.decoder = Perceptron(2 * width, width, width, width)
        self.predictor = label_head(self.target, width, self.settings.temperature, self.settings.predictor)

    def start(self, inputs: Inputs) -> None:
        self.predictor.start(self.embed(inputs)["orthogonal"])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self._terms(batch, self.settings)

    def watched(self, batch: Batch) -> dict[str, Tensor]:
        all_on = replace(self.settings, supervised=1.0, mmd=1.0, reconstruction=1.0, similarity=1.0)
        return self._terms(batch, all_on)

    def _terms(self, batch: Batch, weights: ManyDGSettings) -> dict[str, Tensor]:
        features = self.backbone(batch.inputs)
        domain_factor = self.domain_encoder(features)
        terms = {}
        if weights.supervised:
            _, orthogonal = orthogonal_projection(features, domain_factor)
            loss = self.target.negative_log_likelihood(self.predictor(orthogonal), batch.targets)
            terms["supervised"] = weights.supervised * loss
        if weights.mmd:
            terms["mmd"] = weights.mmd * mean_discrepancy(domain_factor, features)
        if weights.reconstruction and batch.pairs:
            label = self.predictor.label(self.target, batch.targets)
            partners_factor = swap_partners(domain_factor, batch.pairs)
            reconstruction = self.decoder(torch.cat([partners_factor, label[: 2 * batch.pairs]], dim=-1))
            # Both directions at once: the sum over the 2B rows over B pairs.
            agreement = functional.cosine_similarity(features[: 2 * batch.pairs], reconstruction, dim=-1)
            terms["reconstruction"] = -weights.reconstruction * agreement.sum() / batch.pairs
        if weights.similarity and batch.pairs:
            first, second = domain_factor[: batch.pairs], domain_factor[batch.pairs : 2 * batch.pairs]
            terms["similarity"] = -weights.similarity * functional.cosine_similarity(first, second, dim=-1).mean()
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        features = self.backbone(inputs)
        _, orthogonal = orthogonal_projection(features, self.domain_encoder(features))
        logits: Tensor = self.predictor(orthogonal)
        return logits

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        features = self.backbone(inputs)
        domain_factor = self.domain_encoder(features)
        parallel, orthogonal = orthogonal_projection(features, domain_factor)
        return {"v": features, "z": domain_factor, "parallel": parallel, "orthogonal": orthogonal}


def orthogonal_projection(v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Split v into the parts parallel and orthogonal to z.

    Where z is zero there is no direction to remove: the parallel part is zero and the orthogonal part is v.

    Parameters
    ----------
    v, z : Tensor ``(..., dim)``

    Returns
    -------
    parallel, orthogonal : Tensor ``(..., dim)``
        ``parallel + orthogonal == v``.

    Examples
    --------
    >>> orthogonal_projection(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]))
    (tensor([0., 4.]), tensor([3., 0.]))
    """
    squared_norm = (z * z).sum(dim=-1, keepdim=True)
    parallel = z * ((v * z).sum(dim=-1, keepdim=True) / squared_norm.clamp_min(_TINY))
    return parallel, v - parallel


def mean_discrepancy(z: Tensor, v: Tensor) -> Tensor:
    """L_MMD: squared distance of the batch means of z and v, relative to that of v, whose scale gets no gradient.

    Where the mean of the features vanishes beside their length, as it does straight after batch normalisation, the
    scale is a thousandth of their mean squared length instead: the paper's ratio would be unbounded."""
    z_mean, v_mean, fixed = z.mean(dim=0), v.mean(dim=0), v.detach()
    scale = torch.maximum(fixed.mean(dim=0).square().sum(), _LEAST_MEAN * fixed.square().sum(dim=-1).mean())
    return (z_mean - v_mean).square().sum() / scale.clamp_min(_TINY)


def swap_partners(rows: Tensor, pairs: int) -> Tensor:
    """Each paired row's partner: the second half of the pairs, then the first, ``(2 * pairs, ...)``."""
    return torch.cat([rows[pairs : 2 * pairs], rows[:pairs]])
