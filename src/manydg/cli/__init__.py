"""The command ``manydg``; it has no logic of its own."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from typing import Annotated, Any, NoReturn

import typer

from manydg import __version__
from manydg.cli import data, studies, train
from manydg.cli._options import command
from manydg.errors import ManyDGError
from manydg.files import QUIET, printable, warn_plainly

_INTERRUPTED = 130
_LONGEST_MESSAGE = 900
# The base of Typer's usage errors; newer versions of Typer carry click within them, so that it cannot be imported.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Train models on many patients and test them on patients they have never seen.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(printable(f"manydg {__version__}"))
        raise typer.Exit


@app.callback()
def _for_every_command(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not show progress; print results, warnings and errors only.")
    ] = False,
) -> None:
    if quiet and QUIET not in os.environ:
        # In the environment, so that processes of ours are quiet too.
        os.environ[QUIET] = "1"
        context.call_on_close(lambda: os.environ.pop(QUIET, None))


for _first in (studies.demo, train.train):
    app.command()(command(_first))
for _module in (studies, train, data):
    _module.register(app)
app.command()(studies.clinical)


def main() -> None:
    """Entry point: whatever the user can mend is one line on standard error and exit code 2."""
    warn_plainly()
    try:
        # Typer returns the exit code where a command asked for one, such as after --help or an interrupt.
        code = app(prog_name="manydg", standalone_mode=False)
    except ManyDGError as error:
        _fail(str(error))
    except _ClickException as error:
        _fail_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        _stopped()
    except BrokenPipeError:
        # The reader of our output has gone; Python must not try to flush it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        _fail(f"the operating system refused: {error.strerror or error}{file}")
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - a bug of ours or of a library, such as a panic of polars
        _unforeseen(error)
    if code == _INTERRUPTED:
        _stopped()
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    line = printable(f"manydg: {' '.join(message.split())}")
    if len(line) > _LONGEST_MESSAGE:
        # A damaged file's "names" may be thousands of bytes; what to do is at the end.
        line = f"{line[: _LONGEST_MESSAGE // 2]} [...] {line[-_LONGEST_MESSAGE // 2 :]}"
    print(printable(line), file=sys.stderr)
    sys.exit(2)


def _unforeseen(error: BaseException) -> NoReturn:
    """An error that no message was written for: one line, and the traceback in a file that only the user can read."""
    # What it says may be long or name a patient: it goes to the file alone.
    kept, path = tempfile.mkstemp(prefix="manydg-", suffix=".txt")
    with os.fdopen(kept, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(traceback.format_exception(error)))
    kind = type(error).__name__
    line = f"manydg: {kind}: this is a fault of the program; its traceback is in {path}, please report it"
    print(printable(line), file=sys.stderr)
    sys.exit(1)


def _fail_usage(error: Any) -> NoReturn:
    """A command line that makes no sense: what is wrong with it and where to look, or the help if nothing was asked."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    command = error.ctx.command_path if getattr(error, "ctx", None) else "manydg"
    _fail(f"{error.format_message().strip().rstrip('.')} (see '{command} --help')")


def _stopped() -> NoReturn:
    print("manydg: stopped; run the same command again to go on", file=sys.stderr)
    sys.exit(_INTERRUPTED)
