"""What embeddings know of patients: probes, similarities and maps (section 4.4, appendices B.5 and B.7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.dataset import DomainDataset
from manydg.data.info import CLASSES
from manydg.data.splits import load_split
from manydg.data.timeline import Timeline
from manydg.errors import DataError
from manydg.evaluation.probes import (
    Retrieval,
    WeightCosines,
    domain_similarity,
    half_sessions,
    norms,
    patient_retrieval,
    weight_cosines,
)
from manydg.studies.figure_data import (
    Cell,
    CellTable,
    CosineRow,
    CosineTable,
    Embedding,
    EmbeddingPanel,
    FigureData,
    NormPairs,
    Similarity,
    SimilarityRow,
    SplitNorms,
)
from manydg.studies.study import Experiment, PlannedRun, Record, Request, grid, mean_and_sd
from manydg.targets import target_of
from manydg.training.inference import embed_dataset
from manydg.training.record import RunRecord
from manydg.training.run import Run, open_run

MOST_SAMPLES = 20_000
EMBEDDINGS = ("v", "z", "parallel", "orthogonal")
ALL: Mapping[str, npt.NDArray[np.bool_] | None] = MappingProxyType({"all": None})


@dataclass(frozen=True)
class Embedded:
    """Embeddings of one side of one run.

    - ``embeddings`` ``(samples, dim)``: ``v``, ``z``, ``parallel`` and ``orthogonal`` for ManyDG.
    - ``patients`` ``(samples,)``: Index into ``pseudonyms``.
    - ``labels``: Class codes ``(samples,)`` or label indicators ``(samples, K)``.
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
        run_folder = folder / record.folder
        run, split = open_run(run_folder), load_split(run_folder / "split.json", dataset)
        # A patient's context is made of all samples, before some are drawn.
        prepared = run.prepare(dataset)
        for side in sides:
            rows = prepared.learnable(np.asarray(getattr(split, side)))
            rng = np.random.default_rng([record.seed, 5])
            chosen = np.sort(rng.permutation(len(rows))[:MOST_SAMPLES])
            part, whole = prepared.select(rows[chosen]), run.algorithm.backbone.crop is not None
            # A sequence model reads whole sessions.
            tensors = embed_dataset(run.algorithm, prepared.select(rows) if whole else part)
            embeddings = {name: (tensor[chosen] if whole else tensor).numpy() for name, tensor in tensors.items()}
            labels = target_of(part.target).truth(part.targets).numpy()
            yield Embedded(record.seed, side, embeddings, part.domains.numpy(), part.pseudonyms(), labels)


def sessions_of(part: DomainDataset) -> npt.NDArray[np.int64] | None:
    """The session of each sample, counted within the patient; ``None`` where the dataset does not tell them apart."""
    if part.times is None or part.info.session_gap is None:
        return None
    timeline = _timeline(part)
    begins = timeline.session == torch.arange(len(timeline), device=timeline.session.device)
    number = torch.cumsum(begins, 0)
    sessions = torch.empty_like(number)
    sessions[timeline.order] = number - number[timeline.patient]
    return np.asarray(sessions.cpu().numpy(), np.int64)


def sessions_or_halves(data: DomainDataset) -> npt.NDArray[np.int64]:
    """The session of each sample, counted within the patient; the halves of each patient where none are known."""
    known = sessions_of(data)
    return _halves(data) if known is None else known


def retrieval_rates(
    run: Run, data: DomainDataset, sides: Mapping[str, npt.NDArray[np.bool_] | None] = ALL
) -> dict[tuple[str, str], Retrieval]:
    """By side and embedding: how often the session most like a session is of the same patient.

    Every session is shown to the run as if it were a patient of its own: context made of both nights of a person
    would tell each night about the other.

    - ``sides``: Which samples' sessions ask, ``(samples,)`` of bool; ``None`` for all. All sessions of ``data`` answer.
    - returns: The inputs themselves, where they are measurements, count as an embedding.
    """
    who, sessions = data.domains.cpu().numpy(), sessions_or_halves(data)
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
    halves = np.empty(len(order), np.int64)
    halves[order] = half_sessions(data.domains.cpu().numpy()[order])
    return halves


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


def _timeline(part: DomainDataset) -> Timeline:
    return Timeline.of(part.domains, part.times, part.info.session_gap)


_SIGNS = {"v": "v", "z": "z", "parallel": "v∥z", "orthogonal": "v⊥z", "inputs": "the inputs themselves"}
_WORDS = {"labels": "labels", "domains": "patients"}


class Orthogonality(Experiment):
    """Linear models on v and its two parts, fitted to labels and to patients, and the cosines of their weights."""

    name = "orthogonality"
    title = "Orthogonality of label and patient dimensions"
    kinds = CLASSES
    compared = ("manydg",)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        results: list[WeightCosines] = []
        reasons: list[str] = []
        for part in embedded_sides(request.dataset, records, folder, ("train",)):
            try:
                results.append(weight_cosines(part.embeddings, part.labels, part.patients, seed=part.seed))
            except DataError as error:
                reasons.append(f"Seed {part.seed} is left out: {error}.")
        if not results:
            return {}
        return {"orthogonality": self._cosines(results, reasons), "orthogonality-probes": _probes(results)}

    def _cosines(self, results: Sequence[WeightCosines], reasons: Sequence[str]) -> FigureData:
        rows = []
        for row in results[0].mean:
            first, second = (_words(part) for part in row.split(", "))
            mean, sd = mean_and_sd([result.mean[row] for result in results])
            absolute, _ = mean_and_sd([result.absolute[row] for result in results])
            rows.append(CosineRow(first, second, mean, sd, absolute=absolute))
        unpaired, _ = mean_and_sd([result.absolute["v labels, v domains"] for result in results])
        note = (
            "Labels and patients have no classes in common, so their row averages over every label and patient, where "
            f"signs cancel: there the mean absolute cosine ({_three(unpaired)}) is the figure to read, "
            f"beside {results[0].random_absolute:.3f} for two random directions."
        )
        return FigureData(self.title, CosineTable(rows), note=" ".join([note, *reasons]))


def _probes(results: Sequence[WeightCosines]) -> FigureData:
    """What the linear models can tell at all, without which a cosine of their weights says nothing."""
    rows: list[list[Cell]] = []
    for name in results[0].accuracy:
        asked, _, part = name.partition(" from ")
        mean, sd = mean_and_sd([result.accuracy[name] for result in results])
        chance, _ = mean_and_sd([result.chance[asked] for result in results])
        rows.append([f"{_SIGNS[part]} → {_WORDS[asked]}", mean, sd, chance])
    columns = ["linear model", "accuracy", "sd over splits", "commonest class"]
    counts = max(results, key=lambda result: result.samples)
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


SIDES = {"train": "training patients", "test": "unseen patients"}


class DomainSimilarity(Experiment):
    """Mean cosine of the domain factors of two samples of one patient, and of two patients."""

    name = "domain-similarity"
    title = "Domain factors within and across patients"
    compared = ("manydg",)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        by_side: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for part in embedded_sides(request.dataset, records, folder):
            result = domain_similarity(part.embeddings["z"], part.patients)
            by_side[part.side].append((result.within, result.across))
        rows, lone = [], []
        for side, values in by_side.items():
            (within, _), (across, _) = (mean_and_sd(column) for column in zip(*values, strict=True))
            rows.append(SimilarityRow(SIDES[side], within, across))
            lone += [SIDES[side]] if within is None else []
        named = " and ".join(lone)
        note = f"None of the {named} has two samples, so nothing is within a patient there." if lone else ""
        return {"domain-similarity": FigureData(self.title, Similarity(rows), note=note)}


PAPER_SAMPLES = 3200
MAPPED = 2000
PANELS = ("v", "parallel", "orthogonal", "z")


class Norms(Experiment):
    """The paper's scatter plot of norms for training and test patients, and maps of the embeddings."""

    name = "norms"
    title = "Norms of the two parts of v"
    kinds = CLASSES
    compared = ("manydg",)

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        splits, figures, shares = [], {}, []
        for part in embedded_sides(request.dataset, records[:1], folder):
            result = norms(part.embeddings["parallel"], part.embeddings["orthogonal"])
            chosen = np.random.default_rng(0).permutation(len(part.patients))[:PAPER_SAMPLES]
            lengths = {"parallel": result.parallel, "orthogonal": result.orthogonal}
            splits.append(
                SplitNorms(part.side, **{name: np.round(value[chosen], 4).tolist() for name, value in lengths.items()})
            )
            shares.append(f"{result.parallel_larger:.0%} of the {part.side} samples")
            if part.side == "test":
                figures["embedding"] = _map(part, request.dataset.target.names)
        note = f"The part along z is the longer one in {' and '.join(shares)} (split of seed {records[0].seed})."
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


CONTRAST = 0.1
"""Weight of the contrast, without which the method with context has no z."""
_SIDES = {"all": "all patients", "test": "unseen patients"}


class PatientProbe(Experiment):
    """Share of sessions (nights, stays; halves where they are not known) whose nearest other one is the same person's,
    for ManyDG and for the method with context."""

    name = "patient-probe"
    title = "Is z a patient?"
    kinds = CLASSES

    def plan(self, request: Request) -> list[PlannedRun]:
        ours = [
            PlannedRun("patient-probe", request.options.of("manydg-context", seed, contrast=CONTRAST))
            for seed in range(request.seeds)
        ]
        return grid("compare", ("manydg",), range(request.seeds), request.options) + ours

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        retrievals: dict[tuple[str, str, str], list[Retrieval]] = {}
        for record in records:
            run_folder = folder / record.folder
            unseen = np.zeros(len(request.dataset), dtype=bool)
            unseen[load_split(run_folder / "split.json", request.dataset).test] = True
            rates = retrieval_rates(open_run(run_folder), request.dataset, {"all": None, "test": unseen})
            for (side, name), result in rates.items():
                retrievals.setdefault((record.algorithm, side, name), []).append(result)
        rows = []
        for (algorithm, side, name), values in retrievals.items():
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
