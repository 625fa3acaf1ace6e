"""ManyDG's four objectives against a computation of their own in NumPy, and what the projection promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manydg.algorithms import build_algorithm
from manydg.algorithms.manydg import ManyDG, ManyDGSettings, mean_discrepancy, orthogonal_projection
from manydg.algorithms.manydg_random_pairs import ManyDGRandomPairs
from manydg.backbones import Backbone
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.info import TargetSpec
from manydg.data.sampling import plan_epoch
from manydg.errors import ConfigError
from manydg.targets import target_of

Array = npt.NDArray[np.float64]
WIDTH, PAIRS, LONE = 4, 3, 2
ROWS = 2 * PAIRS + LONE
TEMPERATURE = 0.8
LABELS: dict[str, Any] = {
    "classes": np.array([0, 2, 1, 1, 0, 2, 2, 0]),
    "binary": np.array([0, 1, 1, 1, 0, 1, 0, 0]),
    "votes": np.array([[8, 0, 5], [1, 9, 0], [3, 3, 1], [0, 2, 7], [5, 1, 1], [4, 4, 1], [0, 0, 3], [2, 6, 5.0]]),
    "multilabel": np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0.0]]),
}


def numpy_layers(layers: list[tuple[Array, Array]], rows: Array) -> Array:
    for index, (weight, bias) in enumerate(layers):
        rows = rows @ weight.T + bias
        if index < len(layers) - 1:
            rows = np.maximum(rows, 0)
    return rows


def cosine(first: Array, second: Array) -> Array:
    lengths = np.sqrt((first**2).sum(1)) * np.sqrt((second**2).sum(1))
    return np.asarray((first * second).sum(1) / lengths)


def label_weights(kind: str) -> Array:
    """Each label as weights over the classes, by the paper's words."""
    labels = LABELS[kind]
    if kind in ("classes", "binary"):
        return np.eye(labels.max() + 1)[labels]
    if kind == "multilabel":
        return np.asarray(labels)
    chosen = [[float(vote > max(row) / 2) for vote in row] for row in labels]
    return np.array([np.array(row) / sum(row) for row in chosen])


def numpy_terms(parts: dict[str, Any], kind: str, similarity: str, scale: float) -> dict[str, float]:
    """The paper's four objectives of features v; ``scale`` is the squared length of mean v, which is held fixed."""
    v, prototypes = parts["v"], parts["prototypes"]
    z = numpy_layers(parts["encoder"], v)
    orthogonal = v - z * ((v * z).sum(1) / (z * z).sum(1))[:, None]
    sides = (orthogonal, prototypes)
    if similarity == "cosine":
        sides = tuple(side / np.sqrt((side**2).sum(1, keepdims=True)) for side in sides)
    logits = sides[0] @ sides[1].T / TEMPERATURE
    weights = label_weights(kind)
    if kind == "multilabel":
        sigmoid = 1 / (1 + np.exp(-logits))
        supervised = -(weights * np.log(sigmoid) + (1 - weights) * np.log(1 - sigmoid)).sum(1).mean()
    else:
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        supervised = -(weights * log_p).sum(1).mean()
    present = np.maximum(weights.sum(1, keepdims=True), 1)
    label = (weights / present) @ prototypes
    agreement = 0.0
    for own, partner in [(i, i + PAIRS) for i in range(PAIRS)] + [(i + PAIRS, i) for i in range(PAIRS)]:
        hat = numpy_layers(parts["decoder"], np.concatenate([z[partner], label[own]])[None])
        agreement += float(cosine(v[own][None], hat)[0])
    return {
        "supervised": float(supervised),
        "mmd": float(((z.mean(0) - v.mean(0)) ** 2).sum() / scale),
        "reconstruction": -agreement / PAIRS,
        "similarity": -float(cosine(z[:PAIRS], z[PAIRS : 2 * PAIRS]).mean()),
    }


def make(kind: str, given: Callable[[int], Backbone], **settings: Any) -> tuple[ManyDG, Batch]:
    names = ("no", "yes") if kind == "binary" else ("a", "b", "c")
    target = target_of(TargetSpec(kind, names))
    model = ManyDG(given(WIDTH), target, 9, ManyDGSettings(**settings)).double()
    v = torch.randn(ROWS, WIDTH, dtype=torch.float64) + 0.5
    targets = torch.from_numpy(LABELS[kind])
    domains = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    return model, Batch({"x": v.requires_grad_()}, targets, domains, PAIRS)


def parameters_of(model: ManyDG, batch: Batch) -> dict[str, Tensor]:
    v = batch.inputs["x"]
    assert isinstance(v, Tensor)
    return {"v": v, **dict(model.named_parameters())}


def as_numpy(values: dict[str, Tensor]) -> dict[str, Any]:
    arrays = {name: value.detach().numpy() for name, value in values.items()}
    layers = {
        part: [(arrays[f"{name}.{i}.weight"], arrays[f"{name}.{i}.bias"]) for i in (0, 2, 4)]
        for part, name in (("encoder", "domain_encoder"), ("decoder", "decoder"))
    }
    return {"v": arrays["v"], "prototypes": arrays["predictor.prototypes"], **layers}


@pytest.mark.parametrize("similarity", ["cosine", "inner"])
@pytest.mark.parametrize("kind", sorted(LABELS))
def test_every_term_and_its_gradient_equal_numpy_s(
    kind: str, similarity: str, given: Callable[[int], Backbone], numeric_gradient: Callable[..., Tensor]
) -> None:
    weights = {"supervised": 0.7, "mmd": 1.3, "reconstruction": 0.4, "similarity": 2.0}
    model, batch = make(kind, given, temperature=TEMPERATURE, predictor=similarity, **weights)
    values = parameters_of(model, batch)
    start = as_numpy(values)
    scale = float((start["v"].mean(0) ** 2).sum())
    terms = model.losses(batch)
    expected = numpy_terms(start, kind, similarity, scale)
    assert set(terms) == set(expected)
    for name, term in terms.items():
        assert term.item() == pytest.approx(weights[name] * expected[name], rel=1e-9, abs=1e-12)
        gradients = torch.autograd.grad(term, list(values.values()), retain_graph=True, allow_unused=True)
        for (key, value), gradient in zip(values.items(), gradients, strict=True):

            def moved(point: Tensor, key: str = key, name: str = name) -> float:
                parts = as_numpy({**values, key: point})
                return weights[name] * numpy_terms(parts, kind, similarity, scale)[name]

            wanted = numeric_gradient(moved, value)
            found = torch.zeros_like(value) if gradient is None else gradient
            torch.testing.assert_close(found, wanted, atol=2e-7, rtol=2e-6, msg=f"{name} by {key}")


def test_the_scale_of_the_discrepancy_gets_no_gradient() -> None:
    z, v = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64) + 1
    v.requires_grad_()
    (found,) = torch.autograd.grad(mean_discrepancy(z, v), v)
    difference, mean = (z.mean(0) - v.mean(0)).detach(), v.mean(0).detach()
    without = -2 * difference / mean.square().sum() / len(v)
    with_scale = without - 2 * mean * difference.square().sum() / mean.square().sum() ** 2 / len(v)
    torch.testing.assert_close(found, without.expand(6, 3))
    assert not torch.allclose(found, with_scale.expand(6, 3))


def test_features_of_zero_mean_have_a_bounded_discrepancy() -> None:
    v = torch.randn(50, 8)
    v = (v - v.mean(0)).requires_grad_()
    loss = mean_discrepancy(torch.randn(50, 8) * 0.1 + 1, v)
    (gradient,) = torch.autograd.grad(loss, v)
    assert float(loss.detach()) < 2000
    assert bool(torch.isfinite(gradient).all())


vectors = st.lists(st.floats(-10, 10, width=32), min_size=5, max_size=5)


@for_all(v=vectors, z=vectors)
@settings(max_examples=60, deadline=None)
def test_the_two_parts_add_up_to_v_and_stand_at_right_angles(v: list[float], z: list[float]) -> None:
    features, factor = torch.tensor(v, dtype=torch.float64), torch.tensor(z, dtype=torch.float64)
    parallel, orthogonal = orthogonal_projection(features, factor)
    torch.testing.assert_close(parallel + orthogonal, features)
    if float(factor.norm()) > 1e-3:
        bound = 1e-9 * (1 + float(features.norm()) * float(factor.norm()))
        assert abs(float(orthogonal @ factor)) < bound
        assert float(torch.linalg.matrix_rank(torch.stack([parallel, factor]), atol=1e-6)) <= 1
        again, _ = orthogonal_projection(features, 7 * factor)
        torch.testing.assert_close(again, parallel)


def test_where_z_is_zero_v_stays_whole_and_gradients_are_finite() -> None:
    v, z = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    parallel, orthogonal = orthogonal_projection(v, z)
    assert torch.equal(orthogonal, v)
    assert torch.equal(parallel, torch.zeros(3, 4))
    gradients = torch.autograd.grad((parallel.square() + orthogonal.square()).sum(), [v, z])
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


class Forbidden(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        raise AssertionError("a part of an objective that is switched off was computed")


@pytest.mark.parametrize("off", ["supervised", "mmd", "reconstruction", "similarity"])
def test_an_objective_that_is_off_is_not_computed(
    off: str, given: Callable[[int], Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make("classes", given, **{off: 0.0})
    if off == "supervised":
        monkeypatch.setattr(model.target, "loss", Forbidden().forward)
    if off == "mmd":
        monkeypatch.setattr("manydg.algorithms.manydg.mean_discrepancy", Forbidden())
    if off == "reconstruction":
        model.decoder = Forbidden()  # type: ignore[assignment]
    terms = model.losses(batch)
    assert set(terms) == {"supervised", "mmd", "reconstruction", "similarity"} - {off}


def test_prediction_is_the_head_s_of_the_orthogonal_part(given: Callable[[int], Backbone]) -> None:
    """What training minimises is what prediction gives: the supervised term is the loss of the predicted logits."""
    model, batch = make("classes", given)
    embeddings = model.embed(batch.inputs)
    logits = model.predict(batch.inputs)
    torch.testing.assert_close(logits, model.predictor(embeddings["orthogonal"]))
    assert not torch.allclose(logits, model.predictor(embeddings["v"]))
    loss = model.settings.supervised * model.target.loss(logits, batch.targets)
    torch.testing.assert_close(model.losses(batch)["supervised"], loss)


def test_parameters_do_not_grow_with_the_number_of_patients(given: Callable[[int], Backbone]) -> None:
    target = target_of(TargetSpec("classes", ("a", "b", "c")))
    sizes = {n: sum(p.numel() for p in ManyDG(given(WIDTH), target, n).parameters()) for n in (1, 10, 100_000)}
    assert len(set(sizes.values())) == 1


def test_lone_samples_train_the_supervised_and_the_mmd_term_only(given: Callable[[int], Backbone]) -> None:
    model, batch = make("classes", given)
    v = parameters_of(model, batch)["v"]
    for name, term in model.losses(batch).items():
        (gradient,) = torch.autograd.grad(term, v, retain_graph=True)
        lone = gradient[2 * PAIRS :].abs().sum(1)
        assert bool((lone > 0).all()) == (name in ("supervised", "mmd"))
        assert bool((gradient[: 2 * PAIRS].abs().sum(1) > 0).all())
    alone = model.losses(Batch(batch.inputs, batch.targets, batch.domains, pairs=0))
    assert set(alone) == {"supervised", "mmd"}


def test_the_control_differs_from_manydg_in_its_partners_alone(
    dataset_of: Callable[..., DomainDataset], given: Callable[[int], Backbone]
) -> None:
    dataset = dataset_of()
    target = target_of(dataset.target)
    torch.manual_seed(3)
    model = ManyDG(given(6), target, 12)
    torch.manual_seed(3)
    control = ManyDGRandomPairs(given(6), target, 12)
    batch = dataset.take(torch.arange(20), pairs=10)
    same, other = model.losses(batch), control.losses(batch)
    assert all(torch.equal(same[name], other[name]) for name in same)
    shares = {}
    for algorithm in (model, control):
        indices, pairs = next(iter(plan_epoch(algorithm.sampling, dataset.domains, 96, seed=0, epoch=0)))
        who = dataset.domains[indices]
        shares[algorithm.sampling] = float((who[:pairs] == who[pairs : 2 * pairs]).double().mean())
    assert shares["pairs"] == 1.0
    assert shares["random-pairs"] < 0.5


VALUES = np.array([3.0, 7.0, 5.0, 4.0, 9.0, 1.0, 2.0, 6.0])


def values_model(given: Callable[[int], Backbone]) -> tuple[ManyDG, Batch]:
    target = target_of(TargetSpec("regression", ("days",)))
    target.fit(torch.from_numpy(VALUES))
    model = ManyDG(given(WIDTH), target, 9).double()
    v = torch.randn(ROWS, WIDTH, dtype=torch.float64) + 0.5
    return model, Batch({"x": v}, torch.from_numpy(VALUES), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), PAIRS)


def test_a_value_has_a_linear_head_and_its_embedding_goes_to_the_decoder(given: Callable[[int], Backbone]) -> None:
    model, batch = values_model(given)
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    layers = {
        part: [(parameters[f"{part}.{i}.weight"], parameters[f"{part}.{i}.bias"]) for i in numbers]
        for part, numbers in (("domain_encoder", (0, 2, 4)), ("decoder", (0, 2, 4)), ("predictor.embedding", (0, 2)))
    }
    column = batch.inputs["x"]
    assert isinstance(column, Tensor)
    v = column.numpy()
    z = numpy_layers(layers["domain_encoder"], v)
    orthogonal = v - z * ((v * z).sum(1) / (z * z).sum(1))[:, None]
    standard = (VALUES - VALUES.mean()) / VALUES.std()
    predicted = orthogonal @ parameters["predictor.linear.weight"][0] + parameters["predictor.linear.bias"]
    label = numpy_layers(layers["predictor.embedding"], standard[:, None])
    partner = [3, 4, 5, 0, 1, 2]
    hat = numpy_layers(layers["decoder"], np.concatenate([z[partner], label[:6]], axis=1))
    terms = model.losses(batch)
    assert set(terms) == {"supervised", "mmd", "reconstruction", "similarity"}
    assert terms["supervised"].item() == pytest.approx(float(((predicted - standard) ** 2).mean()), rel=1e-6)
    assert terms["reconstruction"].item() == pytest.approx(-float(cosine(v[:6], hat).sum()) / PAIRS, rel=1e-6)
    torch.testing.assert_close(model.predict(batch.inputs)[:, 0], torch.from_numpy(predicted))


def test_the_first_predictions_of_a_value_are_near_the_training_mean(given: Callable[[int], Backbone]) -> None:
    model, batch = values_model(given)
    with torch.no_grad():
        model.start({"x": 1000 * cast("Tensor", batch.inputs["x"])})
        first = model.predict({"x": 1000 * cast("Tensor", batch.inputs["x"])})
    assert abs(float(first.mean())) < 1e-6
    assert float(first.square().mean()) <= 0.5**2 * 1.01


@pytest.mark.parametrize(
    ("name", "reason"),
    [("condadv", "probabilities of the classes"), ("pcl", "contrasts classes"), ("sagnet", "every class alike")],
)
def test_what_needs_classes_refuses_a_value_with_the_reason(
    name: str, reason: str, given: Callable[[int], Backbone]
) -> None:
    target = target_of(TargetSpec("regression", ("days",)))
    with pytest.raises(ConfigError, match=reason):
        build_algorithm(name, given(WIDTH), target, 9)
