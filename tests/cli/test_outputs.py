"""What commands do to outputs that others write, that are links, or that a killed command left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.data.dataset import DomainDataset
from manydg.errors import StorageError
from manydg.files import locked, new_folder, write_atomically

SMALL = ("--epochs", 1, "--device", "cpu")


@pytest.fixture(scope="module")
def made(commands: Any, dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a run and a results folder."""
    folder = tmp_path_factory.mktemp("made")
    dataset_of().save(folder / "data")
    for arguments in (
        ("train", folder / "data", "--out", folder / "run", "--algorithm", "base", *SMALL),
        ("compare", folder / "data", "--out", folder / "study", "--algorithms", "base", "--seeds", 1, *SMALL),
    ):
        code, _, err = commands.run(*arguments)
        assert code == 0, err
    rng = np.random.default_rng(0)
    np.savez(folder / "new.npz", x=rng.normal(size=(24, 3)), y=np.arange(24) % 2, patient=np.arange(24) // 4)
    lines = ["who,label,a,b", *(f"p{row // 4},{row % 2},{row % 5},{row % 7}" for row in range(40))]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    (folder / "labels.csv").write_text("row,label\n0,0\n")
    return folder


COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "train": lambda made, out: ("train", made / "data", "--out", out, "--algorithm", "base", *SMALL),
    "compare": lambda made, out: ("compare", made / "data", "--out", out, "--algorithms", "base", "--seeds", 1, *SMALL),
    "experiment": lambda made, out: ("experiment", "objectives", made / "data", "--out", out, "--seeds", 1, *SMALL),
    "paper": lambda made, out: ("paper", "--raw", made, "--out", out, "--scale", "smoke", "--device", "cpu"),
    "demo": lambda made, out: ("demo", "--out", out, "--patients", 20, "--seeds", 1, *SMALL),
    "prepare": lambda made, out: (
        "prepare", "table", made / "table.csv", "--patient", "who", "--target", "label", "--features", "a", "--out", out
    ),
    "synthesize": lambda made, out: ("synthesize", "meds", "--patients", 3, "--out", out),
    "predict": lambda made, out: ("predict", made / "run", made / "data", "--out", out),
    "personalise": lambda made, out: (
        "personalise", made / "run", made / "data", "--labels", made / "labels.csv", "--out", out
    ),
    "report": lambda made, out: ("report", made / "study", "--out", out),
    "export": lambda made, out: ("export", made / "run", "--format", "torch", "--out", out),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_second_of_two_commands_on_one_output_is_refused(
    name: str, commands: Any, made: Path, tmp_path: Path
) -> None:
    with locked(tmp_path / "out"):
        code, out, err = commands.run(*COMMANDS[name](made, tmp_path / "out"))
    assert (code, out) == (2, "")
    assert f"another command is writing {tmp_path / 'out'} (process {os.getpid()})" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_that_runs_keeps_a_second_out_and_frees_the_folder_when_killed(
    commands: Any, made: Path, tmp_path: Path
) -> None:
    arguments = (*COMMANDS["compare"](made, tmp_path / "out"), "--epochs", 100_000)
    first = commands.start(*arguments)
    wait_for(lambda: any((tmp_path / "out").glob("runs/*/*")))
    code, _, err = commands.run(*arguments)
    assert code == 2
    assert f"(process {first.process})" in err
    first.kill()
    first.wait()
    code, _, err = commands.run(*COMMANDS["compare"](made, tmp_path / "out"))
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["predict", "personalise", "report", "export", "prepare", "synthesize"])
def test_what_a_killed_command_leaves_is_cleared_by_the_next(
    name: str, commands: Any, made: Path, tmp_path: Path
) -> None:
    arguments = COMMANDS[name](made, tmp_path / "out")
    code, _, err = commands.run(*arguments, die_at=1)
    assert code == -9, err
    assert not (tmp_path / "out").exists()
    assert any(".partial-" in path.name for path in tmp_path.iterdir())
    code, _, err = commands.run(*arguments)
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_not_overwritten(commands: Any, made: Path, tmp_path: Path) -> None:
    code, _, err = commands.run(*COMMANDS["prepare"](made, tmp_path / "precious"))
    assert code == 0, err
    (tmp_path / "link").symlink_to(tmp_path / "precious", target_is_directory=True)
    before = sorted(path.name for path in (tmp_path / "precious").iterdir())
    code, _, err = commands.run(*COMMANDS["prepare"](made, tmp_path / "link"), "--overwrite")
    assert code == 2
    assert "is a symbolic link" in err
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "precious").iterdir()) == before


def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path: Path) -> None:
    program = "import os, pathlib, sys, manydg.files as m\nwith m.locked(pathlib.Path(sys.argv[1])): os._exit(1)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "deep" / "out")], check=False)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [".out.lock"]
    another = locked(tmp_path / "deep" / ".." / "deep" / "out")
    with locked(tmp_path / "deep" / "out"), pytest.raises(StorageError, match=f"process {os.getpid()}"), another:
        pass
    assert list((tmp_path / "deep").iterdir()) == []


def test_folders_made_for_a_lock_go_with_it_unless_something_is_in_them(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b" / "out"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b" / "out"):
        write_atomically(tmp_path / "a" / "b" / "out", "kept")
    assert (tmp_path / "a" / "b" / "out").read_text() == "kept"


def test_a_partial_folder_of_a_process_that_had_our_id_is_cleared(tmp_path: Path) -> None:
    (tmp_path / f".out.partial-{os.getpid()}").mkdir()
    with new_folder(tmp_path / "out") as partial:
        (partial / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def children_of(process: int) -> list[int]:
    """The ids of the processes that a process has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process and state != "Z":
            found.append(int(folder.name))
    return found


def runs(process: int) -> bool:
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(process: int) -> list[int]:
    commands = {child: Path("/proc", str(child), "cmdline") for child in children_of(process)}
    return [child for child, file in commands.items() if b"spawn_main" in file.read_bytes()]


@pytest.mark.parametrize("moment", ["starting", "working"])
@pytest.mark.parametrize("name", ["compare", "prepare"])
def test_workers_end_with_a_killed_parent(name: str, moment: str, commands: Any, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if name == "compare":
        study = ("--algorithms", "base,prototype", "--seeds", 1, "--device", "cpu", "--epochs", 100_000)
        command = commands.start("compare", made / "data", "--out", out, *study, "--workers", 2)
        working = lambda: len(list(out.glob("runs/*/checkpoint*"))) == 2  # noqa: E731
    else:
        code, _, err = commands.run(
            "synthesize", "sleep-edf", "--patients", 40, "--hours", 0.5, "--out", tmp_path / "raw"
        )
        assert code == 0, err
        command = commands.start("prepare", "sleep-edf", tmp_path / "raw", "--out", out, "--workers", 2)
        working = lambda: any((tmp_path / ".out.work").glob("*.json"))  # noqa: E731
    wait_for(lambda: len(workers_of(command.process)) == 2)
    if moment == "working":
        wait_for(working)
    children = children_of(command.process)
    command.kill()
    command.wait()
    assert len(children) >= 2
    wait_for(lambda: not any(map(runs, children)), 60)
