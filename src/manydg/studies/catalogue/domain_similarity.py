"""Is z the patient's? Cosines of z within and across patients (appendix B.5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.evaluation.probes import domain_similarity
from manydg.studies.embeddings import embedded_sides
from manydg.studies.experiment import Experiment, Record, Request, mean_and_sd
from manydg.studies.figure_data import FigureData, Similarity, SimilarityRow
from manydg.studies.study import PlannedRun, grid

SIDES = {"train": "training patients", "test": "unseen patients"}


class DomainSimilarity(Experiment):
    """Mean cosine of the domain factors of two samples of one patient, and of two patients."""

    title = "Domain factors within and across patients"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.options)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for part in embedded_sides(request.dataset, records, folder):
            result = domain_similarity(part.embeddings["z"], part.patients)
            found[part.side].append((result.within, result.across))
        rows, lone = [], []
        for side, values in found.items():
            (within, _), (across, _) = (mean_and_sd(column) for column in zip(*values, strict=True))
            rows.append(SimilarityRow(SIDES[side], within, across))
            lone += [SIDES[side]] if within is None else []
        named = " and ".join(lone)
        note = f"None of the {named} has two samples, so nothing is within a patient there." if lone else ""
        return {"domain-similarity": FigureData(self.title, Similarity(rows), note=note)}
