"""Small synthetic datasets of every shape that backbones take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays

ROWS = 12


def table() -> DomainDataset:
    """Measurements without gaps."""
    rng = np.random.default_rng(0)
    return from_arrays(rng.normal(size=(ROWS, 5)) * 40 + 7, np.arange(ROWS) % 3, np.arange(ROWS) // 2)


def gaps() -> DomainDataset:
    """Measurements of which a fifth were never taken."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random((ROWS, 5)) < 0.2, np.nan, rng.normal(size=(ROWS, 5)) * 40 + 7)
    return from_arrays(values, np.arange(ROWS) % 3, np.arange(ROWS) // 2, missing=True)


def signal(channels: int, samples: int) -> DomainDataset:
    rng = np.random.default_rng(0)
    values = 30 * rng.normal(size=(ROWS, channels, samples)).astype(np.float32)
    return from_arrays(
        {"signal": values}, np.arange(ROWS) % 3, np.arange(ROWS) // 2, info={"settings": {"rate": 200.0}}
    )


def codes(rng: np.random.Generator, low: int, high: int, fewest: int = 0) -> list[int]:
    return sorted(rng.choice(np.arange(low, high), rng.integers(fewest, 5), replace=False).tolist())


def visits() -> DomainDataset:
    """One to four visits a sample; some visits without procedures or drugs."""
    rng = np.random.default_rng(0)
    lengths = [1 + row % 4 for row in range(ROWS)]
    vocabularies = {
        "diagnoses": ["<unknown>", *(f"d{code}" for code in range(1, 15))],
        "procedures": ["<unknown>", *(f"p{code}" for code in range(1, 10))],
        "drugs": [f"drug{code}" for code in range(6)],
    }
    inputs = {
        "diagnoses": Ragged.from_rows([[codes(rng, 1, 15, 1) for _ in range(length)] for length in lengths]),
        "procedures": Ragged.from_rows([[codes(rng, 1, 10) for _ in range(length)] for length in lengths]),
        "history_drugs": Ragged.from_rows([[codes(rng, 0, 6) for _ in range(length - 1)] for length in lengths]),
    }
    targets = rng.integers(0, 2, (ROWS, 6))
    info = {"vocabularies": vocabularies, "settings": {"drug_interactions": [[0, 3], [2, 5]]}}
    return from_arrays(inputs, targets, np.arange(ROWS) // 2, kind="multilabel", names=vocabularies["drugs"], info=info)


KINDS = ("diagnosis", "lab", "medication")
FIELDS = (
    {"name": "diagnosis_string", "kind": 0, "start": 1, "stop": 6},
    {"name": "diagnosis_icd", "kind": 0, "start": 6, "stop": 10},
    {"name": "lab", "kind": 1, "start": 10, "stop": 16},
    {"name": "medication_name", "kind": 2, "start": 16, "stop": 20},
    {"name": "medication_dose", "kind": 2, "start": 20, "stop": 22},
)
CODES = 22


def events() -> DomainDataset:
    """Stays of 0 to 7 events of three kinds; the second stay is empty."""
    rng = np.random.default_rng(0)
    lengths = [0 if row == 1 else 1 + (5 * row) % 7 for row in range(ROWS)]
    kinds = [rng.integers(0, 3, length).tolist() for length in lengths]
    ranges = {0: (1, 10), 1: (10, 16), 2: (16, 22)}
    held = [[codes(rng, *ranges[kind], 1) for kind in row] for row in kinds]
    values = [[[_value(rng, code) for code in event] for event in row] for row in held]
    inputs = {
        "event_kind": Ragged.from_rows(kinds),
        "event_time": Ragged.from_rows([np.sort(rng.uniform(0, 999, n)).tolist() for n in lengths], torch.float32),
        "event_codes": Ragged.from_rows(held),
        "event_values": Ragged.from_rows(values, torch.float32),
        "static": rng.normal(size=(ROWS, 3)).astype(np.float32) * 10 + 60,
    }
    info = {
        "vocabularies": {"events": ["<unknown>", *(f"c{code}" for code in range(1, CODES))]},
        "settings": {"event_kinds": list(KINDS), "code_fields": list(FIELDS)},
    }
    return from_arrays(inputs, np.arange(ROWS) % 2, np.arange(ROWS) // 2, missing=True, info=info)


def _value(rng: np.random.Generator, code: int) -> float:
    if not 10 <= code < 16:
        return float("nan")
    return float("nan") if rng.random() < 0.2 else float(rng.normal() * code + 100 * code)


MAKERS: dict[str, Callable[[], DomainDataset]] = {
    "table": table,
    "gaps": gaps,
    "visits": visits,
    "events": events,
    "seizure": lambda: signal(16, 2000),
    "sleep": lambda: signal(2, 3000),
}


@pytest.fixture
def make() -> Callable[[str], DomainDataset]:
    """A small dataset by the name of its shape."""
    return lambda name: MAKERS[name]()
