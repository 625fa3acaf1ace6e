"""Is a model an identity detector? How well it tells patients apart, and what its score owes to that.

Sessions (nights, stays; halves of the record where none are known) are shown to the model one by one, as if each were a
patient of its own, so that no context made of two of them tells one about the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from manydg.algorithms import Algorithm
from manydg.algorithms.best import Best
from manydg.algorithms.erasure import patient_directions
from manydg.data.dataset import DomainDataset
from manydg.data.splits import Split, load_split
from manydg.evaluation.metrics import Predictions, score
from manydg.evaluation.probes import Identification, identify_samples, identify_sessions
from manydg.evaluation.statistics import Interval, patient_difference
from manydg.files import JsonObject, fields_as_json
from manydg.studies.catalogue.embeddings import sessions_apart, sessions_or_halves
from manydg.studies.figure_data import Cell, CellTable, FigureData
from manydg.studies.study import Experiment, Record, Request, mean_and_sd
from manydg.training.inference import device_of, embed_dataset, predict_probabilities
from manydg.training.run import SPLIT, Run, open_run

DIRECTIONS = (1, 4, 16)
"""How many directions are erased, one number after the other."""
SIDES = {"train": "training patients", "unseen": "unseen patients"}
_PATIENTS, _SAMPLES_OF_A_SESSION, _SAMPLES_TO_FIT = 200, 200, 20_000
SPACES = {"v": "features v", "z": "domain factor z", "logits": "logits"}


@dataclass(frozen=True)
class Identified:
    """How well one of the model's spaces identifies the patients of one side.

    - ``side`` {"train", "unseen"}
    - ``space`` {"v", "z", "logits"}
    - ``sessions``: By the nearest other session.
    - ``samples``: By a linear model that learnt another session.
    """

    side: str
    space: str
    sessions: Identification
    samples: Identification


@dataclass(frozen=True)
class Erased:
    """What becomes of the test score when directions in which training patients differ are erased from v.

    - ``change``: Of the score, with a 95% interval over test patients.
    - ``change_exchanged``: The same with as many directions of patients whose samples were exchanged at random.
    - ``samples``: What v still tells of unseen patients.
    """

    directions: int
    change: Interval
    change_exchanged: float
    samples: Identification


@dataclass(frozen=True)
class Audit:
    """What a run's model knows of who its patients are.

    - ``score``: The test patients' metric as the model is.
    - ``erased``: Empty for a model whose predictions do not come from a backbone's features.
    - ``words``: The same in sentences.
    """

    run: str
    algorithm: str
    metric: str
    score: float
    identified: list[Identified]
    erased: list[Erased]
    words: list[str]

    def to_json(self) -> JsonObject:
        return fields_as_json(self)


def audit_run(run: Run, dataset: DomainDataset, split: Split) -> Audit:
    """Audit a run on the dataset it was trained on; nothing is chosen by it.

    - ``dataset``: As it was given to the training, without context.
    - ``split``: Who trained, validated and tested; both of the latter are unseen.
    """
    unseen = np.sort(np.concatenate([split.val, split.test]))
    sides = {"train": dataset.select(np.asarray(split.train)), "unseen": dataset.select(unseen)}
    shown = {side: _Shown.of(run, _some_patients(part)) for side, part in sides.items()}
    identified = [
        Identified(side, space, *part.identify(values))
        for side, part in shown.items()
        for space, values in part.spaces.items()
    ]
    metric, test = run.algorithm.target.selection, dataset.select(np.asarray(split.test))
    plain = _predicted(run, run.prepare(test))
    erased = _erasures(run, sides, test, plain, metric)
    before = _score(plain, metric)
    words = [*_identity_in_words(identified), *_erasure_in_words(erased, metric, before)]
    return Audit(run.record.run, run.record.algorithm, metric, before, identified, erased, words)


@dataclass(frozen=True)
class _Shown:
    """What a model makes of some patients' sessions, each shown by itself: a few hundred samples of each."""

    spaces: dict[str, npt.NDArray[Any]]
    patients: npt.NDArray[np.int64]
    sessions: npt.NDArray[np.int64]

    @staticmethod
    def of(run: Run, data: DomainDataset) -> _Shown:
        sessions = sessions_or_halves(data)
        apart = sessions_apart(data, sessions)
        prepared = run.prepare(apart)
        chosen = _spread(apart.domains.cpu().numpy())
        embeddings = embed_dataset(run.algorithm, prepared)
        spaces: dict[str, npt.NDArray[Any]] = {
            name: embeddings[name].numpy()[chosen] for name in ("v", "z") if name in embeddings
        }
        spaces["logits"] = _logits(run.algorithm, prepared)[chosen]
        return _Shown(spaces, data.domains.cpu().numpy()[chosen], sessions[chosen])

    def identify(self, values: npt.NDArray[Any]) -> tuple[Identification, Identification]:
        return (
            identify_sessions(values, self.patients, self.sessions),
            identify_samples(values, self.patients, self.sessions),
        )


def _some_patients(data: DomainDataset) -> DomainDataset:
    """At most two hundred patients, drawn at random."""
    if data.n_patients <= _PATIENTS:
        return data
    chosen = np.random.default_rng(0).permutation(data.patients)[:_PATIENTS]
    return data.subset(chosen.tolist())


def _spread(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of at most two hundred samples of each group, spread evenly over it."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    every = -(-counts // _SAMPLES_OF_A_SESSION)
    return np.sort(order[position % every[groups[order]] == 0])


def _logits(algorithm: Algorithm, prepared: DomainDataset) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities, less those of their complements where several labels may be present; values as
    they are."""
    known = predict_probabilities(algorithm, prepared).numpy().astype(float)
    if algorithm.target.numeric:
        return known
    known = known.clip(1e-7, 1 - 1e-7)
    complement = np.log1p(-known) if algorithm.target.kind == "multilabel" else 0.0
    return np.asarray(np.log(known) - complement, float)


def _erasures(
    run: Run, sides: Mapping[str, DomainDataset], test: DomainDataset, plain: Predictions, metric: str
) -> list[Erased]:
    """What erasing does to the score, direction by direction; nothing where predictions come from no features, or from
    those of several learners."""
    if run.algorithm.sampling == "whole" or isinstance(run.algorithm, Best):
        return []
    features, patients, labels = _features_to_fit(run, sides["train"])
    exchanged = patients[torch.randperm(len(patients), generator=torch.Generator().manual_seed(0))]
    prepared, unseen = run.prepare(test), _some_patients(sides["unseen"])
    erased = []
    for directions in (count for count in DIRECTIONS if count <= features.shape[1] // 2):
        with _erasing(run.algorithm, *patient_directions(features, patients, labels, directions)):
            change = patient_difference([_predicted(run, prepared)], [plain])[metric]
            left = _Shown.of(run, unseen)
        with _erasing(run.algorithm, *patient_directions(features, exchanged, labels, directions)):
            by_chance = _score(_predicted(run, prepared), metric) - _score(plain, metric)
        erased.append(Erased(directions, change, by_chance, left.identify(left.spaces["v"])[1]))
    return erased


def _features_to_fit(run: Run, train: DomainDataset) -> tuple[Tensor, Tensor, Tensor]:
    """Features v of at most twenty thousand training samples, with their patients and labels."""
    prepared = run.prepare(train)
    rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:_SAMPLES_TO_FIT].sort().values
    if run.algorithm.backbone.crop is None:
        features = embed_dataset(run.algorithm, prepared.select(rows))["v"]
    else:
        # A sequence model reads whole sessions.
        features = embed_dataset(run.algorithm, prepared)["v"][rows]
    labels = run.algorithm.target.distribution(train.targets[rows]).to(torch.float64)
    return features.to(torch.float64), torch.unique(train.domains[rows], return_inverse=True)[1], labels


@contextmanager
def _erasing(algorithm: Algorithm, centre: Tensor, removed: Tensor) -> Iterator[None]:
    """Within it the features v of the algorithm's backbone come without some directions."""
    device = device_of(algorithm)
    middle, matrix = (part.to(device, torch.float32) for part in (centre, removed))

    def erase(module: nn.Module, inputs: object, features: Tensor) -> Tensor:
        # Behind v may be the features of the samples without their context.
        v, others = features[:, : len(middle)], features[:, len(middle) :]
        return torch.cat([v - (v - middle) @ matrix.T, others], dim=1)

    handle = algorithm.backbone.register_forward_hook(erase)
    try:
        yield
    finally:
        handle.remove()


def _predicted(run: Run, prepared: DomainDataset) -> Predictions:
    target, rows = run.algorithm.target, prepared.learnable(np.arange(len(prepared)))
    return Predictions(
        target,
        target.truth(prepared.targets).cpu().numpy()[rows],
        predict_probabilities(run.algorithm, prepared).numpy()[rows],
        prepared.domains.cpu().numpy()[rows],
        run.record.threshold,
    )


def _score(predictions: Predictions, metric: str) -> float:
    known = score(predictions.target, predictions.truth, predictions.probabilities, predictions.threshold)
    return known[metric]


def _identity_in_words(identified: Sequence[Identified]) -> list[str]:
    sentences = []
    for entry in identified:
        if math.isnan(entry.sessions.rate):
            reason = (
                f"{SIDES[entry.side].capitalize()}: fewer than two have two sessions, so that none can be recognised."
            )
            sentences += [reason] if reason not in sentences else []
            continue
        sentences.append(
            f"{SIDES[entry.side].capitalize()}, {SPACES[entry.space]}: the nearest other session is the same person's "
            f"{_share(entry.sessions)}; of {entry.samples.patients} people, a linear model that learnt one session "
            f"names the right one for a sample of another {_share(entry.samples)}."
        )
    known = [entry for entry in identified if entry.side == "unseen" and not math.isnan(entry.samples.rate)]
    telling = [SPACES[entry.space] for entry in known if entry.samples.above_chance or entry.sessions.above_chance]
    if known:
        sentences.append(
            f"So people whom the model has never seen can be recognised by its {_listed(telling)}."
            if telling
            else "So nothing shows that people whom the model has never seen can be recognised by it."
        )
    return sentences


def _listed(names: Sequence[str]) -> str:
    """
    Examples
    --------
    >>> _listed(["v", "z", "logits"])
    'v, z and logits'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _share(identified: Identification) -> str:
    return f"{identified.rate:.0%} of the time (by chance {identified.chance:.0%}, p = {identified.p:.3g})"


def _change(change: Interval) -> str:
    interval = "" if math.isnan(change.low) else f" [{change.low:+.3f}, {change.high:+.3f}]"
    return f"{change.estimate:+.3f}{interval}"


def _erasure_in_words(erased: Sequence[Erased], metric: str, before: float) -> list[str]:
    if not erased:
        return ["Nothing can be erased: its predictions do not come from the features of one network."]
    if math.isnan(before):
        return [f"{metric} does not exist for the test patients, so that nothing can be said of what it depends on."]
    sentences = [
        f"Without the {entry.directions} direction{'s' if entry.directions > 1 else ''} of v in which training "
        f"patients differ most, {metric} changes from {before:.3f} by {_change(entry.change)} (as many directions of "
        f"exchanged patients: {entry.change_exchanged:+.3f}), and v names the right one of {entry.samples.patients} "
        f"people {_share(entry.samples)}."
        for entry in erased
    ]
    if all(math.isnan(entry.change.low) for entry in erased):
        return [*sentences, "Fewer than three test patients: too few to say whether the score depends on them."]
    # Beyond what erasing as many directions of exchanged patients does.
    worse = [entry.directions for entry in erased if entry.change.high < min(0.0, entry.change_exchanged)]
    better = [entry.directions for entry in erased if entry.change.low > max(0.0, entry.change_exchanged)]
    if worse:
        sentences.append(f"So the score leans on directions that tell patients apart (from {worse[0]} on).")
    elif better:
        sentences.append(f"So the model does better without knowing who the patient is ({better[0]} directions).")
    else:
        sentences.append("So the score does not depend on them beyond chance.")
    return sentences


class IdentityAudit(Experiment):
    """How well features, domain factors and logits identify patients, and how much the score depends on it."""

    name = "audit"
    title = "Is the model an identity detector?"

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        audits: dict[str, list[Audit]] = {}
        for record in records:
            run = open_run(folder / record.folder)
            split = load_split(folder / record.folder / SPLIT, request.dataset)
            audits.setdefault(record.algorithm, []).append(audit_run(run, request.dataset, split))
        note = "Sessions are shown to the model one by one. The last sentence of each method is of its first split. "
        note += " ".join(f"{name}: {of_splits[0].words[-1]}" for name, of_splits in audits.items())
        return {
            "audit-identity": FigureData(self.title, _identity_table(audits), self.name, note=note),
            "audit-score": FigureData("What the score owes to knowing the patient", _erasure_table(audits), self.name),
        }


def _identity_table(audits: Mapping[str, Sequence[Audit]]) -> CellTable:
    columns = [
        "method",
        "patients",
        "space",
        "session recognised",
        "by chance",
        "sample recognised",
        "by chance",
        "largest p",
    ]
    rows: list[list[Cell]] = []
    for name, of_splits in audits.items():
        for number, entry in enumerate(of_splits[0].identified):
            same = [audit.identified[number] for audit in of_splits]
            kinds = [[one.sessions for one in same], [one.samples for one in same]]
            means = [mean_and_sd([getattr(one, of) for one in kind])[0] for kind in kinds for of in ("rate", "chance")]
            largest = max((one.p for kind in kinds for one in kind if not math.isnan(one.p)), default=None)
            rows.append([name, SIDES[entry.side], SPACES[entry.space], *means, largest])
    return CellTable(columns, rows)


def _erasure_table(audits: Mapping[str, Sequence[Audit]]) -> CellTable:
    columns = [
        "method",
        "directions erased",
        "metric",
        "score",
        "change",
        "change, exchanged patients",
        "sample recognised",
    ]
    rows: list[list[Cell]] = []
    for name, of_splits in audits.items():
        for number, entry in enumerate(of_splits[0].erased):
            same = [audit.erased[number] for audit in of_splits]
            values = [
                [audit.score for audit in of_splits],
                [one.change.estimate for one in same],
                [one.change_exchanged for one in same],
                [one.samples.rate for one in same],
            ]
            rows.append([name, entry.directions, of_splits[0].metric, *(mean_and_sd(value)[0] for value in values)])
    return CellTable(columns, rows)
