"""``manydg prepare``, ``synthesize``, ``predict`` and ``personalise``, built from the sources' own descriptions.

Each source and each twin is a command whose options are the fields of its options dataclass. A source's module is
imported only when its command is used: lists of commands are made from names and docstrings.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from manydg.cli._options import (
    Address,
    AsJson,
    FilesEngine,
    UsedAlgorithm,
    UsedBackbone,
    console,
    keyword,
    show_json,
    show_line,
)
from manydg.errors import ManyDGWarning, printable
from manydg.sources import SOURCES, TWINS, AnySource, Options, find_source, find_twin, option_help, option_types

if TYPE_CHECKING:
    from manydg.registry import Registry

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a dataset folder that is already there.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that read tables or files.")]
_PREDICT_HELP = "Predict new raw files with a trained model"
_PERSONALISE_HELP = "Predict patients of whom a few samples are labelled"
_NAMES_SHOWN = 8


def register(app: typer.Typer) -> None:
    """Add the commands to ``manydg``."""
    app.command("predict", cls=_PredictCommand, help=f"{_PREDICT_HELP}.")(lambda: None)
    app.command("personalise", cls=_PersonaliseCommand, help=f"{_PERSONALISE_HELP}.")(lambda: None)
    prepare = typer.Typer(help="Turn raw files into a dataset folder.", no_args_is_help=True, cls=_PrepareGroup)
    twins = typer.Typer(
        help="Write synthetic raw files in a dataset's own format.", no_args_is_help=True, cls=_SynthesizeGroup
    )
    app.add_typer(prepare, name="prepare")
    app.add_typer(twins, name="synthesize")


class _RegistryGroup(TyperGroup):
    """A group of commands, one for each entry of a registry."""

    registry: Registry[Any]

    @abstractmethod
    def build(self, name: str) -> Any:
        """The command of an entry."""

    def list_commands(self, ctx: Any) -> list[str]:
        return self.registry.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.build(cmd_name) if cmd_name in self.registry.names() else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, f"{self.registry.summary(name)}.") for name in self.registry.names()])


class _PrepareGroup(_RegistryGroup):
    registry = SOURCES

    def build(self, name: str) -> Any:
        source = find_source(name)

        def run(raw: Path, out: Path, overwrite: bool, as_json: bool, workers: int = 1, engine: str = "local",
                address: str | None = None, context: typer.Context | None = None, **values: Any) -> None:  # fmt: skip
            from manydg.files import claimed
            from manydg.jobs import engine_named, using

            options = _options(source.options_class, values, context.args if context else [])
            with claimed(out), using(engine_named(engine, address)), _plain_warnings():
                source.prepare(raw, out, options, workers=workers, overwrite=overwrite)
            _show_prepared(source, out, as_json=as_json)

        greedy = any(option_help(entry).greedy for entry in fields(source.options_class))
        parameters = [*_raw_and_out(source), *_parameters(source.options_class, greedy)]
        if source.parallel:
            parameters += [keyword("workers", Workers, 1), keyword("engine", FilesEngine, "local")]
            parameters.append(keyword("address", Address, None))
        parameters += [keyword("overwrite", Overwrite, False), keyword("as_json", AsJson, False)]
        return _command(name, SOURCES.summary(name), run, parameters)


class _SynthesizeGroup(_RegistryGroup):
    registry = TWINS

    def build(self, name: str) -> Any:
        twin = find_twin(name)

        def run(out: Path, as_json: bool, **values: Any) -> None:
            from manydg.files import claimed

            options = _options(twin.options_class, values)
            with claimed(out):
                folder = twin.create(out, options)
            told = twin.describe(folder, options)
            if as_json:
                show_json({"twin": name, "out": str(folder), "about": told})
            else:
                show_line(told)

        folder = Annotated[Path, typer.Option(help="New folder for the raw files.", show_default=False)]
        parameters = [keyword("out", folder), *_parameters(twin.options_class)]
        parameters.append(keyword("as_json", AsJson, False))
        return _command(name, TWINS.summary(name), run, parameters)


class _PredictCommand(TyperCommand):
    """``manydg predict`` with the options of every source, which are looked up when the command is used."""

    @cached_property
    def whole(self) -> Any:
        """The command with all its parameters."""
        finished = typer.Argument(help="Folder of a finished run.", show_default=False)
        new = typer.Argument(help="New raw files, as those the model was trained on.", show_default=False)
        folder = typer.Option(help="Where the predictions go; a folder that does not exist yet.")
        own = [
            keyword("run", Annotated[Path, finished]),
            keyword("raw", Annotated[Path, new]),
            keyword("out", Annotated[Path, folder]),
            keyword("backbone", UsedBackbone, None),
            keyword("algorithm", UsedAlgorithm, None),
            keyword("as_json", AsJson, False),
            *self.further(),
        ]
        return _command(self.name or "", self.summary, self.action, [*own, *_all_prediction_parameters()])

    summary: ClassVar[str] = _PREDICT_HELP

    def action(self, **values: Any) -> None:
        """What the command does."""
        from manydg.predict import predict_raw

        _predict(predict_raw, **values)

    def further(self) -> list[inspect.Parameter]:
        """Parameters besides those of ``predict``."""
        return []

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = self.whole.get_params(ctx)
        return params

    def invoke(self, ctx: Any) -> Any:
        return self.whole.invoke(ctx)


class _PersonaliseCommand(_PredictCommand):
    """``manydg personalise``: ``predict`` with labels of some samples."""

    summary = _PERSONALISE_HELP

    def action(self, **values: Any) -> None:
        from manydg.predict import personalise_raw

        _predict(personalise_raw, **values)

    def further(self) -> list[inspect.Parameter]:
        file = typer.Option(
            metavar="FILE",
            help="CSV or Parquet with the column 'label' and columns of predictions.csv that name the sample, such as "
            "'row'.",
            show_default=False,
        )
        learner = typer.Option(
            help="How labels are used: effects, prototypes, intercept, fine-tune, markov (reads samples in order of "
            "time) or auto (the best of them on validation patients)."
        )
        return [keyword("labels", Annotated[Path, file]), keyword("learner", Annotated[str, learner], "effects")]


def _all_prediction_parameters() -> list[inspect.Parameter]:
    by_name: dict[str, inspect.Parameter] = {}
    for name in SOURCES.names():
        for parameter in _parameters(find_source(name).prediction_options_class):
            by_name.setdefault(parameter.name, parameter)
    return list(by_name.values())


def _predict(
    predict: Callable[..., list[Path]], run: Path, raw: Path, out: Path, as_json: bool = False, **options: Any
) -> None:
    from manydg.files import claimed
    from manydg.predict import ABOUT

    with claimed(out):
        written = predict(run, raw, out, **options)
    about = json.loads((out / ABOUT).read_text(encoding="utf-8"))
    if as_json:
        show_json({"files": [str(path) for path in written], "about": about})
        return
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"{about['decision']['in words']}; {out / ABOUT} says more", soft_wrap=True)


# From an options dataclass to parameters of a command, and from what was typed to options


def _command(name: str, summary: str, run: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Any:
    ordered = sorted(parameters, key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    def command(**values: Any) -> None:
        run(**values)

    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    takes_more = any(parameter.name == "context" for parameter in ordered)
    app.command(name, help=f"{summary}.", context_settings={"allow_extra_args": takes_more})(command)
    return typer.main.get_command(app)


def _raw_and_out(source: AnySource) -> list[inspect.Parameter]:
    raw = source.raw
    if raw.flag is None:
        kind = typer.Argument(metavar=raw.name, help=raw.help, show_default=False)
    else:
        kind = typer.Option(raw.flag, help=raw.help, show_default=False)
    folder = Annotated[Path, typer.Option(help="Dataset folder to write.", show_default=False)]
    return [keyword("raw", Annotated[Path, kind]), keyword("out", folder)]


def _parameters(options: type[Options], greedy: bool = False) -> list[inspect.Parameter]:
    kinds = option_types(options)
    context = [keyword("context", typer.Context)] if greedy else []
    return [*context, *(_option(entry, kinds[entry.name]) for entry in fields(options))]


def _option(entry: Field[Any], kind: type) -> inspect.Parameter:
    shown = option_help(entry)
    required = entry.default is MISSING
    flag = f"--{entry.name.replace('_', '-')}"
    as_typed: Any = (str if shown.commas else list[str]) if kind is tuple else kind
    default: Any = inspect.Parameter.empty if required else entry.default
    if kind is tuple and not required:
        default = None if shown.commas else list(default)
    if default is None:
        as_typed = as_typed | None
    info = typer.Option(
        flag,
        help=shown.help,
        metavar=shown.metavar,
        min=0 if shown.zero else shown.low if kind in (int, float) else None,
        show_default=shown.shown_default or (not required and kind is not bool),
    )
    return keyword(entry.name, Annotated[as_typed, info], default)


def _options(options: type[Options], values: Mapping[str, object], more: Iterable[str] = ()) -> Any:
    """Options from what was typed; ``more`` are the words that followed a greedy option."""
    given: dict[str, object] = {}
    for entry in fields(options):
        shown, value = option_help(entry), values[entry.name]
        if shown.commas and value is None:
            continue
        if shown.commas:
            value = [name.strip() for name in str(value).split(",")]
        elif shown.zero and value == 0:
            value = None
        elif shown.greedy and isinstance(value, list):
            value = [*value, *more]
        given[entry.name] = value
    return options.of(**given)


# What is printed about a new dataset


def _show_prepared(source: AnySource, out: Path, *, as_json: bool) -> None:
    """Print what a new dataset holds."""
    from manydg.data.storage import read_description

    if as_json:
        made = read_description(out)
        show_json(
            {
                "folder": str(out),
                "samples": made.samples,
                "patients": made.patients,
                "target": made.target.to_json(),
                "inputs": {name: list(made.files[f"inputs.{name}"].shape[1:]) for name in made.columns},
                "cohort_flow": [step.to_json() for step in made.info.cohort_flow],
                "notes": [*source.notes_on(made.info.provenance.options if made.info.provenance else {})],
                "content": made.content_hash,
            }
        )
        return
    for line in describe_dataset(source, out):
        show_line(line)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our warnings as plain lines."""
    with warnings.catch_warnings():
        show: Callable[..., None] = warnings.showwarning

        def plain(message: Warning | str, category: type[Warning], *rest: object) -> None:
            if issubclass(category, ManyDGWarning):
                print(printable(f"manydg: warning: {message}"), file=sys.stderr)
            else:
                show(message, category, *rest)

        warnings.simplefilter("always", ManyDGWarning)
        warnings.showwarning = plain  # type: ignore[assignment]
        yield


def describe_dataset(source: AnySource, out: Path) -> list[str]:
    """Lines about a new dataset: what was left after each step, what it holds, and what can be done next."""
    from manydg.data.storage import read_description

    description = read_description(out)
    target, provenance = description.target, description.info.provenance
    lines = [f"{step.step}: {counts_in_words(step.counts)}" for step in description.info.cohort_flow]
    people = "synthetic patients" if description.info.synthetic else "patients"
    lines.append(
        f"wrote {out}: {description.samples:,} samples of {description.patients:,} {people} "
        f"(next: 'manydg inspect {out}', 'manydg train {out} --out RUN')"
    )
    names = target.names
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    shown = f"{target} ({', '.join(names[:_NAMES_SHOWN])}{more})"
    lines.append(f"  target: {target if target.kind == 'regression' else shown}")
    for name, levels in description.columns.items():
        if levels == 0:
            stored = description.files[f"inputs.{name}"]
            shape, kind = " x ".join(map(str, stored.shape[1:])), "float32" if "f" in stored.dtype else "codes"
            lines.append(f"  input {name}: {shape} {kind} a sample")
    lines += [f"  {note}" for note in source.notes_on(provenance.options if provenance else {})]
    return [*lines, f"  content {description.content_hash}"]


def counts_in_words(counts: Mapping[str, int]) -> str:
    """The counts of a step that are not zero; what was left out comes last.

    Examples
    --------
    >>> counts_in_words({"patients": 1200, "samples": 0, "left_out_without_id": 4, "left_out": 2})
    '1,200 patients, 0 samples; left out: 4 without id, 2'
    """
    main = ("patients", "samples", "recordings", "rows")
    kept, dropped = [], []
    for name, count in counts.items():
        words = name.replace("_", " ")
        if name.startswith("left_out"):
            dropped.append(f"{count:,} {words.removeprefix('left out').strip()}".strip() if count else "")
        elif count or name in main:
            kept.append(f"{count:,} {words}")
    shown, left_out = ", ".join(kept), ", ".join(filter(None, dropped))
    return f"{shown}; left out: {left_out}" if left_out else shown
