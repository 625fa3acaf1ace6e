"""Algorithms against one another on unseen patients: the main table, ablations, fewer or new patients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from manydg.errors import ConfigError
from manydg.studies.figure_data import FigureData
from manydg.studies.study import (
    PAPER_SIZES,
    REPLAY,
    SAMPLES_KEPT,
    STEPS,
    Experiment,
    PlannedRun,
    Record,
    Request,
    Series,
    curve,
    grid,
    mean_curves,
    patients_by_step,
    tuning_epochs,
)
from manydg.training.record import EpochEntry


class Compare(Experiment):
    """Every algorithm on every split: the main table."""

    name = "compare"
    title = "Main results"

    def plan(self, request: Request) -> list[PlannedRun]:
        if not request.algorithms or request.seeds < 1:
            raise ConfigError("a comparison needs at least one algorithm and one seed")
        return super().plan(request)


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


# What each objective of ManyDG is worth, and how much it should weigh (appendix B.6)


VALUES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WEIGHTS = ("mmd", "reconstruction", "similarity")
ALIKE = dict.fromkeys(WEIGHTS, 1.0)
"""What the paper's ablations start from, whatever weights a preset has."""
GREEDY = {"mmd": 0.2, "reconstruction": 0.2, "similarity": 2.0}
CASES: dict[str, dict[str, float]] = {
    "case 1: supervised": {"mmd": 0.0, "reconstruction": 0.0, "similarity": 0.0},
    "case 2: supervised, MMD": {"reconstruction": 0.0, "similarity": 0.0},
    "case 3: supervised, reconstruction": {"mmd": 0.0, "similarity": 0.0},
    "case 4: supervised, MMD, reconstruction": {"similarity": 0.0},
    "all four objectives": {},
}
TERMS = {
    "supervised": "Supervised loss, L_sup",
    "mmd": "Discrepancy of v and z, L_MMD (best: 0)",
    "reconstruction": "Mutual reconstruction, L_rec (best: -2)",
    "similarity": "Agreement of domain factors, L_sim (best: -1)",
}
_NOTE = (
    "Measured on the validation patients after every epoch, unweighted. A term that is switched off is computed for "
    "this curve alone and takes no part in training."
)


class Objectives(Experiment):
    """Cases 1 to 4 of the paper and the full loss: final metrics, and the learning curve of every term."""

    name = "objectives"
    title = "Objectives switched on one by one"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("objectives", request.options.of("manydg", seed, **{**ALIKE, **off}), {"objectives": name})
            for seed in range(request.seeds)
            for name, off in CASES.items()
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        figures = {}
        for number, (term, words) in enumerate(TERMS.items(), start=1):
            series = mean_curves(records, lambda record: str(record.variant["objectives"]), partial(_term, term))
            if series:
                figures[f"objectives-{number}-{term}"] = curve("objectives", words, "epoch", term, series, note=_NOTE)
        return figures


def _term(name: str, entry: EpochEntry) -> float | None:
    return (entry.val_terms or {}).get(name)


class Weights(Experiment):
    """Each weight over 0.1 to 10 with the others at 1, and the paper's greedy combination."""

    name = "weights"
    title = "Weights of the objectives"

    def plan(self, request: Request) -> list[PlannedRun]:
        runs = []
        for seed in range(request.seeds):
            for weight in WEIGHTS:
                runs += [
                    PlannedRun(
                        "weights",
                        request.options.of("manydg", seed, **{**ALIKE, weight: value}),
                        {"changed": weight, "weight": value},
                    )
                    for value in VALUES
                ]
            combination = ", ".join(f"{name} {value:g}" for name, value in GREEDY.items())
            greedy = request.options.of("manydg", seed, **GREEDY)
            runs.append(PlannedRun("weights", greedy, {"changed": f"greedy combination: {combination}"}))
        return runs


# Continual learning on new patients (section 4.5)


_FORMS = ((SAMPLES_KEPT, "with four samples of each earlier patient"), (0, "without replay"))


class Continual(Experiment):
    """Pre-train on the first 1,000 patients by id, then ten steps of 100 new ones, with and without replay."""

    name = "continual"
    title = "Continual learning on new patients"

    def plan(self, request: Request) -> list[PlannedRun]:
        return [
            PlannedRun("continual", request.options.of(algorithm, seed), {REPLAY: replay}, procedure="continual")
            for seed in range(request.seeds)
            for replay, _ in _FORMS
            for algorithm in request.stepwise
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        figures = {}
        epochs = tuning_epochs(request.config)
        note = f"Every step trains for {epochs} epoch{'s' if epochs > 1 else ''} on the new patients."
        for metric in records[0].test:
            for replay, words in _FORMS:
                series = _by_patients(records, replay, metric)
                if series:
                    title = f"New patients step by step, {words}"
                    figures[f"continual-{metric}-{replay}"] = curve(
                        "continual", title, "patients seen", metric, series, note=note
                    )
        return figures

    def scaled(self, request: Request) -> str:
        first, each = patients_by_step(request.training_patients)
        if (first, each) == PAPER_SIZES:
            return ""
        return (
            f"The paper starts with {PAPER_SIZES[0]} patients and adds {PAPER_SIZES[1]} in each of {STEPS} steps; here "
            f"{request.training_patients} can train, so it starts with {first} and adds {each}."
        )


def _by_patients(records: Sequence[Record], replay: int, metric: str) -> Series:
    series: Series = {}
    for record in (record for record in records if record.variant[REPLAY] == replay):
        for point in record.curve:
            if (value := point.test[metric]) is not None:
                points = series.setdefault(record.algorithm, {})
                points.setdefault(point.patients_seen, []).append(value)
    return series
