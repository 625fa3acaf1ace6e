"""IIIC arrays to a dataset: layouts, vote rules, artefacts, bad input and the twin."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from manydg import sources
from manydg.data.dataset import open_dataset
from manydg.errors import ConfigError, DataError, ManyDGError, StorageError

ROWS = 9
VOTES = np.array(
    [[8, 0, 5, 3, 2, 1], [0, 5, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0], [0, 0, 9, 0, 0, 0], [1, 1, 1, 1, 0, 0],
     [0, 0, 0, 6, 0, 0], [0, 0, 0, 0, 7, 1], [0, 0, 0, 0, 0, 5], [2, 2, 2, 2, 2, 2]]
)  # fmt: skip
KEYS = np.array(["a", "a", "a", "b", "b", "b", "c", "c", "c"])


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Nine samples of three patients; rows 2 and 4 have four votes."""
    folder = tmp_path / "raw"
    folder.mkdir()
    signals = np.random.default_rng(0).normal(0, 30, (ROWS, 16, 2000)).astype(np.float32)
    np.save(folder / "signals.npy", signals)
    np.save(folder / "votes.npy", VOTES)
    np.save(folder / "patients.npy", KEYS)
    return folder


def change(folder: Path, name: str, edit: Any) -> None:
    array = np.load(folder / f"{name}.npy")
    edited = edit(array)
    np.save(folder / f"{name}.npy", array if edited is None else edited)


def fails(raw: Path, kind: type[ManyDGError], words: str, **options: Any) -> None:
    before = sorted(path.name for path in raw.parent.iterdir())
    with pytest.raises(kind, match=words):
        sources.prepare("iiic", raw, raw.parent / "out", **options)
    assert sorted(path.name for path in raw.parent.iterdir()) == before


def test_samples_with_fewer_than_five_votes_are_left_out_and_counted(raw: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("iiic", raw, tmp_path / "out"))
    kept = [0, 1, 3, 5, 6, 7, 8]
    assert data.targets.tolist() == VOTES[kept].astype(float).tolist()
    assert data.target.kind == "votes"
    assert data.target.names == ("OTHER", "ESZ", "LPD", "GPD", "LRDA", "GRDA")
    assert data.patients[data.domains.numpy()].tolist() == KEYS[kept].tolist()
    np.testing.assert_array_equal(data.column("signal").numpy(), np.load(raw / "signals.npy")[kept])
    assert [step.to_json() for step in data.info.cohort_flow] == [
        {"step": "samples found", "patients": 3, "samples": 9},
        {"step": "at least 5 votes", "patients": 3, "samples": 7, "left_out": 2},
        {"step": "finite signal", "patients": 3, "samples": 7, "left_out": 0},
    ]
    assert data.info.settings["rate"] == 200.0
    assert len(data.info.settings["channels"]) == 16


def test_the_checksum_of_the_signals_is_that_of_the_file(raw: Path, tmp_path: Path) -> None:
    for order in ("C", "F"):
        change(raw, "signals", lambda array, order=order: np.asarray(array, order=order))
        out = sources.prepare("iiic", raw, tmp_path / f"out{order}")
        entries = {entry.name: entry.checksum for entry in open_dataset(out).info.provenance.files}
        assert entries == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in raw.iterdir()}
    np.testing.assert_array_equal(
        open_dataset(tmp_path / "outC").column("signal").numpy(),
        open_dataset(tmp_path / "outF").column("signal").numpy(),
    )


def test_one_folder_a_patient_gives_the_same_samples(raw: Path, tmp_path: Path) -> None:
    signals = np.load(raw / "signals.npy")
    for key in "abc":
        folder = tmp_path / "split" / key
        folder.mkdir(parents=True)
        np.save(folder / "X.npy", signals[key == KEYS])
        np.save(folder / "Y.npy", VOTES[key == KEYS])
    one = open_dataset(sources.prepare("iiic", raw, tmp_path / "one"))
    many = open_dataset(sources.prepare("iiic", tmp_path / "split", tmp_path / "many"))
    assert one.content_hash() == many.content_hash()


def test_files_with_a_common_prefix_are_one_set(raw: Path, tmp_path: Path) -> None:
    for path in list(raw.iterdir()):
        path.rename(raw / f"training_{path.name}")
    assert open_dataset(sources.prepare("iiic", raw, tmp_path / "out")).n_patients == 3


def test_csv_columns_are_found_by_their_names(raw: Path, tmp_path: Path) -> None:
    expected = open_dataset(sources.prepare("iiic", raw, tmp_path / "npy")).content_hash()
    order = [5, 1, 0, 2, 3, 4]
    header = ["grda_vote", "seizure_vote", "other_vote", "lpd_vote", "gpd_vote", "lrda_vote"]
    rows = [",".join(header)] + [",".join(str(v) for v in row[order]) for row in VOTES]
    (raw / "votes.csv").write_text("\n".join(rows))
    (raw / "votes.npy").unlink()
    (raw / "patients.csv").write_text("row,patient_id\n" + "\n".join(f"{k},{key}" for k, key in enumerate(KEYS)))
    (raw / "patients.npy").unlink()
    assert open_dataset(sources.prepare("iiic", raw, tmp_path / "csv")).content_hash() == expected


def test_a_limit_takes_the_first_patients(raw: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("iiic", raw, tmp_path / "out", limit_patients=2))
    assert data.patients.tolist() == ["a", "b"]
    assert data.info.cohort_flow[1].to_json() == {
        "step": "limit on patients",
        "patients": 2,
        "samples": 6,
        "left_out": 3,
    }


def test_signals_that_are_not_finite_are_left_out_and_counted(raw: Path, tmp_path: Path) -> None:
    def spoil(signals: np.ndarray) -> None:
        signals[5, 0, 0] = np.nan
        signals[8, 2, 7] = -np.inf

    change(raw, "signals", spoil)
    data = open_dataset(sources.prepare("iiic", raw, tmp_path / "out"))
    left_out = {step.step: step.counts.get("left_out") for step in data.info.cohort_flow}
    assert left_out == {"samples found": None, "at least 5 votes": 2, "finite signal": 2}
    assert len(data) == 5


def test_volts_are_noticed_and_scaled_when_told(raw: Path, tmp_path: Path) -> None:
    plain = open_dataset(sources.prepare("iiic", raw, tmp_path / "plain")).column("signal").numpy()
    change(raw, "signals", lambda signals: signals.astype(np.float64) * 1e-6)
    fails(raw, DataError, "far too small for microvolts.*--scale 1e6")
    scaled = open_dataset(sources.prepare("iiic", raw, tmp_path / "scaled", scale=1e6)).column("signal").numpy()
    np.testing.assert_allclose(scaled, plain, rtol=1e-5)


def test_a_row_of_zero_votes_is_named_or_skipped(raw: Path, tmp_path: Path) -> None:
    change(raw, "votes", lambda votes: votes.__setitem__(3, 0))
    fails(raw, DataError, r"votes\.npy, row 3: no expert voted \(1 such rows\).*--unvoted skip")
    assert len(open_dataset(sources.prepare("iiic", raw, tmp_path / "out", unvoted="skip"))) == 6


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("votes", lambda votes: votes[:, :5], "5 columns; expected six"),
        ("votes", lambda votes: votes[:-1], r"8 rows, but signals\.npy has 9"),
        ("votes", lambda votes: votes - 1, "row 0: -1 is no number of votes"),
        ("votes", lambda votes: votes * 0.3, "is no number of votes"),
        ("votes", lambda votes: votes.astype(str), "expected numbers"),
        ("patients", lambda keys: keys[:-2], r"7 rows, but signals\.npy has 9"),
        ("patients", lambda keys: np.where(keys == "b", "", keys), "row 3: the patient's id is empty"),
        ("patients", lambda keys: keys.reshape(3, 3), "one id a row"),
        ("signals", lambda signals: signals[:, :10], r"expected \(rows, 16, 2000\)"),
        ("signals", lambda signals: signals[..., ::2], r"10 s at 200 Hz"),
        ("signals", lambda signals: signals > 0, "holds bool values"),
    ],
)
def test_each_mistake_in_the_arrays_has_its_message(raw: Path, name: str, edit: Any, words: str) -> None:
    change(raw, name, edit)
    fails(raw, DataError, words)


def test_pickled_arrays_are_never_loaded(raw: Path) -> None:
    np.save(raw / "patients.npy", np.array([1, "a", None] * 3, dtype=object), allow_pickle=True)
    fails(raw, DataError, "Python objects, which are never loaded")


def test_a_truncated_array_is_named(raw: Path) -> None:
    content = (raw / "signals.npy").read_bytes()
    (raw / "signals.npy").write_bytes(content[:-1000])
    fails(raw, DataError, r"signals\.npy is truncated")


def test_missing_files_are_named_with_where_they_should_be(raw: Path) -> None:
    (raw / "patients.npy").unlink()
    fails(raw, DataError, "whose the samples are")
    (raw / "votes.npy").unlink()
    fails(raw, DataError, r"signals\.npy has no votes beside it: expected .*votes\.npy")


def test_another_dataset_is_recognised(tmp_path: Path, shared_data: Path) -> None:
    for folder, name in (("mimic3_demo", "mimic3"), ("eicu_demo", "eicu"), ("sleep_edf_hypnograms", "sleep-edf")):
        with pytest.raises(StorageError, match=f"looks like {name}"):
            sources.prepare("iiic", shared_data / folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"min_votes": 0},
        {"unvoted": "x"},
        {"scale": 0.0},
        {"limit_patients": 0},
    ],
)
def test_impossible_options_are_refused(raw: Path, options: dict[str, Any]) -> None:
    fails(raw, ConfigError, ".", **options)


def test_filters_that_leave_nothing_are_an_error(raw: Path) -> None:
    with pytest.raises(DataError, match="not a single sample"):
        sources.prepare("iiic", raw, raw.parent / "out", min_votes=1000)
    assert not (raw.parent / "out").exists()


def test_a_full_disk_leaves_no_dataset(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if ".npy" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        sources.prepare("iiic", raw, raw.parent / "out")
    assert not (raw.parent / "out").exists()


def test_a_damaged_part_after_good_ones_leaves_no_work_folder(tmp_path: Path) -> None:
    raw = sources.synthesize("iiic", tmp_path / "raw", patients=3, samples_per_patient=3, layout="patients")
    *_, last = sorted(raw.rglob("*signals.npy"))
    values = np.load(last)
    np.save(last, values * 1e-6)
    with pytest.raises(DataError, match="far too small for microvolts"):
        sources.prepare("iiic", raw, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_the_twin_is_the_same_in_both_layouts_and_decided_by_its_seed(tmp_path: Path) -> None:
    hashes = []
    for name, seed, layout in (("a", 3, "array"), ("b", 3, "patients"), ("c", 4, "array")):
        raw = sources.synthesize("iiic", tmp_path / name, patients=6, seed=seed, samples_per_patient=4, layout=layout)
        hashes.append(open_dataset(sources.prepare("iiic", raw, tmp_path / f"{name}-out")).content_hash())
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


def test_a_full_disk_stops_the_twin_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        sources.synthesize("iiic", tmp_path / "raw", patients=2, samples_per_patient=2)


def test_the_twin_has_sparse_votes_artefacts_and_a_truth(tmp_path: Path) -> None:
    raw = sources.synthesize("iiic", tmp_path / "raw", patients=30, samples_per_patient=10)
    data = open_dataset(sources.prepare("iiic", raw, tmp_path / "out"))
    assert all(step.counts["left_out"] > 0 for step in data.info.cohort_flow if "votes" in step.step)
    truth = json.loads((raw / "truth.json").read_text())["patients"]
    keys, votes = np.load(raw / "patients.npy"), np.load(raw / "votes.npy")
    assert set(truth) == set(keys.tolist())
    labels = np.concatenate([truth[key]["labels"] for key in dict.fromkeys(keys.tolist())])
    enough = votes.sum(axis=1) >= 5
    assert (votes.argmax(axis=1) == labels)[enough].mean() > 0.8


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["signals.npy", "votes.npy", "patients.npy", "votes.csv", "patients.csv"]),
    place=st.integers(0, 200),
    change=st.binary(min_size=1, max_size=6),
    cut=st.booleans(),
)
@example(name="signals.npy", place=42, change=b"[", cut=False)
@example(name="votes.npy", place=10, change=b"\x00\x00", cut=False)
@example(name="patients.npy", place=8, change=b"\xff\xff", cut=False)
@example(name="patients.npy", place=128, change=b"\x00\x00\x11", cut=False)
@example(name="patients.npy", place=128, change=b"\x00\xd8", cut=False)
@example(name="signals.npy", place=0, change=b"\x00", cut=True)
def test_no_damage_brings_out_a_foreign_error(name: str, place: int, change: bytes, cut: bool, raw: Path) -> None:
    if name.endswith(".csv"):
        (raw / "votes.csv").write_text("\n".join(",".join(map(str, row)) for row in VOTES))
        (raw / "patients.csv").write_text("patient\n" + "\n".join(KEYS))
        for stem in ("votes", "patients"):
            (raw / f"{stem}.npy").unlink(missing_ok=True)
    else:
        for stem, array in (("votes", VOTES), ("patients", KEYS)):
            (raw / f"{stem}.csv").unlink(missing_ok=True)
            np.save(raw / f"{stem}.npy", array)
    file = raw / name
    content = file.read_bytes()
    file.write_bytes(content[:place] if cut else content[:place] + change + content[place + len(change) :])
    try:
        sources.prepare("iiic", raw, raw.parent / "fuzzed", overwrite=True)
    except ManyDGError:
        pass
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("tail", [b"", b"more"])
def test_the_checksum_is_that_of_every_byte_of_the_file_however_it_lies_there(
    tmp_path: Path, order: Literal["C", "F"], tail: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manydg.sources.iiic.LARGE_FILE", 1)
    monkeypatch.setattr("manydg.sources.iiic.DROP_EVERY", 1 << 23)
    raw = tmp_path / "raw"
    sources.synthesize("iiic", raw, patients=3, seed=4, samples_per_patient=40)
    signals = np.load(raw / "signals.npy")
    np.save(raw / "signals.npy", np.asarray(signals, order=order))
    with (raw / "signals.npy").open("ab") as file:
        file.write(tail)
    data = open_dataset(sources.prepare("iiic", raw, tmp_path / "out", min_votes=1))
    assert np.array_equal(np.asarray(data.column("signal")), signals)
    found = {entry.name: entry.checksum for entry in data.info.provenance.files}
    assert found["signals.npy"] == hashlib.sha256((raw / "signals.npy").read_bytes()).hexdigest()
