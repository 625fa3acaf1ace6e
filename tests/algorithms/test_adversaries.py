"""The fact that makes each adversarial rival that method: DANN, CondAdv, SagNet."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.algorithms import domain_entropy, ramp
from manydg.algorithms.condadv import CondAdv, CondAdvSettings
from manydg.algorithms.dann import DANN, DANNSettings
from manydg.algorithms.sagnet import SagNet, randomise_content, randomise_style, undecided_loss
from manydg.backbones import Backbone, build_backbone
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.data.info import TargetSpec
from manydg.targets import target_of

CLASSES = target_of(TargetSpec("classes", ("a", "b", "c")))


def features_batch(rows: int = 12, width: int = 6, patients: int = 4) -> Batch:
    v = torch.randn(rows, width, requires_grad=True)
    return Batch({"x": v}, torch.arange(rows) % 3, torch.arange(rows) % patients)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_dann_reverses_the_gradient_of_the_discriminator(progress: float, given: Callable[[int], Backbone]) -> None:
    model, batch = DANN(given(6), CLASSES, 4, DANNSettings(weight=0.1)), features_batch()
    model.progress.fill_(progress)
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    weights = list(model.discriminator.parameters())
    plain = functional.cross_entropy(model.discriminator(v), batch.domains)
    forward_v, *forward_weights = torch.autograd.grad(plain, [v, *weights])
    term = model.losses(batch)["domain"]
    assert torch.equal(term, plain)
    found_v, *found_weights = torch.autograd.grad(term, [v, *weights])
    strength = 0.1 * (2 / (1 + math.exp(-10 * progress)) - 1)
    torch.testing.assert_close(found_v, -strength * forward_v)
    for found, wanted in zip(found_weights, forward_weights, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_ramp_rises_from_zero_to_one() -> None:
    values = ramp(torch.linspace(0, 1, 11)).tolist()
    assert values[0] == 0.0
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-4)


def test_the_entropy_of_a_batch_is_that_of_its_patients_shares() -> None:
    assert float(domain_entropy(torch.tensor([7, 7, 7]))) == 0.0
    shares = np.array([0.5, 0.25, 0.25])
    assert float(domain_entropy(torch.tensor([3, 3, 0, 9]))) == pytest.approx(-(shares * np.log(shares)).sum())


def count_inner_steps(model: CondAdv, batch: Batch, lr: float = 1e-3) -> int:
    optimizers = model.optimizers(lr, 0.0)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    optimizers["discriminator"].register_step_post_hook(count)
    model.step(batch, optimizers)
    return steps


@pytest.mark.parametrize("bound", [1, 3, 5])
def test_condadv_s_discriminator_never_takes_more_steps_than_the_bound(
    bound: int, given: Callable[[int], Backbone]
) -> None:
    # It guesses among 40 patients where the batch has 4, and cannot learn: its loss stays above the entropy for ever.
    settings = CondAdvSettings(inner_steps=bound, discriminator_lr=0.0)
    model = CondAdv(given(6), CLASSES, 40, settings)
    assert count_inner_steps(model, features_batch()) == bound


def test_condadv_s_discriminator_rests_while_it_beats_the_entropy(given: Callable[[int], Backbone]) -> None:
    model = CondAdv(given(4), CLASSES, 4)
    batch = features_batch(width=4)
    batch.inputs["x"] = (8.0 * functional.one_hot(batch.domains, 4)).requires_grad_()
    knowing = nn.Linear(4 + 3, 4)
    with torch.no_grad():
        knowing.weight.copy_(torch.eye(4, 7))
        knowing.bias.zero_()
    model.discriminator = nn.Sequential(knowing)
    before = knowing.weight.clone()
    assert count_inner_steps(model, batch) == 0
    # The extractor's own update must leave its opponent alone.
    assert torch.equal(knowing.weight, before)


def test_condadv_s_inner_loop_ends_as_soon_as_the_entropy_is_reached(given: Callable[[int], Backbone]) -> None:
    batch = features_batch(rows=60, width=4)
    batch.inputs["x"] = (3.0 * functional.one_hot(batch.domains, 4)).requires_grad_()
    model = CondAdv(given(4), CLASSES, 40, CondAdvSettings(inner_steps=500, discriminator_lr=0.01))
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    logits = model.head(v).detach()
    taken = model.train_discriminator(v.detach(), logits, batch.domains, model.optimizers(1e-3, 0.0)["discriminator"])
    assert 0 < taken < 500
    assert model.discriminator_loss(v, logits, batch.domains).item() <= float(domain_entropy(batch.domains))


def test_condadv_s_extractor_climbs_what_the_discriminator_descends(given: Callable[[int], Backbone]) -> None:
    model, batch = CondAdv(given(6), CLASSES, 4, CondAdvSettings(weight=0.3)), features_batch()
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    probabilities = model.head(v).softmax(-1).detach()
    plain = functional.cross_entropy(model.discriminator(torch.cat([v, probabilities], -1)), batch.domains)
    (wanted,) = torch.autograd.grad(plain, v)
    (found,) = torch.autograd.grad(model.losses(batch)["domain"], v)
    torch.testing.assert_close(found, -0.3 * wanted)


def gradients_of(model: SagNet, batch: Batch, term: str) -> dict[str, bool]:
    """Which part of the network a term moves."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(model.losses(batch)[term])
    parts = {"extractor": "backbone.early", "content": "backbone.late", "head": "head", "style": "style"}
    return {
        part: any(
            weight.grad is not None and bool((weight.grad != 0).any())
            for name, weight in model.named_parameters()
            if name.startswith(prefix)
        )
        for part, prefix in parts.items()
    }


def test_sagnet_s_losses_each_move_their_own_part(
    small_conv: Callable[[], Backbone], dataset_of: Callable[..., DomainDataset]
) -> None:
    dataset = dataset_of()
    model = SagNet(small_conv(), target_of(dataset.target), dataset.n_patients)
    batch = dataset.take(torch.arange(0, 96, 3))
    moved = {term: gradients_of(model, batch, term) for term in ("supervised", "style", "adversarial")}
    assert moved["supervised"] == {"extractor": True, "content": True, "head": True, "style": False}
    assert moved["style"] == {"extractor": False, "content": False, "head": False, "style": True}
    assert moved["adversarial"] == {"extractor": True, "content": False, "head": False, "style": False}


def test_sagnet_s_extractor_answers_for_its_own_style_and_not_for_the_content_of_others(
    small_conv: Callable[[], Backbone], dataset_of: Callable[..., DomainDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    def noted(maps: Tensor, others: Tensor) -> Tensor:
        reached.append((maps.requires_grad, others.requires_grad))
        return randomise_content(maps, others)

    monkeypatch.setattr("manydg.algorithms.sagnet.randomise_content", noted)
    dataset = dataset_of()
    model = SagNet(small_conv(), target_of(dataset.target), dataset.n_patients)
    model.losses(dataset.take(torch.arange(0, 96, 3)))
    # For the style network's own loss, and for the adversarial one.
    assert reached == [(False, False), (True, False)]


def test_sagnet_s_adversarial_pass_leaves_the_style_network_s_statistics_alone(
    small_conv: Callable[[], Backbone],
) -> None:
    model = SagNet(small_conv(), CLASSES, 4)
    before = {name: buffer.clone() for name, buffer in model.style.named_buffers()}
    model.style.frozen(torch.randn(5, 4, 6))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.style.named_buffers())


def test_style_is_mixed_with_one_weight_per_sample_and_content_kept() -> None:
    rng = np.random.default_rng(0)
    maps, others, mix = rng.normal(2, 3, (5, 4, 6, 7)), rng.normal(-1, 2, (5, 4, 6, 7)), rng.random(5)
    found = randomise_style(*(torch.from_numpy(array) for array in (maps, others, mix))).numpy()
    for row, own in enumerate(mix):
        for channel in range(4):
            here, other, out = maps[row, channel], others[row, channel], found[row, channel]
            assert out.mean() == pytest.approx(own * here.mean() + (1 - own) * other.mean())
            assert out.std() == pytest.approx(own * here.std() + (1 - own) * other.std(), rel=1e-4)
            np.testing.assert_allclose(
                (out - out.mean()) / out.std(), (here - here.mean()) / here.std(), rtol=1e-4, atol=1e-8
            )


def test_content_is_swapped_and_style_kept() -> None:
    rng = np.random.default_rng(0)
    maps, others = rng.normal(2, 3, (3, 4, 20)), rng.normal(-1, 2, (3, 4, 20))
    found = randomise_content(torch.from_numpy(maps), torch.from_numpy(others)).numpy()
    np.testing.assert_allclose(found.mean(-1), maps.mean(-1))
    np.testing.assert_allclose(found.std(-1), maps.std(-1), rtol=1e-4)
    standard = (others - others.mean(-1, keepdims=True)) / others.std(-1, keepdims=True)
    np.testing.assert_allclose(
        (found - found.mean(-1, keepdims=True)) / found.std(-1, keepdims=True), standard, rtol=1e-4, atol=1e-8
    )


@pytest.mark.parametrize("kind", ["classes", "multilabel"])
def test_the_adversarial_loss_is_least_where_the_style_network_is_undecided(kind: str) -> None:
    target = target_of(TargetSpec(kind, ("a", "b", "c")))
    even = undecided_loss(target, torch.zeros(4, 3))
    assert float(even) == pytest.approx(math.log(3) if kind == "classes" else math.log(2), rel=1e-6)
    assert float(undecided_loss(target, torch.randn(4, 3))) > float(even)


@pytest.mark.parametrize(
    ("name", "shape", "rate"), [("sleep-cnn", (2, 3000), 100.0), ("seizure-cnn", (16, 2000), 200.0)]
)
def test_sagnet_takes_the_spectrogram_networks(name: str, shape: tuple[int, int], rate: float) -> None:
    rng = np.random.default_rng(0)
    signal = rng.normal(0, 20, (8, *shape)).astype(np.float32)
    info = {"settings": {"rate": rate, "channels": [str(k) for k in range(shape[0])], "unit": "uV"}}
    dataset = from_arrays({"signal": signal}, np.arange(8) % 3, np.arange(8) // 2, kind="classes", info=info)
    backbone = build_backbone(name, InputSchema.of(dataset))
    backbone.fit_inputs(dataset)
    model = SagNet(backbone, CLASSES, 4)
    terms = model.step(dataset.take(torch.arange(8)), model.optimizers(1e-3, 0.0))
    assert set(terms) == {"supervised", "style", "adversarial"}
    assert all(bool(torch.isfinite(term)) for term in terms.values())
    assert all(bool(torch.isfinite(weight).all()) for weight in model.parameters())
