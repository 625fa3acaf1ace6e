"""Capturing GPU work in a graph, beside threads that go on sending data, and without harm where it fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from manydg.errors import in_a_line


@contextmanager
def capture_into(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched within is put into a graph instead; after an error, torch is as it was before."""
    outside = torch.cuda.current_stream()
    try:
        # Other threads may take pinned memory and send batches meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        _leave_failed_capture(pool, outside)
        raise


def why_not_captured(error: BaseException) -> str:
    """What went wrong first and where; torch follows it with errors of its own."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(torch.__file__).parent not in Path(frame.filename).parents]
    place = f" ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
    return in_a_line(error) + place


def _leave_failed_capture(pool: Any, outside: torch.cuda.Stream) -> None:
    """Torch stops short where a capture ends in an error: its stream, random numbers and memory would stay in it."""
    torch.cuda.set_stream(outside)
    generator = torch.cuda.default_generators[outside.device_index]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # Where torch did get that far.
        torch._C._cuda_endAllocateToPool(outside.device_index, pool)
