"""Boosting: gradient-boosted trees on the raw inputs, the common choice for tables.

scikit-learn's histogram kind, after Ke et al., "LightGBM: A Highly Efficient Gradient Boosting Decision Tree", NeurIPS
2017. It is not a method of domain generalisation but a baseline that any of them has to beat on tables of measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manydg.algorithms import Algorithm, Hyperparameters, Optimizers, Sampling, setting
from manydg.algorithms._forest import Forest, Tree
from manydg.backbones import Backbone, Inputs
from manydg.data.columns import Ragged
from manydg.data.dataset import TRUST, Batch, DomainDataset
from manydg.errors import ConfigError
from manydg.targets import Target

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BoostingSettings(Hyperparameters):
    rounds: int = setting(150, 50, 500, "number of boosting rounds")
    learning_rate: float = setting(0.1, 0.01, 0.3, "shrinkage of every tree")
    leaves: int = setting(31, 7, 127, "most leaves of a tree")
    leaf_samples: int = setting(20, 5, 500, "fewest samples in a leaf")
    l2: float = setting(0.0, 0.0, 20.0, "pull of every leaf's value towards 0", log=False)
    feature_share: float = setting(1.0, 0.1, 1.0, "share of the features that each split may choose from", log=False)


class Boosting(Algorithm):
    """Gradient boosting on all dense columns, flattened and joined in the order of their names.

    The backbone is not used: the trees see the inputs themselves. Missing values go the way each split
    has learnt. Where classes exclude one another there is one model with a tree per class and round (one per round for
    two classes, whose logits are 0 and the score); with several labels, one model for each. A sample of expert votes
    enters once for each class of its label set, with the class's share as its weight. A class without a training
    sample keeps a score that reflects how rare it must be. There is no early stopping, because rows held out at random
    would be of training patients.

    Samples of one patient are alike, so that a leaf of twenty samples may be one person: where patients have many
    samples, larger and fewer leaves and fewer rounds carry over better to new patients.

    After the fit the trees are plain tensors among the model's buffers, saved and loaded like weights.
    """

    title, order = "Gradient boosting", 200
    summary = "Boosted trees on the table of all measurements."

    Settings = BoostingSettings
    settings: BoostingSettings
    sampling: Sampling = "whole"

    def __init__(
        self, backbone: Backbone, target: Target, n_domains: int, settings: BoostingSettings | None = None
    ) -> None:
        super().__init__(_DenseInputs(), target, n_domains, settings)
        self.forest = Forest(target.size)

    def fit_whole(self, train: DomainDataset, seed: int) -> None:
        """Grow the trees on the whole training set.

        Parameters
        ----------
        train : DomainDataset
            With dense columns only.
        seed : int
        """
        values = self.backbone({name: train.column(name) for name in train.columns}).cpu().numpy()
        weights = self.target.distribution(train.targets.cpu()).numpy()
        fit = self._fit_classes if self.target.exclusive else self._fit_labels
        trees, baseline = fit(values, weights, seed)
        self.forest.set_trees(trees, baseline)

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

    def _fit_classes(self, values: Array, weights: Array, seed: int) -> tuple[list[Tree], Array]:
        rows, classes = np.nonzero(weights)
        model = self._fit(values[rows], classes, weights[rows, classes], seed)
        present = np.unique(classes)
        baseline = _log_shares(np.bincount(classes, weights[rows, classes], minlength=self.target.size))
        if model is None:
            return [], baseline
        outputs = present[1:] if len(present) == 2 else present
        baseline[present] = 0.0
        baseline[outputs] = model._baseline_prediction.ravel()
        return _trees_of(model, outputs), baseline

    def _fit_labels(self, values: Array, weights: Array, seed: int) -> tuple[list[Tree], Array]:
        trees: list[Tree] = []
        positives = weights.sum(axis=0)
        baseline = np.log(positives + 0.5) - np.log(len(weights) - positives + 0.5)
        for label in range(self.target.size):
            model = self._fit(values, weights[:, label], None, seed)
            if model is not None:
                trees += _trees_of(model, np.array([label]))
                baseline[label] = model._baseline_prediction.item()
        return trees, baseline

    def _fit(self, values: Array, classes: Array, weights: Array | None, seed: int) -> Any:
        """A fitted model, or ``None`` if there is only one class."""
        from sklearn.ensemble import HistGradientBoostingClassifier

        if self.settings.rounds == 0 or len(np.unique(classes)) < 2:
            return None
        model = HistGradientBoostingClassifier(
            max_iter=self.settings.rounds,
            learning_rate=self.settings.learning_rate,
            max_leaf_nodes=self.settings.leaves,
            min_samples_leaf=self.settings.leaf_samples,
            l2_regularization=self.settings.l2,
            max_features=self.settings.feature_share,
            early_stopping=False,
            random_state=seed,
        )
        return model.fit(values, classes, sample_weight=weights)


class _DenseInputs(Backbone):
    """All measurements of a batch, flattened and joined in the order of their names: ``(batch, features)``."""

    output_size = 0

    def forward(self, inputs: Inputs) -> Tensor:
        ragged = sorted(name for name, column in inputs.items() if isinstance(column, Ragged))
        if ragged:
            raise ConfigError(f"Boosting takes dense inputs only; {ragged} have rows of different lengths")
        columns = [inputs[name] for name in sorted(inputs) if name != TRUST]
        return torch.cat([column.flatten(1).to(torch.float32) for column in columns if isinstance(column, Tensor)], 1)


def _trees_of(model: Any, outputs: Array) -> list[Tree]:
    """The trees of a fitted model, whose n-th tree of every round adds to the n-th of the outputs."""
    return [
        Tree(predictor.nodes, int(output))
        for rounds in model._predictors
        for predictor, output in zip(rounds, outputs, strict=True)
    ]


def _log_shares(counts: Array) -> Array:
    """Logarithm of each class's share, half a sample added so that an absent class has one."""
    smoothed = counts.astype(np.float64) + 0.5
    shares: Array = np.log(smoothed / smoothed.sum())
    return shares
