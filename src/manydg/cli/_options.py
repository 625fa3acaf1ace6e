"""What commands share: options, declared once, and what is shown while they work.

A command takes a group of options as one parameter whose type is a dataclass here; :func:`command` shows its fields to
Typer as options of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from manydg.errors import ConfigError
from manydg.files import QUIET, printable

if TYPE_CHECKING:
    from rich.console import Group

    from manydg.files import Json
    from manydg.studies.settings import Options
    from manydg.studies.study import Board, PlannedRun, Study
    from manydg.studies.tuning import Search, Trial
    from manydg.training.record import EpochEntry, RunRecord

NO_PRESET = "none"
_PROSE = ("explanation", "other counts")

Dataset = Annotated[Path, typer.Argument(help="Dataset folder, made by 'manydg prepare'.", show_default=False)]
Results = Annotated[Path, typer.Option(help="Results folder; runs already there are not repeated.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of patient splits.")]
Repeats = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cross-validation: divide the patients into SEEDS groups this many times and test each group once.",
        show_default="random splits",
    ),
]
Algorithms = Annotated[
    str | None, typer.Option(help="Names, separated by commas.", show_default="base, the controls and manydg")
]
Tuned = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of 'manydg tune': use the settings it chose for each split.", show_default=False
    ),
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show which runs are left and how long they will take.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of text.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs in parallel on this machine.")]


def _of_your_own(kind: str) -> Any:
    help = f"Your own {kind} that the run was trained with; its code is run only if you name it here."
    return typer.Option(f"--{kind}", metavar="PACKAGE.MODULE:CLASS", help=help, show_default=False)


UsedBackbone = Annotated[str | None, _of_your_own("backbone")]
UsedAlgorithm = Annotated[str | None, _of_your_own("algorithm")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto", help="Ray: address of the cluster.", show_default="start one on this machine"
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
            help="Settings: a preset ('manydg show' lists them), a TOML file, or none for manydg's defaults.",
            show_default="the preset of the dataset's source",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Training epochs.", show_default="20")] = None
    batch_size: Annotated[int | None, typer.Option(min=2, help="Samples per step.", show_default="256")] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate of Adam.", show_default="5e-4")] = None
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.", show_default="1e-5")] = None
    stratify: Annotated[
        bool,
        typer.Option("--stratify", help="Stratify the split: every side gets its share of the patients of each label."),
    ] = False
    split: Annotated[
        str | None,
        typer.Option(
            help="Unit of the split: patient, or site (hospital, from 'prepare --site'; 'compare' with --repeats and "
            "as many --seeds as sites leaves out each site once).",
            show_default="patient",
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            help="Patient context: show the model the patient's other samples, without labels: none, offline (all) or "
            "causal (earlier ones).",
            show_default="the algorithm's own",
        ),
    ] = None
    sequence: Annotated[
        str | None,
        typer.Option(
            help="Sequence model behind the backbone, which reads each patient's samples in order: none, gru, "
            "transformer or conv.",
            show_default="none",
        ),
    ] = None
    sequence_option: Annotated[
        list[str],
        typer.Option(
            "--sequence-option",
            metavar="NAME=VALUE",
            help="Option of the sequence model: crop, width, layers, dropout, gap, direction (offline or causal); may "
            "be repeated.",
        ),
    ] = field(default_factory=list)
    at: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Choose the threshold on validation patients to keep sensitivity=.9, precision=.5 or alarms=1/day.",
            show_default="highest F1",
        ),
    ] = None
    silence: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Minimum time between two alarms, such as 6h.", show_default="the horizon"),
    ] = None
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Backbone by name, or package.module:Class; auto chooses by the inputs.", show_default="auto"
        ),
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
        from manydg.data.storage import read_description
        from manydg.studies.settings import changed

        ALGORITHMS.trust(algorithm or "")
        BACKBONES.trust(self.backbone or "")
        base = _base(self.config, read_description(dataset).info.source)
        if base.origin:
            own = f" ('manydg show {base.origin.rpartition(' ')[2]}'; '--config none' for the program's own)"
            console.print(f"settings: {base.origin}{own if base.origin.startswith('the paper') else ''}")
        training: dict[str, Json] = {
            name: getattr(self, name)
            for name in ("epochs", "batch_size", "lr", "weight_decay", "split", "context", "sequence", "at", "silence")
            if getattr(self, name) is not None
        }
        if self.stratify:
            training["stratify"] = True
        if self.sequence_option:
            training["sequence_options"] = {**base.common.sequence_options, **parse_settings(self.sequence_option)}
        named = parse_settings(self.set_).items()
        sets = {f"{algorithm}.{name}" if algorithm and "." not in name else name: value for name, value in named}
        sets |= {f"backbone.{name}": value for name, value in parse_settings(self.backbone_option).items()}
        return changed(base, training=training, backbone=self.backbone, sets=sets)


def _base(config: str | None, source: str | None) -> Options:
    from manydg.studies.settings import Options, preset_names, read_preset, read_settings

    if config == NO_PRESET:
        return Options()
    if config is not None:
        return read_settings(config)
    return read_preset(str(source)) if source in preset_names() else Options()


@dataclass(frozen=True)
class EngineOptions:
    """Where the runs of a study are done."""

    workers: Workers = 1
    engine: Annotated[
        str, typer.Option(help="Where runs are executed: local (this machine) or ray (a Ray cluster).")
    ] = "local"
    address: Address = None
    cpus_per_run: Annotated[
        float | None, typer.Option(min=0, help="Ray: CPUs that each run needs.", show_default="1")
    ] = None
    gpus_per_run: Annotated[
        float | None,
        typer.Option(
            min=0, help="Ray: GPUs that each run needs; a fraction shares one.", show_default="1 where there are GPUs"
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
            shown = get_type_hints(kind, include_extras=True)
            for entry in dataclasses.fields(kind):
                default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
                parameters.append(keyword(entry.name, shown[entry.name], default))
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


def keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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


# What the command shows while it works


_WIDTH_OF_FILES = 130


class PlainConsole(Console):
    """A console that shows text as it is: brackets are no markup, and nothing in a name moves the cursor.

    Strings are escaped (:func:`manydg.files.printable`), so that each is one line; whoever builds a table escapes its
    cells.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            # A file or a pipe has no width of its own, and nothing is gained by squeezing a table into 80 characters.
            self.width = _WIDTH_OF_FILES

    def print(self, *objects: object, **options: Any) -> None:
        if self.stderr and QUIET in os.environ:
            return
        super().print(*(printable(entry) if isinstance(entry, str) else entry for entry in objects), **options)


console = PlainConsole(stderr=True, soft_wrap=True)


def show_line(text: str) -> None:
    """Print one line of a command's answer."""
    print(printable(text))


def show_json(value: Json) -> None:
    """Print a command's answer as JSON."""
    print(printable(json.dumps(value, ensure_ascii=True)))


class EpochLines:
    """One line per epoch, or per some rounds of boosting: the loss terms and the validation metrics."""

    def started(self, algorithm: str, epochs: int, first_epoch: int) -> None:
        from manydg.algorithms import ALGORITHMS

        self.epochs = epochs
        self.unit = "round" if ALGORITHMS.get(algorithm).sampling == "whole" else "epoch"
        going_on = f", going on from epoch {first_epoch}" if first_epoch > 1 else ""
        console.print(f"training {algorithm}{going_on}")

    def epoch_ended(self, entry: EpochEntry) -> None:
        losses, metrics = figures(entry.losses), figures(entry.val)
        console.print(f"{self.unit} {entry.epoch:>3}/{self.epochs}  loss: {losses}  validation: {metrics}")

    def finished(self, record: RunRecord) -> None:
        pass


def study_board() -> Board:
    """A live table where somebody is watching, and plain lines where the output goes to a file."""
    return LiveBoard() if console.is_terminal and QUIET not in os.environ else RunLines()


class RunLines:
    """One line per run of a study, with the time left."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        self.expect(len(runs), done, "runs")

    def expect(self, total: int, done: int, what: str) -> None:
        """Begin to count."""
        self.total, self.done, self.start, self.before = total, done, time.perf_counter(), done
        if done:
            console.print(f"{done} of {total} {what} are done already")

    def run_started(self, run: PlannedRun, status: Path) -> None:
        pass

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        self.done += 1
        console.print(f"{self.mark}  {described(run)}:  {outcome(record)}")

    def ended(self) -> None:
        pass

    @property
    def mark(self) -> str:
        """How far it is."""
        return f"[{self.done:>3}/{self.total}, {clock(self.left)} left]"

    @property
    def left(self) -> float:
        """Seconds left, if the runs to come take as long as those since the start."""
        if self.done == self.before:
            return float("nan")
        each = (time.perf_counter() - self.start) / (self.done - self.before)
        return each * (self.total - self.done)


class TrialLines:
    """One line per trial of a search, with the time left."""

    def planned(self, total: int, done: int) -> None:
        self.clock = RunLines()
        self.clock.expect(total, done, "trials")

    def ended(self, search: Search, trial: Trial) -> None:
        self.clock.done += 1
        metric, best = search.base.selection, search.chosen
        if trial.state == "failed":
            how = f"failed: {trial.error}"
        else:
            how = f"validation {metric} {trial.score:.4f}"
            how += f", stopped after epoch {trial.epochs}" if trial.state == "pruned" else ""
        so_far = "" if best is None else f" (best {best.score:.4f}, trial {best.number})"
        console.print(f"{self.clock.mark}  {search.name} trial {trial.number}:  {how}{so_far}")


class LiveBoard(RunLines):
    """A table of the runs under way with their epochs and losses, under one line for each run that ended."""

    def planned(self, runs: Sequence[PlannedRun], done: int) -> None:
        from rich.live import Live

        super().planned(runs, done)
        self.under_way: dict[int, tuple[PlannedRun, Path]] = {}
        self.live = Live(get_renderable=self.table, console=console, refresh_per_second=2, transient=True)
        self.live.start()

    def run_started(self, run: PlannedRun, status: Path) -> None:
        self.under_way[id(run)] = (run, status)

    def run_ended(self, run: PlannedRun, record: RunRecord) -> None:
        self.under_way.pop(id(run), None)
        super().run_ended(run, record)

    def ended(self) -> None:
        self.live.stop()

    def table(self) -> Group:
        """What is under way now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from manydg.studies.records import read_status

        table = Table("experiment", "run", "epoch", "loss", "validation", box=None, pad_edge=False)
        for run, file in list(self.under_way.values()):
            status = read_status(file)
            epoch = f"{status.epoch}/{status.epochs or run.config.epochs}"
            cells = [run.experiment, described(run), epoch, figures(status.losses), figures(status.val)]
            table.add_row(*(Text(printable(cell)) for cell in cells))
        left = clock(self.left) if self.left == self.left else "unknown time"
        counts = Text(f"{self.done} of {self.total} runs done, {left} left")
        return Group(table, ProgressBar(total=max(1, self.total), completed=self.done), counts)


def show_plan(study: Study, workers: int) -> None:
    """List a study's runs, what is done of them, and how long the rest will take."""
    from manydg.studies.study import plan_study

    plan = plan_study(study)
    for run, done in zip(plan.runs, plan.done, strict=True):
        show_line(f"{'done' if done else 'to do':>6}  {run.experiment}  {described(run)}")
    side_by_side = min(workers, max(1, plan.done.count(False)))
    if plan.seconds is None:
        guess = "how long they take is not known before the first of their kind is done"
    else:
        guess = f"about {clock(plan.seconds / side_by_side)} with {side_by_side} at a time"
    show_line(f"{study.name}: {len(plan.runs)} runs, {sum(plan.done)} done already; the rest: {guess}")


def described(run: PlannedRun) -> str:
    """A run in a few words."""
    variant = (value if isinstance(value, str) else f"{name} {value}" for name, value in run.variant.items())
    return ", ".join([f"{run.config.algorithm} seed {run.config.seed}", *variant])


def outcome(record: RunRecord) -> str:
    """How a run ended."""
    error = (record.error or "no reason given").strip()
    return figures(record.headline) if record.ok else f"failed: {error.splitlines()[-1]}"


def figures(values: Mapping[str, float | None]) -> str:
    """Names and numbers in a row; those that are undefined are left out."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Examples
    --------
    >>> clock(3725), clock(59.6)
    ('1:02:05', '1:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def show_table(console: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a table, numbers flush right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=printable(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 0 or name in _PROSE else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    console.print(table)
