"""Precision, execution and the placing of data: what is settled, what it changes, and what it must not change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, build_algorithm
from manydg.algorithms._parts import Perceptron
from manydg.backbones import Backbone, Inputs, build_backbone
from manydg.data.build import from_arrays
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset
from manydg.data.sampling import plan_epoch
from manydg.data.schema import InputSchema
from manydg.errors import ConfigError, ManyDGWarning
from manydg.targets import target_of
from manydg.training import compiling, placing, precision
from manydg.training.config import TrainingConfig
from manydg.training.fit import fit
from manydg.training.placing import place
from manydg.training.precision import Speed, at_speed, settle_speed
from manydg.training.run import train
from manydg.training.steps import PlainSteps, Terms, read_terms, steps_for

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Dense(Backbone):
    """One layer, which notes the type it computed in."""

    output_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.types: list[torch.dtype] = []

    def forward(self, inputs: Inputs) -> Tensor:
        column = inputs["x"]
        assert isinstance(column, Tensor)
        hidden: Tensor = self.layer(column)
        self.types.append(hidden.dtype)
        return hidden


def built(dataset: DomainDataset, algorithm: str = "manydg", backbone: Backbone | None = None) -> Algorithm:
    torch.manual_seed(0)
    return build_algorithm(algorithm, backbone or Dense(), target_of(dataset.target), dataset.n_patients)


def eeg(rows: int = 12) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).normal(size=(rows, 2, 3000)).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(rows) % 3, np.arange(rows) // 4)


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, CPU, Speed("float32", "plain")),
        ({"precision": "bf16"}, CPU, Speed("bf16", "plain")),
        ({"execution": "deterministic"}, CPU, Speed("float32", "deterministic")),
        ({"execution": "deterministic"}, GPU, Speed("float32", "deterministic")),
        ({"execution": "captured"}, GPU, Speed("tf32", "captured")),
        ({"precision": "float32", "execution": "plain"}, GPU, Speed("float32", "plain")),
    ],
)
def test_a_speed_is_settled_by_configuration_and_device(
    small_dataset: DomainDataset, options: dict[str, Any], device: torch.device, expected: Speed
) -> None:
    assert settle_speed(TrainingConfig(**options), built(small_dataset), small_dataset, device) == expected


def test_data_that_stay_on_the_host_are_captured_where_all_rows_have_one_length(small_dataset: DomainDataset) -> None:
    assert settle_speed(TrainingConfig(), built(small_dataset), small_dataset, GPU).execution == "captured"
    visits = from_arrays({"event_codes": Ragged.from_rows([[1]] * 8)}, np.arange(8) % 2, np.arange(8) // 2)
    assert settle_speed(TrainingConfig(), built(small_dataset), visits, GPU).execution == "plain"


def test_a_speed_that_the_device_or_the_algorithm_cannot_have_is_refused(small_dataset: DomainDataset) -> None:
    with pytest.raises(ConfigError, match="need a GPU"):
        settle_speed(TrainingConfig(execution="captured"), built(small_dataset), small_dataset, CPU)
    with pytest.raises(ConfigError, match="cannot be captured"):
        settle_speed(TrainingConfig(execution="captured"), built(small_dataset, "mldg"), small_dataset, GPU)
    visits = from_arrays({"event_codes": Ragged.from_rows([[1]] * 8)}, np.arange(8) % 2, np.arange(8) // 2)
    with pytest.raises(ConfigError, match="rows of any length cannot be captured here"):
        settle_speed(TrainingConfig(execution="captured"), built(small_dataset), visits, GPU)
    with pytest.raises(ConfigError, match="unknown precision 'fp8'"):
        TrainingConfig(precision="fp8")
    with pytest.raises(ConfigError, match="unknown execution 'fast'"):
        TrainingConfig(execution="fast")


def test_where_nothing_can_be_compiled_steps_are_captured_with_a_warning(
    small_dataset: DomainDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_fastest", lambda *_: "compiled")
    asked = [built(small_dataset), small_dataset, GPU]
    monkeypatch.setattr(precision, "reason_against_compiling", lambda device: None)
    assert settle_speed(TrainingConfig(), *asked).execution == "compiled"
    monkeypatch.setattr(precision, "reason_against_compiling", lambda device: "no C compiler")
    with pytest.warns(ManyDGWarning, match="captured, not compiled, since that fails here: no C compiler"):
        assert settle_speed(TrainingConfig(), *asked).execution == "captured"
    with pytest.raises(ConfigError, match=r"say execution captured or auto \(no C compiler\)"):
        settle_speed(TrainingConfig(execution="compiled"), *asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_why_nothing_can_be_compiled_is_told() -> None:
    assert "CUDA" in str(compiling.reason_against_compiling(GPU))


def test_bf16_reaches_the_backbone_alone_and_ends_with_the_steps(small_dataset: DomainDataset) -> None:
    algorithm = built(small_dataset)
    backbone = algorithm.backbone
    assert isinstance(backbone, Dense)
    batch = small_dataset.take(torch.arange(20), 10)
    with at_speed(Speed("bf16", "plain"), algorithm, CPU):
        features = backbone(batch.inputs)
        terms = algorithm.losses(batch)
    assert backbone.types == [torch.bfloat16] * 2
    assert features.dtype == torch.float32
    assert {term.dtype for term in terms.values()} == {torch.float32}
    backbone(batch.inputs)
    assert backbone.types[-1] == torch.float32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("speed", "device", "fused"),
    [
        (Speed("tf32", "captured"), GPU, True),
        (Speed("bf16", "compiled"), GPU, True),
        (Speed("float32", "captured"), GPU, False),
        (Speed("tf32", "plain"), GPU, False),
        (Speed("bf16", "plain"), CPU, False),
    ],
)
def test_layers_are_one_kernel_in_fast_steps_alone(
    small_dataset: DomainDataset, speed: Speed, device: torch.device, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manydg.algorithms._perceptron_kernels.reason_against", lambda *size: None)
    algorithm = built(small_dataset)
    perceptrons = [part for part in algorithm.modules() if isinstance(part, Perceptron)]
    assert len(perceptrons) == 2
    with at_speed(speed, algorithm, device):
        assert {part.fused for part in perceptrons} == {fused}
    assert not any(part.fused for part in perceptrons)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no kernel can be built")
def test_where_no_kernel_can_be_built_layers_are_as_written_with_a_warning(small_dataset: DomainDataset) -> None:
    algorithm = built(small_dataset)
    warned = pytest.warns(ManyDGWarning, match="layer by layer, since their GPU kernels cannot be built: Assertion")
    with warned, at_speed(Speed("tf32", "captured"), algorithm, GPU):
        assert not any(part.fused for part in algorithm.modules() if isinstance(part, Perceptron))


def test_a_process_may_train_any_number_of_compiled_models(small_dataset: DomainDataset) -> None:
    batch, compilations = small_dataset.take(torch.arange(20), 10), []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    for _ in range(10):
        compiling.forget_compiled()
        torch.compile(built(small_dataset).objective, backend=noted, dynamic=False)(batch)
    assert len(compilations) == 10


def test_deterministic_kernels_end_with_the_steps(small_dataset: DomainDataset) -> None:
    with at_speed(Speed("float32", "deterministic"), built(small_dataset), CPU):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_bf16_learns_as_float32_does(dataset_of: Callable[..., DomainDataset]) -> None:
    data = dataset_of(patients=30, samples=12)
    curves = {}
    for kind in ("float32", "bf16"):
        run = train(data, epochs=4, lr=3e-3, batch_size=64, precision=kind)
        curves[kind] = [entry["losses"]["supervised"] for entry in run.record["history"]]
    assert curves["bf16"] != curves["float32"]
    np.testing.assert_allclose(curves["bf16"], curves["float32"], rtol=0.05)


def test_the_record_says_which_speed_was_used(small_dataset: DomainDataset, tmp_path: Path) -> None:
    config = train(small_dataset, epochs=1, out=tmp_path, device="cpu").record["config"]
    assert (config["precision"], config["execution"]) == ("float32", "plain")
    config = train(small_dataset, epochs=1, execution="deterministic", device="cpu").record["config"]
    assert config["execution"] == "deterministic"


def test_deterministic_training_gives_the_same_bits_as_plain_training_on_a_cpu(small_dataset: DomainDataset) -> None:
    plain, exact = (train(small_dataset, epochs=2, execution=kind, device="cpu") for kind in ("plain", "deterministic"))
    for name, tensor in plain.algorithm.state_dict().items():
        assert torch.equal(tensor, exact.algorithm.state_dict()[name])


def test_spectrograms_are_worked_out_once_channels_last_and_exactly() -> None:
    data = eeg().select(torch.arange(3, 11))
    backbone = build_backbone("sleep-cnn", InputSchema.of(data)).eval()
    backbone.fit_inputs(data)
    ready = backbone.precompute(data, CPU, 1 << 30)
    assert set(ready.columns) == {"scaled_spectrogram", "patch_moments"}
    rows = torch.tensor([5, 0, 2])
    column = ready.take(rows).inputs["scaled_spectrogram"]
    assert isinstance(column, Tensor)
    assert column.is_contiguous(memory_format=torch.channels_last)
    signal = data.take(rows).inputs["signal"]
    assert isinstance(signal, Tensor)
    torch.testing.assert_close(column, backbone.scale(backbone.spectrogram(signal)))  # type: ignore[operator]
    from_signal = backbone(data.take(rows).inputs)
    torch.testing.assert_close(backbone(ready.take(rows).inputs), from_signal, rtol=1e-4, atol=1e-5)
    assert torch.equal(ready.targets, data.targets)
    assert torch.equal(ready.domains, data.domains)


def test_spectrograms_that_do_not_fit_are_worked_out_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = eeg()
    backbone = build_backbone("sleep-cnn", InputSchema.of(data))
    assert backbone.precompute(data, CPU, 4 * len(data) * 2 * 129 * 43 - 1) is data
    monkeypatch.setattr(placing, "memory_of_machine", lambda: 1 << 10)
    assert place(data, built(data, "base", backbone), CPU) is data


def test_a_cached_spectrogram_trains_as_the_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without dropout, whose mask follows the order in memory.
    data = eeg(24)
    config = TrainingConfig(algorithm="base", backbone_options={"dropout": 0.0}, epochs=2, batch_size=8)
    curves = []
    for memory in (1 << 40, 0):
        monkeypatch.setattr(placing, "memory_of_machine", lambda memory=memory: memory)
        curves.append([entry["losses"]["supervised"] for entry in fit(config, data, None, CPU).history])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)


def test_a_cpu_takes_its_steps_as_written(small_dataset: DomainDataset) -> None:
    algorithm = built(small_dataset, "base")
    optimizers = algorithm.optimizers(1e-2, 0.0)
    steps = steps_for(algorithm, small_dataset, optimizers, CPU, Speed("float32", "plain"))
    assert isinstance(steps, PlainSteps)
    other = built(small_dataset, "base")
    others = other.optimizers(1e-2, 0.0)
    plan = plan_epoch("samples", small_dataset.domains, 32, 0, 1)
    found = [do_step() for do_step in steps.run(plan)]
    expected = [other.step(small_dataset.take(rows, pairs), others)["supervised"] for rows, pairs in plan]
    assert read_terms(found) == {"supervised": [float(value) for value in expected]}


def test_terms_that_a_step_did_not_have_are_read_as_absent() -> None:
    block = [
        Terms.of({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}),
        Terms.of({"a": torch.tensor(3.0)}),
        Terms.of({"b": torch.tensor(4.0), "a": torch.tensor(5.0)}),
    ]
    assert read_terms(block) == {"a": [1.0, 3.0, 5.0], "b": [2.0, None, 4.0]}


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimiser_counts_its_steps_where_its_weights_are(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], fused=fused)
    parameter.grad = torch.ones(3)
    optimizer.step()
    compiling.make_capturable(optimizer)
    assert all(group["capturable"] for group in optimizer.param_groups)
    assert optimizer.state[parameter]["step"].device == parameter.device


def test_long_stays_are_shortened_once() -> None:
    lengths = [3, 9, 0, 7]
    columns = {
        "event_kind": Ragged.from_rows([[0] * length for length in lengths]),
        "event_codes": Ragged.from_rows([[[1 + event % 4] for event in range(length)] for length in lengths]),
        "event_values": Ragged.from_rows([[[float(e)] for e in range(length)] for length in lengths], torch.float32),
    }
    info = {"vocabularies": {"events": list("abcde")}}
    data = from_arrays(columns, np.arange(4) % 2, np.arange(4), missing=True, info=info)
    backbone = build_backbone("event-transformer", InputSchema.of(data), {"max_events": 5}).eval()
    backbone.fit_inputs(data)
    short = replace(data, columns=backbone.steps.shorten(data.columns))  # type: ignore[union-attr, operator]
    kinds = short.columns["event_kind"]
    assert isinstance(kinds, Ragged)
    assert kinds.lengths.tolist() == [3, 5, 0, 5]
    everyone = torch.arange(4)
    torch.testing.assert_close(backbone(short.take(everyone).inputs), backbone(data.take(everyone).inputs))


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


def test_a_compiled_update_is_the_optimisers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiled", lambda function: torch.compile(function, backend="eager"))
    ended = []
    for fast in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
        if fast:
            compiling.make_capturable(optimizer)
            compiling.compile_update(optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        ended.append([weight.detach().clone() for weight in model.parameters()])
    for plain, compiled in zip(*ended, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
