"""Memory that a training step frees is kept for the next one, and given back after the training."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource
import torch
import manydg.training.fit
from manydg.training.execution.memory import keeping_freed_memory

def share_of_pages_anew(size=48 * 2**20, times=20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        block = torch.ones(size // 4)
        del block
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / (size * times)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

found = {"usually": share_of_pages_anew(), "resident before": resident()}
with keeping_freed_memory():
    found["within"] = share_of_pages_anew()
found["resident after"] = resident()
try:
    with keeping_freed_memory():
        share_of_pages_anew()
        raise ValueError
except ValueError:
    found["resident after an error"] = resident()
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)
def test_a_freed_block_is_used_again_within_and_given_back_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["usually"] > 0.9
    assert found["within"] < 0.3
    for moment in ("resident after", "resident after an error"):
        assert found[moment] < found["resident before"] + 16 * 2**20
