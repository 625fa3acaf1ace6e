"""How a training is executed: precision, CUDA graphs, compilation, several processes. Speed, never results.

The training loop knows :class:`Execution` and nothing else of this package.
"""

from __future__ import annotations

import gc
import getpass
import hashlib
import itertools
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from manydg.algorithms import Algorithm, Objective, Optimizers
from manydg.config import EXECUTIONS, TrainingConfig
from manydg.data.columns import take
from manydg.data.dataset import Batch, DomainDataset, InputSchema
from manydg.data.sampling import EpochPlan
from manydg.errors import ConfigError, ManyDGError, ManyDGWarning, TrainingError
from manydg.training.execution.memory import EpochOrder, keeping_freed_memory, reading_ahead
from manydg.training.execution.steps import (
    CapturedSteps,
    PlainSteps,
    Shapes,
    Steps,
    Terms,
    compiler_ahead,
    has_fixed_shapes,
    reason_against_compiling,
    source_for,
)
from manydg.training.inference import finite_probabilities, predict_logits

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
      everything after the backbone in float32. Validation and prediction are always in float32.
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
        fast = backbone.compiled_precision if execution == COMPILED else backbone.fast_precision
        precision = "float32" if execution == DETERMINISTIC else fast
    return Speed(precision, execution)


def expect_compiling(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset, device: torch.device) -> None:
    """Let a thread import torch's compiler where it may pay to compile, while inputs are fitted and data are placed."""
    may_pay = config.execution == AUTO and _gain(config, algorithm, train) > _SECONDS_FROM_CACHE
    if device.type == "cuda" and algorithm.static_step and (may_pay or config.execution == COMPILED):
        compiler_ahead()


def _gain(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset) -> float:
    """Seconds that compiled steps take less than captured ones, over all epochs."""
    return config.epochs * len(train) / config.batch_size * algorithm.backbone.compiled_gain


def _fastest(config: TrainingConfig, algorithm: Algorithm, train: DomainDataset, device: torch.device) -> str:
    """The fastest way for the whole run: captured where it can be, compiled too where that saves what it costs."""
    if not algorithm.static_step or not has_fixed_shapes(algorithm.backbone, train, device):
        return PLAIN
    gain = _gain(config, algorithm, train)
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


# Several processes train one model: ``torchrun --nproc-per-node N -m manydg train ...``


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SEEDS = 2**31


@dataclass(frozen=True)
class Team:
    """The processes that train one model together.

    - ``rank``: This process, from 0; process 0 alone writes files and reports progress.
    - ``device``: What the processes exchange tensors on: with gloo the CPU, with nccl this process's GPU.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def leader_does(self, action: Callable[[], None]) -> None:
        """Let process 0 do something while the others wait; if it cannot, all of them stop."""
        failure: ManyDGError | None = None
        if self.leads:
            try:
                action()
            except ManyDGError as error:
                failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self.device)
        dist.broadcast(failed, 0)
        if failure is not None:
            raise failure
        if bool(failed):
            raise TrainingError("process 0 had to stop: its message says why")

    def share_sizes(self, rows: int) -> list[int]:
        """How many of a number of rows each process takes, one more or less."""
        cuts = [rows * rank // self.size for rank in range(self.size + 1)]
        return [stop - start for start, stop in itertools.pairwise(cuts)]

    def share(self, rows: int) -> slice:
        """The rows of this process; those of all processes follow one another."""
        return slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all processes, in the order of the processes, without a gradient.

        - ``rows`` ``(sizes[rank], ...)``
        - ``sizes``: How many rows each process has.
        """
        # Collectives want equal shapes.
        padded = torch.zeros((max(sizes), *rows.shape[1:]), dtype=rows.dtype, device=self.device)
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows.device)


_current: Team | None = None


def current_team() -> Team | None:
    """The team this process is in; ``None`` where it works alone."""
    return _current


@contextmanager
def joined(device: str = "auto") -> Iterator[Team | None]:
    """Within it this process is in the team that its launcher (``torchrun``) started it for, if any."""
    global _current
    if any(name not in os.environ for name in _VARIABLES) or int(os.environ["WORLD_SIZE"]) < 2:
        yield None
        return
    if ":" in device:
        raise ConfigError(f"several processes have a GPU each: say --device cuda instead of {device}, or cpu")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if on_gpu and local >= torch.cuda.device_count():
        raise ConfigError(
            f"there are more processes than the {torch.cuda.device_count()} GPU(s) of this machine: "
            "start fewer with --nproc-per-node, or say --device cpu"
        )
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    own_device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    _current = Team(dist.get_rank(), dist.get_world_size(), own_device)
    try:
        yield _current
        # One that leaves while another still works takes the connections of both with it.
        dist.barrier()
    finally:
        _current = None
        # A reference cycle that holds the group would end its threads while the interpreter ends, which aborts.
        gc.collect()
        dist.destroy_process_group()


def by_leader(action: Callable[[], None]) -> None:
    """Do something that must be done once: in process 0 of a team, or here where there is none."""
    if _current is None:
        action()
    else:
        _current.leader_does(action)


def check_divisible(algorithm: type[Algorithm], *, sequential: bool = False) -> None:
    """Raise if an algorithm's steps cannot be shared between processes."""
    if sequential:
        raise ConfigError(
            "a sequence model cannot be trained by several processes, since each would see parts of sessions: start it "
            "without torchrun"
        )
    if algorithm.sampling == "whole":
        raise ConfigError(
            f"{algorithm.__name__} sees the training set once and as a whole, so that several processes cannot share "
            "it: start it without torchrun"
        )
    if algorithm.indivisible:
        raise _indivisible(algorithm, algorithm.indivisible)


def _indivisible(algorithm: type[Algorithm], reason: str) -> ConfigError:
    return ConfigError(
        f"{algorithm.__name__} cannot be trained by several processes: {reason}. Start it without torchrun"
    )


def shared_logits(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    """Logits of every sample ``(samples, K)``, of which each process of a team computes a share: those of one process.

    An algorithm that needs whole patients or sessions gets the whole dataset in every process.
    """
    if (team := _current) is None or algorithm.uses_patients or algorithm.backbone.crop or len(dataset) < team.size:
        return predict_logits(algorithm, dataset)
    with torch.inference_mode():
        own = torch.arange(len(dataset), device=dataset.device)[team.share(len(dataset))]
        return team.gather(predict_logits(algorithm, dataset.select(own)), team.share_sizes(len(dataset)))


def shared_probabilities(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    """What :func:`predict_probabilities` gives, from :func:`shared_logits`."""
    with torch.inference_mode():
        return finite_probabilities(algorithm.target, shared_logits(algorithm, dataset))


class DistributedSteps:
    """Steps of a team, each process with its share of the rows; to be entered before the first step."""

    def __init__(
        self, team: Team, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device
    ) -> None:
        self.team, self.algorithm, self.train, self.optimizers, self.device = team, algorithm, train, optimizers, device
        self._sizes: list[int] = []
        self._seed, self._evaluations = 0, 0
        self._outside: list[Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        backbone = self.algorithm.backbone
        self._stack.enter_context(synchronised(backbone, self.device))
        for buffer in self.algorithm.buffers():
            dist.broadcast(buffer, 0)
        with warnings.catch_warnings():
            # Its successor is not in all versions of torch that are supported.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            # Some weights have no gradient: a bias before a batch norm, or a term that a step does not have.
            self._objective = DistributedDataParallel(
                _Objective(self.algorithm), broadcast_buffers=False, find_unused_parameters=True
            )
        self._stack.enter_context(self.algorithm.evaluated_by(self._evaluate))
        for handle in (
            backbone.register_forward_pre_hook(self._draw_own_numbers),
            backbone.register_forward_hook(self._gather_features),
        ):
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        # Its hooks on the weights end with it.
        del self._objective

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        """For each step of a plan what does it; to be called in order."""
        seeds = torch.randint(_SEEDS, (len(plan),)).tolist()
        for seed, (indices, pairs) in zip(seeds, plan.to(self.train.device), strict=True):
            yield partial(self._step, indices, pairs, seed)

    def _step(self, indices: Tensor, pairs: int, seed: int) -> Terms:
        if len(indices) < self.team.size:
            raise ConfigError(
                f"a step of {len(indices)} samples cannot be shared by {self.team.size} processes: "
                "use fewer processes or a larger batch size"
            )
        self._sizes = self.team.share_sizes(len(indices))
        # Behind the backbone all processes do the same work, and must draw the same numbers.
        self._seed = seed
        torch.manual_seed(seed)
        own = indices[self.team.share(len(indices))]
        stored = own if self.train.rows is None else self.train.rows[own]
        inputs = {name: take(column, stored).to(self.device) for name, column in self.train.columns.items()}
        # Of the whole step, unlike the inputs: the features are gathered before anything meets a label.
        labels, patients = self.train.targets[indices].to(self.device), self.train.domains[indices].to(self.device)
        before = self._evaluations
        terms = self.algorithm.step(Batch(inputs, labels, patients, pairs), self.optimizers)
        if self._evaluations == before:
            raise _indivisible(type(self.algorithm), "its own step does not call evaluate(batch) for its objective")
        return Terms.of(terms)

    def _evaluate(self, batch: Batch) -> Objective:
        self._evaluations += 1
        return cast("Objective", self._objective(batch))

    def _draw_own_numbers(self, backbone: nn.Module, _: Any) -> None:
        if not backbone.training:
            return
        self._outside = [torch.get_rng_state()]
        if self.device.type == "cuda":
            self._outside.append(torch.cuda.get_rng_state(self.device))
        torch.manual_seed(self._seed + _SEEDS * (1 + self.team.rank))

    def _gather_features(self, backbone: nn.Module, _: Any, features: Tensor) -> Tensor | None:
        """Features of the whole step's rows in training, and of the rows given otherwise."""
        if not backbone.training:
            return None
        torch.set_rng_state(self._outside[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self._outside[1], self.device)
        return cast("Tensor", _Gather.apply(features.float(), self.team, self._sizes))  # type: ignore[no-untyped-call]


class _Objective(nn.Module):
    """An algorithm's objective as the forward of a module, which torch's wrapper calls."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm

    def forward(self, batch: Batch) -> Objective:
        return self.algorithm.objective(batch)


class _Gather(torch.autograd.Function):
    """Rows of all processes. Each process has the whole loss, so its own rows' gradient needs no exchange.

    Gradients of weights are averaged over the processes afterwards, of which each saw a share of the rows: times their
    number it is the gradient of one process with all rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, team: Team, sizes: list[int]) -> Tensor:
        ctx.start, ctx.stop, ctx.processes = sum(sizes[: team.rank]), sum(sizes[: team.rank + 1]), team.size
        return team.gather(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.start : ctx.stop] * ctx.processes, None, None


@contextmanager
def synchronised(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it a module's batch norms take their statistics from the rows of all processes."""
    norms = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    for name, norm in norms.items():
        if device.type == "cpu":
            module.set_submodule(name, SyncBatchNormOnCPU(norm))
        else:
            module.set_submodule(name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for name, norm in norms.items():
            norm.train(module.training)
            module.set_submodule(name, norm)


class SyncBatchNormOnCPU(_BatchNorm):
    """A synchronised batch norm for tensors on a CPU, which torch's own refuses.

    - ``norm``: Whose weights and running statistics it shares.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions."""

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return super().forward(values)
        exact, shape = values.float(), (1, -1, *[1] * (values.ndim - 2))
        positions = (0, *range(2, values.ndim))
        count = torch.full((1,), values.numel() / values.shape[1])
        sums = _sum_over_processes(torch.cat([exact.sum(dim=positions), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = exact - mean.reshape(shape)
        variance = _sum_over_processes(centred.square().sum(dim=positions)) / total
        self._track(mean.detach(), variance.detach() * total / (total - 1).clamp_min(1))
        normalised = centred * (variance + self.eps).rsqrt().reshape(shape)
        if self.affine:
            normalised = normalised * self.weight.reshape(shape) + self.bias.reshape(shape)
        return normalised.to(values.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SumOverProcesses(torch.autograd.Function):
    """A sum over processes, each of whose summands gets the gradients that all processes have of the total.

    As ``torch.distributed.nn.functional.all_reduce``, which torch has deprecated without a public successor.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _sum_over_processes(values: Tensor) -> Tensor:
    return cast("Tensor", _SumOverProcesses.apply(values))  # type: ignore[no-untyped-call]
