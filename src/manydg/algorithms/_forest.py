"""A forest of decision trees as plain tensors: saved like any weights, evaluated without scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_CELLS = 200_000
"""Rows times trees evaluated at a time: few enough to stay in the cache, many enough to be worth a call."""


@dataclass(frozen=True)
class Tree:
    """One tree of a fitted model.

    Parameters
    ----------
    nodes : structured array
        scikit-learn's nodes: feature, threshold, children, side of missing values, and the value of a leaf.
    output : int
        The score that the tree adds to.
    """

    nodes: npt.NDArray[Any]
    output: int


class Forest(nn.Module):
    """Sums of trees' values, one sum per output, in float64 like scikit-learn's.

    The nodes of all trees are in one table. A leaf is its own child, so that every row can take as many steps as the
    deepest tree needs; the children of node ``n`` are ``child[2 * n]`` (right) and ``child[2 * n + 1]`` (left). The
    tables' lengths are whatever was fitted or loaded.

    Parameters
    ----------
    outputs : int
    """

    threshold: Tensor
    value: Tensor
    feature: Tensor
    child: Tensor
    missing_left: Tensor
    roots: Tensor
    output: Tensor
    depth: Tensor
    baseline: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(0))
        self.register_buffer("value", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("missing_left", torch.zeros(0, dtype=torch.bool))
        for name in ("feature", "child", "roots", "output"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        self.register_buffer("depth", torch.zeros((), dtype=torch.int64))
        self.register_buffer("baseline", torch.zeros(outputs, dtype=torch.float64))

    def set_trees(self, trees: Sequence[Tree], baseline: npt.NDArray[np.float64]) -> None:
        """Replace the trees by fitted ones.

        Parameters
        ----------
        trees : sequence of Tree
        baseline : array ``(outputs,)``
            The scores before any tree.
        """
        device = self.baseline.device
        self.baseline = torch.as_tensor(baseline, dtype=torch.float64, device=device)
        if not trees:
            return
        sizes = np.array([len(tree.nodes) for tree in trees])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        nodes = np.concatenate([tree.nodes for tree in trees])
        leaf, own = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
        shift = np.repeat(starts, sizes)
        left, right = (np.where(leaf, own, nodes[side] + shift) for side in ("left", "right"))
        tables = {
            "threshold": round_down(np.where(leaf, 0.0, nodes["num_threshold"])),
            "value": nodes["value"].astype(np.float64),
            "feature": np.where(leaf, 0, nodes["feature_idx"]).astype(np.int64),
            "child": np.stack([right, left], axis=1).reshape(-1).astype(np.int64),
            "missing_left": nodes["missing_go_to_left"].astype(bool),
            "roots": starts.astype(np.int64),
            "output": np.array([tree.output for tree in trees], dtype=np.int64),
            "depth": np.array(nodes["depth"].max(), dtype=np.int64),
        }
        for name, table in tables.items():
            setattr(self, name, torch.as_tensor(table, device=device))

    def forward(self, values: Tensor) -> Tensor:
        """Scores ``(rows, outputs)`` in float64 of float32 values ``(rows, features)``, NaN where missing."""
        trees = self.roots.shape[0]
        if trees == 0 or len(values) == 0:
            return self.baseline.expand(len(values), -1).clone()
        chunks = torch.split(values, max(1, _CELLS // trees))
        return torch.cat([self._evaluate(chunk) for chunk in chunks])

    def _evaluate(self, values: Tensor) -> Tensor:
        rows, width = values.shape
        flat, missing = values.reshape(-1), values.isnan().reshape(-1)
        any_missing = bool(missing.any())
        start_of_row = torch.arange(rows, device=values.device).repeat_interleave(len(self.roots)) * width
        node = self.roots.repeat(rows)
        for _ in range(int(self.depth)):
            cell = start_of_row + self.feature.index_select(0, node)
            goes_left = flat.index_select(0, cell) <= self.threshold.index_select(0, node)
            if any_missing:
                goes_left |= missing.index_select(0, cell) & self.missing_left.index_select(0, node)
            node = self.child.index_select(0, 2 * node + goes_left)
        sums = self.baseline.expand(rows, -1).clone()
        return sums.index_add_(1, self.output, self.value.index_select(0, node).reshape(rows, -1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, buffer in list(self.named_buffers(recurse=False)):
            stored = state_dict.get(prefix + name)
            if stored is not None and stored.shape != buffer.shape:
                setattr(self, name, buffer.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def round_down(thresholds: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 at or below each threshold: a float32 value is at or below both or neither."""
    rounded = thresholds.astype(np.float32)
    return np.where(rounded > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)
