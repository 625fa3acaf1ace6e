"""A dataset of three times the memory that a process may use can be trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.data.info import TargetSpec
from manydg.data.storage import DatasetWriter

LIMIT = 640 * 2**20
GROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
PROGRAM = """
import json, sys
import torch
from torch import nn
from manydg.data.dataset import open_dataset
from manydg.training.execution.memory import memory_of_machine
from manydg.training.run import train

class Light(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.out = nn.AvgPool1d(60), nn.Linear(400, 16)
    def forward(self, signal):
        return self.out(self.pool(signal).flatten(1))

torch.set_num_threads(1)
run = train(open_dataset(sys.argv[1]), epochs=1, batch_size=64, backbone=Light(), device="cpu")
print(json.dumps({"memory": memory_of_machine(), "record": run.record.to_json()}))
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group whose limit counts mapped files too, unlike limits of the heap or of addresses."""
    for root, file in GROUPS:
        place = root / f"manydg-test-{os.getpid()}"
        try:
            if not (root / "cgroup.procs").exists():
                continue
            place.mkdir()
            (place / file).write_text(str(LIMIT))
        except OSError:
            if place.is_dir():
                place.rmdir()
            continue
        yield place
        place.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here (it takes root)")


def train_within(limited: Path, program: str, folder: Path) -> dict[str, Any]:
    """What a program that trains says, run under the limit."""

    def join() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, preexec_fn=join)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["memory"] == LIMIT
    assert told["record"]["history"][0]["order"].startswith("windows of about")
    return told["record"]


def write_noise(folder: Path, column: str, shape: tuple[int, ...]) -> None:
    """Three times the limit, a hundred rows a patient: noise that is shifted by the label."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(100, *shape)).astype(np.float32)
    with DatasetWriter(folder, TargetSpec("classes", ("a", "b"))) as writer:
        for patient in range(3 * LIMIT // noise.nbytes + 1):
            label = rng.integers(0, 2, 100)
            shift = (label + 0.001 * patient).astype(np.float32)
            writer.append({column: noise + shift.reshape(-1, *[1] * len(shape))}, label, [f"p{patient}"] * 100)
    assert (folder / f"inputs.{column}.npy").stat().st_size >= 3 * LIMIT


@pytest.mark.slow
def test_data_of_three_times_the_memory_are_trained_on_by_windows(limited: Path, tmp_path: Path) -> None:
    write_noise(tmp_path / "data", "signal", (8, 3000))
    record = train_within(limited, PROGRAM, tmp_path / "data")
    assert record["test"]["accuracy"] > 0.9


TABLES = """
import json, sys
import torch
from manydg.data.dataset import open_dataset
from manydg.config import TrainingConfig
from manydg.training.execution.memory import memory_of_machine
from manydg.training.run import train

torch.set_num_threads(1)
options = {"hidden": 8, "layers": 1, "width": 8, **({} if NAME == "mlp" else {"bins": 2, "embedding": 1})}
config = TrainingConfig(epochs=1, batch_size=64, backbone=NAME, backbone_options=options)
run = train(open_dataset(sys.argv[1]), config, device="cpu")
print(json.dumps({"memory": memory_of_machine(), "record": run.record.to_json()}))
"""


@pytest.mark.slow
def test_tables_of_three_times_the_memory_are_scaled_and_binned_in_pieces(limited: Path, tmp_path: Path) -> None:
    write_noise(tmp_path / "data", "x", (6000,))
    for name in ("mlp", "tabular"):
        record = train_within(limited, TABLES.replace("NAME", repr(name)), tmp_path / "data")
        assert record["test"]["accuracy"] > 0.9
