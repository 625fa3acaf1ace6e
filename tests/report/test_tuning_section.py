"""The page says how the settings of a comparison were searched, from the record that the comparison kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manydg.config import Choices, Range, TrainingConfig
from manydg.errors import StorageError
from manydg.report import write_report
from manydg.studies.tuning import Search, Trial, Tuning

SPACE = {"training.lr": Range(5e-5, 5e-3, log=True), "base.hidden": Choices((8, 32))}


def search(algorithm: str, seed: int, scores: list[float]) -> Search:
    states = ["complete", "complete", "pruned", "failed"]
    trials = tuple(
        Trial(number, {"training.lr": 10.0 ** (-4 + number), "base.hidden": 8}, state, value, epochs=5 - number)
        for number, (state, value) in enumerate(zip(states, [*scores, None], strict=True))
    )
    base = TrainingConfig(algorithm, {"hidden": 32}, lr=1e-4, seed=seed)
    return Search(algorithm, seed, base, SPACE, "f0", trials)


@pytest.fixture
def results(maker: Any, tmp_path: Path) -> Path:
    """A comparison of two algorithms on two splits, and a third that was searched but not compared."""
    for seed in (0, 1):
        for algorithm in ("base", "manydg"):
            maker.run("few", "classes", algorithm, seed, skill=1.2)
    maker.write({}, {})
    searches = [
        search(name, seed, [0.5 + 0.1 * seed, last, 0.9])
        for name, last in (("base", 0.8), ("manydg", 0.3), ("dann", 0.4))
        for seed in (0, 1)
    ]
    Tuning("few", "f0", "1", 4, tuple(searches), "manydg tune few --trials 4").write(tmp_path / "tuning" / "few.json")
    return tmp_path


def part(page: Path) -> str:
    """The words of the part on tuning."""
    text = page.read_text()
    start = text.index('data-section="tuning"')
    body = re.sub(r"<[^>]+>", " ", text[start : text.index("data-section=", start + 10)])
    return " ".join(body.split())


def test_the_page_states_the_budget_the_ranges_and_the_best_so_far(results: Path, tmp_path: Path) -> None:
    words = part(write_report(results, tmp_path / "page.html"))
    assert "How the settings were chosen" in words
    assert "4 trials, the first with the defaults, for each algorithm and split" in words
    assert "(16 trials in all, 4 stopped early, 4 failed)" in words
    assert "manydg tune few --trials 4" in words
    # The mean over two splits: 0.5 and 0.6 with the defaults, 0.8 afterwards; a pruned trial's 0.9 does not count.
    assert "Base: 0.550 at 1, 0.800 at 4" in words
    assert "ManyDG: 0.550 at 1, 0.550 at 4" in words
    assert "Base 8 2 2 28 0.550 0.800 +0.250" in words
    assert "Base training.lr 5e-05 to 0.005 0.0001 0.001; 0.001" in words
    assert "Base hidden 8, 32 32 8; 8" in words
    assert "DANN" not in words


def test_the_scores_of_trials_are_called_by_the_metric_that_they_are(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg"):
        maker.run("few", "classes", algorithm, 0, skill=1.2, config={"algorithm": algorithm, "selection": "accuracy"})
    maker.write({}, {})
    tuning = Tuning("few", "f0", "1", 4, (search("base", 0, [0.5, 0.6, 0.7]),), "manydg tune few")
    tuning.write(tmp_path / "tuning" / "few.json")
    words = part(write_report(tmp_path, tmp_path / "page.html"))
    assert "Best validation accuracy so far" in words
    assert "kappa" not in words


def test_a_page_of_settings_that_were_not_tuned_has_no_such_part(results: Path, tmp_path: Path) -> None:
    (results / "tuning" / "few.json").unlink()
    assert 'data-section="tuning"' not in write_report(results, tmp_path / "page.html").read_text()


def test_a_record_that_was_changed_does_not_reach_the_page(results: Path, tmp_path: Path) -> None:
    file = results / "tuning" / "few.json"
    file.write_text(file.read_text().replace("0.8", "0.9"))
    with pytest.raises(StorageError, match="does not match its checksum"):
        write_report(results, tmp_path / "page.html")
