"""Every algorithm with and without patient context, on the same splits, in one table."""

from __future__ import annotations

from manydg.data.context import unsupported
from manydg.errors import DataError
from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun

OURS = "manydg-context"
WITHOUT = "no context"


class ContextRivals(Experiment):
    """The method with context against every algorithm asked for, each without context and with the same one.

    Which context is what the request's configuration says: ``offline`` unless it says ``causal``.
    """

    title = "Patient context and its rivals"

    def plan(self, request: Request) -> list[PlannedRun]:
        if reason := unsupported(request.dataset):
            raise DataError(f"the experiment 'context-rivals' does not fit this dataset: {reason}")
        kind = "causal" if request.config.context == "causal" else "offline"
        algorithms = [name for name in request.algorithms if name != OURS]
        runs = []
        for seed in range(request.seeds):
            for context, label in (("none", WITHOUT), (kind, f"{kind} context")):
                learners = algorithms if context == "none" else [*algorithms, OURS]
                for learner in learners:
                    config = request.options.of(learner, seed).replace(context=context)
                    runs.append(PlannedRun("context-rivals", config, {"context": label}))
        return runs
