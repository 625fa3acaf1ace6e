"""How a step is done: as written, or replayed from a captured graph where the device allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Optimizers
from manydg.data.dataset import DomainDataset

_STEPS_BEFORE_CAPTURE = 3


class Steps(Protocol):
    """Does one step on the rows given and returns the loss terms, on the device."""

    def __call__(self, indices: Tensor, pairs: int) -> dict[str, Tensor]: ...


def steps_for(algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device) -> Steps:
    """Captured steps where the data and the algorithm are on a GPU and every batch of a shape is the same work."""
    dense = all(isinstance(column, Tensor) for column in train.columns.values())
    if device.type == "cuda" and train.device.type == "cuda" and dense and algorithm.static_step:
        return CapturedSteps(algorithm, train, optimizers)
    return PlainSteps(algorithm, train, optimizers, device)


class PlainSteps:
    """Gathers the batch and lets the algorithm take its step."""

    def __init__(
        self, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers, device: torch.device
    ) -> None:
        self.algorithm, self.train, self.optimizers, self.device = algorithm, train, optimizers, device

    def __call__(self, indices: Tensor, pairs: int) -> dict[str, Tensor]:
        return self.algorithm.step(self.train.take(indices, pairs).to(self.device), self.optimizers)


@dataclass
class _Captured:
    """A graph of one batch shape with the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    indices: Tensor
    names: list[str]
    values: Tensor


class CapturedSteps:
    """Gather, forward, backward and update as one graph per batch shape: the launch of hundreds of kernels in one.

    A shape's first few steps run as written, which also warms up what must not be set up during capture.
    """

    def __init__(self, algorithm: Algorithm, train: DomainDataset, optimizers: Optimizers) -> None:
        self.algorithm, self.train, self.optimizers = algorithm, train, optimizers
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["capturable"] = True

    def __call__(self, indices: Tensor, pairs: int) -> dict[str, Tensor]:
        shape = (len(indices), pairs)
        if shape not in self._graphs:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= _STEPS_BEFORE_CAPTURE:
                return self._as_written(indices, pairs)
            self._graphs[shape] = self._capture(indices, pairs)
        captured = self._graphs[shape]
        captured.indices.copy_(indices)
        captured.graph.replay()
        return dict(zip(captured.names, captured.values.clone().unbind(), strict=True))

    def _as_written(self, indices: Tensor, pairs: int) -> dict[str, Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            terms = self.algorithm.step(self.train.take(indices, pairs), self.optimizers)
        torch.cuda.current_stream().wait_stream(self._stream)
        return terms

    def _capture(self, indices: Tensor, pairs: int) -> _Captured:
        rows = indices.clone()
        graph = torch.cuda.CUDAGraph()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            terms = self.algorithm.step(self.train.take(rows, pairs), self.optimizers)
            values = torch.stack(list(terms.values()))
        return _Captured(graph, rows, list(terms), values)
