"""The main table: algorithms and controls against one another on unseen patients (tables 1 and 2)."""

from __future__ import annotations

from manydg.errors import ConfigError
from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun, grid


class Compare(Experiment):
    """Every algorithm on every split; the summary is the table."""

    title = "Main results"

    def plan(self, request: Request) -> list[PlannedRun]:
        if not request.algorithms or request.seeds < 1:
            raise ConfigError("a comparison needs at least one algorithm and one seed")
        return grid("compare", request.algorithms, range(request.seeds), request.options)
