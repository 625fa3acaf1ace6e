"""TabM: members that share weights, differ from the start, and are averaged by their probabilities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from manydg.algorithms.tabm import SharedLinear, TabM, TabMSettings
from manydg.backbones import Backbone
from manydg.data.dataset import DomainDataset
from manydg.targets import target_of

DatasetOf = Callable[..., DomainDataset]


def model_on(dataset: DomainDataset, given: Callable[[int], Backbone], members: int = 4) -> TabM:
    return TabM(given(6), target_of(dataset.target), 12, TabMSettings(members=members, hidden=16, head_dropout=0.0))


def test_a_member_s_layer_is_that_of_the_paper() -> None:
    layer = SharedLinear(3, 5, 4, signs=True)
    torch.nn.init.normal_(layer.scale_out)
    x = torch.randn(7, 3, 5)
    for member in range(3):
        wanted = layer.scale_out[member] * (x[:, member] * layer.scale_in[member] @ layer.weight.T) + layer.bias[member]
        torch.testing.assert_close(layer(x)[:, member], wanted)


def test_members_differ_from_the_start_by_signs_of_their_inputs(
    dataset_of: DatasetOf, given: Callable[..., Backbone]
) -> None:
    dataset = dataset_of("classes")
    logits = model_on(dataset, given).member_logits(dataset.take(torch.arange(9)).inputs)
    assert logits.shape == (9, 4, dataset.target.size)
    first = model_on(dataset, given).members[0]
    assert isinstance(first, SharedLinear)
    assert set(first.scale_in.flatten().tolist()) == {-1.0, 1.0}
    assert bool((logits[:, 0] - logits[:, 1]).abs().max() > 1e-3)


def test_weights_are_shared_so_that_members_cost_little(dataset_of: DatasetOf, given: Callable[..., Backbone]) -> None:
    few, many = (
        sum(weight.numel() for weight in model_on(dataset_of("classes"), given, members).parameters())
        for members in (1, 32)
    )
    # Of the 32 networks' weights, in all of a width of 16 here.
    assert many < 0.75 * 32 * few


@pytest.mark.parametrize("kind", ["classes", "binary", "multilabel", "votes"])
def test_a_prediction_is_the_mean_of_the_members_probabilities(
    kind: str, dataset_of: DatasetOf, given: Callable[..., Backbone]
) -> None:
    dataset = dataset_of(kind)
    model = model_on(dataset, given)
    inputs = dataset.take(torch.arange(20)).inputs
    mean = model.target.probabilities(model.member_logits(inputs)).mean(dim=1)
    torch.testing.assert_close(model.target.probabilities(model.predict(inputs)), mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["classes", "multilabel", "votes"])
def test_the_loss_is_the_mean_of_the_members_losses(
    kind: str, dataset_of: DatasetOf, given: Callable[..., Backbone]
) -> None:
    dataset = dataset_of(kind)
    model, batch = model_on(dataset, given), dataset.take(torch.arange(20))
    logits = model.member_logits(batch.inputs)
    losses = [model.target.loss(logits[:, member], batch.targets) for member in range(4)]
    torch.testing.assert_close(model.losses(batch)["supervised"], torch.stack(losses).mean())
