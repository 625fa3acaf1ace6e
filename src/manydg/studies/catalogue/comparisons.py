"""Algorithms against one another on unseen patients: the main table, simple decompositions, fewer patients."""

from __future__ import annotations

from manydg.errors import ConfigError
from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun, grid


class Compare(Experiment):
    """Every algorithm on every split; the summary is the table."""

    name = "compare"
    title = "Main results"

    def plan(self, request: Request) -> list[PlannedRun]:
        if not request.algorithms or request.seeds < 1:
            raise ConfigError("a comparison needs at least one algorithm and one seed")
        return grid("compare", request.algorithms, range(request.seeds), request.options)


class Decomposition(Experiment):
    """SimD1 and SimD2: the same parts with other losses and without mutual reconstruction and projection."""

    name = "decomposition"
    title = "Simple decomposition models"

    def plan(self, request: Request) -> list[PlannedRun]:
        return grid("decomposition", ("base", "simd1", "simd2", "manydg"), range(request.seeds), request.options)


PAPER_PATIENTS = (100, 500, 1000, 1500, 2000)
PAPER_TOTAL = 2162
"""Training patients of the paper's seizure data: 80% of 2,702."""


class LimitedData(Experiment):
    """2,000, 1,500, 1,000, 500 and 100 training patients, or those fractions; one test group for all."""

    name = "limited-data"
    title = "Fewer patients to train on"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun(
                "limited-data",
                request.options.of(algorithm, seed),
                {"training patients": size},
                procedure="limited-data",
            )
            for seed in range(request.seeds)
            for size in self.sizes(request)
            for algorithm in request.algorithms
        ]

    def sizes(self, request: Request) -> list[int]:
        """Numbers of training patients: the paper's where there are enough, else the same fractions."""
        available = request.training_patients
        if available >= max(PAPER_PATIENTS):
            return list(PAPER_PATIENTS)
        return sorted({max(2, round(size / PAPER_TOTAL * available)) for size in PAPER_PATIENTS})

    def scaled(self, request: Request) -> str:
        available = request.training_patients
        if available >= max(PAPER_PATIENTS):
            return ""
        return (
            f"The paper trains on {', '.join(map(str, PAPER_PATIENTS))} of {PAPER_TOTAL} patients; here {available} "
            f"can train, so the same fractions give {', '.join(map(str, self.sizes(request)))}."
        )
