"""Boosting: gradient-boosted trees on the raw inputs, the common choice for tables.

scikit-learn's histogram kind, after Ke et al., "LightGBM: A Highly Efficient Gradient Boosting Decision Tree", NeurIPS
2017. It is not a method of domain generalisation but a baseline that any of them has to beat on tables of measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from manydg.algorithms._forest import (
    Array,
    BoostedTrees,
    LeafwiseSettings,
    RoundsOfTrees,
    Table,
    Tree,
    Watch,
    split_by_codes,
)
from manydg.backbones import Backbone
from manydg.targets import Regression, Target

_MOST_CODES = 255
"""Categories of a feature that scikit-learn can tell apart."""


class Boosting(BoostedTrees):
    """Gradient boosting on all dense columns, by scikit-learn."""

    title, order = "Gradient boosting", 200
    summary = "Boosted trees on the table of all measurements."

    Settings = LeafwiseSettings
    settings: LeafwiseSettings

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if isinstance(target, Regression) and target.huber:
            return "scikit-learn's boosting has no Huber loss: take lightgbm or catboost, or the squared loss"
        return None

    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        def look(model: Any, *_: Any, **__: Any) -> float:
            """A score that rises with every round, so that none is the last before its time."""
            number = len(model._predictors)
            if watch.due(number):
                watch.grew(number, _trees_of(model, watch.done, recoded), model._baseline_prediction.ravel())
            return float(number)

        values, recoded = _few_codes(table)

        learner = HistGradientBoostingRegressor if table.loss else HistGradientBoostingClassifier
        model = learner(
            max_iter=self.settings.rounds,
            learning_rate=self.settings.learning_rate,
            max_leaf_nodes=self.settings.leaves,
            min_samples_leaf=self.settings.leaf_samples,
            l2_regularization=self.settings.l2,
            max_features=self.settings.feature_share,
            # Not to stop early but to be called after every round. No training row is held back.
            early_stopping=True,
            validation_fraction=None,
            n_iter_no_change=self.settings.rounds + 1,
            scoring=look,
            random_state=seed,
            categorical_features=list(table.categorical) or None,
        )
        model.fit(values, table.classes, sample_weight=table.weights)
        return _trees_of(model, 0, recoded), model._baseline_prediction.ravel()


@dataclass(frozen=True)
class _Recoded:
    """What scikit-learn has in place of each code of a feature, and which of these it was trained on."""

    new: Array
    seen: Array


def _few_codes(table: Table) -> tuple[Array, dict[int, _Recoded]]:
    """The values with codes from 0 to 254, as scikit-learn wants them: the rarest of more codes are one."""
    if not table.categorical:
        return table.values, {}
    values, recoded = table.values.copy(), {}
    for feature, size in table.categorical.items():
        counts = np.bincount(values[:, feature].astype(np.int64), minlength=size)
        new = np.empty(size, np.int64)
        new[np.argsort(-counts, kind="stable")] = np.minimum(np.arange(size), _MOST_CODES - 1)
        values[:, feature] = new[values[:, feature].astype(np.int64)]
        recoded[feature] = _Recoded(new, np.isin(new, new[counts > 0]))
    return values, recoded


def _trees_of(model: Any, first: int, recoded: Mapping[int, _Recoded]) -> RoundsOfTrees:
    """The trees of a model from a round on."""
    return [
        [Tree(_nodes_of(predictor, recoded), output) for output, predictor in enumerate(trees)]
        for trees in model._predictors[first:]
    ]


def _nodes_of(predictor: Any, recoded: Mapping[int, _Recoded]) -> Array:
    nodes: Array = predictor.nodes
    ways: dict[int, Array] = {}
    for number in np.flatnonzero(nodes["is_categorical"].astype(bool) & ~nodes["is_leaf"].astype(bool)):
        node = nodes[number]
        codes = recoded[int(node["feature_idx"])]
        bits = np.unpackbits(predictor.raw_left_cat_bitsets[node["bitset_idx"]].view(np.uint8), bitorder="little")
        # A code that no training sample has goes the way of a missing value.
        ways[int(number)] = np.where(codes.seen, bits[codes.new].astype(bool), bool(node["missing_go_to_left"]))
    return split_by_codes(nodes, ways) if ways else nodes
