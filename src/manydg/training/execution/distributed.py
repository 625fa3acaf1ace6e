"""Several processes train one model: ``torchrun --nproc-per-node N -m manydg train ...``.

Every process runs the backbone on its share of a step's rows. The features of all rows are then gathered, so that each
process works out the losses of the whole step, however they tie rows together (means of a batch, partners, patients).
A process's gradient reaches the backbone through its own rows alone; the sum over processes is the gradient of one
process with all rows, whatever the sizes of the shares. Batch normalisation takes its statistics from all rows, on
CPUs and GPUs alike. So the number of processes changes results only by rounding, and by which random numbers dropout
draws: each process draws its own for its rows, and the same as all others behind the backbone.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from manydg.algorithms import Algorithm, Optimizers
from manydg.data.columns import take
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.sampling import EpochPlan
from manydg.errors import ConfigError, ManyDGError, TrainingError
from manydg.training.execution.steps import Terms

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Team:
    """The processes that train one model together.

    Parameters
    ----------
    rank : int
        This process, from 0; process 0 alone writes and speaks.
    size : int
    device : torch.device
        What the processes exchange tensors on: with gloo the CPU, with nccl this process's GPU.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def leader_does(self, action: Callable[[], None]) -> None:
        """Let process 0 do something while the others wait; what it cannot do stops all of them."""
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

    def gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all processes, in the order of the processes, without a gradient.

        Parameters
        ----------
        rows : Tensor ``(sizes[rank], ...)``
        sizes : list of int
            How many rows each process has.
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
    place = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    _current = Team(dist.get_rank(), dist.get_world_size(), place)
    try:
        yield _current
        # One that leaves while another still works takes the connections of both with it.
        dist.barrier()
    finally:
        _current = None
        dist.destroy_process_group()


def by_leader(action: Callable[[], None]) -> None:
    """Do something that must be done once: in process 0 of a team, or here where there is none."""
    if _current is None:
        action()
    else:
        _current.leader_does(action)


def part_ways(algorithm: Algorithm) -> None:
    """The last shared step is done: give an algorithm's backbone the forward of its class again."""
    for module in algorithm.backbone.modules():
        module.__dict__.pop("forward", None)


def processes_here() -> int:
    """How many processes of the team share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _current is not None else 1


def check_divisible(algorithm: type[Algorithm]) -> None:
    """Raise if an algorithm's steps cannot be shared between processes."""
    if algorithm.sampling == "whole":
        raise ConfigError(
            f"{algorithm.__name__} sees the training set once and as a whole, so that several processes cannot share "
            "it: start it without torchrun"
        )
    if algorithm.indivisible:
        raise ConfigError(
            f"{algorithm.__name__} cannot be trained by several processes: {algorithm.indivisible}. "
            "Start it without torchrun"
        )


def predict_together(
    team: Team, predict: Callable[[Algorithm, DomainDataset], Tensor], algorithm: Algorithm, dataset: DomainDataset
) -> Tensor:
    """Logits of every sample ``(samples, K)``, of which each process works out a share: the same as of one process.

    An algorithm that needs whole patients gets the whole dataset in every process.
    """
    if algorithm.uses_patients or len(dataset) < team.size:
        return predict(algorithm, dataset)
    cuts = [len(dataset) * rank // team.size for rank in range(team.size + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    own = torch.arange(cuts[team.rank], cuts[team.rank + 1], device=dataset.device)
    return team.gather(predict(algorithm, dataset.select(own)), sizes)


# Steps that several processes share: each runs the backbone on its rows, and all see the whole step's losses.


_SEEDS = 2**31


def shares(rows: int, pairs: int, size: int) -> list[Tensor]:
    """The positions of a step's rows that each process takes; partners are never parted.

    Parameters
    ----------
    rows, pairs : int
        Of the step: its first ``pairs`` rows, their partners in the same order, and rows that stand alone.
    size : int
        Number of processes.

    Examples
    --------
    >>> [share.tolist() for share in shares(rows=8, pairs=3, size=2)]
    [[0, 3, 6, 7], [1, 2, 4, 5]]
    """
    if pairs + (rows - 2 * pairs) < size:
        raise ConfigError(
            f"a step of {rows} samples ({pairs} pairs) cannot be shared by {size} processes: "
            "use fewer processes or a larger batch size"
        )
    cuts = [pairs * rank // size for rank in range(size + 1)]
    alone = _fill_up([2 * (stop - start) for start, stop in itertools.pairwise(cuts)], rows - 2 * pairs)
    found, lone = [], 2 * pairs
    for rank in range(size):
        first = torch.arange(cuts[rank], cuts[rank + 1])
        found.append(torch.cat([first, first + pairs, torch.arange(lone, lone + alone[rank])]))
        lone += alone[rank]
    return found


def _fill_up(taken: list[int], more: int) -> list[int]:
    """How many of the rows that stand alone each process takes, so that all have as equal shares as can be."""
    alone = [0] * len(taken)
    for _ in range(more):
        least = min(range(len(taken)), key=lambda rank: taken[rank] + alone[rank])
        alone[least] += 1
    return alone


class SharedSteps:
    """Steps of a team, each process with its share of the rows.

    Parameters
    ----------
    team : Team
    algorithm : Algorithm
        Its backbone's forward is extended to gather the features of all processes in training mode, its layers of
        batch normalisation to use the statistics of all rows, and its optimisers to sum gradients before they step.
    train : DomainDataset
    optimizers : dict of str to Optimizer
    device : torch.device
    """

    def __init__(
        self, team: Team, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device
    ) -> None:
        self.team, self.algorithm, self.train, self.optimizers, self.device = team, algorithm, train, optimizers, device
        self._sizes: list[int] = []
        self._places = torch.zeros(0, dtype=torch.int64)
        self._seed = 0
        backbone = algorithm.backbone
        self._forward = backbone.forward
        backbone.forward = self._gathered  # type: ignore[method-assign]
        for layer in backbone.modules():
            if isinstance(layer, _BatchNorm):
                layer.forward = partial(_normalise, team, layer, layer.forward)  # type: ignore[method-assign]
        own = {id(parameter) for parameter in backbone.parameters()}
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(partial(_sum_gradients, team, own))
        for tensor in algorithm.state_dict().values():
            _from_leader(team, tensor)

    def run(self, plan: EpochPlan) -> Iterator[Callable[[], Terms]]:
        """What does each step of a plan; to be called in order."""
        seeds = torch.randint(_SEEDS, (len(plan),)).tolist()
        for seed, (indices, pairs) in zip(seeds, plan.to(self.train.device), strict=True):
            yield partial(self._step, indices, pairs, seed)

    def _step(self, indices: Tensor, pairs: int, seed: int) -> Terms:
        parts = shares(len(indices), pairs, self.team.size)
        self._sizes = [len(part) for part in parts]
        self._places = torch.argsort(torch.cat(parts)).to(self.device)
        # Behind the backbone all processes do the same work, and must draw the same numbers.
        self._seed = seed
        torch.manual_seed(seed)
        own = indices[parts[self.team.rank].to(indices.device)]
        stored = own if self.train.rows is None else self.train.rows[own]
        inputs = {name: take(column, stored).to(self.device) for name, column in self.train.columns.items()}
        # Of the whole step, unlike the inputs: the features are gathered before anything meets a label.
        labels, patients = self.train.targets[indices].to(self.device), self.train.domains[indices].to(self.device)
        whole = Batch(inputs, labels, patients, pairs)
        return Terms.of(self.algorithm.step(whole, self.optimizers))

    def _gathered(self, inputs: Any) -> Tensor:
        """Features of the whole step's rows in training, and of the rows given otherwise."""
        if not self.algorithm.backbone.training:
            return self._forward(inputs)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(self._seed + _SEEDS * (1 + self.team.rank))
            features = self._forward(inputs)
        gathered = cast("Tensor", _Gather.apply(features, self.team, self._sizes))  # type: ignore[no-untyped-call]
        return gathered[self._places]


class _Gather(torch.autograd.Function):
    """Rows of all processes. Each process has the whole loss, so its own rows' gradient is there already."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, team: Team, sizes: list[int]) -> Tensor:
        ctx.start, ctx.stop = sum(sizes[: team.rank]), sum(sizes[: team.rank + 1])
        return team.gather(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.start : ctx.stop].contiguous(), None, None


def _normalise(team: Team, layer: _BatchNorm, alone: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Batch normalisation with the statistics of all processes' rows, and gradients through them."""
    if not layer.training and layer.track_running_stats:
        return alone(values)
    exact = values.float()
    positions = (0, *range(2, values.ndim))
    count = values.new_full((1,), values.numel() // values.shape[1], dtype=torch.float32)
    sums = _sum(torch.cat([exact.sum(dim=positions), count]))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    shape = (1, -1, *[1] * (values.ndim - 2))
    centred = exact - mean.reshape(shape)
    variance = _sum(centred.square().sum(dim=positions)) / total
    if layer.track_running_stats:
        _track(layer, mean.detach(), variance.detach() * total / (total - 1).clamp_min(1))
    normal = centred * (variance + layer.eps).rsqrt().reshape(shape)
    if layer.affine:
        normal = normal * layer.weight.reshape(shape) + layer.bias.reshape(shape)
    finished: Tensor = normal.to(values.dtype)
    return finished


class _SumOverProcesses(torch.autograd.Function):
    """A sum whose every summand has the gradients that all processes have of the total."""

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


def _sum(values: Tensor) -> Tensor:
    """The sum over processes, through which gradients flow back to all of them."""
    return cast("Tensor", _SumOverProcesses.apply(values))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _track(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)


def _sum_gradients(team: Team, of_backbone: set[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The backbone's gradients summed over processes; all others, which each process has whole, averaged."""
    found = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    if not found:
        return
    share = {True: 1.0, False: 1.0 / team.size}
    flat = torch.cat([(weight.grad * share[id(weight) in of_backbone]).reshape(-1) for weight in found])
    dist.all_reduce(flat)
    for weight, part in zip(found, torch.split(flat, [weight.numel() for weight in found]), strict=True):
        weight.grad.copy_(part.reshape(weight.shape))


def _from_leader(team: Team, tensor: Tensor) -> None:
    """Give all processes the first one's values: another machine's arithmetic may differ in the last bit."""
    sent = tensor.detach().to(team.device).contiguous()
    dist.broadcast(sent, 0)
    tensor.detach().copy_(sent)
