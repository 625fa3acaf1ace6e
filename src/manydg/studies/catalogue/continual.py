"""Continual learning on new patients (section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.studies.experiment import Experiment, Record, Request, Series, curve, metric_names
from manydg.studies.figure_data import FigureData
from manydg.studies.procedures import PAPER_SIZES, REPLAY, SAMPLES_KEPT, STEPS, patients_by_step, tuning_epochs
from manydg.studies.study import PlannedRun

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
        for metric in metric_names(records[0]):
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
