"""``manydg train``."""

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
    Setting,
    WeightDecay,
    parse_settings,
)


def train(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Run folder; an unfinished run found there is continued.")],
    algorithm: Annotated[str, typer.Option(help="Algorithm by name.")] = "manydg",
    seed: Annotated[int, typer.Option(min=0, help="Decides split, initial weights, order and dropout.")] = 0,
    epochs: Epochs = 20,
    batch_size: BatchSize = 256,
    lr: LearningRate = 5e-4,
    weight_decay: WeightDecay = 1e-5,
    backbone: Backbone = "auto",
    backbone_option: BackboneOption = [],  # noqa: B006 - typer reads the default, nobody changes it
    set_: Setting = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Train one algorithm and score it on unseen patients.

    The patients are split into training, validation and test. The epoch is chosen on the validation patients and the
    test patients are scored once. If the command is stopped, run it again: it goes on where it was.
    """
    from manydg.cli._progress import EpochLines, console
    from manydg.data.storage import open_dataset
    from manydg.training.config import TrainingConfig
    from manydg.training.run import train as train_run

    config = TrainingConfig(
        algorithm=algorithm,
        settings=parse_settings(set_),
        backbone=backbone,
        backbone_options=parse_settings(backbone_option),
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        seed=seed,
    )
    data = open_dataset(dataset)
    run = train_run(data, config, out=out, device=device, name=dataset.resolve().name, reporter=EpochLines())
    record = run.record
    chosen = f"epoch {record['epoch']}, {record['selection_rule']}" if record["epoch"] else record["selection_rule"]
    console.print(f"chosen: {chosen}")
    patients, samples = record["patients"]["test"], record["samples"]["test"]
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in record["test"].items() if value is not None)
    print(f"{patients} unseen patients, {samples} samples:  {metrics}")
    console.print(f"wrote {out}/run.json (the record), model.safetensors, predictions.npz and split.json")


def register(app: typer.Typer) -> None:
    app.command()(train)
