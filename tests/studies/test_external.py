"""A finished model on another dataset: each kind of change is told by its name, and the parts add up."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import manydg
from manydg.cli import app
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.info import DatasetInfo
from manydg.errors import DataError
from manydg.studies.external import External, evaluate_run


def patients(
    kind: str = "binary",
    count: int = 60,
    *,
    seed: int,
    rate: float = 0.4,
    noise: float = 1.0,
    shift: float = 0.0,
    strange: int = 0,
    sites: int = 0,
) -> DomainDataset:
    """Six samples each; the class moves the first value, ``shift`` moves it for everybody, strangers are far away."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(count), 6)
    label = (rng.random(len(who)) < rate).astype(int) if kind == "binary" else rng.integers(0, 3, len(who))
    x = rng.normal(0, noise, (len(who), 4)).astype(np.float32)
    x[:, 0] += 2.0 * label + shift
    x[:, 1] += 1.0 * (label == 2)
    x[who < strange] = rng.normal(0, 1, (int((who < strange).sum()), 4)) * 2 + 12
    names = [f"p{seed}-{number:03d}" for number in range(count)]
    info = DatasetInfo(sites={name: f"H{at % sites}" for at, name in enumerate(names)} if sites else {})
    return manydg.from_arrays(x, label, np.array(names)[who], kind=kind, info=info)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("external") / "run"
    data = patients(count=200, seed=0)
    manydg.train(data, algorithm="base", backbone="mlp", epochs=8, batch_size=64, lr=3e-3, out=folder, device="cpu",
                 ratios=(0.5, 0.2, 0.3))  # fmt: skip
    return folder


def evaluated(folder: Path, data: DomainDataset, selection: str | None = None) -> External:
    run = manydg.open_run(folder)
    if selection is not None:
        run = dataclasses.replace(run, config=run.config.replace(selection=selection))
    return evaluate_run(run, data, "elsewhere", resamples=200)


def test_the_parts_add_up_to_the_change(trained: Path) -> None:
    for selection in ("auprc", "f1"):
        found = evaluated(trained, patients(seed=1, rate=0.2, noise=1.5, shift=0.5, strange=15), selection)
        assert list(found.steps) == ["prevalence", "discrimination", "strange patients", "calibration"]
        assert sum(part.estimate for part in found.steps.values()) == pytest.approx(found.change.estimate)
        own, new = found.own.metrics[selection].estimate, found.new.metrics[selection].estimate
        assert found.change.estimate == pytest.approx(new - own)


def test_more_patients_of_the_same_kind_show_no_change(trained: Path) -> None:
    several = [evaluated(trained, patients(seed=seed, count=150)) for seed in range(2, 7)]
    unchanged = [found for found in several if found.change.low < 0 < found.change.high]
    # A 95% interval misses one time in twenty.
    assert len(unchanged) >= 4
    for found in unchanged:
        assert all(abs(part.estimate) < 0.06 for part in found.steps.values())
        assert any("do not show that the model does worse" in text for text in found.words)


def test_rarer_positives_are_told_as_prevalence(trained: Path) -> None:
    found = evaluated(trained, patients(seed=3, count=300, rate=0.05))
    assert found.steps["prevalence"].estimate < -0.15
    assert abs(found.steps["discrimination"].estimate) < 0.12
    assert "largest part of the drop is prevalence" in found.words[-1]


def test_noisier_inputs_are_told_as_discrimination(trained: Path) -> None:
    found = evaluated(trained, patients(seed=4, count=200, noise=2.5))
    assert found.steps["discrimination"].estimate < -0.1
    assert abs(found.steps["prevalence"].estimate) < 0.05


def test_inputs_in_another_zero_are_told_as_calibration(trained: Path) -> None:
    found = evaluated(trained, patients(seed=5, count=200, shift=1.5), "kappa")
    assert found.steps["calibration"].estimate < -0.1
    assert found.new.stated > found.new.observed + 0.1
    ranked = evaluated(trained, patients(seed=5, count=200, shift=1.5), "auprc")
    assert ranked.steps["calibration"].estimate == 0.0


def test_patients_unlike_the_training_are_counted_and_told(trained: Path) -> None:
    found = evaluated(trained, patients(seed=6, count=100, strange=30))
    assert found.strange is not None
    assert 30 <= found.strange <= 45
    assert found.steps["strange patients"].estimate < -0.05


def test_classes_without_prevalence_change_work_too(tmp_path: Path) -> None:
    data = patients("classes", count=90, seed=0)
    manydg.train(data, algorithm="base", backbone="mlp", epochs=3, out=tmp_path / "run", device="cpu")
    found = evaluate_run(manydg.open_run(tmp_path / "run"), patients("classes", seed=1), "elsewhere", resamples=50)
    assert found.metric == "kappa"
    assert sum(part.estimate for part in found.steps.values()) == pytest.approx(found.change.estimate)


def test_sites_are_listed_and_drawn(trained: Path) -> None:
    found = evaluated(trained, patients(seed=7, count=40, sites=5))
    assert [one.patients for one in found.sites] == [8] * 5
    assert found.new.sites == 5
    assert "40 patients of 5 sites" in found.words[0]


@pytest.mark.parametrize(("sites", "few"), [(2, "2 sites"), (1, "1 site"), (0, "2 patients")])
def test_of_two_sites_or_patients_no_change_is_called_sure(trained: Path, sites: int, few: str) -> None:
    outcome = evaluated(trained, patients(seed=7, count=40 if sites else 2, noise=4.0, sites=sites))
    assert outcome.change.estimate < -0.05
    assert all(math.isnan(each.low) for each in (outcome.change, *outcome.steps.values()))
    assert f"How sure the change is cannot be said (no interval: {few})." in outcome.words
    assert not [sentence for sentence in outcome.words if "includes 0" in sentence or "largest part" in sentence]


def test_the_dataset_of_the_training_and_other_classes_are_refused(trained: Path) -> None:
    run = manydg.open_run(trained)
    with pytest.raises(DataError, match="trained on: name one of other patients"):
        evaluate_run(run, patients(count=200, seed=0), "same")
    with pytest.raises(DataError, match="same classes in the same order"):
        evaluate_run(run, patients("classes", seed=1), "other")


def test_the_command_says_it_in_words_json_markdown_and_html(trained: Path, tmp_path: Path) -> None:
    patients(seed=8, rate=0.1, sites=4).save(tmp_path / "new")
    done = CliRunner().invoke(app, ["evaluate", str(trained), str(tmp_path / "new"), "--out", str(tmp_path / "p.html")])
    assert done.exit_code == 0, done.output
    assert "Prevalence: " in done.output
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<th>site</th>" in page
    assert "p8-" not in page, "no patient is named"
    as_json = CliRunner().invoke(app, ["evaluate", str(trained), str(tmp_path / "new"), "--json"])
    assert set(json.loads(as_json.stdout)["steps"]) >= {"prevalence", "discrimination", "calibration"}
    text = CliRunner().invoke(app, ["evaluate", str(trained), str(tmp_path / "new"), "--out", str(tmp_path / "p.md")])
    assert text.exit_code == 0
    assert "| prevalence |" in (tmp_path / "p.md").read_text(encoding="utf-8")
    wrong = CliRunner().invoke(app, ["evaluate", str(trained), str(tmp_path / "new"), "--out", str(tmp_path / "p.pdf")])
    assert wrong.exit_code != 0


def test_the_schema_of_the_new_data_is_checked(trained: Path) -> None:
    wide = manydg.from_arrays(np.zeros((12, 7), np.float32), np.arange(12) % 2, np.arange(12) // 2, kind="binary")
    assert InputSchema.of(wide).columns["x"].shape == (7,)
    with pytest.raises(DataError, match="trained on"):
        evaluated(trained, wide)


def test_a_measured_value_is_refused_in_a_sentence(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = manydg.from_arrays(
        rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=60), np.arange(60) // 6, kind="regression"
    )
    run = manydg.train(data, algorithm="base", backbone="mlp", epochs=1, out=tmp_path / "run", device="cpu")
    with pytest.raises(DataError, match="predicts a measured value"):
        evaluate_run(run, data, "elsewhere", resamples=5)
