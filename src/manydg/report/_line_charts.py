"""Lines over a numeric axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from manydg.report._drawing import WIDTH, Look, Panel, canvas, to_svg
from manydg.report._words import number

FloatArray = npt.NDArray[np.float64]
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
