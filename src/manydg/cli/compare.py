"""``manydg compare``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._engine import Address, CpusPerRun, Engine, GpusPerRun, runs_on
from manydg.cli._options import (
    Backbone,
    BackboneOption,
    BatchSize,
    Config,
    Context,
    Dataset,
    Device,
    DryRun,
    Epochs,
    LearningRate,
    Setting,
    WeightDecay,
    Workers,
    names_in,
)

_WIDTH_OF_FILES = 120
DEFAULT_ALGORITHMS = "base,prototype,manydg-random-pairs,manydg"


def compare(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")],
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = DEFAULT_ALGORITHMS,
    seeds: Annotated[int, typer.Option(min=1, help="Number of patient splits.")] = 5,
    config: Config = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    weight_decay: WeightDecay = None,
    context: Context = None,
    backbone: Backbone = None,
    backbone_option: BackboneOption = [],  # noqa: B006 - typer reads the default, nobody changes it
    set_: Setting = [],  # noqa: B006
    device: Device = "auto",
    workers: Workers = 1,
    engine: Engine = "local",
    address: Address = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    dry_run: DryRun = False,
) -> None:
    """Compare algorithms over several patient splits.

    Every algorithm is trained on every split, each run with a record in OUT/results.jsonl. The table gives means over
    splits, intervals over patients and paired tests. If the command is stopped, run it again: no run is repeated.
    """
    from manydg.cli._progress import show_plan, study_board
    from manydg.cli._settings import Typed
    from manydg.studies.conduct import compare as compare_runs
    from manydg.studies.conduct import plan_comparison
    from manydg.studies.study import Study

    typed = Typed(config, epochs, batch_size, lr, weight_decay, backbone, backbone_option, set_, context)
    options, names = typed.options(dataset), names_in(algorithms)
    if dry_run:
        runs = plan_comparison(names, seeds, options)
        show_plan(Study(out, dataset, runs, dataset.resolve().name, device), workers)
        return
    with runs_on(engine, address, cpus_per_run, gpus_per_run, workers) as at_once:
        compare_runs(
            dataset,
            names,
            seeds,
            out,
            options=options,
            workers=at_once,
            device=device,
            board=study_board(),
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
    from manydg.studies.summary import summarize_folder, write_summary

    screen = Console()
    # A file or a pipe has no width of its own, and nothing is gained by squeezing the table into 80 characters.
    width = screen.width if screen.is_terminal else _WIDTH_OF_FILES
    for summary in summarize_folder(out):
        Console(width=width).print(summary.to_rich(width))
    console.print(f"wrote {out / 'results.jsonl'}, " + ", ".join(str(path) for path in write_summary(out)))


def register(app: typer.Typer) -> None:
    app.command()(compare)
