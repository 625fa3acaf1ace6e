"""Sleep-EDF from raw files to a dataset, on the real hypnograms and on twins."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import edfio
import numpy as np
import polars as pl
import pytest

from manydg import sources
from manydg.data.dataset import open_dataset
from manydg.data.info import SourceFile
from manydg.errors import ConfigError, DataError, StorageError
from manydg.sources import sleep_edf
from manydg.sources._edf import Annotation, read_annotations
from manydg.sources._scorings import LabelMap, label_windows, spans_of
from manydg.sources.edf import Recipe, SignalFormat, _near_sleep
from manydg.sources.sleep_edf import SETTINGS, STAGES, find_nights

CODE = {"Sleep stage W": 0, "Sleep stage 1": 1, "Sleep stage 2": 2, "Sleep stage 3": 3, "Sleep stage 4": 3,
        "Sleep stage R": 4}  # fmt: skip


def stages_of(hypnogram: Path) -> list[str]:
    """The stage of each 30 s epoch of a hypnogram, "" where it has none."""
    notes = read_annotations(hypnogram)
    onsets = np.arange(max(note.onset + note.duration for note in notes) // 30) * 30.0
    labels = label_windows(onsets, 30.0, spans_of(notes, LabelMap(preset="aasm")))
    names = [*labels.names, ""]
    return [names[code] if names[code] in STAGES else "" for code in labels.codes]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin") / "raw"
    return sources.synthesize("sleep-edf", folder, patients=3, seed=4, hours=1.0)


@pytest.fixture(scope="module")
def prepared(twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources.prepare("sleep-edf", twin, tmp_path_factory.mktemp("prepared") / "sleep")


def reference(raw: Path, patient: str) -> tuple[np.ndarray, list[int]]:
    """A patient's epochs and stages by edfio and a plain loop over annotations and epochs."""
    signals, stages = [], []
    for psg in sorted(raw.glob(f"{patient}*-PSG.edf")):
        edf = edfio.read_edf(psg)
        hypnogram = next(raw.glob(psg.name[:6] + "*-Hypnogram.edf"))
        both = np.stack([edf.get_signal("EEG Fpz-Cz").data, edf.get_signal("EEG Pz-Oz").data])
        for note in edfio.read_edf(hypnogram).annotations:
            for second in range(int(note.onset), int(note.onset + note.duration), 30):
                part = both[:, second * 100 : second * 100 + 3000]
                if note.text in CODE and part.shape[1] == 3000:
                    signals.append(part)
                    stages.append(CODE[note.text])
    return np.stack(signals), stages


def test_the_real_hypnograms_give_the_stages_of_the_published_features(shared_data: Path) -> None:
    features = pl.read_parquet(
        shared_data / "sleep_edf_78_features" / "epochs.parquet",
        columns=["subject_id", "night_id", "epoch_idx", "stage"],
    )
    files = sorted((shared_data / "sleep_edf_hypnograms").glob("*.edf"))
    assert len(files) == 12
    for file in files:
        stages = stages_of(file)
        kept = [epoch for epoch, stage in enumerate(stages) if stage]
        night = features.filter(subject_id=file.name[:5], night_id=f"N{file.name[5]}").sort("epoch_idx")
        assert night["epoch_idx"].to_list() == kept, file.name
        assert night["stage"].to_list() == [stages[epoch] for epoch in kept], file.name


def test_our_annotations_are_those_that_edfio_reads(shared_data: Path) -> None:
    for file in sorted((shared_data / "sleep_edf_hypnograms").glob("*.edf")):
        ours = [(note.onset, note.duration, note.text) for note in read_annotations(file)]
        assert ours == [tuple(note) for note in edfio.read_edf(file).annotations]


def test_signals_and_stages_equal_an_independent_reading(twin: Path, prepared: Path) -> None:
    data = open_dataset(prepared)
    for patient in ("SC400", "SC402"):
        own = data.subset([patient])
        signals, stages = reference(twin, patient)
        assert own.targets.tolist() == stages
        np.testing.assert_allclose(own.column("signal").numpy(), signals, atol=1e-3)


def test_two_nights_of_a_person_are_one_patient_with_a_rising_clock(twin: Path, prepared: Path) -> None:
    data = open_dataset(prepared)
    assert data.patients.tolist() == ["SC400", "SC401", "SC402"]
    assert len(find_nights(twin, "cassette").nights) == 6
    times = data.subset(["SC401"]).times
    assert times is not None
    assert bool((times.diff() > 0).all())
    assert float(times.max()) > 86_400


def test_the_dataset_says_what_its_signal_is(prepared: Path) -> None:
    data = open_dataset(prepared)
    assert data.info.settings == {
        "rate": 100.0, "channels": ["EEG Fpz-Cz", "EEG Pz-Oz"], "unit": "uV", "epoch_seconds": 30,
    }  # fmt: skip
    assert data.target.names == ("W", "N1", "N2", "N3", "REM")
    assert data.column("signal").shape[1:] == (2, 3000)


def test_the_cohort_flow_adds_up(prepared: Path) -> None:
    data = open_dataset(prepared)
    flow = data.info.cohort_flow
    counted = [step.counts for step in flow if "samples" in step.counts]
    for before, after in itertools.pairwise(counted):
        assert after["samples"] == before["samples"] - after.get("left_out", 0)
    assert flow[-1].to_json() == {"step": "samples", "patients": 3, "samples": len(data)}


def test_provenance_lists_every_file_with_size_and_checksum(twin: Path, prepared: Path) -> None:
    record = open_dataset(prepared).info.provenance
    assert record is not None
    sizes = {entry.name: entry.bytes for entry in record.files}
    assert sizes == {path.name: path.stat().st_size for path in twin.glob("*.edf")}
    assert record.options["wake_margin"] is None
    assert str(twin) not in json.dumps(record.to_json())


def test_the_margin_around_sleep_by_hand() -> None:
    """Six epochs awake, sleep from the seventh to the ninth with a movement in it, six awake: 1 minute is 2 epochs."""
    names, onsets = np.array(["W"] * 6 + ["N1", "", "N2"] + ["W"] * 6), 30.0 * np.arange(15)

    def near(margin: float | None, stages: np.ndarray = names) -> list[int]:
        recipe = Recipe(SignalFormat.of(SETTINGS), LabelMap(preset="aasm"), STAGES, wake_margin=margin)
        return np.flatnonzero(_near_sleep(onsets, stages, recipe)).tolist()

    assert near(1.0) == list(range(4, 11))
    assert near(0.0) == [6, 7, 8]
    assert near(0.99) == [5, 6, 7, 8, 9]
    assert near(None) == near(1000.0) == list(range(15))
    assert near(1.0, np.full(15, "W")) == []


def test_an_epoch_has_a_stage_only_if_it_is_scored_throughout() -> None:
    notes = [
        Annotation(0, 45, "Sleep stage W"),
        Annotation(50, 70, "Sleep stage 4"),
        Annotation(120, 30, "Sleep stage R"),
    ]
    labels = label_windows(30.0 * np.arange(5), 30.0, spans_of(notes, LabelMap(preset="aasm")))
    assert [[*labels.names, ""][code] for code in labels.codes] == ["W", "", "N3", "N3", "REM"]


def test_a_wake_margin_keeps_that_much_wakefulness_around_sleep(twin: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("sleep-edf", twin, tmp_path / "cut", wake_margin=5, limit_patients=1))
    times = data.times
    assert times is not None
    for night in (times < 86_400, times >= 86_400):
        stages = data.targets[night]
        asleep = (stages > 0).nonzero().squeeze(1)
        assert 0 < int(asleep[0]) <= 10
        assert len(stages) - 1 - int(asleep[-1]) <= 10
    assert data.info.cohort_flow[-2].step == "within 5 minutes of sleep"
    assert data.info.cohort_flow[-2].counts["left_out"] > 0


def test_a_limit_takes_the_first_patients_with_all_their_nights(twin: Path, tmp_path: Path) -> None:
    data = open_dataset(sources.prepare("sleep-edf", twin, tmp_path / "two", limit_patients=2))
    assert data.patients.tolist() == ["SC400", "SC401"]


@pytest.mark.slow
def test_workers_do_not_change_the_result(twin: Path, prepared: Path, tmp_path: Path) -> None:
    sources.prepare("sleep-edf", twin, tmp_path / "parallel", workers=2)
    assert open_dataset(tmp_path / "parallel").content_hash() == open_dataset(prepared).content_hash()


def test_subfolders_and_telemetry_are_found_and_their_people_kept_apart(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    sources.synthesize("sleep-edf", raw / "sleep-cassette", patients=1, hours=0.25, nights=1)
    sources.synthesize("sleep-edf", raw / "sleep-telemetry", patients=1, hours=0.25, nights=1, study="telemetry")
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "both", study="both"))
    assert data.patients.tolist() == ["SC400", "ST700"]
    assert open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "one", study="telemetry")).patients.tolist() == [
        "ST700"
    ]


def test_a_second_run_takes_over_what_a_killed_one_finished(twin: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import os\nfrom pathlib import Path\nfrom manydg import sources\nfrom manydg.sources import sleep_edf\n"
        "survey = sleep_edf.survey\ncalls = []\n"
        "def dying(argument):\n    calls.append(1)\n"
        "    if len(calls) == 4:\n        os.kill(os.getpid(), 9)\n    return survey(argument)\n"
        "sleep_edf.survey = dying\n"
        f"sources.prepare('sleep-edf', Path({str(twin)!r}), Path({str(out)!r}))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert result.returncode == -9, result.stderr
    assert not out.exists()
    assert len(list((tmp_path / ".out.work").glob("*.json"))) == 3
    seen: list[str] = []
    original = sleep_edf.survey
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleep_edf, "survey", lambda argument: seen.append(argument[0].name) or original(argument))
        sources.prepare("sleep-edf", twin, out)
    assert seen == ["SC4012", "SC4021", "SC4022"]
    assert len(open_dataset(out)) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_changed_file_is_not_taken_over(twin: Path, tmp_path: Path) -> None:
    from manydg.sources._preparing import Job, WorkFolder

    file = tmp_path / "a.edf"
    file.write_bytes(b"one")
    work, job = WorkFolder(tmp_path / "out", "x", {"margin": 1}), Job("a", (file,), None)
    result = SourceFile("a", 3, "b")
    work.save(job, result)
    assert work.load(job, SourceFile) == result
    assert WorkFolder(tmp_path / "out", "x", {"margin": 2}).load(job, SourceFile) is None
    file.write_bytes(b"two")
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert work.load(job, SourceFile) is None


def test_what_a_killed_run_left_half_written_is_cleared_away(twin: Path, tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".out.partial-{int(process.stdout)}").mkdir()
    (tmp_path / f".out.partial-{os.getpid() + 10_000_000}").mkdir()
    sources.prepare("sleep-edf", twin, tmp_path / "out", limit_patients=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_is_kept_unless_overwriting_is_asked_for(twin: Path, tmp_path: Path) -> None:
    sources.prepare("sleep-edf", twin, tmp_path / "out", limit_patients=2)
    with pytest.raises(StorageError, match="already exists"):
        sources.prepare("sleep-edf", twin, tmp_path / "out", limit_patients=1)
    assert open_dataset(tmp_path / "out").n_patients == 2
    sources.prepare("sleep-edf", twin, tmp_path / "out", limit_patients=1, overwrite=True)
    assert open_dataset(tmp_path / "out").n_patients == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wake_margin": -1.0}, "minutes"),
        ({"limit_patients": 0}, "limit"),
        ({"workers": 0}, "workers"),
        ({"study": "caset"}, "study"),
        ({"unpaired": "maybe"}, "unpaired"),
    ],
)
def test_an_impossible_option_is_refused(twin: Path, tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sources.prepare("sleep-edf", twin, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_twin_is_decided_by_its_seed(tmp_path: Path) -> None:
    names = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        sources.synthesize("sleep-edf", tmp_path / folder, patients=1, seed=seed, hours=0.25, nights=1)
        names.append((tmp_path / folder / "SC4001E0-PSG.edf").read_bytes())
    assert names[0] == names[1]
    assert names[0] != names[2]


def test_the_twin_has_the_mess_of_the_original(tmp_path: Path) -> None:
    raw = sources.synthesize("sleep-edf", tmp_path / "raw", patients=14, seed=0, hours=1.0)
    texts = {note.text for file in raw.glob("*Hypnogram.edf") for note in read_annotations(file)}
    assert {"Movement time", "Sleep stage ?", "Sleep stage 4", "Sleep stage R"} <= texts
    data = open_dataset(sources.prepare("sleep-edf", raw, tmp_path / "out"))
    left_out = {step.step: step.counts.get("left_out", 0) for step in data.info.cohort_flow}
    assert left_out["30 s epochs with signal and hypnogram"] > 0
    assert left_out["without movement time"] > 0
    assert left_out["with a stage"] > 0
    assert len(list(raw.glob("SC413*-PSG.edf"))) == 1
    truth = json.loads((raw / "truth.json").read_text())
    assert set(truth["patients"]) == set(data.patients.tolist())


def test_the_twins_patients_differ_more_than_their_nights(twin: Path, prepared: Path) -> None:
    data = open_dataset(prepared)
    wake = data.select((data.targets == 0).nonzero().squeeze(1))
    assert wake.times is not None
    power = np.log(np.abs(np.fft.rfft(wake.column("signal").numpy()[:, 0])) ** 2 + 1).mean(axis=1)
    groups = wake.domains.numpy() * 2 + (wake.times.numpy() >= 86_400)
    level = np.array([power[groups == group].mean() for group in range(6)])
    within = np.abs(level[0::2] - level[1::2]).max()
    between = np.ptp(level[0::2])
    assert between > 3 * within


def test_too_many_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 100"):
        sources.synthesize("sleep-edf", tmp_path / "raw", patients=101)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(StorageError, match="not empty"):
        sources.synthesize("sleep-edf", tmp_path / "full", patients=1)


def test_two_files_of_one_night_are_refused(twin: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "copy").mkdir(parents=True)
    for folder in (raw, raw / "copy"):
        (folder / "SC4001E0-PSG.edf").symlink_to(twin / "SC4001E0-PSG.edf")
    with pytest.raises(DataError, match="two PSG files for one night"):
        sources.prepare("sleep-edf", raw, tmp_path / "out")
