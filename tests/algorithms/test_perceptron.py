"""Perceptrons: layers as written, and the kernels that take three of them at once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from manydg.algorithms._parts import Perceptron

TRITON = importlib.util.find_spec("triton") is not None
SHAPES = [(128, 128, 128), (64, 128, 64), (17, 256, 128), (50, 100, 50), (2, 3, 5)]
"""Rows, inputs and width."""


def distances(rows: int, inputs: int, width: int, device: str) -> list[float]:
    """How far output and gradients are from those in float64, relative to these.

    Which units are above zero is taken as it was found: rounding takes some across, which changes a gradient by more.
    """
    from manydg.algorithms._perceptron_kernels import forward_of_layers, three_layers

    torch.manual_seed(0)
    layers = Perceptron(inputs, width, width, width).to(device)
    x, pull = torch.randn(rows, inputs, device=device, requires_grad=True), torch.randn(rows, width, device=device)
    out = three_layers(x, *layers.parameters())
    found = [out, *torch.autograd.grad(out, [x, *layers.parameters()], pull)]
    _, first, second = (part.double() for part in forward_of_layers(x, *layers.parameters()))
    exact_out, pull, x = layers.double()(x.double()), pull.double(), x.double()
    w1, w2, w3 = (layer.weight for layer in layers if isinstance(layer, nn.Linear))
    of_second = (pull @ w3) * (second > 0)
    of_first = (of_second @ w2) * (first > 0)
    exact = [
        exact_out, of_first @ w1, of_first.T @ x, of_first.sum(dim=0),
        of_second.T @ first, of_second.sum(dim=0), pull.T @ second, pull.sum(dim=0),
    ]  # fmt: skip
    return [float(((a - b).norm() / b.norm()).detach()) for a, b in zip(found, exact, strict=True)]


def second_derivatives_are_refused(device: str) -> None:
    from manydg.algorithms._perceptron_kernels import three_layers

    layers, x = Perceptron(8, 8, 8, 8).to(device), torch.randn(4, 8, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(three_layers(x, *layers.parameters()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


@pytest.mark.skipif(not TRITON, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU to run them")
def test_the_kernels_compute_what_the_layers_do() -> None:
    """Interpreted, in a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_kernels_compute_what_the_layers_do(shape: tuple[int, int, int]) -> None:
    assert max(distances(*shape, "cuda")) < 3e-3
    second_derivatives_are_refused("cuda")


@pytest.mark.skipif(not TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("widths", "fits"),
    [((64, 64, 64, 64), True), ((256, 128, 128, 128), True), ((256, 256, 256, 256), False), ((64, 32, 5), False)],
)
def test_three_layers_of_one_width_fit_a_kernel(widths: tuple[int, ...], fits: bool) -> None:
    assert Perceptron(*widths).fit_a_kernel() is fits


if __name__ == "__main__":
    for shape in SHAPES:
        assert max(distances(*shape, "cpu")) < 1e-5, shape
    second_derivatives_are_refused("cpu")
