"""``manydg compare``, ``tune``, ``experiment``, ``paper``, ``demo``, ``report``, ``clinical``: what many runs say."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from manydg.cli._options import (
    Algorithms,
    AsJson,
    Dataset,
    Device,
    DryRun,
    EngineOptions,
    Log,
    PlainConsole,
    Reference,
    Repeats,
    Results,
    RunOrResults,
    RunSettings,
    Seeds,
    TrialLines,
    Tuned,
    Workers,
    command,
    command_line,
    compared,
    console,
    names_in,
    show_json,
    show_line,
    show_plan,
    show_table,
    study_board,
)
from manydg.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from manydg.evaluation.clinical import ClinicalResult
    from manydg.evaluation.statistics import Interval
    from manydg.files import Json
    from manydg.studies.paper import DataFolder, Scale
    from manydg.studies.settings import Options
    from manydg.studies.summary import Summary
    from manydg.studies.tuning import Tuning
    from manydg.synthetic import DemoPatients


def register(app: typer.Typer) -> None:
    """Add the commands to ``manydg``."""
    for function in (compare, tune, experiment, paper, report, checklist):
        listing = _WithExperiments if function is experiment else None
        app.command(cls=listing)(command(function))


class _WithExperiments(TyperCommand):
    """``manydg experiment``, whose help lists the experiments there are."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from manydg.studies.catalogue import EXPERIMENTS

        known = {name: inspect.getdoc(EXPERIMENTS.get(name)) or "" for name in EXPERIMENTS.names()}
        with formatter.section("Experiments"):
            formatter.write_dl([(name, text.partition("\n\n")[0].replace("\n", " ")) for name, text in known.items()])


def compare(
    dataset: Dataset,
    out: Results,
    *,
    algorithms: Algorithms = None,
    seeds: Seeds = 5,
    repeats: Repeats = None,
    settings: RunSettings,
    tuned: Tuned = None,
    reference: Reference = None,
    log: Log = None,
    device: Device = "auto",
    engine: EngineOptions,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Compare algorithms over several patient splits.

    Every algorithm is trained on every split, each run with a record in OUT/results.jsonl. The table gives means over
    splits, intervals over patients and paired tests. If the command is interrupted, run it again: no run is
    repeated.
    """
    from manydg.studies.records import read_results
    from manydg.studies.tracking import Tracker

    tracker = None if log is None or dry_run else Tracker.of(log)
    _conduct(
        "compare", dataset, out, compared(algorithms), seeds, repeats, settings, engine, device, dry_run, json, tuned,
        reference=reference,
    )  # fmt: skip
    if tracker is not None:
        console.print(f"logged {tracker.log(read_results(out))} runs to {tracker.uri}")


def tune(
    dataset: Dataset,
    out: Annotated[Path, typer.Option(help="Folder of the searches; trials already in it are not repeated.")],
    *,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each algorithm on each split, including the defaults.")],
    algorithms: Algorithms = None,
    seeds: Seeds = 5,
    settings: RunSettings,
    device: Device = "auto",
    engine: EngineOptions,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Search the settings of algorithms on validation patients.

    Every algorithm gets the same number of trials on every patient split. The first trial has the defaults, the others
    are drawn from the ranges that 'manydg show ALGORITHM' prints, and unpromising trials are stopped early. Test
    patients are not used: 'manydg compare --tuned OUT' scores them once, with the chosen settings. If the command is
    interrupted, run it again: no finished trial is repeated.
    """
    from manydg.algorithms import ALGORITHMS
    from manydg.files import claimed
    from manydg.studies.tuning import tune as search

    names = compared(algorithms)
    for algorithm in names:
        ALGORITHMS.trust(algorithm)
    options = settings.options(dataset)
    if dry_run:
        _show_searches(dataset, names, trials, seeds, options)
        return
    lines = TrialLines()
    with claimed(out), engine.in_use() as workers:
        tuning = search(
            dataset, names, out, trials=trials, seeds=seeds, options=options, workers=workers, device=device,
            command=command_line(), planned=lines.planned, ended=lines.ended,
        )  # fmt: skip
    if json:
        show_json(tuning.to_json())
        return
    _show_chosen(tuning, names)
    again = f"manydg compare {dataset} --algorithms {','.join(names)} --seeds {seeds} --tuned {out} --out RESULTS"
    console.print(f"wrote {out / 'tuning.json'}; next: '{again}', with the same options")


def _show_searches(dataset: Path, names: Sequence[str], trials: int, seeds: int, options: Options) -> None:
    """Print what would be searched for every algorithm, and how many trials that makes."""
    from manydg.studies.settings import spelled_out
    from manydg.studies.study import open_once
    from manydg.studies.tuning import search_space

    data = open_once(dataset)
    for name in names:
        space = search_space(spelled_out(options.of(name, 0), data))
        ranges = ", ".join(f"{setting} {values}" for setting, values in space.items())
        show_line(f"{name}: splits 0 to {seeds - 1}, {trials} trials each: {ranges}")
    show_line(f"{len(names) * seeds * trials:,} trials; nothing was written")


def _show_chosen(tuning: Tuning, names: Sequence[str]) -> None:
    """Print what every search chose, by how much it is better than the defaults, and what it cost."""
    for search in (each for each in tuning.searches if each.algorithm in names):
        if (best := search.chosen) is None:
            show_line(f"{search.name}: no trial was complete; see the errors above")
            continue
        gain = f"{search.base.selection} {best.score:.4f}, trial {best.number}"
        if best.number and (defaults := search.trials[0].score) is not None:
            gain += f" (defaults {defaults:.4f})"
        shown = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in best.values.items()}
        show_line(f"{search.name}: {gain}: " + " ".join(f"{name}={value}" for name, value in shown.items()))
    show_line(tuning.budget(names))


def experiment(
    name: Annotated[str, typer.Argument(help="One of those listed below.", show_default=False)],
    dataset: Dataset,
    out: Results,
    *,
    algorithms: Annotated[
        str | None,
        typer.Option(help="Algorithms to compare, if the experiment compares any.", show_default="those of the paper"),
    ] = None,
    seeds: Seeds = 5,
    repeats: Repeats = None,
    label_delay: Annotated[
        float,
        typer.Option(
            min=0, help="personalise: time until the label of a sample is known, in the unit of the dataset's times."
        ),
    ] = 0.0,
    settings: RunSettings,
    device: Device = "auto",
    engine: EngineOptions,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Run one of the experiments listed below on a dataset.

    Its runs are added to OUT/results.jsonl; a run that another experiment has already done is not repeated. If the
    command is interrupted, run it again.
    """
    chosen = None if algorithms is None else names_in(algorithms)
    _conduct(name, dataset, out, chosen, seeds, repeats, settings, engine, device, dry_run, json, None, label_delay)


def _conduct(
    name: str, dataset: Path, out: Path, algorithms: Sequence[str] | None, seeds: int, repeats: int | None,
    settings: RunSettings, engine: EngineOptions, device: str, dry_run: bool, as_json: bool,
    tuned: Path | None = None, label_delay: float = 0.0, reference: str | None = None,
) -> None:  # fmt: skip
    """Run an experiment and show the summary; without algorithms, with the paper's that make sense for the data."""
    from manydg.algorithms import ALGORITHMS, paper_methods
    from manydg.files import claimed
    from manydg.studies.conduct import conduct, fitting, make_request, plan_experiment, scaled_down
    from manydg.studies.settings import changed
    from manydg.studies.study import Study
    from manydg.studies.tuning import with_tuned

    for algorithm in algorithms or ():
        ALGORITHMS.trust(algorithm)
    options = settings.options(dataset)
    if repeats is not None:
        if seeds < 3:
            raise ConfigError(f"--repeats deals the patients into --seeds groups, {seeds} here: ask for 3 or more")
        options, seeds = changed(options, training={"folds": seeds}, backbone=None, sets={}), seeds * repeats
    request = make_request(name, dataset, options, seeds, paper_methods() if algorithms is None else algorithms)
    request = replace(request, label_delay=label_delay)
    if algorithms is None:
        used = {run.config.algorithm for run in plan_experiment(name, request)}
        kept = tuple(algorithm for algorithm in request.algorithms if algorithm in used)
        request = fitting(replace(request, algorithms=kept), console.print)
    if tuned is not None:
        chosen = with_tuned(options, tuned, request.dataset, request.algorithms, range(seeds))
        request = replace(request, options=chosen)
    if dry_run:
        if note := scaled_down(name, request):
            show_line(f"{name}: {note}")
        show_plan(Study(out, dataset, plan_experiment(name, request), dataset.resolve().name, device), engine.workers)
        return
    with claimed(out), engine.in_use() as workers:
        conducted = conduct(
            {name: request}, dataset, out, workers=workers, device=device, board=study_board(), tuned=tuned,
            command=command_line(), reference=reference, report=console.print,
        )  # fmt: skip
    show = _show_json if as_json else show_summaries
    show(out, conducted.summaries, conducted.files)


def _show_json(out: Path, summaries: Sequence[Summary], files: Sequence[Path]) -> None:
    """Print the numbers of a results folder."""
    show_json([_summary_json(summary) for summary in summaries])


def _summary_json(summary: Summary) -> Json:
    """The numbers of a table; null where one is undefined."""
    entries: list[Json] = [
        {
            "row": entry.row,
            "metric": entry.metric,
            "mean": _number(entry.mean),
            "sd": _number(entry.sd),
            "interval": None if entry.interval is None else [_number(entry.interval.low), _number(entry.interval.high)],
            "worst_tenth": _number(entry.worst_tenth),
            "values": {str(seed): _number(value) for seed, value in entry.values.items()},
        }
        for entry in summary.entries.values()
    ]
    return {
        "experiment": summary.experiment,
        "dataset": summary.dataset,
        "synthetic": summary.synthetic,
        "primary": summary.primary,
        "reference": summary.reference,
        "tested_patients": summary.tested_patients,
        "entries": entries,
        "notes": list(summary.notes),
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def show_summaries(out: Path, summaries: Sequence[Summary], files: Sequence[Path]) -> None:
    """Print the tables of a results folder and where their files are."""
    from manydg.studies.figure_data import FIGURES
    from manydg.studies.summary_text import recommendation_text

    screen = PlainConsole()
    for summary in summaries:
        screen.print(summary.to_rich(screen.width))
        if summary.experiment == "compare" and (advice := recommendation_text(summary)):
            show_line(advice)
    console.print(f"wrote {out / 'results.jsonl'}, " + ", ".join(map(str, files)))
    if (out / FIGURES).is_dir():
        console.print(f"the figures of experiments are in the page that 'manydg report {out}' writes", soft_wrap=True)


def paper(
    out: Annotated[Path, typer.Option(help="Folder for datasets, results and the report.", show_default=False)],
    *,
    raw: Annotated[Path | None, typer.Option(help="Folder with datasets, prepared or raw.", show_default=False)] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Use synthetic data in place of the paper's datasets.")
    ] = False,
    scale: Annotated[str, typer.Option(help="full, small or smoke: how many patients, splits and epochs.")] = "full",
    engine: EngineOptions,
    device: Device = "auto",
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Run all of the paper's experiments on all datasets.

    Raw files are recognised by their content and prepared first. All results are in one report, OUT/report.html. If the
    command is interrupted, run it again: finished parts are not repeated.
    """
    from manydg.files import claimed
    from manydg.report.page import write_report
    from manydg.studies.paper import gather, ready, run_paper, scale_named

    if (raw is None) == (not synthetic):
        raise ConfigError("say where the data are with --raw DIR, or --synthetic to make them up: one of the two")
    size, folder = scale_named(scale), raw or out / "synthetic"
    if dry_run:
        entries = gather(folder, synthetic, out, size, console.print)
        _show_paper_plan(entries, folder, out, size, engine.workers, device)
        return
    with claimed(out), claimed(out / "results"):
        entries = gather(folder, synthetic, out, size, console.print)
        chapters = ready(entries, folder, out, size, engine.workers, console.print)
        with engine.in_use() as workers:
            results = run_paper(
                chapters, out, workers=workers, device=device, board=study_board, command=command_line(),
                report=console.print,
            )  # fmt: skip
        page = write_report(results, out / "report.html")
    if json:
        show_json({"report": str(page), "results": str(results), "datasets": [chapter.name for chapter in chapters]})
    else:
        show_line(f"wrote {page}")


def _show_paper_plan(
    entries: Sequence[DataFolder], folder: Path, out: Path, size: Scale, workers: int, device: str
) -> None:
    """List the runs of every dataset that is prepared already."""
    from manydg.studies.paper import ready, unprepared

    waiting = unprepared(entries, out)
    for entry in waiting:
        show_line(f"{entry.name}: raw files in {entry.path}; its runs are known once it is prepared")
    rest = [entry for entry in entries if entry not in waiting]
    for chapter in ready(rest, folder, out, size, workers, console.print) if rest else []:
        show_line(f"{chapter.name}:")
        show_plan(chapter.study(out / "results", device), workers)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the dataset, the results and the report.")] = Path(
        "demo-results"
    ),
    patients: Annotated[int, typer.Option(min=20, help="Synthetic patients.")] = 240,
    seeds: Annotated[int, typer.Option(min=1, help="Patient splits.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 12,
    workers: Workers = 2,
    device: Device = "auto",
    json: AsJson = False,
) -> None:
    """Compare models on synthetic patients with a known optimum.

    Base, boosting and ManyDG are trained with and without patient context (each patient's other samples, without
    labels) and tested on unseen patients. A report is written at the end. Nothing is downloaded, and it takes about two
    minutes on two cores.
    """
    from manydg.config import TrainingConfig
    from manydg.files import claimed
    from manydg.report.page import write_report
    from manydg.studies.conduct import conduct, make_request
    from manydg.synthetic import DemoPatients

    made, folder = DemoPatients.draw(patients), out / "dataset"
    with claimed(out):
        dataset = made.dataset()
        dataset.save(folder, overwrite=True)
        console.print(
            f"{len(dataset):,} samples of {patients} synthetic patients; {int(made.is_new.sum())} of the patients are "
            "new: nobody trains on them, and a feature that helps on the others misleads there"
        )
        options = TrainingConfig(epochs=epochs, lr=1e-3)
        request = make_request("context-rivals", folder, options, seeds, ("base", "boosting", "manydg"))
        conducted = conduct(
            {"context-rivals": request}, folder, out, title="demo", workers=workers, device=device,
            board=study_board(), command=command_line(), report=console.print,
        )  # fmt: skip
        page = write_report(out, out / "report.html")
    if json:
        _show_json(out, conducted.summaries, conducted.files)
        return
    show_summaries(out, conducted.summaries, conducted.files)
    for line in what_the_demo_shows(conducted.summaries, made):
        show_line(line)
    show_line(f"report: open {page} in any browser; next: 'manydg prepare --help' for data of your own")


def what_the_demo_shows(summaries: Sequence[Summary], made: DemoPatients) -> list[str]:
    """What the table of the demonstration means, beside the best scores that are possible."""
    from manydg.evaluation.metrics import score
    from manydg.studies.catalogue.context_value import WITHOUT
    from manydg.targets import target_of

    target, truth = target_of(made.dataset().target), made.label[made.is_new[made.patient]]
    alone, known = (
        score(target, truth, made.best_possible(knowing_the_patient=knows))["kappa"] for knows in (False, True)
    )
    # The folder may hold other results too.
    summary = next(each for each in summaries if (each.dataset, each.experiment) == ("demo", "context-rivals"))
    rows = {row: summary.entries[row, "kappa"].mean for row in summary.rows}
    without = {row: mean for row, mean in rows.items() if WITHOUT in row}
    best = max(without, key=lambda row: without[row])
    context = max(rows.keys() - without.keys(), key=lambda row: rows[row])
    return [
        "What it means: kappa is agreement with the truth beyond chance, here on patients that no model has seen.",
        f"From one sample alone, the best possible rule reaches {alone:.3f}; the best learner, {best}, reaches "
        f"{rows[best]:.3f}.",
        f"Knowing the patient, the best possible rule reaches {known:.3f}; the best learner that is shown the "
        f"patient's other unlabelled samples, {context}, reaches {rows[context]:.3f}.",
    ]


def checklist(
    run: RunOrResults,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, .md or .html.")] = Path("checklists.md"),
    json: AsJson = False,
) -> None:
    """Fill in TRIPOD+AI and PROBAST+AI as far as records allow.

    The other items are marked open and listed, for you to fill in.
    """
    from manydg.report.card import write_checklist

    written = write_checklist(run, out)
    show_json({"checklists": str(written)}) if json else show_line(f"wrote {written}")


def report(
    results: Annotated[Path, typer.Argument(help="Results folder written by 'compare' or 'experiment'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The report to write.")] = Path("report.html"),
    reference: Reference = None,
    latex: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tex", help="Also write the tables for LaTeX (booktabs).", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a report that recommends a model and says why.

    The report is one HTML file that makes no network requests. RESULTS is a folder written by 'compare' or
    'experiment'.
    """
    from manydg.files import claimed, write_atomically
    from manydg.report.page import write_report
    from manydg.studies.summary import summarize_folder

    page = write_report(results, out, reference)
    if not json:
        show_line(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB): open it in any browser")
    if latex is not None:
        with claimed(latex):
            write_atomically(latex, "\n".join(summary.to_latex() for summary in summarize_folder(results, reference)))
        if not json:
            show_line(f"wrote {latex}: \\input it, with \\usepackage{{booktabs}}")
    if json:
        show_json({"report": str(page), "bytes": page.stat().st_size, "latex": None if latex is None else str(latex)})


def clinical(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run, or results folder.", show_default=False)],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Choose each run's threshold again on its validation patients: sensitivity=.9, precision=.5 or "
            "alarms=1/day.",
            show_default="the run's own",
        ),
    ] = None,
    silence: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Minimum time between two alarms, such as 6h.", show_default="the run's"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show alarms, decisions and groups of patients.

    For test patients, with 95% intervals over patients: rates at the threshold; for events, how many are caught within
    a budget of false alarms; and each group of the columns given by 'prepare --subgroup'.
    """
    from manydg.studies.summary import clinical_results

    results = clinical_results(folder, at=at, silence=silence)
    if json:
        show_json({name: result.to_json() for name, result in results.items()})
        return
    _show_clinical(PlainConsole(soft_wrap=True), results)


def _show_clinical(screen: Console, results: Mapping[str, ClinicalResult]) -> None:
    from manydg.evaluation.clinical import RATE_NAMES
    from manydg.studies.summary_text import p_text

    screen.print(
        "Test patients; brackets are 95% intervals over patients (over sites, then patients, where whole sites were "
        "split). 'manydg report' has curves and net benefit."
    )
    rates = {
        name: {RATE_NAMES[key]: value for key, value in each.at_threshold.items()} for name, each in results.items()
    }
    said = [each.rule.split("; ") for each in results.values() if each.at_threshold]
    rules = "; ".join(dict.fromkeys(rule for each in said for rule in each))
    _models(screen, "At the threshold" + (f": {rules}" if rules else ""), rates)
    caught = {
        name: {f"{point.at:g}": point.value for point in each.alarms.get("events_caught", [])}
        for name, each in results.items()
    }
    _models(screen, "Events caught, by false alarms per patient-day", caught)
    for name, result in results.items():
        for column, groups in result.subgroups.items():
            metric = next(iter(groups[0].values))
            head = ["group", "patients", metric, "p", "probability - truth"]
            rows = []
            for group in groups:
                p = group.p.get(metric)
                cells = [_bounds(group.values[metric]), "" if p is None else p_text(p)]
                rows.append([group.group, str(group.patients), *cells, _bounds(group.values["calibration"])])
            show_table(screen, f"{column}: {name} (p: against the largest group, Holm)", head, rows)


def _models(screen: Console, title: str, values: Mapping[str, Mapping[str, Interval]]) -> None:
    """A table with a column for each model that has any of the numbers; none where no model has."""
    shown = {name: each for name, each in values.items() if each}
    rows = max(shown.values(), key=len, default={})
    if rows:
        cells = [[row, *(_bounds(each.get(row)) for each in shown.values())] for row in rows]
        show_table(screen, title, ["", *shown], cells)


def _bounds(value: Interval | None) -> str:
    from manydg.studies.summary_text import NONE

    if value is None or math.isnan(value.estimate):
        return NONE
    known = not math.isnan(value.low)
    return f"{value.estimate:.3f}" + (f" [{value.low:.3f}, {value.high:.3f}]" if known else "")
