"""Networks over events: kinds, fields, values, positions, limits, and stays without events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from manydg.backbones import Backbone, build_backbone
from manydg.backbones._records import CodeValues, EventSteps
from manydg.backbones.event_transformer import EventTransformer
from manydg.data.columns import Column, Ragged
from manydg.data.dataset import DomainDataset, InputSchema
from manydg.data.info import DatasetInfo
from manydg.errors import ConfigError, DataError

Make = Callable[[str], DomainDataset]
NAMES = ("event-transformer", "gru", "retain")
NAN = float("nan")


def stay(
    kinds: list[int], codes: list[list[int]], values: list[list[float]] | None = None, static: float = 60.0
) -> dict[str, Column]:
    """A batch of one stay."""
    given = values or [[NAN for _ in event] for event in codes]
    return {
        "event_kind": Ragged.from_rows([kinds]),
        "event_codes": nested([codes]),
        "event_values": nested([given], torch.float32),
        "static": torch.full((1, 3), static),
    }


def nested(rows: list[list[list[float]]] | list[list[list[int]]], dtype: torch.dtype = torch.int64) -> Ragged:
    """Like ``Ragged.from_rows``, but nested twice also without a single event."""
    column = Ragged.from_rows(rows, dtype)
    if isinstance(column.values, Ragged):
        return column
    return Ragged(Ragged(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64)), column.offsets)


def built(name: str, dataset: DomainDataset, **options: object) -> Backbone:
    backbone = build_backbone(name, InputSchema.of(dataset), options).eval()
    backbone.fit_inputs(dataset)
    return backbone


def steps_of(backbone: Backbone) -> EventSteps:
    steps = backbone.steps
    assert isinstance(steps, EventSteps)
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_every_event_its_order_its_kind_and_the_patient_count(name: str, make: Make) -> None:
    backbone = built(name, make("events"))
    first = backbone(stay([0, 1, 2], [[2, 7], [11], [17]]))
    for changed in (
        stay([0, 1, 2], [[3, 7], [11], [17]]),
        stay([0, 1, 2], [[2, 8], [11], [17]]),
        stay([1, 0, 2], [[11], [2, 7], [17]]),
        stay([0, 1, 2], [[2, 7], [11], [18]]),
        stay([0, 1, 2], [[2, 7], [11], [17]], static=80.0),
    ):
        assert not torch.allclose(backbone(changed), first, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_one_event_have_no_order(name: str, make: Make) -> None:
    backbone = built(name, make("events"))
    first = backbone(stay([0, 1], [[2, 7, 3], [11, 12]], [[NAN] * 3, [1100.0, 1230.0]]))
    second = backbone(stay([0, 1], [[7, 3, 2], [12, 11]], [[NAN] * 3, [1230.0, 1100.0]]))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_stay_without_events_has_features_of_its_patient(name: str, make: Make) -> None:
    backbone = built(name, make("events"))
    empty = backbone(stay([], []))
    assert bool(torch.isfinite(empty).all())
    assert not torch.allclose(empty, backbone(stay([], [], static=80.0)))
    torch.testing.assert_close(empty, backbone(stay([], [])))


@pytest.mark.parametrize("name", NAMES)
def test_only_the_last_events_are_kept(name: str, make: Make) -> None:
    dataset = make("events")
    limited = built(name, dataset, max_events=2)
    long = stay([0, 2, 1, 0], [[2], [17], [11], [3, 6]], [[NAN], [NAN], [1100.0], [NAN, NAN]])
    short = stay([1, 0], [[11], [3, 6]], [[1100.0], [NAN, NAN]])
    torch.testing.assert_close(limited(long), limited(short), rtol=0, atol=1e-6)
    free = built(name, dataset)
    assert not torch.allclose(free(long), free(short), atol=1e-6)
    both = dataset.take(torch.arange(len(dataset))).inputs
    alone = torch.cat([limited(dataset.take(torch.tensor([row])).inputs) for row in range(len(dataset))])
    torch.testing.assert_close(limited(both), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_no_training_patient_has_are_unknown(name: str, make: Make) -> None:
    dataset = make("events")
    backbone = built(name, dataset)
    known = steps_of(backbone).known.known
    known[12] = False
    unseen = backbone(stay([1], [[11, 12]], [[1100.0, 1200.0]]))
    assert torch.equal(unseen, backbone(stay([1], [[11, 0]], [[1100.0, 5.0]])))


def test_known_codes_are_those_of_the_patients_given(make: Make) -> None:
    dataset = make("events").select(torch.arange(4))
    codes = dataset.column("event_codes")
    assert isinstance(codes, Ragged)
    seen = {code for row in codes.to_rows() for event in row for code in event}  # type: ignore[attr-defined]
    known = steps_of(built("event-transformer", dataset)).known.known
    assert set(torch.nonzero(known).squeeze(1).tolist()) == seen


def test_values_are_standardised_per_code_and_gaps_count_as_average() -> None:
    codes = torch.tensor([1, 1, 1, 2, 2, 3, 3, 0, 0])
    values = torch.tensor([10.0, 20.0, NAN, 1e6, 1e6 + 2, 7.0, 7.0, 1.0, 9.0])
    scaling = CodeValues(4)
    scaling.fit(values, codes)
    expected = torch.tensor([-1.0, 1.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(scaling(values, codes), expected)
    assert scaling(torch.tensor([1e9]), torch.tensor([1])).tolist() == [10.0]


def test_an_event_vector_is_that_of_a_plain_computation(make: Make) -> None:
    """Each field summed by hand, then the kind's layers in float64."""
    dataset = make("events")
    steps = steps_of(built("event-transformer", dataset))
    found, _ = steps(stay([1, 0, 2], [[11, 13], [2, 7, 3], [21]], [[1095.0, NAN], [NAN] * 3, [NAN]]))
    presence, amount = steps.presence.detach().double(), steps.amount.detach().double()
    scaled = (1095.0 - steps.values.mean[11].double()) * steps.values.scale[11].double()
    nothing = torch.zeros(128, dtype=torch.float64)
    pooled = [
        (1, [presence[11] + presence[13] + scaled * amount[11]]),
        (0, [presence[2] + presence[3], presence[7]]),
        (2, [nothing, presence[21]]),
    ]
    for event, (kind, fields) in enumerate(pooled):
        expected = steps.encoders[kind].double()(torch.cat(fields))
        torch.testing.assert_close(found[event].double(), expected, rtol=0, atol=1e-5)
        steps.encoders[kind].float()


def test_attention_is_that_of_torch(make: Make) -> None:
    """The layers against torch's own, with the same weights; the last one too, though it works out one event alone."""
    dataset = make("events")
    backbone = built("event-transformer", dataset)
    assert isinstance(backbone, EventTransformer)
    reference = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(128, 8, 64, 0.25, batch_first=True, norm_first=False),
        3,
        torch.nn.LayerNorm(128),
    ).eval()
    for theirs, ours in zip(reference.layers, backbone.layers, strict=True):
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([ours.query.weight, ours.key_value.weight]),
                "self_attn.in_proj_bias": torch.cat([ours.query.bias, ours.key_value.bias]),
                "self_attn.out_proj.weight": ours.out.weight,
                "self_attn.out_proj.bias": ours.out.bias,
                "linear1.weight": ours.widen.weight,
                "linear1.bias": ours.widen.bias,
                "linear2.weight": ours.narrow.weight,
                "linear2.bias": ours.narrow.bias,
                "norm1.weight": ours.norm_attention.weight,
                "norm1.bias": ours.norm_attention.bias,
                "norm2.weight": ours.norm_hidden.weight,
                "norm2.bias": ours.norm_hidden.bias,
            }
        )
    lengths = dataset.columns["event_kind"].lengths  # type: ignore[union-attr]
    # The longest first, which is the order in which stays are worked on.
    batch = dataset.take(torch.argsort(lengths, descending=True)[:4]).inputs
    seen: list[Tensor] = []
    backbone.layers[0].register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    read: list[Tensor] = []
    backbone.patient.register_forward_pre_hook(lambda _module, given: read.append(given[0]))
    backbone(batch)
    kinds = batch["event_kind"]
    assert isinstance(kinds, Ragged)
    present = torch.arange(seen[0].shape[1]) < kinds.lengths[:, None]
    expected = reference(seen[0], src_key_padding_mask=~present)[torch.arange(4), kinds.lengths - 1]
    torch.testing.assert_close(read[0], expected, rtol=0, atol=1e-5)


def test_stays_of_very_different_length_do_not_change_one_another(make: Make) -> None:
    backbone = built("event-transformer", make("events"))
    lengths = [3, 80, 0, 17, 41, 1, 79, 16, 200, 33]
    rng = np.random.default_rng(0)
    kinds = [rng.integers(0, 3, length).tolist() for length in lengths]
    codes = [[[int(rng.integers(1, 22))] for _ in row] for row in kinds]
    batch = {
        "event_kind": Ragged.from_rows(kinds),
        "event_codes": nested(codes),
        "event_values": nested([[[NAN] for _ in row] for row in kinds], torch.float32),
        "static": torch.full((len(lengths), 3), 60.0),
    }
    with torch.no_grad():
        together = backbone(batch)
        alone = torch.cat([backbone(stay(kind, code)) for kind, code in zip(kinds, codes, strict=True)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_positions_count_back_from_the_last_event(make: Make) -> None:
    backbone = built("event-transformer", make("events"))
    table = backbone.sinusoids
    assert isinstance(table, Tensor)
    assert table.shape == (300, 128)
    places = np.arange(300)[:, None] / 10000 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(table[:, 0::2], np.sin(places), atol=1e-4)
    np.testing.assert_allclose(table[:, 1::2], np.cos(places), atol=1e-4)
    assert isinstance(backbone, EventTransformer)
    placed: list[Tensor] = []
    backbone.dropout.register_forward_pre_hook(lambda _module, given: placed.append(given[0]))
    inputs = stay([0, 1, 2], [[1], [11], [17]])
    with torch.no_grad():
        backbone(inputs)
        vectors, _ = backbone.steps(inputs)
        torch.testing.assert_close(placed[0], vectors + backbone.position(table[[2, 1, 0]]))


def test_events_without_named_kinds_and_without_static_are_taken(make: Make) -> None:
    dataset = make("events")
    columns = {name: column for name, column in dataset.columns.items() if name != "static"}
    plain = replace(dataset, columns=columns, info=DatasetInfo(vocabularies=dataset.info.vocabularies))
    backbone = built("event-transformer", plain)
    assert backbone(plain.take(torch.arange(12)).inputs).shape == (12, 128)


@pytest.mark.parametrize("name", NAMES)
def test_values_that_do_not_run_beside_the_codes_are_refused(name: str, make: Make) -> None:
    dataset = make("events")
    values = dataset.columns["event_values"]
    assert isinstance(values, Ragged)
    rows = values.to_rows()
    rows[0][0].append(NAN)  # type: ignore[index]
    columns = dict(dataset.columns, event_values=Ragged.from_rows(rows, torch.float32))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="parallel"):
        built(name, replace(dataset, columns=columns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code_fields": [{"name": "lab", "kind": 7, "start": 1, "stop": 9}]}, "lab"),
        ({"code_fields": [{"name": "lab", "kind": 0, "start": 1, "stop": 99}]}, "22 codes"),
    ],
)
def test_fields_that_make_no_sense_are_refused(change: dict[str, object], message: str, make: Make) -> None:
    schema = InputSchema.of(make("events"))
    with pytest.raises(ConfigError, match=message):
        build_backbone("gru", InputSchema(schema.columns, schema.sizes, {**schema.settings, **change}))


@pytest.mark.parametrize("options", [{"max_events": 0}, {"heads": 7}, {"layers": 0}])
def test_impossible_options_are_refused(options: dict[str, int], make: Make) -> None:
    with pytest.raises(ConfigError):
        build_backbone("event-transformer", InputSchema.of(make("events")), options)


def test_tables_are_refused_with_what_is_wanted(make: Make) -> None:
    with pytest.raises(ConfigError, match="events"):
        build_backbone("event-transformer", InputSchema.of(make("table")))
