"""What is done to the data once, before training: it changes nothing about what is learnt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from manydg.algorithms import build_algorithm
from manydg.backbones import build_backbone
from manydg.config import TrainingConfig
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.targets import target_of
from manydg.training.execution import memory as placing
from manydg.training.execution.memory import place
from manydg.training.fit import fit

CPU = torch.device("cpu")


def eeg(rows: int = 12) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).normal(size=(rows, 2, 3000)).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(rows) % 3, np.arange(rows) // 4)


def test_spectrograms_are_worked_out_once_channels_last_and_exactly() -> None:
    data = eeg().select(torch.arange(3, 11))
    backbone = build_backbone("sleep-cnn", InputSchema.of(data)).eval()
    backbone.fit_inputs(data)
    ready = backbone.precompute(data, CPU, 1 << 30)
    assert set(ready.columns) == {"scaled_spectrogram"}
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
    assert place(data, build_algorithm("base", backbone, target_of(data.target), data.n_patients), CPU) is data


def test_a_cached_spectrogram_trains_as_the_signal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without dropout, whose mask follows the order in memory.
    data = eeg(24)
    config = TrainingConfig(algorithm="base", backbone_options={"dropout": 0.0}, epochs=2, batch_size=8)
    curves = []
    for memory in (1 << 40, 1 << 22):
        monkeypatch.setattr(placing, "memory_of_machine", lambda memory=memory: memory)
        curves.append([entry.losses["supervised"] for entry in fit(config, data, None, CPU).history])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)


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
