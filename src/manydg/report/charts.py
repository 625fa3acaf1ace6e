"""How every chart looks: one small panel each, legible in black and white, as SVG that repeats byte for byte."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from manydg.evaluation.calibration import Reliability
from manydg.report.words import number
from manydg.studies.figure_data import Embedding, NormPairs, SimilarityRow, SplitNorms

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
"""Tells what is not in the foreground from what is, without colour."""
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
}
_FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


WIDTH = 3.9
"""Inches: narrow, so that a phone shows the letters at a size that can be read."""


@dataclass(frozen=True)
class Look:
    """Colour, marker and dash of one series."""

    colour: str
    marker: str
    dash: Any


def look(position: int) -> Look:
    """The look of the series at a position; the first is the one that stands out."""
    return Look(
        COLOURS[position % len(COLOURS)],
        MARKERS[position % len(MARKERS)],
        DASHES[position % len(DASHES)],
    )


@dataclass(frozen=True)
class Panel:
    """One chart.

    Parameters
    ----------
    svg : str
        The inside of a page: an ``svg`` element without its own title.
    title : str
        What it shows, in a few words.
    words : str
        The finding and its numbers for those who do not see the chart.
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
"""Stands at the head of every id in a panel's SVG; the page puts the panel's own number there."""


def to_svg(figure: Canvas) -> str:
    """The figure as an ``svg`` element without size, fonts or ids of its own."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _own_ids(text)
    text = re.sub(r"font: ([^;\"]*?)(\d[\d.]*px) [^;\"]+", rf"font: \1\2 {_FONTS}", text)
    text = re.sub(r"(?<=<svg )([^>]*?)(width|height)=\"[\d.]+pt\" ?", r"\1", text)
    text = re.sub(r"(?<=<svg )([^>]*?)(width|height)=\"[\d.]+pt\" ?", r"\1", text)
    text = re.sub(r' xmlns:xlink="[^"]*"| xmlns="[^"]*"| version="1.1"', "", text).replace("xlink:href", "href")
    text = re.sub(r"<[^>]+>", lambda tag: _LONG.sub(_rounded, tag[0]), text)
    return re.sub(r">\s+<", "><", text).strip()


_LONG = re.compile(r"\d+\.\d{3,}")


def _rounded(found: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point: no eye sees more, and the page is half as large."""
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _own_ids(text: str) -> str:
    """Keep only the ids that something refers to, and make them the figure's own."""
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{PREFIX}{found[1]}"' if found[1] in used else "", text)
    return re.sub(r"(url\(#|href=\"#)([^\")]+)", rf"\g<1>{PREFIX}\2", text)


# Charts of numbers by method: bars, distributions, matrices and reliability.


FloatArray = npt.NDArray[np.float64]
_FEWEST = 10
"""A bin of a reliability curve with fewer statements is not drawn: its share would be noise."""


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
    with canvas(WIDTH, 0.75 + 0.32 * len(names)) as (figure, axes):
        position = np.arange(len(names))
        for place, value in zip(position, mean, strict=True):
            solid = foreground is None or names[int(place)] in foreground
            colour, hatch = (ACCENT, "") if solid else (MUTED, HATCH)
            axes.barh(place, value, height=0.66, color=colour, hatch=hatch, edgecolor="white", lw=0)
        spread = np.vstack([np.nan_to_num(mean - bottom), np.nan_to_num(top - mean)]).clip(min=0)
        if low is not None and spread.any():
            axes.errorbar(mean, position, xerr=spread, fmt="none", ecolor=INK, elinewidth=1.3, capsize=3)
        start, end = _bar_range(mean, bottom, top)
        for place, value, edge in zip(position, mean, np.fmax(top, mean), strict=True):
            text = number(value, digits)
            axes.text(max(edge, start) + 0.025 * (end - start), float(place), text, va="center", fontsize=8)
        axes.set(xlim=(start, end + 0.16 * (end - start)), ylim=(len(names) - 0.4, -0.6), xlabel=x_label)
        axes.set_yticks(position, [textwrap.fill(name, 22) for name in names])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        svg = to_svg(figure)
    return Panel(svg, title, f"{x_label}. " + _bar_words(names, mean, bottom, top, digits, with_range=low is not None))


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


def distributions(title: str, groups: Mapping[str, FloatArray], x_label: str) -> Panel:
    """Every patient as a dot, with the middle half as a box, the median and the 10th percentile marked."""
    kept = {name: values[np.isfinite(values)] for name, values in groups.items()}
    kept = {name: values for name, values in kept.items() if len(values)}
    random = np.random.default_rng(0)
    with canvas(WIDTH, 1.15 + 0.42 * len(kept)) as (figure, axes):
        for place, values in enumerate(kept.values()):
            style = look(0 if place == 0 else 5)
            height = place + random.uniform(-0.24, 0.24, len(values))
            axes.plot(
                values, height, ls="", marker="o", ms=2.6, color=style.colour, alpha=0.45, mew=0, zorder=2,
                rasterized=len(values) > 400,
            )  # fmt: skip
            tenth, quarter, median, upper = np.quantile(values, [0.1, 0.25, 0.5, 0.75])
            axes.barh(place, upper - quarter, left=quarter, height=0.6, fc="none", ec=INK, lw=1.0, zorder=3)
            axes.vlines(median, place - 0.3, place + 0.3, color=INK, lw=2.2, zorder=4)
            axes.plot(tenth, place, marker="D", ms=5.5, mfc="white", mec=INK, mew=1.2, ls="", zorder=5)
        axes.set(ylim=(len(kept) - 0.5, -0.5), xlabel=x_label)
        axes.set_yticks(range(len(kept)), list(kept))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        marks = [
            axes.plot([], [], marker="o", ls="", ms=3.5, color=QUIET)[0],
            axes.plot([], [], marker="|", ls="", ms=9, mew=2.2, color=INK)[0],
            axes.plot([], [], marker="D", ls="", ms=5.5, mfc="white", mec=INK, mew=1.2)[0],
        ]
        names = ["a patient", "median (box: middle half)", "10th percentile"]
        figure.legend(marks, names, loc="outside lower center", ncols=3, columnspacing=1.1, handletextpad=0.2)
        svg = to_svg(figure)
    return Panel(svg, title, f"{x_label}. " + " ".join(_distribution_words(name, kept[name]) for name in kept))


def _distribution_words(name: str, values: FloatArray) -> str:
    tenth, median = np.quantile(values, [0.1, 0.5])
    return (
        f"{name}: {len(values)} patients, median {number(median)}, 10th percentile {number(tenth)}, "
        f"lowest {number(values.min())}, highest {number(values.max())}."
    )


def confusion(title: str, matrix: npt.NDArray[np.int64], names: Sequence[str]) -> Panel:
    """Shares of each true class ``(K, K)``, rows the truth; every cell carries its percentage."""
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = len(names)
    with canvas(WIDTH, min(4.2, 1.5 + 0.5 * size)) as (figure, axes):
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
    found = "; ".join(f"{name}: {share[i, i]:.0%} found" for i, name in enumerate(names))
    return Panel(svg, title, f"{found}. {_worst_mix(share, names)}")


def _worst_mix(share: FloatArray, names: Sequence[str]) -> str:
    off = share - np.diag(np.diag(share))
    row, column = (int(place) for place in np.unravel_index(int(off.argmax()), off.shape))
    return f"The most frequent mix-up: {off[row, column]:.0%} of {names[row]} are called {names[column]}."


def reliability(title: str, curves: Mapping[str, Reliability], x_label: str, y_label: str) -> Panel:
    """Observed share against predicted probability; the diagonal is perfect calibration."""
    with canvas(WIDTH, 3.9) as (figure, axes):
        axes.plot([0, 1], [0, 1], color=QUIET, lw=1.0, ls=(0, (1, 2)), label="perfect")
        for place, (name, curve) in enumerate(curves.items()):
            style, kept = look(place), curve.counts >= _FEWEST
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
    words = " ".join(_reliability_words(name, curve) for name, curve in curves.items())
    return Panel(svg, title, words)


def _reliability_words(name: str, curve: Reliability) -> str:
    kept = curve.counts > 0
    gap = float(np.average((curve.stated - curve.observed)[kept], weights=curve.counts[kept]))
    lean = "too sure" if gap > 0.01 else "not sure enough" if gap < -0.01 else "neither too sure nor too unsure"
    return f"{name}: expected calibration error {number(curve.error)}; on average {lean} ({abs(gap):.1%} off)."


def forest(
    title: str, names: Sequence[str], means: Sequence[float], low: Sequence[float], high: Sequence[float], x_label: str
) -> Panel:
    """A dot with its interval for each method, from the top down; the first method's mean is drawn through all."""
    mean, bottom, top = (np.asarray(values, float) for values in (means, low, high))
    with canvas(WIDTH, 0.75 + 0.27 * len(names)) as (figure, axes):
        axes.axvline(mean[0], color=QUIET, lw=0.9, ls=(0, (1, 2)))
        for place in range(len(names)):
            style = look(0 if place == 0 else 5)
            axes.plot([bottom[place], top[place]], [place, place], color=style.colour, lw=1.6)
            axes.plot(mean[place], place, marker="o" if place else "D", color=style.colour, ms=6, ls="")
        axes.set(ylim=(len(names) - 0.4, -0.6), xlabel=x_label)
        axes.set_yticks(range(len(names)), list(names))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        svg = to_svg(figure)
    known = bool(np.isfinite(bottom).any())
    return Panel(svg, title, f"{x_label}. " + _bar_words(names, mean, bottom, top, 3, with_range=known))


# Lines over a numeric axis.


_LONG_NAME = 21
_ROOM_OF_A_DIGIT = 0.02
"""As a share of the width of a chart."""


@dataclass(frozen=True)
class Series:
    """A line with an optional band.

    Parameters
    ----------
    name : str
    x, mean : (points,)
    low, high : (points,), optional
    look : Look
    """

    name: str
    x: FloatArray
    mean: FloatArray
    look: Look
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
    """Lines over a numeric axis, the legend under the chart."""
    lines_of_legend = len(series) if max(len(line.name) for line in series) > _LONG_NAME else (len(series) + 1) // 2
    with canvas(WIDTH, 2.8 + 0.17 * lines_of_legend) as (figure, axes):
        for line in series:
            style = line.look
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
            _plain_ticks(axes, series)
        elif all(float(value).is_integer() for line in series for value in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        if limits:
            axes.set_ylim(*limits)
        if len(series) > 1:
            _legend_below(figure, [line.name for line in series])
        svg = to_svg(figure)
    return Panel(svg, title, f"{y_label} by {x_label}. " + "; ".join(line.words() for line in series) + ".")


def _plain_ticks(axes: Axes, series: Sequence[Series]) -> None:
    values = sorted({float(value) for line in series for value in line.x}, reverse=True)
    span = np.log(values[0] / values[-1])
    ticks: list[float] = []
    for value in values:
        # From the largest on, as far as the numbers leave room for each other.
        if not ticks or np.log(ticks[-1] / value) >= span * (len(_plain(ticks[-1])) + 1) * _ROOM_OF_A_DIGIT:
            ticks.append(value)
    axes.set_xticks(ticks, [_plain(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="x")


def _plain(value: float) -> str:
    """A number on an axis, as one would write it."""
    return f"{value:,.0f}" if value >= 1000 and float(value).is_integer() else f"{value:g}"


def _legend_below(figure: Canvas, names: Sequence[str]) -> None:
    """Two columns where the longest name leaves room for them."""
    columns = 1 if max(map(len, names)) > _LONG_NAME else 2
    figure.legend(loc="outside lower center", ncols=columns, handlelength=3.4, columnspacing=1.6)


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


# Charts of the model's inside: maps of embeddings, the norms of their two parts, and similarity of patients.


_MOST_NAMED = 8
_SHORT, _LONGEST_LABEL = 12, 22
SIDES = {"train": "Training patients", "val": "Validation patients", "test": "Unseen patients"}
PANEL_NAMES = {
    "v": "Features v",
    "parallel": "Part of v along z",
    "orthogonal": "Part of v across z",
    "z": "Patient factor z",
}


def embedding_maps(data: Embedding) -> list[Panel]:
    """Each map twice: coloured by label, then by patient (the eight with most samples, the rest grey)."""
    labels, patients = np.asarray(data.labels), np.asarray(data.patients)
    panels = []
    for part in data.panels:
        points = np.asarray(part.xy, float)
        name = PANEL_NAMES.get(part.name, part.name)
        for what, codes, names, probe in (
            ("label", labels, data.label_names, part.label_accuracy),
            ("patient", patients, data.pseudonyms, part.patient_accuracy),
        ):
            panels.append(_map(f"{name}, by {what}", points, codes, names, what, probe))
    return panels


def _map(
    title: str, points: npt.NDArray[np.float64], codes: npt.NDArray[Any], names: Sequence[str], what: str, probe: Any
) -> Panel:
    common = np.argsort(-np.bincount(codes, minlength=len(names)), kind="stable")[:_MOST_NAMED]
    with canvas(WIDTH, 3.9) as (figure, axes):
        rest = ~np.isin(codes, common)
        if rest.any():
            axes.scatter(
                points[rest, 0], points[rest, 1], s=5, color=FAINT, marker="o", lw=0, label="others", rasterized=True
            )
        for place, code in enumerate(sorted(common)):
            mine = codes == code
            if mine.any():
                axes.scatter(
                    points[mine, 0], points[mine, 1], s=9, color=COLOURS[place], marker=MARKERS[place], lw=0, alpha=0.6,
                    label=_short(str(names[code])), rasterized=True,
                )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(FAINT)
        columns = 3 if max(len(str(names[code])) for code in common) <= _SHORT else 2
        figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.1, columnspacing=0.9, markerscale=1.6)
        svg = to_svg(figure)
    share = _explained(points, codes)
    words = f"{len(points):,} samples. The {what} explains {share:.0%} of the spread of the points."
    if probe is not None:
        words += f" A linear model names the {what} from it with accuracy {number(probe)}."
    return Panel(svg, title, words)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _explained(points: npt.NDArray[np.float64], codes: npt.NDArray[Any]) -> float:
    """Share of the points' variance that lies between groups."""
    counts = np.maximum(np.bincount(codes), 1)
    means = np.stack([np.bincount(codes, weights=points[:, axis]) / counts for axis in (0, 1)], axis=1)
    total = float(((points - points.mean(axis=0)) ** 2).sum())
    within = float(((points - means[codes]) ** 2).sum())
    return 1.0 - within / total if total > 0 else 0.0


def norms_scatter(data: NormPairs) -> list[Panel]:
    """Norm of the part along z against the norm of the part at right angles, one panel per split."""
    splits = [(split.name, _finite_pairs(split)) for split in data.splits]
    top = max((float(pairs.max()) for _, pairs in splits if len(pairs)), default=1.0) * 1.05
    return [_norms(name, pairs, top, place) for place, (name, pairs) in enumerate(splits) if len(pairs)]


def _finite_pairs(split: SplitNorms) -> npt.NDArray[np.float64]:
    pairs = np.column_stack([np.asarray(values, float) for values in (split.parallel, split.orthogonal)])
    kept: npt.NDArray[np.float64] = pairs[np.isfinite(pairs).all(axis=1)]
    return kept


def _norms(name: str, pairs: npt.NDArray[np.float64], top: float, place: int) -> Panel:
    style = look(place)
    with canvas(WIDTH, 3.7) as (figure, axes):
        axes.plot([0, top], [0, top], color=QUIET, lw=1.0, ls=(0, (1, 2)))
        axes.scatter(
            pairs[:, 0], pairs[:, 1], s=6, color=style.colour, marker=style.marker, alpha=0.35, lw=0, rasterized=True
        )
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="norm of the part along z", ylabel="norm of the part across z")
        svg = to_svg(figure)
    medians = np.median(pairs, axis=0)
    larger = float((pairs[:, 0] > pairs[:, 1]).mean())
    related = (
        float(np.corrcoef(pairs[:, 0], pairs[:, 1]).ravel()[1])
        if len(pairs) > 2 and pairs.std(axis=0).min() > 0
        else float("nan")
    )
    words = (
        f"{len(pairs):,} samples. Median norm {number(medians[0], 2)} along z and {number(medians[1], 2)} across it; "
        f"the part along z is the larger in {larger:.0%} of samples; correlation of the two {number(related, 2)}."
    )
    return Panel(svg, SIDES.get(name, name), words)


def _floats(values: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values], float)


def similarity_dots(rows: Sequence[SimilarityRow]) -> Panel:
    """Mean cosine of z within and across patients, a pair of dots per row."""
    with canvas(WIDTH, 1.25 + 0.5 * len(rows)) as (figure, axes):
        for place, row in enumerate(rows):
            axes.plot(_floats([row.within, row.across]), [place, place], color=FAINT, lw=3, zorder=1)
            _dot(axes, row.within, row.within_interval, "same patient", place, 0)
            _dot(axes, row.across, row.across_interval, "different patients", place, 1)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="mean cosine of z for two samples")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.15)
        axes.ticklabel_format(axis="x", useOffset=False)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[:2], names[:2], loc="outside lower center", ncols=2)
        svg = to_svg(figure)
    words = " ".join(
        f"{row.name}: {number(row.within, 4)} within a patient, {number(row.across, 4)} across patients."
        for row in rows
    )
    return Panel(svg, "Similarity of z within and across patients", words)


def _dot(
    axes: Axes, value: float | None, bounds: Sequence[float | None] | None, name: str, place: int, style: int
) -> None:
    drawn = look(style)
    if bounds and None not in bounds:
        axes.plot(_floats(bounds), [place, place], color=INK, lw=1, zorder=2)
    axes.plot(_floats([value]), place, color=drawn.colour, marker=drawn.marker, ms=8, ls="", label=name, zorder=3)
