"""What the page says of patients, differences and made-up data is true, and the same as on screen and in the files."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from manydg.report import write_report
from manydg.report.words import algorithm_name
from manydg.studies.summary import summarize_folder, write_summary

ABOUT = {"provenance": {"source": "sleep-edf", "program": "manydg 1"}, "patients": 78, "samples": 415_089}


def page_of(folder: Path) -> str:
    return write_report(folder, folder / "page.html").read_text(encoding="utf-8")


def part_of(page: str, section: str) -> str:
    return page.split(f'data-section="{section}"')[1].split("</section>")[0]


@pytest.fixture
def two_methods(maker: Any, tmp_path: Path) -> Path:
    """ManyDG clearly better than MLDG, at three seeds."""
    for seed in range(3):
        maker.run("nights", "classes", "manydg", seed, skill=1.3)
        maker.run("nights", "classes", "mldg", seed, skill=0.9)
    folder: Path = maker.write({"datasets": {"nights": ABOUT}}, {})
    return folder


def test_a_difference_has_one_sign_on_screen_in_the_files_and_on_the_page(two_methods: Path) -> None:
    files = write_summary(two_methods)
    rows = [row for row in csv.DictReader(files[0].open()) if (row["row"], row["metric"]) == ("mldg", "kappa")]
    gap, effect = float(rows[0]["reference_minus_row"]), float(rows[0]["hedges_g"])
    assert rows[0]["reference"] == "manydg"
    assert float(rows[0]["reference_minus_row_low"]) < gap < float(rows[0]["reference_minus_row_high"])
    assert gap > 0.05
    assert effect > 0

    markdown = files[1].read_text()
    assert "(difference = manydg minus row)" in markdown
    line = next(line for line in markdown.splitlines() if line.startswith("| Kappa | mldg |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert float(cells[2]) == pytest.approx(gap, abs=6e-5)
    assert float(cells[-1]) == pytest.approx(effect, abs=6e-3)

    screen = io.StringIO()
    Console(file=screen, width=200).print(summarize_folder(two_methods)[0].to_rich(200))
    lines = screen.getvalue().splitlines()
    assert any("minus row" in line for line in lines)
    shown = next(line for line in lines if line.strip().startswith("mldg")).split()
    assert f"{gap:+.3f}" in shown
    assert f"{effect:.2f}" in shown

    page = page_of(two_methods)
    table = page.split("<span>ManyDG minus each rival: kappa</span>")[1].split("</table>")[0]
    row = next(row for row in table.split("<tr>") if algorithm_name("mldg") in row)
    numbers = re.findall(r'data-sort="(-?[\d.]+)"', row)
    assert float(numbers[0]) == pytest.approx(gap)
    assert float(numbers[-1]) == pytest.approx(effect)
    assert "ManyDG minus MLDG" in part_of(page, "patients")
    worst = part_of(page, "patients").split("does worst")[-1].split("<tr>")[2:]
    for row in worst:
        _, ours, theirs, minus = map(float, re.findall(r'class="number" data-sort="(-?[\d.e-]+)"', row))
        assert minus == pytest.approx(ours - theirs)
    assert worst


def test_nothing_is_said_to_be_above_a_value_that_patients_share(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("manydg", "base"):
        record = maker.run("stays", "classes", algorithm, 0, skill=1.2)
        people = list(record["per_patient"])
        for name in people[:4]:
            record["per_patient"][name]["kappa"] = 0.0
    maker.write({}, {})
    page = page_of(tmp_path)
    assert "above 0.000" not in page
    assert "below 0.000" not in page
    assert f"With ManyDG, 4 of {len(people)} patients share the lowest kappa, 0.000" in page


def test_patients_are_compared_on_those_that_every_method_has_and_their_number_is_given(
    maker: Any, tmp_path: Path
) -> None:
    runs = {algorithm: maker.run("stays", "classes", algorithm, 0, skill=1.2) for algorithm in ("manydg", "base")}
    people = list(runs["manydg"]["per_patient"])
    worst = min(people, key=lambda name: runs["manydg"]["per_patient"][name]["kappa"])
    runs["base"]["per_patient"][worst]["kappa"] = None
    maker.write({}, {})
    page = page_of(tmp_path)
    patients = part_of(page, "patients")
    assert f"Kappa exists for {len(people) - 1} of {len(people)} test patients with every method" in patients
    assert worst not in patients
    assert f"over the {len(people) - 1} of {len(people)} test patients for whom kappa exists" in part_of(
        page, "compare"
    )
    assert f"ManyDG: {len(people) - 1} patients" in patients
    assert f"Base: {len(people) - 1} patients" in patients


def test_a_tenth_percentile_above_the_pooled_value_is_explained_or_left_out(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("manydg", "base"):
        record = maker.run("stays", "classes", algorithm, 0, skill=0.6)
        for number, values in enumerate(record["per_patient"].values()):
            values["kappa"] = 0.97 + 0.001 * number
    maker.write({}, {})
    page = page_of(tmp_path)
    assert "10th percentile of patients" not in page
    assert "it would exceed the value over all samples" in part_of(page, "compare")
    assert "Even the 10th percentile is above kappa over the samples of all patients together" in page
    assert "patients have kappa above" not in page.split('id="contents"')[0]


@pytest.mark.parametrize("marked_in", ["records", "study"])
def test_synthetic_data_are_called_so_in_every_title_and_never_beside_the_paper(
    two_methods: Path, maker: Any, marked_in: str
) -> None:
    real = page_of(two_methods)
    assert "ynthetic" not in real
    assert 'data-section="paper"' in real
    for record in maker.records:
        record |= {"synthetic": True} if marked_in == "records" else {}
    origin = ABOUT["provenance"] | ({"synthetic": True} if marked_in == "study" else {})  # type: ignore[operator]
    weights = {
        "kind": "orthogonality", "title": "Weights of linear models", "dataset": "nights",
        "data": {"rows": [{"first": "v labels", "second": "z labels", "cosine": 0.5, "sd": None, "paper": 0.4321}]},
    }  # fmt: skip
    maker.write({"datasets": {"nights": {**ABOUT, "provenance": origin}}}, {"weights": weights})
    page = page_of(two_methods)
    for tag in ("title", "h1"):
        heading = re.search(rf"<{tag}>([^<]+)</{tag}>", page)
        assert heading is not None
        assert heading[1].startswith("Synthetic data")
    captions = re.findall(r"<caption><span>([^<]+)</span>", page.split('id="reading"')[0])
    captions += re.findall(r"<figcaption>([^<]+)", page)
    assert len(captions) > 6
    assert [text for text in captions if "(synthetic data)" not in text] == []
    assert ">nights (synthetic data)<" in page
    assert " on new synthetic patients: " in page
    assert "The patients here are synthetic" in page
    assert 'data-section="paper"' not in page
    assert "0.432" not in part_of(page, "orthogonality")


def test_a_page_of_both_names_the_synthetic_data_in_its_title(two_methods: Path, maker: Any) -> None:
    maker.run("made-up", "classes", "manydg", 0, skill=1.0, synthetic=True)
    maker.write({"datasets": {"nights": ABOUT}}, {})
    page = page_of(two_methods)
    heading = re.search(r"<h1>([^<]+)</h1>", page)
    assert heading is not None
    assert heading[1].endswith("(made-up: synthetic data)")
    chapters = page.split('<section class="chapter"')
    real = next(chapter for chapter in chapters if 'id="data-1"' in chapter)
    assert "synthetic data" not in real


@pytest.fixture
def values_study(maker: Any) -> Path:
    """ManyDG clearly better than MLDG at predicting a number, at four seeds."""
    for seed in range(4):
        maker.run("stays", "regression", "manydg", seed, skill=2.5)
        maker.run("stays", "regression", "mldg", seed, skill=0.9)
    about = {"patients": 40, "samples": 2400, "target": {"kind": "regression", "names": ["days"]}}
    values = {"0.0": 0.2, "0.25": 2.9, "0.5": 5.0, "0.75": 8.1, "1.0": 29.5}
    folder: Path = maker.write({"datasets": {"stays": {**about, "values": values}}}, {})
    return folder


def test_of_errors_the_lower_is_the_better_in_the_table_and_in_words(values_study: Path) -> None:
    summary = summarize_folder(values_study, resamples=200)[0]
    assert (summary.metrics, summary.primary, summary.patient_metric) == (("r2", "mae", "rmse"), "r2", "mae")
    for metric in summary.metrics:
        ours, theirs = summary.entries["manydg", metric], summary.entries["mldg", metric]
        assert (ours.rank, theirs.rank) == (1, 2)
        assert (ours.mean > theirs.mean) == (metric == "r2")
    entry = summary.entries["mldg", "mae"]
    assert entry.worst_tenth == pytest.approx(np.percentile(list(entry.by_patient.values()), 90))
    assert entry.comparison is not None
    assert entry.comparison.difference < 0
    assert "MAE, 90th percentile of" in summary.to_markdown()
    tests = part_of(page_of(values_study), "compare").split("<span>ManyDG minus each rival: mean absolute error<")[1]
    assert "clearly better" in tests.split("</table>")[0]


def test_values_have_errors_and_intervals_where_classes_have_confusion_and_reliability(values_study: Path) -> None:
    page = page_of(values_study)
    assert 'data-section="confusion"' not in page
    assert 'data-section="calibration"' not in page
    assert "predict the value of days for each sample" in page
    assert "Days is between 0.2 and 29.5" in page
    errors = part_of(page, "errors")
    assert "95% limits of agreement" in errors
    assert "true values between" in errors
    held = part_of(page, "intervals")
    shares = [float(value) for value in re.findall(r'data-sort="([\d.]+)">\d+%', held)]
    promised, seen = shares[0], shares[1]
    assert promised == pytest.approx(8 / 9)
    assert seen > 0.8
    patients = part_of(page, "patients")
    assert "90th percentile" in patients
    worst = re.findall(r'data-sort="(-?[\d.]+)"', patients.split("does worst")[-1])
    errors_of_worst = [float(value) for value in worst[1::4]]
    assert errors_of_worst == sorted(errors_of_worst, reverse=True)
