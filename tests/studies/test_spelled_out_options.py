"""Studies spell every option out: a run of them is the run without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.studies.settings import spelled_out
from manydg.studies.study import Study, grid
from manydg.training.run import train


def eeg(channels: int, length: int) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).normal(size=(30, channels, length)).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(30) % 2, np.arange(30) // 3)


@pytest.mark.parametrize("channels", [2, 16, None])
def test_options_that_are_spelled_out_change_nothing(
    channels: int | None, visits_of: Callable[..., DomainDataset]
) -> None:
    data = eeg(channels, 3000 if channels == 2 else 2000) if channels else visits_of(30, 3, 3)
    config = TrainingConfig(epochs=1, batch_size=8)
    told = spelled_out(config, data)
    assert told.backbone_options
    first, second = (train(data, one, device="cpu") for one in (config, told))
    assert first.record.history[0].losses == second.record.history[0].losses
    assert first.record.test == second.record.test


@pytest.mark.slow
def test_a_study_in_fresh_processes_takes_signals(tmp_path: Path) -> None:
    """A process that has imported nothing yet builds its network first of all."""
    folder = eeg(16, 2000).save(tmp_path / "data")
    runs = grid("compare", ["base", "manydg"], range(1), TrainingConfig(epochs=1, batch_size=8))
    records = Study(tmp_path / "results", folder, runs, "eeg", "cpu").execute(2)
    assert [record.error for record in records] == [None, None]
    assert {record.config.backbone for record in records} == {"seizure-cnn"}
