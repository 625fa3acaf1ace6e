"""Options that several commands share, and the values people type for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from manydg.errors import ConfigError

Dataset = Annotated[Path, typer.Argument(help="Dataset folder, as 'manydg prepare' makes it.", show_default=False)]
Backbone = Annotated[
    str | None,
    typer.Option(help="Backbone by name, or package.module:Class; auto fits the inputs.", show_default="auto"),
]
BackboneOption = Annotated[
    list[str], typer.Option("--backbone-option", metavar="NAME=VALUE", help="Option of the backbone; may be repeated.")
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.toml",
        help="Settings: a preset ('manydg show' lists them), a TOML file, or none for the program's own.",
        show_default="the preset of the dataset's source",
    ),
]
Setting = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="ALGORITHM.NAME=VALUE",
        help="Setting of an algorithm ('manydg show ALGORITHM' lists them); may be repeated.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Training epochs.", show_default="20")]
BatchSize = Annotated[int | None, typer.Option(min=2, help="Samples per step.", show_default="256")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate of Adam.", show_default="5e-4")]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay.", show_default="1e-5")]
Context = Annotated[
    str | None,
    typer.Option(
        help="Show each patient's other unlabelled samples to the learner: none, offline (all) or causal (earlier).",
        show_default="what the algorithm is made for",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show which runs it would do, and how long they take.")]
Precision = Annotated[
    str | None, typer.Option(help="Arithmetic of training: auto, float32, tf32 or bf16.", show_default="auto")
]
Execution = Annotated[
    str | None,
    typer.Option(help="Steps: auto, plain, captured, compiled (on a GPU) or deterministic.", show_default="auto"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")]


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs as a mapping; a value is a number, true, false, JSON, or else text.

    Examples
    --------
    >>> parse_settings(["mmd=0.2", "manydg-random-pairs.predictor=inner"])
    {'mmd': 0.2, 'manydg-random-pairs.predictor': 'inner'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"'{pair}' is not of the form NAME=VALUE")
        part, dot, key = name.rpartition(".")
        name = part + dot + key.replace("-", "_")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def names_in(text: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
