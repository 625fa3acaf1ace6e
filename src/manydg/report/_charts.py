"""Charts of numbers by method: bars, distributions, matrices and reliability."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import MaxNLocator

from manydg.evaluation.calibration import Reliability
from manydg.report._drawing import (
    ACCENT,
    HATCH,
    INK,
    MUTED,
    QUIET,
    SEQUENTIAL,
    WIDTH,
    Panel,
    canvas,
    look,
    to_svg,
)
from manydg.report._words import number

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
