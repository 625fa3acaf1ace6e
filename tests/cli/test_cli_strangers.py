"""Folders and settings files from strangers: nothing they name is imported, whatever command reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg import ManyDGClassifier, open_run, train
from manydg.algorithms import ALGORITHMS
from manydg.backbones import BACKBONES
from manydg.cli import main
from manydg.config import TrainingConfig
from manydg.data.dataset import DomainDataset
from manydg.errors import ConfigError
from manydg.files import with_checksum
from manydg.predict import predict_raw
from manydg.studies.settings import read_settings
from manydg.training.export import export_run
from manydg.training.record import RunRecord, read_tensors, write_tensors

EVIL = """
from pathlib import Path
from torch import nn
from manydg.algorithms.base import Base

Path("pwned").write_text("this code ran")

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.LazyLinear(width)

    def forward(self, x):
        return self.layer(x)

class Method(Base):
    pass
"""
NET, METHOD = "stranger.evil:Net", "stranger.evil:Method"
Commands = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of().save(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a stranger's module in it that leaves a file where it is imported."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").write_text("")
    (tmp_path / "stranger" / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for registry in (ALGORITHMS, BACKBONES):
        monkeypatch.setattr(registry, "_trusted", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("stranger")]:
        del sys.modules[name]


@pytest.fixture
def manydg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Runs a command and returns its exit code and what it wrote to standard error."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["manydg", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().err

    return run


def _forget(here: Path) -> None:
    """As in a new process, the marker removed."""
    (here / "pwned").unlink(missing_ok=True)
    for registry in (ALGORITHMS, BACKBONES):
        registry._trusted.clear()
    for name in [name for name in sys.modules if name.startswith("stranger")]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry != str(here)]


@pytest.fixture
def run_of_own(here: Path, dataset: Path, small_dataset: DomainDataset) -> Path:
    """A run whose backbone is the stranger's, as a stranger would hand it over."""
    train(small_dataset, TrainingConfig("base", backbone=NET, epochs=1), out=here / "run", device="cpu")
    assert (here / "pwned").exists(), "a class that the user names in Python is used"
    _forget(here)
    return here / "run"


@pytest.fixture
def run_of_method(here: Path, small_dataset: DomainDataset) -> Path:
    train(small_dataset, TrainingConfig(METHOD, backbone="mlp", epochs=1), out=here / "method", device="cpu")
    _forget(here)
    return here / "method"


def _reads_of(run: Path, dataset: Path, out: Path) -> list[list[object]]:
    return [
        ["predict", run, dataset, "--out", out / "new"],
        ["export", run, "--out", out / "model.pt2", "--format", "torch"],
    ]


@pytest.mark.parametrize("command", [0, 1])
@pytest.mark.parametrize("kind", ["backbone", "algorithm"])
def test_a_run_is_opened_by_a_command_only_with_the_class_named_again(
    request: pytest.FixtureRequest, here: Path, dataset: Path, manydg: Commands, kind: str, command: int
) -> None:
    run = request.getfixturevalue("run_of_own" if kind == "backbone" else "run_of_method")
    name = NET if kind == "backbone" else METHOD
    arguments = _reads_of(run, dataset, here)[command]
    code, err = manydg(*arguments)
    assert code == 2
    assert f"--{kind} {name}" in err
    assert err.count("\n") == 1
    assert not (here / "pwned").exists()
    assert str(here) not in sys.path
    code, err = manydg(*arguments, f"--{kind}", "stranger.other:Net")
    assert code == 2
    assert f"was trained with the {kind} '{name}', not 'stranger.other:Net'" in err
    assert not (here / "pwned").exists()
    code, err = manydg(*arguments, f"--{kind}", name)
    assert code == 0, err
    assert (here / "pwned").exists()


def test_python_opens_a_run_only_with_the_class_named(run_of_own: Path, here: Path, dataset: Path) -> None:
    for opening in (
        lambda: open_run(run_of_own),
        lambda: ManyDGClassifier.load(run_of_own),
        lambda: predict_raw(run_of_own, dataset, here / "new"),
        lambda: export_run(run_of_own, here / "model.pt2", "torch"),
    ):
        with pytest.raises(ConfigError, match="not imported because a file names it"):
            opening()
    assert not (here / "pwned").exists()
    assert open_run(run_of_own, backbone=NET).config.backbone == NET


def test_an_estimator_that_was_loaded_does_not_fit_what_its_file_names(
    here: Path, small_dataset: DomainDataset, tmp_path: Path
) -> None:
    X, y = np.random.default_rng(0).normal(size=(60, 4)), np.tile([0, 1], 30)
    ManyDGClassifier("base", backbone="mlp", epochs=1).fit(X, y, groups=np.repeat(np.arange(10), 6)).save("saved")
    _change_model(here / "saved", lambda meta: meta["info"]["estimator"]["parameters"].update(backbone=NET))
    model = ManyDGClassifier.load("saved")
    model.fit(X, y, groups=np.repeat(np.arange(10), 6))
    assert not (here / "pwned").exists()


def _change_model(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a model says of itself, with new checksums, as whoever forges one would."""
    record = RunRecord.read(folder / "run.json")
    tensors, meta = read_tensors(folder / "model.safetensors")
    content: dict[str, Any] = dict(meta)
    change(content)
    write_tensors(folder / "model.safetensors", tensors, content)
    record.write(folder / "run.json")


SETTINGS = [f'[backbone]\nname = "{NET}"\n', f'[algorithms."{METHOD}"]\nlr = 0.1\n']


@pytest.mark.parametrize(
    "command", [["train", "--algorithm=base"], ["compare", "--algorithms=base"], ["experiment", "weights"]]
)
@pytest.mark.parametrize("content", SETTINGS)
def test_a_settings_file_does_not_import_what_it_names(
    here: Path, dataset: Path, manydg: Commands, command: list[str], content: str
) -> None:
    (here / "settings.toml").write_text(content)
    code, err = manydg(*command, dataset, "--out", "out", "--epochs", 1, "--config", "settings.toml")
    assert code == 2
    assert "settings.toml: " in err
    assert "not imported because a file names it" in err
    with pytest.raises(ConfigError, match="not imported because a file names it"):
        read_settings("settings.toml")
    assert not (here / "pwned").exists()


def test_a_settings_file_may_name_what_the_command_names_too(here: Path, dataset: Path, manydg: Commands) -> None:
    (here / "settings.toml").write_text(f'[backbone]\nname = "{NET}"\noptions = {{width = 3}}\n')
    code, err = manydg(
        "train", dataset, "--out", "out", "--epochs", 1, "--config", "settings.toml", "--backbone", NET
    )  # fmt: skip
    assert code == 0, err
    assert (here / "pwned").exists()


@pytest.mark.slow
def test_a_study_with_worker_processes_uses_what_the_command_names(here: Path, dataset: Path, manydg: Commands) -> None:
    arguments = ["compare", dataset, "--out", "results", "--epochs", 1, "--seeds", 2, "--workers", 2]
    code, err = manydg(*arguments, "--algorithms", f"base,{METHOD}", "--backbone", NET)
    assert code == 0, err
    records = [json.loads(line) for line in (here / "results" / "results.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records] == ["ok"] * 4
    _forget(here)
    for command in (
        ["report", "results", "--out", "report.html"],
        ["compare", dataset, "--out", "results", "--epochs", 1, "--seeds", 1, "--algorithms", "base"],
        ["compare", dataset, "--out", "results", "--dry-run", "--algorithms", "base"],
    ):
        code, err = manydg(*command)
        assert code == 0, err
    assert not (here / "pwned").exists()


def test_a_dataset_does_not_import_what_it_names(
    here: Path, dataset_of: Callable[..., DomainDataset], manydg: Commands
) -> None:
    data = dataset_of().save(here / "data")
    description = json.loads((data / "dataset.json").read_text())
    description["info"]["source"] = NET
    description.pop("integrity")
    (data / "dataset.json").write_text(json.dumps(with_checksum(description)))
    manydg("inspect", data)
    manydg("train", data, "--out", "run", "--algorithm", "base", "--epochs", 1)
    manydg("predict", "run", data, "--out", "new")
    manydg("predict", "run", here, "--out", "newer")
    assert not (here / "pwned").exists()
    assert str(here) not in sys.path


def test_python_m_does_not_import_from_the_working_directory(here: Path) -> None:
    import subprocess

    (here / "typer.py").write_text('open("pwned", "w").close()\n')
    ended = subprocess.run([sys.executable, "-m", "manydg", "--help"], cwd=here, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (here / "pwned").exists()
