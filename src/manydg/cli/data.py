"""``manydg prepare``, ``synthesize``, ``predict``, ``personalise`` and ``inspect``: data, as the sources describe them.

Each source and each twin is a command whose options are the fields of its options dataclass. A source's module is
imported only when its command is used: lists of commands are made from names and docstrings.
"""

from __future__ import annotations

import inspect
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from manydg.cli._options import (
    Address,
    AsJson,
    FilesEngine,
    PlainConsole,
    UsedAlgorithm,
    UsedBackbone,
    console,
    keyword,
    show_json,
    show_line,
    show_table,
)
from manydg.errors import ConfigError, ManyDGWarning
from manydg.sources import (
    SOURCES,
    TWINS,
    AnySource,
    Options,
    PublishedCounts,
    find_source,
    find_twin,
    option_help,
    option_types,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console

    from manydg.data.dataset import ColumnSchema, DomainDataset
    from manydg.data.info import CohortStep, TargetSpec
    from manydg.files import Json, ParsedJson
    from manydg.registry import Registry

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset folder.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that read tables or files.")]
_PREDICT_HELP = """Predict new raw files with a trained model.

Writes probabilities, prediction sets and a flag for patients unlike those in training to OUT, with about.json, which
explains every column. RAW may also be a dataset folder, prepared like the run's"""
_PERSONALISE_HELP = """Predict patients who have a few labelled samples.

The labels change the predictions of the same patient's other samples, without training again. With causal context,
they affect later samples only. The output is that of 'manydg predict'"""
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
    app.command("inspect")(inspect_dataset)


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
                address: str | None = None, **values: Any) -> None:  # fmt: skip
            from manydg.files import claimed, warn_plainly
            from manydg.jobs import engine_named, using

            options = _options(source.options_class, values)
            with claimed(out), using(engine_named(engine, address)), warnings.catch_warnings():
                warn_plainly()
                warnings.simplefilter("always", ManyDGWarning)
                source.prepare(raw, out, options, workers=workers, overwrite=overwrite)
            _show_prepared(source, out, as_json=as_json)

        parameters = [*_raw_and_out(source), *_parameters(source.options_class)]
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
            about = twin.describe(folder, options)
            if as_json:
                show_json({"twin": name, "out": str(folder), "about": about})
            else:
                show_line(about)

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
        new = typer.Argument(help="New raw files, in the format of the training data.", show_default=False)
        folder = typer.Option(help="New folder for the predictions.")
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
            help="CSV or Parquet with the column 'label' and columns of predictions.csv that identify it, such as "
            "'row'.",
            show_default=False,
        )
        learner = typer.Option(
            help="How labels are used: effects, prototypes, intercept, fine-tune, markov (reads samples in time "
            "order) or auto (the best of them on validation patients)."
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


class _GreedyCommand(TyperCommand):
    """Takes the words between an option shown as ``PATTERN...`` and the next option for its values, and no others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = [each for each in self.params if getattr(each, "multiple", False)]
        greedy = {flag for each in several if str(each.metavar or "").endswith("...") for flag in each.opts}
        words: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word.partition("=")[0]
            elif flag in greedy and words[-1] != flag:
                words.append(flag)
            words.append(word)
        return super().parse_args(ctx, words)


def _command(name: str, summary: str, run: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Any:
    ordered = sorted(parameters, key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    def command(**values: Any) -> None:
        run(**values)

    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=f"{summary}.", cls=_GreedyCommand)(command)
    return typer.main.get_command(app)


def _raw_and_out(source: AnySource) -> list[inspect.Parameter]:
    raw = source.raw
    if raw.flag is None:
        kind = typer.Argument(metavar=raw.name, help=raw.help, show_default=False)
    else:
        kind = typer.Option(raw.flag, help=raw.help, show_default=False)
    folder = Annotated[Path, typer.Option(help="Dataset folder to write.", show_default=False)]
    return [keyword("raw", Annotated[Path, kind]), keyword("out", folder)]


def _parameters(options: type[Options]) -> list[inspect.Parameter]:
    kinds = option_types(options)
    return [_option(entry, kinds[entry.name]) for entry in fields(options)]


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


def _options(options: type[Options], values: Mapping[str, object]) -> Any:
    """Options from what was typed."""
    given: dict[str, object] = {}
    for entry in fields(options):
        shown, value = option_help(entry), values[entry.name]
        if shown.commas and value is None:
            continue
        if shown.commas:
            value = [name.strip() for name in str(value).split(",")]
            if "" in value:
                raise ConfigError(f"--{entry.name.replace('_', '-')} {values[entry.name]} has an empty name")
        elif shown.zero and value == 0:
            value = None
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


# What a dataset folder holds; its inputs are not read, so that its size does not matter

_LABELS_SHOWN = 20


def inspect_dataset(
    dataset: Annotated[Path, typer.Argument(help="Dataset folder.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the content of a dataset folder.

    Counts, labels, samples per patient and cohort flow, compared with the paper's counts for the same dataset.
    """
    summary = summarize(dataset)
    if json:
        from json import dumps

        from manydg.files import fields_as_json

        typer.echo(dumps(fields_as_json(summary), indent=1))
        return
    _show(PlainConsole(soft_wrap=True), summary)


# The figures


@dataclass(frozen=True)
class LabelRow:
    """Samples, share and patients of a label, with the share the paper prints where it does."""

    label: str
    samples: int
    share: float
    patients: int
    expected_share: float | None


@dataclass(frozen=True)
class LabelsPerSample:
    """How many labels samples have, for multi-label targets."""

    mean: float
    most: float


@dataclass(frozen=True)
class Quantiles:
    """How values are spread."""

    least: float
    first_quartile: float
    median: float
    third_quartile: float
    most: float
    mean: float


@dataclass(frozen=True)
class ValueSummary(Quantiles):
    """Of a regression target; of patients with several samples, the share of its variance between them."""

    between_patients: float | None


@dataclass(frozen=True)
class PatientSizes(Quantiles):
    """Of the number of samples a patient has, and how many patients have but one."""

    patients_with_one: int


@dataclass(frozen=True)
class CountRow:
    """A count of the dataset beside the one the paper states, and what explains the difference."""

    count: str
    found: int
    expected: int
    at_least: bool
    difference: int
    explanation: str


@dataclass(frozen=True)
class AgainstPaper:
    """What the paper states of the same data."""

    edition: str | None
    labels_per_sample: Mapping[str, float]
    notes: Mapping[str, str]
    counts: list[CountRow]


@dataclass(frozen=True)
class DatasetSummary:
    """Everything that ``manydg inspect --json`` prints; synthetic patients are not held against the paper's."""

    dataset: str
    source: str | None
    synthetic: bool
    content_hash: str
    samples: int
    patients: int
    sites: int
    inputs: Mapping[str, ColumnSchema]
    vocabularies: dict[str, int]
    target: TargetSpec
    labels: list[LabelRow]
    labels_per_sample: LabelsPerSample | None
    values: ValueSummary | None
    samples_per_patient: PatientSizes
    cohort_flow: Sequence[CohortStep]
    options: Mapping[str, Json]
    files: int
    expected: AgainstPaper


def summarize(folder: str | Path) -> DatasetSummary:
    """The figures of a dataset folder."""
    from manydg.data.dataset import InputSchema, open_dataset
    from manydg.data.info import Provenance

    data = open_dataset(folder)
    origin = data.info.provenance or Provenance("")
    source, flow, options = data.info.source, data.info.cohort_flow, origin.options
    comparable = source in SOURCES.names() and not origin.synthetic
    published = find_source(str(source)).published if comparable else None
    sizes = vocabulary_sizes(data)
    counts = {"patients": data.n_patients, "samples": len(data)} | sizes
    return DatasetSummary(
        dataset=Path(folder).name,
        source=source,
        synthetic=origin.synthetic,
        content_hash=data.content_hash(),
        samples=len(data),
        patients=data.n_patients,
        sites=len(set(data.info.sites.values())),
        inputs=InputSchema.of(data).columns,
        vocabularies=sizes,
        target=data.target,
        labels=label_table(data, published.shares if published else {}),
        labels_per_sample=labels_per_sample(data),
        values=value_summary(data),
        samples_per_patient=samples_per_patient(data),
        cohort_flow=flow,
        options=dict(options),
        files=len(origin.files),
        expected=AgainstPaper(
            published.edition if published else None,
            dict(published.labels_per_sample) if published else {},
            dict(published.notes) if published else {},
            compare_counts(published, counts, options) if published else [],
        ),
    )


def vocabulary_sizes(data: DomainDataset) -> dict[str, int]:
    """Number of real codes in each vocabulary (the unknown code is none), and in each field of an event vocabulary."""
    sizes = {name: sum(word != "<unknown>" for word in words) for name, words in data.info.vocabularies.items()}
    code_fields = cast("list[ParsedJson]", data.info.settings.get("code_fields", []))
    return sizes | {field["name"]: int(field["stop"]) - int(field["start"]) for field in code_fields}


def _indicators(data: DomainDataset) -> npt.NDArray[np.bool_]:
    """Which labels each sample has, ``(rows, K)``; of votes, the class with the most."""
    import numpy as np

    targets = data.targets.numpy()
    if data.target.kind == "multilabel":
        return np.asarray(targets > 0)
    classes = targets.argmax(axis=1) if data.target.kind == "votes" else targets
    return np.asarray(classes[:, None] == np.arange(data.target.size))


def label_table(data: DomainDataset, published: Mapping[str, float]) -> list[LabelRow]:
    """A row per label, the most frequent first where a sample may have several; none for a regression target."""
    import numpy as np

    if data.target.kind == "regression":
        return []
    present = _indicators(data)
    counts = present.sum(axis=0)
    several = data.target.kind == "multilabel"
    rows = []
    for code in map(int, np.argsort(-counts, kind="stable") if several else range(data.target.size)):
        name, patients = data.target.names[code], np.unique(data.domains.numpy()[present[:, code]])
        share = float(counts[code] / max(len(data), 1))
        rows.append(LabelRow(name, int(counts[code]), share, len(patients), published.get(name)))
    return rows


def labels_per_sample(data: DomainDataset) -> LabelsPerSample | None:
    """Mean and most labels of a sample; only for multi-label targets."""
    if data.target.kind != "multilabel":
        return None
    each = _indicators(data).sum(axis=1)
    return LabelsPerSample(float(each.mean()), int(each.max()))


def value_summary(data: DomainDataset) -> ValueSummary | None:
    """How the values of a regression target are spread; none for other targets."""
    import numpy as np

    if data.target.kind != "regression":
        return None
    values, who = data.targets.numpy().astype(float), data.domains.numpy()
    counts = np.bincount(who)
    means, several = np.bincount(who, weights=values) / np.maximum(counts, 1), counts[who] > 1
    spread = float(values[several].var()) if several.any() else 0.0
    between = float(means[who[several]].var()) / spread if spread > 0 else None
    return ValueSummary(*_spread(values), between)


def _spread(values: npt.NDArray[Any]) -> tuple[float, float, float, float, float, float]:
    """Quartiles and mean, as the fields of :class:`Quantiles`."""
    import numpy as np

    low, first, median, third, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return low, first, median, third, high, float(values.mean())


def samples_per_patient(data: DomainDataset) -> PatientSizes:
    """How the numbers of samples differ from patient to patient."""
    import numpy as np

    counts = np.bincount(data.domains.numpy(), minlength=data.n_patients)
    return PatientSizes(*_spread(counts), int((counts == 1).sum()))


def compare_counts(
    published: PublishedCounts, counts: Mapping[str, int], options: Mapping[str, Json]
) -> list[CountRow]:
    """Each count that the paper states beside the dataset's; those the dataset lacks are left out.

    - ``counts``: The dataset's, by the same names.
    - ``options``: The options it was prepared with.
    """
    limit = options.get("limit_patients")
    limited = [f"limited to {limit} patients"] if limit else []
    rows = []
    for name, count in published.counts.items():
        if name not in counts:
            continue
        difference, at_least = counts[name] - count, name in published.at_least
        expected = difference == 0 or (at_least and difference > 0)
        reasons = ["as expected"] if expected else [*limited, *filter(None, [published.notes.get(name)])]
        rows.append(CountRow(name, counts[name], count, at_least, difference, "; ".join(reasons)))
    return rows


# Tables for the terminal


def _show(console: Console, summary: DatasetSummary) -> None:
    source = f" from {summary.source}" if summary.source else ""
    data = " (synthetic data)" if summary.synthetic else ""
    console.print(
        f"{summary.dataset}{source}{data}: {summary.samples:,} samples of {summary.patients:,} patients"
        f"{f' of {summary.sites:,} sites' if summary.sites else ''}, "
        f"content {summary.content_hash}"
    )
    for name, column in summary.inputs.items():
        shape = " x ".join(map(str, column.shape)) or "one value"
        levels = " in lists" * column.nesting
        console.print(f"  input {name}: {shape} {column.dtype}{levels}")
    if summary.vocabularies:
        sizes = ", ".join(f"{name} {size:,}" for name, size in summary.vocabularies.items())
        console.print(f"  codes: {sizes}")
    _show_labels(console, summary, data)
    head = ["least", "quarter", "median", "three quarters", "most", "mean", "patients with one"]
    row = [f"{round(value, 1):,.10g}" for value in asdict(summary.samples_per_patient).values()]
    show_table(console, f"Samples per patient{data}", head, [row])
    _show_flow(console, summary.cohort_flow, data)
    _show_expected(console, summary.expected)


def _show_labels(console: Console, summary: DatasetSummary, data: str) -> None:
    if summary.values is not None:
        head = ["least", "quarter", "median", "three quarters", "most", "mean"]
        *quantiles, between = asdict(summary.values).values()
        shown = [f"{value:,.6g}" for value in quantiles]
        show_table(console, f"Values of {summary.target.names[0]}{data}", head, [shown])
        if between is not None:
            console.print(f"of patients with several samples, {between:.0%} of the variance is between patients")
        return
    labels = summary.labels
    published = any(row.expected_share is not None for row in labels)
    rows = []
    for row in labels[:_LABELS_SHOWN]:
        cells = [row.label, f"{row.samples:,}", f"{row.share:.1%}", f"{row.patients:,}"]
        in_paper = [f"{row.expected_share:.1%}" if row.expected_share is not None else ""]
        rows.append(cells + (in_paper if published else []))
    head = ["label", "samples", "share", "patients"] + (["paper"] if published else [])
    show_table(console, f"Labels ({summary.target.kind}){data}", head, rows)
    if len(labels) > _LABELS_SHOWN:
        console.print(f"and {len(labels) - _LABELS_SHOWN} more")
    if each := summary.labels_per_sample:
        paper = summary.expected.labels_per_sample
        in_print = f" (paper: {paper['mean']:g} and {paper['most']:g})" if paper else ""
        console.print(f"labels per sample: {each.mean:.2f} on average, {each.most} at most{in_print}")


def _show_flow(console: Console, flow: Sequence[CohortStep], data: str) -> None:
    if not flow:
        return
    main = [name for name in ("patients", "recordings", "samples") if any(name in step.counts for step in flow)]
    rows = []
    for step in flow:
        # What left out nothing is passed over.
        rest = {name: n for name, n in step.counts.items() if name not in main and (n or "left_out" not in name)}
        details = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in rest.items())
        counts = [f"{step.counts[name]:,}" if name in step.counts else "" for name in main]
        rows.append([step.step, *counts, details])
    show_table(console, f"Cohort flow{data}", ["step", *main, "other counts"], rows)


def _show_expected(console: Console, expected: AgainstPaper) -> None:
    if not expected.counts:
        return
    rows = []
    for row in expected.counts:
        stated = ("over " if row.at_least else "") + f"{row.expected:,}"
        rows.append([row.count, f"{row.found:,}", stated, f"{row.difference:+,}", row.explanation])
    head = ["count", "found", "paper", "difference", "explanation"]
    show_table(console, f"Against the paper ({expected.edition})", head, rows)
    for name, note in expected.notes.items():
        if not any(note in row.explanation for row in expected.counts):
            console.print(f"note on {name}: {note}")
