"""The two spectrogram networks: the paper's sizes, torch's transform, statistics of training patients."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manydg.backbones import Backbone, build_backbone
from manydg.backbones._convolution import Convolution, ResidualBlock, Stem, convolve, folded_convolution
from manydg.backbones._spectrogram import LogSpectrogram, SpectrogramCNN
from manydg.data.dataset import ColumnSchema, DomainDataset, InputSchema, from_arrays
from manydg.errors import ConfigError, DataError

PAPER = {"seizure-cnn": ((16, 2000), (16, 33, 63), 389_088), "sleep-cnn": ((2, 3000), (2, 129, 43), 25_110)}


TRANSFORMS = [(64, 32, True, 2000), (256, 64, False, 3000), (9, 4, True, 50), (9, 4, True, 52)]


def signal_schema(shape: tuple[int, ...], name: str = "signal") -> InputSchema:
    return InputSchema({name: ColumnSchema("float32", shape)})


def build(name: str, shape: tuple[int, ...] | None = None, **options: object) -> SpectrogramCNN:
    backbone = build_backbone(name, signal_schema(shape or PAPER[name][0]), options)
    assert isinstance(backbone, SpectrogramCNN)
    return backbone


def parameters(backbone: Backbone) -> int:
    return sum(parameter.numel() for parameter in backbone.parameters())


def eeg(rows: int, channels: int, samples: int, unit: float = 1.0) -> DomainDataset:
    rng = np.random.default_rng(1)
    loudness = np.exp(rng.normal(size=(1, channels, 1)))
    signal = unit * 20 * loudness * rng.normal(size=(rows, channels, samples)).cumsum(axis=-1) / 10
    return from_arrays({"signal": signal.astype(np.float32)}, np.arange(rows) % 2, np.arange(rows) % 4)


@pytest.mark.parametrize("name", PAPER)
def test_sizes_are_those_of_the_paper(name: str) -> None:
    shape, spectrogram, count = PAPER[name]
    backbone = build(name)
    assert backbone.spectrogram(torch.randn(2, *shape)).shape == (2, *spectrogram)
    assert backbone.shape == spectrogram
    assert backbone.output_size == 128
    assert parameters(backbone) == count


@pytest.mark.parametrize(
    ("name", "expected"),
    [("seizure-cnn", [(32, 9, 16), (64, 3, 4), (128, 1, 1)]), ("sleep-cnn", [(8, 65, 22), (16, 16, 5), (32, 4, 1)])],
)
def test_each_block_gives_the_maps_of_the_paper(name: str, expected: list[tuple[int, ...]]) -> None:
    backbone = build(name)
    seen: list[tuple[int, ...]] = []
    for module in backbone.modules():
        if type(module).__name__ == "ResidualBlock":
            module.register_forward_hook(lambda _module, _given, output: seen.append(tuple(output.shape[1:])))
    backbone({"signal": torch.randn(2, *PAPER[name][0])})
    assert seen == expected


@pytest.mark.parametrize("taper", ["rectangular", "hann"])
@pytest.mark.parametrize(("window", "hop", "centred", "samples"), TRANSFORMS)
def test_the_transform_is_that_of_torch_stft(taper: str, window: int, hop: int, centred: bool, samples: int) -> None:
    signal = 30 * torch.randn(3, 2, samples)
    weights = torch.ones(window) if taper == "rectangular" else torch.hann_window(window)
    parts = torch.stft(
        signal.reshape(6, samples), window, hop, window=weights, center=centred, pad_mode="reflect", return_complex=True
    )
    energy = parts.abs().square() / weights.square().sum()
    transform = LogSpectrogram(window, hop, centred, taper, 1e-3)
    found = transform(signal)
    assert found.shape[-1] == transform.frames(samples)
    torch.testing.assert_close(found.exp().reshape(energy.shape), energy.clamp_min(1e-3), rtol=1e-4, atol=1e-2)
    loud = energy > 1
    torch.testing.assert_close(found.reshape(energy.shape)[loud], energy.log()[loud], rtol=0, atol=1e-4)


def test_a_flat_signal_has_the_floor_everywhere_and_no_infinity() -> None:
    found = build("sleep-cnn").spectrogram(torch.zeros(1, 2, 3000))
    torch.testing.assert_close(found, torch.full_like(found, math.log(1e-3)))


@pytest.mark.parametrize("name", PAPER)
def test_features_come_from_maps_and_maps_have_room_for_style(name: str) -> None:
    backbone = build(name).eval()
    inputs: dict[str, Tensor] = {"signal": torch.randn(3, *PAPER[name][0])}
    maps = backbone.maps(inputs)
    assert maps.ndim == 4
    assert maps.shape[2] * maps.shape[3] > 1
    assert torch.equal(backbone.features_of(maps), backbone(inputs))


@pytest.mark.parametrize("name", PAPER)
def test_a_ready_spectrogram_gives_the_same_features_as_its_signal(name: str) -> None:
    data = eeg(6, *PAPER[name][0])
    backbone = build(name).eval()
    backbone.fit_inputs(data)
    signal = data.columns["signal"]
    assert isinstance(signal, Tensor)
    ready = backbone.spectrogram(signal)
    torch.testing.assert_close(backbone({"spectrogram": ready}), backbone({"signal": signal}))
    on_ready = build_backbone(name, signal_schema(tuple(ready.shape[1:]), "spectrogram")).eval()
    on_ready.fit_inputs(from_arrays({"spectrogram": ready}, np.arange(6) % 2, np.arange(6) % 3))
    on_ready.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(on_ready({"spectrogram": ready}), backbone({"signal": signal}))


def test_each_channel_and_frequency_is_standardised_over_training_patients() -> None:
    data = eeg(40, 2, 3000)
    train = data.subset(["0", "1", "2"])
    backbone = build("sleep-cnn")
    backbone.fit_inputs(train)
    signal = train.column("signal")
    assert isinstance(signal, Tensor)
    scaled = backbone.scale(backbone.spectrogram(signal))
    torch.testing.assert_close(scaled.mean(dim=(0, 3)), torch.zeros(2, 129), rtol=0, atol=1e-3)
    torch.testing.assert_close(scaled.std(dim=(0, 3)), torch.ones(2, 129), rtol=0, atol=1e-2)


def test_a_dead_channel_is_silent_rather_than_infinite() -> None:
    data = eeg(8, 2, 3000)
    data.columns["signal"][:, 1] = 0.0
    backbone = build("sleep-cnn")
    backbone.fit_inputs(data)
    scaled = backbone.scale(backbone.spectrogram(eeg(8, 2, 3000).columns["signal"]))
    assert torch.equal(scaled[:, 1], torch.zeros_like(scaled[:, 1]))
    assert bool(torch.isfinite(scaled).all())


def test_a_signal_in_volts_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match="microvolts"):
        build("sleep-cnn").fit_inputs(eeg(8, 2, 3000, unit=1e-6))


@pytest.mark.parametrize(("name", "shape", "width"), [("seizure-cnn", (19, 5000), 384), ("sleep-cnn", (1, 6000), 384)])
def test_other_channels_and_lengths_are_taken(name: str, shape: tuple[int, int], width: int) -> None:
    backbone = build(name, shape).eval()
    assert backbone({"signal": torch.randn(2, *shape)}).shape == (2, backbone.output_size)
    assert backbone.output_size == width


def test_a_single_column_of_signals_may_have_any_name() -> None:
    backbone = build_backbone("seizure-cnn", signal_schema((16, 2000), "x")).eval()
    assert backbone({"x": torch.randn(2, 16, 2000)}).shape == (2, 128)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (signal_schema((2, 600)), {}, "larger spectrogram"),
        (signal_schema((2, 100)), {}, "larger spectrogram"),
        (signal_schema((48,), "x"), {}, "signal"),
        (signal_schema((2, 3000)), {"taper": "kaiser"}, "taper"),
        (signal_schema((2, 3000)), {"hop": 0}, "hop"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(schema: InputSchema, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_backbone("sleep-cnn", schema, options)


@pytest.mark.parametrize(("inputs", "outputs", "width", "columns", "stride"), [
    (2, 6, 43, 8, 1), (6, 16, 43, 8, 2), (8, 8, 22, 4, 1), (8, 32, 22, 8, 2), (16, 16, 11, 4, 1), (3, 5, 8, 2, 2),
])  # fmt: skip
def test_a_convolution_of_folded_columns_is_the_same_convolution(
    inputs: int, outputs: int, width: int, columns: int, stride: int
) -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, inputs, 17, width, dtype=torch.float64).to(memory_format=torch.channels_last)
    weight = torch.randn(outputs, inputs, 3, 3, dtype=torch.float64)
    found = []
    for way in (convolve, partial(folded_convolution, columns=columns)):
        given, weights = maps.clone().requires_grad_(), weight.clone().requires_grad_()
        result = way(given, weights, stride)
        (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape)).sum().backward()
        found.append([result.detach(), given.grad, weights.grad])
    for plain, folded in zip(*found, strict=True):
        torch.testing.assert_close(folded, plain)


def test_a_bias_before_a_batch_norm_would_change_nothing() -> None:
    torch.manual_seed(0)
    layer, norm = Convolution(3, 4), torch.nn.BatchNorm2d(4)
    maps = torch.randn(8, 3, 10, 10)
    with_bias = torch.nn.functional.conv2d(maps, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(norm(layer(maps)), norm(with_bias), rtol=1e-4, atol=1e-5)


class AsWritten(nn.Module):
    """A stem and a residual block in torch's own layers, as the paper has them."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(inputs, middle, 3, padding=1), nn.BatchNorm2d(middle), nn.ELU())
        self.path = nn.Sequential(
            nn.Conv2d(middle, outputs, 3, 2, 1),
            nn.BatchNorm2d(outputs),
            nn.ELU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(middle, outputs, 3, 2, 1), nn.BatchNorm2d(outputs))
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.zeros_(part.bias)

    def forward(self, maps: Tensor) -> Tensor:
        first = self.stem(maps)
        pooled: Tensor = nn.functional.max_pool2d(self.path(first) + self.shortcut(first), 2)
        return pooled


class Fast(nn.Module):
    """The same from the package's parts."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.stem, self.block = Stem(inputs, middle), ResidualBlock(middle, outputs, nn.MaxPool2d(2), 0.0)

    def forward(self, maps: Tensor) -> Tensor:
        found: Tensor = self.block(self.stem(maps))
        return found

    def like(self, other: AsWritten) -> Fast:
        parts = {"stem": self.stem, "path": self.block.path, "shortcut": self.block.shortcut}
        for name, part in parts.items():
            part.load_state_dict(getattr(other, name).state_dict())
        return self


@pytest.mark.parametrize(("inputs", "middle", "outputs"), [(2, 6, 8), (1, 3, 4), (4, 8, 16), (5, 20, 24)])
def test_training_on_a_cpu_is_that_of_the_layers_as_written(inputs: int, middle: int, outputs: int) -> None:
    torch.manual_seed(0)
    written = AsWritten(inputs, middle, outputs).double()
    fast = Fast(inputs, middle, outputs).double().like(written)
    for step in range(3):
        maps = torch.randn(5, inputs, 13, 10, dtype=torch.float64).to(memory_format=torch.channels_last) + step
        found, wanted = fast(maps), written(maps)
        torch.testing.assert_close(found, wanted)
        slope = torch.randn_like(wanted)
        (found * slope).sum().backward()
        (wanted * slope).sum().backward()
    renamed = {name.replace("block.", ""): weight for name, weight in fast.named_parameters()}
    for name, weight in written.named_parameters():
        if weight.ndim == 1 and isinstance(written.get_submodule(name.rpartition(".")[0]), nn.Conv2d):
            assert renamed[name].grad is None
            continue
        torch.testing.assert_close(renamed[name].grad, weight.grad)
    statistics = {name.replace("block.", ""): buffer for name, buffer in fast.named_buffers()}
    for name, buffer in written.named_buffers():
        torch.testing.assert_close(statistics[name], buffer)
    maps = torch.randn(2, inputs, 13, 10, dtype=torch.float64)
    torch.testing.assert_close(fast.eval()(maps), written.eval()(maps))


def test_maps_that_were_filled_up_to_eight_channels_can_be_differentiated_twice() -> None:
    torch.manual_seed(0)
    found = []
    for network in ((written := AsWritten(2, 6, 8).double()), Fast(2, 6, 8).double().like(written)):
        weight = next(network.parameters())
        maps = torch.linspace(-1, 1, 3 * 2 * 9 * 8, dtype=torch.float64).sin().reshape(3, 2, 9, 8)
        (slope,) = torch.autograd.grad(network(maps).square().sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), weight)[0])
    torch.testing.assert_close(found[1], found[0])


def test_the_maps_of_a_block_are_dropped_out_after_the_pool() -> None:
    block = ResidualBlock(2, 4, nn.MaxPool2d(2), 0.5).train()
    dropped = block(torch.randn(64, 2, 16, 16)) == 0
    # The largest of four values of which some were zero would be zero less often.
    assert dropped.double().mean().item() == pytest.approx(0.5, abs=0.05)
