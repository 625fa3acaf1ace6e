"""Boosting: gradient-boosted trees on the raw inputs, the common choice for tables.

scikit-learn's histogram kind, after Ke et al., "LightGBM: A Highly Efficient Gradient Boosting Decision Tree", NeurIPS
2017. It is not a method of domain generalisation but a baseline that any of them has to beat on tables of measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manydg.algorithms import setting
from manydg.algorithms._forest import Array, BoostedTrees, RoundsOfTrees, Table, Tree, TreeSettings, Watch


@dataclass(frozen=True)
class BoostingSettings(TreeSettings):
    learning_rate: float = setting(0.1, 0.01, 0.3, "shrinkage of every tree")
    leaves: int = setting(31, 7, 127, "most leaves of a tree")
    leaf_samples: int = setting(20, 5, 500, "fewest samples in a leaf")
    l2: float = setting(0.0, 0.0, 20.0, "pull of every leaf's value towards 0", log=False)
    feature_share: float = setting(1.0, 0.1, 1.0, "share of the features that each split may choose from", log=False)


class Boosting(BoostedTrees):
    """Gradient boosting on all dense columns, by scikit-learn."""

    title, order = "Gradient boosting", 200
    summary = "Boosted trees on the table of all measurements."

    Settings = BoostingSettings
    settings: BoostingSettings

    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        from sklearn.ensemble import HistGradientBoostingClassifier

        def look(model: Any, *_: Any, **__: Any) -> float:
            """A score that rises with every round, so that none is the last before its time."""
            number = len(model._predictors)
            if watch.due(number):
                watch.grew(number, _trees_of(model, watch.done), model._baseline_prediction.ravel())
            return float(number)

        model = HistGradientBoostingClassifier(
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
        )
        model.fit(table.values, table.classes, sample_weight=table.weights)
        return _trees_of(model, 0), model._baseline_prediction.ravel()


def _trees_of(model: Any, first: int) -> RoundsOfTrees:
    """The trees of a model from a round on."""
    return [
        [Tree(predictor.nodes, output) for output, predictor in enumerate(trees)] for trees in model._predictors[first:]
    ]
