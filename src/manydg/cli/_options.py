"""Options that several commands share, and the values people type for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from manydg.errors import ConfigError

Dataset = Annotated[Path, typer.Argument(help="Dataset folder, as 'manydg prepare' makes it.", show_default=False)]
Backbone = Annotated[str, typer.Option(help="Backbone by name, or package.module:Class; auto fits the inputs.")]
BackboneOption = Annotated[
    list[str], typer.Option("--backbone-option", metavar="NAME=VALUE", help="Option of the backbone; may be repeated.")
]
Setting = Annotated[
    list[str], typer.Option("--set", metavar="NAME=VALUE", help="Setting of the algorithm; may be repeated.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Training epochs.")]
BatchSize = Annotated[int, typer.Option(min=2, help="Samples per step.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")]


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs as a mapping; a value is a number, true, false, JSON, or else text.

    Examples
    --------
    >>> parse_settings(["mmd=0.2", "predictor=inner"])
    {'mmd': 0.2, 'predictor': 'inner'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"'{pair}' is not of the form NAME=VALUE")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found
