"""A training process killed at any moment and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manydg.data.dataset import DomainDataset
from manydg.errors import StorageError
from manydg.training.record import read_tensors
from manydg.training.run import train

FILES = {
    "calibration.safetensors",
    "identity.json",
    "model.safetensors",
    "personal.safetensors",
    "predictions.npz",
    "run.json",
    "split.json",
}


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=24, samples=10).save(tmp_path_factory.mktemp("data") / "data")


def options(epochs: int) -> list[object]:
    return ["--epochs", epochs, "--batch-size", 32, "--seed", 1]


def metrics(folder: Path) -> dict[str, Any]:
    """A run's record without what the clock and the memory of the machine decide."""
    record = json.loads((folder / "run.json").read_text())
    history = [{key: value for key, value in entry.items() if key != "seconds"} for entry in record["history"]]
    passing = ("seconds", "first_use_seconds", "predict_seconds", "peak_memory_mb", "history", "integrity")
    return {**{key: value for key, value in record.items() if key not in passing}, "history": history}


def assert_same_run(folder: Path, other: Path) -> None:
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (folder / "predictions.npz").read_bytes() == (other / "predictions.npz").read_bytes()
    assert metrics(folder) == metrics(other)
    assert {file.name for file in folder.iterdir()} == FILES


@pytest.mark.parametrize("algorithm", ["manydg", "dann"])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(
    commands: Any, dataset: Path, tmp_path: Path, algorithm: str
) -> None:
    arguments = ["train", dataset, *options(6), "--algorithm", algorithm, "--out"]
    assert commands.run(*arguments, tmp_path / "whole")[0] == 0
    choose = random.Random(algorithm)
    killed = resumed = 0
    for _ in range(5):
        command = commands.start(*arguments, tmp_path / "killed")
        lines = choose.randint(0, 3)
        while command.err.count("\n") < lines and not (tmp_path / "killed" / "run.json").exists():
            time.sleep(0.001)
        time.sleep(choose.random() * 0.1)
        command.kill()
        killed += command.wait() == -signal.SIGKILL
        resumed += "going on from epoch" in command.err
    code, out, err = commands.run(*arguments, tmp_path / "killed")
    assert code == 0, err
    assert killed >= 2
    assert resumed >= 1
    assert "unseen patients" in out
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_run_killed_before_each_of_its_writes_ends_with_the_same_bits(
    commands: Any, dataset: Path, tmp_path: Path
) -> None:
    arguments = ["train", dataset, *options(2), "--out"]
    assert commands.run(*arguments, tmp_path / "whole")[0] == 0
    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        code = commands.run(*arguments, tmp_path / "killed", die_at=number)[0]
        if code == -signal.SIGKILL:
            code_again, _, err = commands.run(*arguments, tmp_path / "killed")
            assert code_again == 0, err
            assert_same_run(tmp_path / "killed", tmp_path / "whole")
            shutil.rmtree(tmp_path / "killed")
    # The name, a checkpoint for each epoch, the weights, the split, the predictions, the calibration, the population
    # and the record.
    assert number == 10


@pytest.mark.slow
def test_the_installed_command_itself_survives_a_kill(dataset: Path, tmp_path: Path) -> None:
    program = shutil.which("manydg") or shutil.which("manydg", path=str(Path(os.sys.executable).parent))
    if program is None:
        pytest.skip("the package is not installed, so that there is no command")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [program, "train", str(dataset), *map(str, options(40)), "--out"]
    first = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.PIPE, text=True, env=environment)
    assert first.stderr is not None
    for _ in range(4):
        first.stderr.readline()
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint.safetensors").exists()
    again = subprocess.run([*command, str(tmp_path / "killed")], capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    assert "going on from epoch" in again.stderr
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, env=environment)
    assert whole.stdout == again.stdout
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_finished_run_is_not_trained_again(commands: Any, dataset: Path, tmp_path: Path) -> None:
    arguments = ["train", dataset, *options(2), "--out", tmp_path / "run"]
    _, out, _ = commands.run(*arguments)
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()}
    code, again, err = commands.run(*arguments)
    assert (code, again) == (0, out)
    assert "epoch   1" not in err
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()} == written


@pytest.fixture(scope="module")
def died(commands: Any, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose process died after its first epoch."""
    folder = tmp_path_factory.mktemp("died") / "run"
    assert commands.run("train", dataset, *options(3), "--out", folder, die_at=3)[0] == -signal.SIGKILL
    assert (folder / "checkpoint.safetensors").exists()
    return folder


@pytest.fixture
def interrupted(died: Path, tmp_path: Path) -> Path:
    """A copy of it, to do things to."""
    return Path(shutil.copytree(died, tmp_path / "run"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_damaged_checkpoint_is_named_and_can_be_deleted(
    commands: Any, dataset: Path, interrupted: Path, damage: str
) -> None:
    file = interrupted / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes({"cut": content[:-100], "flipped": content, "emptied": b""}[damage])
    arguments = ["train", dataset, *options(3), "--out", interrupted]
    code, _, err = commands.run(*arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert "checkpoint.safetensors is damaged" in err
    assert "delete it and run the same command again" in err
    if damage == "cut":
        file.unlink()
        assert commands.run(*arguments)[0] == 0


def test_a_checkpoint_of_another_model_is_refused(
    commands: Any, dataset: Path, interrupted: Path, tmp_path: Path
) -> None:
    arguments = ["train", dataset, *options(3), "--out"]
    commands.run(*arguments, tmp_path / "other", "--algorithm", "base", die_at=3)
    shutil.copy(tmp_path / "other" / "checkpoint.safetensors", interrupted / "checkpoint.safetensors")
    code, _, err = commands.run(*arguments, interrupted)
    assert code == 2
    assert "does not fit this run" in err


def test_a_checkpoint_holds_tensors_and_json_alone(interrupted: Path) -> None:
    tensors, meta = read_tensors(interrupted / "checkpoint.safetensors")
    assert {name.partition("/")[0] for name in tensors} == {"model", "best", "optimizer"}
    assert meta["history"][0]["epoch"] == 1
    json.dumps(meta)


def test_a_folder_with_a_record_but_no_name_is_refused(small_dataset: DomainDataset, tmp_path: Path) -> None:
    train(small_dataset, epochs=1, out=tmp_path)
    (tmp_path / "identity.json").unlink()
    with pytest.raises(StorageError, match="does not say what it is of"):
        train(small_dataset, epochs=1, out=tmp_path)


@pytest.mark.parametrize("file", ["identity.json", "run.json", "model.safetensors"])
def test_a_damaged_file_of_a_finished_run_is_named(small_dataset: DomainDataset, tmp_path: Path, file: str) -> None:
    train(small_dataset, epochs=1, out=tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(StorageError, match=f"{file} is damaged"):
        train(small_dataset, epochs=1, out=tmp_path)
