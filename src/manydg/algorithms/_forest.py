"""Boosted trees: what the libraries that grow them share here, and the forest they are kept in.

A forest is plain tensors: saved like any weights, evaluated without the library that grew it.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm, Hyperparameters, Optimizers, Rounds, Sampling, setting
from manydg.backbones import Backbone, Inputs, Levels, TableBackbone, feature_names, join, note_left_out
from manydg.data.columns import CATEGORIES, Ragged
from manydg.data.dataset import TRUST, Batch, DomainDataset, InputSchema
from manydg.errors import ConfigError, DataError
from manydg.targets import Regression, Target

Array = npt.NDArray[Any]
_MOST_COLUMNS = 2000
_LOOKS = 30
"""How often the trees are scored while they grow."""
_ROWS_OF_LOSS = 2000
"""Training samples that the reported loss is of."""
_CELLS = 200_000
"""Rows times trees evaluated at a time: few enough to stay in the cache, many enough to be worth a call."""


NODE = np.dtype(
    [
        ("value", np.float64),
        ("feature_idx", np.int64),
        ("num_threshold", np.float64),
        ("missing_go_to_left", np.bool_),
        ("left", np.int64),
        ("right", np.int64),
        ("depth", np.int64),
        ("is_leaf", np.bool_),
    ]
)
"""What a forest needs of a tree's node, by scikit-learn's names."""


@dataclass(frozen=True)
class Tree:
    """One tree of a fitted model.

    - ``nodes``: With the fields of :data:`NODE` and maybe more. Values at or below a threshold go left. The first is
      the root; its depth is 0.
    - ``output``: The score that the tree adds to.
    """

    nodes: npt.NDArray[Any]
    output: int


def split_by_codes(nodes: Array, goes_left: Mapping[int, Array]) -> Array:
    """A tree in which nodes that send some codes left are replaced by thresholds, so that a forest needs nothing else.

    Neighbouring codes that go the same way are one stretch, and the stretch of a code is searched for by bisection.
    Several nodes then have the same child.

    - ``nodes``: With the fields of :data:`NODE` at least.
    - ``goes_left`` ``(codes,)``: For the number of a node, which codes go left.
    """
    table = [row.copy() for row in nodes[list(NODE.names or ())].astype(NODE)]
    for number, left in goes_left.items():
        _search(table, number, np.append(np.flatnonzero(left[1:] != left[:-1]), len(left)), left)
    searched = np.array(table, NODE)
    inner = ~searched["is_leaf"]
    while True:
        deeper = searched["depth"].copy()
        for side in ("left", "right"):
            np.maximum.at(deeper, searched[side][inner], searched["depth"][inner] + 1)
        if (deeper == searched["depth"]).all():
            return searched
        searched["depth"] = deeper


def _search(table: list[Any], root: int, ends: Array, left: Array) -> None:
    """Replace a node by the bisection of stretches of codes, each up to one of ``ends``."""
    children = {True: int(table[root]["left"]), False: int(table[root]["right"])}
    waiting = [(root, 0, len(ends) - 1)]
    while waiting:
        number, first, last = waiting.pop()
        middle = (first + last) // 2
        table[number]["num_threshold"] = float(ends[middle]) + 0.5
        halves = {"left": (first, middle), "right": (min(middle + 1, last), last)}
        for side, (low, high) in halves.items():
            if low == high:
                table[number][side] = children[bool(left[min(int(ends[low]), len(left) - 1)])]
                continue
            table[number][side] = len(table)
            waiting.append((len(table), low, high))
            table.append(table[number].copy())


RoundsOfTrees = list[list[Tree]]
"""The trees of every round, one for each score."""


@dataclass(frozen=True)
class Table:
    """What a library learns from.

    - ``values`` ``(rows, features)``: NaN where missing; no feature is missing everywhere.
    - ``classes`` ``(rows,)``: Whole numbers from 0 to ``n_classes - 1``, each of them present; or, with a ``loss``, the
      values to predict.
    - ``weights`` ``(rows,)``
    - ``categorical``: The features that are codes of categories, from 0 to fewer than the number here; code 0 is for
      all levels that training patients do not share.
    - ``loss`` {"", "squared", "huber"}: Of values; empty for classes.
    """

    values: Array
    classes: Array
    weights: Array | None = None
    categorical: Mapping[int, int] = field(default_factory=dict)
    loss: str = ""

    @property
    def n_classes(self) -> int:
        return int(self.classes.max()) + 1

    @property
    def outputs(self) -> int:
        """Trees of a round: one for a value or two classes, else one for each class."""
        return 1 if self.loss or self.n_classes == 2 else self.n_classes


class Watch:
    """Scores some samples after some of the rounds of a model.

    - ``values`` ``(rows, features)``: The samples.
    - ``schedule``: The numbers of rounds to score after, in ascending order.
    - ``tell``: Gets each number with the scores ``(rows, outputs)`` after it.
    - ``done``: Rounds that are in the scores.
    """

    def __init__(self, values: Tensor, schedule: Sequence[int], tell: Callable[[int, Array], None]) -> None:
        self.done = 0
        self._values, self._schedule, self._tell = values, schedule, tell
        self._scores: Array | None = None

    def due(self, number: int) -> bool:
        """Whether the samples are to be scored after this round."""
        return number in self._schedule

    def grew(self, number: int, new: RoundsOfTrees, baseline: Array) -> None:
        """Score after a number of rounds, given the trees of those since the last time."""
        if self._scores is None:
            self._scores = np.tile(np.asarray(baseline, np.float64), (len(self._values), 1))
        forest = Forest(len(baseline))
        forest.set_trees(list(itertools.chain.from_iterable(new)), np.zeros(len(baseline)))
        self._scores += forest(self._values).numpy()
        self.done = number
        self._tell(number, self._scores)

    def catch_up(self, rounds: RoundsOfTrees, baseline: Array) -> None:
        """Score after all rounds that were not scored while the trees grew."""
        for number in self._schedule:
            if number > self.done:
                self.grew(number, rounds[self.done : number], baseline)


@dataclass(frozen=True)
class TreeSettings(Hyperparameters):
    rounds: int = setting(150, 50, 500, "most boosting rounds; validation patients decide how many are kept")


@dataclass(frozen=True)
class LeafwiseSettings(TreeSettings):
    """Settings of trees that grow leaf by leaf."""

    learning_rate: float = setting(0.1, 0.01, 0.3, "shrinkage of every tree")
    leaves: int = setting(31, 7, 127, "most leaves of a tree", least=2)
    leaf_samples: int = setting(20, 5, 500, "fewest samples in a leaf")
    l2: float = setting(0.0, 0.0, 20.0, "pull of every leaf's value towards 0", log=False)
    feature_share: float = setting(1.0, 0.1, 1.0, "share of the features that each split may choose from", log=False)


def no_table(schema: InputSchema) -> str | None:
    """Why inputs are not for a learner of tables: rows of different lengths, or raw signals; ``None`` if they are."""
    if any(column.nesting for column in schema.columns.values()):
        return "it takes dense inputs only, and these have rows of different lengths"
    values = sum(math.prod(column.shape) for column in schema.columns.values())
    if values > _MOST_COLUMNS:
        return f"it reads tables, and a sample here has {values:,} values"
    return None


class BoostedTrees(Algorithm):
    """Base of gradient boosting on all dense columns, flattened and joined in the order of their names.

    The backbone is not used: the trees see the inputs themselves. Missing values go the way each split has learnt. A
    column without a value in the training set is left out. Categories are split by sets of levels. Where classes
    exclude one another there is one model with a tree per class and round (one per round for two classes, whose logits
    are 0 and the score); with several labels, one model for each. A sample of expert votes enters once for each class
    of its label set, with the class's share as its weight. A class without a training sample keeps a score that
    reflects how rare it must be. A measured value is one score, of trees that are grown on its standardised form. How
    many rounds are kept is chosen on validation patients; without any, all are.

    Samples of one patient are alike, so that a leaf of twenty samples may be one person: where patients have many
    samples, larger and fewer leaves and fewer rounds carry over better to new patients.

    After the fit the trees are plain tensors among the model's buffers, saved and loaded like weights.
    """

    Settings = TreeSettings
    settings: TreeSettings
    sampling: Sampling = "whole"

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: TreeSettings | None = None
    ) -> None:
        # Which levels of categories are known is all that is taken over of it.
        levels = backbone.levels if isinstance(backbone, TableBackbone) else None
        super().__init__(_DenseInputs(levels), target, n_domains, settings)

    def build(self) -> None:
        self.forest = Forest(self.target.size)

    @abstractmethod
    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        """Grow the trees of one model.

        - ``watch``: Callback for the trees while they grow.
        - returns ``rounds``: One tree a round for two classes or a value, else one for each class.
        - returns ``baseline`` ``(outputs,)``: The scores before the first tree.
        """

    def fit_whole(self, train: DomainDataset, seed: int, rounds: Rounds | None = None) -> None:
        rounds = rounds or Rounds()
        values = self._values_of(train)
        usable = _columns_with_values(values, train)
        watched = _Watched(self.target, train, rounds, values, usable, self._values_of(rounds.val), self._schedule())
        rounds.started(self.settings.rounds)
        sizes = _codes_in(train, self.backbone)
        categorical = {number: sizes[column] for number, column in enumerate(usable.tolist()) if column in sizes}
        models = self._grow_models(train, values[:, usable].numpy(), seed, watched, categorical)
        kept = rounds.kept(self.settings.rounds)
        trees = [
            Tree(_with_features(tree.nodes, usable.numpy()), int(model.outputs[tree.output]))
            for model in models
            for trees in model.rounds[:kept]
            for tree in trees
        ]
        self.forest.set_trees(trees, watched.start)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return {"supervised": self.target.loss(self.predict(batch.inputs), batch.targets)}

    def predict(self, inputs: Inputs) -> Tensor:
        scores: Tensor = self.forest(self.backbone(inputs))
        return scores.to(torch.float32)

    def embed(self, inputs: Inputs) -> dict[str, Tensor]:
        """The scores: trees have no features between the inputs and these."""
        return {"v": self.predict(inputs)}

    def optimizers(self, lr: float, weight_decay: float) -> Optimizers:
        return {}

    def _values_of(self, dataset: DomainDataset | None) -> Tensor:
        if dataset is None:
            return torch.zeros(0, 0)
        values: Tensor = self.backbone({name: dataset.column(name) for name in dataset.columns})
        return values.cpu()

    def _schedule(self) -> list[int]:
        total = self.settings.rounds
        return sorted({*range(0, total, max(1, total // _LOOKS)), total} - {0})

    def _grow_models(
        self, train: DomainDataset, values: Array, seed: int, watched: _Watched, categorical: Mapping[int, int]
    ) -> list[_Model]:
        weights = self.target.distribution(train.targets.cpu()).numpy()
        if isinstance(self.target, Regression):
            loss = "huber" if self.target.huber else "squared"
            tables = [(np.zeros(1, np.int64), Table(values, weights[:, 0].astype(np.float64), loss=loss))]
        elif not self.target.exclusive:
            positives = weights.sum(axis=0)
            watched.start = np.log(positives + 0.5) - np.log(len(weights) - positives + 0.5)
            tables = [
                (np.array([label]), Table(values, column.astype(np.int64))) for label, column in enumerate(weights.T)
            ]
            tables = [(outputs, table) for outputs, table in tables if len(np.unique(table.classes)) == 2]
        else:
            rows, classes = np.nonzero(weights)
            watched.start = _log_shares(np.bincount(classes, weights[rows, classes], minlength=self.target.size))
            present, codes = np.unique(classes, return_inverse=True)
            tables = []
            if len(present) > 1:
                watched.start[present] = 0.0
                outputs = present[1:] if len(present) == 2 else present
                tables = [(outputs, Table(values[rows], codes, weights[rows, classes]))]
        if not self.settings.rounds:
            return []
        watched.columns = [int(output) for outputs, _ in tables for output in outputs]
        return [
            self._grow_model(outputs, replace(table, categorical=categorical), seed, watched)
            for outputs, table in tables
        ]

    def _grow_model(self, outputs: Array, table: Table, seed: int, watched: _Watched) -> _Model:
        watch = watched.of(outputs)
        rounds, baseline = self.grow(table, seed, watch)
        watch.catch_up(rounds, baseline)
        watched.start[outputs] = baseline
        return _Model(outputs, rounds)


@dataclass(frozen=True)
class _Model:
    """The trees of one model, and which of the target's scores its own are."""

    outputs: Array
    rounds: RoundsOfTrees


class _Watched:
    """Puts the scores of all models together and tells of them when those of every model are there.

    - ``start`` ``(K,)``: The scores before any tree.
    - ``columns``: The scores that some model adds to.
    """

    def __init__(
        self,
        target: Target,
        train: DomainDataset,
        rounds: Rounds,
        values: Tensor,
        usable: Tensor,
        val: Tensor,
        schedule: Sequence[int],
    ) -> None:
        some = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:_ROWS_OF_LOSS]
        self._values = torch.cat([values[some], val])[:, usable] if len(val) else values[some][:, usable]
        self._targets = train.targets.cpu()[some]
        self._target, self._rounds, self._schedule = target, rounds, schedule
        self._scores: dict[int, Array] = {}
        self._missing: dict[int, int] = {}
        self.start: Array = np.zeros(target.size)
        self.columns: list[int] = []

    def of(self, outputs: Array) -> Watch:
        """A watch on the model of these scores."""

        def tell(number: int, scores: Array) -> None:
            self._add(number, outputs, scores)

        return Watch(self._values, self._schedule, tell)

    def _add(self, number: int, outputs: Array, scores: Array) -> None:
        whole = self._scores.setdefault(number, np.tile(self.start, (len(self._values), 1)))
        whole[:, outputs] = scores
        self._missing[number] = self._missing.get(number, len(self.columns)) - len(outputs)
        if self._missing[number]:
            return
        logits = torch.from_numpy(self._scores.pop(number)).to(torch.float32)
        known = len(self._targets)
        loss = float(self._target.loss(logits[:known], self._targets))
        self._rounds.ended(number, {"supervised": loss}, logits[known:])


class _DenseInputs(Backbone):
    """All measurements of a batch, flattened and joined in the order of their names: ``(batch, features)``."""

    output_size = 0

    def __init__(self, levels: Levels | None = None) -> None:
        super().__init__()
        self.levels = levels

    def fit_inputs(self, dataset: DomainDataset) -> None:
        if self.levels is not None:
            self.levels.fit(dataset)

    def forward(self, inputs: Inputs) -> Tensor:
        if self.levels is not None:
            inputs = {**inputs, CATEGORIES: self.levels(inputs)}
        ragged = sorted(name for name, column in inputs.items() if isinstance(column, Ragged))
        if ragged:
            raise ConfigError(f"Boosting takes dense inputs only; {ragged} have rows of different lengths")
        return join(inputs, sorted(inputs.keys() - {TRUST}))


def _codes_in(train: DomainDataset, inputs: Backbone) -> dict[int, int]:
    """Features that are codes of categories, as :class:`_DenseInputs` numbers them, and how many codes each has."""
    if not isinstance(inputs, _DenseInputs) or inputs.levels is None:
        return {}
    before = [train.columns[name] for name in sorted(train.columns) if name < CATEGORIES and name != TRUST]
    first = sum(column[:1].flatten(1).shape[1] for column in before if isinstance(column, Tensor))
    return {first + number: size for number, size in enumerate(inputs.levels.sizes)}


def _columns_with_values(values: Tensor, train: DomainDataset) -> Tensor:
    """Indices of the features that are known of some training sample; those left out are named in a warning."""
    empty = values.isnan().all(dim=0)
    if not bool(empty.any()):
        return torch.arange(values.shape[1])
    if bool(empty.all()):
        raise DataError("no training patient has a value in any column: boosting has nothing to learn from")
    names = feature_names(train, sorted(set(train.columns) - {TRUST}))
    missing = [name for name, without in zip(names, empty.tolist(), strict=True) if without]
    note_left_out(missing, len(names))
    return torch.nonzero(~empty).squeeze(1)


def _with_features(nodes: Array, features: Array) -> Array:
    """The nodes with these features in place of their numbers."""
    renamed = nodes.copy()
    renamed["feature_idx"] = np.where(
        nodes["is_leaf"], 0, features[np.where(nodes["is_leaf"], 0, nodes["feature_idx"])]
    )
    return renamed


def _log_shares(counts: Array) -> Array:
    """Logarithm of each class's share, half a sample added so that an absent class has one."""
    smoothed = counts.astype(np.float64) + 0.5
    shares: Array = np.log(smoothed / smoothed.sum())
    return shares


class Forest(nn.Module):
    """Sums of trees' values, one sum per output, in float64 like those of the libraries that grow them.

    The nodes of all trees are in one table. A leaf is its own child, so that every row can take as many steps as the
    deepest tree needs; the children of node ``n`` are ``child[2 * n]`` (right) and ``child[2 * n + 1]`` (left). The
    tables' lengths are whatever was fitted or loaded.
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

        - ``baseline`` ``(outputs,)``: The scores before any tree.
        """
        device = self.baseline.device
        self.baseline = torch.as_tensor(baseline, dtype=torch.float64, device=device)
        if not trees:
            return
        sizes = np.array([len(tree.nodes) for tree in trees])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        nodes = np.concatenate([tree.nodes[list(NODE.names or ())].astype(NODE) for tree in trees])
        leaf, own = nodes["is_leaf"], np.arange(len(nodes))
        shift = np.repeat(starts, sizes)
        left, right = (np.where(leaf, own, nodes[side] + shift) for side in ("left", "right"))
        tables = {
            "threshold": round_down(np.where(leaf, 0.0, nodes["num_threshold"])),
            "value": nodes["value"],
            "feature": np.where(leaf, 0, nodes["feature_idx"]),
            "child": np.stack([right, left], axis=1).reshape(-1).astype(np.int64),
            "missing_left": nodes["missing_go_to_left"],
            "roots": starts.astype(np.int64),
            "output": np.array([tree.output for tree in trees], dtype=np.int64),
            "depth": np.array(nodes["depth"].max(), dtype=np.int64),
        }
        for name, table in tables.items():
            setattr(self, name, torch.as_tensor(np.array(table), device=device))

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
    with np.errstate(over="ignore"):  # Beyond the largest float32 is infinity.
        rounded = thresholds.astype(np.float32)
        return np.where(rounded > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)
