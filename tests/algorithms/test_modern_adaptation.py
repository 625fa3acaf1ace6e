"""MixStyle, test-time batch-norm adaptation and ARM: what they do with styles and with a patient's other samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm
from manydg.algorithms.bn_adapt import adapted
from manydg.algorithms.mixstyle import mix_styles
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError
from manydg.training.inference import predict_probabilities, whole_patients

Build = Callable[..., Algorithm]
DatasetOf = Callable[..., DomainDataset]
Train = Callable[..., None]


def moments_of(maps: Tensor) -> tuple[Tensor, Tensor]:
    return maps.mean(dim=2), maps.var(dim=2, correction=0).sqrt()


def test_mixstyle_mixes_the_two_samples_means_and_deviations() -> None:
    maps = torch.randn(5, 3, 40, dtype=torch.float64) * 2 + 1
    order, own = torch.tensor([1, 2, 3, 4, 0]), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    mixed = mix_styles(maps, order, own)
    mean, deviation = moments_of(maps)
    share = own[:, None]
    new_mean, new_deviation = moments_of(mixed)
    torch.testing.assert_close(new_mean, share * mean + (1 - share) * mean[order])
    torch.testing.assert_close(new_deviation, share * deviation + (1 - share) * deviation[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed[4], maps[4])


def test_mixstyle_has_no_gradient_through_the_style() -> None:
    maps = torch.randn(2, 1, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        mix_styles(maps, torch.tensor([1, 0]), torch.zeros(2, dtype=torch.float64))[0].sum(), maps
    )
    # The content alone carries it: a constant slope, the ratio of the deviations, and nothing for the lender of style.
    _, deviation = moments_of(maps.detach())
    torch.testing.assert_close(gradient[0, 0], (deviation[1] / deviation[0]).expand(6), rtol=1e-4, atol=1e-6)
    assert float(gradient[1].abs().max()) == 0.0


def test_mixstyle_trains_on_styles_only_as_often_as_it_is_told(build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    batch = dataset.take(torch.arange(96))
    never = build("mixstyle", dataset, probability=0.0)
    plain = never.target.loss(never.predict(batch.inputs), batch.targets)
    torch.testing.assert_close(never.losses(batch)["supervised"], plain)
    always = build("mixstyle", dataset, probability=1.0, concentration=1.0)
    plain = always.target.loss(always.predict(batch.inputs), batch.targets)
    assert not torch.allclose(always.losses(batch)["supervised"], plain)


@pytest.mark.parametrize("shape", [(30, 4), (30, 4, 5), (30, 4, 3, 2)])
def test_adapted_statistics_are_the_patient_s_mixed_with_the_population_s(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](4).double().eval()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    values = torch.randn(shape, dtype=torch.float64) * 3 + 2
    groups = torch.tensor([0] * 10 + [1] * 19 + [2])
    with torch.no_grad(), adapted(layer, groups, prior=16.0):
        output = layer(values)
    dims = [0, *range(2, len(shape))]
    for group, rows in ((0, slice(0, 10)), (1, slice(10, 29)), (2, slice(29, 30))):
        own, n = values[rows], len(values[rows])
        by_hand = nn.functional.batch_norm(
            own,
            (16 * layer.running_mean + n * own.mean(dim=dims)) / (16 + n),
            (16 * layer.running_var + n * own.var(dim=dims, correction=0)) / (16 + n),
            layer.weight,
            layer.bias,
        )
        torch.testing.assert_close(output[rows], by_hand, msg=f"group {group}")
    torch.testing.assert_close(layer(values), layer(values.clone()))


def test_adaptation_undoes_a_shift_of_all_of_a_patient_s_samples(
    build: Build, dataset_of: DatasetOf, train: Train
) -> None:
    dataset = dataset_of("classes", patients=10, samples=40)
    algorithm = build("bn-adapt", dataset, prior=1.0)
    train(algorithm, dataset, steps=40)
    inputs = dataset.take(torch.arange(len(dataset))).inputs
    shifted = {"x": 1.7 * inputs["x"] + 2.0}  # type: ignore[operator]
    algorithm.eval()
    with torch.no_grad():
        wanted = algorithm.predict_patients(inputs, dataset.domains).argmax(dim=1)
        plain = algorithm.predict(shifted).argmax(dim=1)
        mended = algorithm.predict_patients(shifted, dataset.domains).argmax(dim=1)
    assert float((mended == wanted).float().mean()) > 0.9
    assert float((plain == wanted).float().mean()) < float((mended == wanted).float().mean())


def test_a_patient_s_prediction_nears_the_population_s_with_a_strong_prior(
    build: Build, dataset_of: DatasetOf, train: Train
) -> None:
    dataset = dataset_of("classes")
    algorithm = build("bn-adapt", dataset, prior=1e9)
    train(algorithm, dataset, steps=3)
    algorithm.eval()
    inputs = dataset.take(torch.arange(96)).inputs
    with torch.no_grad():
        torch.testing.assert_close(
            algorithm.predict_patients(inputs, dataset.domains), algorithm.predict(inputs), atol=1e-4, rtol=1e-4
        )


def test_arm_s_context_is_the_mean_over_the_patient_and_no_one_else(build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes")
    algorithm = build("arm", dataset).eval()
    inputs = dataset.take(torch.arange(96)).inputs
    context_network, head = algorithm.get_submodule("context_network"), algorithm.get_submodule("head")
    with torch.no_grad():
        features = algorithm.backbone(inputs)
        logits = algorithm.predict_patients(inputs, 100 - dataset.domains)
        for code in (0, 7):
            rows = dataset.domains == code
            context = context_network(features[rows]).mean(dim=0, keepdim=True)
            joined = torch.cat([features[rows], context.expand(int(rows.sum()), -1)], dim=1)
            torch.testing.assert_close(logits[rows], head(joined))
        alone = algorithm.predict_patients(inputs, torch.arange(96))
        torch.testing.assert_close(alone, algorithm.predict(inputs))
        assert not torch.allclose(alone, logits)


@pytest.mark.parametrize("name", ["arm", "bn-adapt"])
def test_a_patient_s_prediction_needs_the_patient_s_samples_and_no_other_patient_s(
    name: str, build: Build, dataset_of: DatasetOf, train: Train
) -> None:
    dataset = dataset_of("classes")
    algorithm = build(name, dataset)
    train(algorithm, dataset, steps=3)
    shuffled = dataset.select(torch.randperm(96))
    everyone = predict_probabilities(algorithm, shuffled)
    for code in (0, 5):
        own = torch.nonzero(shuffled.domains == code).squeeze(1)
        torch.testing.assert_close(predict_probabilities(algorithm, shuffled.select(own)), everyone[own])
    half = own[:4]
    assert not torch.allclose(predict_probabilities(algorithm, shuffled.select(half)), everyone[half])


def test_pieces_hold_whole_patients_and_every_sample_once(
    dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of("classes").select(torch.randperm(96)[:70])
    monkeypatch.setattr("manydg.training.inference._batch_rows", lambda *_: 10)
    pieces = whole_patients(dataset)
    assert len(pieces) > 3
    assert sorted(torch.cat(pieces).tolist()) == list(range(70))
    owners = [set(dataset.domains[rows].tolist()) for rows in pieces]
    assert sum(len(owner) for owner in owners) == dataset.n_patients


def test_without_batch_normalisation_there_is_nothing_to_adapt(
    given: Callable[[int], nn.Module], dataset_of: DatasetOf
) -> None:
    from manydg.algorithms import build_algorithm
    from manydg.targets import target_of

    dataset = dataset_of("classes")
    with pytest.raises(ConfigError, match="batch normalisation, and the backbone Given has none"):
        build_algorithm("bn-adapt", given(6), target_of(dataset.target), 12)  # type: ignore[arg-type]
