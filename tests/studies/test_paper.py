"""All of the paper in one command: data found by content, twins, plans, and the whole of it in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manydg import sources
from manydg.algorithms import paper_methods
from manydg.data.dataset import DomainDataset, open_dataset
from manydg.data.info import Provenance
from manydg.errors import ConfigError, DataError, StorageError
from manydg.sources._visits import find_drug_mapping
from manydg.studies import paper
from manydg.studies.figure_data import read_figures
from manydg.studies.paper import PREPARED, RAW, find_datasets, prepare_folder

TINY: dict[str, dict[str, Any]] = {
    "iiic": {"patients": 6, "samples_per_patient": 3},
    "sleep-edf": {"patients": 3, "hours": 0.25, "nights": 1},
    "mimic3": {"patients": 40},
    "eicu": {"patients": 12},
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files of all four sources, one of them deeper down and under another name."""
    place = tmp_path_factory.mktemp("twins")
    for name, options in TINY.items():
        sources.synthesize(name, place / name, **options)
    (place / "deeper").mkdir()
    (place / "eicu").rename(place / "deeper" / "database")
    return place


def test_raw_files_are_recognised_by_what_they_hold(twins: Path) -> None:
    found = {entry.name: entry for entry in find_datasets(twins)}
    assert set(found) == set(TINY)
    assert {entry.state for entry in found.values()} == {RAW}
    assert found["eicu"].path == twins / "deeper" / "database"


def test_each_source_becomes_a_dataset_folder_and_is_not_prepared_twice(twins: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for entry in find_datasets(twins):
        place = prepare_folder(entry, twins, tmp_path / entry.name, workers=1, report=said.append)
        assert open_dataset(place).info.provenance.source == entry.name
        again: list[str] = []
        assert prepare_folder(entry, twins, tmp_path / entry.name, workers=1, report=again.append) == place
        assert again == []
    assert len(said) == 4
    both = [*find_datasets(tmp_path), *find_datasets(twins)]
    assert {entry.state for entry in both[:4]} == {PREPARED}


def test_what_is_prepared_already_is_used_as_it_is(
    twins: Path, tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    data = dataset_of()
    told = replace(data, info=replace(data.info, provenance=Provenance("mimic3")))
    told.save(tmp_path / "visits")
    (tmp_path / "raw").symlink_to(twins / "mimic3")
    dataset_of(patients=5).save(tmp_path / "own")
    assert [(entry.name, entry.state) for entry in find_datasets(tmp_path)] == [("own", PREPARED), ("visits", PREPARED)]


def test_a_folder_of_folders_of_patients_is_one_dataset(tmp_path: Path) -> None:
    sources.synthesize("iiic", tmp_path / "eeg", patients=4, samples_per_patient=2, layout="patients")
    (found,) = find_datasets(tmp_path)
    assert (found.name, found.path) == ("iiic", tmp_path / "eeg")


def test_the_real_demos_are_recognised(shared_data: Path) -> None:
    found = {entry.name: entry.path.name for entry in find_datasets(shared_data) if entry.state == RAW}
    assert found["mimic3"] == "mimic3_demo"
    assert found["eicu"] == "eicu_demo"
    assert find_drug_mapping("mimic3", shared_data / "mimic3_demo", shared_data).name == "ndc_to_atc.csv"


def test_nothing_to_work_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no folder"):
        find_datasets(tmp_path / "absent")
    with pytest.raises(DataError, match="holds neither dataset folders nor raw files"):
        paper.gather(tmp_path, False, tmp_path / "out", paper.SCALES["smoke"], print)
    with pytest.raises(DataError, match="a CSV table with the columns ndc and atc"):
        find_drug_mapping("mimic3", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        paper.scale_named("smok")


def test_a_dataset_that_cannot_be_used_does_not_stop_the_others(
    tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    dataset_of(patients=12).save(tmp_path / "data" / "good")
    bad = dataset_of(patients=5).save(tmp_path / "data" / "bad")
    (bad / "dataset.json").write_text("{")
    said: list[str] = []
    found = find_datasets(tmp_path / "data")
    chapters = paper.ready(found, tmp_path / "data", tmp_path / "out", paper.SCALES["smoke"], 1, said.append)
    assert [chapter.name for chapter in chapters] == ["good"]
    assert any(line.startswith("bad is left out: ") for line in said)
    assert any(line.startswith("good, sagnet is left out: ") for line in said)


def test_large_datasets_are_cut_to_the_scale_and_the_command_says_so(
    tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    whole = dataset_of(patients=30, samples=2).save(tmp_path / "whole")
    said: list[str] = []
    place = paper.some_patients(whole, tmp_path / "some", 12, said.append)
    assert open_dataset(place).n_patients == 12
    assert said == ["whole: 12 of its 30 patients, drawn at random"]
    assert paper.some_patients(whole, tmp_path / "other", 30, said.append) == whole


def test_every_experiment_of_the_paper_is_asked_for_with_the_algorithms_that_fit(
    tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    place = dataset_of(patients=12).save(tmp_path / "data")
    full = paper.requests_for(place, paper.SCALES["full"], lambda line: None)
    assert set(full) == set(paper.EXPERIMENTS)
    assert full["compare"].algorithms == tuple(name for name in paper.compared() if name != "sagnet")
    assert full["continual"].algorithms == tuple(name for name in paper_methods() if name != "sagnet")
    assert {request.seeds for request in full.values()} == {5}
    assert full["runtime"].timed_epochs == 23
    smoke = paper.requests_for(place, paper.SCALES["smoke"], lambda line: None)
    assert smoke["compare"].config.epochs == 1


def test_a_dry_run_of_the_paper_shows_each_datasets_runs(
    commands: Any, tmp_path: Path, dataset_of: Callable[..., DomainDataset]
) -> None:
    dataset_of(patients=12).save(tmp_path / "data" / "mine")
    arguments = ["paper", "--raw", tmp_path / "data", "--scale", "smoke", "--out", tmp_path / "out", "--dry-run"]
    code, out, err = commands.run(*arguments)
    assert code == 0, err
    for name in ("compare", "objectives", "weights", "limited-data", "continual", "decomposition", "runtime"):
        assert f"to do  {name}  " in out
    lines = out.splitlines()
    assert lines.index("mine:") == min(number for number, line in enumerate(lines) if line.startswith(" to do")) - 1
    assert "mine: " in lines[-1]
    assert "how long they take is not known" in out.splitlines()[-1]
    assert not (tmp_path / "out" / "results").exists()


@pytest.mark.parametrize("arguments", [[], ["--raw", ".", "--synthetic"], ["--synthetic", "--scale", "tiny"]])
def test_the_command_wants_one_place_for_its_data_and_a_known_scale(
    commands: Any, tmp_path: Path, arguments: list[str]
) -> None:
    code, _, err = commands.run("paper", "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_whole_paper_on_twins_ends_in_one_report(commands: Any, tmp_path: Path) -> None:
    arguments = ["paper", "--synthetic", "--scale", "smoke", "--workers", 2, "--out", tmp_path]
    code, out, err = commands.run(*arguments)
    assert code == 0, err
    page = (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in out
    records = [json.loads(line) for line in (tmp_path / "results" / "results.jsonl").read_text().splitlines()]
    assert [record["error"] for record in records if record["status"] != "ok"] == []
    figures = read_figures(tmp_path / "results" / "figures")
    for name in ("iiic", "sleep-edf", "mimic3", "eicu"):
        used = {use["experiment"] for record in records if record["dataset"] == name for use in record["experiments"]}
        drawn = {figure.experiment for figure in figures if figure.dataset == name}
        assert used | drawn >= set(paper.EXPERIMENTS)
        assert f">{name} (synthetic data)<" in page
    assert 'data-section="paper"' not in page
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "results" / "runs").glob("*/run.json")}
    code, _, err = commands.run(*arguments)
    assert code == 0, err
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_a_recording_beside_the_folders_does_not_hide_them(tmp_path: Path) -> None:
    sources.synthesize("sleep-edf", tmp_path / "nights", patients=1, hours=0.25, nights=1)
    (tmp_path / "stray.edf").write_bytes(next((tmp_path / "nights").glob("*-PSG.edf")).read_bytes())
    assert [entry.name for entry in find_datasets(tmp_path)] == ["sleep-edf"]
