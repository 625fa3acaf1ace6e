"""Anybody's EEG or PSG: channels, rates, units, labels of every format, people and sessions, and new recordings."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import edfio
import mne
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manydg import sources
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.errors import ConfigError, DataError, ManyDGError, ManyDGWarning, StorageError
from manydg.predict import predict_raw
from manydg.sources import _edf, edf
from manydg.sources._edf import Montage, SignalFormat, SignalReader, read_header, read_segments
from manydg.sources._scorings import ScoringFormat, read_scoring
from manydg.training.run import train

START = datetime(2022, 3, 1, 23, 58)
STAGES = ("W", "N1", "N2", "N3", "REM")
NIGHT = ["W", "W", "N1", "N2", "N2", "N3", "N3", "REM", "W", "N2"]


def write_edf(
    path: Path,
    labels: Sequence[str] = ("C4", "M1", "EMG"),
    *,
    seconds: int = 300,
    rate: int | Sequence[int] = 64,
    unit: str = "uV",
    start: datetime = START,
    notes: Sequence[tuple[float, float, str]] = (),
    person: str = "X",
    seed: int = 0,
    bdf: bool = False,
) -> Path:
    """A small recording, written by edfio."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = [rate] * len(labels) if isinstance(rate, int) else rate
    kind, file = (edfio.BdfSignal, edfio.Bdf) if bdf else (edfio.EdfSignal, edfio.Edf)
    signals = [
        kind(rng.normal(0, 20, seconds * each), each, label=label, physical_dimension=unit, physical_range=(-200, 200))
        for label, each in zip(labels, rates, strict=True)
    ]
    annotations = [edfio.EdfAnnotation(*note) for note in notes]
    about = {"patient": edfio.Patient(code=person), "recording": edfio.Recording(startdate=start.date())}
    more = {"annotations": annotations} if notes else {}
    file(signals, starttime=start.time(), data_record_duration=1, **about, **more).write(path)
    return path


def stage_notes(stages: Sequence[str] = NIGHT) -> list[tuple[float, float, str]]:
    """The stages of 30 s epochs as one annotation a run, in the words of EDF+."""
    notes, epoch = [], 0
    for stage, run in itertools.groupby(stages):
        count = len(list(run))
        notes.append((30.0 * epoch, 30.0 * count, f"Sleep stage {'R' if stage == 'REM' else stage}"))
        epoch += count
    return notes


def write_stages(path: Path, stages: Sequence[str] = NIGHT) -> Path:
    path.write_text("\n".join(["stage", *stages, ""]))
    return path


def two_people(raw: Path, **options: object) -> Path:
    """A recording with a table of stages in a folder for each of two people."""
    for number, person in enumerate(("anna", "ben")):
        write_edf(raw / person / "night.edf", seed=number, **options)  # type: ignore[arg-type]
        write_stages(raw / person / "night.csv")
    return raw


def prepared(raw: Path, out: Path, **options: object) -> DomainDataset:
    return open_dataset(sources.prepare("edf", raw, out, **options))


def flow_of(data: DomainDataset) -> dict[str, int]:
    return {step.step: step.counts.get("left_out", 0) for step in data.info.cohort_flow}


# Real recordings


@pytest.fixture(scope="module")
def eegmat(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> DomainDataset:
    out = tmp_path_factory.mktemp("eegmat") / "data"
    return prepared(shared_data / "eegmat_bids", out, window=10, classes=("rest", "arithmetic"))


def test_a_real_bids_dataset_has_the_windows_that_edfio_reads(eegmat: DomainDataset, shared_data: Path) -> None:
    assert eegmat.n_patients == 36
    assert eegmat.target.names == ("rest", "arithmetic")
    counts = [0, 0]
    for number, task in enumerate(("rest", "arithmetic")):
        for file in (shared_data / "eegmat_bids").rglob(f"*{task}_eeg.edf"):
            counts[number] += int(edfio.read_edf(file).duration // 10)
    assert [int((eegmat.targets == code).sum()) for code in (0, 1)] == counts
    own = eegmat.subset(["04"])
    recording = edfio.read_edf(shared_data / "eegmat_bids/sub-04/eeg/sub-04_task-rest_eeg.edf")
    assert eegmat.info.settings["channels"] == list(recording.labels)
    expected = np.stack([signal.data for signal in recording.signals])[:, :17000].reshape(16, 17, 1000)
    rest = own.column("signal").numpy()[own.targets.numpy() == 0]
    np.testing.assert_allclose(rest, expected.transpose(1, 0, 2), atol=1e-2)


def test_real_recordings_are_trained_on_and_predicted_with_what_joins_them_back(
    eegmat: DomainDataset, shared_data: Path, tmp_path: Path
) -> None:
    few = eegmat.subset(eegmat.patients[:8].tolist())
    train(few, algorithm="base", epochs=1, ratios=(0.6, 0.2, 0.2), out=tmp_path / "run")
    written = predict_raw(tmp_path / "run", shared_data / "eegmat_bids" / "sub-04", tmp_path / "out")
    assert [path.name for path in written if path.suffix == ".csv"] == [
        "sub-04_task-arithmetic_eeg.csv", "sub-04_task-rest_eeg.csv",
    ]  # fmt: skip
    table = pl.read_csv(tmp_path / "out" / "sub-04_task-rest_eeg.csv")
    assert table["onset"].to_list() == [10.0 * k for k in range(17)]
    assert table["row"].to_list() == list(range(17))
    assert set(table["recording"]) == {"sub-04_task-rest_eeg"}
    notes = mne.read_annotations(tmp_path / "out" / "sub-04_task-rest_eeg-annotations.edf")
    assert notes.duration.sum() == 170
    described = [name for note in notes for name in [note["description"]] * round(note["duration"] / 10)]
    assert described == table["predicted"].to_list()
    # Both recordings of the person are one patient: what a model with context sees is all of them.
    assert table["distance"].n_unique() == 1
    kept = predict_raw(
        tmp_path / "run",
        shared_data / "eegmat_bids" / "sub-04",
        tmp_path / "kept",
        keep=["patient", "clock", "session"],
    )
    table = pl.read_csv(next(path for path in kept if path.name == "sub-04_task-rest_eeg.csv"))
    assert table.columns[:6] == ["recording", "row", "onset", "patient", "clock", "session"]
    assert set(table["patient"].cast(str).str.zfill(2)) == {"04"}
    begins = table["clock"].str.to_datetime("%Y-%m-%d %H:%M:%S%.3f")
    assert begins.diff().drop_nulls().dt.total_seconds().unique().to_list() == [10]
    with pytest.raises(ConfigError, match="of recordings patient, session, clock can be kept, not 'age'"):
        predict_raw(tmp_path / "run", shared_data / "eegmat_bids" / "sub-04", tmp_path / "no", keep=["age"])


def test_real_hypnograms_label_a_made_up_recording_of_another_laboratory(shared_data: Path, tmp_path: Path) -> None:
    hypnogram = shared_data / "sleep_edf_hypnograms" / "SC4001EC-Hypnogram.edf"
    raw, start = tmp_path / "raw", read_header(hypnogram).start
    assert start is not None
    (raw / "SC4001EC-Hypnogram.edf").parent.mkdir()
    (raw / "SC4001EC-Hypnogram.edf").write_bytes(hypnogram.read_bytes())
    labels = ("C4", "M1", "EOG", "EMG")
    write_edf(raw / "SC4001E0-PSG.edf", labels, seconds=32_000, rate=256, start=start)
    features = pl.read_parquet(
        shared_data / "sleep_edf_78_features" / "epochs.parquet",
        columns=["subject_id", "night_id", "epoch_idx", "stage"],
    )
    with pytest.warns(
        ManyDGWarning, match=r"go on after the signal ends, by 1,\d+ windows in all .first: SC4001E0-PSG"
    ):
        data = prepared(
            raw, tmp_path / "out", channels=("C4-M1", "EMG"), rate=100, patient=r"(SC4\d\d)(\d)", wake_margin=10
        )  # fmt: skip
    assert data.column("signal").shape[1:] == (2, 3000)
    assert data.times is not None
    epochs = (data.times / 30).long().tolist()
    night = features.filter(subject_id="SC400", night_id="N1")
    stages = dict(zip(night["epoch_idx"], night["stage"], strict=True))
    assert [data.target.names[code] for code in data.targets.tolist()] == [stages[epoch] for epoch in epochs]
    assert epochs[-1] == 32_000 // 30 - 1


# Channels, units, rates, filters


def header_with(tmp_path: Path, *labels: str) -> edf.EdfHeader:
    return read_header(write_edf(tmp_path / "a.edf", labels, seconds=2))


@pytest.mark.parametrize(
    ("wanted", "name", "plus", "minus"),
    [
        ("EEG C4", "EEG C4", ("EEG C4",), ()),
        ("c4", "c4", ("EEG C4",), ()),
        ("C4-M1", "C4-M1", ("EEG C4",), ("M1",)),
        ("C4 - mean(M1,M2)", "C4 - mean(M1,M2)", ("EEG C4",), ("M1", "M2")),
        ("O2-M1", "O2-M1", ("O2-M1",), ()),
        ("eye=E1-M2", "eye", ("E1",), ("M2",)),
        ("T7", "T7", ("T3.",), ()),
        ("F3", "F3", ("EEG F3-REF",), ()),
        ("A1", "A1", ("M1",), ()),
        ("E2", "E2", ("EOG E2",), ()),
        ("chin - A1", "chin - A1", ("EMG-1",), ("M1",)),
        ("EMG-1", "EMG-1", ("EMG-1",), ()),
        ("mean(C4,F3)", "mean(C4,F3)", ("EEG C4", "EEG F3-REF"), ()),
    ],
)
def test_a_channel_is_found_by_name_alias_or_derivation(
    tmp_path: Path, wanted: str, name: str, plus: tuple[str, ...], minus: tuple[str, ...]
) -> None:
    header = header_with(tmp_path, "EEG C4", "M1", "M2", "O2-M1", "E1", "T3.", "EEG F3-REF", "EMG-1", "EOG E2")
    (derived,) = Montage([wanted], {"A1": ("M1",), "chin": ("Chin", "EMG-1")}).derive(header)
    assert (derived.name, derived.plus, derived.minus) == (name, plus, minus)
    # What is stored with a model finds the same again.
    assert Montage([derived.expression]).derive(header) == [derived]


def test_a_pattern_stands_for_all_channels_that_fit_it(tmp_path: Path) -> None:
    header = header_with(tmp_path, "EEG C4", "EEG C3", "EOG", "M1")
    assert [each.name for each in Montage(["EEG*", "EOG"]).derive(header)] == ["EEG C4", "EEG C3", "EOG"]
    referenced = Montage(["EEG* - mean(EEG*)"]).derive(header)
    assert [each.plus for each in referenced] == [("EEG C4",), ("EEG C3",)]
    assert {each.minus for each in referenced} == {("EEG C4", "EEG C3")}


def test_a_missing_channel_is_named_with_what_is_there_and_what_is_near(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    with pytest.raises(
        DataError, match=r"night.edf has no channel 'C4-M2'; its channels are C4, M1, EMG. Near matches: .*M1"
    ):
        prepared(raw, tmp_path / "out", channels=("C4-M2",))
    with pytest.raises(ConfigError, match="'EMG' is asked for twice"):
        prepared(raw, tmp_path / "out", channels=("EMG", "E*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_one_name_for_two_channels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 channels that 'c4' may mean \(C4, EEG C4\)"):
        Montage(["c4"]).derive(header_with(tmp_path, "C4", "EEG C4"))
    assert Montage(["C4"]).derive(header_with(tmp_path, "C4", "EEG C4"))[0].plus == ("C4",)


def test_derivations_are_differences_of_what_edfio_reads(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    data = prepared(raw, tmp_path / "out", channels=("C4-M1", "mix=EMG - mean(C4,M1)"))
    file = edfio.read_edf(raw / "ben" / "night.edf")
    c4, m1, emg = (file.get_signal(label).data for label in ("C4", "M1", "EMG"))
    expected = np.stack([c4 - m1, emg - (c4 + m1) / 2]).reshape(2, 10, 1920).transpose(1, 0, 2)
    np.testing.assert_allclose(data.subset(["ben"]).column("signal").numpy(), expected, atol=1e-3)
    assert data.info.settings["channels"] == ["C4-M1", "mix"]


@pytest.mark.parametrize("bdf", [False, True])
def test_24_and_16_bits_are_read_as_edfio_reads_them(tmp_path: Path, bdf: bool) -> None:
    path = write_edf(tmp_path / ("a.bdf" if bdf else "a.edf"), rate=50, bdf=bdf, notes=[(3.0, 2.0, "note")])
    reader = SignalReader(read_header(path), SignalFormat(("C4", "EMG"), 50.0, 10.0))
    signal = reader.windows(reader.grid()[0])
    file = (edfio.read_bdf if bdf else edfio.read_edf)(path)
    expected = np.stack([file.get_signal(label).data for label in ("C4", "EMG")]).reshape(2, 30, 500)
    np.testing.assert_allclose(signal, expected.transpose(1, 0, 2), atol=1e-4 if bdf else 1e-3)
    assert [note.text for note in read_scoring(path, ScoringFormat())] == ["note"]


def test_another_unit_is_converted_refused_or_assumed(tmp_path: Path) -> None:
    for unit in ("uV", "mV", "", "%"):
        two_people(tmp_path / f"raw-{unit}", unit=unit)
    by_unit = [prepared(tmp_path / f"raw-{unit}", tmp_path / unit) for unit in ("uV",)]
    with pytest.warns(ManyDGWarning, match="is not plausible"):
        by_unit.append(prepared(tmp_path / "raw-mV", tmp_path / "mV"))
    signals = [data.column("signal").numpy() for data in by_unit]
    np.testing.assert_allclose(signals[1], 1000 * signals[0], rtol=1e-4, atol=0.1)
    for unit in ("", "%"):
        with pytest.raises(DataError, match=f"channel 'C4' is in '{unit}', expected microvolts"):
            prepared(tmp_path / f"raw-{unit}", tmp_path / "out", channels=("C4",))
    assumed = prepared(tmp_path / "raw-", tmp_path / "assumed", channels=("C4", "M1", "EMG"), unit="uV")
    np.testing.assert_array_equal(assumed.column("signal").numpy(), signals[0])
    with pytest.raises(ConfigError, match="unit is one of"):
        prepared(tmp_path / "raw-", tmp_path / "out", unit="mmHg")


def test_different_rates_are_refused_until_one_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for person, rates in {"anna": (64, 64, 32), "ben": (128, 64, 64)}.items():
        write_stages(write_edf(raw / person / "night.edf", rate=rates).with_suffix(".csv"))
    with pytest.raises(DataError, match=r"several rates: 32 Hz .1 channels, such as night.edf, EMG.*--rate 32"):
        prepared(raw, tmp_path / "out")
    data = prepared(raw, tmp_path / "out", rate=50)
    assert data.column("signal").shape[1:] == (3, 1500)
    assert data.info.settings["rate"] == 50


def sine(path: Path, *hertz: float, rate: int = 256, seconds: int = 60) -> EdfFile:
    time = np.arange(seconds * rate) / rate
    wave = sum(40 * np.sin(2 * np.pi * each * time) for each in hertz)
    edfio.Edf([edfio.EdfSignal(wave, rate, label="Cz", physical_dimension="uV", physical_range=(-200, 200))]).write(
        path
    )
    return path


EdfFile = Path


def test_a_filter_takes_out_what_is_outside_its_band_and_at_the_notch(tmp_path: Path) -> None:
    path = sine(tmp_path / "a.edf", 0.1, 10.0, 50.0, 110.0)
    format = SignalFormat(("Cz",), 256.0, 20.0, low=1.0, high=70.0, notch=50.0)
    reader = SignalReader(read_header(path), format)
    middle = reader.windows(reader.grid()[0])[1, 0]
    time = np.arange(20 * 256, 40 * 256) / 256
    np.testing.assert_allclose(middle, 40 * np.sin(2 * np.pi * 10 * time), atol=1.5)
    for options in ({"low": 1.0}, {"high": 70.0}, {"notch": 50.0}):
        some = SignalReader(read_header(path), SignalFormat(("Cz",), 256.0, 20.0, **options))
        assert np.abs(some.windows(some.grid()[0])[1, 0] - middle).max() > 20


def test_a_long_recording_is_filtered_through_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_edf(tmp_path / "a.edf")
    format = SignalFormat(("C4-M1", "EMG"), 50.0, 10.0, low=1.0, resample=True)
    expected, there = (SignalReader(read_header(path), format, scratch=tmp_path) for _ in range(2))
    signal = expected.windows(expected.grid()[0])
    monkeypatch.setattr(_edf, "_IN_MEMORY", 0)
    np.testing.assert_array_equal(there.windows(there.grid()[0]), signal)
    assert [file.name for file in tmp_path.iterdir()] == ["a.edf"]
    monkeypatch.setattr(_edf.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"a.edf needs 0.0 GB in .* while it is resampled or filtered: free some"):
        SignalReader(read_header(path), format, scratch=tmp_path).windows(np.zeros(1, np.int64))


def test_a_recording_is_resampled_without_folding(tmp_path: Path) -> None:
    path = sine(tmp_path / "a.edf", 6.0, 90.0)
    reader = SignalReader(read_header(path), SignalFormat(("Cz",), 100.0, 20.0, resample=True))
    time = np.arange(2000, 4000) / 100
    np.testing.assert_allclose(reader.windows(reader.grid()[0])[1, 0], 40 * np.sin(2 * np.pi * 6 * time), atol=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"notch": 50, "rate": 64}, "a filter at 50 Hz .notch. needs a rate above 100 Hz"),
        ({"bandpass": "35-0.3"}, "from 35 to 0.3 Hz lets nothing pass"),
        ({"bandpass": "slow"}, "written as LOW-HIGH in Hz"),
        ({"alias": ["M1"]}, "written as NAME=LABEL"),
        ({"label": ["N2"]}, "mapped as 'TEXT=CLASS'"),
        ({"patient": "("}, "nor a regular expression"),
        ({"wake_margin": 5, "classes": ("N2", "N3")}, "a wake margin needs the class W"),
        ({"classes": ("N2", "N9")}, "no label means 'N9'; the labels are 'N2' .6."),
        ({"classes": ("N2",)}, "there is nothing to tell 'N2' from: name two classes or more"),
    ],
)
def test_an_impossible_option_is_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    raw = two_people(tmp_path / "raw")
    with pytest.raises(ConfigError, match=words):
        prepared(raw, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


# Windows


@pytest.mark.parametrize("filtered", [False, True])
def test_windows_of_any_length_and_stride_are_parts_of_the_recording(tmp_path: Path, filtered: bool) -> None:
    path = write_edf(tmp_path / "a.edf", ("C4",), seconds=61)
    options = {"low": 1.0} if filtered else {}
    whole = SignalReader(read_header(path), SignalFormat(("C4",), 64.0, 61.0, **options))
    reader = SignalReader(read_header(path), SignalFormat(("C4",), 64.0, 7.5, 2.25, **options))
    starts, onsets = reader.grid()
    assert onsets.tolist() == [2.25 * k for k in range(24)]
    expected = np.stack([whole.windows(np.zeros(1, np.int64))[0, 0, k : k + 480] for k in starts])
    np.testing.assert_array_equal(reader.windows(starts)[:, 0], expected)
    np.testing.assert_array_equal(reader.windows(starts[[2, 3, 9]])[:, 0], expected[[2, 3, 9]])


def test_windows_may_begin_with_the_labels(tmp_path: Path) -> None:
    notes = [(3.0, 4.1, "T1"), (9.3, 4.1, "T2"), (15.0, 8.0, "T1"), (30.0, 1.0, "T2")]
    for person in ("a", "b"):
        write_edf(tmp_path / "raw" / person / "x.edf", seconds=40, notes=notes)
    with pytest.raises(DataError, match="of the classes T1, T2, only 'T1' covers a whole window of 4 s"):
        prepared(tmp_path / "raw", tmp_path / "out", window=4)
    data = prepared(tmp_path / "raw", tmp_path / "out", window=4, align="labels")
    assert data.times is not None
    assert data.subset(["a"]).times.tolist() == pytest.approx([3.0, 9.3, 15.0, 19.0])  # type: ignore[union-attr]
    assert data.subset(["a"]).targets.tolist() == [0, 1, 0, 0]


def as_discontinuous(path: Path, pause: float, at: int) -> Path:
    """The file as EDF+D, with a pause before its n-th data record."""
    content, header = bytearray(path.read_bytes()), read_header(path)
    content[192:197] = b"EDF+D"
    (channel,) = [channel for channel in header.channels if channel.holds_annotations]
    begin, size = 256 * (len(header.channels) + 1) + 2 * channel.offset, 2 * channel.samples_per_record
    for record in range(header.records):
        begins = begin + record * 2 * header.record_samples
        onset, _, rest = bytes(content[begins : begins + size]).partition(b"\x14")
        time = float(onset) + (pause if record >= at else 0)
        content[begins : begins + size] = (f"+{time:g}".encode() + b"\x14" + rest)[:size].ljust(size, b"\0")
    path.write_bytes(content)
    return path


def test_no_window_spans_the_gap_of_a_discontinuous_recording(tmp_path: Path) -> None:
    path = write_edf(tmp_path / "a.edf", ("C4",), seconds=100, notes=[(0.0, 500.0, "rest of the day")])
    before = SignalReader(read_header(path), SignalFormat(("C4",), 64.0, 30.0))
    whole = before.windows(np.zeros(1, np.int64))
    as_discontinuous(path, 1000.5, 40)
    assert [(part.first, part.records, part.onset) for part in read_segments(read_header(path))] == [
        (0, 40, 0.0), (40, 60, 1040.5),
    ]  # fmt: skip
    reader = SignalReader(read_header(path), SignalFormat(("C4",), 64.0, 30.0))
    starts, onsets = reader.grid()
    assert onsets.tolist() == [0.0, 1040.5, 1070.5]
    assert starts.tolist() == [0, 40 * 64, 70 * 64]
    np.testing.assert_array_equal(reader.windows(starts)[:1], whole)


def test_a_discontinuous_recording_without_times_is_refused(tmp_path: Path) -> None:
    path = write_edf(tmp_path / "a.edf", ("C4",), seconds=10)
    content = path.read_bytes()
    path.write_bytes(content[:192] + b"EDF+D" + content[197:])
    with pytest.raises(DataError, match=r"discontinuous \(EDF\+D\), but its data records do not say"):
        SignalReader(read_header(path), SignalFormat(("C4",), 64.0, 5.0)).grid()


# Labels


NSRR = {"W": "Wake|0", "N1": "Stage 1 sleep|1", "N2": "Stage 2 sleep|2", "N3": "Stage 4 sleep|4", "REM": "REM sleep|5"}
CODE = {"W": 0, "N1": 1, "N2": 2, "N3": 3, "REM": 5}


def as_events(path: Path, mark: str, head: str, label: Callable[[str], str] = str) -> None:
    rows = [mark.join([f"{onset:g}", f"{length:g}", label(text)]) for onset, length, text in stage_notes()]
    path.write_text("\n".join([head, *rows, ""] if head else [*rows, ""]))


def as_clock(path: Path) -> None:
    moments = [START + timedelta(seconds=30 * k) for k in range(len(NIGHT) + 1)]
    ends = itertools.pairwise(moments)
    rows = [f"{a:%H:%M:%S};{b:%H:%M:%S};{stage}" for (a, b), stage in zip(ends, NIGHT, strict=True)]
    path.write_text("\n".join(["Start;End;Stage", *rows, ""]))


def as_nsrr(path: Path) -> None:
    events = "".join(
        f"<ScoredEvent><EventType>Stages|Stages</EventType><EventConcept>{NSRR[stage]}</EventConcept>"
        f"<Start>{30 * k}</Start><Duration>30</Duration></ScoredEvent>"
        for k, stage in enumerate(NIGHT)
    )
    path.write_text(
        f"<PSGAnnotation><EpochLength>30</EpochLength><ScoredEvents>{events}</ScoredEvents></PSGAnnotation>"
    )


def as_profusion(path: Path) -> None:
    stages = "".join(f"<SleepStage>{CODE[stage]}</SleepStage>" for stage in NIGHT)
    path.write_text(
        '<?xml version="1.0"?><CMPStudyConfig><EpochLength>30</EpochLength><ScoredEvents/>'
        f"<SleepStages>{stages}</SleepStages></CMPStudyConfig>"
    )


def as_annotations(path: Path) -> None:
    notes = [edfio.EdfAnnotation(*note) for note in stage_notes()]
    recording = edfio.Recording(startdate=START.date())
    edfio.Edf([], recording=recording, starttime=START.time(), annotations=notes).write(path)


FORMATS: dict[str, Callable[[Path], object]] = {
    "night.csv": write_stages,
    "night_stages.txt": lambda path: path.write_text("\n".join(NIGHT)),
    "night-epochs.tsv": lambda path: path.write_text(
        "\n".join(["epoch\tsleep stage", *(f"{k}\t{stage}" for k, stage in enumerate(NIGHT, 1))])
    ),
    "night-numbers.csv": lambda path: path.write_text("\n".join(["stage", *(str(CODE[stage]) for stage in NIGHT)])),
    "night.tsv": lambda path: as_events(path, "\t", "onset\tduration\ttrial_type"),
    "night-events.csv": lambda path: as_events(path, ",", "", lambda text: f'"{text}"'),
    "night-clock.csv": as_clock,
    "night-nsrr.xml": as_nsrr,
    "night-profusion.xml": as_profusion,
    "night-hypnogram.edf": as_annotations,
}


@pytest.fixture(scope="module")
def with_annotations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two recordings with their stages as annotations, and the content of the dataset they become."""
    folder = tmp_path_factory.mktemp("annotated")
    for number, person in enumerate(("anna", "ben")):
        write_edf(folder / "raw" / person / "night.edf", notes=stage_notes(), seed=number)
    return folder, prepared(folder / "raw", folder / "out").content_hash()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_labels_gives_the_same_dataset(
    name: str, with_annotations: tuple[Path, str], tmp_path: Path
) -> None:
    for number, person in enumerate(("anna", "ben")):
        write_edf(tmp_path / "raw" / person / "night.edf", seed=number)
        FORMATS[name](tmp_path / "raw" / person / name)
    data = prepared(tmp_path / "raw", tmp_path / "out", labels="aasm")
    assert [data.target.names[code] for code in data.subset(["ben"]).targets.tolist()] == NIGHT
    assert data.content_hash() == with_annotations[1]


def test_sleep_stages_are_recognised_and_other_words_are_classes_of_their_own(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    assert prepared(raw, tmp_path / "stages").target.names == STAGES
    for person in ("anna", "ben"):
        write_stages(raw / person / "night.csv", ["calm", "calm", *(["busy"] * 8)])
    data = prepared(raw, tmp_path / "words")
    assert (data.target.kind, data.target.names) == ("binary", ("busy", "calm"))
    ordered = prepared(raw, tmp_path / "ordered", classes=("calm", "busy"))
    assert ordered.target.names == ("calm", "busy")
    assert ordered.subset(["ben"]).targets.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_rechtschaffen_and_kales_keep_stages_3_and_4_apart(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    for person in ("anna", "ben"):
        write_stages(raw / person / "night.csv", ["W", "S1", "S2", "S3", "S4", "REM", "MT", "?", "S2", "S2"])
    data = prepared(raw, tmp_path / "rk", labels="rk")
    assert data.target.names == ("W", "S1", "S2", "S3", "S4", "REM")
    assert flow_of(data)["without movement time"] == 2
    assert flow_of(data)["with one label throughout"] == 2
    assert prepared(raw, tmp_path / "aasm", labels="aasm").target.names == STAGES


def test_what_maps_to_no_class_is_counted_and_listed(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    notes = [*stage_notes(), (40.0, 12.0, "Arousal"), (80.0, 9.0, "Arousal"), (5.0, 0.0, "Lights off")]
    for person in ("anna", "ben"):
        write_edf(raw / person / "night.edf", notes=notes)
    with pytest.warns(
        ManyDGWarning, match="6 labels map to no class and are left out: 'Arousal' .4., 'Lights off' .2."
    ):
        data = prepared(raw, tmp_path / "out")
    assert len(data) == 20
    assert data.target.names == STAGES
    mapped = prepared(
        raw, tmp_path / "two", label=["Sleep stage W=wake", "Sleep stage *=sleep", "Arousal=", "Lights*="]
    )
    assert mapped.target.names == ("wake", "sleep")
    with pytest.warns(ManyDGWarning, match=r"--label 'Stage 2=...' has no effect, no label reads so; the labels are"):
        prepared(raw, tmp_path / "three", labels="aasm", label=["Stage 2=N2", "Arousal=", "Lights*="])
    assert mapped.subset(["ben"]).targets.tolist() == [int(stage != "W") for stage in NIGHT]
    with pytest.raises(
        DataError, match=r"not one label maps to a class: the labels are 'Arousal' \(4\), 'Sleep stage N2' \(4\)"
    ):
        prepared(raw, tmp_path / "out", label=["Stadium 2=N2"], overwrite=True)


def test_a_4_that_may_be_rem_is_questioned(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    for person in ("anna", "ben"):
        write_stages(raw / person / "night.csv", [*"0012234444"])
    with pytest.warns(ManyDGWarning, match="if 4 is REM here, say --label 4=REM"):
        assert "REM" not in prepared(raw, tmp_path / "a", labels="aasm").target.names
    assert "REM" in prepared(raw, tmp_path / "b", labels="aasm", label=["4=REM"]).target.names


def test_two_labels_of_one_window_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    notes = [(0.0, 150.0, "calm"), (120.0, 180.0, "busy")]
    for person in ("anna", "ben"):
        write_edf(tmp_path / "raw" / person / "x.edf", notes=notes)
    with pytest.raises(DataError, match=r"x.edf gives two labels to one window, 'busy' and 'calm' at 120 s: mend it"):
        prepared(tmp_path / "raw", tmp_path / "out")
    data = prepared(tmp_path / "raw", tmp_path / "out", overlaps="skip")
    assert len(data) == 18
    assert flow_of(data)["with no second label"] == 2


def test_a_label_that_overlaps_a_part_of_a_window_is_warned_of(tmp_path: Path) -> None:
    for person in ("anna", "ben"):
        notes = [(0.0, 150.0, "calm"), (150.2, 149.8, "busy"), *([(165.0, 5.0, "calm")] if person == "ben" else [])]
        write_edf(tmp_path / "raw" / person / "x.edf", notes=notes)
    with pytest.warns(ManyDGWarning, match=r"labels overlap: 1 windows of 1 recordings \(first: x.edf\)"):
        assert len(prepared(tmp_path / "raw", tmp_path / "out", align="labels", window=10)) == 58


def test_labels_that_go_on_after_the_signal_are_counted(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    write_stages(raw / "ben" / "night.csv", [*NIGHT, "N2", "N2", "W"])
    with pytest.warns(ManyDGWarning, match="labels of 1 recordings go on after the signal ends, by 3 windows in all"):
        assert len(prepared(raw, tmp_path / "out")) == 20
    write_stages(raw / "ben" / "night.csv", NIGHT[:7])
    data = prepared(raw, tmp_path / "short")
    assert flow_of(data)["30 s windows with signal and labels"] == 3


def test_an_event_without_a_length_labels_nothing_unless_one_is_given(tmp_path: Path) -> None:
    for person in ("a", "b"):
        path = write_edf(tmp_path / f"sub-{person}" / "eeg" / f"sub-{person}_task-x_eeg.edf", seconds=40)
        rows = ["onset\tduration\ttrial_type", "4\tn/a\tleft", "20.5\t0\tright", "30\tn/a\tn/a"]
        path.with_name(f"sub-{person}_task-x_events.tsv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"not one label in .* lasts a window of 2 s"):
        prepared(tmp_path, tmp_path / "out", window=2, align="labels")
    data = prepared(tmp_path, tmp_path / "out", window=2, align="labels", event_seconds=4)
    assert data.subset(["a"]).times.tolist() == [4.0, 6.0, 20.5, 22.5]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("night.xml", "<PatientStudy><Stage/></PatientStudy>", "XML of another vendor: it begins with <PatientStudy>"),
        ("night.xml", "<PSGAnnotation><Scored", "is not whole XML"),
        ("night.xml", "<!DOCTYPE x [<!ENTITY a 'b'>]><PSGAnnotation/>", "defines entities"),
        (
            "night.xml",
            "<PSGAnnotation><ScoredEvent><Start>x</Start></ScoredEvent></PSGAnnotation>",
            "which is no number",
        ),
        ("night.csv", "", "is empty: it has no labels"),
        ("night.csv", "epoch,stage\n1,W\n3,W\n", "line 3: epoch 3 follows epoch 1"),
        ("night.csv", "onset,duration,comment\n0,30,W\n", "no column of labels that is known; its columns are onset"),
        ("night.csv", "onset,duration,stage\nsoon,30,W\n", "line 2: 'soon' is no number of seconds"),
        ("night.csv", "onset,end,stage\n60,30,W\n", "an event at 60 s lasts -30 s"),
        ("night.csv", "onset,duration,stage\n99999,30,W\n1,30,N1\n", "do not overlap by a single window"),
    ],
)
def test_a_file_of_labels_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    raw = tmp_path / "raw"
    for person in ("anna", "ben"):
        write_edf(raw / person / "night.edf", seconds=90)
        (raw / person / name).write_text(content)
    if "overlap" in words:
        for person in ("anna", "ben"):
            (raw / person / name).write_text("onset,duration,stage\n-500,40,W\n-60,60,N1\n")
    with pytest.raises(DataError, match=words):
        prepared(raw, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_xml_that_defines_entities_is_refused_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    text = '<!DOCTYPE x [<!ENTITY a "aaaa">]><PSGAnnotation><ScoredEvents>&a;</ScoredEvents></PSGAnnotation>'
    (tmp_path / "a.xml").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"a.xml defines entities, which no scoring needs: it is not read"):
        read_scoring(tmp_path / "a.xml", ScoringFormat())


def test_a_column_of_labels_may_have_any_name(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    for person in ("anna", "ben"):
        (raw / person / "night.csv").write_text(
            "\n".join(["epoch,Schlaf,by", *(f"{k},{s},x" for k, s in enumerate(NIGHT))])
        )
    assert len(prepared(raw, tmp_path / "out", label_column="Schlaf")) == 20
    with pytest.raises(DataError, match="no column 'Schlafe'; its columns are epoch, Schlaf, by"):
        prepared(raw, tmp_path / "out", label_column="Schlafe", overwrite=True)


def test_which_of_two_files_holds_the_labels_is_asked(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    for person in ("anna", "ben"):
        write_stages(raw / person / "night-second.csv", NIGHT[::-1])
    with pytest.raises(DataError, match=r"2 files may hold the labels of night.edf: night-second.csv, night.csv"):
        prepared(raw, tmp_path / "out")
    data = prepared(raw, tmp_path / "out", scoring="{name}-second.csv")
    assert [data.target.names[code] for code in data.subset(["anna"]).targets.tolist()] == NIGHT[::-1]
    with pytest.raises(DataError, match=r"there is no file 'night-third.csv' with the labels of"):
        prepared(raw, tmp_path / "out", scoring="{name}-third.csv", overwrite=True)


damaged = st.one_of(
    st.binary(max_size=200),
    st.text(alphabet="onsetduri,;\t\n\r0123456789.:-W<>/eE\"'", max_size=200).map(str.encode),
    st.lists(
        st.tuples(st.sampled_from(["0", "30", "nan", "1e999", "-5", "22:00:00", ""]), st.sampled_from(["W", "", "N2"])),
        max_size=5,
    ).map(lambda rows: "\n".join(["onset,duration,stage", *(f"{a},{a},{b}" for a, b in rows)]).encode()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=damaged, name=st.sampled_from(["a.csv", "a.xml", "a.txt"]), start=st.sampled_from([START, None]))
def test_no_file_of_labels_brings_out_a_foreign_error(
    content: bytes, name: str, start: datetime | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        notes = read_scoring(tmp_path / name, ScoringFormat(), start)
    except ManyDGError as error:
        if not str(error).isprintable():
            raise AssertionError(f"not one printable line: {error!r}") from error
    else:
        assert all(np.isfinite([note.onset, note.duration]).all() for note in notes)


# People and sessions


def flat(raw: Path, *names: str, **options: object) -> Path:
    for number, name in enumerate(names):
        write_stages(write_edf(raw / f"{name}.edf", seed=number, seconds=300, **options).with_suffix(".csv"))  # type: ignore[arg-type]
    return raw


def test_people_are_told_apart_by_pattern_file_header_or_table(tmp_path: Path) -> None:
    raw = flat(tmp_path / "raw", "P1_N1", "P1_N2", "P2_N1")
    with pytest.raises(ConfigError, match=r"nothing says whose recording P1_N1.edf is.*--patient file"):
        prepared(raw, tmp_path / "out")
    assert prepared(raw, tmp_path / "a", patient=r"(P\d)").patients.tolist() == ["P1", "P2"]
    assert prepared(raw, tmp_path / "b", patient="file").n_patients == 3
    with pytest.raises(DataError, match="its header names no patient"):
        prepared(raw, tmp_path / "out", patient="header")
    table = tmp_path / "people.csv"
    table.write_text("file,patient,session\nP1_N1,anna,2\nP1_N2.edf,anna,1\nP2_N1,ben,1\n")
    data = prepared(raw, tmp_path / "c", patient_table=table)
    assert data.patients.tolist() == ["anna", "ben"]
    table.write_text("file,patient\nP1_N1,anna\nP1_N1,ben\n")
    with pytest.raises(DataError, match="line 3: 'P1_N1' is given to two people, anna and ben"):
        prepared(raw, tmp_path / "out", patient_table=table)
    table.write_text("file,patient\nP1_N1,anna\n")
    with pytest.raises(DataError, match=r"does not say whose recording P1_N2.edf is"):
        prepared(raw, tmp_path / "out", patient_table=table)


def test_a_pattern_that_finds_nobody_or_two_people_is_refused(tmp_path: Path) -> None:
    raw = flat(tmp_path / "raw", "P1_P2", "P3")
    with pytest.raises(DataError, match=r"P1_P2.edf: the pattern 'P.d' finds several patients .*P1 and P2.*narrower"):
        prepared(raw, tmp_path / "out", patient=r"P\d")
    with pytest.raises(DataError, match="finds no patient in the file's name"):
        prepared(raw, tmp_path / "out", patient=r"P\d_")


def test_headers_that_name_other_people_than_the_rule_are_warned_of(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for folder, person in {"a": "K17", "b": "K17", "c": "K3"}.items():
        write_stages(write_edf(raw / folder / "night.edf", person=person).with_suffix(".csv"))
    with pytest.warns(
        UserWarning, match="headers name 'K17' in recordings of several patients .a, b.: one taken for several"
    ):
        assert prepared(raw, tmp_path / "out").n_patients == 3
    assert prepared(raw, tmp_path / "headers", patient="header").patients.tolist() == ["K3", "K17"]
    shutil.rmtree(raw / "b")
    write_stages(write_edf(raw / "c" / "other.edf", person="K4").with_suffix(".csv"))
    with pytest.warns(ManyDGWarning, match=r"'c' name several people in their headers \(K3, K4\): two taken for one"):
        prepared(raw, tmp_path / "more")


def test_a_patients_recordings_are_laid_out_in_time_with_a_pause_that_no_recording_has(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name, start in {
        "n1": START + timedelta(days=3),
        "n2": START,
        "n3": START + timedelta(days=3, minutes=1),
    }.items():
        write_stages(write_edf(raw / "anna" / f"{name}.edf", start=start).with_suffix(".csv"))
    write_stages(write_edf(raw / "ben" / "n1.edf").with_suffix(".csv"))
    data = prepared(raw, tmp_path / "out")
    gap = data.info.session_gap
    assert gap == 30
    times = data.subset(["anna"]).times
    assert times is not None
    ordered = np.sort(times.numpy()).reshape(3, 10)
    # n2 came first, and n1 three days later; n3 cannot begin while n1 lasts, so it follows with a pause.
    np.testing.assert_array_equal(ordered[:, 0], [0.0, 3 * 86_400.0, 3 * 86_400.0 + 360.0])
    assert (np.diff(np.sort(times.numpy())) > gap).sum() == 2


def test_bids_people_sessions_units_and_bad_channels_are_read(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for person in ("01", "02"):
        stem = raw / f"sub-{person}" / "ses-a" / "eeg" / f"sub-{person}_ses-a_task-rest"
        write_edf(Path(f"{stem}_eeg.edf"), unit="", seconds=90)
        rows = ["name\ttype\tunits\tstatus", "C4\tEEG\tuV\tgood", "M1\tEEG\tuV\tbad", "EMG\tMISC\tuV\tgood"]
        Path(f"{stem}_channels.tsv").write_text("\n".join(rows))
    (raw / "task-rest_events.tsv").write_text("onset\tduration\ttrial_type\n0\t30\topen\n30\t60\tclosed\n")
    (raw / "participants.tsv").write_text("participant_id\nsub-01\nsub-02\nsub-03\n")
    with pytest.warns(ManyDGWarning) as said:
        data = prepared(raw, tmp_path / "out")
    lines = [str(warning.message) for warning in said]
    assert any("1 people are listed there but have no recording here (sub-03)" in line for line in lines)
    assert any("channels.tsv calls channels bad that are used: 'M1' (2)" in line for line in lines)
    assert data.patients.tolist() == ["01", "02"]
    assert data.info.settings["channels"] == ["C4", "M1"]
    assert data.subset(["01"]).targets.tolist() == [1, 0, 0]


def test_anonymised_bids_recordings_are_ordered_by_their_scans(tmp_path: Path) -> None:
    raw, hidden = tmp_path / "raw", datetime(1985, 1, 1)
    for person in ("01", "02"):
        folder = raw / f"sub-{person}" / "eeg"
        for task, label in (("a", "late"), ("b", "early")):
            write_edf(folder / f"sub-{person}_task-{task}_eeg.edf", start=hidden, seconds=60)
            (folder / f"sub-{person}_task-{task}_events.tsv").write_text(
                f"onset\tduration\ttrial_type\n0\t60\t{label}\n"
            )
        rows = [f"eeg/sub-{person}_task-{task}_eeg.edf\t2020-01-0{day}T10:00:00" for task, day in (("a", 3), ("b", 2))]
        (folder.parent / f"sub-{person}_scans.tsv").write_text("\n".join(["filename\tacq_time", *rows]))
    own = prepared(raw, tmp_path / "out").subset(["01"])
    assert own.times is not None
    assert dict(zip(own.times.tolist(), own.targets.tolist(), strict=True)) == {0: 0, 30: 0, 86_400: 1, 86_430: 1}


# Recordings that cannot be used


def test_recordings_that_cannot_be_used_are_refused_or_skipped_and_counted(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    write_stages(write_edf(raw / "carl" / "night.edf", ("C3",)).with_suffix(".csv"))
    write_edf(raw / "dora" / "night.edf")
    broken = write_edf(raw / "emma" / "night.edf")
    broken.write_bytes(broken.read_bytes()[:-1000])
    write_stages(write_edf(raw / "finn" / "night.edf", seconds=20).with_suffix(".csv"))
    with pytest.raises(DataError, match="is truncated"):
        prepared(raw, tmp_path / "out", channels=("C4",))
    with pytest.warns(ManyDGWarning) as said:
        data = prepared(raw, tmp_path / "out", channels=("C4",), unusable="skip")
    assert data.patients.tolist() == ["anna", "ben"]
    assert data.info.cohort_flow[0].to_json() == {
        "step": "recordings with labels", "patients": 2, "recordings": 2, "left_out": 4,
    }  # fmt: skip
    with pytest.warns(ManyDGWarning, match="is truncated"):
        one = prepared(raw, tmp_path / "one", channels=("C4",), unusable="skip", limit_patients=1)
    assert [step.to_json() for step in one.info.cohort_flow[:2]] == [
        {"step": "recordings with labels", "patients": 5, "recordings": 5, "left_out": 1},
        {"step": "limit on patients", "patients": 1, "recordings": 1, "left_out": 4},
    ]
    lines = " ".join(str(warning.message) for warning in said)
    for words in ("no channel 'C4'", "has no labels", "is truncated", "lasts 20 s, less than one window"):
        assert words in lines


def test_a_recording_without_labels_is_refused_with_the_remedy(tmp_path: Path) -> None:
    raw = two_people(tmp_path / "raw")
    table = raw / "ben" / "night.csv"
    table.write_text(table.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"ben/night.edf has no labels: night.csv states none.*--scoring"):
        prepared(raw, tmp_path / "out")
    table.unlink()
    with pytest.raises(DataError, match=r"ben/night.edf has no labels: no file of labels is named like it.*--scoring"):
        prepared(raw, tmp_path / "out")


def test_labels_of_another_night_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for person in ("anna", "ben"):
        write_edf(raw / person / "night.edf", start=START + timedelta(days=1))
        as_annotations(raw / person / "night-hypnogram.edf")
    with pytest.raises(DataError, match="they do not belong together"):
        prepared(raw, tmp_path / "out")


@pytest.mark.parametrize("shift", [timedelta(), timedelta(hours=1)])
def test_an_anonymised_date_is_no_other_night_but_another_hour_is(tmp_path: Path, shift: timedelta) -> None:
    raw = tmp_path / "raw"
    for person in ("anna", "ben"):
        write_edf(raw / person / "night.edf", start=datetime.combine(date(1985, 1, 1), START.time()) + shift)
        as_annotations(raw / person / "night-hypnogram.edf")
    if shift:
        with pytest.raises(DataError, match="they do not belong together"):
            prepared(raw, tmp_path / "out")
    else:
        assert len(prepared(raw, tmp_path / "out"))


def test_the_flow_adds_up_and_names_every_file(tmp_path: Path) -> None:
    raw = sources.synthesize("edf", tmp_path / "raw", patients=4, seed=3, layout="files")
    data = prepared(raw, tmp_path / "out", patient=r"(P\d+)-(N\d)", channels=("C4-M1",), rate=100, limit_patients=3)
    counted = [step.counts for step in data.info.cohort_flow if "samples" in step.counts]
    for before, after in itertools.pairwise(counted):
        assert after["samples"] == before["samples"] - after.get("left_out", 0)
    assert counted[-1] == {"patients": 3, "samples": len(data)}
    assert flow_of(data)["limit on patients"] == 2
    assert data.info.provenance is not None
    assert sorted(file.name for file in data.info.provenance.files) == sorted(
        path.name for path in raw.iterdir() if path.suffix in (".edf", ".csv") and "P004" not in path.name
    )


@pytest.mark.slow
def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    raw = sources.synthesize("edf", tmp_path / "raw", patients=3, minutes=2)
    one = prepared(raw, tmp_path / "one")
    assert prepared(raw, tmp_path / "two", workers=2).content_hash() == one.content_hash()


def test_the_twin_is_decided_by_its_seed_and_read_in_millivolts_too(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        sources.synthesize("edf", tmp_path / folder, patients=5, seed=seed, minutes=2, recordings=1)
    files = {folder: {p.name: p.read_bytes() for p in sorted((tmp_path / folder).rglob("*_*.*"))} for folder in "abc"}
    assert files["a"] == files["b"] != files["c"]
    data = prepared(tmp_path / "a", tmp_path / "out")
    spread = [float(data.subset([name]).column("signal").std()) for name in ("001", "005")]
    assert 0.2 < spread[1] / spread[0] < 5


# New recordings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of C4-M1 and EMG at 100 Hz, filtered, of 20 s windows every 10 s."""
    folder = tmp_path_factory.mktemp("run")
    raw = sources.synthesize("edf", folder / "raw", patients=6, minutes=3, layout="files", rate=128)
    data = prepared(
        raw, folder / "data", channels=("C4-M1", "EMG=Chin"), alias=["Chin=EMG Chin"], rate=100, bandpass="0.5-20",
        window=20, stride=10, patient=r"(P\d+)-(N\d)",
    )  # fmt: skip
    train(data, algorithm="base", epochs=1, ratios=(0.5, 0.25, 0.25), out=folder / "model")
    return folder


def test_a_new_recording_gives_the_inputs_of_preparation(run: Path) -> None:
    data = open_dataset(run / "data")
    format = SignalFormat.of(data.info.settings)
    recording = edf.read_recording(run / "raw" / "P002-N1.edf", format)
    own = data.subset(["P002"])
    assert own.times is not None
    first = own.times.numpy() < 180
    rows = (own.times.numpy()[first] / 10).round().astype(int)
    np.testing.assert_array_equal(own.column("signal").numpy()[first], recording.signal[rows])
    assert recording.rows["onset"].to_list() == [10.0 * k for k in range(17)]


def test_new_recordings_get_a_table_annotations_and_a_picture_each(run: Path, tmp_path: Path) -> None:
    for name in ("P002-N1", "P002-N2", "P003-N1"):
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new" / f"{name}.edf").write_bytes((run / "raw" / f"{name}.edf").read_bytes())
    written = predict_raw(run / "model", tmp_path / "new", tmp_path / "out")
    assert len(written) == 9
    assert {path.suffix for path in written} == {".csv", ".edf", ".png"}
    first, second = (pl.read_csv(tmp_path / "out" / f"P002-N{number}.csv") for number in (1, 2))
    assert first["recording"].unique().to_list() == ["P002-N1"]
    assert first["distance"].unique().to_list() == second["distance"].unique().to_list()
    notes = mne.read_annotations(tmp_path / "out" / "P002-N1-Hypnogram.edf")
    assert notes.duration.sum() == 180
    assert set(notes.description) <= {"Sleep stage W", *(f"Sleep stage N{k}" for k in (1, 2, 3)), "Sleep stage R"}


def test_another_laboratorys_labels_need_an_alias(run: Path, tmp_path: Path) -> None:
    path = write_edf(tmp_path / "new.edf", ("C4:A1", "Chin1-Chin2"), rate=100)
    with pytest.raises(
        DataError, match=r"no channel 'EEG C4 - EEG M1'; its channels.*The model was trained on C4-M1, EMG"
    ):
        predict_raw(run / "model", path, tmp_path / "out")
    written = predict_raw(run / "model", path, tmp_path / "out", alias=["C4-M1=C4:A1", "EMG=Chin1-Chin2"])
    with written[0].open() as file:
        assert len(list(csv.DictReader(file))) == 29
