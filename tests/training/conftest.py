"""CUDA graphs without a GPU, for tests: what is called within a capture is noted, and called again on the same memory.

What makes a captured step wrong on a GPU does so here: a batch that is not filled in anew, or a tensor that has moved
since the capture. (Looking at values on the host is another test's matter: torch does so on a CPU by itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Graph:
    """The calls of a capture; replaying writes every result where it was."""

    replays = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        Graph.replays += 1
        with torch.no_grad():
            for function, arguments, options, results in self.calls:
                again = function(*arguments, **options)
                for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class _Noting(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        # A view shows the same memory again.
        if not any(given.alias_info and not given.alias_info.is_write for given in function._schema.returns):
            self.graph.calls.append((function, *(_as_it_is(part) for part in (args, kwargs or {}, results))))
        return results


def _as_it_is(tree: Any) -> Any:
    """The same with tensors of the same memory whose shape no later call changes."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


class _Stream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class _Event:
    def record(self, stream: object) -> None:
        pass


Changing = Callable[[], Iterable[Tensor]]


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Changing], type[Graph]]:
    """To be called with what gives the tensors that steps change: from then on captures work.

    A GPU does not run what it captures; here it is run and undone.
    """

    def put_in_place(changing: Changing) -> type[Graph]:
        @contextmanager
        def capture(graph: Graph, **_: object) -> Iterator[None]:
            before, drawn = [(tensor, tensor.clone()) for tensor in changing()], torch.get_rng_state()
            with _Noting(graph):
                yield
            torch.set_rng_state(drawn)
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)

        Graph.replays = 0
        for name, value in {
            "Stream": _Stream,
            "Event": _Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda *device: _Stream(),
            "graph_pool_handle": lambda: object(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(
            "manydg.training.execution.steps.pinned", lambda rows, column: column.new_empty(rows, *column.shape[1:])
        )
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr("manydg.training.execution.steps.make_capturable", lambda optimizer: None)
        return Graph

    return put_in_place
