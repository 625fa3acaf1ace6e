"""From arrays to a dataset: what is understood, and what is refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from manydg.data.columns import Ragged
from manydg.data.dataset import from_arrays
from manydg.errors import DataError

X = np.arange(8.0).reshape(4, 2)
WHO = [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("targets", "kind", "names", "codes"),
    [
        ([0, 1, 1, 0], "binary", ("0", "1"), [0, 1, 1, 0]),
        ([False, True, True, False], "binary", ("0", "1"), [0, 1, 1, 0]),
        ([0.0, 1.0, 1.0, 0.0], "binary", ("0", "1"), [0, 1, 1, 0]),
        ([3, 7, 7, 5], "classes", ("3", "5", "7"), [0, 2, 2, 1]),
        ([1, 2, 2, 1], "classes", ("1", "2"), [0, 1, 1, 0]),
        (["W", "N2", "W", "R"], "classes", ("N2", "R", "W"), [2, 0, 2, 1]),
        (np.array(["b", "a", "b", "b"], dtype=object), "classes", ("a", "b"), [1, 0, 1, 1]),
    ],
)
def test_the_kind_and_names_are_read_from_the_labels(
    targets: Any, kind: str, names: tuple[str, ...], codes: list[int]
) -> None:
    dataset = from_arrays(X, targets, WHO)
    assert (dataset.target.kind, dataset.target.names, dataset.targets.tolist()) == (kind, names, codes)


def test_a_matrix_is_votes_or_several_labels() -> None:
    votes = from_arrays(X, [[3, 0], [1, 2], [0, 4], [5, 5]], WHO)
    labels = from_arrays(X, [[1, 0], [1, 1], [0, 0], [0, 1]], WHO, names=["aspirin", "heparin"])
    assert (votes.target.kind, votes.target.names) == ("votes", ("0", "1"))
    assert (labels.target.kind, labels.target.names) == ("multilabel", ("aspirin", "heparin"))
    assert from_arrays(X, [[1, 0], [1, 0], [0, 1], [0, 1]], WHO, kind="votes").target.kind == "votes"


def test_given_names_fix_the_codes() -> None:
    dataset = from_arrays(X, ["REM", "wake", "wake", "REM"], WHO, names=["wake", "N1", "REM"])
    assert dataset.targets.tolist() == [2, 0, 0, 2]
    assert from_arrays(X, [0, 2, 2, 0], WHO, names=["wake", "N1", "REM"]).target.size == 3


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        ([1, 1, 1, 1], {}, r"all 4 targets are the same class \('1'\)"),
        ([0.5, 1.2, 0.1, 3.3], {}, "say --kind regression"),
        ([0, 1, np.nan, 1], {}, "1 targets are missing or not finite"),
        (["a", None, "b", "a"], {}, "some targets are missing"),
        (pd.array(["a", None, "b", "a"], dtype="string"), {}, "some targets are missing"),
        (pd.array([True, None, False, True], dtype="boolean"), {}, "some targets are missing"),
        ([["a"], ["a", "b"], ["b"], ["a"]], {}, "targets have rows of different lengths"),
        ([0, 1, 2, 1], {"kind": "binary"}, "binary target has two values; these have 3"),
        ([0, 1, 2, 1], {"kind": "votes"}, "matrix"),
        ([[0, 1]] * 4, {"kind": "classes"}, "one-dimensional"),
        ([[0, 2]] * 4, {"kind": "multilabel"}, "only 0 and 1"),
        ([[0, 2], [3, -1], [1, 1], [1, 1]], {}, "votes cannot be negative; row 1"),
        ([[0, 2], [3, 1], [0, 0], [1, 1]], {}, "row 2 has no votes"),
        ([["a", "b"]] * 4, {}, "votes or 0 and 1; this one has type"),
        ([0, 1, 5, 1], {"names": ["a", "b", "c"]}, "target 5 in row 2 is outside 0 to 2"),
        ([0, -1, 2, 1], {"names": ["a", "b", "c"]}, "target -1 in row 1"),
        (["a", "z", "b", "a"], {"names": ["a", "b"]}, r"\['z'\] are not among the class names"),
        ([0, 1, 2, 1], {"kind": "ordinal"}, "unknown target kind 'ordinal'"),
        (np.array(["2020-01-01"] * 4, dtype="datetime64[D]"), {}, "targets have type datetime64"),
        ([[0, 3]] * 4, {"names": ["only"]}, "1 class names for 2 target columns"),
        (np.zeros((4, 2, 2)), {}, r"\(rows,\) or \(rows, K\)"),
    ],
)
def test_labels_out_of_range_or_of_the_wrong_type_are_refused(
    targets: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(X, targets, WHO, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    x = X.copy()
    x[2, 1] = bad
    with pytest.raises(DataError, match=r"input 'x' holds 1 values that are not finite, the first in row 2, position"):
        from_arrays(x, [0, 1, 1, 0], WHO)
    with pytest.raises(DataError, match="not finite"):
        from_arrays({"x": Ragged(torch.tensor(x[:, 1]), torch.arange(5))}, [0, 1, 1, 0], WHO)


def test_missing_values_may_be_kept_but_infinity_may_not() -> None:
    x = X.copy()
    x[2, 1] = np.nan
    dataset = from_arrays(x, [0, 1, 1, 0], WHO, missing=True)
    assert torch.isnan(dataset.columns["x"]).nonzero().tolist() == [[2, 1]]  # type: ignore[arg-type]
    assert dataset.info.settings["missing"] is True
    x[0, 0] = np.inf
    with pytest.raises(DataError, match="1 values that are not finite, the first in row 0"):
        from_arrays(x, [0, 1, 1, 0], WHO, missing=True)


@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4", "longdouble"])
def test_measurements_are_stored_as_float32(dtype: str) -> None:
    column = from_arrays(X.astype(dtype), [0, 1, 1, 0], WHO).column("x")
    assert isinstance(column, torch.Tensor)
    assert column.dtype == torch.float32
    assert column.tolist() == X.tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", ">i8", "bool"])
def test_whole_numbers_are_stored_as_int64(dtype: str) -> None:
    column = from_arrays((X > 3).astype(dtype), [0, 1, 1, 0], WHO).column("x")
    assert isinstance(column, torch.Tensor)
    assert column.dtype == torch.int64
    assert column.tolist() == (X > 3).astype(int).tolist()


@pytest.mark.parametrize(
    ("inputs", "patients", "message"),
    [
        (np.array([["a"], ["b"], ["c"], ["d"]]), WHO, "inputs are numbers"),
        (np.array(3.0), WHO, "single number"),
        (X[:, :0], WHO, r"input 'x' has shape \(4, 0\): there is nothing in it"),
        (X[:3], WHO, "column 'x' has 3 rows, but there are 4 patient ids"),
        (X, [1, 1, None, 2], "patient ids are missing"),
        (X, [1.0, 1.0, np.nan, 2.0], "patient ids are missing"),
        (X, [[1], [1], [2], [2]], r"one-dimensional.*\(4, 1\)"),
        (X, [1, 1, 2], "4 rows, but there are 3 patient ids"),
    ],
)
def test_inputs_and_patients_that_make_no_sense_are_refused(inputs: Any, patients: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(inputs, [0, 1, 1, 0], patients)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_arrays_that_may_only_be_read_are_taken_without_a_warning(kind: type) -> None:
    """As those of polars are; torch warns of the first one in a process, unless it is asked to warn of each."""
    arrays = [X.astype(kind), np.array([0, 1, 1, 0]), np.array(WHO), np.arange(4.0)]
    for array in arrays:
        array.setflags(write=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        data = from_arrays(*arrays[:3], times=arrays[3])
    finally:
        torch.set_warn_always(always)
    assert data.times is not None
    assert data.times.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0, np.nan, 1, np.inf], r"time is missing in row 1 \(the first row is 0\): fill it in or leave the row out"),
        (["noon", "one", "two", "three"], "times are numbers"),
    ],
)
def test_a_sample_without_a_time_is_refused_where_there_are_times(times: Any, message: str) -> None:
    # Training would end with predictions that are not finite, and blame the learning rate.
    with pytest.raises(DataError, match=message):
        from_arrays(X, [0, 1, 1, 0], WHO, times=times)


def test_no_samples_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="not a single target"):
        from_arrays(np.zeros((0, 2)), [], [])


def test_patients_given_as_whole_floats_are_the_same_as_integers() -> None:
    assert from_arrays(X, [0, 1, 1, 0], [7.0, 7.0, 12.0, 12.0]).patients.tolist() == ["7", "12"]
    assert from_arrays(X, [0, 1, 1, 0], torch.tensor([7, 7, 12, 12])).patients.tolist() == ["7", "12"]


def test_numbers_are_values_where_that_is_asked_for() -> None:
    frame = pl.DataFrame({"x": [1.0, 2.0, 3.0], "who": ["a", "b", "c"], "days": [1.5, 2.0, 4.0]})
    data = from_arrays(frame, "days", "who", kind="regression")
    assert repr(data) == "DomainDataset(3 samples of 3 patients, inputs x; regression of days)"
    assert data.targets.tolist() == [1.5, 2.0, 4.0]
    assert from_arrays(np.zeros((2, 1)), [1, 4], [0, 1], kind="regression").target.names == ("value",)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([1.0, math.nan], "1 targets are missing or not finite"),
        ([2.0, 2.0], "all 2 targets are 2: there is nothing to learn"),
        (["a", "b"], "'regression' targets are numbers"),
        ([[1.0], [2.0]], "one-dimensional"),
        ([1e300, 1.0], "too large for float32"),
    ],
)
def test_values_that_cannot_be_learned_are_refused(targets: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(np.zeros((2, 1)), targets, [0, 1], kind="regression")
