"""What patient context is worth, to any learner, and which part of it."""

from __future__ import annotations

from typing import Any

from manydg.data.context import DEFAULT_PARTS, unsupported
from manydg.errors import DataError
from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun

LEARNERS = ("base", "boosting", "prototype", "manydg", "manydg-context")
PARTS_OF_OURS: dict[str, dict[str, Any]] = {
    "last weights instead of the average": {"decay": 0.0},
    "patients told apart by z": {"contrast": 0.1},
    "one direction projected out": {"directions": 1},
    "four directions projected out": {"directions": 4},
}


class Context(Experiment):
    """Every learner with and without context, the method without each of its parts, and parts of the context."""

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
