"""The paper's figures: every number of its tables is here, and never called comparable without reason."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from manydg.algorithms import ALGORITHMS
from manydg.data.info import TargetSpec
from manydg.errors import ConfigError
from manydg.evaluation.probes import ROWS
from manydg.files import with_checksum
from manydg.studies.paper_figures import (
    PaperTable,
    beside,
    data_difference,
    paper_table,
    paper_tables,
    paper_tasks,
    task_on,
)
from manydg.studies.summary import summarize, write_summary
from manydg.targets import _KINDS
from manydg.training.record import RunRecord

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")
NUMBERED = [table for table in paper_tables() if table.number]


@pytest.fixture(scope="module")
def paper_source() -> str:
    """The paper's LaTeX, where it lies beside the checkout."""
    for file in sorted(SEEDS.glob("*.txt")) if SEEDS.is_dir() else []:
        text = file.read_text(encoding="utf-8", errors="replace")
        if r"\label{tb:EEG_result}" in text:
            return text
    pytest.skip("the paper's source is not beside this checkout")


def _printed_numbers(source: str, label: str) -> Counter[float]:
    """Every number in the body of a table, the name of each row left out."""
    table = next(t for t in re.findall(r"\\begin\{table\}.*?\\end\{table\}", source, re.S) if f"{{{label}}}" in t)
    body = table.split(r"\midrule", 1)[1].split(r"\bottomrule")[0]
    cells = [cell for line in body.split(r"\\") for cell in line.split("&")[1:]]
    return Counter(float(number) for cell in cells for number in NUMBER.findall(cell))


@pytest.mark.parametrize("table", NUMBERED, ids=lambda table: table.slug)
def test_every_number_the_paper_prints_is_in_the_data_and_no_other(paper_source: str, table: PaperTable) -> None:
    ours = Counter(float(n) for cell in table.cells for n in (cell.value, cell.sd) if n is not None)
    assert ours == _printed_numbers(paper_source, table.label)


def test_every_table_of_the_paper_but_the_one_of_symbols_is_here(paper_source: str) -> None:
    labels = re.findall(r"\\label\{(tb:[^}]*)\}", paper_source)
    assert [table.label for table in NUMBERED] == [label for label in labels if label != "tb:notations"]
    numbers = [i for i, label in enumerate(labels, start=1) if label != "tb:notations"]
    assert [table.number for table in NUMBERED] == numbers


def test_known_cells_stand_where_they_belong() -> None:
    found = paper_table("biosignals").find(task="seizure", row="manydg", metric="kappa")
    assert [(cell.value, cell.sd) for cell in found] == [(0.5627, 0.0066)]
    assert paper_table("records").find(task="readmission", row="irm", metric="auprc")[0].value == 0.7174
    assert paper_table("records").find(task="drugs", row="pcl", metric="jaccard")[0].value is None
    assert paper_table("records-p").find(task="drugs", row="mldg", metric="jaccard")[0].value == 1.4382e-05
    assert paper_table("runtime").find(task="readmission", row="base")[0].value == 541.4
    assert paper_table("domain-similarity").find(task="drugs", row="across")[0].value == 0.9965
    assert paper_table("orthogonality").find(task="average", row=ROWS[2])[0].sd == 0.0204
    assert paper_table("labels").find(task="sleep", row="N3")[0].value == 3.2


def test_cells_are_shown_as_printed() -> None:
    table = paper_table("biosignals")
    assert table.text(table.find(task="seizure", row="base", metric="accuracy")[0]) == "0.6450 ± 0.0102"
    records = paper_table("records")
    assert records.text(records.find(task="drugs", row="pcl", metric="jaccard")[0]) == "/"
    p_values = paper_table("biosignals-p")
    assert p_values.text(p_values.find(task="sleep", row="base", metric="kappa")[0]) == "3.1450e-02"
    runtime = paper_table("runtime")
    assert runtime.text(runtime.find(task="sleep", row="condadv")[0]).startswith("20.60 ±")


def test_rows_tasks_and_metrics_have_the_names_used_here() -> None:
    metrics = {metric for kind in _KINDS.values() for metric in kind.metrics}
    for slug in ("biosignals", "records", "biosignals-p", "records-p", "biosignals-decomposition"):
        for cell in paper_table(slug).cells:
            assert cell.row in ALGORITHMS.names()
            assert cell.metric in metrics
            assert cell.task in paper_tasks()
    assert {cell.row for cell in paper_table("orthogonality").cells} == set(ROWS)


def test_a_misspelt_table_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'orthogonality'"):
        paper_table("ortogonality")


@pytest.mark.parametrize(
    ("source", "task"),
    [("sleep-edf", "sleep"), ("iiic", "seizure"), ("mimic3", "drugs"), ("eicu", "readmission"), ("table", None),
     ("edf", None), (None, None)],
)  # fmt: skip
def test_only_the_papers_own_datasets_have_a_task_of_the_paper(source: str | None, task: str | None) -> None:
    assert task_on(source) == task


def test_only_the_same_source_with_the_papers_counts_is_comparable() -> None:
    same = data_difference("sleep", source="sleep-edf", patients=78, samples=414_961)
    assert same.comparable
    assert "other splits" in same.text
    features = data_difference("sleep", source="table", patients=78, samples=414_961)
    assert not features.comparable
    assert features.text == "Not comparable: the paper used Sleep-EDF Cassette, ours was prepared from table."
    few = data_difference("sleep", source="sleep-edf", patients=20, samples=40_000)
    assert not few.comparable
    assert "the paper had 78 patients, ours 20; the paper had 415,089 samples, ours 40,000" in few.text
    assert not data_difference("sleep", source=None, patients=None, samples=None).comparable


def test_the_open_demonstration_subset_of_a_database_is_not_the_database() -> None:
    assert not data_difference("readmission", source="eicu", patients=1_841, samples=2_520).comparable
    assert data_difference("readmission", source="eicu", patients=139_367, samples=200_859).comparable


def _record(algorithm: str, seed: int) -> RunRecord:
    return RunRecord.from_json({
        "run": f"{algorithm}-{seed}", "experiment": "compare", "variant": {}, "algorithm": algorithm, "seed": seed,
        "dataset": "nights", "dataset_hash": "h", "status": "ok",
        "target": {"kind": "classes", "names": ["W", "N1", "N2", "N3", "REM"]},
        "patients": {"train": 62, "val": 8, "test": 8}, "samples": {"train": 330_000, "val": 42_000, "test": 42_961},
        "test": {"accuracy": 0.88 + 0.01 * seed, "kappa": 0.75, "f1_macro": 0.67},
        "epoch": 1, "selection_rule": "last epoch", "threshold": None, "threshold_rule": "highest probability",
    })  # fmt: skip


def test_theirs_stands_beside_ours_with_the_table_and_the_verdict() -> None:
    summary = summarize([_record(name, seed) for name in ("base", "prototype", "manydg", "simd1") for seed in (0, 1)])
    assert beside(summary, source="table") is None
    found = beside(summary, task="sleep", source="table")
    assert found is not None
    assert ("base", "accuracy", "0.8850 ± 0.0071", "0.8958 ± 0.0108", "Table 1") in found.rows
    assert [row[4] for row in found.rows if row[:2] == ("simd1", "kappa")] == ["Table 11"]
    assert not any(row[0] == "prototype" for row in found.rows)
    assert not found.difference.comparable
    assert "Not comparable" in found.to_markdown()


def test_a_study_the_paper_has_no_task_for_has_nothing_beside_it() -> None:
    record = _record("base", 0).replace(target=TargetSpec("classes", ("calm", "asleep")))
    assert beside(summarize([record])) is None


def test_the_summary_file_carries_the_papers_figures_and_reads_the_source_from_the_study(tmp_path: Path) -> None:
    lines = [_record(name, seed).to_line() for name in ("base", "manydg") for seed in (0, 1)]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert "The paper" not in write_summary(tmp_path)[1].read_text()
    study = {"datasets": {"nights": {"provenance": {"source": "sleep-edf"}}}, "commands": {}}
    (tmp_path / "study.json").write_text(json.dumps(with_checksum(study)))
    assert "The same data (Sleep-EDF Cassette), other splits" in write_summary(tmp_path)[1].read_text()


def test_the_papers_figures_are_not_put_beside_synthetic_data(tmp_path: Path) -> None:
    records = [_record(name, seed).replace(synthetic=True) for name in ("base", "manydg") for seed in (0, 1)]
    assert beside(summarize(records), source="sleep-edf") is None
    (tmp_path / "results.jsonl").write_text("".join(record.to_line() + "\n" for record in records))
    text = write_summary(tmp_path)[1].read_text()
    assert "The paper |" not in text
    assert "The patients are synthetic (made up)" in text
