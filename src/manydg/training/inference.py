"""Running a trained algorithm over a dataset."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manydg.algorithms import Algorithm
from manydg.data.columns import unnest
from manydg.data.dataset import Batch, DomainDataset
from manydg.training.execution.distributed import current_team, predict_together

MAX_ROWS = 4096
_MAX_VALUES = {"cpu": 1 << 20, "cuda": 1 << 24}


def batches(dataset: DomainDataset, device: torch.device) -> Iterator[Batch]:
    """The dataset in order, in pieces that fit in memory, on a device."""
    rows = _batch_rows(dataset, device)
    for start in range(0, len(dataset), rows):
        index = torch.arange(start, min(start + rows, len(dataset)), device=dataset.device)
        yield dataset.take(index).to(device)


def whole_patients(dataset: DomainDataset) -> list[Tensor]:
    """Positions of the samples in pieces that fit in memory and hold all samples of each of their patients."""
    counts = torch.bincount(dataset.domains)
    # Patients that begin within the same block of rows go together: a piece is longer than that by one patient.
    piece = (counts.cumsum(0) - counts) // _batch_rows(dataset, dataset.device)
    order = torch.argsort(dataset.domains, stable=True)
    _, sizes = torch.unique_consecutive(piece[dataset.domains[order]], return_counts=True)
    return list(torch.split(order, sizes.tolist()))


def predict_probabilities(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    """Probabilities of every sample, ``(samples, K)``, on the CPU.

    An algorithm that uses a patient's other samples gets all samples of the patient in the dataset.
    """
    algorithm.eval()
    predict = _predict_patients if algorithm.uses_patients else _predict_samples
    with torch.inference_mode():
        team = current_team()
        logits = predict(algorithm, dataset) if team is None else predict_together(team, predict, algorithm, dataset)
        return algorithm.target.probabilities(logits)


def _predict_samples(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    return torch.cat(
        [algorithm.predict(batch.inputs).float().cpu() for batch in batches(dataset, device_of(algorithm))]
    )


def _predict_patients(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    pieces, device = whole_patients(dataset), device_of(algorithm)
    logits = []
    for rows in pieces:
        batch = dataset.take(rows).to(device)
        logits.append(algorithm.predict_patients(batch.inputs, batch.domains).float().cpu())
    grouped = torch.cat(logits)
    return torch.empty_like(grouped).index_copy_(0, torch.cat(pieces).cpu(), grouped)


def embed_dataset(algorithm: Algorithm, dataset: DomainDataset) -> dict[str, Tensor]:
    """The algorithm's embeddings of every sample, by name, ``(samples, dim)`` each, on the CPU."""
    algorithm.eval()
    with torch.inference_mode():
        parts = [algorithm.embed(batch.inputs) for batch in batches(dataset, device_of(algorithm))]
    return {name: torch.cat([part[name].float().cpu() for part in parts]) for name in parts[0]}


def device_of(algorithm: Algorithm) -> torch.device:
    """The device of the algorithm's weights."""
    tensor = next(algorithm.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _batch_rows(dataset: DomainDataset, device: torch.device) -> int:
    """The number of rows that hold about a million values (more on a GPU), at least 16."""
    values = 1
    for column in dataset.columns.values():
        _, items = unnest(column)
        values += items.numel() // max(len(column), 1)
    return max(16, min(MAX_ROWS, _MAX_VALUES[device.type] // values))
