"""Rivals whose objective holds a gradient: IRM's penalty and MLDG's meta-objective, against NumPy and differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from manydg.algorithms.irm import IRM, IRMSettings, squared_means
from manydg.algorithms.mldg import MLDG, MLDGSettings, mean_over_groups, split_episode
from manydg.backbones import Backbone, Inputs
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.info import TargetSpec
from manydg.targets import target_of

Array = npt.NDArray[np.float64]
CLASSES = target_of(TargetSpec("classes", ("a", "b", "c")))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def linear_irm(given: Callable[[int], Backbone], environments: int) -> tuple[IRM, Batch]:
    model = IRM(given(4), CLASSES, 32, IRMSettings(weight=2.0, anneal=0.1)).double()
    model.progress.fill_(0.5)
    model.head = nn.Linear(4, 3, bias=False).double()  # type: ignore[assignment]
    rows = 15
    x = torch.randn(rows, 4, dtype=torch.float64)
    return model, Batch({"x": x}, torch.arange(rows) % 3, torch.arange(rows) % 7 % environments)


def closed_form_penalty(weight: Array, x: Array, targets: Array, environments: Array) -> float:
    """dR/dw of one sample is sum_k (p_k - y_k) l_k; the penalty multiplies it between different samples."""
    logits = x @ weight.T
    slopes = ((softmax(logits) - np.eye(3)[targets]) * logits).sum(1)
    penalties = []
    for environment in np.unique(environments):
        own = slopes[environments == environment]
        if len(own) > 1:
            penalties.append(np.mean([own[i] * own[j] for i in range(len(own)) for j in range(len(own)) if i != j]))
    return float(np.mean(penalties))


@pytest.mark.parametrize("environments", [1, 3, 7, 32])
def test_irm_s_penalty_per_environment_equals_its_closed_form_on_a_linear_model(
    environments: int, given: Callable[[int], Backbone], numeric_gradient: Callable[..., Tensor]
) -> None:
    model, batch = linear_irm(given, environments)
    x = batch.inputs["x"]
    assert isinstance(x, Tensor)
    weight = model.head.weight
    assert isinstance(weight, Tensor)

    def penalty(point: Tensor) -> float:
        groups = batch.domains.numpy()
        return 2.0 * closed_form_penalty(point.detach().numpy(), x.numpy(), batch.targets.numpy(), groups)

    term = model.losses(batch)["penalty"]
    assert term.item() == pytest.approx(penalty(weight), rel=1e-10)
    (found,) = torch.autograd.grad(term, weight)
    torch.testing.assert_close(found, numeric_gradient(penalty, weight), atol=1e-8, rtol=1e-6)


def test_irm_s_estimate_is_the_mean_of_the_paper_s_product_over_all_halves() -> None:
    values = np.random.default_rng(0).normal(size=6)
    products = []
    for first in itertools.combinations(range(6), 3):
        second = [i for i in range(6) if i not in first]
        products.append(values[list(first)].mean() * values[second].mean())
    squared, counted = squared_means(torch.from_numpy(values), torch.zeros(6, dtype=torch.int64), 2)
    assert squared[0].item() == pytest.approx(np.mean(products))
    assert counted.tolist() == [True, False]


def test_an_environment_of_a_single_row_has_no_penalty(given: Callable[[int], Backbone]) -> None:
    model, batch = linear_irm(given, environments=7)
    rows = torch.arange(7)
    x = batch.inputs["x"]
    assert isinstance(x, Tensor)
    lone = Batch({"x": x[rows]}, batch.targets[rows], batch.domains[rows])
    assert model.losses(lone)["penalty"].item() == 0.0
    # Nor does it count among the environments that the penalty is averaged over.
    without, beside = torch.arange(14), torch.arange(15)
    domains = torch.where(beside < 14, batch.domains, 20)
    both = [
        model.losses(Batch({"x": x[rows]}, batch.targets[rows], domains[rows]))["penalty"] for rows in (without, beside)
    ]
    torch.testing.assert_close(*both)


class TwoLayers:
    """A perceptron with its own backpropagation, and MLDG's meta-objective of it."""

    def __init__(self, x: Array, targets: Array, domains: Array) -> None:
        self.x, self.targets, self.domains = x, targets, domains

    def loss_and_gradient(self, weights: dict[str, Array], rows: Array) -> tuple[float, dict[str, Array]]:
        x, targets, domains = self.x[rows], self.targets[rows], self.domains[rows]
        share = np.array([1 / (domains == who).sum() for who in domains]) / len(np.unique(domains))
        hidden = x @ weights["0.weight"].T + weights["0.bias"]
        active = np.maximum(hidden, 0)
        p = softmax(active @ weights["2.weight"].T + weights["2.bias"])
        loss = -(share * np.log(p[np.arange(len(x)), targets])).sum()
        slope = share[:, None] * (p - np.eye(3)[targets])
        back = (slope @ weights["2.weight"]) * (hidden > 0)
        gradient = {"0.weight": back.T @ x, "0.bias": back.sum(0), "2.weight": slope.T @ active, "2.bias": slope.sum(0)}
        return float(loss), gradient

    def objective(self, weights: dict[str, Array], train: Array, test: Array, lr: float, loops: int) -> float:
        meta_train, _ = self.loss_and_gradient(weights, train)
        fast = dict(weights)
        for _ in range(loops):
            _, gradient = self.loss_and_gradient(fast, train)
            fast = {name: fast[name] - lr * gradient[name] for name in fast}
        return meta_train + 0.5 * self.loss_and_gradient(fast, test)[0]


@pytest.mark.parametrize("loops", [1, 3])
def test_mldg_s_gradient_equals_finite_differences_of_the_meta_objective(
    loops: int, given: Callable[[int], Backbone], numeric_gradient: Callable[..., Tensor]
) -> None:
    settings = MLDGSettings(hidden=5, weight=0.5, inner_lr=0.8, loops=loops)
    model = MLDG(given(4), CLASSES, 6, settings).double()
    rows = 20
    x = torch.randn(rows, 4, dtype=torch.float64)
    # Patients of different sizes, so that a mean over patients is not a mean over rows.
    domains = torch.tensor([0] * 7 + [1] * 2 + [2] * 5 + [3] * 3 + [4] * 3)
    batch = Batch({"x": x}, torch.arange(rows) % 3, domains)
    torch.manual_seed(5)
    parts = split_episode(domains, settings.test_share)
    assert parts is not None
    train, test = (part.numpy() for part in parts)
    torch.manual_seed(5)
    total = torch.stack(list(model.losses(batch).values())).sum()
    weights = dict(model.head.named_parameters())
    reference = TwoLayers(x.numpy(), batch.targets.numpy(), domains.numpy())

    def objective(changed: dict[str, Any]) -> float:
        values = {name: changed.get(name, value).detach().numpy() for name, value in weights.items()}
        return reference.objective(values, train, test, settings.inner_lr, loops)

    assert total.item() == pytest.approx(objective({}), rel=1e-10)
    found = torch.autograd.grad(total, list(weights.values()))
    for (name, value), gradient in zip(weights.items(), found, strict=True):
        wanted = numeric_gradient(lambda point, name=name: objective({name: point}), value)
        torch.testing.assert_close(gradient, wanted, atol=1e-8, rtol=1e-5)
        fast_alone = _first_order(reference, weights, train, test, settings)[name]
        assert not np.allclose(gradient.numpy(), fast_alone, atol=1e-4)


def _first_order(
    reference: TwoLayers, weights: dict[str, Any], train: Array, test: Array, settings: MLDGSettings
) -> dict[str, Array]:
    """What the gradient would be if the fast weights did not depend on the slow ones."""
    start = {name: value.detach().numpy() for name, value in weights.items()}
    _, slow = reference.loss_and_gradient(start, train)
    fast = dict(start)
    for _ in range(settings.loops):
        _, gradient = reference.loss_and_gradient(fast, train)
        fast = {name: fast[name] - settings.inner_lr * gradient[name] for name in fast}
    _, ahead = reference.loss_and_gradient(fast, test)
    return {name: slow[name] + 0.5 * ahead[name] for name in slow}


def test_a_tenth_of_the_patients_and_at_least_one_is_meta_test() -> None:
    for patients, wanted in ((2, 1), (10, 1), (20, 2), (50, 5)):
        domains = torch.arange(patients).repeat_interleave(3)
        parts = split_episode(domains, 0.1)
        assert parts is not None
        train, test = (set(domains[part].tolist()) for part in parts)
        assert len(test) == wanted
        assert not train & test
        assert len(train) + len(test) == patients


def test_any_patient_may_be_meta_test() -> None:
    domains = torch.arange(10).repeat_interleave(3)
    tested = set()
    for _ in range(100):
        parts = split_episode(domains, 0.1)
        assert parts is not None
        tested |= set(domains[parts[1]].tolist())
    assert len(tested) == 10


def test_no_part_of_an_episode_is_a_single_row() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        parts = split_episode(torch.tensor([0, 1, 2, 2, 3]), 0.1)
        if parts is not None:
            assert min(len(part) for part in parts) >= 2
    assert split_episode(torch.tensor([4, 4, 4]), 0.1) is None
    assert split_episode(torch.tensor([0, 1, 1]), 0.1) is None


def test_an_episode_of_one_patient_is_an_ordinary_step(given: Callable[[int], Backbone]) -> None:
    model = MLDG(given(4), CLASSES, 1)
    batch = Batch({"x": torch.randn(6, 4)}, torch.arange(6) % 3, torch.zeros(6, dtype=torch.int64))
    terms = model.losses(batch)
    assert set(terms) == {"meta_train"}
    torch.testing.assert_close(terms["meta_train"], CLASSES.loss(model.predict(batch.inputs), batch.targets))


def test_every_patient_counts_the_same_in_the_mean_over_patients() -> None:
    values, groups = torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([9, 9, 9, 4])
    assert mean_over_groups(values, groups).item() == pytest.approx(3.0)


class Attention(Backbone):
    """Recurrent and attention layers, whose fast kernels cannot be differentiated twice."""

    output_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(1, 8, batch_first=True)
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: Inputs) -> Tensor:
        column = inputs["x"]
        assert isinstance(column, Tensor)
        sequence, _ = self.read(column[:, :, None])
        features: Tensor = self.norm(self.attend(sequence)[:, -1])
        return features


def test_mldg_takes_recurrent_attention_and_normalised_backbones(dataset_of: Callable[..., DomainDataset]) -> None:
    dataset = dataset_of()
    model = MLDG(Attention(), target_of(dataset.target), dataset.n_patients)
    batch = dataset.take(torch.arange(48))
    terms = model.losses(batch)
    torch.autograd.backward(torch.stack(list(terms.values())).sum())
    assert set(terms) == {"meta_train", "meta_test"}
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in model.parameters())
    # One pass, that of the slow weights, counts for the running statistics.
    seen = model.backbone.norm.num_batches_tracked  # type: ignore[union-attr]
    assert int(seen) == 1  # type: ignore[arg-type]
