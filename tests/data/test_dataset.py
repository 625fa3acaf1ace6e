"""DomainDataset: gathering, selecting, hashing and pseudonyms."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.data.info import TargetSpec
from manydg.data.storage import DatasetWriter
from manydg.errors import DataError

CODES = [[[1, 2], [3]], [], [[4]], [[], [5, 6]], [[7]], [[8, 9, 10]]]
NAMES = ["zoe", "ann", "zoe", "bob", "ann", "christopher"]


def mixed(**changes: object) -> DomainDataset:
    """Dense and nested columns of four patients."""
    arguments = {
        "inputs": {"x": np.arange(12.0).reshape(6, 2), "codes": Ragged.from_rows(CODES)},
        "targets": np.array([0, 1, 2, 0, 1, 2]),
        "patients": NAMES,
        "times": np.arange(6.0),
        "names": ("wake", "sleep", "rem"),
        **changes,
    }
    return from_arrays(**arguments)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_taking_from_a_selection_is_taking_from_the_whole(chosen: list[int], data: st.DataObject) -> None:
    dataset = mixed()
    view = dataset.select(np.array(chosen, dtype=np.int64))
    again = data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=5)) if chosen else []
    for candidate in (view, view.compact()):
        batch = candidate.take(torch.tensor(again, dtype=torch.int64))
        rows = [chosen[index] for index in again]
        assert batch.inputs["x"].tolist() == [[2.0 * row, 2.0 * row + 1] for row in rows]
        codes = batch.inputs["codes"]
        assert isinstance(codes, Ragged)
        assert codes.to_rows() == [CODES[row] for row in rows]
        assert batch.targets.tolist() == [row % 3 for row in rows]
        assert candidate.patients[batch.domains.numpy()].tolist() == [NAMES[row] for row in rows]


def test_a_selection_of_a_selection_reaches_the_right_rows() -> None:
    view = mixed().select(torch.tensor([5, 3, 1, 0])).select(torch.tensor([3, 0]))
    assert view.column("x").tolist() == [[0, 1], [10, 11]]
    assert view.times is not None
    assert view.times.tolist() == [0, 5]
    assert view.patients.tolist() == ["christopher", "zoe"]
    assert view.domains.tolist() == [1, 0]


def test_a_mask_selects_where_it_is_true() -> None:
    view = mixed().select(torch.tensor([False, True, False, True, False, False]))
    assert view.column("x").tolist() == [[2, 3], [6, 7]]
    with pytest.raises(DataError, match="mask of 2 entries for 6 samples"):
        mixed().select(np.array([True, False]))


def test_a_subset_holds_all_samples_of_its_patients_and_no_others() -> None:
    subset = mixed().subset(["ann", "zoe"])
    assert subset.patients.tolist() == ["ann", "zoe"]
    assert subset.patients[subset.domains.numpy()].tolist() == ["zoe", "ann", "zoe", "ann"]
    assert subset.column("x")[:, 0].tolist() == [0, 2, 4, 8]  # type: ignore[index]


def test_asking_for_an_unknown_patient_is_an_error_that_names_nobody() -> None:
    with pytest.raises(DataError, match="1 of the 2 patients") as caught:
        mixed().subset(["ann", "mallory"])
    assert "mallory" not in str(caught.value)


def test_moving_to_a_device_keeps_everything() -> None:
    moved = mixed().select(torch.tensor([3, 0])).to("cpu")
    assert moved.rows is None
    assert moved.column("x").tolist() == [[6, 7], [0, 1]]
    assert moved.content_hash() == mixed().select(torch.tensor([3, 0])).content_hash()


def test_a_batch_says_how_many_pairs_it_holds() -> None:
    batch = mixed().take(torch.tensor([0, 1, 2, 4, 5]), pairs=2).to("cpu")
    assert (len(batch), batch.pairs) == (5, 2)


def test_the_content_hash_changes_with_any_value_label_patient_time_or_name() -> None:
    x = np.arange(12.0).reshape(6, 2)
    x[5, 1] += 1e-3
    other_codes = [*CODES[:5], [[8, 9, 11]]]
    other_nesting = [*CODES[:5], [[8, 9], [10]]]
    changed = [
        mixed(inputs={"x": x, "codes": Ragged.from_rows(CODES)}),
        mixed(inputs={"x": np.arange(12.0).reshape(6, 2), "codes": Ragged.from_rows(other_codes)}),
        mixed(inputs={"x": np.arange(12.0).reshape(6, 2), "codes": Ragged.from_rows(other_nesting)}),
        mixed(inputs={"y": np.arange(12.0).reshape(6, 2), "codes": Ragged.from_rows(CODES)}),
        mixed(targets=np.array([0, 1, 2, 0, 1, 1])),
        mixed(patients=[*NAMES[:5], "christophen"]),
        mixed(patients=["ann", *NAMES[1:]]),
        mixed(times=np.array([0, 1, 2, 3, 4, 6.0])),
        mixed(times=None),
        mixed(names=("wake", "sleep", "REM")),
        mixed().select(torch.tensor([0, 1, 2, 3, 5, 4])),
        mixed(),
    ]
    assert len({dataset.content_hash() for dataset in changed}) == len(changed)
    assert mixed().content_hash() == mixed().content_hash()


def test_what_is_merely_said_about_the_data_does_not_change_the_content_hash() -> None:
    assert mixed(info={"settings": {"rate": 1}}).content_hash() == mixed(info={"settings": {"rate": 2}}).content_hash()


def test_the_content_hash_is_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    # The names that are left are shorter than the longest one of the whole dataset.
    for number, dataset in enumerate([mixed(), mixed().subset(["bob", "zoe"])]):
        folder = dataset.save(tmp_path / str(number))
        assert open_dataset(folder).content_hash() == dataset.content_hash()


def test_pseudonyms_hold_no_name_and_survive_selection_and_storage(tmp_path: Path) -> None:
    dataset = mixed()
    alias = dict(zip(dataset.patients.tolist(), dataset.pseudonyms(), strict=True))
    assert len(set(alias.values())) == 4
    assert all(name not in pseudonym for name, pseudonym in alias.items())
    folder = dataset.save(tmp_path / "whole")
    part = dataset.subset(["bob", "zoe"])
    for other in (part, open_dataset(folder), open_dataset(part.save(tmp_path / "part")), dataset.to("cpu")):
        for name, pseudonym in zip(other.patients.tolist(), other.pseudonyms(), strict=True):
            assert alias[name] == pseudonym


def test_the_same_name_in_another_dataset_has_another_pseudonym() -> None:
    assert not set(mixed().pseudonyms()) & set(mixed(targets=np.array([1, 1, 2, 0, 1, 2])).pseudonyms())


def test_the_key_of_pseudonyms_does_not_follow_from_the_data(tmp_path: Path) -> None:
    assert not set(mixed().pseudonyms()) & set(mixed().pseudonyms())
    keys = set()
    for name in ("one", "two"):
        with DatasetWriter(tmp_path / name, TargetSpec("binary", ("no", "yes"))) as writer:
            writer.append({"x": np.zeros((2, 1), np.float32)}, np.array([0, 1]), ["ann", "bob"])
        keys.add(open_dataset(tmp_path / name).pseudonym_key)
    assert len(keys) == 2


def test_a_folder_written_again_with_the_same_content_keeps_its_pseudonyms(tmp_path: Path) -> None:
    folder = mixed().save(tmp_path / "data")
    before = open_dataset(folder).pseudonyms()
    mixed().save(folder, overwrite=True)
    assert open_dataset(folder).pseudonyms() == before
    mixed(targets=np.array([1, 1, 2, 0, 1, 2])).save(folder, overwrite=True)
    assert not set(open_dataset(folder).pseudonyms()) & set(before)


def test_a_hundred_thousand_patients_have_different_pseudonyms() -> None:
    patients = np.arange(100_000)
    dataset = from_arrays(np.zeros((len(patients), 1)), patients % 2, patients)
    assert len(set(dataset.pseudonyms())) == len(patients)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "5 targets, but 6 patient ids"),
        ({"times": torch.zeros(7)}, "7 times, but 6 patient ids"),
        ({"columns": {}}, "at least one input column"),
        ({"columns": {"x": torch.zeros(4, 1)}}, "column 'x' has 4 rows"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataclasses.replace(mixed(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("colours", ("a",), "unknown target kind 'colours'"),
        ("binary", ("a", "b", "c"), "two class names"),
        ("classes", ("a", "a"), "different"),
    ],
)
def test_impossible_targets_are_refused(kind: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TargetSpec(kind, names)


def test_the_text_form_names_no_patient() -> None:
    assert repr(mixed()) == "DomainDataset(6 samples of 4 patients, inputs x, codes; classes of 3)"


def test_a_memory_map_that_may_only_be_read_is_shared_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = from_arrays(x, np.arange(6) % 2, np.arange(6))
    stored = data.column("x")
    assert isinstance(stored, torch.Tensor)
    assert np.shares_memory(stored.numpy(), x)
