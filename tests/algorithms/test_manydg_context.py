"""The method with context: its contrast, its projection, its averages, and that hidden context is no context."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from manydg.algorithms import build_algorithm
from manydg.algorithms.manydg_context import ManyDGContext, hide_context, patient_contrast, project_out
from manydg.backbones import Backbone
from manydg.data.build import from_arrays
from manydg.data.context import add_context
from manydg.data.dataset import DomainDataset
from manydg.targets import target_of


def make() -> DomainDataset:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(8), [6, 18, 12, 12, 10, 14, 20, 4])
    values = rng.normal(size=(96, 4)) + 3 * rng.normal(size=(8, 4))[who]
    return add_context(from_arrays(values, (rng.random(96) < 0.5).astype(int), who, times=np.arange(96)))


def built(small_mlp: Callable[[DomainDataset], Backbone], data: DomainDataset, **settings: object) -> ManyDGContext:
    found = build_algorithm("manydg-context", small_mlp(data), target_of(data.target), data.n_patients, settings)
    assert isinstance(found, ManyDGContext)
    return found


def test_the_contrast_is_the_cross_entropy_of_the_partner_among_other_patients() -> None:
    torch.manual_seed(0)
    factors, domains = torch.randn(7, 5), torch.tensor([0, 0, 1, 0, 0, 1, 2])
    units = factors / factors.norm(dim=1, keepdim=True)
    expected = []
    for row in range(6):
        partner = (row + 3) % 6
        rivals = [other for other in range(6) if domains[other] != domains[row]]
        scores = torch.stack([units[row] @ units[other] / 0.2 for other in [partner, *rivals]])
        expected.append(-torch.log_softmax(scores, 0)[0])
    assert torch.allclose(patient_contrast(factors, domains, 3, 0.2), torch.stack(expected).mean(), atol=1e-5)


def test_a_contrast_is_low_where_each_patient_has_a_direction_and_high_where_all_share_one() -> None:
    domains = torch.arange(6).repeat(2)
    apart = torch.eye(6).repeat(2, 1)
    together = torch.ones(12, 6)
    assert float(patient_contrast(apart, domains, 6, 0.1)) < 0.01
    assert float(patient_contrast(together, domains, 6, 0.1)) > 2.0


def test_what_is_left_is_at_right_angles_to_every_direction_and_no_shorter_than_it_must_be() -> None:
    torch.manual_seed(1)
    v, factors = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 2, 6, dtype=torch.float64)
    left = project_out(v, factors)
    assert torch.allclose(torch.einsum("bd,bnd->bn", left, factors), torch.zeros(3, 2, dtype=torch.float64), atol=1e-10)
    for row in range(3):
        coefficients = torch.linalg.lstsq(factors[row].T, v[row, :, None]).solution
        assert torch.allclose(left[row], v[row] - (factors[row].T @ coefficients)[:, 0])


def test_hidden_context_is_the_context_of_a_patient_of_whom_nothing_is_known() -> None:
    data = make()
    inputs = data.take(torch.arange(96)).inputs
    torch.manual_seed(0)
    hidden = hide_context(inputs, 0.5)["context"]
    rows = (hidden == 0).all(dim=1)  # type: ignore[union-attr]
    assert 20 < int(rows.sum()) < 76
    assert torch.equal(hidden[~rows], inputs["context"][~rows])  # type: ignore[index]
    assert torch.equal(hide_context(inputs, 0.5)["x"], inputs["x"])  # type: ignore[arg-type]


def test_context_is_never_hidden_in_prediction(small_mlp: Callable[[DomainDataset], Backbone]) -> None:
    data = make()
    algorithm = built(small_mlp, data, hide=1.0).eval()
    inputs = data.take(torch.arange(96)).inputs
    without = {**inputs, "context": torch.zeros_like(inputs["context"])}  # type: ignore[arg-type]
    assert not torch.allclose(algorithm.predict(inputs), algorithm.predict(without))


def test_prediction_uses_the_average_of_all_weights(
    small_mlp: Callable[[DomainDataset], Backbone],
) -> None:
    data = make()
    algorithm = built(small_mlp, data, decay=0.5, hide=0.0, directions=2)
    optimizers = algorithm.optimizers(1e-2, 0.0)
    batch = data.take(torch.arange(96))
    parts = ("backbone", "head", "domain_encoder")
    weights = [weight for part in parts for weight in algorithm.get_submodule(part).parameters()]
    averages = [weight.detach().clone() for weight in weights]
    for step in range(1, 7):
        algorithm.step(batch, optimizers)
        share = max(0.5, 10 / (9 + step))
        averages = [(1 - share) * old + share * new.detach() for old, new in zip(averages, weights, strict=True)]
    averaged = algorithm.eval().predict(batch.inputs)
    for weight, average in zip(weights, averages, strict=True):
        weight.data = average
    # What the averaged backbone's batch norms have learnt is its own.
    features = algorithm.run("backbone", batch.inputs)
    factors = algorithm.domain_encoder(features).reshape(96, 2, -1)
    assert torch.allclose(averaged, algorithm.head(project_out(features, factors)), atol=1e-6)
    assert torch.allclose(algorithm.averages["backbone"].get_buffer("network/0/weight"), averages[0])


def test_pairs_of_one_patient_are_drawn_only_where_patients_are_told_apart(
    small_mlp: Callable[[DomainDataset], Backbone],
) -> None:
    data = make()
    assert built(small_mlp, data).sampling == "samples"
    assert built(small_mlp, data, contrast=0.1).sampling == "pairs"


def test_there_is_no_z_where_nothing_trains_it(small_mlp: Callable[[DomainDataset], Backbone]) -> None:
    data = make()
    assert set(built(small_mlp, data).embed(data.take(torch.arange(96)).inputs)) == {"v"}


@pytest.mark.parametrize("directions", [0, 1, 3])
def test_the_two_parts_of_v_add_up_to_it(small_mlp: Callable[[DomainDataset], Backbone], directions: int) -> None:
    data = make()
    found = built(small_mlp, data, directions=directions, contrast=0.1).eval().embed(data.take(torch.arange(96)).inputs)
    assert torch.allclose(found["parallel"] + found["orthogonal"], found["v"], atol=1e-5)
