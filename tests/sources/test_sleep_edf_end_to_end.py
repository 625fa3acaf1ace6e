"""Real hypnograms, with made-up signals beside them, from files through training to the stages of a new night."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import mne
import numpy as np
import polars as pl
import pytest

from manydg import sources
from manydg.data.dataset import open_dataset
from manydg.predict import as_dataset, predict_samples
from manydg.sources._edf import SignalFormat, read_annotations, read_header
from manydg.sources._scorings import LabelMap, label_windows, spans_of
from manydg.sources.edf import read_recording
from manydg.sources.sleep_edf import SleepEdf
from manydg.synthetic._twins import draw_factors
from manydg.synthetic.sleep_edf import _draw_recording, _write_psg
from manydg.training.run import open_run, train

NIGHTS = ("SC4001EC", "SC4011EH", "SC4021EH", "SC4031EC", "SC4041EC")
SPARE = 20
# Stages of a hypnogram to rows of the twin's table, where stages 3 and 4 are apart; unscored epochs sound awake.
AS_DRAWN = {"N1": 1, "N2": 2, "N3": 3, "REM": 5}


@pytest.fixture(scope="module")
def raw(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five real hypnograms; their signals last until ten minutes after the last sleep, to keep the files small."""
    folder = tmp_path_factory.mktemp("real")
    rng = np.random.default_rng(0)
    for name in NIGHTS:
        file = shared_data / "sleep_edf_hypnograms" / f"{name}-Hypnogram.edf"
        shutil.copy(file, folder)
        notes = read_annotations(file)
        onsets = np.arange(max(note.onset + note.duration for note in notes) // 30) * 30.0
        labels = label_windows(onsets, 30.0, spans_of(notes, LabelMap(preset="aasm")))
        stages = np.array([AS_DRAWN.get(name, 0) for name in [*labels.names, ""]])[labels.codes]
        end = int(np.nonzero(stages > 0)[0][-1]) + 1 + SPARE
        start = read_header(file).start
        assert start is not None
        digital = _draw_recording(rng, stages[:end], draw_factors(rng, 3, 6, (15.0, 24.0)))
        _write_psg(folder / f"{name[:6]}E0-PSG.edf", digital, start, rng)
    return folder


def test_real_hypnograms_go_through_prepare_train_and_predict(raw: Path, shared_data: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "data", wake_margin=SPARE / 2))
    features = pl.read_parquet(
        shared_data / "sleep_edf_78_features" / "epochs.parquet", columns=["subject_id", "night_id", "stage"]
    ).filter((pl.col("night_id") == "N1") & pl.col("subject_id").is_in(data.patients.tolist()))
    sleep = {name: int((data.targets == code).sum()) for code, name in enumerate(data.target.names) if name != "W"}
    assert sleep == {name: features.filter(stage=name).height for name in sleep}

    # A quarter of the epochs, once: whether a model learns is not the matter here, but that every step fits the next.
    quarter = data.select(np.arange(0, len(data), 4))
    run = train(quarter, algorithm="base", epochs=1, ratios=(0.6, 0.2, 0.2), batch_size=64, out=tmp_path / "run")
    assert run.record.status == "ok"

    model = open_run(tmp_path / "run")
    recording = read_recording(raw / "SC4001E0-PSG.edf", SignalFormat.of(model.schema.settings))
    predictions = predict_samples(model, as_dataset(recording, model))
    probabilities = predictions.probabilities
    prepared = data.subset(["SC400"])
    assert prepared.times is not None
    staged = (prepared.times / 30).long().numpy()
    np.testing.assert_allclose(probabilities[staged], model.predict_proba(prepared), atol=1e-5)
    table, notes, _ = SleepEdf().write_predictions(tmp_path, recording, predictions)
    assert len(list(csv.DictReader(table.open()))) == len(recording.signal)
    assert mne.read_annotations(notes).duration.sum() == 30 * len(recording.signal)
