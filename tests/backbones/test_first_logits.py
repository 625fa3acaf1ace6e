"""Heads with prototypes start where training can begin: near a uniform guess, whatever the scale of the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from manydg.algorithms import build_algorithm
from manydg.backbones import BACKBONES, build_backbone
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError
from manydg.targets import target_of
from manydg.training.fit import start_algorithm

DATA = {"gamenet": "visits", "event-transformer": "events", "gru": "visits", "retain": "events", "mlp": "table"}
DATA |= {"tabular": "gaps", "seizure-cnn": "seizure", "sleep-cnn": "sleep"}
SHAPES = ("table", "visits", "events", "seizure", "sleep")
ALGORITHMS = ("manydg", "manydg-random-pairs", "prototype", "simd1", "simd2")


def data_for(backbone: str, make: Callable[[str], DomainDataset]) -> DomainDataset:
    """The data listed for a backbone; for a new one, not listed, the first that it takes."""
    for shape in [DATA[backbone]] if backbone in DATA else SHAPES:
        data = make(shape)
        try:
            build_backbone(backbone, InputSchema.of(data))
        except ConfigError:
            if backbone in DATA:
                raise
        else:
            return data
    raise AssertionError(f"the backbone '{backbone}' takes none of {SHAPES}")


def with_target(data: DomainDataset, kind: str) -> DomainDataset:
    rows = torch.arange(len(data))
    names = tuple("abcdef"[: 2 if kind == "binary" else 6])
    targets = {
        "binary": rows % 2,
        "classes": rows % 6,
        "votes": torch.nn.functional.one_hot(rows % 6, 6).float(),
        "multilabel": (torch.stack([rows % (k + 2) for k in range(6)], dim=1) == 0).to(data.targets.dtype),
    }[kind]
    return replace(data, targets=targets, target=TargetSpec(kind, names))


@pytest.mark.parametrize("kind", ["binary", "classes", "votes", "multilabel"])
@pytest.mark.parametrize("backbone", BACKBONES.names())
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_supervised_loss_is_near_that_of_a_uniform_guess(
    name: str, backbone: str, kind: str, make: Callable[[str], DomainDataset]
) -> None:
    data = with_target(data_for(backbone, make), kind)
    target = target_of(data.target)
    torch.manual_seed(0)
    module = build_backbone(backbone, InputSchema.of(data))
    algorithm = build_algorithm(name, module, target, data.n_patients)
    algorithm.fit_inputs(data)
    buffers = {key: value.clone() for key, value in algorithm.named_buffers()}
    state = torch.get_rng_state()
    start_algorithm(algorithm, data, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, buffers[key]) for key, value in algorithm.named_buffers())
    batch = data.take(torch.arange(len(data)))
    with torch.no_grad():
        # Over several draws of dropout: twelve samples alone differ by chance.
        losses = [target.loss(algorithm.predict(batch.inputs), batch.targets) for _ in range(10)]
        first = torch.stack(losses).mean()
        uniform = target.loss(torch.zeros(len(data), target.size), batch.targets)
    assert abs(first - uniform) < 0.25 * uniform
