"""What CONTRIBUTING and README show works to the letter."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import manydg
from manydg.algorithms import build_algorithm
from manydg.backbones import BACKBONES, build_backbone
from manydg.cli import app
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.sources import find_twin
from manydg.studies.paper import find_datasets, prepare_folder
from manydg.targets import target_of

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "algorithms/my_idea.py": "Add an algorithm",
    "backbones/flat.py": "Add a backbone",
    "sources/spectra.py": "Add a dataset",
}


def _blocks(file: str, heading: str, language: str = "python") -> list[str]:
    text = (ROOT / file).read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("from_the_docs")]:
        del sys.modules[name]


def test_the_algorithm_in_contributing_trains(module: Path, small_dataset: DomainDataset) -> None:
    (module / "from_the_docs_idea.py").write_text(_blocks("CONTRIBUTING.md", "Add an algorithm")[0])
    run = manydg.train(small_dataset, algorithm="from_the_docs_idea:MyIdea", epochs=1, settings={"weight": 0.2})
    assert set(run.record.history[0].losses) == {"supervised", "mine"}


def test_the_backbone_in_contributing_gives_features(module: Path, small_dataset: DomainDataset) -> None:
    (module / "from_the_docs_flat.py").write_text(_blocks("CONTRIBUTING.md", "Add a backbone")[0])
    BACKBONES.trust("from_the_docs_flat:Flat")
    backbone = build_backbone("from_the_docs_flat:Flat", InputSchema.of(small_dataset), {"width": 5})
    model = build_algorithm("base", backbone, target_of(small_dataset.target), 1)
    assert model.embed(small_dataset.take(torch.arange(4)).inputs)["v"].shape == (4, 5)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with CONTRIBUTING's algorithm, backbone and source in it, as they are shown."""
    root = tmp_path_factory.mktemp("repository")
    for folder in ("src", "tests", "tools"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root / name)
    for name, heading in COPIED.items():
        (root / "src/manydg" / name).write_text(_blocks("CONTRIBUTING.md", heading)[0], encoding="utf-8")
    return root


def _in(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=repository, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("check", ["ruff check", "ruff format --check", "mypy --strict"])
def test_what_contributing_shows_passes_the_linters(repository: Path, check: str) -> None:
    outcome = _in(repository, *check.split(), *(f"src/manydg/{name}" for name in COPIED))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.slow
def test_what_contributing_shows_passes_the_tests_of_every_algorithm_and_backbone(repository: Path) -> None:
    tests = ["tests/algorithms", "tests/backbones", "tests/training/test_runs.py", "tests/training/test_export.py"]
    chosen = ["-m", "not slow", "-k", "my-idea or flat-", "-p", "no:cacheprovider", "-rA", "--tb=short"]
    outcome = _in(repository, "pytest", *tests, *chosen)
    assert outcome.returncode == 0, outcome.stdout[-5000:]
    passed = re.findall(r"^PASSED .*\[(.*)\]", outcome.stdout, flags=re.M)
    assert any("my-idea" in case for case in passed)
    assert any("flat-table" in case for case in passed)


@pytest.fixture
def plug_in(module: Path) -> Path:
    """The source in CONTRIBUTING, installed as another package: one file and its entry points."""
    (module / "from_the_docs_source.py").write_text(_blocks("CONTRIBUTING.md", "Add a dataset")[0])
    (entry_points,) = _blocks("CONTRIBUTING.md", "Add a dataset", "toml")
    installed = module / "from_the_docs_source-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: from_the_docs_source\nVersion: 1.0\n")
    text = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", entry_points).replace('"', "")
    (installed / "entry_points.txt").write_text(text.replace("my_package.spectra", "from_the_docs_source"))
    importlib.invalidate_caches()
    return module


def _run(*words: object) -> str:
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    if outcome.exception is not None:
        raise outcome.exception
    return outcome.output


def test_a_source_of_another_package_is_synthesized_prepared_predicted_and_found_by_the_paper(plug_in: Path) -> None:
    assert "Spectra: one .npz file per patient, with the arrays x and y." in _run("prepare", "--help")
    raw, out, run = plug_in / "data" / "raw", plug_in / "out", plug_in / "run"
    _run("synthesize", "spectra", "--patients", 9, "--seed", 3, "--out", raw)
    assert "64 samples of 8 synthetic patients" in _run("prepare", "spectra", raw, "--out", out, "--limit-patients", 8)
    data = manydg.open_dataset(out)
    assert data.info.source == "spectra"
    assert data.info.provenance is not None
    assert data.info.provenance.options == {"limit_patients": 8}
    manydg.train(data, algorithm="base", epochs=1, out=run)
    _run("predict", run, raw, "--unit", 1000, "--out", plug_in / "new")
    tables = sorted((plug_in / "new").glob("p*.csv"))
    assert len(tables) == 9
    assert tables[0].read_text().splitlines()[0] == "file,row,yes"
    (entry,) = find_datasets(plug_in / "data")
    assert (entry.name, entry.state) == ("spectra", "raw")
    again = prepare_folder(entry, plug_in, plug_in / "paper", workers=1, report=print)
    assert len(manydg.open_dataset(again)) == 72
    assert set(find_twin("spectra").scales) == {"full", "small", "smoke"}


def test_the_five_lines_of_the_readme_run() -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(12), 10)
    y = rng.integers(0, 2, 120)
    X = rng.normal(size=(120, 4)) + y[:, None]
    names = {"X": X, "y": y, "patients": patients, "X_new": X[:5]}
    first, second = _blocks("README.md", "Your arrays, five lines")
    exec(first.replace("epochs=20", "epochs=1"), names)
    assert set(names["run"].record.test) == {"auprc", "f1", "kappa", "auroc"}
    exec(second.replace('algorithm="manydg"', 'algorithm="manydg", epochs=1'), names)
    assert names["model"].predict_proba(names["X_new"]).shape == (5, 2)


def test_the_tutorial_of_scikit_learn_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/tutorials/scikit-learn.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    assert names["scores"].shape == (3,)
    assert names["probabilities"].shape == (30, 2)
    assert (names["again"].predict_proba(names["table"]) == names["model"].predict_proba(names["table"])).all()


def test_every_command_of_the_readme_exists() -> None:
    lines = re.findall(r"(?:^|`)manydg ([a-z0-9-]+)(?: ([a-z0-9-]+))?", (ROOT / "README.md").read_text(), flags=re.M)
    groups = {"prepare", "synthesize"}
    for command, following in set(lines):
        words = [command, following] if command in groups and following else [command]
        outcome = CliRunner().invoke(app, [*words, "--help"])
        assert outcome.exit_code == 0, words
