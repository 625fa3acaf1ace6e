"""``manydg experiment``."""

from __future__ import annotations

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
from manydg.cli.compare import command_line, show_summary

PAPER_ALGORITHMS = "base,condadv,dann,irm,pcl,mldg,manydg"


def experiment(
    name: Annotated[str, typer.Argument(help="objectives, weights, limited-data, continual, ...", show_default=False)],
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")],
    algorithms: Annotated[
        str, typer.Option(help="Algorithms to compare, where the experiment does.")
    ] = PAPER_ALGORITHMS,
    seeds: Annotated[int, typer.Option(min=1, help="Number of patient splits.")] = 5,
    epochs: Epochs = 20,
    batch_size: BatchSize = 256,
    lr: LearningRate = 5e-4,
    weight_decay: WeightDecay = 1e-5,
    backbone: Backbone = "auto",
    backbone_option: BackboneOption = [],  # noqa: B006 - typer reads the default, nobody changes it
    device: Device = "auto",
    workers: Workers = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which runs it would do.")] = False,
) -> None:
    """Run one of the paper's experiments on a dataset."""
    from manydg.cli._progress import RunLines, show_plan
    from manydg.experiments.conduct import conduct, make_request, plan_experiment
    from manydg.training.config import TrainingConfig

    config = TrainingConfig(
        backbone=backbone,
        backbone_options=parse_settings(backbone_option),
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
    )
    names = [entry.strip() for entry in algorithms.split(",") if entry.strip()]
    request = make_request(name, dataset, config, seeds, names)
    if dry_run:
        show_plan(plan_experiment(name, request), out, dataset, workers)
        return
    conduct(name, dataset, out, request, workers=workers, device=device, board=RunLines(), command=command_line())
    show_summary(out)


def register(app: typer.Typer) -> None:
    app.command()(experiment)
