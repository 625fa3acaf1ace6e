"""Splits by patient: disjoint, stable everywhere, saved without names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.data.info import DatasetInfo
from manydg.data.splits import (
    SIDES,
    Split,
    check_split,
    load_split,
    patient_folds,
    patient_labels,
    site_folds,
    split_named,
    split_patients,
    split_sites,
)
from manydg.errors import ConfigError, DataError, StorageError

few = settings(max_examples=50, deadline=None)
many_domains = st.lists(st.integers(0, 30), min_size=1, max_size=120).map(np.array)


def dataset_of(patients: list[str], shift: float = 0.0) -> DomainDataset:
    rows = np.arange(len(patients), dtype=np.float32)[:, None] + shift
    return from_arrays(rows, np.arange(len(patients)) % 2, patients)


@few
@given(many_domains, st.integers(0, 1000))
def test_each_sample_is_on_one_side_and_each_patient_too(domains: np.ndarray, seed: int) -> None:
    if len(set(domains.tolist())) < 3:
        return
    split = split_patients(domains, seed=seed)
    train, val, test = split
    assert sorted([*train, *val, *test]) == list(range(len(domains)))
    sides = [set(domains[side].tolist()) for side in (train, val, test)]
    assert all(sides)
    assert sum(map(len, sides)) == len(set.union(*sides))
    for side, found in zip(SIDES, sides, strict=True):
        assert set(split.patients(side).tolist()) == {str(patient) for patient in found}
        assert (np.diff(getattr(split, side)) > 0).all()
    check_split(split, domains)


@pytest.mark.parametrize(
    ("patients", "ratios", "sizes"),
    [
        (78, (0.8, 0.1, 0.1), (62, 8, 8)),
        (10, (0.8, 0.1, 0.1), (8, 1, 1)),
        (3, (0.8, 0.1, 0.1), (1, 1, 1)),
        (4, (0.98, 0.01, 0.01), (2, 1, 1)),
        (100, (0.5, 0.25, 0.25), (50, 25, 25)),
        (10, (0.9, 0.0, 0.1), (9, 0, 1)),
        (10, (8, 1, 1), (8, 1, 1)),
        (1, (1, 0, 0), (1, 0, 0)),
    ],
)
def test_sides_have_the_rounded_share_of_patients(
    patients: int, ratios: tuple[float, float, float], sizes: tuple[int, int, int]
) -> None:
    split = split_patients(np.repeat(np.arange(patients), 2), ratios)
    assert tuple(len(split.patients(side)) for side in SIDES) == sizes


def test_a_split_is_the_same_for_text_and_numbers_and_tensors_and_any_order_of_rows() -> None:
    domains = np.random.default_rng(0).integers(0, 40, 300)
    expected = split_patients(domains, seed=3)
    assert split_patients(domains.astype(str), seed=3) == expected
    assert split_patients(domains.astype(float), seed=3) == expected
    assert split_patients(torch.from_numpy(domains), seed=3) == expected
    assert split_patients(domains.tolist(), seed=3) == expected
    order = np.random.default_rng(1).permutation(300)
    shuffled = split_patients(domains[order], seed=3)
    for side in SIDES:
        assert shuffled.patients(side).tolist() == expected.patients(side).tolist()


def test_a_dataset_splits_by_its_patients_names() -> None:
    names = [f"p{number % 11}" for number in range(44)]
    assert split_patients(dataset_of(names), seed=1) == split_patients(names, seed=1)


def test_the_split_of_a_seed_never_changes() -> None:
    # Written down once: a change here would silently give every old result another test set.
    split = split_patients(np.arange(12), seed=0)
    assert [split.patients(side).tolist() for side in ("val", "test")] == [FROZEN_VAL, FROZEN_TEST]


FROZEN_VAL = ["9"]
FROZEN_TEST = ["2"]


def test_the_split_does_not_depend_on_pythonhashseed() -> None:
    program = (
        "from manydg.data.splits import split_patients\n"
        "print(split_patients([f'p{n % 50}' for n in range(200)], seed=4).test.tolist())"
    )
    outputs = set()
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_other_seeds_give_other_splits() -> None:
    domains = np.arange(100)
    assert len({split_patients(domains, seed=seed).test.tobytes() for seed in range(20)}) == 20


def test_patients_are_tested_about_equally_often_over_seeds() -> None:
    counts = np.zeros(20)
    for seed in range(400):
        counts[split_patients(np.arange(20), seed=seed).test] += 1
    # 400 draws of 2 of 20: 40 each, standard deviation 6.
    assert counts.sum() == 800
    assert (np.abs(counts - 40) < 25).all()


def test_too_few_patients_for_the_sides_is_an_error_that_says_how_many() -> None:
    with pytest.raises(DataError, match="needs at least 3 patients; there are 2"):
        split_patients([1, 1, 2])
    with pytest.raises(DataError, match="needs at least 3 patients; there is 1"):
        split_patients([1, 1])
    with pytest.raises(DataError, match="5 folds need at least 5 patients; there are 4"):
        patient_folds([1, 2, 3, 4])


@pytest.mark.parametrize("ratios", [(0.8, 0.2), (-0.1, 0.5, 0.6), (0, 0, 0), (np.nan, 1, 1)])
def test_impossible_ratios_are_refused(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="three shares"):
        split_patients(np.arange(10), ratios)  # type: ignore[arg-type]


def test_a_missing_patient_id_is_an_error() -> None:
    with pytest.raises(DataError, match="patient ids are missing"):
        split_patients([1.0, np.nan, 2.0])


@few
@given(many_domains, st.integers(3, 6), st.integers(0, 100))
def test_folds_test_and_validate_each_patient_exactly_once(domains: np.ndarray, folds: int, seed: int) -> None:
    patients = set(domains.astype(str).tolist())
    if len(patients) < folds:
        return
    splits = patient_folds(domains, folds, seed)
    assert len(splits) == folds
    for side in ("test", "val"):
        names = [name for split in splits for name in split.patients(side).tolist()]
        assert sorted(names) == sorted(patients)
    for split in splits:
        assert len(split.train) + len(split.val) + len(split.test) == len(domains)
        check_split(split, domains)
    sizes = [len(split.patients("test")) for split in splits]
    assert max(sizes) - min(sizes) <= 1


def test_two_folds_leave_nothing_to_train_on() -> None:
    with pytest.raises(ConfigError, match="3 or more"):
        patient_folds(np.arange(10), folds=2)


def test_a_saved_split_comes_back_the_same_and_names_no_patient(tmp_path: Path) -> None:
    names = [f"Maria Schmidt {number % 13}" for number in range(60)]
    dataset = dataset_of(names)
    split = split_patients(dataset, seed=2)
    path = split.save(tmp_path / "deep" / "split.json", dataset)
    assert "Schmidt" not in path.read_text()
    assert load_split(path, dataset) == split
    opened = dataset.save(tmp_path / "data")
    again = load_split(path, open_dataset(opened))
    assert again == split
    assert again.patients("val").tolist() == split.patients("val").tolist()
    assert [file.name for file in path.parent.iterdir()] == ["split.json"]


def test_a_split_of_another_dataset_is_an_error(tmp_path: Path) -> None:
    names = [f"p{number % 9}" for number in range(30)]
    dataset = dataset_of(names)
    path = split_patients(dataset).save(tmp_path / "split.json", dataset)
    with pytest.raises(DataError, match="split of another dataset"):
        load_split(path, dataset_of(names, shift=1.0))


def test_a_patient_on_two_sides_is_an_error_that_names_the_pseudonym(tmp_path: Path) -> None:
    dataset = dataset_of([f"secret-{number % 9}" for number in range(30)])
    path = split_patients(dataset).save(tmp_path / "split.json", dataset)
    content = json.loads(path.read_text())
    culprit = content["train"][0]
    content["test"].append(culprit)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"patient {culprit} is on two sides, train and test") as caught:
        load_split(path, dataset)
    assert "secret" not in str(caught.value)


def test_checking_a_split_made_by_hand_names_the_patient_or_its_rows() -> None:
    dataset = dataset_of(["ann", "ann", "bob", "cem", "cem"])
    codes = dataset.domains.numpy()
    by_hand = Split(np.array([0, 2]), np.array([3, 4]), np.array([1]), codes, dataset.patients)
    pseudonym = dataset.pseudonyms()[0]
    with pytest.raises(DataError, match=f"patient {pseudonym} is on two sides.*train .sample 0. and test .sample 1."):
        check_split(by_hand, dataset)
    with pytest.raises(DataError, match="a patient is on two sides") as caught:
        check_split(by_hand, np.array(["ann", "ann", "bob", "cem", "cem"]))
    assert "ann" not in str(caught.value)


def test_a_split_of_more_samples_than_there_are_is_an_error() -> None:
    split = split_patients(np.arange(10))
    with pytest.raises(DataError, match=r"names sample 9, but there are 5 samples"):
        check_split(split, np.arange(5))
    doubled = Split(np.array([0, 0]), np.array([1]), np.array([2]), np.arange(3), np.array(["a", "b", "c"]))
    with pytest.raises(DataError, match="twice on one side"):
        check_split(doubled, np.arange(3))


def test_part_of_a_patient_cannot_be_saved_as_a_split(tmp_path: Path) -> None:
    dataset = dataset_of(["ann", "ann", "bob", "cem", "cem"])
    part = Split(np.array([0]), np.array([2]), np.array([3, 4]), dataset.domains.numpy(), dataset.patients)
    with pytest.raises(DataError, match="whole patients"):
        part.save(tmp_path / "split.json", dataset)
    assert not (tmp_path / "split.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"schema": 1}', "damaged"),
        ('{"schema": 9, "dataset_hash": "", "train": [], "val": [], "test": []}', "schema version 9"),
    ],
)
def test_a_damaged_split_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "split.json").write_text(text)
    with pytest.raises(StorageError, match=message):
        load_split(tmp_path / "split.json", dataset_of(["a", "b", "c"]))


def test_a_missing_split_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no split at"):
        load_split(tmp_path / "nothing.json", dataset_of(["a", "b", "c"]))


def test_named_patients_go_where_they_are_named_and_the_rest_is_left_out() -> None:
    domains = np.array(["ann", "bob", "ann", "cem", "dan", "bob"])
    split = split_named(domains, train=["ann"], val=["cem"], test=["bob"])
    assert [side.tolist() for side in split] == [[0, 2], [3], [1, 5]]
    with pytest.raises(DataError, match="two sides"):
        split_named(domains, train=["ann"], val=["cem"], test=["ann"])
    with pytest.raises(DataError, match="named for val are not in the data"):
        split_named(domains, train=["ann"], val=["eve"], test=["bob"])


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 'testing'"):
        split_patients(np.arange(5)).patients("testing")


def _labelled(counts: list[int], kind: str = "classes") -> DomainDataset:
    """Patients of each label in turn, two samples each; of a binary target, one sample of a positive is negative."""
    label = np.repeat(np.arange(len(counts)), counts)
    y = np.stack([label, np.zeros_like(label) if kind == "binary" else label], axis=1).ravel()
    who = np.repeat(np.arange(len(label)), 2)
    names = ("no", "yes") if kind == "binary" else None
    return from_arrays(np.arange(len(y), dtype=np.float32)[:, None], y, who, kind=kind, names=names)


def _per_side(split: Split, dataset: DomainDataset) -> list[list[int]]:
    """Patients of each label on each side."""
    labels, codes = patient_labels(dataset), dataset.domains.numpy()
    return [np.bincount(labels[np.unique(codes[side])], minlength=int(labels.max()) + 1).tolist() for side in split]


def test_a_stratified_split_gives_every_side_its_share_of_each_label() -> None:
    """Ten of thirty patients are positive: of the 18, 6 and 6 patients of the sides, 6, 2 and 2."""
    dataset = _labelled([20, 10], "binary")
    for seed in range(5):
        split = split_patients(dataset, (0.6, 0.2, 0.2), seed, patient_labels(dataset))
        check_split(split, dataset)
        assert _per_side(split, dataset) == [[12, 6], [4, 2], [4, 2]]
    plain = [_per_side(split_patients(dataset, (0.6, 0.2, 0.2), seed), dataset) for seed in range(5)]
    assert any(sides != [[12, 6], [4, 2], [4, 2]] for sides in plain)


@few
@given(st.lists(st.integers(1, 15), min_size=2, max_size=4), st.integers(0, 100))
def test_a_stratified_split_has_the_sizes_of_a_plain_one(counts: list[int], seed: int) -> None:
    if sum(counts) < 3:
        return
    dataset = _labelled(counts)
    stratified, plain = (split_patients(dataset, seed=seed, labels=each) for each in (patient_labels(dataset), None))
    sizes = [[len(split.patients(side)) for side in SIDES] for split in (stratified, plain)]
    assert sizes[0] == sizes[1]
    for side, found in zip(sizes[0], _per_side(stratified, dataset), strict=True):
        # Ranks of one label stand together, and every run of ranks has its share of each side.
        assert np.abs(np.array(found) - np.array(counts) * side / sum(counts)).max() < 2


def test_stratified_folds_spread_each_label_over_the_groups() -> None:
    dataset = _labelled([10, 5])
    splits = patient_folds(dataset, 5, seed=2, labels=patient_labels(dataset))
    assert [_per_side(split, dataset)[2] for split in splits] == [[2, 1]] * 5
    assert sorted(row for split in splits for row in split.test) == list(range(len(dataset)))


def test_a_split_by_label_is_random_within_the_label() -> None:
    dataset = _labelled([20, 10])
    drawn = {tuple(split_patients(dataset, seed=s, labels=patient_labels(dataset)).patients("test")) for s in range(8)}
    assert len(drawn) == 8


def test_patients_of_several_labels_at_once_are_not_stratified() -> None:
    dataset = from_arrays(np.zeros((4, 1)), np.eye(4, 3, dtype=int), ["a", "a", "b", "b"], kind="multilabel")
    with pytest.raises(ConfigError, match="multi-label target have no single label"):
        patient_labels(dataset)


def of_sites(patients: int = 12, samples: int = 4) -> DomainDataset:
    """Patients p00 to p11 of the sites A, B, C and D in turn."""
    names = [f"p{number:02d}" for number in range(patients)]
    who = np.repeat(names, samples)
    info = DatasetInfo(sites={name: "ABCD"[number % 4] for number, name in enumerate(names)})
    return from_arrays(np.arange(len(who))[:, None], np.arange(len(who)) % 2, who, info=info)


def test_a_site_is_never_on_two_sides_and_no_patient_is_lost() -> None:
    data = of_sites()
    sites = data.sites()
    assert sites is not None
    for seed in range(5):
        split = split_sites(data, (0.5, 0.25, 0.25), seed)
        check_split(split, data)
        sides = [set(sites[data.domains.numpy()[rows]]) for rows in split]
        assert [len(side) for side in sides] == [2, 1, 1]
        assert set.union(*sides) == set("ABCD")
        assert sum(map(len, split)) == len(data)


def test_as_many_folds_as_sites_leave_each_out_once() -> None:
    data = of_sites()
    sites = data.sites()
    assert sites is not None
    tested = [set(sites[data.domains.numpy()[split.test]]) for split in site_folds(data, 4)]
    assert sorted(tested, key=str) == [{"A"}, {"B"}, {"C"}, {"D"}]
    assert len(site_folds(data, 4)[0].patients("test")) == 3


def test_a_dataset_that_does_not_know_its_sites_says_how_to_get_them() -> None:
    data = replace(of_sites(), info=DatasetInfo())
    with pytest.raises(DataError, match="--site COL"):
        split_sites(data, (0.8, 0.1, 0.1), 0)
    few = replace(of_sites(), info=DatasetInfo(sites={f"p{number:02d}": "AB"[number % 2] for number in range(12)}))
    with pytest.raises(DataError, match=r"2 site\(s\)"):
        split_sites(few, (0.8, 0.1, 0.1), 0)
    with pytest.raises(DataError, match="5 folds need at least 5 sites; there are 4"):
        site_folds(of_sites(), 5)


def test_sites_are_kept_on_disk(tmp_path: Path) -> None:
    data = of_sites()
    data.save(tmp_path / "data")
    opened = open_dataset(tmp_path / "data")
    assert opened.info.sites == data.info.sites
    assert opened.select(np.arange(8)).sites().tolist() == ["A", "B"]  # type: ignore[union-attr]


def test_values_have_no_classes_to_stratify_by() -> None:
    data = from_arrays(np.zeros((4, 1)), [1.0, 2.5, 3.0, 4.0], [0, 1, 2, 3], kind="regression")
    with pytest.raises(ConfigError, match="a regression target has no classes to stratify patients by"):
        patient_labels(data)
