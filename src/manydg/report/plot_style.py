"""The style of every chart: one small panel, legible in black and white, as SVG that is the same byte for byte."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

INK = "#1f2933"
QUIET = "#5b6770"
FAINT = "#d5dbe0"
ACCENT = "#0b5394"

# Okabe and Ito's colours, darkened where they would be weak on white; each goes with its own marker and dash.
COLOURS = ("#0b5394", "#b8420a", "#00735c", "#8a3f7c", "#8c6400", "#3f4a54", "#1c7ea6", "#6b1d1d")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
SEQUENTIAL = "Blues"
HATCH = "////"
"""Marks what is in the background, for readers who see no colour."""
MUTED = "#8d99a3"

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "manydg",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6eaed",
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
    "hatch.color": "white",
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    # A dollar in a name is a dollar, not the beginning of a formula.
    "text.parse_math": False,
}
_FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


WIDTH = 3.9
"""Inches: narrow, so that a phone shows the letters at a size that can be read."""


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker and dash of one series."""

    colour: str
    marker: str
    dash: Any


def series_style(position: int) -> SeriesStyle:
    """The style of the series at a position; the first is the most prominent."""
    return SeriesStyle(
        COLOURS[position % len(COLOURS)], MARKERS[position % len(MARKERS)], DASHES[position % len(DASHES)]
    )


@dataclass(frozen=True)
class Panel:
    """One chart.

    - ``svg``: An ``svg`` element without a title of its own.
    - ``title``: What it shows, in a few words.
    - ``words``: The result and its numbers, for readers who do not see the chart.
    """

    svg: str
    title: str
    words: str


@contextmanager
def canvas(width: float = WIDTH, height: float = 2.9) -> Iterator[tuple[Canvas, Axes]]:
    """A figure in the report's style with one pair of axes, in inches (a phone's screen is about 5 wide)."""
    with mpl.rc_context(_STYLE):
        figure = Canvas(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


PREFIX = "__panel__"
"""Begins every id in a panel's SVG; the page replaces it with the panel's number."""


def to_svg(figure: Canvas) -> str:
    """The figure as an ``svg`` element without size, fonts or ids of its own."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The text stays text: the reader's browser has the letters that this machine's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(
            buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _prefixed_ids(text)
    text = re.sub(r"font: ([^;\"]*?)(\d[\d.]*px) [^;\"]+", rf"font: \1\2 {_FONTS}", text)
    text = re.sub(r"(?<=<svg )([^>]*?)(width|height)=\"[\d.]+pt\" ?", r"\1", text)
    text = re.sub(r"(?<=<svg )([^>]*?)(width|height)=\"[\d.]+pt\" ?", r"\1", text)
    text = re.sub(r' xmlns:xlink="[^"]*"| xmlns="[^"]*"| version="1.1"', "", text).replace("xlink:href", "href")
    text = re.sub(r"<[^>]+>", lambda tag: _LONG.sub(_rounded, tag[0]), text)
    return re.sub(r">\s+<", "><", text).strip()


_LONG = re.compile(r"\d+\.\d{3,}")


def _rounded(number: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point: no eye sees more, and the page is half as large."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _prefixed_ids(text: str) -> str:
    """Keep only the ids that something refers to, with the prefix that makes them unique on a page."""
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{PREFIX}{match[1]}"' if match[1] in used else "", text)
    return re.sub(r"(url\(#|href=\"#)([^\")]+)", rf"\g<1>{PREFIX}\2", text)
