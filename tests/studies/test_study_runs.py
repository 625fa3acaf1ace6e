"""Studies: every run once, whatever happens to the process that does them."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.studies.study import Study, grid

CONFIG = TrainingConfig(epochs=1)
REQUIRED = {
    "schema", "run", "experiment", "variant", "algorithm", "seed", "dataset", "dataset_hash", "target", "samples",
    "patients", "config", "code_version", "selection_rule", "threshold", "threshold_rule", "epoch", "epochs", "val",
    "test", "per_patient", "history", "seconds", "peak_memory_mb", "parameters", "device", "status", "error", "folder",
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=20).save(tmp_path_factory.mktemp("data") / "patients")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def outcome(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a run found, without what the clock decides."""
    keys = ("run", "experiment", "algorithm", "seed", "val", "test", "per_patient", "epoch", "status", "folder")
    losses = [entry["losses"] for entry in record["history"]]
    return (*(json.dumps(record[key], sort_keys=True) for key in keys), json.dumps(losses))


def arguments(dataset: Path, out: Path) -> list[object]:
    names = "base,prototype,manydg"
    return ["compare", dataset, "--algorithms", names, "--seeds", 2, "--epochs", 2, "--out", out]


@pytest.fixture(scope="module")
def whole(commands: Any, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A comparison that nothing disturbed, and what it said."""
    folder = tmp_path_factory.mktemp("study") / "whole"
    code, out, err = commands.run(*arguments(dataset, folder))
    assert code == 0, err
    return folder, out, err


def test_every_run_leaves_one_record(whole: tuple[Path, str, str]) -> None:
    folder, _, _ = whole
    found = records(folder)
    assert sorted((record["algorithm"], record["seed"]) for record in found) == sorted(
        (name, seed) for name in ("base", "prototype", "manydg") for seed in (0, 1)
    )
    for record in found:
        assert set(record) >= REQUIRED
        assert record["experiment"] == "compare"
        assert record["dataset"] == "patients"
        assert record["status"] == "ok"
        assert record["selection_rule"] == "epoch with the highest validation kappa"
        assert all(alias.startswith("P-") for alias in record["per_patient"])
        assert record["folder"] == f"runs/{record['run']}"
        assert (folder / record["folder"] / "model.safetensors").exists()


def test_runs_of_one_seed_share_their_patients(whole: tuple[Path, str, str]) -> None:
    tested = {(record["seed"], tuple(sorted(record["per_patient"]))) for record in records(whole[0])}
    assert len(tested) == 2


def test_the_table_is_on_screen_and_in_files(whole: tuple[Path, str, str]) -> None:
    folder, out, err = whole
    for name in ("base", "prototype", "manydg"):
        assert name in out
        assert name in (folder / "summary.md").read_text()
    rows = list(csv.DictReader((folder / "summary.csv").open()))
    assert len(rows) == 3 * 3
    assert str(folder / "summary.csv") in err


def test_a_finished_comparison_runs_nothing_again(commands: Any, dataset: Path, whole: tuple[Path, str, str]) -> None:
    folder, out, _ = whole
    before = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/model.safetensors")}
    code, again, _ = commands.run(*arguments(dataset, folder))
    assert code == 0
    assert again == out
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/model.safetensors")} == before


@pytest.mark.parametrize(
    "changes",
    [{"settings": {"drug_interactions": [[0, 1]]}}, {"sites": {"0": "A"}}, {"test_patients": ("0",)}],
    ids=str,
)
def test_a_dataset_prepared_anew_with_the_same_values_and_other_facts_about_them_is_studied_anew(
    changes: dict[str, Any], dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    data, study = dataset_of(patients=20), Study(tmp_path, tmp_path / "data", grid("c", ["base"], [0], CONFIG), "data")
    data.save(tmp_path / "data")
    [(before, _)] = study.keyed()
    other = dataclasses.replace(data, info=dataclasses.replace(data.info, **changes))
    other.save(tmp_path / "data", overwrite=True)
    [(after, _)] = study.keyed()
    assert other.content_hash() == data.content_hash()
    assert before != after


def test_a_comparison_killed_at_random_goes_on_and_repeats_no_run(
    commands: Any, dataset: Path, whole: tuple[Path, str, str], tmp_path: Path
) -> None:
    choose, folder = random.Random(5), tmp_path / "killed"
    finished: dict[Path, int] = {}
    killed = 0
    for wanted in (1, 2, 4):
        command = commands.start(*arguments(dataset, folder))
        while len(list(folder.glob("runs/*/run.json"))) < wanted:
            time.sleep(0.002)
        time.sleep(choose.random() * 0.2)
        command.kill()
        killed += command.wait() == -signal.SIGKILL
        for file, moment in finished.items():
            assert file.stat().st_mtime_ns == moment, "a finished run was trained again"
        finished = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/model.safetensors")
                    if file.with_name("run.json").exists()}  # fmt: skip
    code, _, err = commands.run(*arguments(dataset, folder))
    assert code == 0, err
    assert killed >= 2
    assert all(file.stat().st_mtime_ns == moment for file, moment in finished.items())
    assert sorted(map(outcome, records(folder))) == sorted(map(outcome, records(whole[0])))


def test_a_comparison_killed_before_each_of_its_writes_ends_with_the_same_records(
    commands: Any, dataset: Path, whole: tuple[Path, str, str], tmp_path: Path
) -> None:
    # The same folder each time: every start gets a few writes further than the one before.
    code, starts = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        starts += 1
        assert starts < 60
        code, _, err = commands.run(*arguments(dataset, tmp_path / "killed"), die_at=7 + 4 * starts)
    assert code == 0, err
    assert starts > 1
    assert sorted(map(outcome, records(tmp_path / "killed"))) == sorted(map(outcome, records(whole[0])))


def test_two_workers_find_what_one_finds(
    commands: Any, dataset: Path, whole: tuple[Path, str, str], tmp_path: Path
) -> None:
    code, _, err = commands.run(*arguments(dataset, tmp_path / "two"), "--workers", 2)
    assert code == 0, err
    assert sorted(map(outcome, records(tmp_path / "two"))) == sorted(map(outcome, records(whole[0])))


def test_a_run_that_fails_is_recorded_and_stops_no_other(commands: Any, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "faulty_for_test.py").write_text(
        "from manydg.algorithms.base import Base\n\n"
        "class Faulty(Base):\n"
        "    def losses(self, batch):\n"
        "        raise ZeroDivisionError('no luck')\n"
    )
    names = "faulty_for_test:Faulty,base"
    command = ["compare", dataset, "--algorithms", names, "--seeds", 2, "--epochs", 1, "--out", tmp_path / "out"]
    code, out, err = commands.run(*command, modules=[tmp_path])
    assert code == 0, err
    found = records(tmp_path / "out")
    failed = [record for record in found if record["status"] == "failed"]
    assert [record["algorithm"] for record in failed] == ["faulty_for_test:Faulty"] * 2
    assert all("no luck" in record["error"] for record in failed)
    assert [record["seed"] for record in found if record["status"] == "ok"] == [0, 1]
    assert "no luck" in err
    assert "base" in out
    # It is tried again, in case the reason has gone; the others are not.
    mended = "from manydg.algorithms.base import Base\n\nclass Faulty(Base):\n    pass\n"
    (tmp_path / "faulty_for_test.py").write_text(mended)
    code, _, err = commands.run(*command, modules=[tmp_path])
    assert code == 0, err
    assert {record["status"] for record in records(tmp_path / "out")} == {"ok"}
    assert len(records(tmp_path / "out")) == 4


def test_a_comparison_of_which_every_run_fails_says_so(commands: Any, dataset: Path, tmp_path: Path) -> None:
    command = ["compare", dataset, "--algorithms", "sagnet", "--seeds", 1, "--epochs", 1, "--out", tmp_path / "out"]
    code, _, err = commands.run(*command)
    assert code == 2
    assert "Traceback" not in err
    assert [record["status"] for record in records(tmp_path / "out")] == ["failed"]


def test_a_longer_comparison_adds_to_a_shorter_one(commands: Any, dataset: Path, tmp_path: Path) -> None:
    command = ["compare", dataset, "--epochs", 1, "--out", tmp_path]
    assert commands.run(*command, "--algorithms", "base", "--seeds", 1)[0] == 0
    (first,) = records(tmp_path)
    place = tmp_path / first["folder"] / "model.safetensors"
    before = place.stat().st_mtime_ns
    assert commands.run(*command, "--algorithms", "base,prototype", "--seeds", 2)[0] == 0
    assert place.stat().st_mtime_ns == before
    assert len(records(tmp_path)) == 4
