"""Subject erasure: patients cannot be told apart any more, classes can, and the change is no larger than needed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from manydg.algorithms.erasure import Erasure, ErasureSettings, patient_directions
from manydg.backbones import Backbone
from manydg.config import TrainingConfig
from manydg.data.dataset import from_arrays
from manydg.targets import target_of
from manydg.training.fit import fit

PATIENTS, SAMPLES, DIM = 30, 60, 8


def made_up(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features with two directions of patients and one of the class; some patients have one class more often."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(PATIENTS), SAMPLES)
    label = (rng.random(len(who)) < rng.uniform(0.1, 0.9, PATIENTS)[who]).astype(int)
    mixing = np.random.default_rng(7).normal(size=(DIM, DIM))
    levels = np.zeros((PATIENTS, DIM))
    levels[:, :2] = 3 * rng.normal(size=(PATIENTS, 2))
    x = levels[who] + rng.normal(size=(len(who), DIM))
    x[:, 2] += 3 * label
    return torch.from_numpy(x @ mixing), torch.from_numpy(who), torch.from_numpy(label)


def erased(x: Tensor, who: Tensor, label: Tensor, directions: int) -> Tensor:
    labels = torch.nn.functional.one_hot(label).to(torch.float64)
    centre, removed = patient_directions(x, who, labels, directions)
    return x - (x - centre) @ removed.T


def accuracy(x: Tensor, y: Tensor) -> float:
    """Of a linear probe that is tested on other samples."""
    model = LogisticRegression(max_iter=500).fit(x[::2], y[::2])
    return float(model.score(x[1::2], y[1::2]))


def test_a_linear_probe_tells_patients_apart_before_and_not_after() -> None:
    x, who, label = made_up()
    cleaned = erased(x, who, label, 2)
    assert accuracy(x, who) > 0.3
    assert accuracy(cleaned, who) < 0.1
    assert abs(accuracy(cleaned, label) - accuracy(x, label)) < 0.02


def test_patients_who_differ_in_their_labels_alone_lose_nothing_of_the_class() -> None:
    x, who, label = made_up()
    # A third direction: were it of the patients' shares of a class, the class would go with it.
    assert accuracy(erased(x, who, label, 3), label) > 0.85


def test_erasing_twice_is_erasing_once_and_the_mean_stays() -> None:
    x, who, label = made_up()
    labels = torch.nn.functional.one_hot(label).to(torch.float64)
    _, removed = patient_directions(x, who, labels, 2)
    torch.testing.assert_close(removed @ removed, removed)
    assert int(torch.linalg.matrix_rank(removed, rtol=1e-6)) == 2
    torch.testing.assert_close(erased(x, who, label, 2).mean(0), x.mean(0))


def test_without_two_samples_of_anyone_nothing_is_erased() -> None:
    x, _, label = made_up()
    assert torch.equal(erased(x, torch.arange(len(x)), label, 4), x)


def test_what_samples_of_one_patient_do_not_share_is_not_the_patient_s() -> None:
    """Two samples of each patient that are each other's opposite: patients are alike, however far their samples lie."""
    half = torch.from_numpy(np.random.default_rng(0).normal(size=(40, DIM)))
    x, who = torch.cat([half, -half]), torch.arange(40).repeat(2)
    assert torch.equal(erased(x, who, who % 2, 4), x)


def test_one_sample_more_of_others_changes_nothing_but_the_whitening() -> None:
    x, who, label = made_up()
    lone = torch.arange(PATIENTS, PATIENTS + 5)
    more = torch.cat([x, x[:5]]), torch.cat([who, lone]), torch.cat([label, label[:5]])
    torch.testing.assert_close(erased(*more, 2)[: len(x)], erased(x, who, label, 2), atol=0.1, rtol=0.1)


def test_training_fits_the_erasure_to_training_patients_and_predicts_without_their_directions(
    given: Callable[[int], Backbone],
) -> None:
    x, who, label = made_up()
    data = from_arrays(x.float(), label, who, kind="binary")
    config = TrainingConfig(algorithm="erasure", backbone="mlp", epochs=2, batch_size=64, settings={"directions": 2})
    algorithm = fit(config, data, None, torch.device("cpu")).algorithm
    assert isinstance(algorithm, Erasure)
    assert float(algorithm.removed.norm()) > 0.5
    with torch.no_grad():
        before = algorithm.backbone(data.take(torch.arange(len(data))).inputs)
        after = algorithm.embed(data.take(torch.arange(len(data))).inputs)["v"]
    assert accuracy(after, who) < 0.6 * accuracy(before, who)
    model = Erasure(given(DIM), target_of(data.target), PATIENTS, ErasureSettings(directions=2))
    model.train().epoch_ended(data)
    assert model.training
    torch.testing.assert_close(model.erased(x.float()), erased(x, who, label, 2).float(), atol=1e-3, rtol=1e-3)


def test_the_head_is_refitted_to_features_that_have_lost_other_directions(given: Callable[[int], Backbone]) -> None:
    x, who, label = made_up()
    data = from_arrays(x.float(), label, who, kind="binary")
    model = Erasure(given(DIM), target_of(data.target), PATIENTS, ErasureSettings(directions=2)).train()
    head = {name: weight.clone() for name, weight in model.head.named_parameters()}
    model.epoch_ended(data)
    features = model.erased(x.float())
    refitted = model.target.loss(model.head(features), label)
    before = model.target.loss(torch.func.functional_call(model.head, head, (features,)), label)
    assert refitted.item() < 0.9 * before.item()
    assert all(weight.grad is None for weight in model.parameters())
