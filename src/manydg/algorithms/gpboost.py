"""GPBoost: boosted trees and a random intercept for each patient, estimated together.

Sigrist, "Gaussian Process Boosting", JMLR 2022, by the author's library (``pip install 'manydg[mixed]'``). The trees
learn what holds for all patients, the intercepts what is a patient's own. Of a new patient nothing is known: the
prediction is that of the trees. Where labels of the patient are known (``manydg personalise --learner intercept``), the
patient's intercept is estimated with the variance found here. A prediction does not need the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from manydg.algorithms import Rounds
from manydg.algorithms._forest import Array, BoostedTrees, LeafwiseSettings, RoundsOfTrees, Table, Watch
from manydg.algorithms.lightgbm import leafwise_options, trees_of
from manydg.backbones import Backbone
from manydg.data.dataset import DomainDataset
from manydg.targets import Target


class GPBoost(BoostedTrees):
    """Gradient boosting with a random intercept for each patient, by GPBoost.

    Attributes
    ----------
    intercept_variance : Tensor
        Of the patients' intercepts beside the trees that are kept, a scalar.
    """

    title, order = "GPBoost", 203
    summary = "Boosted trees and a random intercept for each patient."

    Settings = LeafwiseSettings
    settings: LeafwiseSettings
    requires = ("gpboost", "mixed")
    intercept_variance: Tensor

    @classmethod
    def refuses(cls, target: Target, backbone: Backbone) -> str | None:
        if target.kind in ("binary", "classes") and target.size == 2:
            return None
        return "its random effects are for two classes: take lightgbm, and 'manydg personalise' for labels of a patient"

    def build(self) -> None:
        super().build()
        self.register_buffer("intercept_variance", torch.zeros(()))
        self._patients: Array = np.zeros(0, np.int64)
        self._variances: list[float] = []

    def fit_whole(self, train: DomainDataset, seed: int, rounds: Rounds | None = None) -> None:
        self._patients, self._variances = train.domains.cpu().numpy(), []
        super().fit_whole(train, seed, rounds)
        # Beside more trees, which fit the training patients better and better, the intercepts are others.
        kept = len(self.forest.roots)
        self.intercept_variance.fill_(self._variances[kept - 1] if kept else 0.0)

    def grow(self, table: Table, seed: int, watch: Watch) -> tuple[RoundsOfTrees, Array]:
        import gpboost

        threads = torch.get_num_threads()  # without them GPModel prints a line about them
        effects = gpboost.GPModel(group_data=self._patients, likelihood="bernoulli_logit", num_parallel_threads=threads)
        categories: Any = {"categorical_feature": list(table.categorical)} if table.categorical else {}
        data = gpboost.Dataset(table.values, table.classes.astype(np.float64), params={"verbosity": -1}, **categories)
        options = dict(leafwise_options(self.settings, seed, threads))

        def note_variance(_: Any) -> None:
            self._variances.append(float(np.asarray(effects.get_cov_pars()).ravel()[0]))

        model = gpboost.train(
            options, data, gp_model=effects, num_boost_round=self.settings.rounds, callbacks=[note_variance]
        )
        return trees_of(model, 1, 0, table.categorical), np.zeros(1)
