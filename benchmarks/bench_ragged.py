"""Taking ten thousand stays of seventy events each: one vectorised gather against a Python loop over stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manydg.data.columns import Ragged, offsets_from_lengths

STAYS, EVENTS, CODES, TAKEN = 40_000, 70, 3, 10_000


def main(out: Path) -> dict[str, Any]:
    """Flat and nested columns (an event holds a few codes); the loop builds the same tensors stay by stay."""
    torch.manual_seed(0)
    lengths = torch.randint(EVENTS // 2, EVENTS * 3 // 2 + 1, (STAYS,))
    flat = Ragged(torch.rand(int(lengths.sum())), offsets_from_lengths(lengths))
    sizes = torch.randint(1, 2 * CODES, (int(lengths.sum()),))
    nested = Ragged(
        Ragged(torch.randint(0, 5000, (int(sizes.sum()),)), offsets_from_lengths(sizes)), offsets_from_lengths(lengths)
    )
    indices = torch.randperm(STAYS)[:TAKEN]
    results: dict[str, Any] = {"stays taken": TAKEN, "events taken": int(lengths[indices].sum())}
    for name, column, loop in (("flat", flat, _loop_flat), ("nested", nested, _loop_nested)):
        fast = _best(lambda column=column: column.take(indices))
        slow = _best(lambda column=column, loop=loop: loop(column, indices), repeats=2)
        assert torch.equal(_items(column.take(indices)), loop(column, indices))
        results[f"{name}: milliseconds, one gather"] = fast * 1e3
        results[f"{name}: milliseconds, Python loop"] = slow * 1e3
        results[f"{name}: times faster"] = slow / fast
    return results


def _loop_flat(column: Ragged, indices: torch.Tensor) -> torch.Tensor:
    offsets = column.offsets.tolist()
    return torch.cat([column.values[offsets[row] : offsets[row + 1]] for row in indices.tolist()])  # type: ignore[index]


def _loop_nested(column: Ragged, indices: torch.Tensor) -> torch.Tensor:
    assert isinstance(column.values, Ragged)
    outer, inner = column.offsets.tolist(), column.values.offsets.tolist()
    pieces = []
    for row in indices.tolist():
        for event in range(outer[row], outer[row + 1]):
            pieces.append(column.values.values[inner[event] : inner[event + 1]])  # type: ignore[index]
    return torch.cat(pieces)


def _items(column: Ragged) -> torch.Tensor:
    values = column.values
    return _items(values) if isinstance(values, Ragged) else values


def _best(action: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
