"""What the commands do when all is well, and what they say about themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manydg.data.dataset import DomainDataset

HEAVY = ("torch", "polars", "sklearn", "scipy", "numpy", "matplotlib", "mne", "pyarrow")


@pytest.fixture(scope="module")
def dataset(dataset_of: Callable[..., DomainDataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset_of(patients=20).save(tmp_path_factory.mktemp("data") / "patients")


@pytest.mark.parametrize("arguments", [[], ["train"], ["prepare"], ["synthesize"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys; from manydg.cli import main; sys.argv = ['manydg', *sys.argv[1:]]\n"
        "try: main()\n"
        f"finally: print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--help"], capture_output=True, text=True, check=True
    )
    assert "LOADED []" in done.stdout
    assert "Usage: manydg" in done.stdout


@pytest.mark.parametrize(
    ("group", "names"),
    [([], {"demo", "train", "compare", "prepare"}), (["prepare"], {"table", "arrays"}), (["synthesize"], {"eicu"})],
)
def test_every_command_is_listed_with_a_whole_sentence(commands: Any, group: list[str], names: set[str]) -> None:
    code, out, _ = commands.run(*group, "--help")
    listed = out[out.index("Commands:") :].splitlines()[1:]
    assert code == 0
    assert names <= {line.split()[0] for line in listed if line.strip()}
    for line in listed:
        assert not line.endswith("..."), f"too long for a terminal of 80 columns: {line}"


def test_train_tells_each_epoch_and_ends_with_the_unseen_patients(commands: Any, dataset: Path, tmp_path: Path) -> None:
    code, out, err = commands.run("train", dataset, "--epochs", 2, "--seed", 4, "--out", tmp_path / "run")
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["seed"], record["dataset"], record["algorithm"]) == (4, "patients", "manydg")
    lines = err.splitlines()
    assert lines[0] == "training manydg"
    for term in ("supervised", "mmd", "reconstruction", "similarity"):
        assert f"{term} {record['history'][0]['losses'][term]:.4f}" in lines[1]
    assert f"kappa {record['history'][0]['val']['kappa']:.4f}" in lines[1]
    assert f"kappa {record['test']['kappa']:.4f}" in out
    assert out.startswith("2 unseen patients, 16 samples:")
    assert f"epoch {record['epoch']}, epoch with the highest validation kappa" in err


def test_settings_and_backbone_options_reach_the_model(commands: Any, dataset: Path, tmp_path: Path) -> None:
    arguments = ["--set", "temperature=0.25", "--set", "reconstruction=0", "--backbone-option", "width=16"]
    code, _, err = commands.run("train", dataset, "--epochs", 1, "--out", tmp_path, *arguments)
    assert code == 0, err
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"]["settings"]["temperature"] == 0.25
    assert record["config"]["backbone_options"] == {"width": 16}
    assert "reconstruction" not in record["history"][0]["losses"]


def test_a_network_that_no_memory_holds_is_refused_before_it_is_built(
    commands: Any, dataset: Path, tmp_path: Path
) -> None:
    arguments = ["--backbone-option", "width=500000000", "--out", tmp_path / "run"]
    code, _, err = commands.run("train", dataset, "--epochs", 1, *arguments)
    assert code == 2
    assert "backbone 'mlp' cannot be built with width=500000000: it takes" in err
    assert "GB of memory: make it smaller" in err


def test_a_module_of_ones_own_is_a_backbone_by_its_name(commands: Any, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "from torch import nn\n\n"
        "class Small(nn.Sequential):\n"
        "    def __init__(self, width=12):\n"
        "        super().__init__(nn.Linear(6, width), nn.ELU())\n"
    )
    arguments = ["--backbone", "mine_for_test:Small", "--backbone-option", "width=9"]
    code, _, err = commands.run(
        "train", dataset, "--epochs", 1, "--out", tmp_path / "run", *arguments, modules=[tmp_path]
    )
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["backbone"] == "mine_for_test:Small"
    # The backbone, its encoder q, its decoder p and three prototypes.
    assert record["parameters"] == (6 + 1) * 9 + 3 * 90 + (19 * 9 + 2 * 90) + 3 * 9


def test_an_algorithm_of_ones_own_is_found_by_its_name(commands: Any, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "idea_for_test.py").write_text(
        "from manydg.algorithms.base import Base\n\nclass Idea(Base):\n    '''Nothing new.'''\n"
    )
    algorithm = "idea_for_test:Idea"
    code, out, err = commands.run(
        "train", dataset, "--epochs", 1, "--algorithm", algorithm, "--out", tmp_path / "run", folder=tmp_path
    )
    assert code == 0, err
    assert "unseen patients" in out
