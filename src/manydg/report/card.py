"""A run for those who have to judge it: its model card, and the checklists TRIPOD+AI and PROBAST+AI.

Everything comes from the run's record and files. What records do not know is left open and named. Items of the
checklists are in our own words under the statements' numbers (``checklists.toml``); they do not replace the statements.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from manydg.errors import ConfigError, DataError, StorageError
from manydg.evaluation.clinical import compare_groups
from manydg.evaluation.metrics import Predictions
from manydg.evaluation.statistics import Interval, PatientResampling, patient_intervals
from manydg.files import claimed, write_atomically
from manydg.report.page import ChapterPage, document
from manydg.report.results_folder import read_results_folder
from manydg.report.sections import Block, Bullets, Cell, Column, Part, Table, Terms, Text, text_columns
from manydg.report.sections.performance import class_recall
from manydg.report.words import (
    MEANING,
    algorithm_name,
    algorithm_summary,
    count,
    duration,
    interval,
    listed,
    metric_name,
    noted,
    number,
    plural,
    sentence,
    worst_values,
)
from manydg.studies.records import RESULTS, RUN_RECORD, RUNS, StudiedDataset, read_description
from manydg.studies.summary import load_predictions
from manydg.studies.summary_text import markdown_row
from manydg.targets import Target, target_of
from manydg.training.inference import Calibration, read_calibration
from manydg.training.record import RunRecord, cautions

OPEN = "Open"
_TO_FILL = (
    "who is meant to use it, for which decision, and what follows from a prediction",
    "which patients it is meant for, and which it is not",
    "who approved the use of the data, and what patients were told",
    "who answers for the model, and how errors are reported to them",
)


@dataclass(frozen=True)
class Facts:
    """What is known of a run.

    - ``folder``: The run's.
    - ``about``: Its dataset, where the run is part of a results folder.
    """

    record: RunRecord
    folder: Path
    about: StudiedDataset | None = None

    @staticmethod
    def of(path: str | Path) -> Facts:
        """The facts of a run folder, or of the run that a results folder recommends: its lowest seed."""
        folder = Path(path)
        if (folder / RESULTS).exists():
            return _recommended(folder)
        if not (folder / RUN_RECORD).exists():
            raise StorageError(
                f"{folder} is neither a finished run nor a results folder: it has no {RUN_RECORD} and no {RESULTS}. "
                "Name a folder that 'manydg train' or 'manydg compare' finished"
            )
        record = RunRecord.read(folder / RUN_RECORD)
        results = folder.resolve().parent.parent if folder.resolve().parent.name == RUNS else None
        about = None if results is None else read_description(results).datasets.get(record.dataset)
        return Facts(record, folder, about)

    @cached_property
    def target(self) -> Target:
        if self.record.target is None:
            raise DataError(f"{self.folder / RUN_RECORD} does not say what is predicted: train the run again")
        return target_of(self.record.target)

    @cached_property
    def predictions(self) -> Predictions | None:
        """Test predictions the run is scored on; None where there are none or the file is gone."""
        whole = load_predictions(self.folder, self.record.replace(folder="."))
        scored = None if whole is None else whole.scored()
        return scored if scored is not None and len(scored.truth) else None

    @cached_property
    def intervals(self) -> Mapping[str, Interval]:
        """Of each test metric, over patients; none without predictions."""
        return {} if self.predictions is None else patient_intervals([self.predictions], site_of=self.record.sites)

    @cached_property
    def calibration(self) -> Calibration | None:
        return read_calibration(self.folder)

    @property
    def title(self) -> str:
        data = f"{self.record.dataset} (synthetic data)" if self.record.synthetic else self.record.dataset
        return f"{algorithm_name(self.record.algorithm)} on {data}"

    @property
    def source(self) -> str:
        return (self.about and self.about.source) or ""


def _recommended(folder: Path) -> Facts:
    chapters = [chapter for chapter in read_results_folder(folder).chapters if chapter.choice is not None]
    if len(chapters) != 1:
        names = listed([chapter.dataset for chapter in chapters]) or "none"
        raise DataError(
            f"{folder} has comparisons on {len(chapters)} datasets ({names}), not one: name a run's folder, as "
            f"{folder / RUNS}/ID"
        )
    comparison = chapters[0].choice
    choice = None if comparison is None else comparison.summary.recommendation
    if comparison is None or choice is None:
        raise DataError(f"{folder} compares no two models, so that none is recommended: name a run's folder")
    rows = [record for record in chapters[0].runs(comparison.summary.experiment) if record.algorithm == choice.row]
    if not rows:
        raise DataError(f"{folder} recommends {choice.row}, which has several variants: name the folder of one run")
    record = min(rows, key=lambda record: record.seed)
    return Facts(record, folder / record.folder, chapters[0].about)


def write_card(run: str | Path, out: str | Path) -> Path:
    """Write the model card of a run, as Markdown or HTML by the file's name.

    Parameters
    ----------
    run : path
        Folder of a finished run, or a results folder: then the run of the model that it recommends.
    out : path
        A ``.md`` or ``.html`` file.
    """
    facts = Facts.of(run)
    return _write(f"Model card: {facts.title}", list(_card(facts)), out)


def write_checklist(run: str | Path, out: str | Path) -> Path:
    """Write TRIPOD+AI and PROBAST+AI, filled as far as the records of a run know, as Markdown or HTML.

    Parameters
    ----------
    run : path
        Folder of a finished run, or a results folder: then the run of the model that it recommends.
    out : path
        A ``.md`` or ``.html`` file.
    """
    facts = Facts.of(run)
    return _write(f"Reporting checklists: {facts.title}", list(_checklists(facts)), out)


def _write(title: str, parts: Sequence[Part], out: str | Path) -> Path:
    path = Path(out)
    if path.suffix not in (".md", ".html"):
        raise ConfigError(f"{path} is neither .md nor .html: name a file that ends in one of them")
    note = "Made by manydg from the records of a run. It holds no patient identifiers. Not a medical device."
    if path.suffix == ".md":
        text = to_markdown(title, parts, note)
    else:
        lead, *rest = parts
        text = document(title, "", [ChapterPage("document", "What is known", lead.blocks, rest, "")], [], [], note)
    with claimed(path):
        write_atomically(path, text)
    return path


def to_markdown(title: str, parts: Sequence[Part], footer: str = "") -> str:
    """Parts of a page as Markdown; figures are described in words."""
    lines = [f"# {title}", ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        for block in part.blocks:
            lines += [*_markdown(block), ""]
    return "\n".join([*lines, *([f"_{footer}_", ""] if footer else [])])


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from (f"**{block.caption}**", "")
        yield markdown_row([column.title for column in block.columns])
        yield markdown_row(["---:" if column.numeric else "---" for column in block.columns])
        for row in block.rows:
            yield markdown_row([f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row])
        if block.note:
            yield from ("", block.note)
    elif isinstance(block, Bullets):
        yield from (f"- {item}" for item in block.items)
    elif isinstance(block, Terms):
        yield from (f"- **{term}**: {meaning}" for term, meaning in block.entries)
    elif isinstance(block, Text):
        yield block.text
    else:
        yield from (f"{panel.title}: {panel.words}" for panel in block.panels)


# The model card


def _card(facts: Facts) -> Iterator[Part]:
    yield Part("use", "Intended use", [Text(_purpose(facts)), Text("To be filled in by a person:"), Bullets(_TO_FILL)])
    yield Part("model", "Model", [Terms(list(_model(facts)))])
    yield Part("data", "Data", [Bullets(list(_data(facts)))])
    yield Part("performance", "Performance on patients it has not seen", list(_performance(facts)))
    yield Part("subgroups", "Subgroups", list(_subgroups(facts)))
    yield Part("limits", "Limits", [Bullets(list(_limits(facts)))])


def _purpose(facts: Facts) -> str:
    names = facts.target.spec.names
    shown = listed(names) if len(names) <= 8 else f"{listed(names[:6])} and {len(names) - 6} others"
    return (
        f"A research model that predicts {shown} ({facts.target.kind}) for each sample of a patient it has not seen. "
        "It is not a medical device: test it where it is to be used before anybody is treated because of it."
    )


def _model(facts: Facts) -> Iterator[tuple[str, str]]:
    record, config = facts.record, facts.record.config
    yield "Run", f"{record.run}, code {record.code_version or 'of an unknown version'}"
    yield "Algorithm", f"{algorithm_name(record.algorithm)}. {algorithm_summary(record.algorithm)}".strip()
    yield "Backbone", str(config.backbone)
    if record.parameters:
        yield "Parameters", count(record.parameters)
    where = f"{record.device or 'an unknown device'}, seed {record.seed}"
    yield "Training", f"{duration(record.seconds or float('nan'))} on {where}"
    yield "Epoch", (f"{record.epoch} of {record.epochs}: " if record.epoch else "") + record.selection_rule
    yield "Decision", record.threshold_rule + ("" if record.threshold is None else f", {number(record.threshold)}")
    yield "Patient context", str(record.context.get("mode", "none"))
    if (calibration := facts.calibration) is not None:
        people, level = plural(calibration.patients, "validation patient"), calibration.on_average.level
        yield "Calibration", f"on {people}; prediction sets at {level:.0%} on average over patients"


def _data(facts: Facts) -> Iterator[str]:
    record = facts.record
    yield f"Dataset {record.dataset}, fingerprint {record.dataset_hash or 'not recorded'}."
    yield f"Prepared from {facts.source} files." if facts.source else "Its source is not in the record of the run."
    if record.synthetic:
        yield "The patients are synthetic: made up by a program."
    for side, verb in (("train", "trained on"), ("val", "used to choose epoch and threshold"), ("test", "tested once")):
        patients, samples = getattr(record.patients, side), getattr(record.samples, side)
        yield f"{plural(patients, 'patient')} with {plural(samples, 'sample')} {verb}."
    yield f"Split by {_unit(facts)}: nobody is on two sides."
    yield from (f"Cohort, {step}: {listed(counts)}." for step, counts in _steps(facts))


def _around(facts: Facts, metric: str) -> str:
    bounds = facts.intervals.get(metric)
    return interval(bounds.low, bounds.high) if bounds else ""


def _performance(facts: Facts) -> Iterator[Block]:
    rows = []
    for name, value in facts.record.test.items():
        around = Cell(_around(facts, name) or "–")
        rows.append(
            [Cell(sentence(metric_name(name))), Cell(number(value), value), around, Cell(MEANING.get(name, ""))]
        )
    drawn = "sites, then patients" if facts.record.sites else "patients"
    columns = [Column("Metric", numeric=False), Column("Value"), Column(f"95% interval over {drawn}")]
    yield Table("Test patients", [*columns, Column("Meaning", numeric=False)], rows, "One split; scored once.")
    if worst := _by_patient(facts):
        yield Text(f"Patient by patient, {worst}.")
    if facts.predictions is not None and not facts.target.numeric:
        recall = class_recall([facts.predictions])
        shown = sorted(recall.items(), key=lambda entry: entry[1])[:10]
        yield Text("Samples recognised, least first: " + listed([f"{name} {share:.0%}" for name, share in shown]) + ".")


def _subgroups(facts: Facts) -> Iterator[Block]:
    run, metric = facts.predictions, facts.target.selection
    if run is None or not run.subgroups:
        yield Text("No subgroups were recorded. Name columns for them when the data are prepared (--subgroup).")
        return
    plan = PatientResampling.of(run.names, facts.record.sites)
    for column in run.subgroups:
        rows = []
        for group in compare_groups([run], column, plan):
            value = group.values.get(metric)
            text = "–" if value is None else number(value.estimate)
            around = "" if value is None else interval(value.low, value.high)
            cells = [Cell(group.group), Cell(count(group.patients)), Cell(text, note=around)]
            rows.append([*cells, Cell(number(group.p.get(metric)))])
        columns = [Column(sentence(column), numeric=False), Column("Patients"), Column(sentence(metric_name(metric)))]
        yield Table(f"By {column}", [*columns, Column("p of the difference")], rows, "Against the largest group; Holm.")


def _limits(facts: Facts) -> Iterator[str]:
    for note in cautions([facts.record], facts.target.patient_metric):
        yield noted(note)
    if (calibration := facts.calibration) is not None and calibration.reference is not None:
        yield (
            "Predictions mark patients unlike those of the training (unlike_training); at most "
            f"{calibration.false_alarms:.0%} of patients like them are marked by mistake. Do not rely on a marked one."
        )
    if facts.record.context.get("mode", "none") != "none":
        yield "A prediction needs other samples of the same patient; with few of them expect less than the figures."
    yield "One split of the patients: the figures depend on who happened to be tested."
    yield "Hospitals, devices and times that are not in the data are untested."


# The checklists

Fill = Callable[[Facts], str]


def _checklists(facts: Facts) -> Iterator[Part]:
    asked = tomllib.loads(resources.files("manydg.report").joinpath("checklists.toml").read_text(encoding="utf-8"))
    tripod, probast = (_tables(facts, asked[name]) for name in ("tripod", "probast"))
    (known, items, still_open), (points, questions, _) = _progress(tripod), _progress(probast)
    lead = (
        f"{known} of {items} items of TRIPOD+AI and {points} of {questions} questions of PROBAST+AI are filled from "
        "records. The others are open: only people know them."
    )
    source = (
        "Numbers are those of TRIPOD+AI (Collins and others, BMJ 2024;385:e078378) and PROBAST+AI (Moons and others, "
        "BMJ 2025;388:e082505), compared with public copies of the published tables. The wording is ours: submit the "
        "statements' own forms."
    )
    gaps = f"Open in TRIPOD+AI: {', '.join(still_open)}."
    letters = "(D) is asked of the development of a model only, (E) of its evaluation only, the others of both."
    judge = "D is the quality of development, E the risk of bias in evaluation. Records are evidence; you judge."
    yield Part("about", "How far records go", [Text(lead), Text(gaps), Text(source)])
    yield Part("tripod", "TRIPOD+AI", [Text(letters), *tripod])
    yield Part("probast", "PROBAST+AI", [Text(judge), *probast])


def _tables(facts: Facts, asked: Mapping[str, Mapping[str, str]]) -> list[Table]:
    """A table for each section of a checklist: every item with what is known of it."""
    columns = text_columns("Item", "What is asked", "From the records")
    known = {key: fill(facts) for key, fill in _FILLS.items()}
    return [
        Table(title, columns, [[Cell(key), Cell(text), Cell(known.get(key) or OPEN)] for key, text in items.items()])
        for title, items in asked.items()
    ]


def _progress(tables: Sequence[Table]) -> tuple[int, int, list[str]]:
    """How many items are filled, how many there are, and the numbers of the open ones."""
    rows = [row for table in tables for row in table.rows]
    still_open = [item.text for item, _, record in rows if record.text == OPEN]
    return len(rows) - len(still_open), len(rows), still_open


def _steps(facts: Facts) -> Iterator[tuple[str, list[str]]]:
    """The steps of the cohort flow, each with its counts in words."""
    for step in facts.about.cohort_flow if facts.about else ():
        yield step.step, [f"{count(value)} {name.replace('_', ' ')}" for name, value in step.counts.items()]


def _flow(facts: Facts) -> str:
    return "; ".join(f"{step}: {', '.join(counts)}" for step, counts in _steps(facts))


def _sizes(facts: Facts) -> str:
    people, samples = facts.record.patients, facts.record.samples
    return "; ".join(
        f"{side}: {plural(getattr(people, key), 'patient')}, {plural(getattr(samples, key), 'sample')}"
        for side, key in (("training", "train"), ("validation", "val"), ("test", "test"))
    )


def _labels(facts: Facts) -> str:
    labels = facts.about.label_counts if facts.about else {}
    return listed([f"{name} {count(value)}" for name, value in list(labels.items())[:15]])


def _scores(facts: Facts) -> str:
    return "; ".join(
        f"{metric_name(name)} {number(value)}" + (f" (95% {around})" if (around := _around(facts, name)) else "")
        for name, value in facts.record.test.items()
    )


def _by_group(facts: Facts) -> str:
    groups = list(facts.predictions.subgroups) if facts.predictions else []
    return f"by {listed(groups)}: see the model card" if groups else ""


def _by_patient(facts: Facts) -> str:
    metric = facts.target.patient_metric
    known = [value for each in facts.record.per_patient.values() if (value := each.get(metric)) is not None]
    return worst_values(known, metric) if known else ""


def _unit(facts: Facts) -> str:
    return "site" if facts.record.config.split == "site" else "patient"


def _split(facts: Facts) -> str:
    return f"split by {_unit(facts)}, seed {facts.record.seed}; {_sizes(facts)}; test patients scored once"


def _training(facts: Facts) -> str:
    record = facts.record
    return (
        f"{algorithm_name(record.algorithm)} on {record.config.backbone}, {record.epochs} epochs of batch "
        f"{record.config.batch_size}; {record.selection_rule}; every setting is in run.json"
    )


def _outputs(facts: Facts) -> str:
    record = facts.record
    rule = record.threshold_rule + ("" if record.threshold is None else f" ({number(record.threshold)})")
    if facts.target.numeric:
        return "a value"
    stated = [f"probabilities of {listed(facts.target.spec.names[:8])}", f"decision: {rule}"]
    if (calibration := facts.calibration) is not None:
        people = plural(calibration.patients, "validation patient")
        stated.append(f"temperature {number(calibration.temperature)} and prediction sets fitted on {people}")
    return "; ".join(stated)


def _data_source(facts: Facts) -> str:
    return f"{facts.source} files, dataset fingerprint {facts.record.dataset_hash}" if facts.source else ""


def _unusable(facts: Facts) -> str:
    marks = "" if facts.calibration is None else "; patients unlike the training are marked"
    return f"a sample whose output is not finite gets no prediction and says why{marks}"


def _inputs(facts: Facts) -> str:
    return f"by the backbone {facts.record.config.backbone}, fitted on training patients only"


def _preparation(facts: Facts) -> str:
    return f"as source '{facts.source}' prepares, all patients alike; counts in study.json" if facts.source else ""


def _horizon(facts: Facts) -> str:
    event = facts.record.event
    return f"{event.name} within {event.horizon / event.day * 24:g} hours" if event is not None else ""


def _outcome(facts: Facts) -> str:
    named = f"{facts.target.kind}: {listed(facts.target.spec.names[:12])}"
    return f"{named}; {_horizon(facts) or 'no time horizon is recorded'} (how it was assessed is open)"


_FILLS: Mapping[str, Fill] = {
    "4": lambda _: "development, and evaluation on unseen patients of the same data",
    "5a": _data_source,
    "6a": lambda facts: f"{len(set(facts.record.sites.values()))} test sites" if facts.record.sites else "",
    "6b": _flow,
    "7": _preparation,
    "8a": _outcome,
    "10": lambda facts: f"{_sizes(facts)} (the justification is open)",
    "12a": _split,
    "12b": _inputs,
    "12c": _training,
    "12d": lambda facts: f"split by {_unit(facts)}; metrics and intervals patient by patient",
    "12e": lambda facts: listed([metric_name(name) for name in facts.record.test]),
    "12f": lambda _: "none: the model is not changed after its test",
    "12g": lambda facts: f"predict_proba of run {facts.record.run}, code {facts.record.code_version}",
    "15": _outputs,
    "16": lambda _: "the same dataset, other patients",
    "18f": lambda facts: f"manydg {facts.record.code_version}; model and record in the run folder",
    "20a": _flow,
    "21": lambda facts: _sizes(facts) + (f"; labels: {_labels(facts)}" if _labels(facts) else ""),
    "22": lambda _: "model.safetensors in the run folder; manydg export writes ONNX",
    "23a": lambda facts: "; ".join(filter(None, (_scores(facts), _by_group(facts)))),
    "23b": _by_patient,
    "24": lambda _: "none: the model is not changed after its test",
    "26": lambda facts: " ".join(_limits(facts)),
    "27a": _unusable,
    "D1.1": _data_source,
    "D1.3": _flow,
    "D2.2": _preparation,
    "D3.4": _horizon,
    "D4.1": _sizes,
    "D4.2": _inputs,
    "D4.5": lambda facts: f"{facts.record.selection_rule}; weight decay {facts.record.config.weight_decay:g}",
    "E1.1": _data_source,
    "E1.3": _flow,
    "E2.2": _preparation,
    "E3.4": _horizon,
    "E4.1": lambda facts: f"{plural(facts.record.patients.test, 'test patient')}, none of them trained on",
    "E4.2": _sizes,
    "E4.4": lambda _: "test patients are scored with all of their samples, as they are",
    "E4.5": lambda facts: f"{_split(facts)}; inputs scaled by training patients only",
    "E4.6": lambda facts: "every fold trains from the start" if facts.record.config.folds else "not used: one split",
    "E4.7": lambda facts: "; ".join(filter(None, (_scores(facts), _by_group(facts)))),
}
"""What records know of an item; an item that is not here, or of which nothing is known, is open."""
