"""Runs folded over seeds: means by method, by variant, by epoch and by patient."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from manydg.report._study import Record

FIRST = ("manydg", "base", "prototype", "manydg-random-pairs")
"""Shown first, in this order: the method, the plain model and the two controls."""
Key = TypeVar("Key", bound=Hashable)
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (NaN for one value) and number of values."""

    mean: float
    sd: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - (0.0 if math.isnan(self.sd) else self.sd)

    @property
    def high(self) -> float:
        return self.mean + (0.0 if math.isnan(self.sd) else self.sd)


def spread(values: Iterable[float | None]) -> Spread:
    """Fold values over seeds; undefined ones are left out.

    Examples
    --------
    >>> spread([1.0, 3.0, None]).mean
    2.0
    """
    known = np.array([value for value in values if value is not None and math.isfinite(value)], float)
    if not len(known):
        return Spread(math.nan, math.nan, 0)
    return Spread(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan, len(known))


def grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    """Records by a key, keys in the order they are first met."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def by_algorithm(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by algorithm: ManyDG, Base and the controls first, then the rivals as they come."""
    groups = grouped(records, lambda record: str(record["algorithm"]))
    names = [name for name in FIRST if name in groups] + [name for name in groups if name not in FIRST]
    return {name: groups[name] for name in names}


def metric_spread(records: Iterable[Record], metric: str, side: str = "test") -> Spread:
    """A metric of several runs."""
    return spread((record.get(side) or {}).get(metric) for record in records)


def epoch_curve(records: Sequence[Record], pick: Callable[[Mapping[str, Any]], float | None]) -> tuple[FloatArray, ...]:
    """Epochs, and mean, low and high over runs at each: ``(epochs,)`` four times."""
    values: dict[int, list[float | None]] = {}
    for record in records:
        for entry in record.get("history") or []:
            values.setdefault(int(entry["epoch"]), []).append(pick(entry))
    folded = {epoch: spread(values[epoch]) for epoch in sorted(values)}
    folded = {epoch: found for epoch, found in folded.items() if found.count}
    columns = [(epoch, found.mean, found.low, found.high) for epoch, found in folded.items()]
    return tuple(np.array(columns, float).reshape(-1, 4).T)


def patient_means(records: Iterable[Record], metric: str) -> dict[str, float]:
    """Each patient's metric, the mean over the runs in which the patient was tested; undefined ones are left out."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, entry in (record.get("per_patient") or {}).items():
            value = entry.get(metric)
            if value is not None and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(found)) for name, found in values.items()}


def patient_samples(records: Iterable[Record]) -> dict[str, int]:
    """Each tested patient's number of samples."""
    counts: dict[str, int] = {}
    for record in records:
        counts |= {name: int(entry.get("samples") or 0) for name, entry in (record.get("per_patient") or {}).items()}
    return counts


def defined_metric(records: Sequence[Record], metrics: Sequence[str]) -> str | None:
    """The first metric that is defined for at least half of the tested patients; None where there is none."""
    people = len({name for record in records for name in record.get("per_patient") or {}})
    counts = {metric: len(patient_means(records, metric)) for metric in metrics}
    return next((metric for metric in metrics if people and counts[metric] >= people / 2), None)


def seconds_per_epoch(record: Record) -> float | None:
    """Mean seconds of an epoch, the first three left out where there are more; None where no time was noted."""
    seconds = [float(entry["seconds"]) for entry in record.get("history") or [] if entry.get("seconds") is not None]
    kept = seconds[3:] if len(seconds) > 3 else seconds
    return float(np.mean(kept)) if kept else None
