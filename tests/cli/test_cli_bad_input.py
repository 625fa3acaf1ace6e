"""Whatever is wrong with what the command is given: one line that says so, exit code 2, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manydg.cli import main
from manydg.data.dataset import DomainDataset, from_arrays

Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of().save(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a command that must fail and returns its one line."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["manydg", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert out == ""
        lines = [line for line in err.splitlines() if not line.startswith(("training ", "epoch "))]
        assert len(lines) == 1, err
        assert lines[0].startswith("manydg: ")
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "manydgg"], "unknown algorithm 'manydgg': did you mean 'manydg'?"),
        (["--algorithm", "no.such:Thing"], "cannot import no.such"),
        (["--set", "mdd=1"], "'mdd': did you mean 'mmd'?"),
        (["--set", "mmd=high"], "ManyDG.mmd is 'high'; it must be a number, such as"),
        (["--set", "mmd=-1"], "ManyDG.mmd is -1; it must be a finite number of at least 0"),
        (["--algorithm", "base", "--set", "hidden=0"], "Base.hidden is 0; it must be a finite number of at least 1"),
        (
            ["--algorithm", "boosting", "--set", "rounds=0"],
            "Boosting.rounds is 0; it must be a finite number of at least",
        ),
        (
            ["--algorithm", "boosting", "--set", "leaves=1"],
            "leaves is 1; it must be a finite number of at least 2",
        ),
        (["--set", "mmd=NaN"], "ManyDG.mmd is nan; it must be a finite number of at least 0"),
        (["--set", "mmd=Infinity"], "ManyDG.mmd is inf; it must be a finite number of at least 0"),
        (["--set", "predictor=cosin"], "did you mean 'cosine'?"),
        (["--set", "mmd"], "'mmd' is not of the form NAME=VALUE"),
        (["--set", "=3"], "'=3' is not of the form NAME=VALUE"),
        (["--backbone", "mpl"], "unknown backbone 'mpl': did you mean 'mlp'?"),
        (["--backbone", "json:JSONDecoder"], "is not an nn.Module"),
        (["--backbone-option", "widht=3"], "did you mean 'width'?"),
        (["--backbone-option", "width=-3"], "backbone 'mlp' cannot be built with width=-3: "),
        (["--backbone-option", "dropout=2"], "backbone 'mlp' cannot be built with dropout=2: "),
        (["--device", "gpu"], "unknown device 'gpu'; say auto, cpu, cuda or cuda:N"),
        (["--device", "meta"], "unknown device 'meta'"),
        (["--lr", "0"], "lr is 0; it must be above 0"),
        (["--lr", "nan"], "lr is nan"),
        (["--weight-decay", "-1"], "weight_decay is -1"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--batch-size", "1"], "Invalid value for '--batch-size'"),
        (["--seed", "one"], "Invalid value for '--seed'"),
        (["--seed", str(2**40)], f"from 0 to {2**32 - 1}"),
        (["--epohcs", "3"], "No such option: --epohcs"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(
    refuse: Refuse, dataset: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in refuse("train", dataset, "--out", tmp_path / "run", "--epochs", 1, *arguments)
    assert not (tmp_path / "run" / "run.json").exists()


def test_fewer_than_three_groups_to_deal_patients_into_are_refused_by_their_option(
    refuse: Refuse, dataset: Path, tmp_path: Path
) -> None:
    line = refuse("compare", dataset, "--out", tmp_path / "out", "--algorithms", "base", "--seeds", 2, "--repeats", 3)
    assert "--repeats deals the patients into --seeds groups, 2 here: ask for 3 or more" in line


def test_a_folder_whose_run_failed_at_once_takes_the_command_put_right(
    commands: Any, refuse: Refuse, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert "did you mean 'mlp'?" in refuse("train", dataset, "--out", out, "--epochs", 1, "--backbone", "mpl")
    code, _, err = commands.run("train", dataset, "--out", out, "--epochs", 1, "--backbone", "mlp")
    assert code == 0, err


@pytest.mark.parametrize(
    "command",
    [["train", "--algorithm=base"], ["compare", "--algorithms=base"], ["experiment", "--algorithms=base", "continual"]],
)
def test_runs_do_not_go_into_a_dataset_folder(refuse: Refuse, dataset: Path, command: list[str]) -> None:
    before = sorted(dataset.iterdir())
    line = refuse(*command, dataset, "--out", dataset, "--epochs", 1)
    assert f"{dataset} is a dataset folder: name another one" in line
    assert sorted(dataset.iterdir()) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_not_used(refuse: Refuse, dataset: Path, tmp_path: Path) -> None:
    assert "no GPU that torch can use" in refuse("train", dataset, "--out", tmp_path, "--device", "cuda")


def test_a_command_that_does_not_exist_or_lacks_an_argument_is_one_line(refuse: Refuse, dataset: Path) -> None:
    assert "Did you mean 'train'?" in refuse("trian")
    assert "Missing argument 'dataset'" in refuse("train")
    assert "Missing option '--out' (see 'manydg train --help')" in refuse("train", dataset)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_dataset_folder_that_is_not_there_is_named(refuse: Refuse, tmp_path: Path, command: str) -> None:
    line = refuse(command, tmp_path / "nowhere", "--out", tmp_path / "out")
    assert f"no dataset folder at {tmp_path / 'nowhere'}: make one with 'manydg prepare'" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no description", "is not a dataset folder: it has no dataset.json"),
        ("half a description", "dataset.json is damaged: prepare the dataset again"),
        ("half a file", "bytes instead of"),
        ("a flipped bit", "does not match its checksum"),
        ("a file less", "targets.npy is missing"),
    ],
)
def test_a_damaged_or_half_written_dataset_folder_is_named(
    refuse: Refuse, dataset: Path, tmp_path: Path, damage: str, message: str
) -> None:
    place = Path(shutil.copytree(dataset, tmp_path / "data"))
    description, values = place / "dataset.json", place / "inputs.x.npy"
    content = bytearray(values.read_bytes())
    if damage == "no description":
        description.unlink()
    elif damage == "half a description":
        description.write_text(description.read_text()[:200])
    elif damage == "half a file":
        values.write_bytes(content[: len(content) // 2])
    elif damage == "a flipped bit":
        content[-3] ^= 4
        values.write_bytes(content)
    else:
        (place / "targets.npy").unlink()
    for command in ("train", "compare"):
        assert message in refuse(command, place, "--out", tmp_path / command)


def test_a_run_folder_of_another_dataset_is_refused_and_kept(
    commands: Any, refuse: Refuse, dataset: Path, dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    other = dataset_of(patients=20).save(tmp_path / "other")
    assert commands.run("train", other, "--epochs", 1, "--out", tmp_path / "run")[0] == 0
    before = (tmp_path / "run" / "run.json").read_bytes()
    assert "holds a run of other data" in refuse("train", dataset, "--epochs", 1, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_damaged_run_is_named_with_a_remedy_that_helps(
    commands: Any, refuse: Refuse, dataset: Path, tmp_path: Path
) -> None:
    run, train = tmp_path / "run", ("train", dataset, "--epochs", 1, "--out", tmp_path / "run")
    assert commands.run(*train)[0] == 0
    record, model = (run / "run.json").read_text(), (run / "model.safetensors").read_bytes()
    remedy = f"delete {run} and train again"
    for content, place, message in (
        (b"{}", "run.json", "run.json is damaged, it has no 'algorithm'"),
        (model[:500], "model.safetensors", "model.safetensors is damaged"),
        (None, "model.safetensors", "model.safetensors is missing"),
    ):
        (run / "run.json").write_text(record)
        (run / place).unlink() if content is None else (run / place).write_bytes(content)
        for command in (("predict", run, dataset, "--out", tmp_path / "out"), train):
            line = refuse(*command)
            assert message in line
            assert remedy in line


@pytest.mark.parametrize("patients", [1, 2])
def test_fewer_patients_than_sides_are_refused(
    refuse: Refuse, dataset_of: Callable[..., DomainDataset], tmp_path: Path, patients: int
) -> None:
    place = dataset_of(patients=patients, samples=20).save(tmp_path / "data")
    line = refuse("train", place, "--out", tmp_path / "run")
    assert f"the dataset has {patients} patient" in line
    assert "training, validation and test need one each at least" in line


def test_a_reason_that_all_runs_share_is_said_once(
    commands: Any, dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    place = dataset_of(patients=2, samples=20).save(tmp_path / "data")
    code, _, err = commands.run("compare", place, "--seeds", 2, "--algorithms", "base", "--out", tmp_path / "out")
    assert code == 2
    assert err.splitlines()[-1].count("the dataset has 2 patient(s)") == 1


def test_validation_patients_of_one_class_are_said_with_the_option_that_helps(refuse: Refuse, tmp_path: Path) -> None:
    who = np.repeat(np.arange(10), 8)
    x = np.random.default_rng(0).normal(size=(80, 3))
    place = from_arrays(x, who % 2, who).save(tmp_path / "data")
    line = refuse("train", place, "--epochs", 1, "--out", tmp_path / "run")
    assert "too few classes are to be seen in 1 validation patient(s)" in line
    assert "--set training.ratios=[0.6,0.2,0.2]" in line


def test_one_class_is_nothing_to_learn(refuse: Refuse, tmp_path: Path) -> None:
    who = np.repeat(np.arange(12), 4)
    x = np.random.default_rng(0).normal(size=(48, 3))
    data = from_arrays(x, np.ones(48, int), who, names=["n", "y"], kind="binary")
    line = refuse("train", data.save(tmp_path / "data"), "--out", tmp_path / "run")
    assert "are of one class ('y'): there is nothing to learn" in line


def test_missing_values_are_refused_by_a_backbone_that_cannot_take_them(refuse: Refuse, tmp_path: Path) -> None:
    who = np.repeat(np.arange(12), 4)
    x = np.random.default_rng(0).normal(size=(48, 3))
    x[5, 1] = np.nan
    data = from_arrays(x, np.arange(48) % 2, who, missing=True)
    place = data.save(tmp_path / "data")
    line = refuse("train", place, "--out", tmp_path / "run", "--backbone", "mlp")
    assert "cannot take missing values: use the backbone 'tabular'" in line


def test_constant_columns_are_a_warning_of_one_line(commands: Any, tmp_path: Path) -> None:
    who = np.repeat(np.arange(20), 6)
    x = np.random.default_rng(0).normal(size=(120, 4))
    x[:, 2] = 7.0
    place = from_arrays(x, (x[:, 0] > 0).astype(int), who).save(tmp_path / "data")
    code, out, err = commands.run("train", place, "--epochs", 1, "--out", tmp_path / "run")
    assert code == 0, err
    assert "unseen patients" in out
    warned = [line for line in err.splitlines() if "are constant" in line]
    assert len(warned) == 1
    assert warned[0].startswith("manydg: warning: 1 input features are constant in the training patients")
    assert "Standardize" not in err
    assert ".py" not in err


def test_patients_with_one_sample_each_are_trained_on(
    commands: Any, dataset_of: Callable[..., DomainDataset], tmp_path: Path
) -> None:
    place = dataset_of(patients=80, samples=1).save(tmp_path / "data")
    code, out, err = commands.run("train", place, "--epochs", 1, "--out", tmp_path / "run")
    assert code == 0, err
    assert out.startswith("8 unseen patients, 8 samples:")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_full_disk_is_said_and_nothing_is_lost(commands: Any, dataset: Path, tmp_path: Path, command: str) -> None:
    arguments = [command, dataset, "--epochs", 2, "--out", tmp_path / "out"]
    arguments += ["--seeds", 1, "--algorithms", "base,manydg"] if command == "compare" else []
    code, out, err = commands.run(*arguments, file_bytes=100_000)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert "Traceback" not in err
    assert out == ""
    assert last.startswith("manydg: ")
    assert "File too large" in err
    assert not [file for file in (tmp_path / "out").rglob("*") if "partial" in file.name]
    # With room on the disk the same command goes on and ends well.
    code, out, err = commands.run(*arguments)
    assert code == 0, err


def test_a_folder_that_cannot_be_written_is_named(commands: Any, refuse: Refuse, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    line = refuse("train", dataset, "--epochs", 1, "--out", tmp_path / "file")
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        assert "Permission denied" in refuse("train", dataset, "--epochs", 1, "--out", locked / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithms", "base,dan"], "unknown algorithm 'dan': did you mean 'dann'?"),
        (["--algorithms", ","], "needs at least one algorithm"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--workers", "0"], "Invalid value for '--workers'"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(
    refuse: Refuse, dataset: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in refuse("compare", dataset, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_damaged_study_is_named(refuse: Refuse, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{")
    line = refuse("compare", dataset, "--out", tmp_path, "--algorithms", "base", "--seeds", 1, "--epochs", 1)
    assert "study.json is damaged" in line


def test_brackets_in_a_path_are_shown_as_they_are(commands: Any, dataset: Path, tmp_path: Path) -> None:
    _, _, err = commands.run("train", dataset, "--epochs", 1, "--out", tmp_path / "[bold]run")
    assert "[bold]run/run.json" in err


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dataset: Path, tmp_path: Path
) -> None:
    from manydg.training import run

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit", interrupted)
    monkeypatch.setattr(sys, "argv", ["manydg", "train", str(dataset), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "manydg: stopped; run the same command again to go on\n"


def test_settings_are_read_as_numbers_flags_json_or_text() -> None:
    from manydg.cli._options import parse_settings

    given = ["mmd=0.2", "leaf-samples=3", "on=true", "list=[1, 2]", "name=a=b"]
    wanted = {"mmd": 0.2, "leaf_samples": 3, "on": True, "list": [1, 2], "name": "a=b"}
    assert parse_settings(given) == wanted
    assert json.dumps(wanted)
