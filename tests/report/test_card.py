"""The model card and the checklists say what records know, leave the rest open, and name it."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manydg.data.dataset import DomainDataset, from_arrays
from manydg.errors import ConfigError, DataError, StorageError
from manydg.report import write_card, write_checklist
from manydg.training.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    patients = np.repeat(np.arange(30), 12)
    x = rng.normal(size=(360, 4)).astype(np.float32)
    noisy = x[:, 0] + rng.normal(size=360) > 0
    data: DomainDataset = from_arrays(x, noisy, patients)
    folder = tmp_path_factory.mktemp("run") / "run"
    train(data, algorithm="base", epochs=2, out=folder, device="cpu", name="stays")
    return folder


def test_the_card_has_use_data_performance_subgroups_and_limits_from_the_record(run: Path, tmp_path: Path) -> None:
    text = write_card(run, tmp_path / "card.md").read_text()
    record = json.loads((run / "run.json").read_text())
    for heading in ("Intended use", "Model", "Data", "Performance on patients it has not seen", "Subgroups", "Limits"):
        assert f"\n## {heading}\n" in text
    assert "To be filled in by a person" in text
    assert f"{record['patients']['train']} patients with {record['samples']['train']} samples trained on." in text
    line = next(line for line in text.splitlines() if line.startswith("| AUPRC |"))
    value, around = (cell.strip() for cell in line.split("|")[2:4])
    assert value == f"{record['test']['auprc']:.3f}"
    low, high = (float(bound) for bound in around.split(" to "))
    assert low < record["test"]["auprc"] < high
    assert "No subgroups were recorded" in text
    assert "fewer than 10" in text  # three test patients


def test_the_card_as_html_is_one_page_without_network(run: Path, tmp_path: Path) -> None:
    page = write_card(run, tmp_path / "card.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<h1>Model card: Base on stays</h1>" in page
    assert "default-src &#39;none&#39;" in page
    assert "How to make it again" not in page


def test_every_item_of_tripod_ai_is_there_once_filled_or_open(run: Path, tmp_path: Path) -> None:
    text = write_checklist(run, tmp_path / "checklist.md").read_text()
    asked = tomllib.loads(resources.files("manydg.report").joinpath("checklists.toml").read_text())
    tripod, probast = ([key for part in asked[name].values() for key in part] for name in ("tripod", "probast"))
    # The counts of the published tables: 52 items with their letters; 16 questions of development, 18 of evaluation.
    assert len(tripod) == 52
    assert [len(part) for part in asked["probast"].values()] == [3, 4, 4, 5, 3, 4, 4, 7]
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| ([0-9]+[a-g]?|[DE]\d\.\d) \|", line)]
    found = {row[0].removeprefix("| "): row[2].removesuffix(" |") for row in rows}
    assert list(found) == [*tripod, *probast]
    still_open = [key for key in tripod if found[key] == "Open"]
    assert f"Open in TRIPOD+AI: {', '.join(still_open)}." in text
    assert f"{52 - len(still_open)} of 52 items of TRIPOD+AI" in text
    for key in ("1", "3b", "8c", "13", "14", "17", "18a", "19", "25", "D1.2", "D4.4", "E2.3"):
        assert found[key] == "Open"
    record = json.loads((run / "run.json").read_text())
    assert f"AUPRC {record['test']['auprc']:.3f} (95% " in found["23a"]
    assert f"training: {record['patients']['train']} patients" in found["12a"]
    assert f"{record['patients']['test']} test patients, none of them trained on" in found["E4.1"]
    assert "BMJ 2024;385:e078378" in text
    assert "BMJ 2025;388:e082505" in text
    assert "The wording is ours" in text
    assert "\n**Open science**\n" in text
    assert "\n**Evaluation: analysis**\n" in text


def test_a_results_folder_gives_the_card_of_the_model_it_recommends(maker: Any, tmp_path: Path) -> None:
    for algorithm, skill in (("base", 0.6), ("manydg", 1.4)):
        for seed in (1, 0):
            maker.run("nights", "classes", algorithm, seed, skill=skill)
    about = {"name": "nights", "provenance": {"source": "sleep-edf"}, "label_counts": {"Wake": 7}}
    maker.write({"datasets": {"nights": about}}, {})
    text = write_card(tmp_path, tmp_path / "card.md").read_text()
    assert text.startswith("# Model card: ManyDG on nights")
    assert "seed 0" in text
    assert "Prepared from sleep-edf files." in text


def test_a_folder_that_recommends_nothing_or_a_file_of_another_kind_is_refused(
    maker: Any, run: Path, tmp_path: Path
) -> None:
    maker.run("nights", "classes", "base", 0, skill=1.0)
    maker.write({}, {})
    with pytest.raises(DataError, match="name a run's folder"):
        write_card(tmp_path, tmp_path / "card.md")
    with pytest.raises(StorageError, match="neither a finished run nor a results folder"):
        write_card(run.parent, tmp_path / "card.md")
    with pytest.raises(ConfigError, match=r"neither \.md nor \.html"):
        write_card(run, tmp_path / "card.pdf")
