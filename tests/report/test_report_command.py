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
