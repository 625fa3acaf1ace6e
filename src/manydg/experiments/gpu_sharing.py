"""Worker processes that share a GPU at the same time, instead of by turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manydg.errors import ManyDGWarning

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_PATIENCE = 20.0


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Processes started within the block use the GPU side by side.

    A training of one model leaves most of a large GPU idle, and processes on their own get it in turns. NVIDIA's
    Multi-Process Service, which comes with the driver, lets their work run at the same time; every process computes
    what it would alone. One is started for the block, unless there is one already; where it is not installed, the
    processes take turns, with a warning.
    """
    if os.environ.get(PIPES) or (_DEFAULT_PIPES / "control").exists():
        yield
        return
    control = shutil.which(CONTROL)
    if control is None:
        _warn(f"{CONTROL} is not installed")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="manydg-mps-", ignore_cleanup_errors=True) as folder:
        before = {name: os.environ.get(name) for name in (PIPES, LOGS)}
        os.environ[PIPES] = os.environ[LOGS] = folder
        started = _tell(control, "-d")
        if not started:
            _restore(before)
        try:
            yield
        finally:
            if started:
                _tell(control, words="quit\n")
                _restore(before)


def _tell(control: str, *arguments: str, words: str = "") -> bool:
    """Whether the service's control program did as it was told."""
    # To a file, because a service that goes on in the background would keep a pipe open for ever.
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                [control, *arguments], input=words, text=True, stdout=said, stderr=said, timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _warn(str(error))
            return False
        if done.returncode:
            said.seek(0)
            _warn(said.read().strip() or f"{CONTROL} ended with {done.returncode}")
        return done.returncode == 0


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _warn(reason: str) -> None:
    message = f"runs take turns on the GPU, because NVIDIA's Multi-Process Service is not to be had: {reason}"
    warnings.warn(message, ManyDGWarning, stacklevel=4)
