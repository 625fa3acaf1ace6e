"""``manydg show``: settings to read."""

from __future__ import annotations

from typing import Annotated

import typer


def show(
    name: Annotated[
        str | None, typer.Argument(help="A preset, an algorithm or a backbone.", show_default="list all")
    ] = None,
) -> None:
    """Print the settings of a task, algorithm or backbone.

    What is printed is a TOML file: save it, change it, and give it to train, compare or experiment with --config.
    """
    from manydg.studies.settings import shown

    print(shown(name), end="")


def register(app: typer.Typer) -> None:
    app.command()(show)
