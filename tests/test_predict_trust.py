"""New raw records through a trained model, by patient, with what says how far to trust each prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl

from manydg import sources
from manydg.config import TrainingConfig
from manydg.data.dataset import open_dataset
from manydg.predict import predict_raw
from manydg.training.run import train


def test_visits_of_one_patient_share_their_context_and_their_flag(shared_data: Path, tmp_path: Path) -> None:
    raw, mapping = shared_data / "mimic3_demo", shared_data / "drug_mapping" / "ndc_to_atc.csv"
    data = open_dataset(sources.prepare("mimic3", raw, tmp_path / "data", ndc_map=mapping))
    config = TrainingConfig(algorithm="arm", epochs=1, ratios=(0.5, 0.3, 0.2), backbone_options={"width": 8})
    run = train(data, config, out=tmp_path / "run", device="cpu")
    (file,) = predict_raw(tmp_path / "run", raw, tmp_path / "new", ndc_map=mapping)
    told = pl.read_csv(file)
    names = data.target.names
    sets = next(name for name in told.columns if name.startswith("set_") and "_of_" not in name)
    validating = run.record.patients.val
    assert sets == f"set_{min(90, 100 * validating // (validating + 1))}"
    assert set(told[sets].fill_null("").str.split("|").explode()) <= {*names, ""}
    assert all(told[f"calibrated_{name}"].is_between(0, 1).all() for name in names)
    visits = pl.read_csv(raw / "ADMISSIONS.csv.gz", infer_schema_length=None).rename(str.lower)
    joined = told.join(visits.select("hadm_id", "subject_id"), on="hadm_id")
    assert len(joined) == len(told)
    flags = joined.group_by("subject_id").agg(pl.col("distance").n_unique(), pl.len())
    assert (flags["distance"] == 1).all()
    assert flags["len"].max() > 1
    assert told["distance"].n_unique() > 1
    assert told["unlike_training"].dtype == pl.Boolean


def test_a_new_value_comes_with_intervals_that_hold_as_many_as_they_promise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(150), 6)
    x = rng.normal(size=(900, 3)) + rng.normal(size=(150, 3))[who]
    days = 30 + 5 * x[:, 0] - 3 * x[:, 1] + rng.normal(size=900) * rng.gamma(2.0, size=150)[who]
    columns = {f"x{i}": x[:, i] for i in range(3)}
    pl.DataFrame({"who": who, "days": days, **columns}).write_csv(tmp_path / "old.csv")
    new = pl.DataFrame({"who": who + 500, **columns})
    new.write_csv(tmp_path / "new.csv")
    options = {"patient": "who", "target": ("days",), "features": ("x*",), "kind": "regression"}
    data = open_dataset(sources.prepare("table", tmp_path / "old.csv", tmp_path / "data", **options))
    config = TrainingConfig(algorithm="base", epochs=8, lr=1e-2, batch_size=64, ratios=(0.5, 0.3, 0.2))
    train(data, config, out=tmp_path / "run", device="cpu")
    (file,) = predict_raw(tmp_path / "run", tmp_path / "new.csv", tmp_path / "out", keep=("who",))
    told = pl.read_csv(file)
    bounds = ["low_90", "high_90", "low_90_of_80", "high_90_of_80"]
    assert told.columns == ["row", "who", "predicted", *bounds, "unlike_training", "distance"]
    assert told["predicted"].dtype == pl.Float64
    middle = (told["low_90"] + told["high_90"]) / 2
    np.testing.assert_allclose(middle.to_numpy(), told["predicted"].to_numpy(), rtol=1e-4)
    for low, high in (bounds[:2], bounds[2:]):
        held = ((days >= told[low].to_numpy()) & (days <= told[high].to_numpy())).reshape(150, 6).mean(axis=1)
        assert held.mean() > 0.85
    assert (held >= 0.9).mean() > 0.7
    about = json.loads((tmp_path / "out" / "about.json").read_text())
    assert about["predicted value"] == ["days"]
    assert "value itself" in about["decision"]["in words"]
