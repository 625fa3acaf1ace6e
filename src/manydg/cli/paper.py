"""``manydg paper``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._engine import Address, CpusPerRun, Engine, GpusPerRun, runs_on
from manydg.cli._options import Device, DryRun, Workers


def paper(
    out: Annotated[Path, typer.Option(help="Folder for datasets, results and the report.", show_default=False)],
    raw: Annotated[
        Path | None,
        typer.Option(help="Folder with datasets, prepared or raw: sleep-edf, iiic, mimic3, eicu.", show_default=False),
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Make up twins of all four datasets instead.")] = False,
    scale: Annotated[str, typer.Option(help="full, small or smoke: how many patients, splits and epochs.")] = "full",
    workers: Workers = 1,
    engine: Engine = "local",
    address: Address = None,
    cpus_per_run: CpusPerRun = None,
    gpus_per_run: GpusPerRun = None,
    device: Device = "auto",
    dry_run: DryRun = False,
) -> None:
    """Run all of the paper's experiments on every dataset found.

    Raw files are recognised by what they hold and prepared first. Everything ends in one report, OUT/report.html. If
    the command is stopped, run it again: nothing that is done is done again.
    """
    from manydg.cli._progress import console, show_plan, study_board
    from manydg.cli.compare import command_line
    from manydg.errors import ConfigError
    from manydg.report import write_report
    from manydg.studies.paper import gather, ready, run_paper, scale_named, unprepared

    if (raw is None) == (not synthetic):
        raise ConfigError("say where the data are with --raw DIR, or --synthetic to make them up: one of the two")
    size, place = scale_named(scale), raw or out / "synthetic"
    found = gather(place, synthetic, out, size, console.print)
    if dry_run:
        waiting = unprepared(found, out)
        for entry in waiting:
            print(f"{entry.name}: raw files in {entry.place}; its runs are known once it is prepared")
        rest = [entry for entry in found if entry not in waiting]
        for chapter in ready(rest, place, out, size, workers, console.print) if rest else []:
            show_plan(chapter.study(out / "results", device), workers)
        return
    chapters = ready(found, place, out, size, workers, console.print)
    with runs_on(engine, address, cpus_per_run, gpus_per_run, workers) as at_once:
        results = run_paper(
            chapters,
            out,
            workers=at_once,
            device=device,
            board=study_board,
            command=command_line(),
            say=console.print,
        )
    print(f"wrote {write_report(results, out / 'report.html')}")


def register(app: typer.Typer) -> None:
    app.command()(paper)
