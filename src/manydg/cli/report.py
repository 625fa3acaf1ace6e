"""``manydg report``: results to one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("report")(report)


def report(
    results: Annotated[Path, typer.Argument(help="Results folder that 'compare' or 'experiment' wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a page of tables and figures from results.

    The page is one HTML file that needs no network; RESULTS is a folder that 'compare' or 'experiment' wrote.
    """
    from manydg.report.page import write_report

    page = write_report(results, out)
    typer.echo(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB): open it in any browser")
