"""Plans with estimates, the progress board, and experiments that were killed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manydg.cli import _options
from manydg.cli._options import LiveBoard, RunLines, described, study_board
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.studies.records import RUNS, RunStatus, StatusFile, read_status
from manydg.studies.settings import Options
from manydg.studies.study import PlannedRun, SilentBoard, Study, grid, plan_study
from manydg.training.record import EpochEntry, RunRecord

QUICK = Options(TrainingConfig(epochs=2, batch_size=32, backbone_options={"hidden": 8, "width": 6}))


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=20).save(tmp_path_factory.mktemp("data") / "patients")


def small_study(folder: Path, dataset: Path) -> Study:
    return Study(folder, dataset, grid("compare", ("base", "manydg"), range(2), QUICK), "patients", "cpu")


class Watching(SilentBoard):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.places: list[Path] = []
        self.ends: list[str] = []
        self.total = (0, 0)
        self.over = False

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        self.total = (len(runs), done)

    def run_started(self, run: PlannedRun, status: Path) -> None:
        self.places.append(status)

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        self.ends.append(run.config.algorithm)
        assert not self.places[-1].exists()

    def ended(self) -> None:
        self.over = True


def test_a_plan_is_costed_from_the_runs_done_before(tmp_path: Path, dataset: Path) -> None:
    study = small_study(tmp_path / "out", dataset)
    plan = plan_study(study)
    assert len(plan.runs) == 4
    assert plan.done == [False] * 4
    assert plan.seconds is None
    assert not (tmp_path / "out").exists()
    study.execute()
    after = plan_study(study)
    assert (after.done, after.seconds) == ([True] * 4, 0.0)
    longer = Study(study.folder, dataset, grid("compare", ("base",), [7], QUICK), "patients", "cpu")
    twice = Study(study.folder, dataset, grid("compare", ("base",), [7, 8], QUICK), "patients", "cpu")
    once = plan_study(longer).seconds
    assert once is not None
    assert plan_study(twice).seconds == pytest.approx(2 * once)


def test_an_algorithm_that_was_never_run_here_has_no_estimate(tmp_path: Path, dataset: Path) -> None:
    study = Study(tmp_path, dataset, grid("compare", ("base", "sagnet"), [0], QUICK), "patients", "cpu")
    assert plan_study(study).seconds is None


@pytest.mark.parametrize("command", [["compare"], ["experiment", "objectives"], ["experiment", "limited-data"]])
def test_a_dry_run_shows_the_runs_with_an_estimate_and_does_nothing(
    commands: Any, dataset: Path, tmp_path: Path, command: list[str]
) -> None:
    options = ["--seeds", 2, "--epochs", 1, "--algorithms", "base,manydg", "--out", tmp_path / "out", "--dry-run"]
    code, out, err = commands.run(*command, dataset, *options)
    assert code == 0, err
    *runs, last = [line for line in out.splitlines() if not line.startswith("limited-data:")]
    assert len(runs) in (4, 10, 20)
    assert all(line.split()[:2] == ["to", "do"] and command[-1] in line for line in runs)
    assert f"{len(runs)} runs, 0 done already; the rest: how long they take is not known" in last
    assert not (tmp_path / "out").exists()


def test_the_board_hears_of_every_run_and_of_the_end(tmp_path: Path, dataset: Path) -> None:
    board = Watching()
    small_study(tmp_path, dataset).execute(board=board)
    assert (board.total, board.ends, board.over) == ((4, 0), ["base", "manydg", "base", "manydg"], True)
    again = Watching()
    small_study(tmp_path, dataset).execute(board=again)
    assert (again.total, again.ends, again.over) == ((4, 4), [], True)
    assert list(tmp_path.rglob("status.json")) == []


def test_a_run_leaves_its_last_epoch_in_its_status_while_it_goes_on(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunStatus] = []
    real = StatusFile.epoch_ended

    def spied(self: StatusFile, entry: EpochEntry) -> None:
        real(self, entry)
        seen.append(read_status(self.file))

    monkeypatch.setattr(StatusFile, "epoch_ended", spied)
    Study(tmp_path, dataset, grid("compare", ("manydg",), [0], QUICK), "patients", "cpu").execute()
    assert [(status.epoch, status.epochs) for status in seen] == [(1, 2), (2, 2)]
    assert set(seen[0].losses) == {"supervised", "mmd", "reconstruction", "similarity"}
    assert "kappa" in seen[0].val


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status = StatusFile(tmp_path / "file" / "status.json")
    status.started("base", 2, 1)
    status.remove()
    assert read_status(status.file) == RunStatus()


def test_the_live_board_shows_what_is_under_way_and_a_line_for_what_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=160, highlight=False, markup=False)
    monkeypatch.setattr(_options, "console", screen)
    board = study_board()
    assert isinstance(board, LiveBoard)
    run = PlannedRun("weights", QUICK.of("manydg", 3), {"changed": "mmd", "weight": 0.1})
    other = PlannedRun("weights", QUICK.of("manydg", 4))
    record = RunRecord(run="f0", algorithm="manydg", seed=3, dataset="d", config=run.config)
    board.planned([run, other], 0)
    try:
        StatusFile(tmp_path / "s.json")._write(RunStatus(1, 2, {"mmd": 0.25}, {"kappa": 0.5, "f1_macro": None}))
        board.run_started(run, tmp_path / "s.json")
        board.run_started(other, tmp_path / "not-yet.json")
        shown = Console(file=io.StringIO(), width=160)
        shown.print(board.table())
        text = shown.file.getvalue()
        for part in ("weights", "manydg seed 3, mmd, weight 0.1", "1/2", "mmd 0.2500", "kappa 0.5000", "0/2", "0 of 2"):
            assert part in text
        board.run_ended(run, record.replace(test={"kappa": 0.75}))
        shown.print(board.table())
        assert shown.file.getvalue().count("seed 3") == 1
        board.run_ended(other, record.replace(status="failed", error="Traceback\nValueError: no"))
    finally:
        board.ended()
    said = screen.file.getvalue()
    assert "manydg seed 3, mmd, weight 0.1:  kappa 0.7500" in said
    assert "failed: ValueError: no" in said


def test_lines_instead_of_a_table_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "console", Console(file=io.StringIO()))
    assert type(study_board()) is RunLines


def test_a_run_is_named_by_algorithm_seed_and_variant() -> None:
    run = PlannedRun("continual", QUICK.of("dann", 2), {"replay": 4})
    assert described(run) == "dann seed 2, replay 4"


def finished(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob(f"{RUNS}/*/run.json")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_experiment_goes_on_without_repeating_or_losing_a_run(
    commands: Any, dataset: Path, tmp_path: Path, workers: int
) -> None:
    arguments = [
        "experiment",
        "objectives",
        dataset,
        "--seeds",
        1,
        "--epochs",
        2,
        "--workers",
        workers,
        "--out",
        tmp_path,
    ]
    command = commands.start(*arguments)
    waited = time.monotonic()
    while len(finished(tmp_path)) < 2 and time.monotonic() - waited < 120:
        time.sleep(0.01)
    command.kill()
    command.wait()
    time.sleep(0.5)
    before = finished(tmp_path)
    assert before
    code, _, err = commands.run(*arguments)
    assert code == 0, err
    after = finished(tmp_path)
    marked = {json.loads(line)["run"] for line in (tmp_path / "results.jsonl").read_text().splitlines()}
    assert len(after) == 5
    assert marked == set(after)
    # A run whose process died between its last write and the study's mark is marked, not trained again.
    assert sum(after[key] != stamp for key, stamp in before.items()) <= workers
    assert list((tmp_path / "figures").glob("*.json"))


def test_two_experiments_share_a_run_by_command(commands: Any, dataset: Path, tmp_path: Path) -> None:
    options = ["--seeds", 1, "--epochs", 1, "--out", tmp_path]
    assert commands.run("compare", dataset, "--algorithms", "manydg", *options)[0] == 0
    first = finished(tmp_path)
    code, out, err = commands.run("experiment", "objectives", dataset, *options)
    assert code == 0, err
    assert "1 of 5 runs are done already" in err
    assert f"the figures of experiments are in the page that 'manydg report {tmp_path}' writes" in err
    assert finished(tmp_path).items() >= first.items()
    assert "manydg (all four objectives)" in out
    assert "compare on patients" in out
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 5
    (shared,) = [line for line in lines if line["run"] in first]
    assert [use["experiment"] for use in shared["experiments"]] == ["compare", "objectives"]
