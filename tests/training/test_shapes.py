"""Shapes of batches: which are captured when, and that every step has room."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manydg.backbones import SingleInput
from manydg.data.columns import Ragged
from manydg.data.dataset import DomainDataset, from_arrays
from manydg.data.sampling import EpochPlan, plan_epoch
from manydg.training.execution.steps import CapacityTable, Shape, Shapes, has_fixed_shapes, lengths_of, suffices


def dense(rows: int = 50) -> DomainDataset:
    return from_arrays(np.zeros((rows, 2)), np.arange(rows) % 2, np.arange(rows) // 2)


def ragged(lengths: list[int]) -> DomainDataset:
    codes = Ragged.from_rows([[[1]] * length for length in lengths])
    rows = np.arange(len(lengths))
    info = {"vocabularies": {"events": ["?", "a"]}}
    return from_arrays({"event_codes": codes}, rows % 2, rows // 2, info=info)


def plan(*steps: list[int], pairs: int = 0) -> EpochPlan:
    bounds = np.cumsum([0, *map(len, steps)]).tolist()
    return EpochPlan(torch.tensor([row for step in steps for row in step]), tuple(bounds), (pairs,) * len(steps))


def captured(shapes: Shapes, epoch: EpochPlan, graphs: set[Shape], *, compiled: bool = False) -> list[bool]:
    """Whether each step of an epoch is captured or replayed, where all that are due are captured."""
    found = []
    entered = shapes.enter(epoch)
    graphs -= shapes.outgrown
    for shape in entered:
        if shape not in graphs and shapes.due(shape, compiled and shapes.worth_compiling(shape)):
            graphs.add(shape)
        found.append(shape in graphs)
    return found


def test_rows_of_any_length_have_fixed_shapes_where_they_can_be_filled_up() -> None:
    rows, device = ragged([3] * 8), torch.device("cpu")
    padded, other = (SingleInput.__new__(SingleInput) for _ in range(2))
    padded.takes_padded, other.takes_padded = True, False
    assert has_fixed_shapes(other, dense(), torch.device("cuda"))
    assert has_fixed_shapes(padded, rows, device)
    assert not has_fixed_shapes(other, rows, device)
    assert not has_fixed_shapes(padded, rows, torch.device("cuda"))
    assert not has_fixed_shapes(padded, rows.select(torch.arange(4)), device)
    assert not has_fixed_shapes(padded, ragged([0] * 8), device)


def test_the_last_steps_of_an_epoch_are_captured_from_the_second_epoch_on() -> None:
    shapes, graphs = Shapes(dense()), set[Shape]()
    epoch = plan(*[list(range(8))] * 5, [0, 1, 2, 3], [0, 1, 2])
    assert captured(shapes, epoch, graphs) == [False] * 3 + [True] * 2 + [False] * 2
    assert captured(shapes, epoch, graphs) == [True] * 7
    assert len(graphs) == 3


def test_only_what_an_epoch_is_made_of_is_compiled_and_is_warmed_up_three_times() -> None:
    shapes, graphs = Shapes(dense()), set[Shape]()
    epoch = plan(*[list(range(8))] * 5, *[list(range(6))] * 4, [0, 1, 2, 3])
    found = captured(shapes, epoch, graphs, compiled=True)
    assert found == [False] * 3 + [True] * 2 + [False] * 3 + [True] + [False]
    assert [shapes.worth_compiling(Shape(rows, 0, 0)) for rows in (8, 6, 4)] == [True, True, False]


def test_rare_lengths_are_captured_once_they_have_come_up_often() -> None:
    shapes, graphs = Shapes(ragged([3] * 40 + [60] * 2)), set[Shape]()
    common, rare = [list(range(start, start + 8)) for start in (0, 8, 16, 24, 32)], [40, 41, 0, 1, 2, 3, 4, 5]
    found = [captured(shapes, plan(*common, rare), graphs) for _ in range(10)]
    assert found[0][:5] == [False] * 3 + [True] * 2
    assert [epoch[-1] for epoch in found] == [False] * 8 + [True] * 2


def test_a_length_of_a_compiled_kind_needs_one_step_before_it_is_captured() -> None:
    shapes, graphs = Shapes(ragged([3] * 40 + [12] * 40)), set[Shape]()
    short, long = [list(range(8))] * 5, [list(range(40, 48))] * 5
    assert (
        captured(shapes, plan(*short, *long), graphs, compiled=True) == [False] * 3 + [True] * 2 + [False] + [True] * 4
    )


def test_a_shape_whose_steps_outgrow_its_room_is_told_and_captured_anew() -> None:
    shapes, graphs = Shapes(ragged([40] * 40 + [1] * 40)), set[Shape]()
    small, large = [[0, *range(40, 47)]] * 5, [list(range(8))] * 5
    assert captured(shapes, plan(*small), graphs)[-1]
    room = shapes.capacities[Shape(8, 0, 48)]["event_codes"]
    assert shapes.outgrown == set()
    assert captured(shapes, plan(*large), graphs) == [True] * 5
    assert shapes.outgrown == {Shape(8, 0, 48)}
    assert shapes.capacities[Shape(8, 0, 48)]["event_codes"].items > 8 * 40 > room.items
    assert captured(shapes, plan(*small), graphs) == [True] * 5
    assert shapes.outgrown == set()


@pytest.mark.parametrize("sampling", ["samples", "pairs"])
def test_every_step_has_room(sampling: str) -> None:
    rng = np.random.default_rng(0)
    data = ragged(rng.geometric(0.03, 600).tolist())
    shapes, table, lengths = Shapes(data), CapacityTable(data), lengths_of(data)
    for epoch in range(12):
        order = plan_epoch(sampling, data.domains, 32, 0, epoch, lengths)
        for shape, need in zip(shapes.enter(order), table.of_plan(order), strict=True):
            assert suffices(shapes.capacities[shape], need)
