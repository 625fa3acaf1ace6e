"""Networks over visits: what a visit may know, memory and graphs of GAMENet against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from manydg.backbones import Backbone, build_backbone
from manydg.backbones.gamenet import GAMENet
from manydg.backbones.gru import GRU
from manydg.backbones.retain import Retain
from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.errors import ConfigError, DataError

Make = Callable[[str], DomainDataset]
Rows = list[list[list[int]]]
NAMES = ("gamenet", "gru", "retain")

DIAGNOSES: Rows = [[[1, 2], [3], [4, 5]], [[6, 7]]]
PROCEDURES: Rows = [[[1], [], [2]], [[3]]]
DRUGS: Rows = [[[0, 1], [2, 4]], []]


def sample(diagnoses: Rows = DIAGNOSES, procedures: Rows = PROCEDURES, drugs: Rows = DRUGS) -> dict[str, Column]:
    history = Ragged.from_rows(drugs)
    return {
        "diagnoses": Ragged.from_rows(diagnoses),
        "procedures": Ragged.from_rows(procedures),
        "history_drugs": history,
    }


def built(name: str, dataset: DomainDataset) -> Backbone:
    backbone = build_backbone(name, InputSchema.of(dataset)).eval()
    backbone.fit_inputs(dataset)
    return backbone


@pytest.fixture
def gamenet(make: Make) -> GAMENet:
    backbone = built("gamenet", make("visits"))
    assert isinstance(backbone, GAMENet)
    return backbone


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("visit", [0, 1, 2])
def test_codes_of_the_current_and_of_earlier_visits_count(name: str, visit: int, make: Make) -> None:
    backbone = built(name, make("visits"))
    before = backbone(sample())
    diagnoses = [[list(codes) for codes in row] for row in DIAGNOSES]
    diagnoses[0][visit] = [8, 9]
    procedures = [[list(codes) for codes in row] for row in PROCEDURES]
    procedures[0][visit] = [4, 5]
    for changed in (sample(diagnoses=diagnoses), sample(procedures=procedures)):
        after = backbone(changed)
        assert not torch.allclose(after[0], before[0], atol=1e-5)
        torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("visit", [0, 1])
def test_drugs_of_earlier_visits_count(name: str, visit: int, make: Make) -> None:
    backbone = built(name, make("visits"))
    drugs = [[list(codes) for codes in row] for row in DRUGS]
    drugs[0][visit] = [5]
    assert not torch.allclose(backbone(sample(drugs=drugs))[0], backbone(sample())[0], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_drugs_of_the_current_visit_are_not_an_input(name: str, make: Make) -> None:
    dataset = make("visits")
    backbone = built(name, dataset)
    batch = dataset.take(torch.arange(len(dataset)))
    flipped = replace(batch, targets=1 - batch.targets)
    assert torch.equal(backbone(flipped.inputs), backbone(batch.inputs))
    with_current = sample(drugs=[[[0, 1], [2, 4], [3]], []])
    dataset = replace_inputs(dataset, with_current)
    with pytest.raises(DataError, match="sample 0 has 3 visits"):
        backbone.fit_inputs(dataset)


def replace_inputs(dataset: DomainDataset, inputs: dict[str, Column]) -> DomainDataset:
    """The first samples of a dataset with other inputs."""
    count = len(inputs["diagnoses"])
    few = dataset.select(torch.arange(count))
    return replace(few, columns=inputs, rows=None)


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_no_training_patient_has_are_unknown(name: str, make: Make) -> None:
    dataset = make("visits")
    training = replace_inputs(dataset, sample())
    backbone = build_backbone(name, InputSchema.of(dataset)).eval()
    backbone.fit_inputs(training)
    unseen = sample(diagnoses=[[[1, 2], [3], [4, 14]], [[6, 7]]])
    other = sample(diagnoses=[[[1, 2], [3], [4, 13]], [[6, 7]]])
    unknown = sample(diagnoses=[[[1, 2], [3], [4, 0]], [[6, 7]]])
    outside = sample(diagnoses=[[[1, 2], [3], [4, 999]], [[6, 7]]])
    for given in (unseen, other, outside):
        assert torch.equal(backbone(given), backbone(unknown))
    assert not torch.allclose(backbone(unknown), backbone(sample()))


def test_absent_drugs_are_zero(gamenet: GAMENet) -> None:
    found = gamenet._indicators(torch.tensor([0, 5, 5]), torch.tensor([0, 1, 1, 3]))
    assert found.tolist() == [[1, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 1]]


def test_without_history_the_second_fact_is_the_first(gamenet: GAMENet) -> None:
    joined: list[Tensor] = []
    gamenet.out.register_forward_pre_hook(lambda _module, given: joined.append(given[0]))
    gamenet(sample())
    query, first, second = joined[0].chunk(3, dim=-1)
    assert torch.equal(first[1], second[1])
    assert not torch.allclose(first[0], second[0])
    assert not torch.allclose(query[1], first[1])


def test_facts_are_those_of_a_plain_loop(gamenet: GAMENet) -> None:
    """One sample at a time, in float64 NumPy, from the queries and the memory on."""
    joined: list[Tensor] = []
    gamenet.out.register_forward_pre_hook(lambda _module, given: joined.append(given[0]))
    inputs = sample()
    with torch.no_grad():
        gamenet(inputs)
        queries, _ = gamenet._queries(inputs)
        memory = (gamenet.together() - gamenet.apart_weight * gamenet.apart()).double().numpy()
    rows = [queries[:3].double().numpy(), queries[3:].double().numpy()]

    def softmax(scores: np.ndarray) -> np.ndarray:
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    for row, visits in enumerate([3, 1]):
        query = rows[row][visits - 1]
        first = softmax(memory @ query) @ memory
        second = first
        if visits > 1:
            weights = softmax(rows[row][: visits - 1] @ query)
            held = np.zeros((visits - 1, 6))
            for visit, drugs in enumerate(DRUGS[row]):
                held[visit, drugs] = 1
            second = weights @ held @ memory
        expected = np.concatenate([query, first, second])
        np.testing.assert_allclose(joined[0][row].numpy(), expected, rtol=0, atol=1e-5)


def test_links_between_drugs_come_from_the_training_targets_alone(make: Make) -> None:
    dataset = make("visits")
    targets = torch.zeros(12, 6)
    targets[0, [0, 2]] = 1
    targets[1, [2, 4]] = 1
    targets[11, [1, 3]] = 1
    data = replace(dataset, targets=targets)
    backbone = build_backbone("gamenet", InputSchema.of(data))
    assert isinstance(backbone, GAMENet)
    backbone.fit_inputs(data.select(torch.arange(10)))
    expected = torch.eye(6)
    expected[[0, 2, 2, 4], [2, 0, 4, 2]] = 1
    expected /= expected.sum(dim=1, keepdim=True)
    torch.testing.assert_close(backbone.together.graph, expected)
    apart = torch.eye(6)
    apart[[0, 3, 2, 5], [3, 0, 5, 2]] = 1
    torch.testing.assert_close(backbone.apart.graph, apart / apart.sum(dim=1, keepdim=True))


def test_sizes_of_gamenet_are_those_of_the_paper(gamenet: GAMENet) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in gamenet.named_parameters()}
    assert gamenet.output_size == 64
    assert shapes["codes.diagnoses.table"] == (15, 64)
    assert shapes["diagnoses.weight_ih_l0"] == (3 * 128, 64)
    assert shapes["procedures.weight_hh_l0"] == (3 * 128, 128)
    assert shapes["query.1.weight"] == (64, 256)
    assert shapes["out.1.weight"] == (64, 192)
    assert gamenet.together.dropout.p == 0.3


def test_attention_of_retain_sums_to_one_over_the_visits(make: Make) -> None:
    backbone = built("retain", make("visits"))
    first, second = backbone.attention(sample()).to_rows()  # type: ignore[operator]
    assert len(first) == 3
    assert sum(first) == pytest.approx(1.0)
    assert second == [1.0]


def test_retain_weighs_visits_by_what_networks_read_from_the_last_to_the_first(make: Make) -> None:
    backbone, summed = built("retain", make("visits")), []
    assert isinstance(backbone, Retain)
    backbone.patient.register_forward_pre_hook(lambda _module, given: summed.append(given[0]))
    with torch.no_grad():
        backbone(sample())
        vectors = backbone.steps(sample())[0][:3]
        # The first sample's three visits, one network at a time.
        of_weights, of_gates = (
            network(vectors.flip(0)[None])[0][0].flip(0) for network in (backbone.weight_states, backbone.gate_states)
        )
        weights, gates = backbone.weight(of_weights).softmax(dim=0), backbone.gate(of_gates).tanh()
    torch.testing.assert_close(summed[0][0], (weights * gates * vectors).sum(dim=0))


def test_the_gru_s_features_are_its_state_after_the_last_visit(make: Make) -> None:
    backbone, read = built("gru", make("visits")), []
    assert isinstance(backbone, GRU)
    backbone.patient.register_forward_pre_hook(lambda _module, given: read.append(given[0]))
    with torch.no_grad():
        backbone(sample())
        states, _ = backbone.recurrent(backbone.steps(sample())[0][None, :3])
    torch.testing.assert_close(read[0][0], states[0, -1])


@pytest.mark.parametrize("pairs", [[[0, 6]], [[-1, 2]], [[0, 1, 2]]])
def test_interactions_that_make_no_sense_are_refused(pairs: list[list[int]], make: Make) -> None:
    schema = InputSchema.of(make("visits"))
    wrong = InputSchema(schema.columns, schema.sizes, {"drug_interactions": pairs})
    with pytest.raises(ConfigError, match="drug_interactions"):
        build_backbone("gamenet", wrong)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_refused_with_what_is_wanted(name: str, make: Make) -> None:
    with pytest.raises(ConfigError, match="visits"):
        build_backbone(name, InputSchema.of(make("table")))
