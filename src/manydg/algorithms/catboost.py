"""CatBoost: gradient boosting of symmetric trees.

Prokhorenkova et al., "CatBoost: unbiased boosting with categorical features", NeurIPS 2018, by the authors' library
(``pip install 'manydg[boosting]'``). A prediction does not need the library. Each level of a category is a column of 0
and 1 here, as in CatBoost's own splits of few levels; its statistics of the target by level, one half of the paper, are
not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from manydg.algorithms import setting
from manydg.algorithms._forest import (
    NODE,
    Array,
    BoostedTrees,
    RoundsOfTrees,
    Table,
    Tree,
    TreeSettings,
    Watch,
    split_by_codes,
)
from manydg.files import ParsedJson


@dataclass(frozen=True)
class CatBoostSettings(TreeSettings):
    rounds: int = setting(300, 50, 1000, "most boosting rounds; validation patients decide how many are kept")
    learning_rate: float = setting(0.1, 0.01, 0.3, "shrinkage of every tree")
    depth: int = setting(6, 3, 10, "depth of every tree, which has one split for each level")
    l2: float = setting(3.0, 0.1, 30.0, "pull of every leaf's value towards 0")
    feature_share: float = setting(1.0, 0.1, 1.0, "share of the features that each split may choose from", log=False)


class CatBoost(BoostedTrees):
    """Gradient boosting on all dense columns, by CatBoost.

    Its trees are scored on the validation patients when all have grown.
    """

    title, order = "CatBoost", 202
    summary = "Boosted symmetric trees."

    Settings = CatBoostSettings
    settings: CatBoostSettings
    requires = ("catboost", "boosting")

    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        from catboost import CatBoostClassifier, CatBoostRegressor, Pool

        of_values = {"squared": "RMSE", "huber": "Huber:delta=1"}
        model = (CatBoostRegressor if table.loss else CatBoostClassifier)(
            iterations=self.settings.rounds,
            learning_rate=self.settings.learning_rate,
            depth=self.settings.depth,
            l2_leaf_reg=self.settings.l2,
            rsm=self.settings.feature_share,
            loss_function=of_values.get(table.loss) or ("Logloss" if table.outputs == 1 else "MultiClass"),
            random_seed=seed,
            thread_count=torch.get_num_threads(),
            allow_writing_files=False,
            logging_level="Silent",
        )
        values, origins = _one_column_per_level(table)
        model.fit(Pool(values, table.classes, weight=table.weights))
        return _trees_of(_described(model), table.outputs, origins)


@dataclass(frozen=True)
class _Origin:
    """The feature that a column was made of: its values, or which of them are a code of this many."""

    feature: int
    code: int | None = None
    codes: int = 0


def _one_column_per_level(table: Table) -> tuple[Array, list[_Origin]]:
    """The values with a column of 0 and 1 for each code that occurs of a category."""
    blocks, origins = [], []
    for feature in range(table.values.shape[1]):
        column = table.values[:, feature]
        if feature not in table.categorical:
            blocks.append(column)
            origins.append(_Origin(feature))
            continue
        for code in np.unique(column):
            blocks.append((column == code).astype(np.float32))
            origins.append(_Origin(feature, int(code), table.categorical[feature]))
    return (np.stack(blocks, axis=1) if table.categorical else table.values), origins


def _described(model: Any) -> ParsedJson:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        model.save_model(str(file), format="json")
        described: ParsedJson = json.loads(file.read_text(encoding="utf-8"))
        return described


def _trees_of(described: ParsedJson, outputs: int, origins: Sequence[_Origin]) -> tuple[RoundsOfTrees, Array]:
    """The trees of CatBoost's description of a model, and the scores before the first."""
    features = described["features_info"]["float_features"]
    columns = {feature["feature_index"]: feature["flat_feature_index"] for feature in features}
    # A missing value is below every border, unless the training data said otherwise.
    below = {feature["feature_index"]: feature["nan_value_treatment"] != "AsTrue" for feature in features}
    scale, bias = described["scale_and_bias"]
    rounds: RoundsOfTrees = []
    for tree in described["oblivious_trees"]:
        # The first split is the lowest bit of a leaf's number: asked last, when the tree is walked from its root.
        splits = [
            (columns[split["float_feature_index"]], split["border"], below[split["float_feature_index"]])
            for split in reversed(tree["splits"] or ())
        ]
        values = scale * np.array(tree["leaf_values"]).reshape(-1, outputs)
        rounds.append([Tree(_symmetric(splits, values[:, output], origins), output) for output in range(outputs)])
    return rounds, np.broadcast_to(np.asarray(bias, np.float64), (outputs,)).copy()


def _symmetric(splits: list[tuple[int, float, bool]], leaves: Array, origins: Sequence[_Origin]) -> Array:
    """A tree with the same split for all nodes of a level; values above it go right."""
    ways: dict[int, Array] = {}
    depth = len(splits)
    level = np.repeat(np.arange(depth + 1), 2 ** np.arange(depth + 1))
    nodes = np.zeros(len(level), NODE)
    own = np.arange(len(level))
    nodes["depth"], nodes["is_leaf"] = level, level == depth
    nodes["left"], nodes["right"] = 2 * own + 1, 2 * own + 2
    nodes["value"][-len(leaves) :] = leaves
    for number, (column, border, missing_left) in enumerate(splits):
        here = level == number
        origin = origins[column]
        nodes["feature_idx"][here], nodes["num_threshold"][here] = origin.feature, border
        nodes["missing_go_to_left"][here] = missing_left
        if origin.code is not None:
            others = np.arange(origin.codes) != origin.code
            ways |= {int(node): others for node in np.flatnonzero(here)}
    return split_by_codes(nodes, ways) if ways else nodes
