"""Damaged, missing and foreign Sleep-EDF files: each with its own message, and nothing left half-written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import edfio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manydg import sources
from manydg.errors import DataError, ManyDGError, ManyDGWarning, StorageError
from manydg.sources._edf import (
    SignalFormat,
    SignalReader,
    read_annotations,
    read_header,
    read_windows,
    write_annotations,
)
from manydg.sources.sleep_edf import CHANNELS, SETTINGS

PSG, HYPNOGRAM = "SC4001E0-PSG.edf", "SC4001EC-Hypnogram.edf"
START = datetime(1990, 3, 1, 22, 0)


def make_night(
    folder: Path,
    *,
    epochs: int = 4,
    scored: int = 4,
    rate: int = 100,
    unit: str = "uV",
    labels: tuple[str, ...] = CHANNELS,
    hypnogram_start: datetime = START,
) -> Path:
    """A tiny recording and hypnogram, written by edfio."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    signals = [
        edfio.EdfSignal(
            rng.normal(0, 20, epochs * 30 * rate),
            rate,
            label=label,
            physical_dimension=unit,
            physical_range=(-200, 200),
        )
        for label in labels
    ]
    recording = edfio.Recording(startdate=START.date())
    edfio.Edf(signals, recording=recording, starttime=START.time(), data_record_duration=30).write(folder / PSG)
    words = ["Sleep stage W", "Sleep stage 1", "Sleep stage 2", "Sleep stage R"] * (scored // 4 + 1)
    write_annotations(folder / HYPNOGRAM, words[:scored], hypnogram_start, 30)
    return folder


def fails(raw: Path, tmp_path: Path, kind: type[ManyDGError], words: str) -> None:
    """Preparing ends in an error with these words and leaves nothing behind but what was there."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(kind, match=words):
        sources.prepare("sleep-edf", raw, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_truncated_recording_is_named_with_what_is_missing(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    (raw / PSG).write_bytes(content[:-5000])
    fails(raw, tmp_path, DataError, rf"{PSG} is truncated: 4 data records are announced, 3 are there")


def test_a_file_cut_within_its_header_is_named(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    (raw / PSG).write_bytes((raw / PSG).read_bytes()[:400])
    fails(raw, tmp_path, DataError, rf"{PSG} is truncated: it ends within its header")


def test_a_web_page_saved_as_edf_is_not_an_edf_file(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    (raw / PSG).write_text("<html>" + "please log in" * 100)
    fails(raw, tmp_path, DataError, rf"{PSG} is not an EDF file")


@pytest.mark.parametrize("at", [100, 190, 300, 768, 900, 40_000])
def test_one_byte_too_many_is_refused_wherever_it_is(tmp_path: Path, at: int) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    (raw / PSG).write_bytes(content[:at] + b"0" + content[at:])
    fails(raw, tmp_path, DataError, rf"{PSG}.*(longer than its header says|damaged|not an EDF|header says it is)")


@pytest.mark.parametrize(("old", "new"), [(b"\n", b"\r\n"), (b"\r", b"\r\n")])
def test_converted_line_ends_are_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    assert old in content
    (raw / PSG).write_bytes(content.replace(old, new))
    fails(raw, tmp_path, DataError, rf"{PSG} is \d+ bytes longer than its header says: bytes were inserted")


def test_a_byte_that_moved_within_a_header_is_found_though_the_size_is_right(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    (raw / PSG).write_bytes(content[:100] + b" " + content[100:300] + content[301:])
    fails(raw, tmp_path, DataError, rf"{PSG} is damaged: .* does not begin where it should")
    (raw / PSG).write_bytes(content[:90] + b"\r\n" + content[92:])
    fails(raw, tmp_path, DataError, rf"{PSG} is damaged: its header is not text at byte 90")


def test_a_recorder_that_was_not_stopped_may_leave_the_number_of_records_open(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    open_end = content[:236] + b"-1      " + content[244:]
    (raw / PSG).write_bytes(open_end)
    assert read_header(raw / PSG).records == 4
    (raw / PSG).write_bytes(open_end + b"x")
    fails(raw, tmp_path, DataError, "1 bytes longer than its header says")
    record = (len(content) - 256 * 3) // 4
    (raw / PSG).write_bytes(content + content[-record:])
    with pytest.warns(ManyDGWarning, match="1 data records more than its header announces: they are not read"):
        assert read_header(raw / PSG).records == 4


def test_real_recordings_agree_with_their_headers_to_the_byte(shared_data: Path) -> None:
    files = sorted(shared_data.rglob("*.edf"))
    assert len(files) > 80
    for file in files:
        assert read_header(file).records > 0


def test_amplitudes_that_no_electrode_records_are_warned_of(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    content = (raw / PSG).read_bytes()
    (raw / PSG).write_bytes(content.replace(b"uV      ", b"V       "))
    with pytest.warns(ManyDGWarning, match=r"channel 'EEG .*' is not plausible: it varies by .* uV .RMS."):
        sources.prepare("sleep-edf", raw, tmp_path / "out")
    (raw / PSG).write_bytes(content.replace(b"32767   ", b"2047    ").replace(b"-32768  ", b"-2048   "))
    with pytest.warns(ManyDGWarning, match="% of its samples are outside the range that the header states"):
        sources.prepare("sleep-edf", raw, tmp_path / "out", overwrite=True)


def test_a_recording_without_its_hypnogram_is_refused_or_skipped_and_counted(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    shutil.copy(raw / PSG, raw / "SC4011E0-PSG.edf")
    fails(raw, tmp_path, DataError, "SC4011E0-PSG.edf is a PSG without its Hypnogram .1 such files")
    sources.prepare("sleep-edf", raw, tmp_path / "out", unpaired="skip")
    from manydg.data.dataset import open_dataset

    assert open_dataset(tmp_path / "out").info.cohort_flow[0].to_json() == {
        "step": "recordings with a hypnogram",
        "patients": 1,
        "recordings": 1,
        "left_out": 1,
    }


def test_a_hypnogram_without_its_recording_is_refused(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    shutil.copy(raw / HYPNOGRAM, raw / "SC4012EC-Hypnogram.edf")
    fails(raw, tmp_path, DataError, "SC4012EC-Hypnogram.edf is a Hypnogram without its PSG")


@pytest.mark.parametrize(("epochs", "scored", "samples", "unscored_signal"), [(6, 4, 4, 2), (4, 9, 4, 0)])
def test_a_hypnogram_of_another_length_gives_the_overlap(
    tmp_path: Path, epochs: int, scored: int, samples: int, unscored_signal: int
) -> None:
    from manydg.data.dataset import open_dataset

    raw = make_night(tmp_path / "raw", epochs=epochs, scored=scored)
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "out"))
    assert len(data) == samples
    assert data.info.cohort_flow[1].counts["left_out"] == unscored_signal


def test_a_missing_channel_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw", labels=("EEG Fpz-Cz", "EOG horizontal"))
    fails(raw, tmp_path, DataError, "no channel 'EEG Pz-Oz'; its channels are EEG Fpz-Cz, EOG horizontal")


def test_another_rate_is_named_with_the_one_expected(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw", rate=128)
    fails(raw, tmp_path, DataError, "sampled at 128 Hz, expected 100 Hz")


def test_another_unit_is_named_with_those_expected(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw", unit="mmHg")
    fails(raw, tmp_path, DataError, "is in 'mmHg', expected microvolts")


def test_millivolts_become_microvolts(tmp_path: Path) -> None:
    signals = []
    for unit in ("uV", "mV"):
        raw = make_night(tmp_path / unit, unit=unit)
        header = read_header(raw / PSG)
        signals.append(read_windows(header, header.channels[:2], np.arange(4) * 3000, 3000))
    np.testing.assert_allclose(signals[1], 1000 * signals[0], rtol=1e-5, atol=1e-2)


def test_a_range_that_is_not_around_zero_is_calibrated_with_its_offset(tmp_path: Path) -> None:
    values = np.linspace(120.0, 480.0, 2 * 3000)
    signal = edfio.EdfSignal(values, 100, label="EEG Fpz-Cz", physical_dimension="uV", physical_range=(100, 500))
    edfio.Edf([signal], data_record_duration=30).write(tmp_path / PSG)
    header = read_header(tmp_path / PSG)
    read = read_windows(header, header.channels[:1], np.arange(2) * 3000, 3000)
    np.testing.assert_allclose(read.ravel(), values, atol=0.01)


def test_a_hypnogram_of_another_night_is_refused(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw", hypnogram_start=datetime(1990, 3, 8, 21, 0))
    fails(raw, tmp_path, DataError, "they do not belong together")


def test_a_hypnogram_without_stages_is_refused(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    write_annotations(raw / HYPNOGRAM, ["Lights off", "Lights on"], START, 30)
    fails(
        raw,
        tmp_path,
        DataError,
        "Hypnogram.edf has no label that maps to a class; its labels are 'Lights off' .1., 'Lights on' .1.",
    )


def test_a_recording_in_place_of_a_hypnogram_is_refused(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    shutil.copy(raw / PSG, raw / HYPNOGRAM)
    fails(raw, tmp_path, DataError, "holds no annotations")


def test_two_stages_for_one_epoch_are_refused(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw")
    notes = [edfio.EdfAnnotation(0, 60, "Sleep stage W"), edfio.EdfAnnotation(30, 60, "Sleep stage 2")]
    recording = edfio.Recording(startdate=START.date())
    edfio.Edf([], recording=recording, starttime=START.time(), annotations=notes).write(raw / HYPNOGRAM)
    fails(raw, tmp_path, DataError, "two labels to one window, 'N2' and 'W' at 30 s")


def test_a_folder_with_another_dataset_is_recognised(tmp_path: Path, shared_data: Path) -> None:
    fails(shared_data / "mimic3_demo", tmp_path, StorageError, "looks like mimic3: try 'manydg prepare mimic3'")
    fails(shared_data / "eicu_demo", tmp_path, StorageError, "looks like eicu")
    fails(shared_data / "eegmat_edf_sample", tmp_path, StorageError, "does not hold Sleep-EDF files")
    fails(tmp_path / "nowhere", tmp_path, StorageError, "there is no folder")


def test_a_real_recording_of_another_kind_is_refused_by_channel_and_rate(tmp_path: Path, shared_data: Path) -> None:
    recording = shared_data / "eegmat_edf_sample" / "Subject00_1.edf"
    with pytest.raises(DataError, match="no channel 'EEG Fpz-Cz'; its channels are EEG Fp1, EEG Fp2"):
        SignalReader(read_header(recording), SignalFormat.of(SETTINGS))


def test_real_channels_equal_what_edfio_reads(shared_data: Path) -> None:
    for file in sorted((shared_data / "eegmat_edf_sample").glob("*.edf")):
        header, edf = read_header(file), edfio.read_edf(file)
        assert header.labels == list(edf.labels)
        assert header.seconds == edf.duration
        chosen = SignalReader(header, SignalFormat(("EEG Fp1", "Pz", "eeg o2"), 500.0, 10.0)).channels
        epochs = int(header.seconds // 10)
        ours = read_windows(header, chosen, np.arange(epochs) * 5000, 5000)
        theirs = np.stack([edf.get_signal(label).data[: epochs * 5000] for label in ("EEG Fp1", "EEG Pz", "EEG O2")])
        np.testing.assert_allclose(ours, theirs.reshape(3, epochs, 5000).transpose(1, 0, 2), atol=1e-2)
        some = read_windows(header, chosen, np.array([1, 4]) * 5000, 5000)
        np.testing.assert_array_equal(some, ours[[1, 4]])


@pytest.mark.parametrize("epoch", [700, 1000, 3000, 4100])
def test_epochs_need_not_fit_the_data_records(tmp_path: Path, epoch: int) -> None:
    raw = make_night(tmp_path / "raw")
    header = read_header(raw / PSG)
    whole = read_windows(header, header.channels[:2], np.arange(4) * 3000, 3000).transpose(1, 0, 2).reshape(2, -1)
    last = whole.shape[1] // epoch
    for chosen in (np.arange(last), np.arange(1, last), np.array([0, last - 1]), np.array([last - 1])):
        expected = np.stack([whole[:, k * epoch : (k + 1) * epoch] for k in chosen])
        np.testing.assert_array_equal(read_windows(header, header.channels[:2], chosen * epoch, epoch), expected)
    with pytest.raises(DataError, match="fewer than"):
        read_windows(header, header.channels[:2], np.array([last]) * epoch, epoch)


def test_a_damaged_night_after_good_ones_leaves_no_work_folder(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=3, nights=1, hours=0.25)
    *_, last = sorted(raw.glob("*-PSG.edf"))
    last.write_bytes(last.read_bytes()[:-5000])
    fails(raw, tmp_path, DataError, f"{last.name} is truncated")
    last.unlink()
    last.mkdir()
    fails(raw, tmp_path, StorageError, f"{last.name}: Is a directory")


def test_a_disk_that_fills_up_while_copying_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_night(tmp_path / "raw")
    real = os.fsync

    def full(descriptor: int) -> None:
        if ".npy" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        sources.prepare("sleep-edf", raw, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.work", "raw"]


def test_a_real_limit_on_file_size_ends_in_one_error(tmp_path: Path) -> None:
    raw = make_night(tmp_path / "raw", epochs=40, scored=40)
    program = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom manydg.errors import StorageError\n"
        "from manydg import sources\nfrom manydg.sources import sleep_edf\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        f"try:\n    sources.prepare('sleep-edf', Path({str(raw)!r}), Path({str(tmp_path / 'out')!r}))\n"
        "except StorageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.work", "raw"]


def test_a_full_disk_stops_the_twin_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(edfio.Edf, "write", full)
    with pytest.raises(StorageError, match="disk is full"):
        sources.synthesize("sleep-edf", tmp_path / "raw", patients=1, hours=0.25)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    raw = make_night(tmp_path_factory.mktemp("fuzz"))
    return (raw / PSG).read_bytes(), (raw / HYPNOGRAM).read_bytes()


def attempt(action: Callable[[], Any]) -> None:
    """Whatever the file is, only an error of ours, fit to print on one line, may come out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ManyDGWarning)
            action()
    except ManyDGError as error:
        if not str(error).isprintable():
            raise AssertionError(f"not one printable line: {error!r}") from error


def read_everything(folder: Path, psg: bytes, hypnogram: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / PSG).write_bytes(psg)
    (folder / HYPNOGRAM).write_bytes(hypnogram)
    for file in (folder / PSG, folder / HYPNOGRAM):
        attempt(lambda file=file: read_annotations(file))
    out = folder.with_name(folder.name + "-out")
    attempt(lambda: sources.prepare("sleep-edf", folder, out, overwrite=True))


damage = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 3000), st.binary(max_size=0)),
    st.tuples(st.just("flip"), st.integers(0, 3000), st.binary(min_size=1, max_size=8)),
    st.tuples(
        st.just("flip"),
        st.sampled_from([168, 176, 184, 192, 236, 244, 252, 256, 272, 352, 512, 528, 544, 560, 576, 592, 608, 768]),
        st.sampled_from([b"-1      ", b"1e308   ", b"nan     ", b"inf     ", b"0       ", b"99999999", b"\xff" * 8]),
    ),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damage, which=st.integers(0, 1))
def test_no_damage_to_a_file_brings_out_a_foreign_error(
    damage: tuple[str, int, bytes], which: int, valid: tuple[bytes, bytes], tmp_path: Path
) -> None:
    kind, place, change = damage
    files = list(valid)
    content = files[which]
    files[which] = content[:place] if kind == "cut" else content[:place] + change + content[place + len(change) :]
    read_everything(tmp_path / "raw", files[0], files[1])
