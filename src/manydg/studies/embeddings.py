"""Looking into trained models: their embeddings of training and test patients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.context import limit_context
from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.data.timeline import Timeline
from manydg.evaluation.metrics import score
from manydg.evaluation.probes import Retrieval, half_sessions, patient_retrieval
from manydg.studies.experiment import Series
from manydg.targets import target_of
from manydg.training.inference import embed_dataset
from manydg.training.record import RunRecord
from manydg.training.run import Run, open_run

MOST_SAMPLES = 20_000


@dataclass(frozen=True)
class Embedded:
    """Embeddings of one side of one run.

    Attributes
    ----------
    embeddings : dict of str to array ``(samples, dim)``
        ``v``, ``z``, ``parallel`` and ``orthogonal`` for ManyDG.
    patients : array ``(samples,)``
        Index into ``pseudonyms``.
    labels : array
        Class codes ``(samples,)`` or label indicators ``(samples, K)``.
    """

    seed: int
    side: str
    embeddings: Mapping[str, npt.NDArray[np.float32]]
    patients: npt.NDArray[np.int64]
    pseudonyms: list[str]
    labels: npt.NDArray[Any]


def embedded_sides(
    dataset: DomainDataset, records: Sequence[RunRecord], folder: Path, sides: Sequence[str] = ("train", "test")
) -> Iterator[Embedded]:
    """Embeddings of every finished run's sides, at most twenty thousand random samples of each."""
    for record in records:
        place = folder / record.folder
        run, split = open_run(place), load_split(place / "split.json", dataset)
        # A patient's context is made of all samples, before some are drawn.
        prepared = run.prepare(dataset)
        for side in sides:
            rows = np.asarray(getattr(split, side))
            rng = np.random.default_rng([record.seed, 5])
            part = prepared.select(np.sort(rng.permutation(rows)[:MOST_SAMPLES]))
            found = {name: tensor.numpy() for name, tensor in embed_dataset(run.algorithm, part).items()}
            labels = target_of(part.target).truth(part.targets).numpy()
            yield Embedded(record.seed, side, found, part.domains.numpy(), part.pseudonyms(), labels)


# How predictions depend on how much of a patient is known, and whether embeddings know the patient.


COUNTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
BINS = 8
EMBEDDINGS = ("v", "z", "parallel", "orthogonal")
ALL: Mapping[str, npt.NDArray[np.bool_] | None] = MappingProxyType({"all": None})
Scores = dict[str, float]
ByMetric = dict[str, Series]


def tested_part(dataset: DomainDataset, record: RunRecord, folder: Path) -> tuple[Run, DomainDataset]:
    """A finished run and the samples of its test patients."""
    place = folder / record.folder
    return open_run(place), dataset.select(load_split(place / "split.json", dataset).test)


def scores_by_count(run: Run, part: DomainDataset, counts: Sequence[int] = COUNTS) -> dict[float, Scores]:
    """Test metrics when the context of every sample is so many samples; a count that no patient reaches is left out."""
    fitting = fitting_counts(part, counts)
    return {float(count): _scores(run, part, run.predict_proba(limit_context(part, count))) for count in fitting}


def fitting_counts(part: DomainDataset, counts: Sequence[int] = COUNTS) -> list[int]:
    """Those numbers of other samples that some patient has."""
    most = int(torch.bincount(part.domains).max()) - 1
    return [count for count in counts if count <= most]


@dataclass(frozen=True, eq=False)
class TimeBins:
    """Stretches of time since the start, with about equally many samples of a dataset in each.

    Attributes
    ----------
    borders : array ``(bins - 1,)``
        A time at a border is in the earlier bin.
    medians : array ``(bins,)``
    """

    borders: npt.NDArray[np.float64]
    medians: npt.NDArray[np.float64]

    @staticmethod
    def of(dataset: DomainDataset, bins: int = BINS) -> TimeBins:
        since = elapsed(dataset)
        edges = np.unique(np.quantile(since, np.linspace(0, 1, bins + 1)))
        which = np.searchsorted(edges[1:-1], since, side="left")
        medians = np.array([np.median(since[which == code]) for code in np.unique(which)])
        return TimeBins(edges[1:-1], medians)


def scores_by_elapsed(run: Run, part: DomainDataset, bins: TimeBins) -> dict[float, Scores]:
    """Test metrics of samples by the time since their session began.

    Returns
    -------
    dict of float to dict
        By the median time of the bin, which is that of the dataset that the bins were made of: so that runs with
        different test patients have the same places.
    """
    probabilities = run.predict_proba(part)
    which = np.searchsorted(bins.borders, elapsed(part), side="left")
    found = {}
    for code in np.unique(which):
        rows = np.flatnonzero(which == code)
        found[float(bins.medians[code])] = _scores(run, part.select(rows), probabilities[rows])
    return found


def elapsed(part: DomainDataset) -> npt.NDArray[np.float64]:
    """Time of each sample since its session began, ``(samples,)``."""
    timeline = _timeline(part)
    since = torch.empty_like(timeline.times)
    since[timeline.order] = timeline.times - timeline.times[timeline.session]
    return since.cpu().numpy()


def sessions_of(part: DomainDataset) -> npt.NDArray[np.int64] | None:
    """The session of each sample, counted within the patient; ``None`` where the dataset does not tell them apart."""
    if part.times is None or part.info.session_gap is None:
        return None
    timeline = _timeline(part)
    begins = timeline.session == torch.arange(len(timeline), device=timeline.session.device)
    number = torch.cumsum(begins, 0)
    found = torch.empty_like(number)
    found[timeline.order] = number - number[timeline.patient]
    return np.asarray(found.cpu().numpy(), np.int64)


def retrieval_rates(
    run: Run, data: DomainDataset, sides: Mapping[str, npt.NDArray[np.bool_] | None] = ALL
) -> dict[tuple[str, str], Retrieval]:
    """By side and embedding: how often the session most like a session is of the same patient.

    Every session is shown to the run as if it were a patient of its own: context made of both nights of a person
    would tell each night about the other.

    Parameters
    ----------
    sides : mapping of str to array or None
        Which samples' sessions ask, ``(samples,)`` of bool; ``None`` for all. All sessions of ``data`` answer.

    Returns
    -------
    dict
        The inputs themselves, where they are measurements, count as an embedding.
    """
    who, known = data.domains.cpu().numpy(), sessions_of(data)
    sessions = _halves(data) if known is None else known
    embeddings = embed_dataset(run.algorithm, run.prepare(sessions_apart(data, sessions)))
    shown = {name: embeddings[name].numpy() for name in EMBEDDINGS if name in embeddings}
    if (table := _measurements(data)) is not None:
        shown["inputs"] = table
    return {
        (side, name): patient_retrieval(values, who, sessions, asks)
        for side, asks in sides.items()
        for name, values in shown.items()
    }


def sessions_apart(data: DomainDataset, sessions: npt.NDArray[np.int64]) -> DomainDataset:
    """The same samples, every session a patient of its own."""
    both = np.stack([data.domains.cpu().numpy(), sessions], axis=1)
    names, codes = np.unique(both, axis=0, return_inverse=True)
    return dataclasses.replace(
        data,
        domains=torch.from_numpy(codes.reshape(-1)).to(data.device),
        patients=np.array([f"session {number}" for number in range(len(names))]),
        stored_hash=None,
    )


def _halves(data: DomainDataset) -> npt.NDArray[np.int64]:
    """The earlier and the later half of each patient's samples."""
    order = _timeline(data).order.cpu().numpy()
    found = np.empty(len(order), np.int64)
    found[order] = half_sessions(data.domains.cpu().numpy()[order])
    return found


def _measurements(data: DomainDataset) -> npt.NDArray[np.float32] | None:
    """Tables of measurements in deviations from the mean, 0 where missing, ``(samples, n)``."""
    columns = [data.column(name) for name in sorted(data.columns)]
    dense = [column for column in columns if isinstance(column, torch.Tensor) and column.ndim <= 2]
    if len(dense) < len(columns):
        return None
    values = torch.cat([column.flatten(1).to(torch.float32) for column in dense], dim=1)
    centred = values - values.nanmean(dim=0)
    scale = centred.square().nanmean(dim=0).sqrt()
    return torch.nan_to_num(centred / scale.clamp_min(1e-12)).cpu().numpy()


def gather(series: ByMetric, name: str, scores: Mapping[float, Mapping[str, float | None]], shift: float = 0.0) -> None:
    """Add the scores of one run to series by metric, name and place, which is shifted."""
    for place, metrics in scores.items():
        for metric, value in metrics.items():
            if value is not None and np.isfinite(value):
                series.setdefault(metric, {}).setdefault(name, {}).setdefault(place + shift, []).append(value)


def _scores(run: Run, part: DomainDataset, probabilities: npt.NDArray[np.float32]) -> Scores:
    target = run.algorithm.target
    truth = target.truth(part.targets).cpu().numpy()
    found = score(target, truth, probabilities, run.record.threshold)
    return {name: float(value) for name, value in found.items()}


def _timeline(part: DomainDataset) -> Timeline:
    return Timeline.of(part.domains, part.times, part.info.session_gap)
