"""``manydg experiment``."""

from __future__ import annotations

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
from manydg.cli.compare import command_line, show_summary

RIVALS = "base,condadv,dann,irm,sagnet,pcl,mldg,manydg"


def experiment(
    name: Annotated[str, typer.Argument(help="objectives, weights, limited-data, continual, ...", show_default=False)],
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")],
    algorithms: Annotated[
        str | None,
        typer.Option(help="Algorithms to compare, where the experiment does.", show_default=RIVALS),
    ] = None,
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
    """Run one of the paper's experiments on a dataset.

    Its runs join those in OUT/results.jsonl; one that another experiment has done already is not done again. If the
    command is stopped, run it again.
    """
    from manydg.cli._progress import console, show_plan, study_board
    from manydg.cli._settings import Typed
    from manydg.studies.conduct import conduct, fitting, make_request, plan_experiment, scaled_down
    from manydg.studies.study import Study

    typed = Typed(config, epochs, batch_size, lr, weight_decay, backbone, backbone_option, set_, context)
    options = typed.options(dataset)
    names = names_in(RIVALS if algorithms is None else algorithms)
    request = make_request(name, dataset, options, seeds, names)
    if algorithms is None:
        request = fitting(request, console.print)
    if dry_run:
        runs = plan_experiment(name, request)
        if note := scaled_down(name, request):
            print(f"{name}: {note}")
        show_plan(Study(out, dataset, runs, dataset.resolve().name, device), workers)
        return
    with runs_on(engine, address, cpus_per_run, gpus_per_run, workers) as at_once:
        conduct(
            name,
            dataset,
            out,
            request,
            workers=at_once,
            device=device,
            board=study_board(),
            command=command_line(),
            say=console.print,
        )
    show_summary(out)


def register(app: typer.Typer) -> None:
    app.command()(experiment)
