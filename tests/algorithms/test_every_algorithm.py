"""What holds for every algorithm, with every kind of target; a new file in the package is tested by being there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manydg.algorithms import ALGORITHMS, Algorithm, build_algorithm, controls
from manydg.backbones import Backbone
from manydg.config import SEARCHED, Choices
from manydg.data.dataset import Batch, DomainDataset
from manydg.data.info import KINDS
from manydg.errors import ConfigError
from manydg.targets import target_of

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS.names())
every_kind = pytest.mark.parametrize("kind", KINDS)

Build = Callable[..., Algorithm]
DatasetOf = Callable[..., DomainDataset]
BatchFor = Callable[[Algorithm, DomainDataset], Batch]
Train = Callable[..., None]


def logits_of(algorithm: Algorithm, dataset: DomainDataset) -> Tensor:
    algorithm.eval()
    with torch.no_grad():
        return algorithm.predict(dataset.take(torch.arange(len(dataset))).inputs)


def copy_of(algorithm: Algorithm) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in algorithm.state_dict().items()}


@every_kind
@every_algorithm
def test_losses_are_finite_scalars(
    name: str, kind: str, build: Build, dataset_of: DatasetOf, batch_for: BatchFor
) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset)
    terms = algorithm.losses(batch_for(algorithm, dataset))
    assert terms
    for value in terms.values():
        assert value.shape == ()
        assert bool(torch.isfinite(value))


@every_kind
@every_algorithm
def test_a_step_changes_the_weights(name: str, kind: str, build: Build, dataset_of: DatasetOf, train: Train) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset)
    before = copy_of(algorithm)
    train(algorithm, dataset, steps=1)
    after = algorithm.state_dict()
    assert any(before[key].shape != after[key].shape or not torch.equal(before[key], after[key]) for key in before)
    assert all(bool(torch.isfinite(value).all()) for value in after.values())


@every_kind
@every_algorithm
def test_the_loss_goes_down(name: str, kind: str, build: Build, dataset_of: DatasetOf, train: Train) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset)
    target = algorithm.target
    # Two steps let batch normalisation learn what the data look like before the first look.
    train(algorithm, dataset, steps=2, lr=0.0)
    before = target.loss(logits_of(algorithm, dataset), dataset.targets)
    if algorithm.sampling == "whole":
        before = target.loss(torch.zeros(len(dataset), target.size), dataset.targets)
    train(algorithm, dataset, steps=30)
    after = target.loss(logits_of(algorithm, dataset), dataset.targets)
    assert float(after) < 0.9 * float(before)


@every_kind
@every_algorithm
def test_predictions_survive_saving_and_need_no_patients(
    name: str, kind: str, build: Build, dataset_of: DatasetOf, train: Train
) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset)
    train(algorithm, dataset, steps=3)
    logits = logits_of(algorithm, dataset)
    assert logits.shape == (len(dataset), dataset.target.size)
    assert bool(torch.isfinite(logits).all())
    torch.manual_seed(1)
    other = build(name, dataset)
    assert not torch.equal(logits_of(other, dataset), logits)
    other.load_state_dict(copy_of(algorithm))
    assert torch.equal(logits_of(other, dataset), logits)


@every_kind
@every_algorithm
def test_batch_mates_do_not_change_a_prediction(
    name: str, kind: str, build: Build, dataset_of: DatasetOf, train: Train
) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset)
    train(algorithm, dataset, steps=3)
    together = logits_of(algorithm, dataset)
    for row in (0, 17, 95):
        alone = logits_of(algorithm, dataset.select(torch.tensor([row])))
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)
    some = torch.tensor([40, 3, 77])
    torch.testing.assert_close(logits_of(algorithm, dataset.select(some)), together[some], atol=1e-5, rtol=1e-5)


@every_algorithm
def test_a_batch_of_lone_samples_trains(name: str, build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes", patients=40, samples=1)
    algorithm = build(name, dataset)
    terms = algorithm.losses(dataset.take(torch.arange(len(dataset)), pairs=0))
    assert terms
    assert all(bool(torch.isfinite(value)) for value in terms.values())


@every_algorithm
def test_a_batch_of_one_patient_trains(name: str, build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of("classes", patients=1, samples=30)
    algorithm = build(name, dataset)
    terms = algorithm.losses(dataset.take(torch.arange(len(dataset)), pairs=0))
    assert terms
    assert all(bool(torch.isfinite(value)) for value in terms.values())


@every_kind
@every_algorithm
def test_embeddings_hold_one_row_per_sample(name: str, kind: str, build: Build, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(kind)
    algorithm = build(name, dataset).eval()
    embeddings = algorithm.embed(dataset.take(torch.arange(5)).inputs)
    assert "v" in embeddings
    assert all(value.ndim == 2 and value.shape[0] == 5 for value in embeddings.values())


@every_algorithm
def test_every_setting_has_a_range_and_a_help(name: str) -> None:
    import dataclasses

    for field in dataclasses.fields(ALGORITHMS.get(name).Settings):
        assert field.metadata["help"]
        searched = field.metadata[SEARCHED]
        if isinstance(searched, Choices):
            assert field.default in searched.options
        else:
            assert searched.low <= field.default <= searched.high
            assert searched.whole == isinstance(field.default, int)
            assert searched.low > 0 or not searched.log


@every_kind
@every_algorithm
def test_what_is_refused_is_refused_with_the_reason(
    name: str, kind: str, dataset_of: DatasetOf, small_mlp: Callable[[DomainDataset], Backbone]
) -> None:
    dataset = dataset_of(kind)
    target, backbone = target_of(dataset.target), small_mlp(dataset)
    reason = ALGORITHMS.get(name).refuses(target, backbone)
    if reason is None:
        build_algorithm(name, backbone, target, dataset.n_patients)
        return
    with pytest.raises(ConfigError) as raised:
        build_algorithm(name, backbone, target, dataset.n_patients)
    assert reason in str(raised.value)


def test_the_paper_s_impossible_combinations_are_refused(
    dataset_of: DatasetOf, small_mlp: Callable[[DomainDataset], Backbone]
) -> None:
    labels, classes = dataset_of("multilabel"), dataset_of("classes")
    with pytest.raises(ConfigError, match="one class per sample"):
        build_algorithm("pcl", small_mlp(labels), target_of(labels.target), 12)
    with pytest.raises(ConfigError, match="feature maps, and the backbone MLP has none"):
        build_algorithm("sagnet", small_mlp(classes), target_of(classes.target), 12)


def test_the_page_of_rivals_has_every_rival() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rivals.md").read_text(encoding="utf-8")
    rivals = {name for name in ALGORITHMS.names() if not name.startswith("manydg") and name not in controls()}
    assert {name for name in rivals if f"`{name}`" not in page.partition("## From papers")[2]} == set()


def test_weights_are_searched_wherever_domainbed_searches_them() -> None:
    """The ranges of its ``hparams_registry.py``; what is a number of steps there is a share of its 5,000 steps here."""
    import dataclasses

    theirs = {
        ("irm", "weight"): (1e-1, 1e5),
        ("vrex", "weight"): (1e-1, 1e5),
        ("coral", "weight"): (1e-1, 1e1),
        ("groupdro", "speed"): (1e-3, 1e-1),
        ("mldg", "weight"): (1e-1, 1e1),
        ("sagnet", "weight"): (1e-2, 1e1),
        ("eqrm", "alpha"): (0.5, 0.99),
        ("eqrm", "burn_in"): (10**2.5 / 5000, 10**3.5 / 5000),
        ("eqrm", "late_lr"): (1e-7 / 5e-5, 1e-5 / 5e-5),
    }
    for (name, setting), (low, high) in theirs.items():
        fields = {field.name: field for field in dataclasses.fields(ALGORITHMS.get(name).Settings)}
        searched = fields[setting].metadata[SEARCHED]
        assert searched.low <= low * 1.01, f"{name}.{setting}"
        assert searched.high >= high * 0.99, f"{name}.{setting}"
