"""``manydg compare``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._options import (
    Backbone,
    BackboneOption,
    BatchSize,
    Dataset,
    Device,
    Epochs,
    LearningRate,
    WeightDecay,
    Workers,
    parse_settings,
)

DEFAULT_ALGORITHMS = "base,prototype,manydg-random-pairs,manydg"


def compare(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")],
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = DEFAULT_ALGORITHMS,
    seeds: Annotated[int, typer.Option(min=1, help="Number of patient splits.")] = 5,
    epochs: Epochs = 20,
    batch_size: BatchSize = 256,
    lr: LearningRate = 5e-4,
    weight_decay: WeightDecay = 1e-5,
    backbone: Backbone = "auto",
    backbone_option: BackboneOption = [],  # noqa: B006 - typer reads the default, nobody changes it
    device: Device = "auto",
    workers: Workers = 1,
) -> None:
    """Compare algorithms over several patient splits.

    Every algorithm is trained on every split, each run with a record in OUT/results.jsonl. The table gives means over
    splits, intervals over patients and paired tests. If the command is stopped, run it again: no run is repeated.
    """
    from manydg.cli._progress import RunLines
    from manydg.experiments.compare import compare as compare_runs
    from manydg.training.config import TrainingConfig

    config = TrainingConfig(
        backbone=backbone,
        backbone_options=parse_settings(backbone_option),
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
    )
    compare_runs(
        dataset,
        [name.strip() for name in algorithms.split(",") if name.strip()],
        seeds,
        out,
        config=config,
        workers=workers,
        device=device,
        board=RunLines(),
        command=command_line(),
    )
    show_summary(out)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["manydg", *sys.argv[1:]])


def show_summary(out: Path) -> None:
    """Print the table of a results folder and say where its files are."""
    from rich.console import Console

    from manydg.cli._progress import console
    from manydg.experiments.summary import summarize_folder, write_summary

    written = write_summary(out)
    for summary in summarize_folder(out):
        Console().print(summary.to_rich())
    console.print(f"wrote {out / 'results.jsonl'}, " + ", ".join(str(path) for path in written))


def register(app: typer.Typer) -> None:
    app.command()(compare)
