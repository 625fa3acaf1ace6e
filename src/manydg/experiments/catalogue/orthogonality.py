"""Do labels and patients use different dimensions of v? (section 4.4, table 3)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manydg.evaluation.linear_probes import weight_cosines
from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok
from manydg.experiments._trained import embedded_sides
from manydg.experiments.study import PlannedRun, grid


class Orthogonality(Experiment):
    """Linear models on v and its two parts, fitted to labels and to patients, and the cosines of their weights."""

    title = "Orthogonality of label and patient dimensions"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.config)

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        found: dict[str, list[float]] = {}
        chance = 0.0
        for part in embedded_sides(request.dataset, ok(records), folder, ("train",)):
            result = weight_cosines(part.embeddings, part.labels, part.patients, seed=part.seed)
            chance = result.random_absolute
            for row, value in result.mean.items():
                found.setdefault(row, []).append(value)
        rows = []
        for row, values in found.items():
            first, _, second = row.partition(" and ")
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            rows.append({"first": first, "second": second, "cosine": float(np.mean(values)), "sd": spread})
        note = f"Two random directions have an absolute cosine of {chance:.3f} on average."
        return {"orthogonality": {"kind": "orthogonality", "title": self.title, "data": {"rows": rows}, "note": note}}
