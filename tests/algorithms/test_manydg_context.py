"""The method with context: its contrast, its projection, its averages, and that hidden context is no context."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from manydg.algorithms import build_algorithm
from manydg.algorithms.manydg_context import ManyDGContext, TwoViews, patient_contrast, project_out, without_context
from manydg.backbones import Backbone
from manydg.data.context import add_context
from manydg.data.dataset import DomainDataset, from_arrays
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


def test_without_context_a_patient_is_one_of_whom_nothing_is_known() -> None:
    data = make()
    inputs = without_context(data.take(torch.arange(96)).inputs)
    assert not inputs["context"].any()  # type: ignore[union-attr]
    assert not inputs["context_weight"].any()  # type: ignore[union-attr]
    assert torch.equal(inputs["x"], data.take(torch.arange(96)).inputs["x"])  # type: ignore[arg-type]


def test_a_patient_who_is_not_known_is_predicted_from_the_sample_alone(
    small_mlp: Callable[[DomainDataset], Backbone],
) -> None:
    data = make()
    algorithm = built(small_mlp, data).eval()
    inputs = data.take(torch.arange(96)).inputs
    unknown = {**inputs, "context_weight": torch.zeros(96, 1)}
    nonsense = {**unknown, "context": 1e3 * torch.ones_like(inputs["context"])}  # type: ignore[arg-type]
    assert torch.equal(algorithm.predict(unknown), algorithm.predict(nonsense))
    assert not torch.allclose(algorithm.predict(inputs), algorithm.predict(without_context(inputs)))


def test_prediction_moves_from_the_sample_alone_to_its_context_as_the_patient_becomes_known(
    small_mlp: Callable[[DomainDataset], Backbone],
) -> None:
    data = make()
    algorithm = built(small_mlp, data).eval()
    algorithm.fit_inputs(data)
    trust = data.columns["context_weight"].double().numpy()  # type: ignore[union-attr]
    # Samples in units of the strength k, since the trust is n / (n + k).
    usual = float(np.quantile(trust / (1 - trust), 0.05))
    assert float(algorithm.usual_context) == pytest.approx(usual)
    inputs = data.take(torch.arange(96)).inputs

    def at(samples: float) -> torch.Tensor:
        return algorithm.predict({**inputs, "context_weight": torch.full((96, 1), samples / (samples + 1))})

    alone, informed = at(0.0), at(usual)
    assert not torch.allclose(alone, informed)
    assert torch.allclose(at(1e9), informed)
    assert torch.allclose(at(usual / 4), 0.75 * alone + 0.25 * informed, atol=1e-6)


def test_the_two_networks_do_not_teach_each_other(small_mlp: Callable[[DomainDataset], Backbone]) -> None:
    data = make()
    algorithm = built(small_mlp, data)
    backbone = algorithm.backbone
    assert isinstance(backbone, TwoViews)
    terms = algorithm.losses(data.take(torch.arange(96)))
    for term, deaf in (("alone", backbone.informed), ("supervised", backbone.alone)):
        gradients = torch.autograd.grad(terms[term], list(deaf.parameters()), retain_graph=True, allow_unused=True)
        assert not any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def test_where_there_is_no_context_it_is_averaged_base(small_mlp: Callable[[DomainDataset], Backbone]) -> None:
    with_context = make()
    data = from_arrays(with_context.columns["x"], with_context.targets, with_context.domains)
    torch.manual_seed(0)
    algorithm = built(small_mlp, data)
    assert not isinstance(algorithm.backbone, TwoViews)
    assert set(algorithm.losses(data.take(torch.arange(96)))) == {"supervised"}


def test_prediction_uses_the_average_of_all_weights(
    small_mlp: Callable[[DomainDataset], Backbone],
) -> None:
    data = make()
    algorithm = built(small_mlp, data, decay=0.5, directions=2)
    optimizers = algorithm.optimizers(1e-2, 0.0)
    batch = data.take(torch.arange(96))
    parts = ("backbone", "head", "domain_encoder", "head_alone")
    weights = {f"{part}.{name}": w for part in parts for name, w in algorithm.get_submodule(part).named_parameters()}
    averages = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in range(1, 7):
        algorithm.step(batch, optimizers)
        share = max(0.5, 10 / (9 + step))
        averages = {name: (1 - share) * averages[name] + share * weight.detach() for name, weight in weights.items()}
    averaged = algorithm.eval().predict(batch.inputs)
    for name, weight in weights.items():
        weight.data = averages[name]
    # What the averaged backbone's batch norms have learnt is its own.
    informed, alone = algorithm.run("backbone", batch.inputs).chunk(2, dim=1)
    factors = algorithm.domain_encoder(informed).reshape(96, 2, -1)
    trust = batch.inputs["context_weight"]
    known = (trust / (1 - trust) / algorithm.usual_context).clamp(0, 1)  # type: ignore[operator]
    expected = torch.lerp(algorithm.head_alone(alone), algorithm.head(project_out(informed, factors)), known)
    assert torch.allclose(averaged, expected, atol=1e-6)
    first = "informed.network.0.weight"
    assert torch.allclose(
        algorithm.averages["backbone"].get_buffer(first.replace(".", "/")), averages[f"backbone.{first}"]
    )


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
