"""How predictions depend on how much of a patient is known, and whether embeddings know the patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data._timeline import Timeline
from manydg.data.context import limit_context
from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.evaluation.metrics import score
from manydg.evaluation.probes import patient_retrieval
from manydg.experiments._fold import Series
from manydg.training.inference import embed_dataset
from manydg.training.run import Run, open_run

COUNTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
BINS = 8
EMBEDDINGS = ("v", "z", "parallel", "orthogonal")
Scores = dict[str, float]
ByMetric = dict[str, Series]


def tested_part(dataset: DomainDataset, record: Mapping[str, Any], folder: Path) -> tuple[Run, DomainDataset]:
    """A finished run and the samples of its test patients."""
    place = folder / record["folder"]
    return open_run(place), dataset.select(load_split(place / "split.json", dataset).test)


def scores_by_count(run: Run, part: DomainDataset, counts: Sequence[int] = COUNTS) -> dict[float, Scores]:
    """Test metrics when the context of every sample is so many samples; a count that no patient reaches is left out."""
    most = int(torch.bincount(part.domains).max()) - 1
    fitting = [count for count in counts if count <= most]
    return {float(count): _scores(run, part, run.predict_proba(limit_context(part, count))) for count in fitting}


def scores_by_elapsed(run: Run, part: DomainDataset, bins: int = BINS) -> dict[float, Scores]:
    """Test metrics of samples by the time since their session began, in bins of about equally many samples.

    Returns
    -------
    dict of float to dict
        By the median time of the bin.
    """
    since = elapsed(part)
    probabilities = run.predict_proba(part)
    edges = np.unique(np.quantile(since, np.linspace(0, 1, bins + 1)))
    which = np.searchsorted(edges[1:-1], since, side="left")
    found = {}
    for code in np.unique(which):
        rows = np.flatnonzero(which == code)
        found[float(np.median(since[rows]))] = _scores(run, part.select(rows), probabilities[rows])
    return found


def elapsed(part: DomainDataset) -> npt.NDArray[np.float64]:
    """Time of each sample since its session began, ``(samples,)``."""
    timeline = _timeline(part)
    since = torch.empty_like(timeline.times)
    since[timeline.order] = timeline.times - timeline.times[timeline.session]
    return since.cpu().numpy()


def sessions_of(part: DomainDataset) -> npt.NDArray[np.int64] | None:
    """The session of each sample, counted within the patient; ``None`` where the dataset does not tell them apart."""
    if part.times is None or part.info.get("settings", {}).get("session_gap") is None:
        return None
    timeline = _timeline(part)
    begins = timeline.session == torch.arange(len(timeline), device=timeline.session.device)
    number = torch.cumsum(begins, 0)
    found = torch.empty_like(number)
    found[timeline.order] = number - number[timeline.patient]
    return np.asarray(found.cpu().numpy(), np.int64)


def retrieval_rates(run: Run, part: DomainDataset) -> dict[str, tuple[float, float, int]]:
    """By embedding: how often the session most like a session is of the same patient, by chance, and the sessions."""
    embeddings = embed_dataset(run.algorithm, run.prepare(part))
    who, sessions = part.domains.cpu().numpy(), sessions_of(part)
    found = {}
    for name in EMBEDDINGS:
        if name in embeddings:
            result = patient_retrieval(embeddings[name].numpy(), who, sessions)
            found[name] = (result.rate, result.chance, result.queries)
    return found


def gather(series: ByMetric, name: str, scores: Mapping[float, Mapping[str, float | None]], shift: float = 0.0) -> None:
    """Add the scores of one run to series by metric, name and place, which is shifted."""
    for place, metrics in scores.items():
        for metric, value in metrics.items():
            if value is not None and np.isfinite(value):
                series.setdefault(metric, {}).setdefault(name, {}).setdefault(place + shift, []).append(value)


def _scores(run: Run, part: DomainDataset, probabilities: npt.NDArray[np.float32]) -> Scores:
    target = run.algorithm.target
    truth = target.truth(part.targets).cpu().numpy()
    found = score(target, truth, probabilities, run.record["threshold"])
    return {name: float(value) for name, value in found.items()}


def _timeline(part: DomainDataset) -> Timeline:
    return Timeline.of(part.domains, part.times, part.info.get("settings", {}).get("session_gap"))
