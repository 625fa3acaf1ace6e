"""The report of an event: before and after its onset, alarms, net benefit and groups of patients, from true runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from manydg.cli import app
from manydg.config import TrainingConfig
from manydg.data.dataset import from_arrays
from manydg.data.info import DatasetInfo, EventSpec
from manydg.errors import ConfigError
from manydg.evaluation.clinical import compare_groups, rates_at_threshold
from manydg.evaluation.metrics import Predictions
from manydg.evaluation.statistics import PatientResampling
from manydg.report.results_folder import Chapter, read_results_folder
from manydg.report.sections import Figure, Part, Table
from manydg.report.sections.clinical import Clinical, _foremost, _left_out
from manydg.report.words import row_title
from manydg.studies.conduct import compare

HOURS, PATIENTS = 14, 60


@pytest.fixture(scope="module")
def chapter(tmp_path_factory: pytest.TempPathFactory) -> Chapter:
    folder, rng = tmp_path_factory.mktemp("stays"), np.random.default_rng(0)
    who, hour = np.repeat(np.arange(PATIENTS), HOURS), np.tile(np.arange(float(HOURS)), PATIENTS)
    onset = np.where(who % 2 == 0, 10.0, np.nan)
    values = rng.normal(size=(len(who), 2))
    values[:, 0] += onset - hour <= 4
    info = DatasetInfo(event=EventSpec("onset", 4.0, 24.0), subgroups={"sex": ["f", "m"]})
    data = from_arrays(values, (onset - hour <= 4).astype(int), who, times=hour, info=info)
    beside = {"onset": torch.from_numpy(onset), "subgroups": torch.from_numpy((who[:, None] // 2 % 2).astype(np.int16))}
    replace(data, metadata=beside).save(folder / "data")
    options = TrainingConfig(epochs=2, lr=0.01, ratios=(0.5, 0.2, 0.3), at="sensitivity=.8", silence="2h")
    compare(folder / "data", ["base", "prototype"], 2, folder / "results", options=options, device="cpu")
    return read_results_folder(folder / "results").chapters[0]


@pytest.fixture(scope="module")
def parts(chapter: Chapter) -> dict[str, Part]:
    return {part.name: part for part in Clinical().build(chapter)}


def table(part: Part, caption: str) -> dict[str, list[str]]:
    found = next(block for block in part.blocks if isinstance(block, Table) and block.caption.startswith(caption))
    return {row[0].text: [cell.text for cell in row[1:]] for row in found.rows}


def test_every_model_is_shown_before_and_after_the_onset(chapter: Chapter, parts: dict[str, Part]) -> None:
    assert list(parts) == ["onset", "decisions", "subgroups", "patient-calibration"]
    rows = table(parts["onset"], "Before the onset")
    assert list(rows) == ["Base", "Prototype head"]
    base = [record.test for record in chapter.records if record.algorithm == "base"]
    metrics = [f"{metric}_{when}" for when in ("before", "after") for metric in chapter.target.metrics]
    means = [np.mean([float(test[metric] or 0) for test in base]) for metric in metrics]
    assert rows["Base"] == [f"{mean:.3f}" for mean in means]


def test_rates_are_means_over_runs_at_their_own_thresholds_with_the_silence_asked_for(
    chapter: Chapter, parts: dict[str, Part]
) -> None:
    rates = []
    for record in chapter.records:
        run = chapter.whole_predictions(record)
        if record.algorithm == "prototype" and run is not None:
            rates.append(rates_at_threshold(run, np.ones((1, len(run.names))), 2.0))
    shown = table(parts["decisions"], "At the decision threshold")["Prototype head"]
    assert shown == [f"{np.mean([rate[name][0] for rate in rates]):.3f}" for name in rates[0]]
    figures = [block for block in parts["decisions"].blocks if isinstance(block, Figure)]
    assert [panel.title for figure in figures for panel in figure.panels] == [
        "Share of events caught", "Mean hours of warning", "Net benefit"
    ]  # fmt: skip
    assert "false alarms per patient-day" in figures[0].panels[0].words


def test_the_command_prints_the_same_of_results_and_of_a_run_and_another_threshold_on_request(chapter: Chapter) -> None:
    runner = CliRunner()
    printed = runner.invoke(app, ["clinical", str(chapter.folder), "--json"])
    assert printed.exit_code == 0
    whole = json.loads(printed.output)
    assert list(whole) == ["base", "prototype"]
    record = next(record for record in chapter.records if record.algorithm == "base")
    run = str(chapter.folder / record.folder)
    own, other = (
        json.loads(runner.invoke(app, ["clinical", run, *more, "--json"]).output)["base"]["at_threshold"]
        for more in ((), ("--at", "alarms=1/day", "--silence", "1h"))
    )
    assert {name: value["estimate"] for name, value in own.items()} == pytest.approx(dict(record.operating))
    assert other["sensitivity"]["estimate"] != own["sensitivity"]["estimate"]
    undefined = runner.invoke(app, ["clinical", run, "--at", "alarms=0.0001/day"]).output
    assert "nan" not in undefined
    assert re.search(r"^Precision +–$", undefined, flags=re.M)
    tables = runner.invoke(app, ["clinical", str(chapter.folder)]).output
    for title in ("At the threshold", "Events caught, by false alarms per patient-day", "sex: base", "sex: prototype"):
        assert title in tables
    line = next(line for line in tables.splitlines() if line.startswith("Negative predictive value "))
    values = [whole[name]["at_threshold"]["negative_predictive_value"]["estimate"] for name in whole]
    assert [float(each) for each in re.findall(r"(\d\.\d{3}) \[", line)] == pytest.approx(values, abs=6e-4)
    refused = runner.invoke(app, ["clinical", run, "--at", "recall=1"])
    assert isinstance(refused.exception, ConfigError)


def test_groups_have_metrics_differences_and_tests(chapter: Chapter, parts: dict[str, Part]) -> None:
    runs = [chapter.whole_predictions(record) for record in chapter.records if record.algorithm == "base"]
    known = [run for run in runs if run is not None]
    plan = PatientResampling(np.unique(np.concatenate([run.names for run in known])), resamples=50)
    groups = compare_groups(known, "sex", plan)
    rows = table(parts["subgroups"], "sex: Base")
    assert list(rows) == ["f", "m"]
    for group in groups:
        cells = rows[group.group]
        assert cells[0] == str(group.patients)
        assert cells[1] == f"{group.values['auprc'].estimate:.3f}"
        assert cells[3] == f"{group.values['auroc'].estimate:.3f}"
    tables = [block for block in parts["subgroups"].blocks if isinstance(block, Table)]
    notes = {
        row[0].text: (row[1].note, row[3].note) for row in next(t for t in tables if t.caption == "sex: Base").rows
    }
    for group in groups:
        share, difference = notes[group.group]
        assert share == f"{group.positive:.1%} positive"
        assert ("p\N{NO-BREAK SPACE}" in difference) == bool(group.p)


def test_of_many_models_the_recommended_one_and_the_next_on_validation_patients_are_shown() -> None:
    rows = {"boosting": 0.5, "dann": 0.7, "ema": 0.6, "base": 0.4}
    models: dict[str, Sequence[Predictions]] = {row_title(row): [] for row in rows}

    def shown(metric: str, row: str) -> list[str]:
        choice = SimpleNamespace(row=row, validation=rows)
        chapter: Any = SimpleNamespace(
            metric=metric, choice=SimpleNamespace(summary=SimpleNamespace(recommendation=choice))
        )
        return list(_foremost(chapter, models, 2))

    assert shown("auprc", "base") == [row_title("dann"), row_title("base")]
    assert shown("auprc", "dann") == [row_title("dann"), row_title("ema")]
    assert shown("mae", "dann") == [row_title("dann"), row_title("base")]
    untold: Any = SimpleNamespace(metric="auprc", choice=None)
    assert list(_foremost(untold, models, 2)) == [row_title("boosting"), row_title("dann")]
    assert _left_out(models, models) == ""
    assert "the next of the 4 on validation patients" in _left_out(models, {})
