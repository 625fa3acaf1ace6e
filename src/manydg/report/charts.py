"""The report's charts: bars, distributions, matrices, reliability, forests, lines, maps of embeddings.

Each function returns a panel: the drawing, its title, and what it shows in words. All have one style: a small panel,
legible in black and white, as SVG that is the same byte for byte.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from manydg.evaluation.trust import Reliability
from manydg.report.words import number
from manydg.studies.figure_data import Embedding, NormPairs, SimilarityRow

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
_WIDTH = 3.9
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
def canvas(height: float) -> Iterator[tuple[Canvas, Axes]]:
    """A figure of a height in inches in the report's style, with one pair of axes."""
    with mpl.rc_context(_STYLE):
        figure = Canvas(figsize=(_WIDTH, height), layout="constrained")
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
    # Only the ids that something refers to, with the prefix that makes them unique on a page.
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{PREFIX}{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r"(url\(#|href=\"#)([^\")]+)", rf"\g<1>{PREFIX}\2", text)
    text = re.sub(r"font: ([^;\"]*?)(\d[\d.]*px) [^;\"]+", rf"font: \1\2 {_FONTS}", text)
    for size in ("width", "height"):
        text = re.sub(rf"(?<=<svg )([^>]*?){size}=\"[\d.]+pt\" ?", r"\1", text)
    text = re.sub(r' xmlns:xlink="[^"]*"| xmlns="[^"]*"| version="1.1"', "", text).replace("xlink:href", "href")
    # Coordinates to a hundredth of a point: no eye sees more, and the page is half as large.
    long = re.compile(r"\d+\.\d{3,}")
    text = re.sub(
        r"<[^>]+>", lambda tag: long.sub(lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), tag[0]), text
    )
    return re.sub(r">\s+<", "><", text).strip()


# The charts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Item = TypeVar("Item")
_MIN_STATEMENTS = 10
"""A bin of a reliability curve with fewer statements is left out: its share would be noise."""
_LONG_NAME = 21
_DIGIT_WIDTH = 0.02
"""As a share of the width of a chart."""
_OTHERS_PER_PANEL = 4
_MAX_DOTS = 3000
_MAX_LINES = 6
_MAX_NAMED = 8
_SHORT_LABEL, _LONG_LABEL = 12, 22
SPLITS = {"train": "Training patients", "val": "Validation patients", "test": "Unseen patients"}
EMBEDDINGS = {
    "v": "Features v",
    "parallel": "Part of v along z",
    "orthogonal": "Part of v across z",
    "z": "Patient factor z",
}


def floats(values: Sequence[float | None]) -> FloatArray:
    """Numbers with NaN for what is undefined."""
    return np.array([np.nan if value is None else value for value in values], float)


def bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    x_label: str,
    *,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    digits: int = 3,
    foreground: Collection[str] | None = None,
) -> Panel:
    """Horizontal bars from zero, from the top down, each value at its bar's end.

    Bars in the ``foreground`` (all of them where it is not given) are solid, the others hatched.
    """
    mean = np.asarray(values, float)
    bottom = np.asarray(mean if low is None else low, float)
    top = np.asarray(mean if high is None else high, float)
    with canvas(0.75 + 0.32 * len(names)) as (figure, axes):
        position = np.arange(len(names))
        for row, (name, value) in enumerate(zip(names, mean, strict=True)):
            solid = foreground is None or name in foreground
            colour, hatch = (ACCENT, "") if solid else (MUTED, HATCH)
            axes.barh(row, value, height=0.66, color=colour, hatch=hatch, edgecolor="white", lw=0)
        spread = np.vstack([np.nan_to_num(mean - bottom), np.nan_to_num(top - mean)]).clip(min=0)
        if low is not None and spread.any():
            axes.errorbar(mean, position, xerr=spread, fmt="none", ecolor=INK, elinewidth=1.3, capsize=3)
        start, end = _bar_range(mean, bottom, top)
        for row, (value, edge) in enumerate(zip(mean, np.fmax(top, mean), strict=True)):
            text = number(value, digits)
            axes.text(max(edge, start) + 0.025 * (end - start), float(row), text, va="center", fontsize=8)
        axes.set(xlim=(start, end + 0.16 * (end - start)), xlabel=x_label)
        _name_rows(axes, [textwrap.fill(name, 22) for name in names])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        svg = to_svg(figure)
    return Panel(svg, title, f"{x_label}. " + _bar_words(names, mean, bottom, top, digits, with_range=low is not None))


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows from the top down, each with its name."""
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), list(names))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _bar_range(mean: FloatArray, low: FloatArray, high: FloatArray) -> tuple[float, float]:
    every = np.concatenate([mean, low, high])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    return min(0.0, float(every.min())), max(float(every.max()), 1e-9)


def _bar_words(
    names: Sequence[str], mean: FloatArray, low: FloatArray, high: FloatArray, digits: int, *, with_range: bool
) -> str:
    parts = []
    for name, value, down, up in zip(names, mean, low, high, strict=True):
        around = f" ({number(down, digits)} to {number(up, digits)})" if with_range else ""
        parts.append(f"{name}: {number(value, digits)}{around}")
    return "; ".join(parts) + "."


def distributions(title: str, groups: Mapping[str, FloatArray], x_label: str, worst: int = 10) -> Panel:
    """Every patient as a dot, with the middle half as a box, the median and the ``worst`` percentile marked."""
    kept = {name: values[np.isfinite(values)] for name, values in groups.items()}
    kept = {name: values for name, values in kept.items() if len(values)}
    random = np.random.default_rng(0)
    with canvas(1.15 + 0.42 * len(kept)) as (figure, axes):
        for row, values in enumerate(kept.values()):
            style = series_style(0 if row == 0 else 5)
            height = row + random.uniform(-0.24, 0.24, len(values))
            axes.plot(
                values, height, ls="", marker="o", ms=2.6, color=style.colour, alpha=0.45, mew=0, zorder=2,
                rasterized=len(values) > 400,
            )  # fmt: skip
            tenth, quarter, median, upper = np.quantile(values, [worst / 100, 0.25, 0.5, 0.75])
            axes.barh(row, upper - quarter, left=quarter, height=0.6, fc="none", ec=INK, lw=1.0, zorder=3)
            axes.vlines(median, row - 0.3, row + 0.3, color=INK, lw=2.2, zorder=4)
            axes.plot(tenth, row, marker="D", ms=5.5, mfc="white", mec=INK, mew=1.2, ls="", zorder=5)
        axes.set(xlabel=x_label)
        _name_rows(axes, list(kept))
        marks = [
            axes.plot([], [], marker="o", ls="", ms=3.5, color=QUIET)[0],
            axes.plot([], [], marker="|", ls="", ms=9, mew=2.2, color=INK)[0],
            axes.plot([], [], marker="D", ls="", ms=5.5, mfc="white", mec=INK, mew=1.2)[0],
        ]
        names = ["a patient", "median (box: middle half)", f"{worst}th percentile"]
        figure.legend(marks, names, loc="outside lower center", ncols=3, columnspacing=1.1, handletextpad=0.2)
        svg = to_svg(figure)
    words = x_label + "."
    for name, values in kept.items():
        tenth, median = np.quantile(values, [worst / 100, 0.5])
        words += f" {name}: {len(values)} patients, median {number(median)}, {worst}th percentile {number(tenth)}, "
        words += f"lowest {number(values.min())}, highest {number(values.max())}."
    return Panel(svg, title, words)


def confusion(title: str, matrix: npt.NDArray[np.int64], names: Sequence[str]) -> Panel:
    """Shares of each true class ``(K, K)``, rows the truth; every cell carries its percentage."""
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = len(names)
    with canvas(min(4.2, 1.5 + 0.5 * size)) as (figure, axes):
        axes.imshow(share, cmap=SEQUENTIAL, vmin=0, vmax=1.15, aspect="auto")
        for (row, column), value in np.ndenumerate(share if size <= 12 else np.zeros((0, 0))):
            colour = "white" if value > 0.55 else INK
            weight = "bold" if row == column else "normal"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", color=colour, fontsize=8, weight=weight)
        ticks = [name if len(name) < 12 else name[:11] + "\N{HORIZONTAL ELLIPSIS}" for name in names]
        axes.set_xticks(range(size), ticks, rotation=0 if max(map(len, ticks)) * size < 34 else 40)
        axes.set_yticks(range(size), ticks)
        axes.set(xlabel="predicted", ylabel="reference")
        axes.grid(visible=False)
        axes.tick_params(length=0)
        svg = to_svg(figure)
    recall = "; ".join(f"{name}: {share[i, i]:.0%} found" for i, name in enumerate(names))
    off = share - np.diag(np.diag(share))
    row, column = (int(index) for index in np.unravel_index(int(off.argmax()), off.shape))
    worst = f"The most frequent mix-up: {off[row, column]:.0%} of {names[row]} are called {names[column]}."
    return Panel(svg, title, f"{recall}. {worst}")


def agreement(title: str, truth: FloatArray, predicted: FloatArray, what: str) -> Panel:
    """Predicted against true values; on the dotted line they are equal."""
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    some = _some_samples(len(truth))
    with canvas(3.7) as (figure, axes):
        axes.plot([low, high], [low, high], color=QUIET, lw=1.0, ls=(0, (1, 2)))
        axes.scatter(truth[some], predicted[some], s=6, color=ACCENT, alpha=0.35, lw=0, rasterized=True)
        axes.set(xlabel=f"true {what}", ylabel=f"predicted {what}")
        svg = to_svg(figure)
    varies = truth.std() > 0 and predicted.std() > 0
    related = float(np.corrcoef(truth, predicted)[0, 1]) if varies else float("nan")
    spread = f"predictions are between {number(predicted.min(), 2)} and {number(predicted.max(), 2)}"
    true = f"true values between {number(truth.min(), 2)} and {number(truth.max(), 2)}"
    return Panel(svg, title, f"{len(truth):,} samples: {spread}, {true}; their correlation is {number(related, 2)}.")


def bland_altman(title: str, truth: FloatArray, predicted: FloatArray, what: str) -> Panel:
    """Error against the mean of predicted and true value, with the mean error and the 95% limits of agreement."""
    errors, middle = predicted - truth, (predicted + truth) / 2
    bias, spread = float(errors.mean()), 1.96 * float(errors.std(ddof=1) if len(errors) > 1 else 0.0)
    some = _some_samples(len(truth))
    with canvas(3.7) as (figure, axes):
        axes.scatter(middle[some], errors[some], s=6, color=ACCENT, alpha=0.35, lw=0, rasterized=True)
        axes.axhline(bias, color=INK, lw=1.2)
        for limit in (bias - spread, bias + spread):
            axes.axhline(limit, color=INK, lw=1.0, ls=(0, (4, 3)))
        axes.axhline(0, color=QUIET, lw=1.0, ls=(0, (1, 2)))
        axes.set(xlabel=f"mean of predicted and true {what}", ylabel="predicted minus true")
        svg = to_svg(figure)
    slope = float(np.corrcoef(truth, errors)[0, 1]) if truth.std() > 0 and errors.std() > 0 else float("nan")
    lean = "high values are predicted too low, low ones too high" if slope < -0.3 else ""
    words = f"Mean error {number(bias, 2)}; 95% limits of agreement {number(bias - spread, 2)} to " + (
        f"{number(bias + spread, 2)}. Correlation of the error with the true value {number(slope, 2)}"
    )
    return Panel(svg, title, f"{words}{': ' + lean if lean else ''}.")


def _some_samples(count: int) -> IntArray:
    """At most so many samples as a chart can show, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, _MAX_DOTS)).astype(np.int64))


def reliability_panels(title: str, curves: Mapping[str, Reliability], x_label: str, y_label: str) -> list[Panel]:
    """Reliability curves in panels: the first model in every panel, the others four by four."""
    return [reliability(name, dict(group), x_label, y_label) for name, group in _in_panels(title, list(curves.items()))]


def _in_panels(title: str, items: Sequence[Item]) -> list[tuple[str, list[Item]]]:
    """What each panel shows, and its title: all in one, or the first in every panel and the others four by four."""
    if len(items) <= _MAX_LINES:
        return [(title, list(items))]
    starts = range(1, len(items), _OTHERS_PER_PANEL)
    groups = [[items[0], *items[start : start + _OTHERS_PER_PANEL]] for start in starts]
    return [(f"{title} ({index} of {len(groups)})", group) for index, group in enumerate(groups, start=1)]


def reliability(title: str, curves: Mapping[str, Reliability], x_label: str, y_label: str) -> Panel:
    """Observed share against predicted probability; the diagonal is perfect calibration."""
    with canvas(3.9) as (figure, axes):
        axes.plot([0, 1], [0, 1], color=QUIET, lw=1.0, ls=(0, (1, 2)), label="perfect")
        for position, (name, curve) in enumerate(curves.items()):
            style, kept = series_style(position), curve.counts >= _MIN_STATEMENTS
            label = f"{name} ({number(curve.error)})"
            axes.plot(
                curve.stated[kept], curve.observed[kept], color=style.colour, marker=style.marker, ls=style.dash,
                label=label, markerfacecolor="white", markeredgewidth=1.2,
            )  # fmt: skip
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel=x_label, ylabel=y_label)
        figure.legend(
            loc="outside lower center", ncols=2, handlelength=3.0, title="(mean gap in brackets)", title_fontsize=8
        )
        svg = to_svg(figure)
    words = []
    for name, curve in curves.items():
        kept = curve.counts > 0
        gap = float(np.average((curve.stated - curve.observed)[kept], weights=curve.counts[kept]))
        lean = "too sure" if gap > 0.01 else "not sure enough" if gap < -0.01 else "neither too sure nor too unsure"
        error = f"expected calibration error {number(curve.error)}"
        words.append(f"{name}: {error}; on average {lean} ({abs(gap):.1%} off).")
    return Panel(svg, title, " ".join(words))


def forest(
    title: str, names: Sequence[str], means: Sequence[float], low: Sequence[float], high: Sequence[float], x_label: str
) -> Panel:
    """A dot with its interval for each method, from the top down; a dotted line marks the first mean."""
    mean, bottom, top = (np.asarray(values, float) for values in (means, low, high))
    with canvas(0.75 + 0.27 * len(names)) as (figure, axes):
        axes.axvline(mean[0], color=QUIET, lw=0.9, ls=(0, (1, 2)))
        for row in range(len(names)):
            style = series_style(0 if row == 0 else 5)
            axes.plot([bottom[row], top[row]], [row, row], color=style.colour, lw=1.6)
            axes.plot(mean[row], row, marker="o" if row else "D", color=style.colour, ms=6, ls="")
        axes.set(xlabel=x_label)
        _name_rows(axes, names)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        svg = to_svg(figure)
    known = bool(np.isfinite(bottom).any())
    return Panel(svg, title, f"{x_label}. " + _bar_words(names, mean, bottom, top, 3, with_range=known))


def rank_diagram(title: str, names: Sequence[str], ranks: Sequence[float], joined: Sequence[tuple[int, int]]) -> Panel:
    """Mean ranks from the best down; bars on the right join the rows that no test separates."""
    with canvas(0.75 + 0.27 * len(names)) as (figure, axes):
        right = max(ranks)
        axes.hlines(range(len(names)), 1, ranks, color=FAINT, lw=1.2)
        axes.plot(ranks, range(len(names)), ls="", marker="D", color=ACCENT, ms=5.5)
        for row, rank in enumerate(ranks):
            axes.annotate(f"{rank:.2f}", (rank, row), (6, 0), textcoords="offset points", va="center", fontsize=8)
        step = 0.05 * (right - 0.8)
        for position, (first, last) in enumerate(joined):
            x = right + (4.5 + 1.2 * position) * step
            axes.vlines(x, first - 0.18, last + 0.18, color=INK, lw=3.2)
        axes.set(xlim=(0.8, right + (5.5 + 1.2 * len(joined)) * step), xlabel="mean rank (1 is best)")
        _name_rows(axes, names)
        axes.set_xticks([tick for tick in range(1, len(names) + 1) if tick <= right + 0.5])
        svg = to_svg(figure)
    words = "; ".join(f"{name}: {number(rank, 2)}" for name, rank in zip(names, ranks, strict=True))
    alike = [f"{names[first]} to {names[last]}" for first, last in joined]
    shown = f"No difference could be shown among {'; '.join(alike)}" if alike else "Every two neighbours differ"
    return Panel(svg, title, f"Mean ranks: {words}. {shown}.")


@dataclass(frozen=True)
class Series:
    """A line with an optional band.

    - ``x``, ``mean`` (points,)
    - ``low``, ``high`` (points,)
    """

    name: str
    x: FloatArray
    mean: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None

    def words(self, digits: int = 3) -> str:
        """First, best and last value in a phrase."""
        known = np.flatnonzero(np.isfinite(self.mean))
        if not len(known):
            return f"{self.name}: no values"
        first, last = known[0], known[-1]
        if first == last:
            return f"{self.name}: {number(self.mean[last], digits)}"
        start, end = number(self.mean[first], digits), number(self.mean[last], digits)
        return f"{self.name}: {start} at {_plain(self.x[first])}, {end} at {_plain(self.x[last])}"


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    scale: str = "linear",
    y_scale: str = "linear",
    limits: tuple[float, float] | None = None,
) -> Panel:
    """Lines over a numeric axis, with the legend below; a line's position decides its style."""
    legend_rows = len(series) if max(len(line.name) for line in series) > _LONG_NAME else (len(series) + 1) // 2
    with canvas(2.8 + 0.17 * legend_rows) as (figure, axes):
        for position, line in enumerate(series):
            style = series_style(position)
            axes.plot(
                line.x, line.mean, color=style.colour, marker=style.marker, ls=style.dash, label=line.name,
                markevery=max(1, len(line.x) // 8), markerfacecolor="white", markeredgewidth=1.2,
            )  # fmt: skip
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=style.colour, alpha=0.13, lw=0)
        axes.set(xlabel=x_label, ylabel=y_label, xscale=scale, yscale=y_scale)
        if y_scale == "log":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        if scale == "log":
            _ticks_that_fit(axes, series)
        elif all(float(value).is_integer() for line in series for value in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if limits:
            axes.set_ylim(*limits)
        if len(series) > 1:
            columns = 1 if legend_rows == len(series) else 2
            figure.legend(loc="outside lower center", ncols=columns, handlelength=3.4, columnspacing=1.6)
        svg = to_svg(figure)
    return Panel(svg, title, f"{y_label} by {x_label}. " + "; ".join(line.words() for line in series) + ".")


def line_panels(
    title: str, series: Sequence[Series], x_label: str, y_label: str, scale: str = "linear", y_scale: str = "linear"
) -> list[Panel]:
    """Many lines in panels on one scale: the first series in every panel, the others four by four."""
    limits = common_limits([series], y_scale)
    return [
        lines(name, group, x_label, y_label, scale=scale, y_scale=y_scale, limits=limits)
        for name, group in _in_panels(title, series)
    ]


def _ticks_that_fit(axes: Axes, series: Sequence[Series]) -> None:
    values = sorted({float(value) for line in series for value in line.x}, reverse=True)
    span = np.log(values[0] / values[-1])
    ticks: list[float] = []
    for value in values:
        # From the largest down, skipping numbers that would touch.
        if not ticks or np.log(ticks[-1] / value) >= span * (len(_plain(ticks[-1])) + 1) * _DIGIT_WIDTH:
            ticks.append(value)
    axes.set_xticks(ticks, [_plain(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="x")


def _plain(value: float) -> str:
    """A number on an axis, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 and float(value).is_integer() else f"{value:g}"


def common_limits(groups: Sequence[Sequence[Series]], scale: str = "linear") -> tuple[float, float] | None:
    """One vertical range for panels that are to be compared."""
    parts = [part for group in groups for line in group for part in (line.mean, line.low, line.high)]
    values = np.concatenate([part[np.isfinite(part)] for part in parts if part is not None] or [np.zeros(0)])
    if not len(values):
        return None
    if scale == "log":
        low, high = _with_margin(np.log(values))
        return float(np.exp(low)), float(np.exp(high))
    return _with_margin(values)


def _with_margin(values: FloatArray) -> tuple[float, float]:
    """From the smallest to the largest, with a margin."""
    margin = 0.06 * (float(np.ptp(values)) or 0.1)
    return float(values.min()) - margin, float(values.max()) + margin


def embedding_maps(data: Embedding) -> list[Panel]:
    """Each map twice: coloured by label, then by patient (the eight with most samples, the rest grey)."""
    labels, patients = np.asarray(data.labels), np.asarray(data.patients)
    panels = []
    for part in data.panels:
        points = np.asarray(part.xy, float)
        name = EMBEDDINGS.get(part.name, part.name)
        for what, codes, names, probe in (
            ("label", labels, data.label_names, part.label_accuracy),
            ("patient", patients, data.pseudonyms, part.patient_accuracy),
        ):
            panels.append(_map(f"{name}, by {what}", points, codes, names, what, probe))
    return panels


def _map(
    title: str, points: FloatArray, codes: IntArray, names: Sequence[str], what: str, probe: float | None
) -> Panel:
    common = np.argsort(-np.bincount(codes, minlength=len(names)), kind="stable")[:_MAX_NAMED]
    with canvas(3.9) as (figure, axes):
        rest = ~np.isin(codes, common)
        if rest.any():
            axes.scatter(
                points[rest, 0], points[rest, 1], s=5, color=FAINT, marker="o", lw=0, label="others", rasterized=True
            )
        shown = [str(name) for name in names]
        shown = [each if len(each) <= _LONG_LABEL else f"{each[: _LONG_LABEL - 1]}…" for each in shown]
        for position, code in enumerate(sorted(common)):
            members = codes == code
            if members.any():
                x, y = points[members].T
                axes.scatter(
                    x, y, s=9, color=COLOURS[position], marker=MARKERS[position], lw=0, alpha=0.6,
                    label=shown[code], rasterized=True,
                )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(FAINT)
        columns = 3 if max(len(str(names[code])) for code in common) <= _SHORT_LABEL else 2
        figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.1, columnspacing=0.9, markerscale=1.6)
        svg = to_svg(figure)
    # The share of the points' variance that is between groups.
    counts = np.maximum(np.bincount(codes), 1)
    means = np.stack([np.bincount(codes, weights=points[:, axis]) / counts for axis in (0, 1)], axis=1)
    total, within = (float(np.square(points - middle).sum()) for middle in (points.mean(axis=0), means[codes]))
    share = 1.0 - within / total if total > 0 else 0.0
    words = f"{len(points):,} samples. The {what} explains {share:.0%} of the spread of the points."
    if probe is not None:
        words += f" A linear model names the {what} from it with accuracy {number(probe)}."
    return Panel(svg, title, words)


def norms_scatter(data: NormPairs) -> list[Panel]:
    """Norm of the part along z against the norm of the part at right angles, one panel per split."""
    norms = {split.name: np.array([split.parallel, split.orthogonal], float).T for split in data.splits}
    splits = [(name, pairs[np.isfinite(pairs).all(axis=1)]) for name, pairs in norms.items()]
    top = max((float(pairs.max()) for _, pairs in splits if len(pairs)), default=1.0) * 1.05
    return [_norms(name, pairs, top, position) for position, (name, pairs) in enumerate(splits) if len(pairs)]


def _norms(name: str, pairs: FloatArray, top: float, position: int) -> Panel:
    style = series_style(position)
    with canvas(3.7) as (figure, axes):
        axes.plot([0, top], [0, top], color=QUIET, lw=1.0, ls=(0, (1, 2)))
        axes.scatter(
            pairs[:, 0], pairs[:, 1], s=6, color=style.colour, marker=style.marker, alpha=0.35, lw=0, rasterized=True
        )
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="norm of the part along z", ylabel="norm of the part across z")
        svg = to_svg(figure)
    medians = np.median(pairs, axis=0)
    larger = float((pairs[:, 0] > pairs[:, 1]).mean())
    varies = len(pairs) > 2 and pairs.std(axis=0).min() > 0
    related = float(np.corrcoef(pairs[:, 0], pairs[:, 1]).ravel()[1]) if varies else float("nan")
    words = (
        f"{len(pairs):,} samples. Median norm {number(medians[0], 2)} along z and {number(medians[1], 2)} across it; "
        f"the part along z is the larger in {larger:.0%} of samples; correlation of the two {number(related, 2)}."
    )
    return Panel(svg, SPLITS.get(name, name), words)


def similarity_dots(rows: Sequence[SimilarityRow]) -> Panel:
    """Mean cosine of z within and across patients, a pair of dots per row."""
    with canvas(1.25 + 0.5 * len(rows)) as (figure, axes):
        for y, row in enumerate(rows):
            axes.plot(floats([row.within, row.across]), [y, y], color=FAINT, lw=3, zorder=1)
            _dot(axes, row.within, row.within_interval, "same patient", y, 0)
            _dot(axes, row.across, row.across_interval, "different patients", y, 1)
        axes.set(xlabel="mean cosine of z for two samples")
        _name_rows(axes, [row.name for row in rows])
        axes.margins(x=0.15)
        axes.ticklabel_format(axis="x", useOffset=False)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[:2], names[:2], loc="outside lower center", ncols=2)
        svg = to_svg(figure)
    cosines = [(row.name, number(row.within, 4), number(row.across, 4)) for row in rows]
    words = [f"{name}: {within} within a patient, {across} across patients." for name, within, across in cosines]
    return Panel(svg, "Similarity of z within and across patients", " ".join(words))


def _dot(
    axes: Axes, value: float | None, bounds: Sequence[float | None] | None, name: str, y: int, position: int
) -> None:
    style = series_style(position)
    if bounds and None not in bounds:
        axes.plot(floats(bounds), [y, y], color=INK, lw=1, zorder=2)
    axes.plot(floats([value]), y, color=style.colour, marker=style.marker, ms=8, ls="", label=name, zorder=3)
