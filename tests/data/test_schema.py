"""The inputs' schema: what a model remembers of its data, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from manydg.data.columns import Ragged
from manydg.data.dataset import ColumnSchema, DomainDataset, InputSchema, from_arrays
from manydg.errors import DataError

SETTINGS: dict[str, Any] = {"rate": 100.0, "features": ["age", "pulse"]}


def dataset(width: int = 2, settings: dict[str, Any] | None = None, **more: Any) -> DomainDataset:
    inputs = {"x": np.zeros((3, width)), "codes": Ragged.from_rows([[[1]], [[2, 3], []], []]), **more}
    info = {"settings": settings or SETTINGS, "vocabularies": {"codes": ["<unknown>", "a", "b", "c"]}}
    return from_arrays(inputs, [0, 1, 0], ["p", "q", "r"], info=info)


def test_a_schema_says_type_shape_nesting_and_vocabulary_sizes() -> None:
    schema = InputSchema.of(dataset())
    assert schema.columns["x"] == ColumnSchema("float32", (2,), 0)
    assert schema.columns["codes"] == ColumnSchema("int64", (), 2)
    assert schema.sizes == {"codes": 4}
    assert schema.settings == SETTINGS


def test_a_schema_survives_json() -> None:
    schema = InputSchema.of(dataset())
    assert InputSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_a_selection_has_the_schema_of_the_whole() -> None:
    assert InputSchema.of(dataset().select(np.array([1]))) == InputSchema.of(dataset())


def test_data_of_the_same_schema_are_accepted() -> None:
    InputSchema.of(dataset()).check(InputSchema.of(dataset()))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dataset(width=3), r"input 'x' is 3 float32 a sample here, but the model was trained on 2"),
        (dataset(y=np.zeros((3, 1))), r"not known to it: \['y'\]"),
        (dataset(width=1, settings={"rate": 100.0, "features": ["age"]}), r"missing here: \['pulse'\]"),
        (dataset(settings={"rate": 200.0}), "rate is 200.0 here, but the model was trained on 100.0"),
        (
            dataset(settings={"features": ["age", "sodium"]}),
            r"missing here: \['pulse'\], not known to it: \['sodium'\]",
        ),
        (dataset(settings={"features": ["pulse", "age"]}), "features have another order here"),
    ],
)
def test_other_data_are_refused_with_the_difference(other: DomainDataset, message: str) -> None:
    with pytest.raises(DataError, match=message):
        InputSchema.of(dataset()).check(InputSchema.of(other))


def test_a_column_that_is_not_there_is_named() -> None:
    only_x = from_arrays(np.zeros((3, 2)), [0, 1, 0], ["p", "q", "r"])
    with pytest.raises(DataError, match=r"missing here: \['codes'\]"):
        InputSchema.of(dataset()).check(InputSchema.of(only_x))


def test_a_vocabulary_of_another_size_is_refused() -> None:
    info = {"settings": SETTINGS, "vocabularies": {"codes": ["<unknown>", "a"]}}
    columns = {name: dataset().column(name) for name in ("x", "codes")}
    other = from_arrays(columns, [0, 1, 0], ["p", "q", "r"], info=info)
    with pytest.raises(DataError, match="'codes' has 2 entries here, but the model was trained on 4"):
        InputSchema.of(dataset()).check(InputSchema.of(other))
