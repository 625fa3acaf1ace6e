"""Compiling the objective and the optimiser's update for steps that are captured."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from manydg.errors import in_a_line

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
