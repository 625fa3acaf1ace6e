"""Bases of families of algorithms: averaged weights, environments of patients, and the simple decomposition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from manydg.algorithms import (
    Algorithm,
    Hyperparameters,
    Optimizers,
    Perceptron,
    Sampling,
    first_scale,
    group_counts,
    group_sums,
    setting,
)
from manydg.algorithms.base import Base, BaseSettings
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch, DomainDataset

# Averages of weights over the training steps, with batch-normalisation statistics of their own


class Average(nn.Module):
    """A running average of a module's weights, kept in buffers so that it is saved but never trained.

    Besides the weights it keeps the running statistics of batch normalisation *under the averaged weights*: the
    module's own statistics belong to other weights, and an average of them to none. They are updated by calling this
    in training mode. All other buffers (scaling, known codes) are the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {name: _key(name) for name, _ in module.named_parameters()}
        self.statistics = {
            f"{prefix}.{name}" if prefix else name: _key(f"{prefix}.{name}")
            for prefix, part in module.named_modules()
            if isinstance(part, _BatchNorm)
            for name, _ in part.named_buffers(recurse=False)
        }
        for name, tensor in module.named_parameters():
            self.register_buffer(self.weights[name], tensor.detach().clone())
        for name, key in self.statistics.items():
            self.register_buffer(key, module.get_buffer(name).clone())

    @torch.no_grad()
    def update(self, module: nn.Module, share: Tensor) -> None:
        """Move the average towards the module's weights by a share from 0 to 1, a scalar."""
        for name, weight in module.named_parameters():
            average: Tensor = getattr(self, self.weights[name])
            average.lerp_(weight.to(average.dtype), share.to(average.dtype))

    def forward(self, module: nn.Module, *arguments: Any) -> Tensor:
        """The module's output under the averaged weights."""
        values = {name: getattr(self, key) for name, key in {**self.weights, **self.statistics}.items()}
        recurrent = {module.get_parameter(name): values.pop(name) for name in _recurrent_weights(module)}
        with _values_swapped(recurrent):
            output: Tensor = functional_call(module, values, arguments)
        return output


def _recurrent_weights(module: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.RNNBase)
        for name, _ in part.named_parameters(recurse=False)
    ]


@contextmanager
def _values_swapped(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Within the block, parameters have other values, in the same memory.

    A recurrent network that is given other tensors moves its weights to new memory, while a captured CUDA graph keeps
    using the old.
    """
    before = [parameter.detach().clone() for parameter in values]
    for parameter, value in values.items():
        parameter.data.copy_(value)
    try:
        yield
    finally:
        for parameter, value in zip(values, before, strict=True):
            parameter.data.copy_(value)


def _key(name: str) -> str:
    return name.replace(".", "/")


class AveragedBase(Base):
    """Base that predicts with an average of its weights over the training steps; a subclass defines the average."""

    def build(self) -> None:
        super().build()
        self.averages = nn.ModuleDict()
        self.keep_average("backbone")
        self.keep_average("head")

    def keep_average(self, part: str) -> None:
        """Also average the weights of this submodule from now on."""
        self.averages[part] = Average(self.get_submodule(part))

    @abstractmethod
    def next_share(self) -> Tensor:
        """Share of the newest weights in the average after this step, a scalar; called once per step."""

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        terms = super().step(batch, optimizers)
        share = self.next_share()
        for part, average in self.averages.items():
            cast("Average", average).update(self.get_submodule(part), share)
        average_backbone = cast("Average", self.averages["backbone"])
        if average_backbone.statistics:
            with torch.no_grad():
                average_backbone(self.backbone, batch.inputs)
        return terms

    def run(self, part: str, *arguments: Any) -> Tensor:
        """A submodule's output, in evaluation under its averaged weights."""
        module = self.get_submodule(part)
        output: Tensor = module(*arguments) if self.training else self.averages[part](module, *arguments)
        return output

    def predict(self, inputs: Inputs) -> Tensor:
        return self.run("head", self.run("backbone", inputs))

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        return {"v": self.run("backbone", inputs)}


# Environments: what methods that compare training domains take for a domain, and penalties that set in late.
#
# A patient with enough samples is an environment. Patients with fewer share one with those who look alike: the means of
# each patient's features under the untrained backbone, a random projection of the inputs, are standardised and
# clustered by k-means. No label takes part.


SAMPLES_OF_AN_ENVIRONMENT = 8
"""A patient with fewer samples shares an environment with others."""
_SAMPLES_OF_A_CLUSTER = 64
_MOST_CLUSTERS = 64
_SAMPLES_OF_A_PATIENT = 8
_ROWS_AT_ONCE = 1024


class OverEnvironments(Base):
    """Base of algorithms whose steps hold several samples of each of several environments.

    The domains of a batch are codes of environments, from 0 to fewer than ``n_domains``.
    """

    sampling: Sampling = "environments"

    def domains_of(self, train: DomainDataset) -> Tensor:
        patients = environments_of(self.backbone, train, self.progress.device)
        return patients.to(train.device)[train.domains]


@dataclass(frozen=True)
class AnnealedSettings(BaseSettings):
    """The weight of a penalty, and the share of the training from which on it counts with it."""

    weight: float = 1.0
    anneal: float = 0.1


class Annealed(OverEnvironments):
    """Base of algorithms whose penalty counts for 1 at first, and for its weight when a share of training is done.

    Adam is reset at that step, as in the authors' code: its running averages are of gradients of another size.
    """

    settings: AnnealedSettings
    annealed: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("annealed", torch.zeros((), dtype=torch.bool))

    def annealed_weight(self) -> Tensor:
        """The penalty's weight at this step, a scalar."""
        weight = self.settings.weight
        return torch.where(self.progress < self.settings.anneal, min(weight, 1.0), weight)

    def step(self, batch: Batch, optimizers: Optimizers) -> dict[str, Tensor]:
        """One update, from a fresh Adam at the first step after the annealing."""
        over = self.progress >= self.settings.anneal
        reset_adam(optimizers["main"], over & ~self.annealed)
        # Where training goes on with other patients, the schedule begins anew.
        self.annealed.copy_(over)
        return super().step(batch, optimizers)


def reset_adam(optimizer: Optimizer, when: Tensor) -> None:
    """Forget the running averages of Adam if ``when``, a scalar on the device, is true; nothing waits for its value."""
    kept = torch.where(when, 0.0, 1.0)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        values = [state[key] for state in optimizer.state.values() if key in state]
        if values:
            torch._foreach_mul_(values, kept.to(values[0].device))


def environments_of(backbone: Backbone, train: DomainDataset, device: torch.device) -> Tensor:
    """Environment of each training patient, ``(patients,)`` int64, numbered from 0.

    - ``backbone``: Untrained.
    - ``device``: Where the backbone is.
    """
    counts = torch.bincount(train.domains.cpu(), minlength=train.n_patients)
    few = counts < SAMPLES_OF_AN_ENVIRONMENT
    environments = (~few).cumsum(0) - 1
    if not bool(few.any()):
        return environments
    samples = int(counts[few].sum())
    number = min(max(1, samples // _SAMPLES_OF_A_CLUSTER), _MOST_CLUSTERS)
    of_few = few.to(train.device)[train.domains]
    clusters = cluster_patients(patient_means(backbone, train.select(of_few), device), number)
    # A patient without a single sample is never met.
    environments[few & (counts > 0)] = clusters + int((~few).sum())
    return environments.clamp_min(0)


@torch.no_grad()
def patient_means(backbone: Backbone, train: DomainDataset, device: torch.device) -> Tensor:
    """Mean features of a few samples of each patient, ``(patients, dim)``, on the CPU."""
    domains = train.domains.cpu()
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(domains)))
    order = shuffled[torch.argsort(domains[shuffled], stable=True)]
    counts = torch.bincount(domains, minlength=train.n_patients)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[domains[order]]
    rows = order[rank < _SAMPLES_OF_A_PATIENT].to(train.device)
    mode = backbone.training
    backbone.eval()
    features = torch.cat(
        [backbone(train.take(piece).to(device).inputs).float().cpu() for piece in torch.split(rows, _ROWS_AT_ONCE)]
    )
    backbone.train(mode)
    who = domains[rows.cpu()]
    counted = group_counts(who, train.n_patients).clamp_min(1).unsqueeze(1)
    return group_sums(features, who, train.n_patients) / counted


def cluster_patients(means: Tensor, n_groups: int) -> Tensor:
    """Cluster of each patient, ``(patients,)`` int64, by k-means on standardised means ``(patients, dim)``."""
    from sklearn.cluster import KMeans

    deviation = means.std(dim=0, correction=0)
    values = ((means - means.mean(dim=0)) / torch.where(deviation > 0, deviation, 1.0)).numpy()
    number = min(n_groups, len(np.unique(values, axis=0)))
    labels = KMeans(number, n_init=4, random_state=0).fit(values).labels_
    return torch.from_numpy(np.asarray(labels, np.int64))


# The simple decomposition model of the ManyDG paper's appendix, which SimD1 and SimD2 give different losses


@dataclass(frozen=True)
class DecompositionSettings(Hyperparameters):
    """Weights of the four objectives; a weight of 0 switches the objective off."""

    supervised: float = setting(1.0, 0.1, 10.0, "weight of the supervised loss")
    reconstruction: float = setting(1.0, 0.01, 10.0, "weight of the reconstruction of v from z and u")
    similarity: float = setting(1.0, 0.01, 10.0, "weight of the agreement of a patient's two domain factors")
    orthogonality: float = setting(1.0, 0.01, 10.0, "weight of the orthogonality of z and u")


class SimpleDecomposition(Algorithm):
    """Two encoders decompose v into z and u, and a decoder reconstructs it.

    ======================  =====================================================================================
    the paper's letter      here
    ======================  =====================================================================================
    v                       ``features``, from the backbone
    z                       ``domain_factor``, from ``domain_encoder``
    u                       ``label_factor``, from ``label_encoder``; the label is predicted from it
    v^                      ``reconstruction`` of v from its own z and u, by ``decoder``
    ======================  =====================================================================================
    """

    Settings: ClassVar[type[Hyperparameters]] = DecompositionSettings
    settings: DecompositionSettings
    sampling: Sampling = "pairs"

    def build(self) -> None:
        width = self.backbone.output_size
        self.domain_encoder = Perceptron(width, width, width, width)
        self.label_encoder = Perceptron(width, width, width, width)
        self.decoder = Perceptron(2 * width, width, width, width)
        self.head = nn.Linear(width, self.target.size)

    def start(self, inputs: Inputs) -> None:
        # As ManyDG's predictor starts, with logits of order one at most: a linear layer's own are mostly smaller.
        scale = first_scale(self.predict(inputs))
        for parameter in self.head.parameters():
            parameter.mul_(scale)

    @abstractmethod
    def reconstruction_loss(self, features: Tensor, reconstruction: Tensor) -> Tensor:
        """Discrepancy of v and its reconstruction, both ``(rows, width)``."""

    @abstractmethod
    def similarity_loss(self, first: Tensor, second: Tensor) -> Tensor:
        """Discrepancy of the domain factors of two samples of one patient, both ``(pairs, width)``."""

    @abstractmethod
    def orthogonality_loss(self, domain_factor: Tensor, label_factor: Tensor) -> Tensor:
        """How far from orthogonal z and u are, both ``(rows, width)``."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        weights, pairs = self.settings, batch.pairs
        features = self.backbone(batch.inputs)
        domain_factor, label_factor = self.domain_encoder(features), self.label_encoder(features)
        terms = {}
        if weights.supervised:
            loss = self.target.negative_log_likelihood(self.head(label_factor), batch.targets)
            terms["supervised"] = weights.supervised * loss
        if weights.reconstruction:
            reconstruction = self.decoder(torch.cat([domain_factor, label_factor], dim=-1))
            terms["reconstruction"] = weights.reconstruction * self.reconstruction_loss(features, reconstruction)
        if weights.similarity and pairs:
            loss = self.similarity_loss(domain_factor[:pairs], domain_factor[pairs : 2 * pairs])
            terms["similarity"] = weights.similarity * loss
        if weights.orthogonality:
            terms["orthogonality"] = weights.orthogonality * self.orthogonality_loss(domain_factor, label_factor)
        return terms

    def predict(self, inputs: Inputs) -> Tensor:
        logits: Tensor = self.head(self.label_encoder(self.backbone(inputs)))
        return logits

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        features = self.backbone(inputs)
        return {"v": features, "z": self.domain_encoder(features), "u": self.label_encoder(features)}


def squared_frobenius(domain_factor: Tensor, label_factor: Tensor) -> Tensor:
    """||Z^T U||_F^2 over the squared number of rows, so that it does not grow with the batch."""
    rows = domain_factor.shape[0]
    return (domain_factor.T @ label_factor).square().sum() / rows**2
