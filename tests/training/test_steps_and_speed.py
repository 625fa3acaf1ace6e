"""Precision and execution: what is settled, what it changes, and what it must not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, build_algorithm
from manydg.backbones import BACKBONES, Backbone, Inputs
from manydg.config import TrainingConfig
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.sampling import plan_epoch
from manydg.errors import ConfigError, ManyDGWarning
from manydg.targets import target_of
from manydg.training import execution as policy
from manydg.training.execution import Speed, at_speed, choose_speed, steps_for
from manydg.training.execution.steps import PlainSteps, Terms, read_terms
from manydg.training.run import train

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
    assert choose_speed(TrainingConfig(**options), built(small_dataset), small_dataset, device) == expected


def test_data_that_stay_on_the_host_are_captured_where_all_rows_have_one_length(small_dataset: DomainDataset) -> None:
    assert choose_speed(TrainingConfig(), built(small_dataset), small_dataset, GPU).execution == "captured"
    visits = from_arrays({"event_codes": Ragged.from_rows([[1]] * 8)}, np.arange(8) % 2, np.arange(8) // 2)
    assert choose_speed(TrainingConfig(), built(small_dataset), visits, GPU).execution == "plain"


def test_a_speed_that_the_device_or_the_algorithm_cannot_have_is_refused(small_dataset: DomainDataset) -> None:
    with pytest.raises(ConfigError, match="need a GPU"):
        choose_speed(TrainingConfig(execution="captured"), built(small_dataset), small_dataset, CPU)
    with pytest.raises(ConfigError, match="cannot be captured"):
        choose_speed(TrainingConfig(execution="captured"), built(small_dataset, "mldg"), small_dataset, GPU)
    visits = from_arrays({"event_codes": Ragged.from_rows([[1]] * 8)}, np.arange(8) % 2, np.arange(8) // 2)
    with pytest.raises(ConfigError, match="rows of any length cannot be captured here"):
        choose_speed(TrainingConfig(execution="captured"), built(small_dataset), visits, GPU)
    with pytest.raises(ConfigError, match="unknown precision 'fp8'"):
        TrainingConfig(precision="fp8")
    with pytest.raises(ConfigError, match="unknown execution 'fast'"):
        TrainingConfig(execution="fast")


def test_where_nothing_can_be_compiled_steps_are_captured_with_a_warning(
    small_dataset: DomainDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_fastest", lambda *_: "compiled")
    asked = [built(small_dataset), small_dataset, GPU]
    monkeypatch.setattr(policy, "reason_against_compiling", lambda device: None)
    assert choose_speed(TrainingConfig(), *asked).execution == "compiled"
    monkeypatch.setattr(policy, "reason_against_compiling", lambda device: "no C compiler")
    with pytest.warns(ManyDGWarning, match="captured, not compiled, since that fails here: no C compiler"):
        assert choose_speed(TrainingConfig(), *asked).execution == "captured"
    with pytest.raises(ConfigError, match=r"say execution captured or auto \(no C compiler\)"):
        choose_speed(TrainingConfig(execution="compiled"), *asked)


@pytest.mark.parametrize(
    ("backbone", "epochs", "samples", "expected"),
    [
        ("sleep-cnn", 50, 332_000, "compiled"),
        ("sleep-cnn", 5, 332_000, "captured"),
        ("sleep-cnn", 50, 33_200, "captured"),
        ("seizure-cnn", 20, 132_000, "captured"),
        ("seizure-cnn", 50, 132_000, "compiled"),
        ("mlp", 10_000, 332_000, "captured"),
    ],
)
def test_steps_are_compiled_where_that_saves_more_than_it_costs_over_the_whole_run(
    small_dataset: DomainDataset,
    monkeypatch: pytest.MonkeyPatch,
    backbone: str,
    epochs: int,
    samples: int,
    expected: str,
) -> None:
    monkeypatch.setattr(policy, "reason_against_compiling", lambda device: None)
    algorithm = built(small_dataset)
    monkeypatch.setattr(Dense, "compiled_gain", BACKBONES.get(backbone).compiled_gain)
    train = small_dataset.select(torch.arange(samples) % len(small_dataset))
    config = TrainingConfig(epochs=epochs, batch_size=256 if backbone == "sleep-cnn" else 128)
    assert choose_speed(config, algorithm, train, GPU).execution == expected


def test_a_second_run_of_the_same_shape_is_compiled_sooner_since_the_compiler_has_its_kernels(
    small_dataset: DomainDataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(policy, "reason_against_compiling", lambda device: None)
    monkeypatch.setattr(Dense, "compiled_gain", 10 / len(small_dataset))
    algorithm, config = built(small_dataset), TrainingConfig(epochs=64, batch_size=64)
    assert choose_speed(config, algorithm, small_dataset, GPU).execution == "captured"
    policy.compiled_before(algorithm, small_dataset, 64).touch()
    assert choose_speed(config, algorithm, small_dataset, GPU).execution == "compiled"
    config = TrainingConfig(epochs=32, batch_size=32)
    assert choose_speed(config, algorithm, small_dataset, GPU).execution == "captured"


@pytest.mark.parametrize(
    ("execution", "epochs", "algorithm", "device", "expected"),
    [
        ("auto", 200, "manydg", GPU, True),
        ("compiled", 1, "manydg", GPU, True),
        ("auto", 1, "manydg", GPU, False),
        ("captured", 200, "manydg", GPU, False),
        ("auto", 200, "mldg", GPU, False),
        ("auto", 200, "manydg", CPU, False),
    ],
)
def test_the_compiler_is_imported_ahead_where_it_may_be_used(
    small_dataset: DomainDataset,
    monkeypatch: pytest.MonkeyPatch,
    execution: str,
    epochs: int,
    algorithm: str,
    device: torch.device,
    expected: bool,
) -> None:
    started = []
    monkeypatch.setattr(policy, "compiler_ahead", lambda: started.append(True))
    model = built(small_dataset, algorithm)
    model.backbone.compiled_gain = 20 / (200 * len(small_dataset) / 64)
    config = TrainingConfig(execution=execution, epochs=epochs, batch_size=64)
    policy.expect_compiling(config, model, small_dataset, device)
    assert bool(started) is expected


def test_a_user_without_a_name_trains_too(small_dataset: DomainDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", nameless)
    assert policy.compiled_before(built(small_dataset), small_dataset, 64).parent.name == "torchinductor_unknown"


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


def test_deterministic_kernels_end_with_the_steps(small_dataset: DomainDataset) -> None:
    with at_speed(Speed("float32", "deterministic"), built(small_dataset), CPU):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_bf16_learns_as_float32_does(dataset_of: Callable[..., DomainDataset]) -> None:
    data = dataset_of(patients=30, samples=12)
    curves = {}
    for kind in ("float32", "bf16"):
        run = train(data, epochs=4, lr=3e-3, batch_size=64, precision=kind)
        curves[kind] = [entry.losses["supervised"] for entry in run.record.history]
    assert curves["bf16"] != curves["float32"]
    np.testing.assert_allclose(curves["bf16"], curves["float32"], rtol=0.05)


def test_the_record_says_which_speed_was_used(small_dataset: DomainDataset, tmp_path: Path) -> None:
    config = train(small_dataset, epochs=1, out=tmp_path, device="cpu").record.config
    assert (config.precision, config.execution) == ("float32", "plain")
    config = train(small_dataset, epochs=1, execution="deterministic", device="cpu").record.config
    assert config.execution == "deterministic"


def test_deterministic_training_gives_the_same_bits_as_plain_training_on_a_cpu(small_dataset: DomainDataset) -> None:
    plain, exact = (train(small_dataset, epochs=2, execution=kind, device="cpu") for kind in ("plain", "deterministic"))
    for name, tensor in plain.algorithm.state_dict().items():
        assert torch.equal(tensor, exact.algorithm.state_dict()[name])


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
