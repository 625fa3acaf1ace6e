"""Stages of a night as other programs want them: EDF+ annotations, a table, and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

EPOCH_SECONDS = 30
_WORDS = {name: f"Sleep stage {name}" for name in ("W", "N1", "N2", "N3")} | {"REM": "Sleep stage R"}
_HEIGHT = {"W": 4, "REM": 3, "N1": 2, "N2": 1, "N3": 0}


def write_annotations(path: Path, words: Sequence[str], start: datetime | None, seconds: float = EPOCH_SECONDS) -> None:
    """An EDF+ file of annotations only: one for each run of epochs that have the same words.

    Parameters
    ----------
    path : path
    words : sequence of str
        The text of each epoch.
    start : datetime, optional
        When the recording began; EDF's first day where that is not known.
    seconds : float
        Length of an epoch.
    """
    from edfio import Edf, EdfAnnotation, Patient, Recording

    changes = [k for k in range(len(words)) if k == 0 or words[k] != words[k - 1]]
    notes = [
        EdfAnnotation(first * seconds, (last - first) * seconds, words[first])
        for first, last in zip(changes, [*changes[1:], len(words)], strict=True)
    ]
    moment = start or datetime.combine(date(1985, 1, 1), datetime.min.time())
    recording = Recording(startdate=moment.date())
    Edf([], patient=Patient(), recording=recording, starttime=moment.time(), annotations=notes).write(path)


def stage_words(names: Sequence[str]) -> list[str]:
    """The standard EDF+ text of each stage; a class that is no stage keeps its name."""
    return [_WORDS.get(name, name) for name in names]


def epoch_table(
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    seconds: float = EPOCH_SECONDS,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> str:
    """CSV text: epoch, its start in seconds, the most probable stage, each stage's probability, and further columns."""
    further = more or {}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["epoch", "seconds", "stage", *(f"p_{name}" for name in names), *further])
    for epoch, (row, best) in enumerate(zip(probabilities, probabilities.argmax(axis=1), strict=True)):
        told = [column[epoch] for column in further.values()]
        writer.writerow([epoch, f"{epoch * seconds:g}", names[best], *(f"{value:.6f}" for value in row), *told])
    return text.getvalue()


def draw_hypnogram(
    path: Path,
    names: Sequence[str],
    probabilities: npt.NDArray[np.floating],
    title: str,
    seconds: float = EPOCH_SECONDS,
) -> None:
    """A picture: stages over the hours of the night, and below it how sure the model is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = sorted(range(len(names)), key=lambda k: _HEIGHT.get(names[k], -k))
    level = np.empty(len(names))
    level[order] = np.arange(len(names))
    hours = np.arange(len(probabilities) + 1) * seconds / 3600
    best = level[probabilities.argmax(axis=1)]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    upper.stairs(best, hours, baseline=None, color="#1f4e79", linewidth=1)
    upper.set_yticks(range(len(names)), [names[k] for k in order])
    upper.set_ylim(-0.5, len(names) - 0.5)
    upper.set_title(title, loc="left")
    edges = np.repeat(hours, 2)[1:-1]
    lower.stackplot(edges, np.repeat(probabilities[:, order].T, 2, axis=1), labels=[names[k] for k in order])
    lower.set(xlabel="hours since the recording began", ylabel="probability", ylim=(0, 1), xlim=(0, float(hours[-1])))
    lower.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
    figure.savefig(path, dpi=120)
