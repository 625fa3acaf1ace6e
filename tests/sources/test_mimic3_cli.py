"""The commands ``prepare`` and ``synthesize`` of the health-record sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manydg.cli import app
from manydg.data.dataset import open_dataset
from manydg.errors import ConfigError


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", ["mimic3", "mimic4", "eicu", "meds"])
def test_a_synthetic_database_becomes_a_dataset_by_two_commands(tmp_path: Path, name: str) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    run("synthesize", name, "--patients", 40, "--seed", 5, "--out", raw)
    extra = {
        "mimic3": ["--ndc-map", raw / "ndc_to_atc.csv", "--max-diagnoses", 0],
        "mimic4": ["--task", "drugs", "--ndc-map", raw / "ndc_to_atc.csv", "--min-visits", 1],
        "eicu": ["--without", "lab", "--without", "treatment", "--max-events", 0],
        "meds": ["--labels", raw / "labels", "--kinds", "one"],
    }[name]
    printed = run("prepare", name, raw, "--out", out, *extra)
    data = open_dataset(out)
    assert f"{len(data):,} samples of {data.n_patients:,} synthetic patients" in printed
    assert data.info.provenance.source == name
    assert len(data.info.cohort_flow) >= 3


def test_options_reach_the_source(tmp_path: Path) -> None:
    run("synthesize", "eicu", "--patients", 40, "--out", tmp_path / "raw", "--ending", ".csv")
    assert (tmp_path / "raw" / "lab.csv").is_file()
    run("prepare", "eicu", tmp_path / "raw", "--out", tmp_path / "out", "--min-gap", 30, "--limit-patients", 30)
    options = open_dataset(tmp_path / "out").info.provenance.options
    assert (options["min_gap"], options["limit_patients"], options["max_events"]) == (30.0, 30, 300)
    with pytest.raises(ConfigError):
        run("synthesize", "eicu", "--patients", 40, "--out", tmp_path / "x", "--ending", ".zip")
