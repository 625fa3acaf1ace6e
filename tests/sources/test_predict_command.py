"""From synthetic raw files to predictions on new ones, by the commands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mne
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from meds_evaluation.evaluate import evaluate_binary_classification
from meds_evaluation.schema import PredictionSchema

TRUST = {"unlike_training", "distance"}


def do(commands: Any, *arguments: object) -> str:
    """What a command said."""
    code, out, err = commands.run(*arguments)
    assert code == 0, err
    return str(out + err)


def trained(
    commands: Any, folder: Path, source: str, patients: int, *more: object, prepare: tuple[object, ...] = ()
) -> None:
    """``raw``, ``data`` and ``run`` in a folder, and ``new`` raw files of other patients."""
    for seed, name in ((0, "raw"), (1, "new")):
        do(commands, "synthesize", source, "--patients", patients, "--seed", seed, "--out", folder / name, *more)
    do(commands, "prepare", source, folder / "raw", "--out", folder / "data", *prepare)
    small = ["--epochs", 1, "--batch-size", 64, "--algorithm", "base", "--device", "cpu"]
    do(commands, "train", folder / "data", "--out", folder / "run", *small)


def test_a_meds_dataset_is_prepared_trained_on_and_predicted(commands: Any, tmp_path: Path) -> None:
    labels = Path("labels") / "readmission.parquet"
    trained(commands, tmp_path, "meds", 30, prepare=("--labels", tmp_path / "raw" / labels))
    said = do(commands, "predict", tmp_path / "run", tmp_path / "new", "--out", tmp_path / "last")
    table = pl.read_csv(tmp_path / "last" / "predictions.csv")
    subjects = pl.scan_parquet(tmp_path / "new" / "data" / "*.parquet").select("subject_id").unique().collect()
    assert sorted(table["subject_id"]) == sorted(subjects["subject_id"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(table["threshold"]) == {float(f"{record['threshold']:.6g}")}
    assert (table["p_true"] >= record["threshold"]).to_list() == table["predicted"].to_list()
    assert table.columns[:4] == ["subject_id", "prediction_time", "predicted", "threshold"]
    assert set(table.columns) >= TRUST | {"calibrated_true"}
    assert f"{record['threshold']:.4g} upwards" in said

    asked = tmp_path / "new" / labels
    do(commands, "predict", tmp_path / "run", tmp_path / "new", "--times", asked, "--out", tmp_path / "at")
    assert pl.read_csv(tmp_path / "at" / "predictions.csv").height == pl.read_parquet(asked).height > table.height
    assert not (tmp_path / "at" / "predictions.parquet").exists()
    _check_meds_evaluation(commands, tmp_path, asked)

    for option in (["--ndc-map", asked], ["--resample"]):
        code, _, err = commands.run("predict", tmp_path / "run", tmp_path / "new", "--out", tmp_path / "no", *option)
        assert code == 2
        assert f"{option[0]} is for models trained on" in err
        assert "this one was on meds: leave it out" in err
        assert not (tmp_path / "no").exists()


def _check_meds_evaluation(commands: Any, folder: Path, labels: Path) -> None:
    """A table of predictions and labels that the official package accepts and scores."""
    new, scored = ("predict", folder / "run", folder / "new"), folder / "scored"
    said = do(commands, *new, "--times", labels, "--meds-evaluation", "--out", scored)
    assert f"wrote {scored / 'predictions.parquet'}" in said
    table = pq.read_table(scored / "predictions.parquet")
    PredictionSchema.validate(table)
    assert table.column_names == [
        "subject_id",
        "prediction_time",
        "boolean_value",
        "predicted_boolean_value",
        "predicted_boolean_probability",
    ]
    rows, shown = pl.DataFrame(pl.from_arrow(table)), pl.read_csv(scored / "predictions.csv")
    keys = ["subject_id", "prediction_time"]
    assert (
        rows.select(*keys, "boolean_value")
        .sort(keys)
        .equals(pl.read_parquet(labels).select(*keys, "boolean_value").sort(keys))
    )
    assert rows["predicted_boolean_value"].to_list() == shown["predicted"].to_list()
    np.testing.assert_allclose(rows["predicted_boolean_probability"], shown["p_true"], atol=1e-5)
    scores = evaluate_binary_classification(rows)["samples_equally_weighted"]
    assert 0 <= scores["roc_auc_score"] <= 1

    code, _, err = commands.run(*new, "--meds-evaluation", "--out", folder / "no")
    assert (code, "name a label file with --times" in err) == (2, True)
    pl.read_parquet(labels).drop("boolean_value").write_parquet(folder / "times.parquet")
    code, _, err = commands.run(*new, "--meds-evaluation", "--times", folder / "times.parquet", "--out", folder / "no")
    assert (code, "times.parquet has no column 'boolean_value'" in err) == (2, True)
    assert not (folder / "no").exists()


def test_a_new_night_comes_with_how_far_to_trust_its_stages(commands: Any, tmp_path: Path) -> None:
    trained(commands, tmp_path, "sleep-edf", 10, "--hours", 0.3, "--nights", 1)
    night = tmp_path / "new" / "SC4001E0-PSG.edf"
    keep = [word for name in ("patient", "session", "clock") for word in ("--keep", name)]
    said = do(commands, "predict", tmp_path / "run", night, "--out", tmp_path / "stages", *keep)
    names = ["W", "N1", "N2", "N3", "REM"]
    table = pl.read_csv(tmp_path / "stages" / "SC4001E0-PSG.csv")
    assert table.columns[:8] == ["epoch", "seconds", "stage", *(f"p_{name}" for name in names)]
    assert set(table.columns) >= TRUST | {f"calibrated_{name}" for name in names}
    assert table.height == 36
    assert table.columns[8:11] == ["patient", "session", "clock"]
    assert (table["patient"].unique().to_list(), table["session"].unique().to_list()) == (["SC400"], [1])
    assert table["clock"].str.to_datetime("%Y-%m-%d %H:%M:%S%.3f").diff().dt.total_seconds()[1:].eq(30).all()
    for start in ("p_", "calibrated_"):
        np.testing.assert_allclose(table.select(f"{start}{name}" for name in names).sum_horizontal(), 1, atol=1e-4)
    sets = next(name for name in table.columns if name.startswith("set_"))
    assert set(table[sets].fill_null("").str.split("|").explode()) <= {*names, ""}
    assert table["unlike_training"].n_unique() == 1, "a night is of one person"
    assert mne.read_annotations(tmp_path / "stages" / "SC4001E0-PSG-Hypnogram.edf").duration.sum() == 30 * 36
    assert (tmp_path / "stages" / "SC4001E0-PSG.png").read_bytes().startswith(b"\x89PNG")
    about = json.loads((tmp_path / "stages" / "about.json").read_text())
    assert about["decision"]["rule"] == "highest probability"
    assert "the highest probability decides" in said


def test_new_eeg_arrays_get_a_pattern_without_votes(commands: Any, tmp_path: Path) -> None:
    trained(commands, tmp_path, "iiic", 16, "--samples-per-patient", 6, "--layout", "patients")
    for votes in (tmp_path / "new").rglob("votes.npy"):
        votes.unlink()
    folder = sorted(path for path in (tmp_path / "new").iterdir() if path.is_dir())[0]
    signals = np.load(folder / "signals.npy")
    signals[0, 3, 5] = np.nan
    np.save(folder / "signals.npy", signals)
    said = do(commands, "predict", tmp_path / "run", tmp_path / "new", "--out", tmp_path / "told")
    table = pl.read_csv(tmp_path / "told" / "predictions.csv")
    rows = {path.parent.name: len(np.load(path)) for path in (tmp_path / "new").rglob("signals.npy")}
    assert dict(table.group_by("part").len().iter_rows()) == {
        name: count - (name == folder.name) for name, count in rows.items() if count > (name == folder.name)
    }
    assert f"1 of {len(signals)} samples" in said
    assert set(table["predicted"]) <= {"OTHER", "ESZ", "LPD", "GPD", "LRDA", "GRDA"}
    assert table.group_by("part").agg(pl.col("distance").n_unique())["distance"].to_list() == [1] * len(
        set(table["part"])
    )
    do(commands, "predict", tmp_path / "run", folder.with_name("IIIC00001"), "--out", tmp_path / "one")
    alone = pl.read_csv(tmp_path / "one" / "predictions.csv")
    same = table.filter(part="IIIC00001")
    np.testing.assert_allclose(alone["p_LPD"], same["p_LPD"], atol=1e-4)


def test_a_run_that_predicts_nearly_everyone_says_so(commands: Any, shared_data: Path, tmp_path: Path) -> None:
    raw = shared_data / "eicu_demo_with_lab"
    do(commands, "prepare", "eicu", raw, "--out", tmp_path / "data")
    do(commands, "train", tmp_path / "data", "--epochs", 1, "--device", "cpu", "--out", tmp_path / "run")
    said = do(commands, "predict", tmp_path / "run", raw, "--out", tmp_path / "new")
    about = json.loads((tmp_path / "new" / "about.json").read_text())["decision"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    arrays = np.load(tmp_path / "run" / "predictions.npz")
    chances = arrays["probabilities"][arrays["split"] == 0, 1]
    share = float((chances.astype(np.float64) >= record["threshold"]).mean())
    assert about["on validation patients"]["predicted"] == pytest.approx(share)
    assert about["threshold"] == record["threshold"]
    assert ("Nearly everything is predicted" in said) == (share > 0.9)
    table = pl.read_csv(tmp_path / "new" / "predictions.csv")
    assert (table["p_readmitted"] >= table["threshold"]).to_list() == (table["predicted"] == "readmitted").to_list()
