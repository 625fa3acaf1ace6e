"""Norms of the two parts of v, and a map of the embeddings (appendix B.7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.evaluation.probes import norms
from manydg.studies.embeddings import Embedded, embedded_sides
from manydg.studies.experiment import Experiment, Record, Request
from manydg.studies.figure_data import Embedding, EmbeddingPanel, FigureData, NormPairs, SplitNorms
from manydg.studies.study import PlannedRun, grid

PAPER_SAMPLES = 3200
MAPPED = 2000
PANELS = ("v", "parallel", "orthogonal", "z")


class Norms(Experiment):
    """The paper's scatter of norms for training and test patients, and where samples lie in each space."""

    title = "Norms of the two parts of v"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("compare", ("manydg",), range(request.seeds), request.options)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        splits, figures, told = [], {}, []
        for part in embedded_sides(request.dataset, records[:1], folder):
            found = norms(part.embeddings["parallel"], part.embeddings["orthogonal"])
            chosen = np.random.default_rng(0).permutation(len(part.patients))[:PAPER_SAMPLES]
            lengths = {"parallel": found.parallel, "orthogonal": found.orthogonal}
            splits.append(
                SplitNorms(part.side, **{name: np.round(value[chosen], 4).tolist() for name, value in lengths.items()})
            )
            told.append(f"{found.parallel_larger:.0%} of the {part.side} samples")
            if part.side == "test":
                figures["embedding"] = _map(part, request.dataset.target.names)
        note = f"The part along z is the longer one in {' and '.join(told)} (split of seed {records[0].seed})."
        figures["norms"] = FigureData(self.title, NormPairs(splits), note=note)
        return figures


def _map(part: Embedded, names: Sequence[str]) -> FigureData:
    rows = np.random.default_rng(1).permutation(len(part.patients))[:MAPPED]
    panels = [
        EmbeddingPanel(name, np.round(_two_components(part.embeddings[name][rows]), 4).tolist()) for name in PANELS
    ]
    labels, label_names = _one_label(part.labels, names)
    data = Embedding(
        panels,
        part.patients[rows].tolist(),
        part.pseudonyms,
        labels[rows].astype(int).tolist(),
        label_names,
        "two principal components",
    )
    return FigureData("Unseen patients' samples in each space", data)


def _one_label(labels: npt.NDArray[Any], names: Sequence[str]) -> tuple[npt.NDArray[Any], list[str]]:
    """Class codes to colour by; of several labels at once, the one that comes nearest to half of the samples."""
    if labels.ndim == 1:
        return labels, list(names)
    chosen = int(np.abs(labels.mean(axis=0) - 0.5).argmin())
    return labels[:, chosen], [f"without {names[chosen]}", f"with {names[chosen]}"]


def _two_components(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    centred = np.asarray(values, float) - values.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    flat = np.zeros((len(centred), 2))
    # A single sample, or features of width one, have one direction.
    flat[:, : min(2, len(directions))] = centred @ directions[:2].T
    return flat
