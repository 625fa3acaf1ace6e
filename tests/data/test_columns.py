"""Ragged columns against plain Python lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data import columns
from manydg.data.columns import Ragged, check_column, offsets_from_lengths, take
from manydg.errors import DataError

few = settings(max_examples=60, deadline=None)
numbers = st.integers(-50, 50)
flat_rows = st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=8)
nested_rows = st.lists(st.lists(st.lists(numbers, max_size=3), max_size=4), min_size=1, max_size=6)


def nested_column(rows: list[list[list[int]]]) -> Ragged:
    """Two levels, also where every row is empty (from_rows cannot know the depth of nothing)."""
    inner = [codes for row in rows for codes in row]
    items = torch.tensor([code for codes in inner for code in codes], dtype=torch.int64)
    values = Ragged(items, offsets_from_lengths(torch.tensor([len(codes) for codes in inner], dtype=torch.int64)))
    return Ragged(values, offsets_from_lengths(torch.tensor([len(row) for row in rows], dtype=torch.int64)))


def draw_indices(data: st.DataObject, count: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, count - 1), max_size=10))


@few
@given(flat_rows, st.data())
def test_taking_rows_is_indexing_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    indices = draw_indices(data, len(rows))
    column = Ragged.from_rows(rows)
    taken = column.take(torch.tensor(indices, dtype=torch.int64))
    assert column.to_rows() == rows
    assert taken.to_rows() == [rows[index] for index in indices]
    check_column("x", taken)


@few
@given(nested_rows, st.data())
def test_taking_nested_rows_is_indexing_a_nested_list(rows: list[list[list[int]]], data: st.DataObject) -> None:
    indices = draw_indices(data, len(rows))
    column = nested_column(rows)
    taken = take(column, torch.tensor(indices, dtype=torch.int64))
    assert isinstance(taken, Ragged)
    assert taken.to_rows() == [rows[index] for index in indices]
    check_column("x", taken)


@few
@given(flat_rows, numbers)
def test_padding_lays_each_row_out_from_the_left(rows: list[list[int]], fill: int) -> None:
    padded, present = Ragged.from_rows(rows).pad(fill=fill)
    longest = max(map(len, rows))
    assert padded.tolist() == [row + [fill] * (longest - len(row)) for row in rows]
    assert present.tolist() == [[True] * len(row) + [False] * (longest - len(row)) for row in rows]


@few
@given(flat_rows)
def test_each_item_knows_its_row_and_its_place(rows: list[list[int]]) -> None:
    column = Ragged.from_rows(rows)
    expected = [(row, place) for row, items in enumerate(rows) for place in range(len(items))]
    found = list(zip(column.row_of_item().tolist(), column.position_of_item().tolist(), strict=True))
    assert found == expected
    assert column.lengths.tolist() == [len(row) for row in rows]


def test_padding_embeddings_keeps_them_apart_and_lets_gradients_through() -> None:
    column = Ragged.from_rows([[1, 2], [], [3]])
    embedded = torch.arange(6.0).reshape(3, 2).requires_grad_()
    padded, present = column.pad(embedded)
    assert padded.tolist() == [[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[4, 5], [0, 0]]]
    assert present.tolist() == [[True, True], [False, False], [True, False]]
    (padded * torch.tensor([[[1.0], [2.0]]])).sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.tolist() == [[1, 1], [2, 2], [1, 1]]


def test_items_may_have_a_shape_of_their_own() -> None:
    column = Ragged(torch.arange(12.0).reshape(3, 2, 2), torch.tensor([0, 1, 3]))
    assert column.take(torch.tensor([1])).to_rows() == [[[[4, 5], [6, 7]], [[8, 9], [10, 11]]]]


def test_a_dense_column_is_gathered_by_position() -> None:
    column = torch.arange(6).reshape(3, 2)
    assert take(column, torch.tensor([2, 0, 2])).tolist() == [[4, 5], [0, 1], [4, 5]]


def test_a_nested_column_is_not_padded_before_its_items_are_pooled() -> None:
    with pytest.raises(DataError, match="pool or embed"):
        Ragged.from_rows([[[1], [2]]]).pad()


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 2]), "from 0 to 2"),
        (torch.zeros(3), torch.tensor([1, 3]), "from 1 to 3"),
        (torch.zeros(3), torch.tensor([0, 3, 2, 3]), "offsets must rise"),
        (torch.zeros(3), torch.tensor([0.0, 3.0]), "int64"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64), "rows \\+ 1"),
    ],
)
def test_offsets_that_do_not_describe_the_values_are_refused(values: Any, offsets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_column("x", Ragged(values, offsets))


def test_bad_inner_offsets_are_found_too() -> None:
    inner = Ragged(torch.zeros(3), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="number of items \\(3\\)"):
        check_column("x", Ragged(inner, torch.tensor([0, 1])))


@few
@given(st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62), max_size=40))
def test_many_values_are_told_apart_as_few_are(listed: list[int]) -> None:
    values = np.array(listed, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_MANY_VALUES", -1)
        many = columns.distinct(values)
    for one, other in zip(columns.distinct(values), many, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
