"""How fast a training goes about its arithmetic: precision, captured graphs, compilation, or bit by bit the same."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.backbones import Backbone
from manydg.config import EXECUTIONS, TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, ManyDGWarning, in_a_line
from manydg.training.execution.batches import has_fixed_shapes

# Compiling the objective and the optimiser's update for steps that are captured.


_SHAPES = 1024
"""More than any training has."""


@functools.cache
def reason_against_compiling(device: torch.device) -> str | None:
    """Why nothing can be compiled for a GPU (there is no C compiler, say); ``None`` where it can be."""
    try:
        compiled(lambda values: values.square().sum())(torch.ones(8, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in many ways, and there is another way to go
        return in_a_line(error)
    return None


def forget_compiled() -> None:
    """Forget what other trainings of this process compiled: torch keeps it and looks through it at every call."""
    torch.compiler.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled for batches of fixed shape, with small kernels that do not wait for each other joined.

    It may meet any number of shapes: torch by itself compiles for eight, then runs the function as written, and only a
    log says so.
    """
    # What the compiler leaves out of its graphs (a profiler's marks, say) is of no use to anyone who trains.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    fast = torch.compile(function, dynamic=False, options={"combo_kernels": True})

    def call(*arguments: Any, **options: Any) -> Any:
        # Takes a second or two to import.
        from torch._dynamo import config

        with config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=16 * _SHAPES):
            return fast(*arguments, **options)

    return call


def not_compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that a compiler steps over: what calls it is compiled before and behind it."""
    return cast("Callable[..., Tensor]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def compile_update(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser that can be captured update all weights in one compiled kernel, on whatever values come."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"], group["foreach"] = False, True
    optimizer.step = compiled(partial(type(optimizer).step, optimizer))  # type: ignore[method-assign]


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser count its steps on the device, also one whose state was counted on the host so far."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)


AUTO, PLAIN, CAPTURED, COMPILED, DETERMINISTIC = EXECUTIONS
_STEPS_WORTH_COMPILING = 10_000


@dataclass(frozen=True)
class Speed:
    """What a run's precision and execution came down to; part of its record.

    Parameters
    ----------
    precision : {"float32", "tf32", "bf16"}
        Arithmetic of the training steps: full; matrix products and convolutions with inputs of 10 bits; or the backbone
        in bfloat16 where that is safe, with weights, losses and everything behind the backbone in float32. Validation
        and prediction are always in float32.
    execution : {"plain", "captured", "compiled", "deterministic"}
        Steps as written; replayed from captured graphs; compiled and captured; or as written with deterministic
        kernels alone.
    """

    precision: str
    execution: str

    @property
    def captures(self) -> bool:
        return self.execution in (CAPTURED, COMPILED)


AS_WRITTEN = Speed("float32", PLAIN)


def settle_speed(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset, device: torch.device) -> Speed:
    """What ``auto`` comes down to, on this device and for this algorithm and backbone.

    Parameters
    ----------
    train : DomainDataset
        The training patients' samples, as they are placed for training.
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
    """The fastest way on a GPU: captured where it can be, and compiled too where that pays."""
    if not algorithm.static_step or not has_fixed_shapes(algorithm.backbone, train, device):
        return PLAIN
    long = config.epochs * len(train) >= _STEPS_WORTH_COMPILING * config.batch_size
    return COMPILED if algorithm.backbone.compiles and long else CAPTURED


def _best_precision(backbone: Backbone, execution: str) -> str:
    if execution == DETERMINISTIC:
        return "float32"
    return backbone.compiled_precision if execution == COMPILED else backbone.fast_precision


@contextmanager
def at_speed(speed: Speed, algorithm: Algorithm, device: torch.device) -> Iterator[None]:
    """Training steps within have the given precision and kernels; what was set before is set again afterwards."""
    backbone = algorithm.backbone
    before = backbone.mixed
    if speed.precision == "bf16":
        backbone.mixed = torch.bfloat16
    try:
        if device.type == "cuda":
            with _gpu_kernels(speed):
                yield
        elif speed.execution == DETERMINISTIC:
            with _deterministic():
                yield
        else:
            yield
    finally:
        backbone.mixed = before


@contextmanager
def _gpu_kernels(speed: Speed) -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark)
    cudnn.allow_tf32 = matmul.allow_tf32 = speed.precision != "float32"
    # Captured steps have few shapes: it pays to try every convolution kernel on each.
    cudnn.benchmark = speed.captures
    try:
        if speed.execution == DETERMINISTIC:
            with _deterministic():
                yield
        else:
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
