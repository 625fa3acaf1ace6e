"""Is z a patient? Finding another recording of the same person by the mean of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manydg.data.splits import load_split
from manydg.evaluation.probes import Retrieval
from manydg.studies.embeddings import retrieval_rates
from manydg.studies.experiment import Experiment, Record, Request, mean_and_sd
from manydg.studies.figure_data import CellTable, FigureData
from manydg.studies.study import PlannedRun, grid
from manydg.training.run import open_run

CONTRAST = 0.1
"""Weight of the contrast, without which the method with context has no z."""
_SIGNS = {"v": "v", "z": "z", "parallel": "v∥z", "orthogonal": "v⊥z", "inputs": "the inputs themselves"}
_SIDES = {"all": "all patients", "test": "unseen patients"}


class PatientProbe(Experiment):
    """Share of sessions (nights, stays; halves where they are not known) whose nearest other one is the same person's,
    for ManyDG and for the method with context."""

    title = "Is z a patient?"

    def plan(self, request: Request) -> list[PlannedRun]:
        ours = [
            PlannedRun("patient-probe", request.options.of("manydg-context", seed, contrast=CONTRAST))
            for seed in range(request.seeds)
        ]
        return grid("compare", ("manydg",), range(request.seeds), request.options) + ours

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        found: dict[tuple[str, str, str], list[Retrieval]] = {}
        for record in records:
            place = folder / record.folder
            unseen = np.zeros(len(request.dataset), dtype=bool)
            unseen[load_split(place / "split.json", request.dataset).test] = True
            rates = retrieval_rates(open_run(place), request.dataset, {"all": None, "test": unseen})
            for (side, name), result in rates.items():
                found.setdefault((record.algorithm, side, name), []).append(result)
        rows = []
        for (algorithm, side, name), values in found.items():
            mean, sd = mean_and_sd([value.rate for value in values])
            by_chance, _ = mean_and_sd([value.chance for value in values])
            asked = sum(value.queries for value in values)
            rows.append([algorithm, _SIDES[side], _SIGNS[name], mean, sd, by_chance, asked])
        columns = ["method", "sessions of", "embedding", "found again", "sd over splits", "by chance", "sessions asked"]
        note = (
            "The mean embedding of each session asks for the nearest other one among the sessions of all patients, by "
            "cosine. Context is made of each session alone."
        )
        return {"patient-probe": FigureData(self.title, CellTable(columns, rows), "patient-probe", note=note)}
