"""Categories in boosted trees: splits by sets of levels, as tensors, score exactly as the libraries do."""

from __future__ import annotations

from typing import Any

import catboost
import lightgbm
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier

from manydg.algorithms import build_algorithm
from manydg.algorithms._forest import NODE, BoostedTrees, Forest, Tree, split_by_codes
from manydg.backbones import build_backbone
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.targets import target_of

ROWS, ROUNDS, LEVELS = 1200, 12, 40
Array = npt.NDArray[Any]


def table(seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    codes, x = rng.integers(2, LEVELS, (ROWS, 1)), rng.normal(size=(ROWS, 2)).astype(np.float32)
    # Levels next to each other have nothing in common.
    score = np.sin(codes[:, 0] * 7.3) + 0.5 * x[:, 0] + rng.normal(scale=0.3, size=ROWS)
    return codes, x, np.searchsorted([-0.4, 0.4], score)


def dataset(classes: int) -> DomainDataset:
    codes, x, y = table(0)
    info = {"settings": {"categories": {"ward": [str(level) for level in range(LEVELS)]}}}
    labels = y if classes == 3 else (y > 0).astype(int)
    return from_arrays({"x": x, "categories": codes}, labels, np.arange(ROWS) % 10, info=info)


def fitted(name: str, data: DomainDataset) -> BoostedTrees:
    backbone = build_backbone("mlp", InputSchema.of(data))
    model = build_algorithm(name, backbone, target_of(data.target), 10, {"rounds": ROUNDS})
    assert isinstance(model, BoostedTrees)
    model.fit_inputs(data)
    model.fit_whole(data, seed=3)
    return model


def reference(name: str, data: DomainDataset, codes: Array, x: Array) -> Array:
    """Raw scores of new samples by the library itself."""
    old = np.concatenate([np.asarray(data.columns["categories"]), np.asarray(data.columns["x"])], 1).astype(np.float32)
    new, y = np.concatenate([codes, x], 1).astype(np.float32), data.targets.numpy()
    if name == "boosting":
        model = HistGradientBoostingClassifier(
            max_iter=ROUNDS, categorical_features=[0], early_stopping=False, random_state=3
        )
        return np.asarray(model.fit(old, y).decision_function(new))
    several = data.target.size > 2
    if name == "catboost":
        columns = [np.concatenate([part[:, :1] == np.unique(old[:, 0]), part[:, 1:]], 1) for part in (old, new)]
        forest = catboost.CatBoostClassifier(
            iterations=ROUNDS, learning_rate=0.1, depth=6, l2_leaf_reg=3.0, random_seed=3, thread_count=1, rsm=1.0,
            loss_function="MultiClass" if several else "Logloss", allow_writing_files=False, logging_level="Silent",
        )  # fmt: skip
        return np.asarray(forest.fit(columns[0], y).predict(columns[1], prediction_type="RawFormulaVal"))
    options: dict[str, Any] = {"objective": "multiclass", "num_class": 3} if several else {"objective": "binary"}
    known = lightgbm.Dataset(old, y, categorical_feature=[0])  # type: ignore[list-item]
    options |= {"seed": 3, "verbosity": -1, "num_threads": 1}
    return np.asarray(lightgbm.train(options, known, ROUNDS).predict(new, raw_score=True))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["boosting", "lightgbm", "catboost"])
def test_trees_of_categories_score_as_their_library_does(name: str, classes: int) -> None:
    data = dataset(classes)
    model, (codes, x, _) = fitted(name, data), table(1)
    scores = model.predict({"x": torch.from_numpy(x), "categories": torch.from_numpy(codes)}).numpy()
    expected = reference(name, data, codes, x)
    if classes == 2:
        scores = scores[:, 1] - scores[:, 0]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    feature = set(model.forest.feature.tolist())
    assert 0 in feature, "the category is used"


def test_an_unseen_level_has_one_score_whatever_its_code() -> None:
    model = fitted("boosting", dataset(2))
    new = {"x": torch.zeros(3, 2), "categories": torch.tensor([[0], [1], [900]])}
    assert len({tuple(row) for row in model.predict(new).tolist()}) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_thresholds_send_every_code_the_way_of_its_set(left: list[bool]) -> None:
    nodes = np.zeros(3, NODE)
    nodes["left"][0], nodes["right"][0], nodes["value"] = 1, 2, [0.0, 1.0, -1.0]
    nodes["depth"], nodes["is_leaf"] = [0, 1, 1], [False, True, True]
    forest = Forest(1)
    forest.set_trees([Tree(split_by_codes(nodes, {0: np.array(left)}), 0)], np.zeros(1))
    scores = forest(torch.arange(len(left), dtype=torch.float32).unsqueeze(1)).flatten().tolist()
    assert scores == [1.0 if way else -1.0 for way in left]
