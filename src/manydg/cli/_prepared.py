"""What the commands that prepare a dataset share: the option to replace one, where files are read, what is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a dataset folder that is already there.")]


@contextmanager
def preparing(out: Path, engine: str, address: str | None) -> Iterator[None]:
    """A dataset folder is made within the block, its files read where the engine says; then it is told what it holds.

    Parameters
    ----------
    out : Path
        The dataset folder.
    engine : {"local", "ray"}
    address : str, optional
        Of a Ray cluster.
    """
    from manydg.sources._preparing import spreading

    with spreading(engine, address):
        yield
    say_what_was_prepared(out)


def say_what_was_prepared(out: Path) -> None:
    """Print the cohort flow of a new dataset, what was left after each step, and what can be done next."""
    from manydg.data.storage import read_description

    description = read_description(out)
    for step in description.info.cohort_flow:
        typer.echo(f"{step.step}: {counts_in_words(step.counts)}")
    typer.echo(
        f"wrote {out}: {description.samples:,} samples of {description.patients:,} patients "
        f"(next: 'manydg inspect {out}', 'manydg train {out} --out RUN')"
    )


def counts_in_words(step: Mapping[str, Any]) -> str:
    """The counts of a step that are not zero; what was left out stands last.

    Examples
    --------
    >>> counts_in_words({"step": "visits", "patients": 1200, "samples": 0, "left_out_without_id": 4, "left_out": 2})
    '1,200 patients, 0 samples; left out: 4 without id, 2'
    """
    main = ("patients", "samples", "recordings", "rows")
    kept, dropped = [], []
    for name, count in step.items():
        words = name.replace("_", " ")
        if name == "step":
            continue
        if name.startswith("left_out"):
            dropped.append(f"{count:,} {words.removeprefix('left out').strip()}".strip() if count else "")
        elif count or name in main:
            kept.append(f"{count:,} {words}")
    told, gone = ", ".join(kept), ", ".join(filter(None, dropped))
    return f"{told}; left out: {gone}" if gone else told
