"""The commands for EEG datasets and ``inspect``, on twins and on folders of any kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from manydg import cli
from manydg.cli.data import compare_counts
from manydg.data.dataset import from_arrays, open_dataset
from manydg.sources import PublishedCounts, find_source


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return cli.app


def run(app: typer.Typer, *words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_twin_goes_from_raw_files_to_a_table(app: typer.Typer, tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "sleep"
    said = run(app, "synthesize", "sleep-edf", "--patients", 2, "--seed", 5, "--hours", 0.5, "--out", raw)
    assert "wrote 4 nights of 2 people" in said
    assert "2 synthetic patients" in run(app, "prepare", "sleep-edf", raw, "--out", out, "--wake-margin", 3)
    assert open_dataset(out).info.provenance.options["wake_margin"] == 3
    text = run(app, "inspect", out)
    for words in ("Labels (classes) (synthetic data)", "Samples per patient", "Cohort flow", "within 3 minutes"):
        assert words in text
    assert "68.8%" not in text
    # Files without the twin's mark are taken for real ones.
    (raw / "synthetic.json").unlink()
    run(app, "prepare", "sleep-edf", raw, "--out", out, "--overwrite")
    text = run(app, "inspect", out)
    assert all(words in text for words in ("Labels (classes)", "68.8%", "415,089"))
    assert "synthetic" not in text


def test_iiic_options_reach_the_dataset(app: typer.Typer, tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "iiic"
    run(app, "synthesize", "iiic", "--patients", 5, "--samples-per-patient", 4, "--out", raw)
    (raw / "synthetic.json").unlink()
    run(app, "prepare", "iiic", raw, "--out", out, "--scale", 2, "--min-votes", 7, "--limit-patients", 4)
    options = open_dataset(out).info.provenance.options
    assert (options["scale"], options["min_votes"], options["limit_patients"]) == (2, 7, 4)
    summary = json.loads(run(app, "inspect", out, "--json"))
    assert summary["expected"]["counts"][0]["explanation"].startswith("limited to 4 patients")


@pytest.mark.parametrize("kind", ["classes", "binary", "votes", "multilabel"])
def test_any_dataset_can_be_inspected(app: typer.Typer, tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    patients = np.repeat(["a", "b", "c"], [1, 4, 10])
    matrix = rng.integers(0, 2, (15, 30))
    matrix[:, 0] = 1
    targets = {
        "classes": np.arange(15) % 3,
        "binary": np.arange(15) % 2,
        "votes": np.arange(60).reshape(15, 4) % 7,
        "multilabel": matrix,
    }[kind]
    from_arrays(rng.normal(size=(15, 2)), targets, patients, kind=kind).save(tmp_path / "data")
    summary = json.loads(run(app, "inspect", tmp_path / "data", "--json"))
    assert summary["samples"] == 15
    assert summary["samples_per_patient"]["median"] == 4
    assert summary["samples_per_patient"]["patients_with_one"] == 1
    assert summary["expected"]["counts"] == []
    total = sum(row["samples"] for row in summary["labels"])
    assert total == (matrix.sum() if kind == "multilabel" else 15)
    assert "Labels" in run(app, "inspect", tmp_path / "data")


def test_the_label_table_counts_samples_and_patients(app: typer.Typer, tmp_path: Path) -> None:
    data = from_arrays(np.zeros((5, 1)), ["n2", "w", "n2", "n2", "w"], ["a", "a", "b", "b", "a"])
    data.save(tmp_path / "data")
    labels = json.loads(run(app, "inspect", tmp_path / "data", "--json"))["labels"]
    assert labels == [
        {"label": "n2", "samples": 3, "share": 0.6, "patients": 2, "expected_share": None},
        {"label": "w", "samples": 2, "share": 0.4, "patients": 1, "expected_share": None},
    ]


def published(source: str) -> PublishedCounts:
    counts = find_source(source).published
    assert counts is not None
    return counts


def test_a_count_beside_the_papers_says_what_is_known_of_the_difference() -> None:
    sleep = published("sleep-edf")
    (patients, samples) = compare_counts(sleep, {"patients": 78, "samples": 414_961}, {"limit_patients": 78})
    assert (patients.explanation, patients.difference) == ("as expected", 0)
    assert samples.explanation.startswith("limited to 78 patients")
    assert samples.difference == 414_961 - sleep.counts["samples"]
    (drugs,) = compare_counts(published("mimic3"), {"drugs": 100}, {})
    assert drugs.explanation == published("mimic3").notes["drugs"]
    (more,) = compare_counts(published("eicu"), {"patients": 150_000}, {})
    assert (more.explanation, more.at_least) == ("as expected", True)


def test_a_flow_with_many_counts_fits_a_narrow_screen(app: typer.Typer, tmp_path: Path) -> None:
    flow = [{"step": "rows of prescriptions", "rows": 10398, "left_out_without_ndc": 1478, "left_out_repeated": 0}]
    info = {"cohort_flow": [{"step": "found", "patients": 2, "samples": 4}, *flow]}
    from_arrays(np.zeros((4, 1)), ["a", "b", "a", "b"], ["p", "p", "q", "q"], info=info).save(tmp_path / "data")
    text = run(app, "inspect", tmp_path / "data")
    assert "rows 10,398, left out without ndc 1,478" in " ".join(text.split())
    assert "repeated" not in text


def test_the_papers_figures_are_known() -> None:
    assert published("mimic3").counts == {
        "patients": 6350,
        "samples": 15032,
        "diagnoses": 1958,
        "procedures": 1430,
        "drugs": 112,
    }
    assert published("iiic").counts == {"patients": 2702, "samples": 165309}
    assert published("eicu").counts["treatment"] == 2695
    assert published("mimic3").labels_per_sample == {"mean": 11.65, "most": 64}
    assert all(abs(sum(published(name).shares.values()) - 1) < 0.002 for name in ("sleep-edf", "iiic", "eicu"))
