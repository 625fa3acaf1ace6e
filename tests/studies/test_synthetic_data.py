"""What is known to be made up is called so from the dataset folder to the page, and nothing else is."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manydg.cli.data import summarize as inspect_dataset
from manydg.data.dataset import open_dataset
from manydg.data.info import Provenance, SourceFile
from manydg.predict import about
from manydg.report import write_report
from manydg.sources import prepare, synthesize
from manydg.studies.conduct import compare
from manydg.studies.records import describe_study, read_description
from manydg.synthetic import make_demo_dataset
from manydg.training.run import open_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison on the demonstration's dataset."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo_dataset(24, 8).save(folder / "patients")
    compare(folder / "patients", ["base", "manydg"], 2, folder / "results", options=None, device="cpu")
    return folder


def test_the_demonstration_is_synthetic_in_its_folder_its_runs_and_its_study(demo: Path) -> None:
    assert json.loads((demo / "patients" / "dataset.json").read_text())["info"]["provenance"]["synthetic"] is True
    results = demo / "results"
    records = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    assert len(records) == 4
    assert all(record["synthetic"] is True for record in records)
    assert all(json.loads(path.read_text())["synthetic"] for path in results.glob("runs/*/run.json"))
    assert read_description(results).datasets["patients"].synthetic


def test_whoever_reads_its_models_predictions_is_told(demo: Path) -> None:
    run = open_run(next((demo / "results" / "runs").iterdir()))
    assert about(run)["trained on"] == "patients (synthetic data)"


def test_its_tables_and_its_page_say_so(demo: Path) -> None:
    results = demo / "results"
    assert {row["synthetic"] for row in csv.DictReader((results / "summary.csv").open())} == {"yes"}
    assert "## compare on patients (synthetic data)" in (results / "summary.md").read_text()
    assert "<h1>Synthetic data: " in write_report(results, demo / "page.html").read_text(encoding="utf-8")


def test_the_study_does_not_name_raw_files_whose_names_may_hold_a_patients_id(demo: Path, tmp_path: Path) -> None:
    data = open_dataset(demo / "patients")
    origin = Provenance("sleep-edf", "manydg", (SourceFile("SC4711E0-PSG.edf", 10, "ab"),), {"trim": 30})
    described = replace(data, info=replace(data.info, provenance=origin))
    describe_study(tmp_path, described, "nights", {"compare": "manydg compare"})
    text = (tmp_path / "study.json").read_text()
    assert "SC4711" not in text
    assert read_description(tmp_path).datasets["nights"].provenance == replace(origin, files=())


def test_part_of_a_synthetic_dataset_is_synthetic(demo: Path) -> None:
    data = open_dataset(demo / "patients")
    assert data.subset(sorted(data.patients.tolist())[:5]).info.synthetic


def test_real_or_unknown_data_are_not_called_synthetic(small_dataset: Any, tmp_path: Path) -> None:
    small_dataset.save(tmp_path / "patients")
    compare(tmp_path / "patients", ["base"], 1, tmp_path / "results", device="cpu")
    for file in ("patients/dataset.json", "results/results.jsonl", "results/study.json", "results/summary.md"):
        assert "synthetic" not in (tmp_path / file).read_text()


def test_the_commands_on_a_twin_say_synthetic_and_hold_nothing_against_the_paper(commands: Any, tmp_path: Path) -> None:
    raw, data = tmp_path / "raw", tmp_path / "data"
    code, _, err = commands.run("synthesize", "iiic", "--patients", 12, "--samples-per-patient", 4, "--out", raw)
    assert code == 0, err
    code, out, err = commands.run("prepare", "iiic", raw, "--out", data)
    assert code == 0, err
    assert "of 12 synthetic patients" in out
    code, out, err = commands.run("inspect", data)
    assert code == 0, err
    assert "(synthetic data)" in out.splitlines()[0]
    assert "paper" not in out.lower()
    assert inspect_dataset(data).expected.counts == []
    (raw / "synthetic.json").unlink()
    unmarked = inspect_dataset(prepare("iiic", raw, tmp_path / "unmarked"))
    assert not unmarked.synthetic
    assert unmarked.expected.counts


@pytest.mark.parametrize(("source", "options"), [("sleep-edf", {"hours": 0.25}), ("iiic", {})])
def test_raw_files_appear_once_they_are_complete_and_are_marked_before(
    source: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manydg.synthetic import iiic, sleep_edf

    marked = []

    def interrupted(folder: Path, *_: object) -> None:
        marked.append((folder / "synthetic.json").is_file())
        raise KeyboardInterrupt

    monkeypatch.setattr(sleep_edf, "_write_night", interrupted)
    monkeypatch.setattr(iiic, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        synthesize(source, tmp_path / "raw", patients=2, **options)
    assert marked == [True]
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "raw").mkdir()
    synthesize(source, tmp_path / "raw", patients=2, **options)
    assert (tmp_path / "raw" / "truth.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
