"""``manydg inspect``: what a dataset folder holds, where it came from, and whether that is what the paper had."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_PROSE = ("explanation", "other counts")


def register(app: typer.Typer) -> None:
    """Add the command to ``manydg``."""
    app.command("inspect")(inspect)


def inspect(
    dataset: Annotated[Path, typer.Argument(help="Dataset folder.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a dataset folder holds.

    Counts, labels, samples per patient and cohort flow, compared with the paper's where it has the same dataset.
    """
    from manydg.sources._summary import summarize

    summary = summarize(dataset)
    if json:
        from json import dumps

        typer.echo(dumps(summary, indent=1))
        return
    from rich.console import Console

    _show(Console(highlight=False, soft_wrap=True), summary)


def _show(console: Console, summary: dict[str, Any]) -> None:
    source = f" from {summary['source']}" if summary["source"] else ""
    console.print(
        f"{summary['dataset']}{source}: {summary['samples']:,} samples of {summary['patients']:,} patients, "
        f"content {summary['content_hash']}"
    )
    for name, column in summary["inputs"].items():
        shape = " x ".join(map(str, column["shape"])) or "one value"
        levels = " in lists" * column["nesting"]
        console.print(f"  input {name}: {shape} {column['dtype']}{levels}")
    if summary["vocabularies"]:
        sizes = ", ".join(f"{name} {size:,}" for name, size in summary["vocabularies"].items())
        console.print(f"  codes: {sizes}")
    _show_labels(console, summary)
    _show_patients(console, summary["samples_per_patient"])
    _show_flow(console, summary["cohort_flow"])
    _show_expected(console, summary["expected"])


def _table(console: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 or name in _PROSE else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)


def _show_labels(console: Console, summary: dict[str, Any]) -> None:
    labels = summary["labels"]
    printed = any(row["expected_share"] is not None for row in labels)
    rows = [
        [row["label"], f"{row['samples']:,}", f"{row['share']:.1%}", f"{row['patients']:,}"]
        + ([f"{row['expected_share']:.1%}" if row["expected_share"] is not None else ""] if printed else [])
        for row in labels[:20]
    ]
    head = ["label", "samples", "share", "patients"] + (["paper"] if printed else [])
    _table(console, f"Labels ({summary['target']['kind']})", head, rows)
    if len(labels) > 20:
        console.print(f"and {len(labels) - 20} more")
    if each := summary["labels_per_sample"]:
        paper = summary["expected"]["labels_per_sample"]
        printed_there = f" (paper: {paper['mean']:g} and {paper['most']:g})" if paper else ""
        console.print(f"labels per sample: {each['mean']:.2f} on average, {each['most']} at most{printed_there}")


def _show_patients(console: Console, spread: dict[str, Any]) -> None:
    head = ["least", "quarter", "median", "three quarters", "most", "mean", "patients with one"]
    _table(console, "Samples per patient", head, [[f"{value:,.10g}" for value in _rounded(spread)]])


def _rounded(spread: dict[str, Any]) -> list[float]:
    return [round(value, 1) for value in spread.values()]


def _show_flow(console: Console, flow: list[dict[str, Any]]) -> None:
    if not flow:
        return
    main = [name for name in ("patients", "recordings", "samples") if any(name in step for step in flow)]
    rows = [
        [step["step"], *(f"{step[name]:,}" if name in step else "" for name in main), _details(step, main)]
        for step in flow
    ]
    _table(console, "Cohort flow", ["step", *main, "other counts"], rows)


def _details(step: dict[str, Any], main: list[str]) -> str:
    """The counts that have no column of their own; what left out nothing is passed over."""
    words = {name: value for name, value in step.items() if name not in ("step", *main)}
    shown = [f"{name.replace('_', ' ')} {value:,}" for name, value in words.items() if value or "left_out" not in name]
    return ", ".join(shown)


def _show_expected(console: Console, expected: dict[str, Any]) -> None:
    if not expected["counts"]:
        return
    rows = [
        [
            row["count"],
            f"{row['found']:,}",
            ("over " if row["at_least"] else "") + f"{row['expected']:,}",
            f"{row['difference']:+,}",
            row["explanation"],
        ]
        for row in expected["counts"]
    ]
    head = ["count", "found", "paper", "difference", "explanation"]
    _table(console, f"Against the paper ({expected['edition']})", head, rows)
    for name, note in expected["notes"].items():
        if not any(note in row["explanation"] for row in expected["counts"]):
            console.print(f"note on {name}: {note}")
