"""``manydg inspect`` and ``manydg clinical``: what a dataset folder holds, and what finished models are worth in care.

A dataset's inputs are not read, so that its size does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from manydg.cli._options import PlainConsole, show_json
from manydg.errors import printable
from manydg.sources import SOURCES, PublishedCounts, find_source

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console

    from manydg.data.dataset import ColumnSchema, DomainDataset
    from manydg.data.info import CohortStep
    from manydg.evaluation.clinical import ClinicalResult
    from manydg.evaluation.statistics import Interval
    from manydg.files import Json

_PROSE = ("explanation", "other counts")
_LABELS_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands to ``manydg``."""
    app.command("inspect")(inspect)
    app.command("clinical")(clinical)


def inspect(
    dataset: Annotated[Path, typer.Argument(help="Dataset folder.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a dataset folder holds.

    Counts, labels, samples per patient and cohort flow, compared with the paper's where it has the same dataset.
    """
    summary = summarize(dataset)
    if json:
        from json import dumps

        flow = [step.to_json() for step in summary.cohort_flow]
        typer.echo(dumps(asdict(summary) | {"cohort_flow": flow}, indent=1))
        return

    _show(PlainConsole(soft_wrap=True), summary)


def clinical(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run, or results folder.", show_default=False)],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Choose each run's threshold anew on its validation patients: sensitivity=.9, precision=.5 or "
            "alarms=1/day.",
            show_default="the run's own",
        ),
    ] = None,
    silence: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Least time between two alarms, such as 6h.", show_default="the run's"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show alarms, decisions and groups of patients.

    On test patients, with 95% intervals over patients: rates at the threshold; of an event, what a budget of false
    alarms buys; and each group of the columns that were named when the dataset was prepared (--subgroup).
    """
    from manydg.studies.summary import clinical_results

    results = clinical_results(folder, at=at, silence=silence)
    if json:
        show_json({name: result.to_json() for name, result in results.items()})
        return
    _show_clinical(PlainConsole(soft_wrap=True), results)


def _show_clinical(screen: Console, results: Mapping[str, ClinicalResult]) -> None:
    from manydg.evaluation.clinical import RATE_NAMES

    screen.print("Test patients; brackets are 95% intervals over patients. 'manydg report' has curves and net benefit.")
    names = {key: name for key, name in RATE_NAMES.items() if key in next(iter(results.values())).at_threshold}
    rates = {name: [_bounds(each.at_threshold[key]) for key in names] for name, each in results.items()}
    rules = "; ".join(dict.fromkeys(each.rule for each in results.values()))
    _models(screen, "At the threshold" + (f": {rules}" if rules else ""), list(names.values()), rates)
    curves = {name: each.alarms.get("events_caught", []) for name, each in results.items()}
    budgets = [f"{point.at:g}" for point in next(iter(curves.values()))]
    caught = {name: [_bounds(point.value) for point in points] for name, points in curves.items()}
    _models(screen, "Events caught, by false alarms per patient-day", budgets, caught)
    for name, result in results.items():
        for column, groups in result.subgroups.items():
            metric = next(iter(groups[0].values))
            head = ["group", "patients", metric, "p", "probability - truth"]
            rows = []
            for group in groups:
                p = group.p.get(metric)
                cells = [_bounds(group.values[metric]), "" if p is None else f"{p:.3f}"]
                rows.append([group.group, str(group.patients), *cells, _bounds(group.values["calibration"])])
            _table(screen, f"{column}: {name} (p: against the largest group, Holm)", head, rows)


def _models(screen: Console, title: str, rows: Sequence[str], cells: Mapping[str, Sequence[str]]) -> None:
    """A table with a column for each model; none where there is nothing to show."""
    if rows:
        _table(screen, title, ["", *cells], [list(row) for row in zip(rows, *cells.values(), strict=True)])


def _bounds(value: Interval) -> str:
    known = value.low == value.low
    return f"{value.estimate:.3f}" + (f" [{value.low:.3f}, {value.high:.3f}]" if known else "")


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
class TargetSummary:
    """The kind of target, and its classes or labels."""

    kind: str
    names: list[str]


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
    target: TargetSummary
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
        target=TargetSummary(data.target.kind, list(data.target.names)),
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
    code_fields = cast("list[dict[str, Any]]", data.info.settings.get("code_fields", []))
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
    _table(console, f"Samples per patient{data}", head, [row])
    _show_flow(console, summary.cohort_flow, data)
    _show_expected(console, summary.expected)


def _table(console: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=printable(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 0 or name in _PROSE else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    console.print(table)


def _show_labels(console: Console, summary: DatasetSummary, data: str) -> None:
    if summary.values is not None:
        head = ["least", "quarter", "median", "three quarters", "most", "mean"]
        *quantiles, between = asdict(summary.values).values()
        shown = [f"{value:,.6g}" for value in quantiles]
        _table(console, f"Values of {summary.target.names[0]}{data}", head, [shown])
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
    _table(console, f"Labels ({summary.target.kind}){data}", head, rows)
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
    _table(console, f"Cohort flow{data}", ["step", *main, "other counts"], rows)


def _show_expected(console: Console, expected: AgainstPaper) -> None:
    if not expected.counts:
        return
    rows = []
    for row in expected.counts:
        stated = ("over " if row.at_least else "") + f"{row.expected:,}"
        rows.append([row.count, f"{row.found:,}", stated, f"{row.difference:+,}", row.explanation])
    head = ["count", "found", "paper", "difference", "explanation"]
    _table(console, f"Against the paper ({expected.edition})", head, rows)
    for name, note in expected.notes.items():
        if not any(note in row.explanation for row in expected.counts):
            console.print(f"note on {name}: {note}")
