"""Study to page: chapters in order, numbered drawings, one HTML file that asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count as counting
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from manydg.errors import StorageError
from manydg.files import write_atomically
from manydg.report.charts import PREFIX, Panel
from manydg.report.content import Block, Cell, Column, Section, Table, Terms, Text
from manydg.report.sections import compare as comparing
from manydg.report.sections import data as data
from manydg.report.sections import model as model
from manydg.report.sections.experiments import EXPERIMENTS, experiment
from manydg.report.sections.inside import INSIDE, inside
from manydg.report.sections.paper import paper
from manydg.report.study import Chapter, Study, compare, read_study
from manydg.report.words import MEANING, listed, metric_name, plural, sentence

TITLE = "How well do models do on patients they have never seen?"
EXPECTED = tuple(
    name
    for name in ("compare", *EXPERIMENTS, *INSIDE)
    if name not in ("context", "context-rivals", "cold-start", "patient-probe", "embedding")
)
"""What the table of contents names as not run where it is missing."""
_FOOTER = (
    "Made by manydg from the records of {runs}. It holds no patient identifiers: patients appear by pseudonym. "
    "It is a research report and no basis for treating anyone."
)
_TOLD_ELSEWHERE = {"compare", "train", *INSIDE}


@dataclass(frozen=True)
class Written:
    """A chapter ready for the page."""

    id: str
    title: str
    summary: Sequence[Block]
    sections: Sequence[Section]
    missing: str


def write_report(results: str | Path, out: str | Path) -> Path:
    """Write a results folder's report as one self-contained HTML page.

    Parameters
    ----------
    results : path
        A folder with ``results.jsonl``, as ``manydg compare`` and ``manydg experiment`` leave it.
    out : path
        The page to write; what was there is replaced only when the new page is whole.

    Returns
    -------
    Path
        The page.
    """
    page = render(read_study(results))
    place = Path(out)
    if place.is_dir():
        raise StorageError(f"{place} is a folder; give the page's file name, as {place / 'report.html'}")
    if not place.parent.is_dir():
        raise StorageError(f"the folder {place.parent} does not exist; make it first")
    write_atomically(place, page)
    return place


def render(study: Study) -> str:
    """The page of a study, the same for the same records."""
    chapters = [_chapter(chapter, place) for place, chapter in enumerate(study.chapters, start=1)]
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True)
    numbers = counting(1)
    return environment.from_string(_asset("page.jinja")).render(
        title=TITLE,
        meta=_meta(study),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        css=Markup(_asset("page.css")),
        script=Markup(script),
        chapters=chapters,
        reading=_reading(study),
        reproduce=_reproduce(study),
        footer=_FOOTER.format(runs=plural(_runs(study), "run")),
        counter=lambda: next(numbers),
        drawing=_drawing,
    )


def _asset(name: str) -> str:
    return files("manydg.report").joinpath(name).read_text(encoding="utf-8")


def _drawing(panel: Panel, number: int) -> Markup:
    """The panel's drawing with ids of its own, named by its title and described by its words."""
    named = f'<svg role="img" aria-labelledby="figure-{number}" aria-describedby="figure-{number}-words" '
    drawn = panel.svg.replace(PREFIX, f"figure-{number}-")
    return Markup(drawn.replace("<svg ", named, 1))


def _meta(study: Study) -> str:
    names = listed([chapter.dataset for chapter in study.chapters])
    parts = [f"Data: {names}", plural(_runs(study), "finished run")]
    parts += [f"results of {study.created}"] if study.created else []
    parts += [f"code {study.code_version}"] if study.code_version else []
    return " · ".join(parts)


def _runs(study: Study) -> int:
    return sum(record.ok for chapter in study.chapters for record in chapter.records)


def _chapter(chapter: Chapter, place: int) -> Written:
    comparison = compare(chapter)
    others = [name for name in dict.fromkeys(_experiments(chapter)) if name not in {*EXPERIMENTS, *_TOLD_ELSEWHERE}]
    makers: list[Callable[[], Section | None]] = [
        lambda: data.question(chapter),
        lambda: data.cohort(chapter),
        lambda: comparing.main_results(chapter, comparison) if comparison else None,
        lambda: paper(chapter, comparison),
        lambda: model.patients(chapter),
        lambda: model.confusion(chapter),
        lambda: model.reliability(chapter),
        lambda: model.learning(chapter),
        *(lambda name=name: experiment(chapter, name) for name in EXPERIMENTS if name != "runtime"),
        *(lambda name=name: inside(chapter, name) for name in INSIDE),
        *(lambda name=name: experiment(chapter, name) for name in (*others, "runtime")),
        lambda: data.failures(chapter),
    ]
    sections = [section for make in makers if (section := make()) is not None]
    shown = {section.name for section in sections}
    missing = listed([name for name in EXPECTED if name not in shown])
    return Written(f"data-{place}", chapter.dataset, comparing.summary(chapter, comparison), sections, missing)


def _experiments(chapter: Chapter) -> list[str]:
    ran = [record.experiment for record in chapter.uses()]
    return ran + [figure.experiment for figure in chapter.figures]


def _reading(study: Study) -> list[Block]:
    metrics = dict.fromkeys(name for chapter in study.chapters for name in chapter.target.metrics)
    terms = [(sentence(metric_name(name)), MEANING[name]) for name in metrics if name in MEANING]
    return [Terms([*terms, *_GLOSSARY]), Text(_ABOUT_CHARTS, "note")]


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
    ("ManyDG", "Learns what is each patient’s own, and reads the label from the rest."),
    ("Base", "The same network, trained plainly."),
    ("Prototype head", "Base with ManyDG’s output layer, and nothing else of ManyDG."),
    ("ManyDG, random pairs", "ManyDG whose pairs of samples are of any two patients: its central idea is missing."),
)
_ABOUT_CHARTS = (
    "Charts carry marks, dashes and hatches besides colour; “In words” under each tells its numbers. A click on a "
    "table’s heading sorts it."
)


def _reproduce(study: Study) -> list[Block]:
    rows: list[list[Cell]] = []
    for chapter in study.chapters:
        ran = {*_experiments(chapter)}
        told = {name: command for name, command in chapter.commands.items() if name in ran}
        rows += [[Cell(chapter.dataset), Cell(name), Cell(command)] for name, command in told.items()]
    blocks: list[Block] = [
        Text(
            "The same code, data and seed give the same figures on the same kind of machine. Runs that are already in "
            "the results folder are not run again."
        )
    ]
    if rows:
        columns = [Column(title, numeric=False) for title in ("Data", "Experiment", "Command")]
        blocks.append(Table("Commands", columns, rows))
    blocks.append(Text("This page: manydg report RESULTS --out report.html", "note"))
    return blocks
