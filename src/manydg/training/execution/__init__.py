"""How a training is executed: precision, CUDA graphs, compilation, several processes. Speed, never results.

The training loop knows :class:`Execution` and nothing else of this package.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manydg.algorithms import Algorithm, Optimizers
from manydg.backbones import Backbone
from manydg.config import EXECUTIONS, TrainingConfig
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError, ManyDGWarning
from manydg.machine import keeping_freed_memory
from manydg.training.execution.batches import Shapes, has_fixed_shapes, source_for
from manydg.training.execution.distributed import DistributedSteps, current_team
from manydg.training.execution.memory import EpochOrder, reading_ahead
from manydg.training.execution.steps import CapturedSteps, PlainSteps, Steps, Terms, reason_against_compiling

AUTO, PLAIN, CAPTURED, COMPILED, DETERMINISTIC = EXECUTIONS
_SECONDS_TO_COMPILE = 34.0
"""What compiling adds to the first epoch on an H200 machine: 28 s (sleep) to 38 s (seizure)."""
_SECONDS_FROM_CACHE = 6.0
"""The same where an earlier run of the same shapes has filled the compiler's cache on disk."""


@dataclass(frozen=True)
class Speed:
    """What a run's precision and execution came down to; part of its record.

    - ``precision`` {"float32", "tf32", "bf16"}: Arithmetic of the training steps: full; matrix products and
      convolutions with inputs of 10 bits; or the backbone in bfloat16 where that is safe, with weights, losses and
      everything behind the backbone in float32. Validation and prediction are always in float32.
    - ``execution`` {"plain", "captured", "compiled", "deterministic"}: Steps as written; replayed from captured graphs;
      compiled and captured; or as written with deterministic kernels alone.
    """

    precision: str
    execution: str

    @property
    def captures(self) -> bool:
        return self.execution in (CAPTURED, COMPILED)


AS_WRITTEN = Speed("float32", PLAIN)


class Execution:
    """A training's steps, executed as its configuration and device have it.

    This is all that the training loop knows of speed.

    - ``algorithm``: On the device to train on.
    - ``train``: The training patients' samples, as they are placed for training.
    """

    def __init__(
        self,
        config: TrainingConfig,
        algorithm: Algorithm,
        train: DomainDataset,
        optimizers: Optimizers,
        device: torch.device,
    ) -> None:
        self.speed = choose_speed(config, algorithm, train, device)
        if current_team() is not None and self.speed.captures:
            # Exchanges between processes are not part of a captured step.
            self.speed = replace(self.speed, execution=PLAIN)
        self._algorithm, self._train, self._optimizers, self._device = algorithm, train, optimizers, device
        self._batch_size = config.batch_size
        self._steps: Steps | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, steps may be done; optimisers have their state (of a checkpoint, say) before it begins."""
        with ExitStack() as stack:
            if self._device.type == "cpu":
                stack.enter_context(keeping_freed_memory())
            team = current_team()
            if team is None:
                self._steps = steps_for(self._algorithm, self._train, self._optimizers, self._device, self.speed)
            else:
                shared = DistributedSteps(team, self._algorithm, self._train, self._optimizers, self._device)
                self._steps = stack.enter_context(shared)
            try:
                yield
            finally:
                self._steps = None
        if self.speed.execution == COMPILED:
            marker = compiled_before(self._algorithm, self._train, self._batch_size)
            with suppress(OSError):  # Only a note for the next run.
                marker.touch()

    def steps(self, order: EpochOrder) -> Iterator[Callable[[], Terms]]:
        """For each step of an epoch what does it; to be called in order, within :meth:`in_precision`."""
        assert self._steps is not None, "steps are done while the execution is running"
        steps = self._steps.run(order.plan)
        return steps if order.windows is None else reading_ahead(self._train, order.windows, steps)

    def in_precision(self) -> AbstractContextManager[None]:
        """Steps within have the chosen precision and kernels; validation and prediction are done outside of it."""
        return at_speed(self.speed, self._algorithm, self._device)


def steps_for(
    algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device, speed: Speed
) -> Steps:
    """The steps of one process at a speed, from wherever the data are."""
    if device.type == "cuda" and speed.captures:
        shapes = Shapes(train)
        source = source_for(train, device, shapes)
        return CapturedSteps(algorithm, source, shapes, optimizers, compile=speed.execution == COMPILED)
    return PlainSteps(algorithm, source_for(train, device), optimizers)


def choose_speed(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset, device: torch.device) -> Speed:
    """What ``auto`` comes down to, on this device and for this algorithm and backbone.

    - ``train``: The training patients' samples, as they are placed for training.
    """
    precision, execution, backbone = config.precision, config.execution, algorithm.backbone
    if device.type != "cuda":
        if execution in (CAPTURED, COMPILED) or precision == "tf32":
            raise ConfigError(f"{execution} steps in {precision} need a GPU: leave precision and execution at auto")
        return Speed("float32" if precision == AUTO else precision, PLAIN if execution == AUTO else execution)
    if execution == AUTO:
        execution = _fastest(config, algorithm, train, device)
    if execution in (CAPTURED, COMPILED):
        if not algorithm.static_step:
            raise ConfigError(f"steps of {type(algorithm).__name__} cannot be captured: say execution plain or auto")
        if not has_fixed_shapes(backbone, train, device):
            raise ConfigError("steps on rows of any length cannot be captured here: say execution plain or auto")
    if execution == COMPILED and (reason := reason_against_compiling(device)):
        if config.execution == COMPILED:
            raise ConfigError(f"nothing can be compiled for this GPU: say execution captured or auto ({reason})")
        warnings.warn(f"steps are captured, not compiled, since that fails here: {reason}", ManyDGWarning, stacklevel=2)
        execution = CAPTURED
    if precision == AUTO:
        precision = _best_precision(backbone, execution)
    return Speed(precision, execution)


def _fastest(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset, device: torch.device) -> str:
    """The fastest way for the whole run: captured where it can be, compiled too where that saves what it costs."""
    if not algorithm.static_step or not has_fixed_shapes(algorithm.backbone, train, device):
        return PLAIN
    gain = config.epochs * len(train) / config.batch_size * algorithm.backbone.compiled_gain
    if gain > _SECONDS_TO_COMPILE:
        return COMPILED
    cached = gain > _SECONDS_FROM_CACHE and compiled_before(algorithm, train, config.batch_size).exists()
    return COMPILED if cached else CAPTURED


def compiled_before(algorithm: Algorithm, train: DomainDataset, batch_size: int) -> Path:
    """A file that exists if the compiler's cache has the kernels of these steps; it goes with the cache."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    steps = (torch.__version__, gpu, batch_size, InputSchema.of(train).columns, algorithm.settings, str(algorithm))
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    return Path(cache) / f"manydg-{hashlib.sha256(repr(steps).encode()).hexdigest()[:16]}"


def _user() -> str:
    """The user's name as torch writes it; a container may have none."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError, ImportError):
        return "unknown"


def _best_precision(backbone: Backbone, execution: str) -> str:
    if execution == DETERMINISTIC:
        return "float32"
    return backbone.compiled_precision if execution == COMPILED else backbone.fast_precision


@contextmanager
def at_speed(speed: Speed, algorithm: Algorithm, device: torch.device) -> Iterator[None]:
    """Training steps within have the given precision and kernels; what was set before is set again afterwards."""
    dtype = torch.bfloat16 if speed.precision == "bf16" else None
    kernels = _gpu_kernels(speed) if device.type == "cuda" else nullcontext()
    deterministic = _deterministic() if speed.execution == DETERMINISTIC else nullcontext()
    with algorithm.backbone.executed(dtype=dtype), kernels, deterministic:
        yield


@contextmanager
def _gpu_kernels(speed: Speed) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark)
    cudnn.allow_tf32 = matmul.allow_tf32 = speed.precision != "float32"
    # Captured steps have few shapes: it pays to try every convolution kernel on each.
    cudnn.benchmark = speed.captures
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


@contextmanager
def _deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
