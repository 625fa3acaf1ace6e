"""Is z a patient? Finding another recording of the same person by the mean of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.experiments._context import retrieval_rates, tested_part
from manydg.experiments._experiment import Experiment, Figure, Record, Request
from manydg.experiments._fold import mean_and_sd
from manydg.experiments.study import PlannedRun, grid

CONTRAST = 0.1
"""Weight of the contrast, without which the method with context has no z."""
_SIGNS = {"v": "v", "z": "z", "parallel": "v∥z", "orthogonal": "v⊥z"}
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

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for record in records:
            run, part = tested_part(request.dataset, record, folder)
            for side, data in (("all", request.dataset), ("test", part)):
                for name, (rate, chance, _) in retrieval_rates(run, data).items():
                    found.setdefault((record["algorithm"], side, name), []).append((rate, chance))
        rows = []
        for (algorithm, side, name), values in found.items():
            mean, sd = mean_and_sd([value for value, _ in values])
            by_chance, _ = mean_and_sd([value for _, value in values])
            rows.append([algorithm, _SIDES[side], _SIGNS[name], mean, sd, by_chance])
        columns = ["method", "among", "embedding", "found again", "sd over splits", "by chance"]
        return {
            "patient-probe": {
                "kind": "table",
                "experiment": "patient-probe",
                "title": self.title,
                "data": {"columns": columns, "rows": rows},
                "note": "The mean embedding of each session asks for the nearest other session, by cosine.",
            }
        }
