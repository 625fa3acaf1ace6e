"""What a run leaves for predictions to be judged by, and the columns that come of it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from manydg.data.dataset import DomainDataset, from_arrays, open_dataset
from manydg.errors import StorageError
from manydg.evaluation.metrics import read_predictions
from manydg.evaluation.trust import fit_on_average, fit_temperature, prediction_sets, scale_temperature
from manydg.predict import predict_raw
from manydg.sources import prepare
from manydg.training.inference import (
    CALIBRATION,
    SAMPLES_OF_A_PATIENT,
    fit_calibration,
    patient_embeddings,
    read_calibration,
    write_calibration,
)
from manydg.training.record import RunRecord
from manydg.training.run import open_run, train

RATIOS = (0.5, 0.35, 0.15)


def _many(patients: int = 36, samples: int = 12) -> DomainDataset:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(patients), samples)
    label = rng.integers(0, 3, len(who))
    x = 1.5 * np.eye(3)[label] + rng.normal(size=(patients, 3))[who] * 0.5 + rng.normal(size=(len(who), 3))
    return from_arrays(x.astype(np.float32), label, who, kind="classes")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    train(_many(), algorithm="base", epochs=2, ratios=RATIOS, out=folder, device="cpu", lr=0.01)
    return folder


def test_the_file_holds_what_validation_patients_tell(run_folder: Path) -> None:
    found, target = read_calibration(run_folder), open_run(run_folder).algorithm.target
    assert found is not None
    val = read_predictions(run_folder / "predictions.npz", "val", target)
    truth, probabilities, patients = val.truth, val.probabilities, val.patients
    assert found.temperature == pytest.approx(fit_temperature(target, truth, probabilities))
    wanted = fit_on_average(target, truth, probabilities, patients)
    np.testing.assert_allclose(found.on_average.thresholds, wanted.thresholds)
    assert found.on_average.level == pytest.approx(0.9)
    assert found.for_most.share == pytest.approx(0.8)
    assert found.patients == len(np.unique(patients))
    assert found.false_alarms == pytest.approx(1 / (found.patients + 1))


def test_test_patients_are_not_looked_at(run_folder: Path) -> None:
    """Other truth and other samples of test patients leave the calibration as it was."""
    run, data = open_run(run_folder), _many()
    file, target = run_folder / "predictions.npz", run.algorithm.target
    predictions = {side: read_predictions(file, side, target) for side in ("val", "test")}
    rows = {side: found.rows for side, found in predictions.items() if found.rows is not None}
    others = np.setdiff1d(np.arange(len(data)), np.concatenate(list(rows.values())))
    sides = {"train": data.select(others), "val": data.select(rows["val"])}
    again = fit_calibration(run.algorithm, sides, predictions["val"])
    kept = read_calibration(run_folder)
    assert kept is not None
    assert again.limit == pytest.approx(kept.limit)
    assert again.reference is not None
    assert kept.reference is not None
    np.testing.assert_allclose(again.reference.mean, kept.reference.mean, rtol=1e-5, atol=1e-6)


def test_no_patient_can_be_recognised_in_the_file(run_folder: Path) -> None:
    from manydg.training.record import read_tensors

    tensors, meta = read_tensors(run_folder / CALIBRATION)
    data = _many()
    width = open_run(run_folder).algorithm.backbone.output_size
    assert {tuple(tensor.shape) for tensor in tensors.values()} <= {(1,), (width,), (width, width)}
    text = repr(meta)
    assert not any(name in text for name in (*data.pseudonyms(), *(f"'{name}'" for name in data.patients)))


def test_a_calibration_comes_back_from_its_file(run_folder: Path, tmp_path: Path) -> None:
    kept = read_calibration(run_folder)
    assert kept is not None
    write_calibration(tmp_path, kept)
    again = read_calibration(tmp_path)
    assert again is not None
    assert (again.temperature, again.limit, again.patients) == (kept.temperature, kept.limit, kept.patients)
    np.testing.assert_array_equal(again.for_most.thresholds, kept.for_most.thresholds)
    assert read_calibration(tmp_path / "elsewhere") is None
    (tmp_path / CALIBRATION).write_bytes(b"no")
    with pytest.raises(StorageError, match="damaged"):
        read_calibration(tmp_path)


def test_of_each_patient_a_spread_of_samples_is_embedded(run_folder: Path) -> None:
    algorithm = open_run(run_folder).algorithm
    counts = [5, 1, 3 * SAMPLES_OF_A_PATIENT]
    who = np.repeat([2, 0, 1], counts)
    x = np.zeros((len(who), 3), np.float32)
    x[who == 1, 0] = np.linspace(-1, 1, counts[2])
    data = from_arrays(x, np.arange(len(who)) % 3, who, kind="classes")
    values, patients = patient_embeddings(algorithm, data)
    assert np.bincount(patients).tolist() == [1, SAMPLES_OF_A_PATIENT, 5]
    with torch.no_grad():
        every = algorithm.embed({"x": torch.from_numpy(x[who == 1])})["v"].mean(dim=0).numpy()
    np.testing.assert_allclose(values[patients == 1].mean(axis=0), every, atol=0.02)


def test_the_samples_embedded_are_spread_over_time_whatever_the_order_of_rows(run_folder: Path) -> None:
    algorithm, samples = open_run(run_folder).algorithm, 3 * SAMPLES_OF_A_PATIENT
    x = np.zeros((samples, 3), np.float32)
    x[:, 0] = np.linspace(-1, 1, samples)
    data = from_arrays(x, np.arange(samples) % 3, np.zeros(samples), kind="classes", times=np.arange(samples))
    turned = data.select(np.random.default_rng(0).permutation(samples))
    sorted_values = [np.sort(patient_embeddings(algorithm, one)[0], axis=0) for one in (data, turned)]
    np.testing.assert_allclose(*sorted_values, atol=1e-6)


def test_predictions_carry_how_far_to_trust_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    who = np.repeat(np.arange(40), 10)
    label = rng.integers(0, 2, 400)
    x = label[:, None] * [1.0, -1.0] + rng.normal(size=(40, 2))[who] * 0.3 + rng.normal(size=(400, 2)) * 0.7
    frame = pl.DataFrame({"who": who, "label": np.where(label, "yes", "no"), "f1": x[:, 0], "f2": x[:, 1]})
    frame.write_csv(tmp_path / "old.csv")
    folder = prepare(
        "table",
        tmp_path / "old.csv",
        tmp_path / "data",
        patient="who",
        target="label",
        features=["f1", "f2"],
        kind="classes",
    )
    train(open_dataset(folder), algorithm="base", epochs=3, ratios=RATIOS, out=tmp_path / "run", lr=0.01)
    new = frame.head(40).with_columns(f1=pl.when(pl.col("who") == 3).then(pl.col("f1") + 40).otherwise(pl.col("f1")))
    new.drop("label").write_csv(tmp_path / "new.csv")
    (written,) = predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out")
    with written.open() as file:
        lines = list(csv.DictReader(file))
    run, calibration = open_run(tmp_path / "run"), read_calibration(tmp_path / "run")
    assert calibration is not None
    raw = np.array([[float(line["p_no"]), float(line["p_yes"])] for line in lines])
    mended = np.array([[float(line["calibrated_no"]), float(line["calibrated_yes"])] for line in lines])
    target = run.algorithm.target
    np.testing.assert_allclose(mended, scale_temperature(target, raw, calibration.temperature), atol=1e-3)
    sets = prediction_sets(target, raw, calibration.on_average)
    wanted = ["|".join(np.array(["no", "yes"])[row]) for row in sets]
    assert np.mean([line["set_90"] == text for line, text in zip(lines, wanted, strict=True)]) > 0.95
    assert all(line["set_90_of_80"] for line in lines)
    # Ten rows of one patient share the flag, and it is the patient who was moved away that has it.
    flags = [line["unlike_training"] for line in lines]
    assert flags[30:] == ["true"] * 10
    assert all(len(set(flags[start : start + 10])) == 1 for start in (0, 10, 20))
    assert float(lines[35]["distance"]) > 1


@pytest.mark.parametrize(("algorithm", "mode"), [("arm", "offline"), ("bn-adapt", "offline"), ("ema", "none")])
def test_the_record_says_whether_a_patient_s_other_samples_were_used(algorithm: str, mode: str) -> None:
    run = train(_many(12, 6), algorithm=algorithm, epochs=1, ratios=RATIOS, device="cpu")
    assert run.record.context["mode"] == mode


def test_a_run_without_calibration_predicts_without_it(run_folder: Path, tmp_path: Path) -> None:
    import shutil

    from manydg.predict import trust_columns

    shutil.copytree(run_folder, tmp_path / "old")
    (tmp_path / "old" / CALIBRATION).unlink()
    RunRecord.read(tmp_path / "old" / "run.json").write(tmp_path / "old" / "run.json")
    run, data = open_run(tmp_path / "old"), _many(3, 4)
    assert trust_columns(run, data, run.predict_proba(data)) == {}
