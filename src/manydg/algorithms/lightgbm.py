"""LightGBM: gradient-boosted trees that grow leaf by leaf.

Ke et al., "LightGBM: A Highly Efficient Gradient Boosting Decision Tree", NeurIPS 2017, by the authors' library
(``pip install 'manydg[boosting]'``). A prediction does not need the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manydg.algorithms import setting
from manydg.algorithms._forest import (
    NODE,
    Array,
    BoostedTrees,
    LeafwiseSettings,
    RoundsOfTrees,
    Table,
    Tree,
    Watch,
    split_by_codes,
)
from manydg.files import JsonObject, ParsedJson
from manydg.jobs import threads_of_trees

Node = tuple[float, int, float, bool, int, int, int, bool]
"""The fields of :data:`manydg.algorithms._forest.NODE`."""


@dataclass(frozen=True)
class LightGBMSettings(LeafwiseSettings):
    sample_share: float = setting(1.0, 0.3, 1.0, "share of the samples that each tree is grown on", log=False)


class LightGBM(BoostedTrees):
    """Gradient boosting on all dense columns, by LightGBM."""

    title, order = "LightGBM", 201
    summary = "Boosted trees that grow leaf by leaf."

    Settings = LightGBMSettings
    settings: LightGBMSettings
    requires = ("lightgbm", "boosting")

    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        import lightgbm

        outputs = table.outputs
        baseline = np.zeros(outputs)

        def look(progress: Any) -> None:
            number = progress.iteration + 1
            if watch.due(number):
                watch.grew(number, trees_of(progress.model, outputs, watch.done, table.categorical), baseline)

        categories: Any = {"categorical_feature": list(table.categorical)} if table.categorical else {}
        data = lightgbm.Dataset(table.values, table.classes, weight=table.weights, **categories)
        model = lightgbm.train(dict(self._options(table, seed)), data, self.settings.rounds, callbacks=[look])
        return trees_of(model, outputs, 0, table.categorical), baseline

    def _options(self, table: Table, seed: int) -> JsonObject:
        several = table.outputs > 1
        of_values = {"squared": "regression", "huber": "huber"}
        return {
            "objective": of_values.get(table.loss) or ("multiclass" if several else "binary"),
            **({"num_class": table.n_classes} if several else {}),
            **({"alpha": 1.0} if table.loss == "huber" else {}),
            **leafwise_options(self.settings, seed, threads_of_trees()),
            "bagging_fraction": self.settings.sample_share,
            "bagging_freq": int(self.settings.sample_share < 1),
        }


def leafwise_options(settings: LeafwiseSettings, seed: int, threads: int) -> JsonObject:
    """What LightGBM and GPBoost call the settings of their trees."""
    return {
        "learning_rate": settings.learning_rate,
        "num_leaves": max(2, settings.leaves),
        "min_data_in_leaf": settings.leaf_samples,
        "lambda_l2": settings.l2,
        "feature_fraction_bynode": settings.feature_share,
        "seed": seed,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": threads,
        "verbosity": -1,
    }


def trees_of(model: Any, outputs: int, first: int, sizes: Mapping[int, int]) -> RoundsOfTrees:
    """The trees of a model from a round on; what the scores start from is in the leaves of the first."""
    described = model.dump_model(start_iteration=first)["tree_info"]
    trees = [Tree(_nodes_of(tree["tree_structure"], sizes), number % outputs) for number, tree in enumerate(described)]
    return [trees[start : start + outputs] for start in range(0, len(trees), outputs)]


def _nodes_of(root: ParsedJson, sizes: Mapping[int, int]) -> Array:
    """A tree of LightGBM's description as a table of nodes; ``sizes`` has the number of codes of each category."""
    nodes: list[Node] = []
    ways: dict[int, Array] = {}
    waiting: list[tuple[ParsedJson, int, int, bool]] = [(root, 0, -1, False)]
    children: dict[tuple[int, bool], int] = {}
    while waiting:
        given, depth, parent, is_left = waiting.pop()
        children[parent, is_left] = len(nodes)
        if "split_feature" not in given:
            nodes.append((float(given["leaf_value"]), 0, 0.0, False, 0, 0, depth, True))
            continue
        if given["decision_type"] == "==":
            listed = np.array(given["threshold"].split("||"), np.int64)
            ways[len(nodes)] = np.isin(np.arange(sizes[int(given["split_feature"])]), listed)
        threshold = 0.0 if len(nodes) in ways else float(given["threshold"])
        # Where no training sample lacked the value, LightGBM takes a missing one for zero.
        missing_left = bool(given["default_left"]) if given["missing_type"] == "NaN" else threshold >= 0
        waiting += [
            (given[side], depth + 1, len(nodes), side == "left_child") for side in ("left_child", "right_child")
        ]
        nodes.append((0.0, int(given["split_feature"]), threshold, missing_left, 0, 0, depth, False))
    table = np.array(nodes, NODE)
    for (parent, is_left), child in children.items():
        if parent >= 0:
            table["left" if is_left else "right"][parent] = child
    return split_by_codes(table, ways) if ways else table
