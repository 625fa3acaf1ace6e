"""What holds for every backbone in the registry, on every shape of data that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manydg.backbones import BACKBONES, Backbone, build_backbone
from manydg.backbones._convolution import Convolution
from manydg.config import TrainingConfig
from manydg.data.dataset import Batch, DomainDataset, InputSchema
from manydg.errors import ConfigError, StorageError
from manydg.targets import target_of
from manydg.training.inference import rebuild

Make = Callable[[str], DomainDataset]
SHAPES = ("table", "visits", "events")
SIGNALS = ("seizure", "sleep")
ONLY_ON = {"gamenet": ("visits",), "event-transformer": ("events",), "gru": ("visits", "events")}
ONLY_ON |= {"retain": ("visits", "events"), "mlp": ("table",), "tabular": ("gaps",)}
ONLY_ON |= {"seizure-cnn": ("seizure",), "sleep-cnn": ("sleep",)}


def pairs() -> list[tuple[str, str]]:
    """Every backbone with the data listed for it; a new one, not listed, with all the data there are."""
    return [(name, shape) for name in BACKBONES.names() for shape in ONLY_ON.get(name, (*SHAPES, *SIGNALS))]


@pytest.fixture(params=pairs(), ids="-".join)
def case(request: pytest.FixtureRequest, make: Make) -> tuple[Backbone, DomainDataset]:
    """A backbone fitted to a dataset that it takes."""
    name, shape = request.param
    dataset = make(shape)
    try:
        backbone = build_backbone(name, InputSchema.of(dataset))
    except ConfigError as error:
        if name in ONLY_ON:
            raise
        pytest.skip(f"{name} does not take {shape}: {error}")
    backbone.fit_inputs(dataset)
    return backbone, dataset


def rows(dataset: DomainDataset, *indices: int) -> Batch:
    return dataset.take(torch.tensor(indices))


def everything(dataset: DomainDataset) -> Batch:
    return rows(dataset, *range(len(dataset)))


@pytest.mark.parametrize("name", BACKBONES.names())
def test_every_backbone_takes_some_data(name: str, make: Make) -> None:
    taken = []
    for shape in ONLY_ON.get(name, (*SHAPES, *SIGNALS)):
        try:
            taken.append(build_backbone(name, InputSchema.of(make(shape))))
        except ConfigError:
            continue
    assert taken


def test_shapes_are_known_before_memory_is_taken(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    name = next(name for name in BACKBONES.names() if BACKBONES.get(name) is type(backbone))
    with torch.device("meta"):
        planned = build_backbone(name, InputSchema.of(dataset))
    assert {tensor.device.type for tensor in planned.state_dict().values()} == {"meta"}
    shapes = {key: tensor.shape for key, tensor in planned.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in backbone.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", "table"), ("tabular", "gaps"), ("gru", "visits"), ("event-transformer", "events")]
)
def test_a_file_that_asks_for_a_million_million_layers_is_refused(name: str, shape: str, make: Make) -> None:
    dataset = make(shape)
    config = TrainingConfig("base", backbone=name, backbone_options={"layers": 10**12})
    with pytest.raises(StorageError, match=r"model\.safetensors describes a model of more layers than it has weights"):
        rebuild(
            config, InputSchema.of(dataset), target_of(dataset.target), 6, {}, source=Path("model.safetensors")
        )  # fmt: skip


def test_features_have_the_width_that_was_promised(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    features = backbone.train()(everything(dataset).inputs)
    assert features.shape == (len(dataset), backbone.output_size)
    assert bool(torch.isfinite(features).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_learnt_from_inputs_does_not_depend_on_where_they_lie(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    expected = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone.fit_inputs(dataset.to("cuda"))
    for name, value in backbone.named_buffers():
        assert value.device.type == "cpu"
        torch.testing.assert_close(value, expected[name])


def test_batch_mates_do_not_change_a_sample(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    backbone.eval()
    with torch.no_grad():
        together = backbone(everything(dataset).inputs)
        alone = torch.cat([backbone(rows(dataset, row).inputs) for row in range(len(dataset))])
        mixed = backbone(rows(dataset, 7, 1, 7, 0).inputs)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    torch.testing.assert_close(mixed, together[[7, 1, 7, 0]], rtol=0, atol=1e-5)


def test_samples_differ_in_their_features(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    with torch.no_grad():
        features = backbone.eval()(everything(dataset).inputs)
    distances = torch.cdist(features, features) + torch.eye(len(features))
    assert float(distances.min()) > 1e-4


def test_gradients_reach_every_parameter(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    features = backbone.eval()(everything(dataset).inputs)
    (features * torch.randn_like(features)).sum().backward()
    reached = {name: None if p.grad is None else float(p.grad.abs().sum()) for name, p in backbone.named_parameters()}
    # The bias of a convolution before a batch norm is counted and never added: the norm would take it off again.
    idle = {f"{name}.bias" for name, part in backbone.named_modules() if isinstance(part, Convolution)}
    assert {name for name, total in reached.items() if not total} == idle


def test_weights_and_what_was_fitted_come_back_from_a_state(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    name = next(entry for entry in BACKBONES.names() if BACKBONES.get(entry) is type(backbone))
    torch.manual_seed(99)
    fresh = build_backbone(name, InputSchema.from_json(InputSchema.of(dataset).to_json()))
    fresh.load_state_dict(backbone.state_dict())
    inputs = everything(dataset).inputs
    with torch.no_grad():
        assert torch.equal(fresh.eval()(inputs), backbone.eval()(inputs))


def test_fitting_changes_no_shape_and_no_weight(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    weights = dict(backbone.named_parameters())
    backbone.fit_inputs(dataset.select(torch.arange(6)))
    after = backbone.state_dict()
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    assert all(torch.equal(after[name], before[name]) for name in weights)


def test_gradients_can_be_differentiated_again(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    parameters = list(backbone.train().parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = backbone(everything(dataset).inputs).tanh().square().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        total = torch.stack([grad.square().sum() for grad in first if grad is not None]).sum()
        second = torch.autograd.grad(total, parameters, allow_unused=True)
    assert all(bool(torch.isfinite(grad).all()) for grad in second if grad is not None)
    assert any(grad is not None and float(grad.abs().sum()) > 0 for grad in second)


def test_half_precision_runs_and_stays_near(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    inputs = everything(dataset).inputs
    backbone.eval()
    with torch.no_grad():
        exact = backbone(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            rough = backbone(inputs).to(torch.float32)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))


def test_a_step_of_training_lowers_the_loss(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    batch = everything(dataset)
    wanted = torch.randn(len(dataset), backbone.output_size)
    backbone.eval()

    def loss() -> Tensor:
        return (backbone(batch.inputs) - wanted).square().mean()

    before = loss()
    optimizer = torch.optim.Adam(backbone.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert float(loss().detach()) < float(before.detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_features(case: tuple[Backbone, DomainDataset]) -> None:
    backbone, dataset = case
    with torch.no_grad():
        here = backbone.eval()(everything(dataset).inputs)
        there = backbone.to("cuda")(everything(dataset.to("cuda")).inputs)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=1e-3)
