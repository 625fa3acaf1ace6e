"""How much each objective should weigh (appendix B.6, second part)."""

from __future__ import annotations

from manydg.studies.experiment import Experiment, Request
from manydg.studies.study import PlannedRun

VALUES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WEIGHTS = ("mmd", "reconstruction", "similarity")
ALIKE = dict.fromkeys(WEIGHTS, 1.0)
GREEDY = {"mmd": 0.2, "reconstruction": 0.2, "similarity": 2.0}


class Weights(Experiment):
    """Each weight over 0.1 to 10 with the others at 1, and the paper's greedy combination."""

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
            told = ", ".join(f"{name} {value:g}" for name, value in GREEDY.items())
            greedy = request.options.of("manydg", seed, **GREEDY)
            runs.append(PlannedRun("weights", greedy, {"changed": f"greedy combination: {told}"}))
        return runs
