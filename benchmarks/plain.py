"""ManyDG as one would write it down: per-sample datasets, a DataLoader, two forwards, Python loops over events.

It has the networks, the losses and the optimiser of the package, and none of its columns, plans, caches or layouts.
The other side of ``bench_cpu_training``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.tasks import DIAGNOSES, DRUGS, KINDS, PROCEDURES
from manydg.algorithms.manydg import mean_discrepancy, orthogonal_projection
from manydg.data.dataset import DomainDataset
from manydg.targets import target_of

Sample = tuple[Any, Tensor]


class Pairs(Dataset[tuple[Sample, Sample]]):
    """Two samples of one patient for each item, drawn anew every epoch."""

    def __init__(self, samples: list[Sample], patients: list[int]) -> None:
        self.samples, self.patients = samples, patients
        self.pairs: list[tuple[int, int]] = []

    def draw(self, rng: np.random.Generator) -> None:
        of_patient: dict[int, list[int]] = {}
        for row, patient in enumerate(self.patients):
            of_patient.setdefault(patient, []).append(row)
        self.pairs = []
        for rows in of_patient.values():
            rows = rng.permutation(rows).tolist()
            half = len(rows) // 2
            self.pairs += list(zip(rows[:half], rows[half : 2 * half], strict=True))
            if len(rows) % 2:
                # The odd one out meets any other; one without another meets itself.
                self.pairs.append((rows[-1], rows[0]))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, item: int) -> tuple[Sample, Sample]:
        first, second = self.pairs[item]
        return self.samples[first], self.samples[second]


def train_epochs(
    network: nn.Module, data: DomainDataset, samples: list[Sample], collate: Any, options: Any
) -> Iterable:
    """Train and yield after each epoch; ``options`` is a task."""
    target = target_of(data.target)
    width, count = network.width, target.size
    encoder = nn.Sequential(*_layers(width, width, width, width))
    decoder = nn.Sequential(*_layers(2 * width, width, width, width))
    prototypes = nn.Parameter(torch.randn(count, width) * width**-0.5)
    parameters = [*network.parameters(), *encoder.parameters(), *decoder.parameters(), prototypes]
    optimizer = torch.optim.Adam(parameters, lr=options.lr, weight_decay=1e-5)
    pairs, rng = Pairs(samples, data.domains.tolist()), np.random.default_rng(0)
    network.train()
    while True:
        pairs.draw(rng)
        for (first, first_label), (second, second_label) in DataLoader(
            pairs, batch_size=options.batch_size // 2, shuffle=True, collate_fn=collate
        ):
            v, other_v = network(first), network(second)
            z, other_z = encoder(v), encoder(other_v)
            loss = torch.zeros(())
            for features, factor, partner, label in ((v, z, other_z, first_label), (other_v, other_z, z, second_label)):
                _, orthogonal = orthogonal_projection(features, factor)
                loss = loss + target.loss(orthogonal @ prototypes.T / 0.5, label) / 2
                loss = loss + mean_discrepancy(factor, features) / 2
                label_vector = target.label_prototype(prototypes, label)
                rebuilt = decoder(torch.cat([partner, label_vector], dim=-1))
                loss = loss - functional.cosine_similarity(features, rebuilt).mean()
            loss = loss - functional.cosine_similarity(z, other_z).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield float(loss.detach())


def _layers(*widths: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return layers[:-1]


class _Block(nn.Module):
    """Two convolutions beside a strided one, their sum pooled and dropped out."""

    def __init__(self, inputs: int, outputs: int, pool: nn.Module) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ELU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs))
        self.pool, self.dropout = pool, nn.Dropout(0.5)

    def forward(self, maps: Tensor) -> Tensor:
        reduced: Tensor = self.dropout(self.pool(self.path(maps) + self.shortcut(maps)))
        return reduced


class _Signals(nn.Module):
    """The spectrogram of every batch by ``torch.stft``, then the convolutions."""

    width = 128

    def __init__(self, window: int, hop: int, centred: bool, network: nn.Module) -> None:
        super().__init__()
        self.window, self.hop, self.centred, self.network = window, hop, centred, network

    def forward(self, signal: Tensor) -> Tensor:
        batch, channels, samples = signal.shape
        parts = torch.stft(
            signal.reshape(-1, samples), self.window, self.hop, window=torch.ones(self.window), center=self.centred,
            return_complex=True,
        )  # fmt: skip
        logs = (parts.abs().square() / self.window).clamp_min(1e-3).log()
        features: Tensor = self.network((logs.reshape(batch, channels, *logs.shape[1:]) - 5.0) / 2.0).flatten(1)
        return features


def seizure_network() -> nn.Module:
    sizes = ((16, 32), (32, 64), (64, 128))
    blocks = [_Block(a, b, nn.MaxPool2d(3, stride=2, padding=1)) for a, b in sizes]
    return _Signals(64, 32, True, nn.Sequential(*blocks))


def sleep_network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ELU())
    pools = (nn.Identity(), nn.MaxPool2d(2), nn.MaxPool2d(2))
    blocks = [_Block(a, b, p) for (a, b), p in zip(((6, 8), (8, 16), (16, 32)), pools, strict=True)]
    return _Signals(256, 64, False, nn.Sequential(stem, *blocks))


def signal_samples(data: DomainDataset) -> list[Sample]:
    signal = data.columns["signal"]
    assert isinstance(signal, Tensor)
    return [(signal[row], data.targets[row]) for row in range(len(data))]


def ragged_samples(data: DomainDataset) -> list[Sample]:
    """Every sample as lists of lists, as a parsed file would give them."""
    rows = {
        name: column.to_rows() if not isinstance(column, Tensor) else column for name, column in data.columns.items()
    }
    return [({name: column[row] for name, column in rows.items()}, data.targets[row]) for row in range(len(data))]


class DrugNetwork(nn.Module):
    """GAMENet: visit by visit, sample by sample."""

    width = 64

    def __init__(self) -> None:
        super().__init__()
        self.diagnoses, self.procedures = nn.Embedding(DIAGNOSES, 64), nn.Embedding(PROCEDURES, 64)
        self.first, self.second = nn.GRU(64, 128, batch_first=True), nn.GRU(64, 128, batch_first=True)
        self.query = nn.Sequential(nn.ReLU(), nn.Linear(256, 64))
        self.start = nn.ParameterList(nn.Parameter(torch.randn(DRUGS, 64) * 0.1) for _ in range(2))
        self.graph = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.register_buffer("links", torch.eye(DRUGS))
        self.balance, self.dropout = nn.Parameter(torch.ones(1)), nn.Dropout(0.3)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(192, 64))

    def forward(self, batch: list[dict[str, Any]]) -> Tensor:
        together, apart = (
            self.links @ layer(self.dropout((self.links @ start).relu()))
            for start, layer in zip(self.start, self.graph, strict=True)
        )
        memory = together - self.balance * apart
        return torch.stack([self._sample(sample, memory) for sample in batch])

    def _sample(self, sample: dict[str, Any], memory: Tensor) -> Tensor:
        diagnoses = torch.stack([self._mean(self.diagnoses, codes) for codes in sample["diagnoses"]])
        procedures = torch.stack([self._mean(self.procedures, codes) for codes in sample["procedures"]])
        states = [
            network(self.dropout(vectors).unsqueeze(0))[0][0]
            for network, vectors in ((self.first, diagnoses), (self.second, procedures))
        ]
        queries = self.query(torch.cat(states, dim=-1))
        query = queries[-1]
        fact = (query @ memory.T).softmax(-1) @ memory
        history = fact
        if len(queries) > 1:
            given = torch.zeros(len(queries) - 1, DRUGS)
            for visit, drugs in enumerate(sample["history_drugs"]):
                given[visit, drugs] = 1.0
            history = (queries[:-1] @ query).softmax(0) @ given @ memory
        found: Tensor = self.out(torch.cat([query, fact, history]))
        return found

    @staticmethod
    def _mean(table: nn.Embedding, codes: list[int]) -> Tensor:
        return table(torch.tensor(codes)).mean(0) if codes else torch.zeros(table.embedding_dim)


class EventNetwork(nn.Module):
    """The event Transformer: event by event, then padded to the longest stay of the batch."""

    width = 128

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.presence, self.amount = nn.Embedding(codes, 128), nn.Embedding(codes, 128)
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU()) for _ in range(KINDS)
        )
        layer = nn.TransformerEncoderLayer(128, 8, 64, 0.25, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(128), enable_nested_tensor=False)
        self.register_buffer("places", _sinusoids(300))
        self.static, self.out = nn.Sequential(nn.Linear(3, 32), nn.ELU()), nn.Linear(160, 128)

    def forward(self, batch: list[dict[str, Any]]) -> Tensor:
        stays = [self._stay(sample) for sample in batch]
        padded = nn.utils.rnn.pad_sequence(stays, batch_first=True)
        lengths = torch.tensor([len(stay) for stay in stays])
        padding = torch.arange(padded.shape[1]) >= lengths[:, None]
        encoded = self.layers(padded + self.places[: padded.shape[1]], src_key_padding_mask=padding)
        last = encoded[torch.arange(len(stays)), lengths - 1]
        static = self.static(torch.stack([sample["static"] for sample in batch]))
        found: Tensor = self.out(torch.cat([last, static], dim=-1))
        return found

    def _stay(self, sample: dict[str, Any]) -> Tensor:
        vectors = []
        for kind, codes, values in zip(
            sample["event_kind"], sample["event_codes"], sample["event_values"], strict=True
        ):
            index = torch.tensor(codes)
            amount = torch.nan_to_num(torch.tensor(values)).unsqueeze(-1)
            pooled = self.presence(index).sum(0) + (self.amount(index) * amount).sum(0)
            vectors.append(self.encoders[kind](pooled))
        return torch.stack(vectors)


def _sinusoids(length: int) -> Tensor:
    rates = torch.exp(torch.arange(0, 128, 2) * (-math.log(10_000.0) / 128))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def collate_lists(items: list[tuple[Sample, Sample]]) -> Any:
    """Samples stay lists; labels are stacked."""
    return tuple(([pair[side][0] for pair in items], torch.stack([pair[side][1] for pair in items])) for side in (0, 1))


def plain_training(name: str, task: Any, data: DomainDataset) -> Iterable[float]:
    """An endless training of a task, which yields the last loss after every epoch."""
    if name in ("seizure", "sleep"):
        network: nn.Module = seizure_network() if name == "seizure" else sleep_network()
        return train_epochs(network, data, signal_samples(data), None, task)
    makers: dict[str, Callable[[], nn.Module]] = {
        "drugs": DrugNetwork,
        "readmission": lambda: EventNetwork(len(data.info.vocabularies["events"])),
    }
    return train_epochs(makers[name](), data, ragged_samples(data), collate_lists, task)
