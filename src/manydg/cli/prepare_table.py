"""``manydg prepare table`` and ``manydg prepare arrays``: data of your own without writing code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._prepared import Overwrite

Out = Annotated[Path, typer.Option(help="Dataset folder to write.", show_default=False)]
Kind = Annotated[
    str | None, typer.Option(help="classes, votes, binary or multilabel, where it cannot be told from the values.")
]
Classes = Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the classes in code order.")]
Missing = Annotated[str, typer.Option(help="refuse empty values, or keep them as measurements not taken.")]


def register_prepare(app: typer.Typer) -> None:
    """Add the commands to ``manydg prepare``."""
    app.command("table", context_settings={"allow_extra_args": True})(prepare_table)
    app.command("arrays")(prepare_arrays)


def prepare_table(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Table: parquet, CSV or TSV, one row a sample.", show_default=False)],
    patient: Annotated[str, typer.Option(metavar="COL", help="Column of the patient.", show_default=False)],
    target: Annotated[
        list[str],
        typer.Option(metavar="COL", help="Column of the class; repeat it for votes or labels.", show_default=False),
    ],
    features: Annotated[
        list[str],
        typer.Option(metavar="PATTERN...", help="Columns of the inputs, such as 'EEG_*'.", show_default=False),
    ],
    out: Out,
    time: Annotated[str | None, typer.Option(metavar="COL", help="Column of the time of a sample.")] = None,
    session: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the night or stay that times are counted within.")
    ] = None,
    kind: Kind = None,
    classes: Classes = None,
    missing: Missing = "refuse",
    overwrite: Overwrite = False,
) -> None:
    """Any table: CSV or parquet, one row per sample.

    One column says whose sample a row is, one (or several) what is to be predicted, and the rest are features.
    """
    from manydg.sources import table

    with _notes():
        table.prepare(
            file,
            out,
            patient=patient,
            target=target[0] if len(target) == 1 else target,
            # What follows the first pattern of one --features arrives as further arguments.
            features=[*features, *context.args],
            kind=kind,
            classes=_names(classes),
            time=time,
            session=session,
            missing=missing,
            overwrite=overwrite,
        )
    _say_what_was_written(out)


def prepare_arrays(
    x: Annotated[Path, typer.Option(help="Samples, (rows, ...) .npy.", show_default=False)],
    y: Annotated[Path, typer.Option(help="Targets, (rows,) or (rows, K) .npy.", show_default=False)],
    patient: Annotated[Path, typer.Option(help="Patients, (rows,) .npy.", show_default=False)],
    out: Out,
    time: Annotated[Path | None, typer.Option(help="Times, (rows,) .npy.")] = None,
    rate: Annotated[float | None, typer.Option(help="Sampling rate in Hz, where the samples are signals.")] = None,
    kind: Kind = None,
    classes: Classes = None,
    missing: Missing = "refuse",
    overwrite: Overwrite = False,
) -> None:
    """Any arrays: NumPy files of samples, targets and patients."""
    from manydg.sources import arrays

    options = {"time": time, "kind": kind, "classes": _names(classes), "rate": rate}
    with _notes():
        arrays.prepare(x, y, patient, out, missing=missing, overwrite=overwrite, **options)  # type: ignore[arg-type]
    _say_what_was_written(out)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


@contextmanager
def _notes() -> Iterator[None]:
    """Print warnings as plain lines."""
    from manydg.errors import ManyDGWarning

    with warnings.catch_warnings():
        show: Callable[..., None] = warnings.showwarning

        def plain(message: Warning | str, category: type[Warning], *rest: object) -> None:
            if issubclass(category, ManyDGWarning):
                print(f"manydg: note: {message}", file=sys.stderr)
            else:
                show(message, category, *rest)

        warnings.simplefilter("always", ManyDGWarning)
        warnings.showwarning = plain  # type: ignore[assignment]
        yield


def _say_what_was_written(out: Path) -> None:
    from manydg.data.storage import read_description

    description = read_description(out)
    target, provenance = description.target, description.info.provenance
    names = target.names
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    typer.echo(f"wrote {out}: {description.samples:,} samples of {description.patients:,} patients")
    typer.echo(f"  target: {target.kind} of {len(names)} ({shown})")
    shapes = {key: file.shape[1:] for key, file in description.files.items() if key.startswith("inputs.")}
    for key, shape in shapes.items():
        typer.echo(f"  input {key.removeprefix('inputs.')}: {' x '.join(map(str, shape))} float32 a sample")
    left_out = provenance.options.get("left_out_of_features") if provenance else None
    if isinstance(left_out, list):
        typer.echo(f"  not used as features, being patient, target, time or session: {', '.join(left_out)}")
    typer.echo(f"  content {description.content_hash}")
