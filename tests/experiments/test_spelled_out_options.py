"""Studies spell every option out: a run of them is the run without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from manydg.data.build import from_arrays
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset
from manydg.experiments.options import spelled_out
from manydg.experiments.study import Study, grid
from manydg.training.config import TrainingConfig
from manydg.training.run import train


def eeg(channels: int, length: int) -> DomainDataset:
    signal = 30 * np.random.default_rng(0).normal(size=(30, channels, length)).astype(np.float32)
    return from_arrays({"signal": signal}, np.arange(30) % 2, np.arange(30) // 3)


def visits() -> DomainDataset:
    rng = np.random.default_rng(0)
    lengths = 1 + np.arange(30) % 3
    inputs = {
        name: Ragged.from_rows([[rng.integers(1, 6, 2).tolist()] * (length - less) for length in lengths])
        for name, less in (("diagnoses", 0), ("procedures", 0), ("history_drugs", 1))
    }
    drugs = [f"drug{code}" for code in range(6)]
    info = {"vocabularies": {"diagnoses": ["?"] * 6, "procedures": ["?"] * 6, "drugs": drugs}}
    given = rng.integers(0, 2, (30, 6))
    return from_arrays(inputs, given, np.arange(30) // 3, kind="multilabel", names=drugs, info=info)


@pytest.mark.parametrize("make", [partial(eeg, 2, 3000), partial(eeg, 16, 2000), visits])
def test_options_that_are_spelled_out_change_nothing(make: Callable[[], DomainDataset]) -> None:
    data, config = make(), TrainingConfig(epochs=1, batch_size=8)
    told = spelled_out(config, data)
    assert told.backbone_options
    first, second = (train(data, one, device="cpu") for one in (config, told))
    assert first.record["history"][0]["losses"] == second.record["history"][0]["losses"]
    assert first.record["test"] == second.record["test"]


def test_a_study_in_fresh_processes_takes_signals(tmp_path: Path) -> None:
    """A process that has imported nothing yet builds its network first of all."""
    folder = eeg(16, 2000).save(tmp_path / "data")
    runs = grid("compare", ["base", "manydg"], range(1), TrainingConfig(epochs=1, batch_size=8))
    records = Study(tmp_path / "results", folder, runs, "eeg", "cpu").execute(2)
    assert [record.get("error") for record in records] == [None, None]
    assert {record["config"]["backbone"] for record in records} == {"seizure-cnn"}
