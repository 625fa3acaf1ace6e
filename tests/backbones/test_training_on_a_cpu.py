"""What is done in another way in a training step on a CPU gives what torch's own layers give."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manydg.backbones import build_backbone
from manydg.backbones._convolution import (
    _AT_ONCE,
    convolve_in_training,
    elu_,
    halves,
    normalised,
    normalised_convolutions,
    number_of_moments,
    patch_moments,
)
from manydg.backbones._spectrogram_cnn import SpectrogramCNN
from manydg.data.build import from_arrays
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema

CPU = torch.device("cpu")
SHAPES = {"seizure-cnn": (16, 2000), "sleep-cnn": (2, 3000)}


def wave(*shape: int) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float64) * 1.7).sin().reshape(shape)


def slopes_of(found: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """First derivatives of some function of the values, and the derivatives of these."""
    first = torch.autograd.grad((found * wave(*found.shape)).sum() + found.pow(3).sum(), of, create_graph=True)
    second = torch.autograd.grad(sum(slope.square().sum() for slope in first), of, allow_unused=True)
    return *first, *(slope for slope in second if slope is not None)


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("channels", "stride"), [(2, 1), (8, 2), (3, 2), (9, 2), (1, 1)])
@pytest.mark.parametrize(("height", "width"), [(9, 7), (8, 6), (5, 8), (6, 5)])
def test_a_convolution_with_a_backward_pass_of_its_own_is_the_same(
    channels: int, stride: int, height: int, width: int
) -> None:
    maps = wave(3, channels, height, width).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = wave(4, channels, 3, 3).requires_grad_(), wave(4).requires_grad_()
    own = convolve_in_training(maps, weight, bias, stride)
    usual = functional.conv2d(maps, weight, bias, stride, 1)
    torch.testing.assert_close(own, usual)
    same(slopes_of(own, maps, weight, bias), slopes_of(usual, maps, weight, bias))


@pytest.mark.parametrize(("channels", "stride"), [(2, 1), (3, 2)])
def test_a_norm_from_the_moments_of_patches_is_the_norm_of_what_the_convolution_gives(
    channels: int, stride: int
) -> None:
    maps = wave(5, channels, 7, 8) + 0.3
    moments = patch_moments(maps, stride)
    assert moments.shape == (5, number_of_moments(channels))
    weights = [wave(outputs, channels, 3, 3).requires_grad_() for outputs in (4, 6)]
    own, usual = ([nn.BatchNorm2d(len(weight)).double() for weight in weights] for _ in range(2))
    for norm in [*own, *usual]:
        nn.init.uniform_(norm.bias, 0.5, 0.5)
    for _ in range(2):
        places = functional.conv2d(maps, weights[0], None, stride, 1)[0, 0].numel()
        known = normalised_convolutions(list(zip(weights, own, strict=True)), moments, places)
        for weight, (ready, bias), norm, other in zip(weights, known, own, usual, strict=True):
            found = functional.conv2d(maps, ready, bias, stride, 1)
            wanted = other(functional.conv2d(maps, weight, None, stride, 1))
            torch.testing.assert_close(found, wanted)
            same(slopes_of(found, weight, norm.weight, norm.bias), slopes_of(wanted, weight, other.weight, other.bias))
    for norm, other in zip(own, usual, strict=True):
        for name, buffer in other.named_buffers():
            torch.testing.assert_close(norm.get_buffer(name), buffer)


def test_maps_that_are_the_same_everywhere_have_no_variance_and_no_infinite_weights() -> None:
    norm = nn.BatchNorm2d(4)
    flat = torch.zeros(3, 2, 6, 6)
    ((weight, bias),) = normalised_convolutions([(torch.ones(4, 2, 3, 3), norm)], patch_moments(flat, 1), 36)
    assert bool(torch.isfinite(weight).all())
    assert torch.equal(bias, torch.zeros(4))


def test_norms_side_by_side_are_the_norms_one_by_one() -> None:
    own, usual = ([nn.BatchNorm2d(size).double() for size in (3, 5)] for _ in range(2))
    maps = torch.cat([wave(4, 8, 5, 6), torch.zeros(4, 2, 5, 6, dtype=torch.float64)], dim=1).requires_grad_()
    found = normalised(maps, own)
    wanted = torch.cat([norm(part) for norm, part in zip(usual, maps.split([3, 5, 2], dim=1), strict=False)], dim=1)
    torch.testing.assert_close(found[:, :8], wanted)
    assert not bool(found[:, 8:].any())
    same(slopes_of(found[:, :8], maps), slopes_of(wanted, maps))
    for norm, other in zip(own, usual, strict=True):
        for name, buffer in other.named_buffers():
            torch.testing.assert_close(norm.get_buffer(name), buffer)


def test_halves_of_the_channels_are_laid_out_for_themselves() -> None:
    maps = wave(3, 6, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    first, last = halves(maps)
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.cat([first, last], dim=1), maps)
    same(slopes_of(first * last, maps), slopes_of(maps[:, :3] * maps[:, 3:], maps))


def test_an_elu_from_powers_of_two_is_an_elu() -> None:
    values = torch.cat([torch.linspace(-30, 30, 1001), torch.tensor([-math.inf, math.inf, -1e-30, 0.0, 100.0, -200.0])])
    found = elu_(values.clone())
    torch.testing.assert_close(found.double(), functional.elu(values.double()), rtol=0, atol=2e-7)
    assert bool(elu_(torch.tensor([math.nan])).isnan())
    many = torch.randn(_AT_ONCE + 77)
    torch.testing.assert_close(elu_(many.clone()), functional.elu(many), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "lay",
    [
        lambda maps: maps * 1,
        lambda maps: (maps * 1).contiguous(memory_format=torch.channels_last),
        lambda maps: (maps * 1)[:, 1:, ::2],
    ],
)
def test_an_elu_in_place_has_the_slopes_of_torchs_whatever_the_layout(lay: Callable[[Tensor], Tensor]) -> None:
    given = wave(3, 4, 5, 6).requires_grad_()
    values = lay(given)
    assert elu_(values) is values
    wanted = functional.elu(lay(given))
    torch.testing.assert_close(values, wanted)
    same(slopes_of(values, given), slopes_of(wanted, given))


def recordings(name: str, rows: int = 12) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).standard_normal((rows, *SHAPES[name])).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(rows) % 2, np.arange(rows) % 3)


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_with_the_moments_of_patches_is_the_step_without_them(name: str) -> None:
    data = recordings(name)
    steps = []
    for kept in (True, False):
        torch.manual_seed(0)
        backbone = build_backbone(name, InputSchema.of(data), {"dropout": 0.0})
        backbone.fit_inputs(data)
        ready = backbone.precompute(data, CPU, 1 << 30).take(torch.arange(12)).inputs
        assert set(ready) == {"scaled_spectrogram", "patch_moments"}
        inputs = ready if kept else {"scaled_spectrogram": ready["scaled_spectrogram"]}
        features = backbone(inputs)
        (features * torch.linspace(-1, 1, features.numel()).reshape(features.shape)).sum().backward()
        slopes = {key: weight.grad for key, weight in backbone.named_parameters() if weight.grad is not None}
        steps.append((features.detach(), slopes, dict(backbone.named_buffers()), backbone.eval()(inputs).detach()))
    for found, wanted in zip(steps[0], steps[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


def test_moments_are_left_out_where_they_do_not_fit_or_are_more_than_they_are_worth() -> None:
    data = recordings("seizure-cnn")
    backbone = build_backbone("seizure-cnn", InputSchema.of(data))
    assert isinstance(backbone, SpectrogramCNN)
    spectrograms = 4 * 12 * 16 * 33 * 63
    assert "patch_moments" in backbone.precompute(data, CPU, 2 * spectrograms).columns
    assert set(backbone.precompute(data, CPU, spectrograms).columns) == {"scaled_spectrogram"}
    many = from_arrays({"signal": np.ones((4, 40, 2000), dtype=np.float32)}, np.arange(4) % 2, np.arange(4))
    wide = build_backbone("seizure-cnn", InputSchema.of(many))
    assert set(wide.precompute(many, CPU, 1 << 30).columns) == {"scaled_spectrogram"}
