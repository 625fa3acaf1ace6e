"""A new night without hypnogram: the same inputs as in preparation, and files that other programs open."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import edfio
import mne
import numpy as np
import polars as pl
import pytest
import torch

from manydg import sources
from manydg.data.dataset import open_dataset
from manydg.data.info import TargetSpec
from manydg.errors import DataError, StorageError
from manydg.sources import SamplePredictions, sleep_edf
from manydg.sources._edf import SignalFormat, read_annotations
from manydg.sources._scorings import LabelMap, label_windows, spans_of
from manydg.sources.edf import Recording, find_recordings, read_recording

SETTINGS = SignalFormat.of(sleep_edf.SETTINGS)
NAMES = ("W", "N1", "N2", "N3", "REM")


def write_sine(path: Path, rate: int, hertz: float = 6.0, seconds: int = 95, unit: str = "uV") -> Path:
    time = np.arange(seconds * rate) / rate
    signals = [
        edfio.EdfSignal(
            50 * np.sin(2 * np.pi * hertz * time),
            rate,
            label=label,
            physical_dimension=unit,
            physical_range=(-100, 100),
        )
        for label in ("EEG Fpz-Cz", "EEG Pz-Oz")
    ]
    edfio.Edf(signals, starttime=datetime(2020, 1, 1, 22).time()).write(path)
    return path


def test_a_night_without_hypnogram_gives_the_inputs_of_preparation(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=1, hours=0.5, nights=1)
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "out"))
    assert data.times is not None
    recording = read_recording(raw / "SC4001E0-PSG.edf", SignalFormat.of(data.info.settings))
    epochs = (data.times / 30).long().numpy()
    np.testing.assert_array_equal(recording.signal[epochs], data.column("signal").numpy())
    assert len(recording.signal) == 60


def test_recordings_are_found_and_hypnograms_passed_by(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=2, hours=0.25, nights=1)
    assert [path.name for path in find_recordings(raw)] == ["SC4001E0-PSG.edf", "SC4011E0-PSG.edf"]
    assert find_recordings(raw / "SC4001E0-PSG.edf") == [raw / "SC4001E0-PSG.edf"]
    with pytest.raises(StorageError, match="no file or folder"):
        find_recordings(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="holds no EDF recordings"):
        find_recordings(tmp_path / "empty")


def test_other_channels_are_refused_with_what_was_expected(shared_data: Path) -> None:
    with pytest.raises(DataError, match=r"EEG Fp1.*The model was trained on EEG Fpz-Cz, EEG Pz-Oz"):
        read_recording(shared_data / "eegmat_edf_sample" / "Subject00_1.edf", SETTINGS, resample=True)


def test_another_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is in 'bpm', expected microvolts"):
        read_recording(write_sine(tmp_path / "a.edf", 100, unit="bpm"), SETTINGS)


@pytest.mark.parametrize("rate", [500, 128, 256, 50])
def test_another_rate_is_refused_or_resampled_to_the_same_wave(tmp_path: Path, rate: int) -> None:
    path = write_sine(tmp_path / "a.edf", rate)
    with pytest.raises(DataError, match=rf"sampled at {rate} Hz; the model was trained on 100 Hz.*--resample"):
        read_recording(path, SETTINGS)
    recording = read_recording(path, SETTINGS, resample=True)
    assert recording.signal.shape == (3, 2, 3000)
    time = np.arange(9000) / 100
    wave = 50 * np.sin(2 * np.pi * 6.0 * time)
    ours = recording.signal[:, 0].reshape(-1)
    np.testing.assert_allclose(ours[200:-200], wave[200:-200], atol=1.0)


def test_what_lies_above_the_new_limit_does_not_fold_down(tmp_path: Path) -> None:
    recording = read_recording(write_sine(tmp_path / "a.edf", 500, hertz=90.0), SETTINGS, resample=True)
    assert np.abs(recording.signal[1]).max() < 2.0


def test_a_real_recording_is_resampled_as_scipy_does_by_fourier(shared_data: Path) -> None:
    from scipy.signal import resample

    path = shared_data / "eegmat_edf_sample" / "Subject00_2.edf"
    settings = SignalFormat(("EEG Fp1", "EEG Pz"), 100.0, 10.0)
    recording = read_recording(path, settings, resample=True)
    reference = resample(edfio.read_edf(path).get_signal("EEG Pz").data, 6200)[:6000]
    ours = recording.signal[:, 1].reshape(-1)
    assert np.corrcoef(ours, reference)[0, 1] > 0.995


def test_a_recording_shorter_than_an_epoch_is_refused(tmp_path: Path) -> None:
    for rate in (100, 250):
        path = write_sine(tmp_path / f"{rate}.edf", rate, seconds=20)
        with pytest.raises(DataError, match="less than one epoch"):
            read_recording(path, SETTINGS, resample=True)


@pytest.fixture
def night(tmp_path: Path) -> tuple[Recording, np.ndarray]:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(5, 0.3), 40)
    path, start = tmp_path / "SC4001E0-PSG.edf", datetime(1990, 3, 1, 22, 15)
    columns = {"signal": torch.zeros(40, 2, 3000)}
    rows = pl.DataFrame({"epoch": np.arange(40)})
    return Recording(columns, rows, np.full(40, path.stem), origin=path, start=start), probabilities


def write_stages(folder: Path, recording: Recording, probabilities: np.ndarray) -> list[Path]:
    folder.mkdir()
    stages = [NAMES[k] for k in probabilities.argmax(axis=1)]
    predictions = SamplePredictions(TargetSpec("classes", NAMES), probabilities, stages, None, {})
    return sleep_edf.SleepEdf().write_predictions(folder, recording, predictions)


def test_the_nights_of_a_person_are_one_patient_a_day_apart_as_in_training(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=2, nights=2, hours=0.25)
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "data"))
    trained = sources.TrainedOn("sleep-edf", data.info.settings)
    people = list(sleep_edf.SleepEdf().for_prediction(raw, trained, sleep_edf.RecordingOptions()))
    assert len(people) == data.n_patients == 2
    for person, code in zip(people, range(2), strict=True):
        assert person.times is not None
        assert data.times is not None
        assert len(set(person.patients.tolist())) == 1
        assert set(data.times[data.domains == code].tolist()) <= set(person.times.tolist())
        assert person.times.max() >= 86_400
    predictions = SamplePredictions(
        data.target, np.full((len(people[0].rows), 5), 0.2), ["W"] * len(people[0].rows), None, {}
    )
    written = sleep_edf.SleepEdf().write_predictions(tmp_path, people[0], predictions)
    assert len([path for path in written if path.suffix == ".csv"]) == 2


def test_the_nights_of_a_person_come_in_their_order_whatever_folders_they_are_in(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=1, nights=2, hours=0.25)
    for folder, night in (("b", "SC4001E0-PSG.edf"), ("a", "SC4002E0-PSG.edf")):
        (raw / folder).mkdir()
        (raw / night).rename(raw / folder / night)
    trained = sources.TrainedOn("sleep-edf", sleep_edf.SETTINGS)
    options = sleep_edf.RecordingOptions(keep=("session",))
    (person,) = sleep_edf.SleepEdf().for_prediction(raw, trained, options)
    assert person.times is not None
    first = person.rows["session"].to_numpy() == "1"
    assert person.times[first].max() < 86_400 <= person.times[~first].min()


def test_recordings_of_one_name_keep_their_predictions_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_sine(tmp_path / folder / "night.edf", 100)
    trained = sources.TrainedOn("sleep-edf", sleep_edf.SETTINGS)
    people = list(sleep_edf.SleepEdf().for_prediction(tmp_path, trained, sleep_edf.RecordingOptions()))
    assert [person.patients[0] for person in people] == ["a_night", "b_night"]
    write_sine(tmp_path / "b" / "a_night.edf", 100).rename(tmp_path / "a_night.edf")
    with pytest.raises(DataError, match="would have the same name: rename one"):
        list(sleep_edf.SleepEdf().for_prediction(tmp_path, trained, sleep_edf.RecordingOptions()))


def test_mne_reads_the_stages_from_the_annotation_file(night: tuple[Recording, np.ndarray], tmp_path: Path) -> None:
    recording, probabilities = night
    _, notes, _ = write_stages(tmp_path / "out", recording, probabilities)
    words = {"W": "W", "N1": "N1", "N2": "N2", "N3": "N3", "REM": "R"}
    expected = [words[NAMES[k]] for k in probabilities.argmax(axis=1)]
    found = []
    for note in mne.read_annotations(notes):
        found += [note["description"].removeprefix("Sleep stage ")] * round(note["duration"] / 30)
    assert found == expected
    assert edfio.read_edf(notes).starttime == recording.start.time()  # type: ignore[union-attr]
    ours = label_windows(np.arange(40) * 30.0, 30.0, spans_of(read_annotations(notes), LabelMap(preset="aasm")))
    assert [ours.names[code] for code in ours.codes] == [NAMES[k] for k in probabilities.argmax(axis=1)]


def test_the_table_has_a_row_an_epoch_with_probabilities(night: tuple[Recording, np.ndarray], tmp_path: Path) -> None:
    recording, probabilities = night
    table, _, picture = write_stages(tmp_path / "out", recording, probabilities)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 40
    assert rows[3]["seconds"] == "90"
    assert rows[3]["stage"] == NAMES[int(probabilities[3].argmax())]
    np.testing.assert_allclose([float(rows[3][f"p_{name}"]) for name in NAMES], probabilities[3], atol=1e-6)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_probabilities_of_another_length_are_refused(night: tuple[Recording, np.ndarray], tmp_path: Path) -> None:
    recording, probabilities = night
    with pytest.raises(DataError, match="40 epochs"):
        write_stages(tmp_path / "out", recording, probabilities[:-1])
    assert not any((tmp_path / "out").iterdir())


def test_an_epoch_without_a_finite_output_has_no_stage(tmp_path: Path) -> None:
    recording = read_recording(write_sine(tmp_path / "a.edf", 100), SETTINGS)
    chances = np.tile(np.float32([0.1, 0.1, 0.6, 0.1, 0.1]), (3, 1))
    chances[1] = np.nan
    reasons = {"not_predicted": [None, "not finite", None]}
    said = SamplePredictions(TargetSpec("classes", NAMES), chances, ["N2", None, "N2"], None, reasons)
    table, notes, _ = sleep_edf.SleepEdf().write_predictions(tmp_path, recording, said)
    rows = pl.read_csv(table)
    assert rows["stage"].to_list() == ["N2", None, "N2"]
    assert rows["p_N2"].to_list() == [0.6, None, 0.6]
    assert rows["not_predicted"].to_list() == [None, "not finite", None]
    assert [note.text for note in read_annotations(notes)] == ["Sleep stage N2", "Sleep stage ?", "Sleep stage N2"]
