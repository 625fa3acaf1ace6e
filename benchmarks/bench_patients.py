"""Time and memory of a training step against the number of training patients, for every algorithm, on a CPU.

``manydg experiment runtime`` measures the same for a study's algorithms and shows it in the report; this has all of
them. It leaves the two figures beside its results: with ``--out RESULTS``, where RESULTS is a study's folder, ``manydg
report RESULTS`` draws them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manydg.algorithms import ALGORITHMS
from manydg.studies.catalogue.runtime import PATIENTS, Costs, costs_by_patients, figures_of
from manydg.studies.figure_data import write_figure


def main(out: Path) -> dict[str, Any]:
    """Measure every algorithm that is trained by steps."""
    costs: Costs = {}
    for name in ALGORITHMS.names():
        if ALGORITHMS.get(name).sampling == "whole":
            continue
        costs |= costs_by_patients([name], PATIENTS)
        shown = (f"{cost.milliseconds:.1f} ms {cost.megabytes:.1f} MB" if cost else "-" for cost in costs[name])
        print(f"  {name}: {', '.join(shown)}", flush=True)
    for name, figure in figures_of(costs, PATIENTS).items():
        write_figure(out, name, figure)
    return {
        f"{name}: {what}, {count:,} patients": value
        for name, found in costs.items()
        for count, cost in zip(PATIENTS, found, strict=True)
        if cost is not None
        for what, value in (("ms", cost.milliseconds), ("MB", cost.megabytes))
    }
