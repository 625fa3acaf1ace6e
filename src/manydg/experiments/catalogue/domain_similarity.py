"""Is z the patient's? Cosines of z within and across patients (appendix B.5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manydg.evaluation.probes import domain_similarity
from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok
from manydg.experiments._trained import embedded_sides
from manydg.experiments.study import PlannedRun, grid

SIDES = {"train": "training patients", "test": "unseen patients"}


class DomainSimilarity(Experiment):
    """Mean cosine of the domain factors of two samples of one patient, and of two patients."""

    title = "Domain factors within and across patients"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.config)

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        found: dict[str, list[tuple[float, float]]] = {}
        for part in embedded_sides(request.dataset, ok(records), folder):
            result = domain_similarity(part.embeddings["z"], part.patients)
            found.setdefault(part.side, []).append((result.within, result.across))
        rows = []
        for side, values in found.items():
            within, across = np.array(values).mean(axis=0)
            rows.append({"name": SIDES[side], "within": float(within), "across": float(across)})
        return {"domain-similarity": {"kind": "similarity", "title": self.title, "data": {"rows": rows}}}
