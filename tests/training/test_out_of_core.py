"""A dataset of three times the memory that a process may use can be trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manydg.data.dataset import TargetSpec
from manydg.data.storage import DatasetWriter

LIMIT = 640 * 2**20
GROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
PROGRAM = """
import json, sys
import torch
from torch import nn
from manydg.data.storage import open_dataset
from manydg.training.memory import memory_of_machine
from manydg.training.run import train

class Light(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.out = nn.AvgPool1d(60), nn.Linear(400, 16)
    def forward(self, signal):
        return self.out(self.pool(signal).flatten(1))

torch.set_num_threads(1)
run = train(open_dataset(sys.argv[1]), epochs=1, batch_size=64, backbone=Light(), device="cpu")
print(json.dumps({"memory": memory_of_machine(), "record": run.record}))
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


@pytest.mark.slow
def test_data_of_three_times_the_memory_are_trained_on_by_windows(limited: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    each = 8 * 3000 * 4
    noise = rng.normal(size=(100, 8, 3000)).astype(np.float32)
    with DatasetWriter(tmp_path / "data", TargetSpec("classes", ("a", "b"))) as writer:
        for patient in range(3 * LIMIT // (each * 100) + 1):
            label = rng.integers(0, 2, 100)
            shift = (label + 0.001 * patient).astype(np.float32)
            signal = noise + shift[:, None, None]
            writer.append({"signal": signal}, label, [f"p{patient}"] * 100)
    assert (tmp_path / "data" / "inputs.signal.npy").stat().st_size >= 3 * LIMIT

    def join() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))

    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "data")]
    done = subprocess.run(program, capture_output=True, text=True, preexec_fn=join)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["memory"] == LIMIT
    assert told["record"]["history"][0]["order"].startswith("windows of about")
    assert told["record"]["test"]["accuracy"] > 0.9
