"""Options that several commands share, declared once, and what is made of them.

A command takes a group of options as one parameter whose type is a dataclass here; :func:`command` shows its fields to
Typer as options of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from manydg.errors import ConfigError

if TYPE_CHECKING:
    from manydg.files import Json
    from manydg.studies.settings import Options

NO_PRESET = "none"

Dataset = Annotated[Path, typer.Argument(help="Dataset folder, as 'manydg prepare' makes it.", show_default=False)]
Results = Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of patient splits.")]
Repeats = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cross-validation: deal the patients into SEEDS groups so often; each time everyone is tested once.",
        show_default="random splits",
    ),
]
Algorithms = Annotated[
    str | None, typer.Option(help="Names, separated by commas.", show_default="base, the controls and manydg")
]
Tuned = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of 'manydg tune': use what it chose for each split.", show_default=False),
]
RunOrResults = Annotated[
    Path,
    typer.Argument(
        help="Folder of a finished run, or a results folder for the model it recommends.", show_default=False
    ),
]
Precision = Annotated[
    str | None, typer.Option(help="Arithmetic of training: auto, float32, tf32 or bf16.", show_default="auto")
]
Execution = Annotated[
    str | None,
    typer.Option(help="Steps: auto, plain, captured, compiled (on a GPU) or deterministic.", show_default="auto"),
]
Log = Annotated[
    str | None,
    typer.Option(
        "--log", metavar="mlflow:URI", help="Also log finished runs to an MLflow server or store.", show_default=False
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The algorithm that the others are tested against.", show_default="the folder's, or manydg"
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show which runs it would do, and how long they take.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of text.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")]
UsedBackbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        metavar="PACKAGE.MODULE:CLASS",
        help="The backbone of your own that the run was trained with; its code is run only if it is named here.",
        show_default=False,
    ),
]
UsedAlgorithm = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="PACKAGE.MODULE:CLASS",
        help="The algorithm of your own that the run was trained with; its code is run only if it is named here.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto", help="Ray: address of the cluster.", show_default="one of this machine alone"
    ),
]
FilesEngine = Annotated[
    str, typer.Option("--engine", help="Where raw files are read: local (this machine) or ray (a Ray cluster).")
]


@dataclass(frozen=True)
class RunSettings:
    """Settings of runs as they were typed; ``None`` where nothing was."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="Settings: a preset ('manydg show' lists them), a TOML file, or none for the program's own.",
            show_default="the preset of the dataset's source",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Training epochs.", show_default="20")] = None
    batch_size: Annotated[int | None, typer.Option(min=2, help="Samples per step.", show_default="256")] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate of Adam.", show_default="5e-4")] = None
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.", show_default="1e-5")] = None
    stratify: Annotated[
        bool, typer.Option("--stratify", help="Give each side its share of the patients of every label.")
    ] = False
    split: Annotated[
        str | None,
        typer.Option(
            help="What is split: patient, or site (whole hospitals, as 'prepare --site' noted them; with --repeats and "
            "as many --seeds as sites, each is left out once).",
            show_default="patient",
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            help="Show each patient's other unlabelled samples to the learner: none, offline (all) or causal "
            "(earlier).",
            show_default="what the algorithm is made for",
        ),
    ] = None
    sequence: Annotated[
        str | None,
        typer.Option(
            help="Network behind the backbone that reads each patient's samples in order: none, gru, transformer or "
            "conv.",
            show_default="none",
        ),
    ] = None
    sequence_option: Annotated[
        list[str],
        typer.Option(
            "--sequence-option",
            metavar="NAME=VALUE",
            help="Option of the sequence: crop, width, layers, dropout, gap, direction (offline or causal); may be "
            "repeated.",
        ),
    ] = field(default_factory=list)
    at: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="What the threshold has to keep on validation patients: sensitivity=.9, precision=.5 or alarms=1/day.",
            show_default="highest F1",
        ),
    ] = None
    silence: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="No other alarm so long after one, such as 6h.", show_default="the horizon"),
    ] = None
    backbone: Annotated[
        str | None,
        typer.Option(help="Backbone by name, or package.module:Class; auto fits the inputs.", show_default="auto"),
    ] = None
    backbone_option: Annotated[
        list[str],
        typer.Option("--backbone-option", metavar="NAME=VALUE", help="Option of the backbone; may be repeated."),
    ] = field(default_factory=list)
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="ALGORITHM.NAME=VALUE",
            help="Setting of an algorithm ('manydg show ALGORITHM' lists them); may be repeated.",
        ),
    ] = field(default_factory=list)

    def options(self, dataset: Path, algorithm: str | None = None) -> Options:
        """The options of runs on a dataset; where one algorithm runs alone, its settings may be named without it."""
        from manydg.algorithms import ALGORITHMS
        from manydg.backbones import BACKBONES
        from manydg.cli._progress import console
        from manydg.data.storage import read_description
        from manydg.studies.settings import changed

        ALGORITHMS.trust(algorithm or "")
        BACKBONES.trust(self.backbone or "")
        base = _base(self.config, read_description(dataset).info.source)
        if base.origin:
            console.print(f"settings: {base.origin}{_how_to_see(base.origin)}")
        training: dict[str, Json] = {
            name: getattr(self, name)
            for name in ("epochs", "batch_size", "lr", "weight_decay", "split", "context", "sequence", "at", "silence")
            if getattr(self, name) is not None
        }
        if self.stratify:
            training["stratify"] = True
        if self.sequence_option:
            training["sequence_options"] = {**base.common.sequence_options, **parse_settings(self.sequence_option)}
        sets = {_full_name(name, algorithm): value for name, value in parse_settings(self.set_).items()}
        sets |= {f"backbone.{name}": value for name, value in parse_settings(self.backbone_option).items()}
        return changed(base, training=training, backbone=self.backbone, sets=sets)


def _base(config: str | None, source: str | None) -> Options:
    from manydg.studies.settings import Options, preset_names, read_preset, read_settings

    if config == NO_PRESET:
        return Options()
    if config is not None:
        return read_settings(config)
    return read_preset(str(source)) if source in preset_names() else Options()


def _how_to_see(origin: str) -> str:
    name = origin.rpartition(" ")[2]
    return f" ('manydg show {name}'; '--config none' for the program's own)" if origin.startswith("the paper") else ""


def _full_name(name: str, algorithm: str | None) -> str:
    return name if "." in name or algorithm is None else f"{algorithm}.{name}"


@dataclass(frozen=True)
class EngineOptions:
    """Where the runs of a study are done."""

    workers: Workers = 1
    engine: Annotated[str, typer.Option(help="Where runs are done: local (this machine) or ray (a Ray cluster).")] = (
        "local"
    )
    address: Address = None
    cpus_per_run: Annotated[
        float | None, typer.Option(min=0, help="Ray: CPUs that each run needs.", show_default="1")
    ] = None
    gpus_per_run: Annotated[
        float | None,
        typer.Option(
            min=0, help="Ray: GPUs that each run needs, or a part of one.", show_default="1 where there are GPUs"
        ),
    ] = None

    @contextmanager
    def in_use(self) -> Iterator[int]:
        """Studies within the block use the engine asked for; gives how many runs there may be at a time."""
        from manydg.jobs import engine_named, using

        with using(engine_named(self.engine, self.address, self.cpus_per_run, self.gpus_per_run)) as engine:
            yield engine.limit(self.workers)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer is to see it: a parameter that is a group of options is replaced by its fields."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _fields(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{entry.name: given.pop(entry.name) for entry in dataclasses.fields(kind)})
        function(**given)

    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory(),
            annotation=hints[entry.name],
        )
        for entry in dataclasses.fields(kind)
    ]


def parse_settings(pairs: list[str]) -> dict[str, Json]:
    """``NAME=VALUE`` pairs as a mapping; a value is a number, true, false, JSON, or else text.

    Examples
    --------
    >>> parse_settings(["mmd=0.2", "manydg-random-pairs.predictor=inner"])
    {'mmd': 0.2, 'manydg-random-pairs.predictor': 'inner'}
    """
    settings: dict[str, Json] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"'{pair}' is not of the form NAME=VALUE")
        part, dot, key = name.rpartition(".")
        name = part + dot + key.replace("-", "_")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def names_in(text: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def compared(text: str | None) -> list[str]:
    """The algorithms that were named; by default the plain model, the controls and the method."""
    from manydg.algorithms import controls

    return ["base", *controls(), "manydg"] if text is None else names_in(text)


def command_line() -> str:
    """The command as it was typed, but of paths outside the working directory only the last name, for pages."""
    return shlex.join(["manydg", *map(_without_folders, sys.argv[1:])])


def _without_folders(word: str) -> str:
    """
    Examples
    --------
    >>> [_without_folders(word) for word in ("--out=/home/ann/runs", "~/data", "data/eicu", "--lr", "../x/y")]
    ['--out=runs', 'data', 'data/eicu', '--lr', 'y']
    """
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = Path(value)
    if path.is_absolute() or value.startswith("~") or ".." in path.parts:
        value = path.name
    return f"{flag}{equals}{value}"
