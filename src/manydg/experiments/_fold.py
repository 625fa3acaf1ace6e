"""Folding records into figure data that the report draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]
Series = dict[str, dict[float, list[float]]]


def mean_curves(
    records: Sequence[Record], name_of: Callable[[Record], str], value_of: Callable[[Mapping[str, Any]], float | None]
) -> Series:
    """Values by name and epoch, over seeds."""
    found: Series = {}
    for record in records:
        for entry in record["history"]:
            value = value_of(entry)
            if value is not None:
                found.setdefault(name_of(record), {}).setdefault(entry["epoch"], []).append(value)
    return found


def curve(
    experiment: str, title: str, x: str, y: str, series: Series, *, note: str = "", scale: str = "linear"
) -> dict[str, Any]:
    """A ``curve`` figure: the mean over seeds of each series, with one standard deviation to each side."""
    places = sorted({place for points in series.values() for place in points})
    lines = []
    for name, points in series.items():
        values = [points.get(place, []) for place in places]
        mean = [float(np.mean(value)) if value else None for value in values]
        sd = [float(np.std(value, ddof=1)) if len(value) > 1 else 0.0 for value in values]
        low = [None if middle is None else middle - width for middle, width in zip(mean, sd, strict=True)]
        high = [None if middle is None else middle + width for middle, width in zip(mean, sd, strict=True)]
        lines.append({"name": name, "mean": mean, "low": low, "high": high})
    figure: dict[str, Any] = {
        "kind": "curve",
        "experiment": experiment,
        "title": title,
        "data": {"x": {"label": x, "values": places, "scale": scale}, "y": {"label": y}, "series": lines},
    }
    return {**figure, "note": note} if note else figure


def mean_and_sd(values: Sequence[float]) -> tuple[float | None, float]:
    """Mean and standard deviation of those that are defined; no mean where none is, no spread where there is one.

    Examples
    --------
    >>> mean_and_sd([1.0, float("nan"), 1.0])
    (1.0, 0.0)
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
