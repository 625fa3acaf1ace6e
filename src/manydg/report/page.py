"""Results folder to page: chapters in order, numbered charts, one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import count as counting
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from manydg.errors import StorageError
from manydg.files import claimed, write_atomically
from manydg.report.charts import PREFIX, Panel
from manydg.report.results_folder import Chapter, ResultsFolder, by_algorithm, read_results_folder
from manydg.report.sections import Block, Bullets, Cell, Figure, Part, Table, Terms, Text, all_sections, text_columns
from manydg.report.words import MEANING, algorithm_name, algorithm_summary, listed, metric_name, plural, sentence

TITLE = "How well do models do on patients they have never seen?"
SYNTHETIC_TITLE = "Synthetic data: how well do models do on made-up patients they have never seen?"
_SYNTHETIC = "synthetic data"
_ABOUT_SYNTHETIC = (
    "The patients here are synthetic: made up by a program, not real people. The figures show how the methods work, "
    "not how they would do in a clinic, and the paper’s, which are of real patients, are not put beside them."
)
_FOOTER = (
    "Made by manydg from the records of {runs}. It holds no patient identifiers: patients appear by pseudonym. "
    "It is a research report and no basis for treating anyone."
)
_GLOSSARY = (
    (
        "Split",
        "One random division of the patients into those to learn from, those to choose settings with, and those to be "
        "judged on. Figures after ± are standard deviations over splits.",
    ),
    (
        "95% interval",
        "How far the figure might move with other patients of the same kind. It comes from drawing patients anew, a "
        "thousand times, and is wide where there are few.",
    ),
    (
        "p",
        "How often a difference at least this large would come up if there were none. Small values speak against "
        "chance; large values do not prove that two methods are equal.",
    ),
)
_METHODS = {
    "manydg": "Learns what is each patient’s own, and reads the label from the rest.",
    "base": "The network without any method for new patients, trained on all patients together.",
    "prototype": "Base with ManyDG’s output layer, and nothing else of ManyDG.",
    "manydg-random-pairs": "ManyDG whose pairs of samples are of any two patients: its central idea is missing.",
}
"""What the report says of the method, the plain model and the controls; the others say it of themselves."""
_ABOUT_CHARTS = (
    "Charts carry marks, dashes and hatches besides colour; “In words” under each tells its numbers. A table’s "
    "headings sort it."
)


@dataclass(frozen=True)
class ChapterPage:
    """A dataset's chapter, ready for the template."""

    id: str
    title: str
    summary: Sequence[Block]
    sections: Sequence[Part]
    missing: str


def write_report(results: str | Path, out: str | Path, reference: str | None = None) -> Path:
    """Write a results folder's report as one self-contained HTML page.

    Parameters
    ----------
    results : path
        A folder with ``results.jsonl``, as ``manydg compare`` and ``manydg experiment`` leave it.
    out : path
        The page to write; an earlier page is replaced only when the new one is complete.
    reference : str, optional
        The algorithm that the others are tested against; by default the one of ``compare --reference``, or ManyDG.

    Returns
    -------
    Path
        The page.
    """
    path = Path(out)
    if path.is_dir():
        raise StorageError(f"{path} is a folder; give the page's file name, as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise StorageError(f"the folder {path.parent} does not exist; make it first")
    with claimed(path):
        write_atomically(path, render(read_results_folder(results, reference)))
    return path


def render(results: ResultsFolder) -> str:
    """The page of a results folder, the same for the same records."""
    chapters = [_chapter(chapter, number) for number, chapter in enumerate(results.chapters, start=1)]
    footer = _FOOTER.format(runs=plural(results.finished_runs, "run"))
    meta = [f"Data: {listed([each.title for each in results.chapters])}", plural(results.finished_runs, "finished run")]
    meta += [f"results of {results.created}"] if results.created else []
    return document(_title(results), " · ".join(meta), chapters, _reading(results), _reproduce(results), footer)


def document(
    title: str,
    meta: str,
    chapters: Sequence[ChapterPage],
    reading: Sequence[Block],
    reproduce: Sequence[Block],
    footer: str,
) -> str:
    """Chapters as one HTML page that needs no network; without blocks there are no chapters on reading and remaking."""
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True)
    numbers = counting(1)
    return environment.from_string(_asset("page.jinja")).render(
        title=title,
        meta=meta,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        css=Markup(_asset("page.css")),
        script=Markup(script),
        chapters=chapters,
        reading=reading,
        reproduce=reproduce,
        footer=footer,
        counter=lambda: next(numbers),
        chart=_chart,
    )


def _asset(name: str) -> str:
    return files("manydg.report").joinpath(name).read_text(encoding="utf-8")


def _chart(panel: Panel, number: int) -> Markup:
    """A panel's SVG with ids of its own, named by its title and described by its words."""
    opening = f'<svg role="img" aria-labelledby="figure-{number}" aria-describedby="figure-{number}-words" '
    svg = panel.svg.replace(PREFIX, f"figure-{number}-")
    return Markup(svg.replace("<svg ", opening, 1))


def _title(results: ResultsFolder) -> str:
    """The page's question; synthetic data are named in it."""
    synthetic = [chapter.dataset for chapter in results.chapters if chapter.synthetic]
    if len(synthetic) == len(results.chapters):
        return SYNTHETIC_TITLE
    return f"{TITLE} ({listed(synthetic)}: {_SYNTHETIC})" if synthetic else TITLE


def _chapter(chapter: Chapter, number: int) -> ChapterPage:
    placed = [
        (section.order if part.order is None else part.order, part)
        for section in all_sections()
        for part in section.build(chapter)
    ]
    parts = [part for _, part in sorted(placed, key=lambda pair: pair[0])]
    if chapter.synthetic:
        parts = [replace(part, blocks=[_called_synthetic(block) for block in part.blocks]) for part in parts]
    shown = {part.name for part in parts}
    missing = [name for section in all_sections() for name in section.expected if name not in shown]
    return ChapterPage(f"data-{number}", chapter.title, _summary(chapter), parts, listed(missing))


def _called_synthetic(block: Block) -> Block:
    """A table or figure whose title says that its data are synthetic."""
    if not isinstance(block, Table | Figure):
        return block
    text = block.caption.removesuffix(".")
    return replace(block, caption=f"{text} ({_SYNTHETIC}){'.' if text != block.caption else ''}")


def _summary(chapter: Chapter) -> list[Block]:
    """The chapter in a few sentences, for readers who read no further."""
    about: list[Block] = [Text(_ABOUT_SYNTHETIC)] if chapter.synthetic else []
    headline = next((text for section in all_sections() if (text := section.headline(chapter))), "")
    if not headline:
        done = list(dict.fromkeys(record.experiment for record in chapter.uses()))
        shown = listed(done) or "no finished run"
        return [*about, Text(f"The methods were not compared here; this page shows {shown}.")]
    decision = [block for section in all_sections() for block in section.first_screen(chapter)]
    if chapter.synthetic:
        decision = [_called_synthetic(block) for block in decision]
    findings = [sentence(text) for section in all_sections() for text in section.findings(chapter)]
    more: list[Block] = [Text("What else was found", "label")] if decision and findings else []
    return [*about, Text(headline, "finding"), *decision, *more, Bullets(findings)]


def _reading(results: ResultsFolder) -> list[Block]:
    metrics = dict.fromkeys(name for chapter in results.chapters for name in chapter.target.metrics)
    terms = [(sentence(metric_name(name)), MEANING[name]) for name in metrics if name in MEANING]
    names = by_algorithm(record for chapter in results.chapters for record in chapter.records if record.ok)
    meanings = {algorithm_name(name): _METHODS.get(name) or algorithm_summary(name) for name in names}
    methods = [(name, meaning) for name, meaning in meanings.items() if meaning]
    return [Terms([*terms, *_GLOSSARY, *methods]), Text(_ABOUT_CHARTS, "note")]


def _reproduce(results: ResultsFolder) -> list[Block]:
    rows: list[list[Cell]] = []
    for chapter in results.chapters:
        shown = set(chapter.experiments())
        commands = {name: command for name, command in chapter.commands.items() if name in shown}
        rows += [[Cell(chapter.title), Cell(name), Cell(command)] for name, command in commands.items()]
    blocks: list[Block] = [
        Text(
            "The same code, data and seed give the same figures on the same kind of machine. Runs that are already in "
            "the results folder are not run again."
        )
    ]
    if rows:
        blocks.append(Table("Commands", text_columns("Data", "Experiment", "Command"), rows))
    version = f" The runs were made with manydg {results.code_version}." if results.code_version else ""
    blocks.append(Text(f"This page: manydg report RESULTS --out report.html.{version}", "note"))
    return blocks
