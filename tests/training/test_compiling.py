"""What is compiled: the losses in one piece, and as often as need be."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import build_algorithm
from manydg.algorithms.manydg import ManyDG
from manydg.backbones import build_backbone
from manydg.data.dataset import Batch, DomainDataset, InputSchema, from_arrays
from manydg.targets import target_of
from manydg.training.execution.steps import (
    CapturedSteps,
    CompiledObjective,
    ResidentSource,
    Shape,
    Shapes,
    Terms,
    compiler_ahead,
    make_capturable,
    reason_against_compiling,
)

GPU = torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_why_nothing_can_be_compiled_is_told() -> None:
    # In torch's words: one built without CUDA says so, one built with it that there is no NVIDIA driver.
    assert re.search("CUDA|NVIDIA driver", str(reason_against_compiling(GPU)))


@pytest.mark.slow
def test_a_process_may_train_any_number_of_compiled_models(small_dataset: DomainDataset) -> None:
    batch, compilations = small_dataset.take(torch.arange(20), 10), []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    schema, target = InputSchema.of(small_dataset), target_of(small_dataset.target)
    for _ in range(10):
        model = build_algorithm("manydg", build_backbone("mlp", schema), target, small_dataset.n_patients)
        CompiledObjective(model, ragged=False)
        before = len(compilations)
        torch.compile(model.objective, backend=noted, dynamic=False)(batch)
        assert len(compilations) > before


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimiser_counts_its_steps_where_its_weights_are(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], fused=fused)
    parameter.grad = torch.ones(3)
    optimizer.step()
    make_capturable(optimizer)
    assert all(group["capturable"] for group in optimizer.param_groups)
    assert optimizer.state[parameter]["step"].device == parameter.device


@pytest.mark.parametrize("backbone", ["sleep-cnn", "seizure-cnn"])
@pytest.mark.parametrize("name", ["base", "manydg", "dann"])
def test_the_losses_of_a_spectrogram_network_compile_in_one_piece(name: str, backbone: str) -> None:
    shape = (2, 129, 43) if backbone == "sleep-cnn" else (16, 33, 63)
    values = np.random.default_rng(0).normal(size=(16, *shape)).astype(np.float32)
    data = from_arrays({"spectrogram": values}, np.arange(16) % 3, np.arange(16) // 2)
    model = build_algorithm(name, build_backbone(backbone, InputSchema.of(data)), target_of(data.target), 8).train()
    batch = data.take(torch.arange(16), 8)
    # Without the last two stages of the compiler, which need a C++ compiler and change nothing about the pieces.
    terms = torch.compile(model.losses, dynamic=False, fullgraph=True, backend="eager")(batch)
    assert all(torch.isfinite(value) for value in terms.values())


def test_steps_of_any_number_of_lengths_are_compiled(
    visits_of: Callable[..., DomainDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would compile for eight and run all others as written."""
    data, compilations = visits_of(96, 12, 4), []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    class Sized(ManyDG):
        """Compiled anew for every length."""

        def losses(self, batch: Batch) -> dict[str, Tensor]:
            values = batch.inputs["diagnoses"].values
            return super().losses(batch) | {"size": 0.0 * values.values.sum()}

    model = Sized(build_backbone("gamenet", InputSchema.of(data)), target_of(data.target), data.n_patients).train()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    compile_for = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_for(function, backend=noted, dynamic=False))
    monkeypatch.setattr("manydg.training.execution.steps.make_capturable", lambda optimizer: None)
    steps = CapturedSteps(model, ResidentSource(data), Shapes(data), model.optimizers(1e-3, 0.0), compile=True)
    for longest in range(1, 13):
        before = len(compilations)
        steps._step(data.take(torch.arange(longest - 1, 96, 12)), steps._compiled)
        assert len(compilations) > before


def test_the_compiler_is_imported_in_a_thread_that_leaves_nothing_changed() -> None:
    turn, numbers = sys.getswitchinterval(), torch.random.get_rng_state()
    compiler_ahead().join()
    assert "torch._inductor.compile_fx" in sys.modules
    assert (sys.getswitchinterval(), gc.isenabled()) == (turn, True)
    assert torch.equal(torch.random.get_rng_state(), numbers)


def test_convolution_kernels_are_tried_for_common_shapes_alone(
    small_dataset: DomainDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model = build_algorithm(
        "base", build_backbone("mlp", InputSchema.of(small_dataset)), target_of(small_dataset.target), 2
    )
    steps = CapturedSteps(model, ResidentSource(small_dataset), Shapes(small_dataset), {})
    tried = []

    def noted(*_: object) -> Terms:
        tried.append(torch.backends.cudnn.benchmark)
        return Terms((), torch.zeros(0))

    monkeypatch.setattr(steps, "_warm_up", noted)
    for rows, common in ((8, True), (3, False), (8, True)):
        steps._replay(torch.arange(rows), Shape(rows, 0, 0), common)
    assert tried == [True, False, True]
