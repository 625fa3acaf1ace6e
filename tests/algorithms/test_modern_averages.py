"""EMA and SWAD: which average is kept, that predictions use it, and that its batch statistics are its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm
from manydg.algorithms._families import Average
from manydg.algorithms.ema import EMA
from manydg.algorithms.swad import SWAD
from manydg.data.dataset import DomainDataset

Build = Callable[..., Algorithm]
DatasetOf = Callable[..., DomainDataset]


def head_after_each_step(algorithm: Algorithm, dataset: DomainDataset, steps: int) -> list[Tensor]:
    """The trained weights of the head's first layer after each step, and a fixed progress of n-th of ``steps``."""
    optimizers, path = algorithm.optimizers(1e-2, 0.0), []
    algorithm.train()
    for step in range(steps):
        algorithm.progress.fill_(step / steps)
        algorithm.step(dataset.take(torch.arange(step, 96, 3)), optimizers)
        path.append(algorithm.get_parameter("head.0.weight").detach().clone())
    return path


def averaged_head(algorithm: Algorithm) -> Tensor:
    return algorithm.get_submodule("averages.head").get_buffer("0/weight")


def test_ema_is_the_exponential_average_by_hand(build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    algorithm = build("ema", dataset, decay=0.5)
    path = head_after_each_step(algorithm, dataset, 14)
    by_hand = path[0]
    for step, weight in enumerate(path):
        share = max(0.5, 10 / (10 + step))
        by_hand = (1 - share) * by_hand + share * weight
    torch.testing.assert_close(averaged_head(algorithm), by_hand)


def test_swad_is_the_plain_mean_of_every_step_after_the_start(build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    algorithm = build("swad", dataset, start=0.4)
    path = head_after_each_step(algorithm, dataset, 10)
    torch.testing.assert_close(averaged_head(algorithm), torch.stack(path[4:]).mean(dim=0))


def test_before_the_start_swad_is_the_newest_weights(build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    algorithm = build("swad", dataset, start=1.0)
    path = head_after_each_step(algorithm, dataset, 5)
    torch.testing.assert_close(averaged_head(algorithm), path[-1])


@pytest.mark.parametrize("cls", [EMA, SWAD])
def test_averages_are_saved_but_not_trained(cls: type[Algorithm], build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    algorithm, base = build(cls.__name__.lower(), dataset), build("base", dataset)
    assert sum(p.numel() for p in algorithm.parameters()) == sum(p.numel() for p in base.parameters())
    assert any(name.startswith("averages.backbone.") for name in algorithm.state_dict())


@pytest.mark.parametrize("name", ["ema", "swad"])
def test_training_itself_is_base_s(name: str, build: Build, dataset_of: DatasetOf) -> None:
    """Without dropout, which would draw other random numbers, the weights take the same way."""
    dataset = dataset_of("classes")
    torch.manual_seed(3)
    averaged = build(name, dataset)
    torch.manual_seed(3)
    base = build("base", dataset)
    for one, other in zip(
        head_after_each_step(averaged, dataset, 4), head_after_each_step(base, dataset, 4), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_statistics_are_those_of_the_averaged_weights_and_of_no_others() -> None:
    """A layer whose averaged weight is 3 while its own is 1: outputs have mean 3 and variance 9 under the average."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    linear, norm = module
    assert isinstance(linear, nn.Linear)
    assert isinstance(norm, nn.BatchNorm1d)
    nn.init.constant_(linear.weight, 3.0)
    average = Average(module).train()
    nn.init.constant_(linear.weight, 1.0)
    module.train()
    values = 1 + torch.randn(4000, 1)
    with torch.no_grad():
        for _ in range(200):
            average(module, values)
    assert average.get_buffer("1/running_mean").item() == pytest.approx(3 * values.mean().item(), rel=1e-3)
    assert average.get_buffer("1/running_var").item() == pytest.approx(9 * values.var().item(), rel=1e-3)
    assert norm.running_mean is not None
    assert norm.running_mean.item() == 0.0
    module.eval()
    average.eval()
    with torch.no_grad():
        outputs = average(module, values)
    assert outputs.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert outputs.std().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", ["ema", "swad"])
def test_every_step_updates_the_average_s_own_batch_statistics(name: str, build: Build, dataset_of: DatasetOf) -> None:
    """They are what a pass of each batch under the averaged weights of its step leaves, and no other pass."""
    dataset = dataset_of("classes")
    algorithm = build(name, dataset).train()
    by_hand = copy.deepcopy(algorithm.backbone)
    norms = [part for part in by_hand.modules() if isinstance(part, nn.BatchNorm1d)]
    assert norms
    optimizers, average = algorithm.optimizers(1e-2, 0.0), algorithm.get_submodule("averages.backbone")
    assert isinstance(average, Average)
    for step in range(5):
        algorithm.progress.fill_(step / 5)
        batch = dataset.take(torch.arange(step, 96, 3))
        algorithm.step(batch, optimizers)
        with torch.no_grad():
            for weight, key in average.weights.items():
                by_hand.get_parameter(weight).copy_(average.get_buffer(key))
            by_hand(batch.inputs)
    for statistic, key in average.statistics.items():
        torch.testing.assert_close(average.get_buffer(key), by_hand.get_buffer(statistic))
    assert any(bool((part.running_mean != 0).any()) for part in norms if part.running_mean is not None)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(1, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, table: Tensor) -> Tensor:
        features: Tensor = self.norm(self.read(table[:, :, None])[0][:, -1])
        return features


def test_a_recurrent_network_keeps_its_memory_when_the_average_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, table = Recurrent().eval(), torch.randn(5, 4)
    average = Average(network)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight))
    before = {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in network.named_parameters()}
    by_hand = copy.deepcopy(network)
    by_hand.load_state_dict({name: average.get_buffer(key) for name, key in average.weights.items()}, strict=False)
    expected = by_hand(table)
    assert not torch.allclose(expected, network(table))

    def moved(_: nn.GRU) -> None:
        pytest.fail("weights moved to other memory: captured steps would go on in the old")

    monkeypatch.setattr(nn.GRU, "flatten_parameters", moved)
    torch.testing.assert_close(average(network, table), expected)
    network(table)
    for name, weight in network.named_parameters():
        assert weight.data_ptr() == before[name][0]
        assert torch.equal(weight, before[name][1])
