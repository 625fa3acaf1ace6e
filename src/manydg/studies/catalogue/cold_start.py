"""How much of a new patient has to be known, and what time does to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manydg.studies.embeddings import (
    ByMetric,
    TimeBins,
    fitting_counts,
    gather,
    scores_by_count,
    scores_by_elapsed,
    tested_part,
)
from manydg.studies.experiment import Experiment, Record, Request, curve
from manydg.studies.figure_data import FigureData
from manydg.studies.study import PlannedRun

OFFLINE, CAUSAL, NONE = "offline", "causal", "none"


class ColdStart(Experiment):
    """Metrics of unseen patients against the number of samples in their context, and against the time since the start.

    Offline context is limited by cutting test patients into short pieces; the model is not trained anew. Causal context
    grows by itself.
    """

    title = "Cold start and drift"

    def plan(self, request: Request) -> list[PlannedRun]:
        kinds = (NONE, OFFLINE) if request.dataset.times is None else (NONE, OFFLINE, CAUSAL)
        return [
            PlannedRun(
                "cold-start",
                request.options.of(algorithm, seed).replace(context=kind),
                {"context": kind},
            )
            for seed in range(request.seeds)
            for kind in kinds
            for algorithm in ("base", "manydg-context")
            if kind != NONE or algorithm == "base"
        ]

    def aggregate(self, request: Request, records: Sequence[Record], folder: Path) -> dict[str, FigureData]:
        by_count: ByMetric = {}
        by_time: ByMetric = {}
        bins = None if request.dataset.times is None else TimeBins.of(request.dataset)
        for record in records:
            kind = record.variant["context"]
            name = record.algorithm + ("" if kind == NONE else f", {kind} context")
            run, part = tested_part(request.dataset, record, folder)
            if kind == OFFLINE:
                gather(by_count, name, scores_by_count(run, part), 1.0)
            elif kind == NONE:
                gather(by_count, name, {float(count): record.test for count in fitting_counts(part)}, 1.0)
            if bins is not None and kind != OFFLINE:
                gather(by_time, name, scores_by_elapsed(run, part, bins))
        figures = {}
        for metric, series in by_count.items():
            figures[f"cold-start-{metric}"] = curve(
                "cold-start", "How much of a new patient has to be known", "samples of the patient that are there",
                metric, series, scale="log", note="The sample itself is counted: at 1 there is no context.",
            )  # fmt: skip
        for metric, series in by_time.items():
            figures[f"drift-{metric}"] = curve(
                "cold-start", "Performance since the start of a recording or stay", "time since the start", metric,
                series, note="Bins of equally many samples of the dataset; every model is scored on the same ones.",
            )  # fmt: skip
        return figures
