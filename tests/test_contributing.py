"""What CONTRIBUTING and README show works to the letter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import manydg
from manydg.algorithms import build_algorithm
from manydg.backbones import build_backbone
from manydg.data.dataset import DomainDataset
from manydg.data.schema import InputSchema
from manydg.targets import target_of

ROOT = Path(__file__).resolve().parents[1]


def _blocks(file: str, heading: str) -> list[str]:
    text = (ROOT / file).read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


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
    backbone = build_backbone("from_the_docs_flat:Flat", InputSchema.of(small_dataset), {"width": 5})
    model = build_algorithm("base", backbone, target_of(small_dataset.target), 1)
    assert model.embed(small_dataset.take(torch.arange(4)).inputs)["v"].shape == (4, 5)


def test_the_source_in_contributing_writes_a_dataset(module: Path) -> None:
    (module / "from_the_docs_source.py").write_text(_blocks("CONTRIBUTING.md", "Add a dataset")[0])
    import from_the_docs_source

    raw = module / "raw"
    raw.mkdir()
    for patient in range(3):
        np.savez(raw / f"p{patient}.npz", x=np.ones((4, 2), np.float32) * patient, y=np.array([0, 1, 0, 1]))
    data = manydg.open_dataset(from_the_docs_source.prepare(raw, module / "out"))
    assert (len(data), data.n_patients) == (12, 3)


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


def test_every_command_of_the_readme_exists() -> None:
    from typer.testing import CliRunner

    from manydg.cli import app

    lines = re.findall(r"(?:^|`)manydg ([a-z0-9-]+)(?: ([a-z0-9-]+))?", (ROOT / "README.md").read_text(), flags=re.M)
    groups = {"prepare", "synthesize"}
    for command, following in set(lines):
        words = [command, following] if command in groups and following else [command]
        outcome = CliRunner().invoke(app, [*words, "--help"])
        assert outcome.exit_code == 0, words
