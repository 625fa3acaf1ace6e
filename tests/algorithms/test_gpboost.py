"""GPBoost: its trees are those of the library, its variance the prior of a patient whose labels are known."""

from __future__ import annotations

import gpboost
import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from manydg.algorithms import ALGORITHMS, Rounds
from manydg.backbones import build_backbone
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError
from manydg.targets import target_of
from manydg.training.run import Run, train

ROUNDS = 12


def people(seed: int = 0) -> DomainDataset:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(40), 25)
    x = rng.normal(size=(len(who), 3)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    score = 2 * np.nan_to_num(x[:, 0]) + 3 * rng.normal(size=40)[who]
    return from_arrays(x, (rng.random(len(who)) < 1 / (1 + np.exp(-score))).astype(int), who, missing=True)


@pytest.fixture(scope="module")
def run() -> Run:
    settings = {"rounds": ROUNDS, "leaf_samples": 10}
    return train(people(), algorithm="gpboost", settings=settings, ratios=(0.6, 0.2, 0.2), device="cpu")


def test_without_labels_a_new_patient_gets_what_the_librarys_trees_say() -> None:
    data = people()
    x, y, who = data.columns["x"].numpy(), data.targets.numpy().astype(float), data.domains.numpy()  # type: ignore[union-attr]
    effects = gpboost.GPModel(group_data=who, likelihood="bernoulli_logit")
    options = {"learning_rate": 0.1, "num_leaves": 31, "min_data_in_leaf": 20, "seed": 0, "verbosity": -1}
    own = gpboost.train(options, gpboost.Dataset(x, y), gp_model=effects, num_boost_round=ROUNDS)
    strangers = np.full(len(x), -1)
    expected = own.predict(x, group_data_pred=strangers, predict_var=False, pred_latent=True)["fixed_effect"]
    schema = InputSchema.of(data)
    ours = ALGORITHMS.get("gpboost")(
        build_backbone("tabular", schema, {}),
        target_of(data.target),
        40,
        ALGORITHMS.get("gpboost").settings_from({"rounds": ROUNDS}),
    )
    ours.fit_whole(data, 0)
    logits = ours.predict({"x": torch.from_numpy(x)})
    np.testing.assert_allclose((logits[:, 1] - logits[:, 0]).numpy(), expected, atol=1e-5)
    assert float(ours.intercept_variance) == pytest.approx(
        float(np.asarray(effects.get_cov_pars()).ravel()[0]), rel=1e-6
    )
    assert float(ours.intercept_variance) > 0.2


def test_the_variance_is_that_beside_the_trees_that_are_kept() -> None:
    class TheFirst(Rounds):
        def kept(self, total: int) -> int:
            return 5

    def variance(rounds: int, follows: Rounds | None = None) -> float:
        settings = ALGORITHMS.get("gpboost").settings_from({"rounds": rounds})
        network = build_backbone("tabular", InputSchema.of(people()), {})
        algorithm = ALGORITHMS.get("gpboost")(network, target_of(people().target), 40, settings)
        algorithm.fit_whole(people(), 0, follows)
        return float(algorithm.intercept_variance)  # type: ignore[arg-type]

    assert variance(60, TheFirst()) == pytest.approx(variance(5), rel=1e-6)
    assert variance(60) != pytest.approx(variance(5), rel=0.01)


def test_with_labels_the_intercept_is_at_the_mode_of_its_posterior(run: Run) -> None:
    new = people(1).select(np.arange(25))
    labels = [str(int(label)) if row < 15 else None for row, label in enumerate(new.targets)]
    before = run.predict_proba(new)
    score = np.log(before[:, 1] / before[:, 0]).astype(float)
    truth, variance = new.targets.numpy()[:15], float(run.algorithm.intercept_variance)  # type: ignore[arg-type]

    def loss(intercept: float) -> float:
        shifted = score[:15] + intercept
        return float(-(truth * shifted - np.log1p(np.exp(shifted))).sum() + intercept**2 / (2 * variance))

    best = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-8}).x
    after = run.personalise(new, labels, learner="intercept")[15:]
    np.testing.assert_allclose(np.log(after[:, 1] / after[:, 0]) - score[15:], best, atol=2e-3)


def test_targets_of_more_classes_are_refused() -> None:
    backbone = build_backbone("tabular", InputSchema.of(people()), {})
    with pytest.raises(ConfigError, match="random effects are for two classes"):
        ALGORITHMS.get("gpboost")(backbone, target_of(TargetSpec("classes", ("a", "b", "c"))), 3)
