"""Looking into trained models: their embeddings of training and test patients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.targets import target_of
from manydg.training.inference import embed_dataset
from manydg.training.run import open_run

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
    dataset: DomainDataset, records: Sequence[Mapping[str, Any]], folder: Path, sides: Sequence[str] = ("train", "test")
) -> Iterator[Embedded]:
    """Embeddings of every finished run's sides, at most twenty thousand random samples of each."""
    for record in records:
        place = folder / record["folder"]
        run, split = open_run(place), load_split(place / "split.json", dataset)
        # A patient's context is made of all samples, before some are drawn.
        prepared = run.prepare(dataset)
        for side in sides:
            rows = np.asarray(getattr(split, side))
            rng = np.random.default_rng([record["seed"], 5])
            part = prepared.select(np.sort(rng.permutation(rows)[:MOST_SAMPLES]))
            found = {name: tensor.numpy() for name, tensor in embed_dataset(run.algorithm, part).items()}
            labels = target_of(part.target).truth(part.targets).numpy()
            yield Embedded(record["seed"], side, found, part.domains.numpy(), part.pseudonyms(), labels)
