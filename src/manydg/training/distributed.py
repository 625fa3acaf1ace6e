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

import torch
import torch.distributed as dist
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError, ManyDGError, TrainingError

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
