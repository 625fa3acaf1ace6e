"""The first screen: which model, how good on new patients, against whom, at what cost, and when not to trust it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manydg.errors import ManyDGWarning
from manydg.report import write_report
from manydg.report.results_folder import Comparison, read_results_folder
from manydg.report.sections.verdict import Verdict
from manydg.studies.summary import summarize_folder

METHODS = {"manydg": 1.30, "base": 0.9, "boosting": 0.7, "dann": 1.0, "irm": 0.95, "mldg": 0.8, "prototype": 1.0}


@pytest.fixture
def results(maker: Any, tmp_path: Path) -> Path:
    for algorithm, skill in METHODS.items():
        for seed in range(3):
            more = {"predict_seconds": 0.02, "context": {"mode": "offline" if algorithm == "manydg" else "none"}}
            maker.run("nights", "classes", algorithm, seed, skill=skill, **more)
    return Path(maker.write({}, {}))


def first_screen(text: str) -> str:
    return text.split('<section class="summary"')[1].split("</section>")[0]


def test_the_first_screen_answers_which_model_how_good_against_whom_at_what_cost_and_when_not(results: Path) -> None:
    screen = first_screen(write_report(results, results / "page.html").read_text())
    summary = summarize_folder(results)[0]
    choice = summary.recommendation
    assert choice is not None
    assert choice.row == "manydg"
    entry = summary.entries["manydg", "kappa"]
    assert entry.interval is not None
    assert f"Recommended for the next patient: ManyDG. Expected kappa on new patients: {entry.mean:.3f} " in screen
    assert f"(95% interval {entry.interval.low:.3f} to {entry.interval.high:.3f})" in screen
    rows = re.findall(r'<th scope="row"[^>]*>([^<]+)', screen)
    assert rows[:3] == ["ManyDG", "Base", "Gradient boosting"]
    gap = entry.mean - summary.entries["boosting", "kappa"].mean
    assert f"+{gap:.3f}" in screen
    assert ">2 min<" in screen  # the median of 120, 121 and 122 seconds
    assert re.search(r"\d ms<", screen)
    assert "all the patient’s samples" in screen
    test = Comparison.of(summary).pair("manydg", "boosting")
    assert test is not None
    assert test.rival == "boosting"
    said = {
        "clear": "Clearly better than",
        "unsure": "Not certainly different from",
        "none": "No clear difference from",
    }
    assert re.search(rf"{said[test.verdict]} [^.]*Gradient boosting\.", screen)
    assert "When not to trust it" in screen
    assert "marks them (column unlike_training)" in screen
    assert "It needs other samples of the same patient" in screen


def test_every_model_is_in_every_section_that_it_can_be_in(results: Path) -> None:
    text = write_report(results, results / "page.html").read_text()
    parts = dict(re.findall(r'data-section="([^"]+)"(.*?)</section>', text, flags=re.DOTALL))
    names = ("ManyDG", "Base", "Gradient boosting", "DANN", "IRM", "MLDG", "Prototype head")
    for part in ("choice", "compare", "patients", "confusion", "calibration"):
        for name in names:
            assert name in parts[part], (part, name)
    glossary = text.split('id="reading"')[1]
    for name in names:
        assert f"<dt>{name}</dt>" in glossary


def test_small_numbers_and_classes_that_are_missed_are_said_on_the_first_screen(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg"):
        record = maker.run("nights", "classes", algorithm, 0, skill=0.2)
        record["patients"]["test"] = 4
    maker.write({}, {})
    screen = first_screen(write_report(tmp_path, tmp_path / "page.html").read_text())
    assert "A test side has 4 patients, fewer than 10" in screen
    assert "It recognises fewer than half of the samples of these classes: " in screen
    assert "Only 1 split: a different draw of patients may recommend another model." in screen
    assert "Boosting was not part of this comparison." in screen


def test_one_split_is_not_read_as_a_test_that_found_nothing(maker: Any, tmp_path: Path) -> None:
    for algorithm, skill in (("base", 1.2), ("manydg", 1.3), ("boosting", 0.3)):
        maker.run("nights", "classes", algorithm, 0, skill=skill)
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert "It was not tested against Base and Gradient boosting." in text
    assert "Not tested against Base or Gradient boosting." in first_screen(text)
    for words in (">no clear difference<", ">not certain<", "evidence is mixed", "Wilcoxon p cannot fall below"):
        assert words not in text, words


def test_manydg_is_said_to_be_compared_with_its_controls_only_where_it_is(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg", "prototype"):
        for seed in range(2):
            maker.run("nights", "classes", algorithm, seed, skill=1.2)
    maker.write({}, {})
    for reference, said in ((None, True), ("base", False)):
        text = write_report(tmp_path, tmp_path / f"{said}.html", reference=reference).read_text()
        assert ("ManyDG against the controls that lack its central idea" in text) == said


def test_the_page_is_about_the_metric_that_chose_the_epochs(maker: Any, tmp_path: Path) -> None:
    for algorithm, skill in (("manydg", 0.9), ("base", 1.3)):
        for seed in range(3):
            config = {"algorithm": algorithm, "selection": "mae"}
            maker.run("stays", "regression", algorithm, seed, skill=skill, config=config)
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert "Recommended for the next patient: Base. Expected mean absolute error on new patients" in text
    assert "The lowest mean mean absolute error was that of Base" in text
    assert "wider than methods plausibly differ" not in text


def test_the_matrix_has_every_pair_once_each_way_with_opposite_signs(results: Path) -> None:
    text = write_report(results, results / "page.html").read_text()
    table = text.split("Every pair of models: kappa")[2].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)[1:]
    cells = [re.findall(r'<td class="number" data-sort="([^"]*)"', row) for row in rows]
    assert len(cells) == len(METHODS)
    for i in range(len(cells)):
        assert cells[i][i] == ""
        for j in range(i):
            assert float(cells[i][j]) == -float(cells[j][i])
    assert "adjusted (Holm) for all 21 pairs" in text
    assert "Critical-difference diagram." in text
    assert "Wilcoxon’s signed-rank test over patients" in text


def test_where_no_metric_exists_within_patients_models_are_ranked_over_splits(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg", "dann"):
        for seed in range(3):
            record = maker.run("stays", "binary", algorithm, seed, skill=1.0)
            for values in record["per_patient"].values():
                values |= dict.fromkeys(name for name in values if name != "samples")
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert "Within each split the models are ranked by" in text


def test_runs_on_another_version_of_the_data_have_no_part_in_the_page(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg"):
        maker.run("stays", "binary", algorithm, 9, skill=1.0, dataset_hash="fedcba9876543210")
        for seed in range(2):
            maker.run("stays", "classes", algorithm, seed, skill=1.0)
    maker.write({}, {})
    with pytest.warns(ManyDGWarning, match="2 runs in .* are on another version of their dataset and are left out"):
        write_report(tmp_path, tmp_path / "page.html")
    with pytest.warns(ManyDGWarning):
        (chapter,) = read_results_folder(tmp_path).chapters
    assert {record.seed for record in chapter.records} == {0, 1}


def test_a_control_is_said_to_be_no_choice(results: Path, tmp_path: Path) -> None:
    text = write_report(results, tmp_path / "report.html").read_text(encoding="utf-8")
    costs = text.split("What every model costs")[-1].split("</table>")[0]
    (row,) = [row for row in costs.split("<tr") if "Prototype head" in row]
    assert ">not to choose from<" in row
    assert costs.count(">not to choose from<") == 1


def test_learners_with_and_without_context_are_chosen_among_too(maker: Any, tmp_path: Path) -> None:
    for seed in range(2):
        for algorithm, context, skill in (("base", "no context", 0.8), ("base", "offline context", 1.4)):
            maker.run("nights", "classes", algorithm, seed, "context-rivals", skill=skill, variant={"context": context})
    maker.write({}, {})
    (chapter,) = read_results_folder(tmp_path).chapters
    assert Verdict().headline(chapter).startswith("Recommended for the next patient: Base, offline context.")


def test_the_papers_values_are_shown_beside_its_own_datasets_alone(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("base", "manydg"):
        maker.run("nights", "classes", algorithm, 0, skill=1.0)
    about = {"name": "nights", "provenance": {"source": "edf"}}
    maker.write({"datasets": {"nights": about}}, {})
    assert 'data-section="paper"' not in write_report(tmp_path, tmp_path / "page.html").read_text()
    maker.write({"datasets": {"nights": about | {"provenance": {"source": "sleep-edf"}}}}, {})
    assert 'data-section="paper"' in write_report(tmp_path, tmp_path / "page.html").read_text()
