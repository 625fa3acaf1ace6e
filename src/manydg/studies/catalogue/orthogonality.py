"""Do labels and patients use different dimensions of v? (section 4.4, table 3)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from manydg.errors import DataError
from manydg.evaluation.probes import WeightCosines, weight_cosines
from manydg.studies.embeddings import embedded_sides
from manydg.studies.experiment import Experiment, Record, Request, mean_and_sd
from manydg.studies.figure_data import Cell, CellTable, CosineRow, CosineTable, FigureData
from manydg.studies.study import PlannedRun, grid

_SIGNS = {"v": "v", "parallel": "v∥z", "orthogonal": "v⊥z"}
_WORDS = {"labels": "labels", "domains": "patients"}


class Orthogonality(Experiment):
    """Linear models on v and its two parts, fitted to labels and to patients, and the cosines of their weights."""

    title = "Orthogonality of label and patient dimensions"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.options)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        found: list[WeightCosines] = []
        reasons: list[str] = []
        for part in embedded_sides(request.dataset, records, folder, ("train",)):
            try:
                found.append(weight_cosines(part.embeddings, part.labels, part.patients, seed=part.seed))
            except DataError as error:
                reasons.append(f"Seed {part.seed} is left out: {error}.")
        if not found:
            return {}
        return {"orthogonality": self._cosines(found, reasons), "orthogonality-probes": _probes(found)}

    def _cosines(self, found: Sequence[WeightCosines], reasons: Sequence[str]) -> FigureData:
        rows = []
        for row in found[0].mean:
            first, second = (_words(part) for part in row.split(", "))
            mean, sd = mean_and_sd([result.mean[row] for result in found])
            absolute, _ = mean_and_sd([result.absolute[row] for result in found])
            rows.append(CosineRow(first, second, mean, sd, absolute=absolute))
        unpaired, _ = mean_and_sd([result.absolute["v labels, v domains"] for result in found])
        note = (
            "Labels and patients have no classes in common, so their row averages over every label and patient, where "
            f"signs cancel: there the mean absolute cosine ({_three(unpaired)}) is the figure to read, "
            f"beside {found[0].random_absolute:.3f} for two random directions."
        )
        return FigureData(self.title, CosineTable(rows), note=" ".join([note, *reasons]))


def _probes(found: Sequence[WeightCosines]) -> FigureData:
    """What the linear models can tell at all, without which a cosine of their weights says nothing."""
    rows: list[list[Cell]] = []
    for name in found[0].accuracy:
        asked, _, part = name.partition(" from ")
        mean, sd = mean_and_sd([result.accuracy[name] for result in found])
        chance, _ = mean_and_sd([result.chance[asked] for result in found])
        rows.append([f"{_SIGNS[part]} → {_WORDS[asked]}", mean, sd, chance])
    columns = ["linear model", "accuracy", "sd over splits", "commonest class"]
    counts = max(found, key=lambda result: result.samples)
    return FigureData(
        "What the linear models tell on held-out samples of the same patients",
        CellTable(columns, rows),
        "orthogonality",
        note=f"Fitted on at most {counts.samples:,} samples of {counts.domains} training patients.",
    )


def _words(part: str) -> str:
    """As the paper writes it: the embedding and what is predicted from it.

    Examples
    --------
    >>> _words("parallel domains")
    'v∥z → patients'
    """
    embedding, _, asked = part.partition(" ")
    return f"{_SIGNS[embedding]} → {_WORDS[asked]}"


def _three(value: float | None) -> str:
    return "undefined" if value is None or math.isnan(value) else f"{value:.3f}"
