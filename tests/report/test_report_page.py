"""The page: what it says comes from the records, and it is whole, valid, private and self-contained."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from manydg.cli import app
from manydg.errors import DataError, ManyDGError, ManyDGWarning, StorageError
from manydg.report import charts, write_report
from manydg.report.results_folder import read_results_folder
from manydg.studies.summary import clinical_results, write_summary

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect", "circle", "line", "image", "stop"}
SECTIONS = {
    "sleep-edf": (
        "question", "cohort", "choice", "compare", "paper", "patients", "confusion", "calibration", "learning",
        "patient-calibration", "objectives", "weights", "limited-data", "continual", "embedding",
        "orthogonality", "domain-similarity", "norms", "failed",
    ),
    "eicu": (
        "question", "cohort", "choice", "compare", "paper", "patients", "confusion", "calibration", "learning",
        "decisions", "patient-calibration",
    ),
    "mimic3": (
        "question", "cohort", "choice", "compare", "paper", "patients", "confusion", "calibration", "learning",
        "patient-calibration",
    ),
}  # fmt: skip


class Reader(HTMLParser):
    """Notes what a browser would stumble over, and the tables' text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.levels: list[int] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._caption: str | None = None
        self._cell: list[str] | None = None
        self.feed(text)
        self.problems += [f"<{name}> is never closed" for name in self.open]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "caption":
            self._caption = ""
        if tag == "tr" and self.tables:
            list(self.tables.values())[-1].append([])
        if tag in ("td", "th"):
            self._cell = []

    def handle_data(self, data: str) -> None:
        if "caption" in self.open and self._caption is not None:
            self._caption += data
        elif self._cell is not None and "small" not in self.open:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} closes something else")
        if tag == "caption" and self._caption is not None:
            self.tables[f"{len(self.tables)} {self._caption.strip()}"] = []
        if tag in ("td", "th") and self._cell is not None:
            list(self.tables.values())[-1][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def table(self, caption: str) -> dict[str, list[str]]:
        """The first table of a caption: first cell to the rest of its row."""
        rows = next(rows for name, rows in self.tables.items() if name.split(" ", 1)[1] == caption)
        return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def text(report_page: Path) -> str:
    return report_page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reader(text: str) -> Reader:
    return Reader(text)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_every_tag_is_closed_and_every_id_is_unique_and_every_reference_leads_somewhere(reader: Reader) -> None:
    assert reader.problems == []
    ids = [attributes["id"] for _, attributes in reader.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = [str(attributes["href"])[1:] for tag, attributes in reader.attributes if tag == "a"]
    for name in ("aria-labelledby", "aria-describedby"):
        wanted += [str(attributes[name]) for _, attributes in reader.attributes if name in attributes]
    assert set(wanted) <= set(ids)


def test_headings_go_down_one_level_at_a_time(reader: Reader) -> None:
    assert reader.levels[0] == 1
    assert reader.levels.count(1) == 1
    steps = [later - earlier for earlier, later in zip(reader.levels, reader.levels[1:], strict=False)]
    assert max(steps) == 1


def test_the_page_refers_to_nothing_outside_itself(reader: Reader, text: str) -> None:
    assert "http://" not in text
    assert "https://" not in text
    for tag, attributes in reader.attributes:
        for name in ("src", "href", "srcset", "action", "data"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:")), (tag, name)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    policies = [attributes["content"] for _, attributes in reader.attributes if "http-equiv" in attributes]
    assert str(policies[0]).startswith("default-src 'none'; ")


def test_each_dataset_has_its_chapter_with_every_section_there_are_data_for(text: str) -> None:
    chapters = text.split('<section class="chapter"')[1:]
    for chapter, (dataset, names) in zip(chapters, SECTIONS.items(), strict=False):
        assert f">{dataset}</h2>" in chapter
        assert tuple(re.findall(r'data-section="([^"]+)"', chapter)) == names


def test_the_page_says_what_was_not_run(text: str) -> None:
    left_out = re.findall(r"Experiments not run on [^<]+?, so not shown: ([^<]+)\.</p>", text)
    assert left_out[0] == "decomposition and runtime"
    assert "objectives" in left_out[1]
    assert "norms" in left_out[1]


def test_the_main_table_holds_the_means_of_the_records(study_folder: Path, reader: Reader) -> None:
    table = reader.table("Performance on patients never seen in training")
    for shown, algorithm in (("ManyDG", "manydg"), ("Base", "base"), ("MLDG", "mldg")):
        runs = [
            record["test"]
            for record in records_of(study_folder)
            if record["status"] == "ok"
            and (record["dataset"], record["experiment"], record["algorithm"]) == ("sleep-edf", "compare", algorithm)
        ]
        for column, metric in enumerate(("accuracy", "kappa", "f1_macro")):
            values = np.array([run[metric] for run in runs])
            assert table[shown][column].startswith(f"{values.mean():.3f} ± {values.std(ddof=1):.3f}")


def test_a_difference_is_manydg_minus_the_rival_and_lies_in_its_interval(study_folder: Path, text: str) -> None:
    values = {
        name: [
            record["test"]["kappa"]
            for record in records_of(study_folder)
            if (record["dataset"], record["experiment"], record["algorithm"]) == ("sleep-edf", "compare", name)
            and record["status"] == "ok"
        ]
        for name in ("manydg", "mldg")
    }
    gap = float(np.mean(values["manydg"]) - np.mean(values["mldg"]))
    assert gap > 0.05
    table = text.split("<span>ManyDG minus each rival: kappa</span>")[1].split("</table>")[0]
    row = next(row for row in table.split("<tr>") if "MLDG" in row)
    match = re.search(r">([+−][\d.]+)<small>([\d.−]+) to ([\d.−]+)</small>", row)
    assert match is not None
    shown, low, high = (float(part.replace("−", "-")) for part in match.groups())
    assert shown == pytest.approx(gap, abs=6e-4)
    assert 0 < low < shown < high
    assert "clearly better" in row


def test_the_papers_figures_stand_beside_ours_and_are_not_called_comparable_for_other_data(
    reader: Reader, text: str
) -> None:
    table = next(rows for name, rows in reader.tables.items() if name.endswith("Ours and the paper’s"))
    theirs = next(row for row in table if row[:2] == ["ManyDG", "Kappa"])
    assert theirs[3:] == ["0.7998 ± 0.0124", "Table 1"]
    chapter = text.split('data-section="paper"')[1].split("</section>")[0]
    assert "Not comparable: the paper had 415,089 samples, ours 12,000." in chapter


def test_the_summary_comes_first_and_states_value_interval_rival_and_difference(text: str) -> None:
    first = re.search(r'<p class="finding">([^<]+)</p>', text)
    assert first is not None
    assert re.match(
        r"Recommended for the next patient: [^.]+\. Expected kappa on new patients: 0\.\d{3} \(95% interval 0\.\d{3}",
        first[1],
    )
    second = re.search(
        r"<li>On patients it has never seen, ManyDG reached kappa 0\.\d{3} \(95% interval 0\.\d{3} to 0\.\d{3}\); "
        r"the plain model \(Base\) 0\.\d{3} \(95% interval [^)]+\)\. The difference, [+−]0\.\d{3} \(95% interval ",
        text,
    )
    assert second is not None
    assert text.index(first[0]) < second.start() < text.index('<h2 id="contents">')


def test_the_worst_patients_are_those_of_the_records_by_pseudonym(study_folder: Path, reader: Reader) -> None:
    values: dict[str, list[float]] = {}
    for record in records_of(study_folder):
        key = (record["dataset"], record["experiment"], record["algorithm"], record["status"])
        if key == ("sleep-edf", "compare", "manydg", "ok"):
            for name, entry in record["per_patient"].items():
                values.setdefault(name, []).append(entry["kappa"])
    quarter = len(values) // 4
    lowest = sorted(values, key=lambda name: np.mean(values[name]))[:quarter]
    table = reader.table(f"Kappa of the {quarter} patients for whom ManyDG does worst")
    assert [name for name in table if name.startswith("P-")] == lowest


def test_every_chart_is_told_in_words_with_numbers(text: str) -> None:
    charts = re.findall(r'<svg role="img" aria-labelledby="figure-(\d+)"', text)
    assert len(charts) > 30
    for number in charts:
        words = re.search(rf'<p id="figure-{number}-words">([^<]*)</p>', text)
        assert words is not None
        assert re.search(r"\d", words[1])


def test_an_unforeseen_error_does_not_bring_what_it_said_onto_the_page(text: str) -> None:
    assert re.search(r"\b4711\b", text) is None  # a sort key may have these digits among others
    assert "ValueError, an error that manydg did not foresee" in text


def test_two_reports_of_the_same_records_are_the_same_bytes(maker: Any, tmp_path: Path) -> None:
    for seed in range(2):
        maker.run("few", "classes", "manydg", seed, skill=1.2)
    maker.write({}, {})
    pages = [write_report(tmp_path, tmp_path / f"{name}.html").read_bytes() for name in ("one", "two")]
    assert pages[0] == pages[1]


def test_three_datasets_fit_in_three_megabytes(report_page: Path) -> None:
    assert report_page.stat().st_size < 3_000_000


def test_a_patient_named_in_clear_is_refused_without_repeating_the_name(maker: Any, tmp_path: Path) -> None:
    record = maker.run("few", "classes", "manydg", 0, skill=1.2)
    record["per_patient"]["Jane Doe"] = {"samples": 1, "kappa": 0.1}
    maker.write({}, {})
    with pytest.raises(DataError, match="line 1 names a patient") as caught:
        write_report(tmp_path, tmp_path / "page.html")
    assert "Jane" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_predictions_that_name_a_patient_in_clear_are_refused(maker: Any, tmp_path: Path) -> None:
    record = maker.run("few", "classes", "manydg", 0, skill=1.2)
    file = tmp_path / record["folder"] / "predictions.npz"
    arrays = dict(np.load(file))
    arrays["pseudonyms"] = np.array(["Jane Doe"] * len(arrays["pseudonyms"]))
    np.savez(file, **arrays)
    maker.write({}, {})
    with pytest.raises(DataError, match="something other than a pseudonym"):
        write_report(tmp_path, tmp_path / "page.html")


def test_markup_in_a_class_name_stays_text(maker: Any, tmp_path: Path) -> None:
    record = maker.run("<script>alert(1)</script>", "classes", "manydg", 0, skill=1.2)
    record["target"]["names"][0] = "<b onclick=x>&"
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert text.count("<script>") == 1
    assert "<b onclick" not in text
    assert Reader(text).problems == []


def test_records_without_predictions_or_study_still_make_a_page(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("manydg", "base"):
        record = maker.run("few", "binary", algorithm, 0, skill=1.2)
        (tmp_path / record["folder"] / "predictions.npz").unlink()
    maker.write({}, {})
    (tmp_path / "study.json").unlink()
    with pytest.warns(ManyDGWarning, match=r"study\.json is missing, so that the report does not describe the data"):
        text = write_report(tmp_path, tmp_path / "page.html").read_text()
    names = re.findall(r'data-section="([^"]+)"', text)
    assert names == ["question", "choice", "compare", "patients", "learning"]
    assert "could not be tested" in text


def test_patients_with_one_sample_each_are_judged_by_the_share_of_right_decisions(maker: Any, tmp_path: Path) -> None:
    record = maker.run("stays", "binary", "manydg", 0, skill=1.2)
    file = tmp_path / record["folder"] / "predictions.npz"
    arrays = dict(np.load(file))
    arrays["patient"] = np.arange(len(arrays["row"]))
    arrays["pseudonyms"] = np.array([f"P-{number:010x}" for number in arrays["patient"]])
    np.savez(file, **arrays)
    nothing = {"samples": 1, "auprc": None, "f1": None, "kappa": None, "auroc": None}
    record["per_patient"] = {f"P-{number:010x}": nothing for number in np.flatnonzero(arrays["split"] == 1)}
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert "Accuracy of each patient" in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "results.jsonl").unlink(), "no results"),
        (lambda folder: (folder / "results.jsonl").write_text("{}\n"), "line 1 is damaged, it has no 'algorithm'"),
        (lambda folder: (folder / "results.jsonl").write_text(""), "no record"),
        (lambda folder: (folder / "study.json").write_text("{"), "study.json"),
        (lambda folder: (folder / "figures" / "a.json").write_text('{"kind": "bar"}'), "figures/a.json"),
    ],
)
def test_what_cannot_be_read_is_named(maker: Any, tmp_path: Path, damage: Any, message: str) -> None:
    maker.run("few", "classes", "manydg", 0, skill=1.2)
    maker.write({}, {})
    damage(tmp_path)
    with pytest.raises(ManyDGError, match=message):
        write_report(tmp_path, tmp_path / "page.html")


def test_a_folder_given_as_the_page_is_refused(maker: Any, tmp_path: Path) -> None:
    maker.run("few", "classes", "manydg", 0, skill=1.2)
    maker.write({}, {})
    with pytest.raises(StorageError, match=r"report\.html"):
        write_report(tmp_path, tmp_path / "runs")


def test_a_figure_of_no_named_dataset_is_refused_where_there_are_several(maker: Any, tmp_path: Path) -> None:
    for dataset in ("one", "two"):
        maker.run(dataset, "classes", "manydg", 0, skill=1.2)
    bars = {"y": {"label": "kappa"}, "names": ["base"], "values": [0.7]}
    maker.write({}, {"a": {"kind": "bars", "title": "Bars", "experiment": "runtime", "data": bars}})
    with pytest.raises(DataError, match="which dataset"):
        write_report(tmp_path, tmp_path / "page.html")


def test_figures_count_the_runs_that_the_table_counts(maker: Any, tmp_path: Path) -> None:
    """Neither a run on older data nor one that was done again is in any figure, nor in what the command prints."""
    older, before = (maker.run("few", "binary", "manydg", 0, name, skill=0.1) for name in ("older", "before"))
    older |= {"experiment": "compare", "dataset_hash": "f" * 16, "seed": 7}
    before["experiment"] = "compare"
    kept = [maker.run("few", "binary", name, seed, skill=1.2) for name in ("manydg", "base") for seed in range(2)]
    maker.write({}, {})
    with pytest.warns(ManyDGWarning, match="1 runs in .* are on another version of their dataset and are left out"):
        chapter = read_results_folder(tmp_path).chapters[0]
    assert [record.run for record in chapter.runs("compare")] == [record["run"] for record in kept]
    assert chapter.comparison is not None
    assert "manydg, seed 0 was run more than once: the last run counts" in chapter.comparison.summary.notes
    sensitivity = clinical_results(tmp_path, resamples=20)["manydg"].at_threshold["sensitivity"].estimate
    shown = [record for record in chapter.runs("compare") if record.algorithm == "manydg"]
    runs = [run for run in map(chapter.predictions, shown) if run is not None]
    rates = [run.rates(np.ones((1, len(run.names))))["sensitivity"][0] for run in runs]
    assert sensitivity == pytest.approx(np.mean(rates))


def test_the_same_model_on_two_datasets_is_two_models(maker: Any, tmp_path: Path) -> None:
    for dataset, skill in (("one", 0.1), ("other", 2.0)):
        maker.run(dataset, "binary", "base", 0, skill=skill)
    maker.write({}, {})
    assert list(clinical_results(tmp_path, resamples=20)) == ["base on one", "base on other"]


@pytest.mark.parametrize(
    ("config", "summed", "told"),
    [
        ({}, "4 splits by patient", "The patients were divided 4 times at random (62 to"),
        (
            {"split": "site"},
            "4 splits by site",
            "Whole sites, each with all its patients, were divided 4 times at random",
        ),
        (
            {"split": "site", "folds": 4},
            "4 splits by site",
            "Whole sites, each with all its patients, were dealt at random into 4 groups; each of 4 splits tests one",
        ),
        (
            {"folds": 3},
            "4 splits by patient",
            "The patients were dealt at random into 3 groups, 2 times anew; each of 4",
        ),
    ],
)
def test_what_was_split_and_how_is_said(
    maker: Any, tmp_path: Path, config: dict[str, Any], summed: str, told: str
) -> None:
    for seed in range(4):
        maker.run("nights", "classes", "base", seed, skill=1.0, config={"algorithm": "base", **config})
    maker.write({}, {})
    assert summed in write_summary(tmp_path)[1].read_text()
    assert told in write_report(tmp_path, tmp_path / "page.html").read_text()


def test_models_without_rates_have_no_column_beside_those_that_have_some(maker: Any, tmp_path: Path) -> None:
    for dataset, kind in (("few", "binary"), ("nights", "classes")):
        maker.run(dataset, kind, "base", 0, skill=1.0)
    maker.write({}, {})
    printed = CliRunner().invoke(app, ["clinical", str(tmp_path)])
    assert printed.exit_code == 0
    assert [line.split() for line in printed.output.splitlines() if "base on" in line] == [["base", "on", "few"]]
    assert "highest probability" not in printed.output  # the rule of classes, which have no threshold


def test_every_rule_by_which_the_runs_thresholds_were_chosen_is_printed(maker: Any, tmp_path: Path) -> None:
    """The first run did not reach what was asked for; the last did."""
    kept = "precision=.5 on validation patients"
    missed = "precision=.5 is not reached on validation patients: the threshold with the highest precision there, 0.310"
    for seed, rule in enumerate((missed, kept, kept)):
        for algorithm in ("base", "manydg"):
            maker.run("few", "binary", algorithm, seed, skill=1.0, threshold_rule=rule)
    maker.write({}, {})
    assert clinical_results(tmp_path, resamples=20)["base"].rule == f"{missed}; {kept}"
    assert f"At the threshold: {missed}; {kept}\n" in CliRunner().invoke(app, ["clinical", str(tmp_path)]).output


def test_an_experiment_without_a_section_of_its_own_is_shown(maker: Any, tmp_path: Path) -> None:
    for seed in range(2):
        for width, dropout in ((8, True), (16, True), (32, True), (8, False), (16, False), (32, False)):
            variant = {"width": width, "dropout": dropout}
            maker.run("few", "classes", "manydg", seed, "layer-sizes", skill=1.0 + width / 100, variant=variant)
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert 'data-section="layer-sizes"' in text
    assert "With dropout" in text
    assert "Without dropout" in text
    rows = Reader(text).table("The same in numbers (mean ± standard deviation over splits)")
    assert rows


def test_a_label_names_only_what_varies(reader: Reader) -> None:
    assert list(reader.table("After the last step"))[1:] == ["0 samples replayed", "4 samples replayed"]


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_marks_stand_out_enough_for_weak_eyes(text: str) -> None:
    named = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text))
    for ground in ("#ffffff", named["wash"]):
        for name in ("ink", "quiet", "accent"):
            assert contrast(named[name], ground) >= 4.5
    for colour in (*charts.COLOURS, charts.INK, charts.QUIET, charts.ACCENT):
        assert contrast(colour, "#ffffff") >= 4.5


def test_without_manydg_another_row_is_compared_and_the_tests_are_about_it(maker: Any, tmp_path: Path) -> None:
    for seed in range(3):
        for algorithm, skill in (("base", 0.8), ("manydg-context", 1.6)):
            maker.run("nights", "classes", algorithm, seed, skill=skill)
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert "ManyDG with context minus each rival: kappa" in text
    assert "Base minus each rival" not in text


def test_class_names_with_dollars_are_drawn_as_they_are(maker: Any, tmp_path: Path) -> None:
    for algorithm in ("manydg", "base"):
        record = maker.run("money $_$", "classes", algorithm, 0, skill=1.2)
        record["target"]["names"][:2] = ["$a_$", "N1 $x^$"]
    maker.write({}, {})
    text = write_report(tmp_path, tmp_path / "page.html").read_text()
    assert re.search(r"<text[^>]*>\$a_\$</text>", text)
    assert Reader(text).problems == []
