"""The cost of a training step against the number of patients, and its way into a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manydg.algorithms import ALGORITHMS
from manydg.studies.catalogue import runtime
from manydg.studies.catalogue.runtime import StepCost, costs_by_patients, figures_of
from manydg.studies.figure_data import Curve, parse_figure, write_figure

STEPWISE = [name for name in ALGORITHMS.names() if ALGORITHMS.get(name).sampling != "whole"]


@pytest.mark.parametrize("name", STEPWISE)
def test_every_algorithm_that_trains_by_steps_can_be_measured(name: str) -> None:
    (found,) = costs_by_patients([name], (40,)).values()
    assert isinstance(found[0], StepCost)
    assert found[0].milliseconds > 0
    assert found[0].megabytes > 0.1


def test_many_patients_cost_manydg_nothing_and_an_adversary_an_output_each() -> None:
    costs = costs_by_patients(["manydg", "dann"], (100, 5_100))
    memory = {name: [cost.megabytes for cost in found if cost] for name, found in costs.items()}
    assert memory["manydg"][0] == memory["manydg"][1]
    # A weight, its gradient and two moments of Adam for each feature of the last hidden layer, for each patient.
    hidden = (memory["dann"][1] - memory["dann"][0]) * 2**20 / (5_000 * 4 * 4)
    assert hidden > 16


def test_a_line_ends_before_a_step_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_MOST_MEMORY_MB", 15.0)
    costs = costs_by_patients(["dann", "base"], (100, 1_000, 10_000, 100_000))
    assert [cost is None for cost in costs["dann"]] == [False, False, True, True]
    assert None not in costs["base"]


def test_the_figures_are_what_a_report_draws() -> None:
    costs = {"manydg": [StepCost(1.0, 2.0), StepCost(1.5, 2.0)], "dann": [StepCost(3.0, 4.0), None]}
    figures = {name: parse_figure(figure.to_json()) for name, figure in figures_of(costs, (10, 100)).items()}
    assert {figure.experiment for figure in figures.values()} == {"runtime"}
    memory = figures["patients_step_memory"].data
    assert isinstance(memory, Curve)
    lines = {line.name: line.mean for line in memory.series}
    assert lines == {"manydg": [2.0, 2.0], "dann": [4.0, None]}


def test_what_a_folder_holds_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runtime._against_patients(["base"], (10, 20), tmp_path)
    for name, figure in first.items():
        write_figure(tmp_path, f"sleep-{name}", replace(figure, dataset="sleep", note="of another dataset"))
    monkeypatch.setattr(runtime, "costs_by_patients", lambda *_: pytest.fail("measured again"))
    assert runtime._against_patients(["base"], (10, 20), tmp_path) == first
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        runtime._against_patients(["base", "manydg"], (10, 20), tmp_path)


def test_measuring_leaves_the_random_numbers_and_threads_as_they_were() -> None:
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    costs_by_patients(["manydg"], (10,))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
