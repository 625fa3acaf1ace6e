"""The command ``manydg``; it has no logic of its own."""

from __future__ import annotations

import sys

import typer

from manydg.cli import compare, demo, train
from manydg.errors import ManyDGError

app = typer.Typer(
    help="Train models on many patients and see how well they do on patients they have never seen.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
prepare_app = typer.Typer(help="Turn raw files into a dataset folder.", no_args_is_help=True)
synthesize_app = typer.Typer(help="Write synthetic raw files in a dataset's own format.", no_args_is_help=True)


def _assemble() -> None:
    for module in (demo, train, compare):
        module.register(app)


_assemble()


def main() -> None:
    """Entry point: an error the user can mend is one line and exit code 2."""
    try:
        app()
    except ManyDGError as error:
        print(f"manydg: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("manydg: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
