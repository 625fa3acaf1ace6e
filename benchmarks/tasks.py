"""The paper's four tasks as synthetic arrays of the right shape, made where they are needed (on the GPU, say).

Labels depend on the inputs, so that there is something to learn and learning curves can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manydg.algorithms import Algorithm, build_algorithm
from manydg.backbones import build_backbone
from manydg.data.columns import Ragged, offsets_from_lengths
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.info import DatasetInfo, TargetSpec
from manydg.targets import target_of

_ROWS_AT_ONCE = 8192
DIAGNOSES, PROCEDURES, DRUGS = 1958, 1430, 112
KINDS = 5
CODES_OF_KIND = (800, 160, 1000, 600, 400)
CODES_OF_EVENT = (2, 12, 2, 1, 1)
LONGEST_STAY = 300


@dataclass(frozen=True)
class Task:
    """A task of the paper.

    Parameters
    ----------
    make : callable
        From a number of samples, a device and a seed to a dataset.
    samples : int
        As many as the paper's dataset has.
    backbone : str
    batch_size, lr
        The paper's.
    target : float
        Seconds of a training epoch of ManyDG on an H200 that were asked for.
    times_faster : float
        How much faster than the plain implementation a CPU should be.
    """

    make: Callable[[int, torch.device, int], DomainDataset]
    samples: int
    backbone: str
    batch_size: int
    lr: float
    target: float
    times_faster: float


def model(task: Task, algorithm: str, data: DomainDataset, device: torch.device | str) -> Algorithm:
    """An algorithm with the task's backbone, weights as they come."""
    backbone = build_backbone(task.backbone, InputSchema.of(data)).to(device)
    backbone.fit_inputs(data)
    return build_algorithm(algorithm, backbone, target_of(data.target), data.n_patients).to(device)


def seizure(samples: int, device: torch.device, seed: int = 0) -> DomainDataset:
    """10 s of 16 channels at 200 Hz, expert votes over six classes, 48 samples a patient."""
    generator = torch.Generator(device).manual_seed(seed)
    domains = _patients(samples, max(2, samples // 48), generator)
    classes = torch.randint(0, 6, (samples,), device=device, generator=generator)
    votes = torch.randint(0, 3, (samples, 6), device=device, generator=generator).float()
    votes[torch.arange(samples, device=device), classes] += 8
    signal = _noise(classes, domains, (16, 2000), generator)
    spec = TargetSpec("votes", ("seizure", "lpd", "gpd", "lrda", "grda", "other"))
    return _dataset({"signal": signal}, votes, spec, domains, {"settings": {"rate": 200.0}})


def sleep(samples: int, device: torch.device, seed: int = 0) -> DomainDataset:
    """30 s of 2 channels at 100 Hz, five stages, about 4,000 samples a patient."""
    generator = torch.Generator(device).manual_seed(seed)
    domains = _patients(samples, max(2, samples // 4000), generator)
    classes = torch.randint(0, 5, (samples,), device=device, generator=generator)
    signal = _noise(classes, domains, (2, 3000), generator)
    spec = TargetSpec("classes", ("W", "N1", "N2", "N3", "REM"))
    return _dataset({"signal": signal}, classes, spec, domains, {"settings": {"rate": 100.0}})


def drugs(samples: int, device: torch.device, seed: int = 0) -> DomainDataset:
    """Visits with their history, about two a patient and up to 29; 112 drugs."""
    rng = np.random.default_rng(seed)
    owner, visits = _visits(samples, rng)
    diagnoses = _nested(visits, rng.poisson(9.0, visits.sum()) + 1, DIAGNOSES, rng)
    procedures = _nested(visits, rng.poisson(3.0, visits.sum()), PROCEDURES, rng)
    history = _nested(visits - 1, rng.poisson(8.0, (visits - 1).sum()) + 1, DRUGS, rng, first=0)
    assert isinstance(diagnoses.values, Ragged)
    assert isinstance(diagnoses.values.values, Tensor)
    # A drug is given where a code of the current visit that it belongs to was made.
    current = diagnoses.values.take(diagnoses.offsets[1:] - 1)
    given = torch.zeros(samples, DRUGS)
    assert isinstance(current.values, Tensor)
    given[current.row_of_item(), current.values % DRUGS] = 1.0
    vocabularies = {
        "diagnoses": ["<unknown>", *(f"d{code}" for code in range(1, DIAGNOSES))],
        "procedures": ["<unknown>", *(f"p{code}" for code in range(1, PROCEDURES))],
        "drugs": [f"A{code:03d}" for code in range(DRUGS)],
    }
    inputs = {"diagnoses": diagnoses, "procedures": procedures, "history_drugs": history}
    spec = TargetSpec("multilabel", tuple(vocabularies["drugs"]))
    info = {"vocabularies": vocabularies, "settings": {"drug_interactions": [[0, 3], [5, 9]]}}
    return _dataset(inputs, given, spec, torch.from_numpy(owner), info).to(device)


def readmission(samples: int, device: torch.device, seed: int = 0) -> DomainDataset:
    """Stays of 70 events on average and 300 at most, of five kinds, each of one to a dozen codes."""
    rng = np.random.default_rng(seed)
    stays = rng.gamma(1.6, 44.0, samples).astype(np.int64).clip(1, LONGEST_STAY)
    kinds = rng.integers(0, KINDS, stays.sum())
    starts = np.concatenate([[1], 1 + np.cumsum(CODES_OF_KIND)])
    sizes = np.array(CODES_OF_EVENT)[kinds]
    kind_of_code = np.repeat(kinds, sizes)
    codes = starts[kind_of_code] + rng.integers(0, 1 << 30, len(kind_of_code)) % np.array(CODES_OF_KIND)[kind_of_code]
    values = np.where(kind_of_code == 1, rng.normal(size=len(codes)), np.nan).astype(np.float32)
    outer, inner = _offsets(stays), _offsets(sizes)
    frequent = np.add.reduceat((codes == starts[2]).astype(np.int64), inner[outer[:-1]].numpy())
    label = (rng.random(samples) < np.where(frequent > 0, 0.5, 0.1)).astype(np.int64)
    inputs = {
        "event_kind": Ragged(torch.from_numpy(kinds), outer),
        "event_time": Ragged(torch.from_numpy(rng.random(stays.sum()).astype(np.float32)), outer),
        "event_codes": Ragged(Ragged(torch.from_numpy(codes), inner), outer),
        "event_values": Ragged(Ragged(torch.from_numpy(values), inner), outer),
        "static": torch.from_numpy(rng.normal(size=(samples, 3)).astype(np.float32)),
    }
    names = ("diagnosis", "lab", "medication", "treatment", "physicalexam")
    fields = [
        {"name": name, "kind": kind, "start": int(starts[kind]), "stop": int(starts[kind + 1])}
        for kind, name in enumerate(names)
    ]
    size = int(starts[-1])
    info = {
        "vocabularies": {"events": ["<unknown>", *(f"c{code}" for code in range(1, size))]},
        "settings": {"event_kinds": list(names), "code_fields": fields},
    }
    owner = np.sort(rng.integers(0, max(2, samples * 9 // 10), samples))
    domains = torch.from_numpy(np.unique(owner, return_inverse=True)[1])
    return _dataset(inputs, torch.from_numpy(label), TargetSpec("binary", ("no", "yes")), domains, info).to(device)


TASKS = {
    "seizure": Task(seizure, 132_000, "seizure-cnn", 128, 5e-4, 0.8, 2.0),
    "sleep": Task(sleep, 332_000, "sleep-cnn", 256, 5e-4, 2.5, 2.0),
    "drugs": Task(drugs, 12_000, "gamenet", 64, 1e-3, 0.3, 3.0),
    "readmission": Task(readmission, 160_000, "event-transformer", 256, 5e-4, 5.0, 8.0),
}


def _patients(samples: int, patients: int, generator: torch.Generator) -> Tensor:
    """Patient codes, at least two samples of each."""
    base = torch.arange(patients, device=generator.device).repeat(2)
    if samples < len(base):
        return torch.arange(samples, device=generator.device) // 2
    more = torch.randint(0, patients, (samples - len(base),), device=generator.device, generator=generator)
    return torch.cat([base, more])


def _noise(classes: Tensor, domains: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Noise in microvolts, whose smoothness tells the class and whose loudness the patient."""
    device = generator.device
    signal = torch.empty(len(classes), *shape, device=device)
    loudness = 20 + 20 * torch.rand(int(domains.max()) + 1, device=device, generator=generator)
    for start in range(0, len(classes), _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, len(classes)))
        piece = torch.randn(len(classes[rows]), *shape, device=device, generator=generator)
        smooth = classes[rows].float()[:, None, None] / 8
        piece = piece + smooth * piece.roll(1, dims=-1)
        signal[rows] = piece * loudness[domains[rows]][:, None, None]
    return signal


def _visits(samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Patient of each sample and its number of visits so far: a sample is a visit with those before it."""
    counts = []
    while sum(counts) < samples:
        counts.append(int(min(29, 1 + rng.geometric(0.62))))
    counts[-1] -= sum(counts) - samples
    counts = [count for count in counts if count]
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.concatenate([np.arange(1, count + 1) for count in counts])


def _nested(outer: np.ndarray, sizes: np.ndarray, codes: int, rng: np.random.Generator, first: int = 1) -> Ragged:
    drawn = first + (rng.random(sizes.sum()) ** 2 * (codes - first)).astype(np.int64)
    return Ragged(Ragged(torch.from_numpy(drawn), _offsets(sizes)), _offsets(outer))


def _offsets(lengths: np.ndarray) -> Tensor:
    return offsets_from_lengths(torch.from_numpy(np.asarray(lengths, dtype=np.int64)))


def _dataset(inputs: dict, targets: Tensor, spec: TargetSpec, domains: Tensor, info: dict) -> DomainDataset:
    patients = np.array([f"{code}" for code in range(int(domains.max()) + 1)])
    return DomainDataset(inputs, targets, spec, domains, patients, info=DatasetInfo.of(info), pseudonym_key="00" * 32)
