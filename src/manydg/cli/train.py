"""``manydg train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manydg.cli._options import (
    Backbone,
    BackboneOption,
    BatchSize,
    Config,
    Context,
    Dataset,
    Device,
    Epochs,
    Execution,
    LearningRate,
    Precision,
    Setting,
    WeightDecay,
)


def train(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Run folder; an unfinished run found there is continued.")],
    algorithm: Annotated[str, typer.Option(help="Algorithm by name.")] = "manydg",
    seed: Annotated[int, typer.Option(min=0, help="Decides split, initial weights, order and dropout.")] = 0,
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
    precision: Precision = None,
    execution: Execution = None,
) -> None:
    """Train one algorithm and score it on unseen patients.

    The patients are split into training, validation and test. The epoch is chosen on the validation patients and the
    test patients are scored once. If the command is stopped, run it again: it goes on where it was.
    Several processes share the work of each step when started as 'torchrun --nproc-per-node N -m manydg train ...'.
    """
    from manydg.cli._progress import EpochLines, console
    from manydg.cli._settings import Typed
    from manydg.data.dataset import open_dataset
    from manydg.training.execution.distributed import joined
    from manydg.training.fit import Silent
    from manydg.training.run import train as train_run

    typed = Typed(config, epochs, batch_size, lr, weight_decay, backbone, backbone_option, set_, context)
    asked = typed.options(dataset, algorithm).of(algorithm, seed)
    speed = {"precision": precision, "execution": execution}
    asked = asked.replace(**{name: value for name, value in speed.items() if value is not None})
    data = open_dataset(dataset)
    with joined(device) as team:
        speaks = team is None or team.leads
        reporter = EpochLines() if speaks else Silent()
        run = train_run(data, asked, out=out, device=device, name=dataset.resolve().name, reporter=reporter)
    if not speaks:
        return
    record = run.record
    chosen = f"epoch {record.epoch}, {record.selection_rule}" if record.epoch else record.selection_rule
    console.print(f"chosen: {chosen}")
    patients, samples = record.patients.test, record.samples.test
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in record.test.items() if value is not None)
    print(f"{patients} unseen patients, {samples} samples:  {metrics}")
    console.print(f"wrote {out}/run.json (the record), model.safetensors, predictions.npz and split.json")


def register(app: typer.Typer) -> None:
    app.command()(train)
