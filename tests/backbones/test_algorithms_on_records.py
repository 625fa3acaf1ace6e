"""Every algorithm runs on every network for health records and for signals, or says why it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from manydg.algorithms import ALGORITHMS, build_algorithm
from manydg.backbones import build_backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.targets import target_of
from manydg.training.fit import fit

CASES = [
    ("gamenet", "visits"),
    ("gru", "visits"),
    ("retain", "visits"),
    ("event-transformer", "events"),
    ("gru", "events"),
    ("retain", "events"),
    ("tabular", "gaps"),
    ("sleep-cnn", "sleep"),
]
# They need feature maps, classes that exclude one another, batch normalisation, a table, and two classes.
REFUSING = {"sagnet", "mixstyle", "pcl", "bn-adapt", "boosting", "gpboost"}


@pytest.mark.parametrize(("backbone_name", "shape"), CASES)
@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_a_step_leaves_finite_weights_that_have_moved(
    name: str, backbone_name: str, shape: str, make: Callable[[str], DomainDataset]
) -> None:
    dataset = make(shape)
    options = {} if shape == "sleep" else {"width": 16}
    backbone = build_backbone(backbone_name, InputSchema.of(dataset), options)
    backbone.fit_inputs(dataset)
    target = target_of(dataset.target)
    if ALGORITHMS.get(name).refuses(target, backbone):
        assert name in REFUSING
        return
    algorithm = build_algorithm(name, backbone, target, dataset.n_patients)
    if algorithm.sampling == "whole":
        return
    # Two samples a patient: the even rows are the first halves of the pairs, the odd ones the second.
    rows = torch.cat([torch.arange(0, len(dataset), 2), torch.arange(1, len(dataset), 2)])
    batch = dataset.take(rows, pairs=len(dataset) // 2)
    before = {key: value.clone() for key, value in algorithm.backbone.named_parameters()}
    algorithm.train().step(batch, algorithm.optimizers(1e-3, 1e-5))
    assert all(bool(torch.isfinite(value).all()) for value in algorithm.parameters())
    moved = [key for key, value in algorithm.backbone.named_parameters() if not torch.equal(value, before[key])]
    assert moved
    with torch.no_grad():
        logits = algorithm.eval().predict(batch.inputs)
    assert logits.shape == (len(dataset), dataset.target.size)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("shape", ["visits", "events"])
@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS.names() if ALGORITHMS.get(name).sampling == "environments"]
)
def test_patients_with_two_records_are_clustered_into_environments(
    name: str, shape: str, make: Callable[[str], DomainDataset]
) -> None:
    config = TrainingConfig(algorithm=name, epochs=1, batch_size=16)
    fitted = fit(config, make(shape), None, torch.device("cpu"))
    assert all(math.isfinite(value) for value in fitted.history[0].losses.values())
