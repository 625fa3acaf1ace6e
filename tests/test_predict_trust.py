"""New raw records through a trained model, by patient, with what says how far to trust each prediction."""

from __future__ import annotations

from pathlib import Path

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
