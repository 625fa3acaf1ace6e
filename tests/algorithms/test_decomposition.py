"""SimD1 and SimD2: their four losses against NumPy, and what lone samples take part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manydg.algorithms._families import SimpleDecomposition
from manydg.algorithms.simd1 import SimD1, SimD1Settings
from manydg.algorithms.simd2 import SimD2
from manydg.backbones import Backbone
from manydg.data.dataset import Batch
from manydg.data.info import TargetSpec
from manydg.targets import target_of

WIDTH, PAIRS, ROWS = 5, 3, 8
CLASSES = target_of(TargetSpec("classes", ("a", "b", "c")))
ONES: dict[str, Any] = {"supervised": 1.0, "reconstruction": 1.0, "similarity": 1.0, "orthogonality": 1.0}


def batch_of_pairs() -> Batch:
    v = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    return Batch({"x": v}, torch.arange(ROWS) % 3, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), PAIRS)


def parts_of(model: SimpleDecomposition, batch: Batch) -> tuple[Any, ...]:
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    with torch.no_grad():
        z, u = model.domain_encoder(v), model.label_encoder(v)
        hat, logits = model.decoder(torch.cat([z, u], -1)), model.head(u)
    return tuple(part.detach().numpy() for part in (v, z, u, hat, logits))


def cross_entropy(logits: Any, targets: Any) -> float:
    return float(np.mean([np.log(np.exp(row).sum()) - row[k] for row, k in zip(logits, targets, strict=True)]))


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def frobenius(z: Any, u: Any) -> float:
    """Squared norm of Z^T U, entry by entry, over the squared number of rows."""
    total = 0.0
    for i in range(z.shape[1]):
        for j in range(u.shape[1]):
            total += sum(z[row, i] * u[row, j] for row in range(len(z))) ** 2
    return total / len(z) ** 2


def test_simd1_s_four_losses_equal_numpy_s(given: Callable[[int], Backbone]) -> None:
    model, batch = SimD1(given(WIDTH), CLASSES, 5, SimD1Settings(**ONES)).double(), batch_of_pairs()
    v, z, u, hat, logits = parts_of(model, batch)
    invariant = []
    for i in range(PAIRS):
        difference = z[i] - z[i + PAIRS]
        invariant.append((difference**2).sum() / WIDTH - difference.sum() ** 2 / WIDTH**2)
    expected = {
        "supervised": cross_entropy(logits, batch.targets.numpy()),
        "reconstruction": float(((v - hat) ** 2).mean()),
        "similarity": float(np.mean(invariant)),
        "orthogonality": frobenius(z, u),
    }
    terms = model.losses(batch)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-10)


def test_simd2_s_four_losses_equal_numpy_s(given: Callable[[int], Backbone]) -> None:
    model, batch = SimD2(given(WIDTH), CLASSES, 5).double(), batch_of_pairs()
    v, z, u, hat, logits = parts_of(model, batch)
    unit_z, unit_u = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (z, u))
    expected = {
        "supervised": cross_entropy(logits, batch.targets.numpy()),
        "reconstruction": -float(np.mean([cosine(a, b) for a, b in zip(v, hat, strict=True)])),
        "similarity": -float(np.mean([cosine(z[i], z[i + PAIRS]) for i in range(PAIRS)])),
        "orthogonality": frobenius(unit_z, unit_u),
    }
    terms = model.losses(batch)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("cls", [SimD1, SimD2])
def test_only_the_similarity_needs_a_partner(cls: type[SimpleDecomposition], given: Callable[[int], Backbone]) -> None:
    model, batch = cls(given(WIDTH), CLASSES, 5).double(), batch_of_pairs()
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    for name, term in model.losses(batch).items():
        (gradient,) = torch.autograd.grad(term, v, retain_graph=True)
        moves_lone = bool((gradient[2 * PAIRS :] != 0).any())
        assert moves_lone == (name != "similarity")
    alone = model.losses(Batch(batch.inputs, batch.targets, batch.domains, pairs=0))
    assert set(alone) == {"supervised", "reconstruction", "orthogonality"}


@pytest.mark.parametrize("off", sorted(ONES))
def test_an_objective_of_weight_zero_is_not_built(off: str, given: Callable[[int], Backbone]) -> None:
    model = SimD1(given(WIDTH), CLASSES, 5, SimD1Settings(**{**ONES, off: 0.0})).double()
    assert set(model.losses(batch_of_pairs())) == set(ONES) - {off}
