"""What the tests of algorithms share: small backbones, and how to build and train any algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from manydg.backbones import Backbone, Inputs, build_backbone
from manydg.data.dataset import Batch, DomainDataset, InputSchema
from manydg.data.sampling import plan_epoch
from manydg.targets import target_of


class Given(Backbone):
    """The features are the column ``x`` itself, so that a test holds v in its hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.output_size = width

    def forward(self, inputs: Inputs) -> Tensor:
        features = inputs["x"]
        assert isinstance(features, Tensor)
        return features


class SmallConv(Backbone):
    """A convolutional backbone of a table's row, in the two parts that methods on feature maps ask for."""

    output_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ELU())
        self.late = nn.Sequential(nn.Conv1d(4, 4, 3, stride=3), nn.BatchNorm1d(4), nn.ELU(), nn.Flatten())

    def maps(self, inputs: Inputs) -> Tensor:
        column = inputs["x"]
        assert isinstance(column, Tensor)
        maps: Tensor = self.early(column[:, None, :])
        return maps

    def features_of(self, maps: Tensor) -> Tensor:
        features: Tensor = self.late(maps)
        return features

    def forward(self, inputs: Inputs) -> Tensor:
        return self.features_of(self.maps(inputs))


@pytest.fixture
def given() -> Callable[[int], Backbone]:
    return Given


@pytest.fixture
def small_conv() -> Callable[[], Backbone]:
    return SmallConv


@pytest.fixture
def small_mlp() -> Callable[[DomainDataset], Backbone]:
    def build(dataset: DomainDataset) -> Backbone:
        options = {"hidden": 32, "layers": 1, "width": 16, "dropout": 0.0}
        backbone = build_backbone("mlp", InputSchema.of(dataset), options)
        backbone.fit_inputs(dataset)
        return backbone

    return build


@pytest.fixture
def build(small_mlp: Callable[[DomainDataset], Backbone]) -> Callable[..., Algorithm]:
    """Any algorithm on the first small backbone that it does not refuse; skips where it refuses the target itself."""

    def build(name: str, dataset: DomainDataset, **settings: Any) -> Algorithm:
        target, cls = target_of(dataset.target), ALGORITHMS.get(name)
        target.fit(dataset.targets)
        for backbone in (small_mlp(dataset), SmallConv()):
            if cls.refuses(target, backbone) is None:
                return build_algorithm(name, backbone, target, dataset.n_patients, settings)
        pytest.skip(f"{name} refuses {target.kind}: {cls.refuses(target, backbone)}")

    return build


@pytest.fixture
def batch_for() -> Callable[[Algorithm, DomainDataset], Batch]:
    """The first batch that an algorithm would get in training."""

    def first(algorithm: Algorithm, dataset: DomainDataset) -> Batch:
        sampling = "samples" if algorithm.sampling == "whole" else algorithm.sampling
        indices, pairs = next(iter(plan_epoch(sampling, dataset.domains, 32, seed=0, epoch=0)))
        return dataset.take(indices, pairs)

    return first


@pytest.fixture
def train() -> Callable[..., None]:
    """Train an algorithm as its sampling asks."""

    def train(algorithm: Algorithm, dataset: DomainDataset, steps: int, lr: float = 1e-2) -> None:
        algorithm.train()
        if algorithm.sampling == "whole":
            algorithm.fit_whole(dataset, seed=0)
            return
        optimizers = algorithm.optimizers(lr, 0.0)
        done = epoch = 0
        while done < steps:
            for indices, pairs in plan_epoch(algorithm.sampling, dataset.domains, 32, seed=0, epoch=epoch):
                algorithm.progress.fill_(done / steps)
                algorithm.step(dataset.take(indices, pairs), optimizers)
                done += 1
                if done == steps:
                    break
            epoch += 1

    return train


@pytest.fixture
def numeric_gradient() -> Callable[[Callable[[Tensor], float], Tensor], Tensor]:
    """Central differences of a function of one tensor, in float64."""

    def gradient(function: Callable[[Tensor], float], at: Tensor, step: float = 1e-6) -> Tensor:
        point = at.detach().clone().to(torch.float64)
        slopes = torch.zeros_like(point)
        flat, flat_slopes = point.view(-1), slopes.view(-1)
        for index in range(flat.numel()):
            here = float(flat[index])
            flat[index] = here + step
            above = function(point)
            flat[index] = here - step
            below = function(point)
            flat[index] = here
            flat_slopes[index] = (above - below) / (2 * step)
        return slopes

    return gradient
