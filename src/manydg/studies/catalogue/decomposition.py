"""ManyDG against two simple decomposition models (appendix B.8)."""

from __future__ import annotations

from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun, grid


class Decomposition(Experiment):
    """SimD1 and SimD2: the same parts with other losses and without mutual reconstruction and projection."""

    title = "Simple decomposition models"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("decomposition", ("base", "simd1", "simd2", "manydg"), range(request.seeds), request.options)
