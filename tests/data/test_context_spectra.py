"""Context of signals: each channel and frequency by what is usual for the patient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from manydg.backbones import build_backbone
from manydg.backbones.sleep_cnn import SleepCNN
from manydg.config import TrainingConfig
from manydg.data.context import add_context
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.errors import DataError
from manydg.training.run import train


@pytest.fixture(scope="module")
def signals() -> DomainDataset:
    """Noise in microvolts, louder in some people than in others; the label is whether a sample is loud for its own."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(12), 8)
    loud = np.tile([1.0, 4.0], 48)
    gain = np.exp(2 * rng.normal(size=12))[who]
    values = 20 * rng.normal(size=(96, 2, 1600)) * (gain * loud)[:, None, None]
    return from_arrays({"signal": values}, (loud > 2).astype(int), who, times=np.tile(np.arange(8), 12))


@pytest.fixture(scope="module")
def backbone(signals: DomainDataset) -> SleepCNN:
    found = build_backbone("sleep-cnn", InputSchema.of(signals))
    assert isinstance(found, SleepCNN)
    return found


@pytest.mark.parametrize("mode", ["offline", "causal"])
def test_usual_energy_is_that_of_the_patients_own_samples(
    mode: str, signals: DomainDataset, backbone: SleepCNN
) -> None:
    added = add_context(signals, mode, spectrum=backbone.spectrogram, strength=5.0).columns
    spectra = backbone.spectrogram(signals.columns["signal"]).double()  # type: ignore[arg-type]
    for row in (0, 3, 50):
        first = row - row % 8
        mine = spectra[first : row + 1] if mode == "causal" else spectra[first : first + 8]
        flat = mine.permute(1, 2, 0, 3).flatten(2)
        weight = (len(mine) - 1) / (len(mine) + 4)
        assert float(added["context_weight"][row, 0]) == pytest.approx(weight)  # type: ignore[index]
        if weight:
            torch.testing.assert_close(added["context_mean"][row].double(), flat.mean(-1), atol=1e-4, rtol=1e-4)  # type: ignore[index, union-attr]
            wanted = 1 / flat.std(-1, correction=0)
            torch.testing.assert_close(added["context_scale"][row].double(), wanted, atol=1e-3, rtol=1e-3)  # type: ignore[index, union-attr]
        else:
            assert not added["context_mean"][row].any()  # type: ignore[index, union-attr]


def test_a_patient_of_whom_nothing_is_known_is_seen_as_without_context(
    signals: DomainDataset, backbone: SleepCNN
) -> None:
    alone = dataclasses.replace(signals, domains=torch.arange(96), patients=np.arange(96).astype(str))
    with_context = add_context(alone, spectrum=backbone.spectrogram).take(torch.arange(96)).inputs
    backbone.eval()
    with torch.no_grad():
        torch.testing.assert_close(backbone(with_context), backbone(signals.take(torch.arange(96)).inputs))


def test_other_patients_and_later_samples_never_enter_the_spectra(signals: DomainDataset, backbone: SleepCNN) -> None:
    changed = signals.columns["signal"].clone()  # type: ignore[union-attr]
    changed[4:8] *= 50
    changed[16:] *= 50
    other = dataclasses.replace(signals, columns={"signal": changed})
    before = add_context(signals, "causal", spectrum=backbone.spectrogram).columns
    after = add_context(other, "causal", spectrum=backbone.spectrogram).columns
    for name in ("context_mean", "context_scale", "context_weight"):
        kept = [*range(4), *range(8, 16)]
        assert torch.equal(before[name][kept], after[name][kept])  # type: ignore[index]


def test_signals_need_a_transform(signals: DomainDataset) -> None:
    with pytest.raises(DataError, match="spectrum="):
        add_context(signals)


def test_runs_with_context_on_signals_predict_loudness_that_is_relative_to_the_person(signals: DomainDataset) -> None:
    config = TrainingConfig(
        algorithm="manydg-context", epochs=8, batch_size=16, lr=5e-3, ratios=(0.5, 0.25, 0.25),
        backbone_options={"dropout": 0.1}, settings={"decay": 0.9},
    )  # fmt: skip
    run = train(signals, config)
    without = train(signals, config.replace(context="none"))
    assert run.record.context["mode"] == "offline"
    assert run.record.test["auroc"] > 0.9 > without.record.test["auroc"]
    assert run.predict_proba(signals).shape == (96, 2)
