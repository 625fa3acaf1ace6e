"""What patient context is worth, to any learner and against its rivals, and how much of a patient it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from manydg.data.context import limit_context, unsupported
from manydg.data.dataset import DomainDataset
from manydg.data.splits import load_split
from manydg.data.timeline import DEFAULT_PARTS, Timeline
from manydg.errors import DataError
from manydg.evaluation.metrics import score
from manydg.studies.figure_data import FigureData
from manydg.studies.study import Experiment, PlannedRun, Record, Request, Series, curve
from manydg.training.record import RunRecord
from manydg.training.run import Run, open_run

LEARNERS = ("base", "boosting", "prototype", "manydg", "manydg-context")
PARTS_OF_OURS: dict[str, dict[str, float]] = {
    "last weights instead of the average": {"decay": 0.0},
    "patients told apart by z": {"contrast": 0.1},
    "one direction projected out": {"directions": 1},
    "four directions projected out": {"directions": 4},
}


class Context(Experiment):
    """Every learner with and without context, the method without each of its parts, and parts of the context."""

    name = "context"
    title = "Patient context"

    def plan(self, request: Request) -> list[PlannedRun]:
        if reason := unsupported(request.dataset):
            raise DataError(f"the experiment 'context' does not fit this dataset: {reason}")
        kinds = ("none", "offline") if request.dataset.times is None else ("none", "offline", "causal")
        runs = []
        for seed in range(request.seeds):
            for kind in kinds:
                for learner in LEARNERS:
                    config = request.options.of(learner, seed).replace(context=kind)
                    runs.append(PlannedRun("context", config, {"context": kind}))
            runs += _ablation(request, seed, kinds[-1] if request.config.context == "causal" else "offline")
        return runs


def _ablation(request: Request, seed: int, kind: str) -> list[PlannedRun]:
    """The method without each of its parts, and with only so many parts of the context."""
    runs = []
    for name, settings in PARTS_OF_OURS.items():
        config = request.options.of("manydg-context", seed, **settings).replace(context=kind)
        runs.append(PlannedRun("context", config, {"context": kind, "changed": name}))
    if request.dataset.times is not None:
        default = DEFAULT_PARTS[kind]
        for count in range(1, len(default)):
            config = request.options.of("manydg-context", seed)
            parts = config.replace(context=kind, context_options={"parts": list(default[:count])})
            runs.append(
                PlannedRun("context", parts, {"context": kind, "changed": f"only {', '.join(default[:count])}"})
            )
    return runs


OURS = "manydg-context"
WITHOUT = "no context"


class ContextRivals(Experiment):
    """The method with context against every chosen algorithm, each with and without the same context.

    Which context is what the request's configuration says: ``offline`` unless it says ``causal``.
    """

    name = "context-rivals"
    title = "Patient context and its rivals"

    def plan(self, request: Request) -> list[PlannedRun]:
        kind = "causal" if request.config.context == "causal" else "offline"
        if reason := unsupported(request.dataset, kind):
            raise DataError(f"the experiment 'context-rivals' does not fit this dataset: {reason}")
        algorithms = [name for name in request.algorithms if name != OURS]
        runs = []
        for seed in range(request.seeds):
            for context, label in (("none", WITHOUT), (kind, f"{kind} context")):
                learners = algorithms if context == "none" else [*algorithms, OURS]
                for learner in learners:
                    config = request.options.of(learner, seed).replace(context=context)
                    runs.append(PlannedRun("context-rivals", config, {"context": label}))
        return runs


COUNTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
BINS = 8
Scores = dict[str, float]
ByMetric = dict[str, Series]


def tested_part(dataset: DomainDataset, record: RunRecord, folder: Path) -> tuple[Run, DomainDataset]:
    """A finished run and the samples of its test patients."""
    run_folder = folder / record.folder
    return open_run(run_folder), dataset.select(load_split(run_folder / "split.json", dataset).test)


def scores_by_count(run: Run, part: DomainDataset, counts: Sequence[int] = COUNTS) -> dict[float, Scores]:
    """Test metrics when the context of every sample is so many samples; a count that no patient reaches is left out."""
    fitting = fitting_counts(part, counts)
    return {float(count): _scores(run, part, run.predict_proba(limit_context(part, count))) for count in fitting}


def fitting_counts(part: DomainDataset, counts: Sequence[int] = COUNTS) -> list[int]:
    """Those numbers of other samples that some patient has."""
    most = int(torch.bincount(part.domains).max()) - 1
    return [count for count in counts if count <= most]


@dataclass(frozen=True, eq=False)
class TimeBins:
    """Stretches of time since the start, with about equally many samples of a dataset in each.

    - ``borders`` ``(bins - 1,)``: A time at a border is in the earlier bin.
    - ``medians`` ``(bins,)``
    """

    borders: npt.NDArray[np.float64]
    medians: npt.NDArray[np.float64]

    @staticmethod
    def of(dataset: DomainDataset, bins: int = BINS) -> TimeBins:
        since = elapsed(dataset)
        edges = np.unique(np.quantile(since, np.linspace(0, 1, bins + 1)))
        which = np.searchsorted(edges[1:-1], since, side="left")
        medians = np.array([np.median(since[which == code]) for code in np.unique(which)])
        return TimeBins(edges[1:-1], medians)


def scores_by_elapsed(run: Run, part: DomainDataset, bins: TimeBins) -> dict[float, Scores]:
    """Test metrics of samples by the time since their session began.

    - returns: By the median time of the bin, which is that of the dataset that the bins were made of: so that runs with
      different test patients have the same points.
    """
    probabilities = run.predict_proba(part)
    which = np.searchsorted(bins.borders, elapsed(part), side="left")
    scores = {}
    for code in np.unique(which):
        rows = np.flatnonzero(which == code)
        scores[float(bins.medians[code])] = _scores(run, part.select(rows), probabilities[rows])
    return scores


def elapsed(part: DomainDataset) -> npt.NDArray[np.float64]:
    """Time of each sample since its session began, ``(samples,)``."""
    timeline = Timeline.of(part.domains, part.times, part.info.session_gap)
    since = torch.empty_like(timeline.times)
    since[timeline.order] = timeline.times - timeline.times[timeline.session]
    return since.cpu().numpy()


def gather(series: ByMetric, name: str, scores: Mapping[float, Mapping[str, float | None]], shift: float = 0.0) -> None:
    """Add the scores of one run to series by metric, name and position, which is shifted."""
    for position, metrics in scores.items():
        for metric, value in metrics.items():
            if value is not None and np.isfinite(value):
                series.setdefault(metric, {}).setdefault(name, {}).setdefault(position + shift, []).append(value)


def _scores(run: Run, part: DomainDataset, probabilities: npt.NDArray[np.float32]) -> Scores:
    target, rows = run.algorithm.target, part.learnable(np.arange(len(part)))
    truth = target.truth(part.targets).cpu().numpy()
    metrics = score(target, truth[rows], probabilities[rows], run.record.threshold)
    return {name: float(value) for name, value in metrics.items()}


OFFLINE, CAUSAL, NONE = "offline", "causal", "none"


class ColdStart(Experiment):
    """Metrics of unseen patients against the number of samples in their context, and against the time since the start.

    Offline context is limited by cutting test patients into short pieces; the model is not trained anew. Causal context
    grows by itself.
    """

    name = "cold-start"
    title = "Cold start and drift"

    def plan(self, request: Request) -> list[PlannedRun]:
        kinds = (NONE, OFFLINE) if request.dataset.times is None else (NONE, OFFLINE, CAUSAL)
        return [
            PlannedRun("cold-start", request.options.of(algorithm, seed).replace(context=kind), {"context": kind})
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
