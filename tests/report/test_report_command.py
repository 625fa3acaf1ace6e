"""``manydg report`` from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from manydg.cli import studies
from manydg.errors import StorageError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    studies.register(app)
    return app


def test_the_command_writes_the_page_and_says_where(app: typer.Typer, maker: Any, tmp_path: Path) -> None:
    maker.run("few", "multilabel", "manydg", 0, skill=1.2)
    maker.write({}, {})
    page = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(page)])
    assert result.exit_code == 0
    assert str(page) in result.output.replace("\n", "")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_folder_without_results_is_an_error_that_says_what_to_do(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(result.exception, StorageError)
    assert "manydg compare" in str(result.exception)


def test_the_reference_is_the_users_and_the_tables_come_for_latex(app: typer.Typer, maker: Any, tmp_path: Path) -> None:
    for algorithm in ("manydg", "base", "dann"):
        for seed in range(2):
            maker.run("few_nights", "classes", algorithm, seed, skill=1.2)
    maker.write({}, {})
    page, tables = tmp_path / "out.html", tmp_path / "tables.tex"
    command = ["report", str(tmp_path), "--out", str(page), "--reference", "base", "--latex", str(tables)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert "Base minus each rival: kappa" in page.read_text()
    assert "ManyDG minus each rival" not in page.read_text()
    text = tables.read_text()
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 3
    assert r"compare on few\_nights: unseen patients, mean $\pm$ standard deviation over 2 patient splits" in text
    assert "base minus each row" in text
    for line in text.splitlines():
        if line.startswith("manydg &"):
            assert line.endswith(r" \\")
    wrong = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(page), "--reference", "bass"])
    assert "did you mean 'base'" in str(wrong.exception)
