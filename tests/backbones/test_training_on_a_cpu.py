"""What is done in another way in a training step on a CPU gives what torch's own layers give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.backbones import build_backbone
from manydg.backbones._convolution import BatchNorm, Stem
from manydg.backbones._spectrogram import SpectrogramCNN
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays

CPU = torch.device("cpu")
SHAPES = {"seizure-cnn": (16, 2000), "sleep-cnn": (2, 3000)}


def wave(*shape: int) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count, dtype=torch.float64) * 1.7).sin().reshape(shape)


def derivatives(value: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """First derivatives of some function of the value, and the derivatives of these."""
    first = torch.autograd.grad((value * wave(*value.shape)).sum() + value.pow(3).sum(), of, create_graph=True)
    second = torch.autograd.grad(sum(slope.square().sum() for slope in first), of, allow_unused=True)
    return *first, *(slope for slope in second if slope is not None)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_leaves_further_channels_at_zero_and_is_torchs_in_its_own(training: bool) -> None:
    own, usual = BatchNorm(6).double().train(training), nn.BatchNorm2d(6).double().train(training)
    for norm in (own, usual):
        nn.init.constant_(norm.bias, 0.5)
    maps = torch.cat([wave(4, 6, 5, 7), torch.zeros(4, 2, 5, 7, dtype=torch.float64)], dim=1).requires_grad_()
    for _ in range(2):
        padded, expected = own(maps), usual(maps[:, :6])
    torch.testing.assert_close(padded[:, :6], expected)
    assert not bool(padded[:, 6:].any())
    assert_same(derivatives(padded[:, :6], maps), derivatives(expected, maps))
    for name, buffer in usual.named_buffers():
        torch.testing.assert_close(own.get_buffer(name), buffer)


def test_a_stem_has_eight_channels_in_training_alone() -> None:
    stem, maps = Stem(2, 6).double(), wave(3, 2, 9, 7)
    padded = stem(maps)
    assert padded.shape[1] == 8
    assert not bool(padded[:, 6:].any())
    torch.testing.assert_close(padded[:, :6], nn.Sequential(*stem)(maps))
    assert stem.eval()(maps).shape[1] == 6


def recordings(name: str, rows: int = 12) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).standard_normal((rows, *SHAPES[name])).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(rows) % 2, np.arange(rows) % 3)


def test_spectrograms_are_kept_where_they_fit() -> None:
    data = recordings("seizure-cnn")
    backbone = build_backbone("seizure-cnn", InputSchema.of(data))
    assert isinstance(backbone, SpectrogramCNN)
    spectrograms = 4 * 12 * 16 * 33 * 63
    assert set(backbone.precompute(data, CPU, spectrograms).columns) == {"scaled_spectrogram"}
    assert set(backbone.precompute(data, CPU, spectrograms - 1).columns) == {"signal"}
