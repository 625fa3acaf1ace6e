"""Training on data of three times the memory: by windows of neighbours on disk, and in an order of all samples.

    python -m benchmarks out_of_core

Each training is a process of its own in a control group (version 1 or 2) whose limit counts the pages of files that
it has in memory too, which limits of the address space or of the heap do not: under those, a memory map would quietly
live in the page cache of the whole machine. The disk's cache of the dataset is dropped before each. Where no control
group can be made (that takes root), the ratio cannot be measured and nothing is printed but that. The training is
ManyDG with the sleep network on 2 x 3000 signals, whose spectrograms do not fit either, so that steps work them out.
A round is three windows long, so that reading ahead keeps pace or does not; its first steps, which wait for the first
window and warm up, are not counted. The fully shuffled order, which has no steady state to reach, gets a sixth.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT = int(os.environ.get("MANYDG_BENCH_LIMIT_MB", "768")) * 2**20
ROWS = {"memory": 12_800, "windows": 12_800, "shuffled": 2_048}
ROUNDS = 2
ORDERS = ("memory", "windows", "shuffled")
SAMPLES, CHANNELS, PATIENT = 3000, 2, 100
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

MEASURE = """
import itertools, json, resource, sys, time
folder, order, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
import torch
from manydg.algorithms import ALGORITHMS
from manydg.backbones import build_backbone
from manydg.training.execution.memory import plan_in_blocks
from manydg.data.sampling import plan_epoch
from manydg.data.dataset import InputSchema
from manydg.data.dataset import open_dataset
from manydg.targets import target_of
from manydg.training.execution.steps import ResidentSource
from manydg.training.execution.memory import keeping_freed_memory, memory_of_machine
from manydg.training.execution.memory import reading_ahead, rows_of_window
from manydg.training.execution.steps import PlainSteps

BATCH, UNCOUNTED = 64, 8
torch.manual_seed(0)
torch.set_num_threads(1)
data = open_dataset(folder, verify="sizes")
backbone = build_backbone("sleep-cnn", InputSchema.of(data))
algorithm = ALGORITHMS.get("manydg")(backbone, target_of(data.target), data.n_patients)
if order == "memory":
    data = data.select(torch.arange(min(len(data), rows + 2000)))
    data = data.compact()
steps = PlainSteps(algorithm, ResidentSource(data), algorithm.optimizers(1e-3, 0.0))
window = rows_of_window(data)
if order == "windows":
    blocks = plan_in_blocks("pairs", data, BATCH, 0, 1, window)
    todo = reading_ahead(data, blocks, steps.run(blocks.plan))
else:
    todo = steps.run(plan_epoch("pairs", data.domains, BATCH, 0, 1))
number = rows // BATCH
with keeping_freed_memory():
    for step in itertools.islice(todo, UNCOUNTED):
        step()
    start, processor = time.perf_counter(), time.process_time()
    for step in itertools.islice(todo, number):
        step()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
print(json.dumps({
    "speed": number * BATCH / seconds, "by processor": number * BATCH / processor,
    "window": window, "memory": memory_of_machine(),
    "faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
}))
"""


def main(out: Path) -> dict[str, Any]:
    """Samples per second in memory, by windows and shuffled, and what share of the first the others reach."""
    group = ControlGroup.make()
    if group is None:
        return {"out of core": "not measured: no control group with a memory limit can be made here (it takes root)"}
    folder = out / "out-of-core"
    try:
        size = write(folder / "data", 3 * LIMIT)
        # The best of several rounds, taken in turns: other work on the machine hits all of them alike.
        rounds = [{order: measure(folder / "data", order, group) for order in ORDERS} for _ in range(ROUNDS)]
        found = {order: max((each[order] for each in rounds), key=lambda entry: entry["speed"]) for order in ORDERS}
    finally:
        group.remove()
        shutil.rmtree(folder, ignore_errors=True)
    speeds = {order: entry["speed"] for order, entry in found.items()}
    return {
        "limit of memory, MB": LIMIT / 2**20,
        "dataset, MB": size / 2**20,
        "rows of a window": found["windows"]["window"],
        "samples/s in memory": speeds["memory"],
        "samples/s by windows": speeds["windows"],
        "samples/s shuffled": speeds["shuffled"],
        "by windows / in memory": speeds["windows"] / speeds["memory"],
        "shuffled / in memory": speeds["shuffled"] / speeds["memory"],
        "samples per processor second in memory": found["memory"]["by processor"],
        "samples per processor second by windows": found["windows"]["by processor"],
        "by windows / in memory, by processor time": found["windows"]["by processor"] / found["memory"]["by processor"],
        "page faults that read the disk, by windows": found["windows"]["faults"],
        "page faults that read the disk, shuffled": found["shuffled"]["faults"],
    }


class ControlGroup:
    """A control group with the limit of memory; processes are put into it before they begin."""

    def __init__(self, place: Path, limit_file: str) -> None:
        self.place = place
        place.mkdir()
        try:
            (place / limit_file).write_text(str(LIMIT))
        except OSError:
            place.rmdir()
            raise

    @staticmethod
    def make() -> ControlGroup | None:
        for root, file in ((V1, "memory.limit_in_bytes"), (V2, "memory.max")):
            if not (root / "cgroup.procs").exists():
                continue
            try:
                return ControlGroup(root / f"manydg-bench-{os.getpid()}", file)
            except OSError:
                continue
        return None

    def join(self) -> None:
        (self.place / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        self.place.rmdir()


def write(folder: Path, size: int) -> int:
    """A dataset of about so many bytes: noise with a rhythm, patient after patient."""
    import numpy as np

    from manydg.data.info import TargetSpec
    from manydg.data.storage import DatasetWriter

    rng, each = np.random.default_rng(0), 4 * CHANNELS * SAMPLES
    noise = (20 * rng.normal(size=(PATIENT, CHANNELS, SAMPLES))).astype(np.float32)
    with DatasetWriter(folder, TargetSpec("classes", ("a", "b")), {"settings": {"rate": 100.0}}) as writer:
        for patient in range(-(-size // (each * PATIENT))):
            label = rng.integers(0, 2, PATIENT)
            signal = noise * (1 + 0.2 * label[:, None, None]).astype(np.float32)
            writer.append({"signal": signal}, label, [f"p{patient}"] * PATIENT)
    return (folder / "inputs.signal.npy").stat().st_size


def measure(folder: Path, order: str, group: ControlGroup) -> dict[str, Any]:
    """Train in a process of its own; the one whose data are in memory has no limit."""
    for file in folder.glob("*.npy"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), order, str(ROWS[order])],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=None if order == "memory" else group.join,
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
