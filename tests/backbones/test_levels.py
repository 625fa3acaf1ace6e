"""Levels of categories: what training patients share is known, all else is one level; and columns nobody has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manydg.backbones import Levels, build_backbone
from manydg.data.context import add_context
from manydg.data.dataset import DomainDataset, InputSchema, from_arrays
from manydg.errors import ManyDGWarning

LEVELS = ["(unseen)", "(missing)", "a", "b", "c"]


def data(missing: bool = False) -> DomainDataset:
    """Level 3 is of patient 0 alone, level 4 of nobody."""
    codes = np.array([[2], [3], [1], [2], [2], [1]])
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    if missing:
        x[:, 1] = np.nan
    info = {"settings": {"categories": {"ward": LEVELS}, "features": ["age", "height"]}}
    return from_arrays({"x": x, "categories": codes}, [0, 1] * 3, [0, 0, 0, 1, 1, 1], info=info, missing=missing)


def test_only_levels_of_two_training_patients_are_known() -> None:
    levels = Levels((5,))
    levels.fit(data())
    assert levels({"categories": torch.tensor([[0], [1], [2], [3], [4], [7], [-1]])}).flatten().tolist() == [
        0, 1, 2, 0, 0, 0, 0
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "tabular"])
def test_a_network_tells_known_levels_apart_and_takes_all_others_for_one(name: str) -> None:
    backbone = build_backbone(name, InputSchema.of(data())).eval()
    backbone.fit_inputs(data())
    codes = torch.tensor([[0], [1], [2], [3], [4]])
    features = backbone({"x": torch.ones(5, 2), "categories": codes})
    same = [[bool(torch.equal(a, b)) for b in features] for a in features]
    assert same[0] == [True, False, False, True, True]
    assert not same[1][2]


@pytest.mark.parametrize("name", ["mlp", "tabular"])
def test_categories_alone_are_enough(name: str) -> None:
    info = {"settings": {"categories": {"ward": LEVELS}}}
    alone = from_arrays({"categories": np.arange(6)[:, None] % 3}, [0, 1] * 3, [0, 0, 0, 1, 1, 1], info=info)
    backbone = build_backbone(name, InputSchema.of(alone))
    backbone.fit_inputs(alone)
    assert backbone({"categories": torch.tensor([[1], [2]])}).shape == (2, backbone.output_size)


def test_context_is_made_of_numbers_alone() -> None:
    with_context = add_context(data(), parts=("relative",))
    assert with_context.columns["context"].shape == (6, 2)  # type: ignore[union-attr]
    backbone = build_backbone("mlp", InputSchema.of(with_context))
    assert backbone.for_samples_alone()({n: data().columns[n] for n in ("x", "categories")}).shape[0] == 6


def test_a_column_that_no_training_patient_has_is_left_out_by_name_even_if_new_patients_have_it() -> None:
    backbone = build_backbone("tabular", InputSchema.of(data(missing=True))).eval()
    with pytest.warns(ManyDGWarning, match="1 of 2 columns have no value for any training .* training: height"):
        backbone.fit_inputs(data(missing=True))
    rows = {"x": torch.tensor([[3.0, float("nan")], [3.0, 180.0]]), "categories": torch.full((2, 1), 2)}
    first, second = backbone(rows)
    assert torch.equal(first, second)
    backbone.train()
    backbone(rows).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in backbone.parameters() if p.grad is not None)
