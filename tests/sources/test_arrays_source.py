"""Your own arrays to a dataset folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from manydg import files
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, ManyDGWarning, StorageError
from manydg.predict import predict_raw
from manydg.sources import TrainedOn, _preparing, prepare
from manydg.sources.arrays import Arrays, NewArrayOptions
from manydg.training.run import train

X = np.arange(24.0).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])
P = np.array(["ann", "ann", "bob", "bob", "cem", "cem"])


def prepared(folder: Path, x: Any = X, y: Any = Y, p: Any = P, **options: Any) -> DomainDataset:
    paths = [folder / f"{name}.npy" for name in ("x", "y", "p")]
    for path, array in zip(paths, (x, y, p), strict=True):
        np.save(path, array, allow_pickle=True)
    if "time" in options:
        np.save(folder / "t.npy", options["time"])
        options["time"] = folder / "t.npy"
    return open_dataset(prepare("arrays", paths[0], folder / "out", y=paths[1], patient=paths[2], **options))


def test_arrays_become_a_dataset(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, time=np.arange(6))
    assert dataset.column("x").tolist() == X.tolist()
    assert (dataset.targets.tolist(), dataset.patients.tolist()) == (Y.tolist(), ["ann", "bob", "cem"])
    assert dataset.times is not None
    assert dataset.times.tolist() == list(range(6))
    assert [file.name for file in dataset.info.provenance.files] == ["x.npy", "y.npy", "p.npy", "t.npy"]


@pytest.mark.parametrize("unit", ["m8[h]", "M8[h]", "M8[ns]"])
def test_times_may_be_dates_or_durations_which_become_seconds(tmp_path: Path, unit: str) -> None:
    hours = np.arange(6).astype("m8[h]")
    times = (hours if unit[0] == "m" else np.datetime64("1970-01-01", "h") + hours).astype(unit)
    dataset = prepared(tmp_path, time=times)
    assert dataset.times is not None
    assert dataset.times.tolist() == [3600.0 * hour for hour in range(6)]
    np.savez(tmp_path / "new.npz", x=X, time=times)
    trained = TrainedOn("arrays", dataset.info.settings)
    (new,) = Arrays().for_prediction(tmp_path / "new.npz", trained, NewArrayOptions(keep=("time",)))
    assert new.times is not None
    assert new.times.tolist() == new.rows["time"].to_list() == dataset.times.tolist()


def test_pieces_smaller_than_the_array_make_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepared(tmp_path).content_hash()
    monkeypatch.setattr(_preparing, "_PIECE_BYTES", 40)
    pieces = prepared(tmp_path, overwrite=True)
    assert pieces.column("x").tolist() == X.tolist()
    assert pieces.content_hash() == whole
    bad = X.copy()
    bad[5, 2] = np.nan
    with pytest.raises(DataError, match=r"x.npy: position \[2\] in row 5 .the first row is 0. is missing: fill"):
        prepared(tmp_path, x=bad, overwrite=True)
    assert open_dataset(tmp_path / "out").content_hash() == whole


def test_a_rate_makes_signals(tmp_path: Path) -> None:
    signals = np.random.default_rng(0).normal(size=(6, 2, 50))
    dataset = prepared(tmp_path, x=signals, rate=100.0)
    assert dataset.column("signal").shape == (6, 2, 50)  # type: ignore[union-attr]
    assert dataset.info.settings == {"rate": 100.0, "channels": ["channel 1", "channel 2"], "unit": "uV"}
    with pytest.raises(DataError, match=r"signals are \(rows, channels, samples\)"):
        prepared(tmp_path, rate=100.0, overwrite=True)
    with pytest.raises(DataError, match="hertz above 0; got -1"):
        prepared(tmp_path, x=signals, rate=-1.0, overwrite=True)


def test_whole_numbers_are_measurements_here(tmp_path: Path) -> None:
    assert prepared(tmp_path, x=X.astype(np.uint16)).column("x").dtype.is_floating_point  # type: ignore[union-attr]


def test_votes_are_read_from_a_matrix(tmp_path: Path) -> None:
    votes = [[3, 0], [1, 2], [4, 4], [0, 1], [9, 1], [2, 2]]
    dataset = prepared(tmp_path, y=votes, classes=["seizure", "other"])
    assert (dataset.target.kind, dataset.target.names) == ("votes", ("seizure", "other"))
    assert dataset.targets.tolist() == votes


def test_constant_positions_are_warned_of(tmp_path: Path) -> None:
    x = X.copy()
    x[:, 3] = 5.0
    with pytest.warns(ManyDGWarning, match=r"x.npy: the same value in every sample: position \[3\]"):
        prepared(tmp_path, x=x)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"y": Y[:5]}, DataError, "different numbers of rows: x.npy 6, y.npy 5, p.npy 6"),
        ({"x": X.astype(str)}, DataError, r"x.npy has type <U\d+; it must hold numbers"),
        ({"x": X[:, 0]}, DataError, r"x.npy has shape \(6,\)"),
        ({"x": np.array(1.0)}, DataError, "single value"),
        ({"x": X[:, :0]}, DataError, r"x.npy has shape \(6, 0\): there is nothing in it"),
        ({"time": np.array([0, 1, 2, np.nan, 4, 5])}, DataError, r"t.npy: time is missing in row 3 .*fill it in"),
        ({"x": X[:0], "y": Y[:0], "p": P[:0]}, DataError, "no rows"),
        ({"x": np.array([[None]] * 6, dtype=object)}, StorageError, "holds Python objects, which are never read"),
        ({"p": np.array(["a"] * 6)}, DataError, "p.npy: all samples are of one patient"),
        ({"p": np.array([1, 1, np.nan, 2, 3, 3])}, DataError, "p.npy: some patient ids are missing"),
        ({"y": np.zeros(6, int)}, DataError, "y.npy: all 6 targets are the same class"),
        ({"y": Y + 0.5}, DataError, "say --kind regression"),
        ({"y": Y, "kind": "binary"}, DataError, "binary target has two values"),
        ({"y": Y, "classes": ["a", "b"]}, DataError, "y.npy: target 2 in row 2 is outside 0 to 1"),
    ],
)
def test_each_mistake_has_its_own_message(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepared(tmp_path, **changes)
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", Y)
    np.save(tmp_path / "p.npy", P)
    with pytest.raises(StorageError, match="there is no file"):
        prepare("arrays", tmp_path / "x.npy", tmp_path / "out", y=tmp_path / "y.npy", patient=tmp_path / "p.npy")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY but then nothing")
    with pytest.raises(StorageError, match=r"not a plain \.npy array"):
        prepare("arrays", tmp_path / "x.npy", tmp_path / "out", y=tmp_path / "y.npy", patient=tmp_path / "p.npy")
    np.savez(tmp_path / "many.npz", X)
    with pytest.raises(StorageError, match=r"many.npz has no array 'x'; it has arr_0"):
        prepare("arrays", tmp_path / "many.npz", tmp_path / "out", y=tmp_path / "y.npy", patient=tmp_path / "p.npy")


def test_a_header_that_does_not_close_is_refused(tmp_path: Path) -> None:
    for name, array in (("x", X), ("y", Y), ("p", P)):
        np.save(tmp_path / f"{name}.npy", array)
    content = (tmp_path / "y.npy").read_bytes()
    assert b"(6,)" in content
    (tmp_path / "y.npy").write_bytes(content.replace(b"(6,)", b"(6,("))
    with pytest.raises(StorageError, match=r"y\.npy is not a plain \.npy array: it is damaged"):
        prepare("arrays", tmp_path / "x.npy", tmp_path / "out", y=tmp_path / "y.npy", patient=tmp_path / "p.npy")


def test_new_arrays_and_a_dataset_folder_get_the_same_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(10), 6)
    y = np.arange(60) % 2
    prepared(tmp_path, x=rng.normal(size=(60, 4)) + y[:, None], y=y, p=patients)
    train(open_dataset(tmp_path / "out"), algorithm="base", epochs=1, out=tmp_path / "run")
    (new,) = predict_raw(tmp_path / "run", tmp_path / "x.npy", tmp_path / "new")
    (folder,) = predict_raw(tmp_path / "run", tmp_path / "out", tmp_path / "folder", keep=["patient"])
    (plain,) = predict_raw(tmp_path / "run", tmp_path / "out", tmp_path / "plain")
    assert pl.read_csv(plain).columns[:2] == ["row", "predicted"], "patients are named only if asked for"
    one, other = pl.read_csv(new), pl.read_csv(folder)
    assert one.columns[:2] == ["row", "predicted"]
    assert other.columns[:3] == ["row", "patient", "predicted"]
    assert one["p_1"].to_list() == other["p_1"].to_list()
    assert other["patient"].to_list() == patients.tolist()
    with pytest.raises(ConfigError, match="--resample is for raw files, not for a dataset folder"):
        predict_raw(tmp_path / "run", tmp_path / "out", tmp_path / "no", resample=True)
    together, x = tmp_path / "all.npz", np.load(tmp_path / "x.npy")
    np.savez(together, x=x, y=y, patients=patients, time=np.arange(60.0))
    prepare("arrays", together, tmp_path / "same", y=together, patient=together)
    assert torch.equal(open_dataset(tmp_path / "same").column("x"), open_dataset(tmp_path / "out").column("x"))
    (beside,) = predict_raw(tmp_path / "run", together, tmp_path / "beside", keep=["time", "patient"])
    table = pl.read_csv(beside)
    assert table.columns[:4] == ["row", "time", "patient", "predicted"]
    assert table.drop("time").equals(other), "patients are taken from the file, so that distances are theirs"
    with pytest.raises(DataError, match="has no array 'patient' to keep"):
        predict_raw(tmp_path / "run", tmp_path / "x.npy", tmp_path / "no", keep=["patient"])
    together.write_bytes(together.read_bytes()[:-2000])
    with pytest.raises(StorageError, match="is damaged"):
        predict_raw(tmp_path / "run", together, tmp_path / "no")
    np.savez_compressed(together, x=np.zeros((30_000, 4)))
    monkeypatch.setattr(files, "UNPACKED_ALWAYS", 1000)
    with pytest.raises(DataError, match="'x' unpacks to 960,128 bytes, more than"):
        predict_raw(tmp_path / "run", together, tmp_path / "no")
    np.save(tmp_path / "x.npy", np.full((2, 4), np.nan))
    with pytest.raises(DataError, match="2 samples hold missing or infinite values, the first is row 0"):
        predict_raw(tmp_path / "run", tmp_path / "x.npy", tmp_path / "no")
    assert not (tmp_path / "no").exists()
