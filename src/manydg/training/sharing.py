"""Steps that several processes share: each runs the backbone on its rows, and all see the whole step's losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
from manydg.errors import ConfigError
from manydg.training.distributed import Team
from manydg.training.steps import Terms

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
