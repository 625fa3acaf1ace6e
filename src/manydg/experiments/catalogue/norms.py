"""Norms of the two parts of v, and a map of the embeddings (appendix B.7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.experiments._experiment import Experiment, Figure, Record, Request, ok
from manydg.experiments._trained import Embedded, embedded_sides
from manydg.experiments.study import PlannedRun, grid

PAPER_SAMPLES = 3200
MAPPED = 2000
PANELS = ("v", "parallel", "orthogonal", "z")


class Norms(Experiment):
    """The paper's scatter of norms for training and test patients, and where samples lie in each space."""

    title = "Norms of the two parts of v"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.config)

    def fold(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, Figure]:
        splits, figures = [], {}
        for part in embedded_sides(request.dataset, ok(records)[:1], folder):
            some = slice(0, PAPER_SAMPLES)
            length = {name: np.linalg.norm(part.embeddings[name], axis=1) for name in ("parallel", "orthogonal")}
            rng = np.random.default_rng(0)
            order = rng.permutation(len(part.patients))[some]
            splits.append(
                {"name": part.side, **{name: np.round(value[order], 4).tolist() for name, value in length.items()}}
            )
            if part.side == "test" and part.labels.ndim == 1:
                figures["embedding"] = _map(part, request.dataset.target.names)
        figures["norms"] = {"kind": "norms", "title": self.title, "data": {"splits": splits}}
        return figures


def _map(part: Embedded, names: Sequence[str]) -> Figure:
    rows = np.random.default_rng(1).permutation(len(part.patients))[:MAPPED]
    panels = [
        {"name": name, "xy": np.round(_two_components(part.embeddings[name][rows]), 4).tolist()} for name in PANELS
    ]
    data: dict[str, Any] = {
        "panels": panels,
        "patients": part.patients[rows].tolist(),
        "pseudonyms": part.pseudonyms,
        "labels": part.labels[rows].astype(int).tolist(),
        "label_names": list(names),
        "method": "two principal components",
    }
    return {"kind": "embedding", "title": "Unseen patients' samples in each space", "data": data}


def _two_components(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    centred = np.asarray(values, float) - values.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(centred @ directions[:2].T, float)
