"""Perceptrons: layers as written, and the kernels that take three of them at once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from manydg.algorithms._parts import Perceptron

TRITON = importlib.util.find_spec("triton") is not None
SHAPES = [(128, 128, 128), (64, 128, 64), (17, 256, 128), (50, 100, 50), (2, 3, 5)]
"""Rows, inputs and width."""


def output_and_gradients(run: Callable[..., Tensor], x: Tensor, weights: list[Tensor], pull: Tensor) -> list[Tensor]:
    x, weights = x.detach().requires_grad_(), [weight.detach().requires_grad_() for weight in weights]
    out = run(x, *weights)
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], pull)]


def distances(rows: int, inputs: int, width: int, device: str) -> list[tuple[float, float]]:
    """How far kernels and layers are from layers in float64, relative to these: the output, then all gradients."""
    from manydg.algorithms._perceptron_kernels import three_layers

    torch.manual_seed(0)
    layers = Perceptron(inputs, width, width, width)
    names = [name for name, _ in layers.named_parameters()]

    def as_written(x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(layers, dict(zip(names, weights, strict=True)), (x,))

    x, pull = torch.randn(rows, inputs, device=device), torch.randn(rows, width, device=device)
    weights = [weight.detach().to(device) for weight in layers.parameters()]
    fused = output_and_gradients(three_layers, x, weights, pull)
    written = output_and_gradients(as_written, x, weights, pull)
    exact = output_and_gradients(as_written, x.double(), [weight.double() for weight in weights], pull.double())
    return [
        (float((a - c).norm() / c.norm()), float((b - c).norm() / c.norm()))
        for a, b, c in zip(fused, written, exact, strict=True)
    ]


def second_derivatives_are_refused(device: str) -> None:
    from manydg.algorithms._perceptron_kernels import three_layers

    layers, x = Perceptron(8, 8, 8, 8).to(device), torch.randn(4, 8, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(three_layers(x, *layers.parameters()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()


@pytest.mark.skipif(not TRITON, reason="needs Triton")
def test_the_kernels_compute_what_the_layers_do() -> None:
    """Interpreted, in a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_kernels_are_as_exact_as_layers_in_tf32(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    (output, _), *gradients = distances(*shape, "cuda")
    assert output < 3e-3
    # A unit that rounding takes across zero changes a gradient by much more than rounding does.
    for fused, written in gradients:
        assert fused < 3 * written + 3e-3
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
        far = max(fused for fused, _ in distances(*shape, "cpu"))
        assert far < 1e-5, (shape, far)
    second_derivatives_are_refused("cpu")
