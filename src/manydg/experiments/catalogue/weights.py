"""How much each objective should weigh (appendix B.6, second part)."""

from __future__ import annotations

from manydg.experiments._experiment import Experiment, Request
from manydg.experiments.study import PlannedRun

VALUES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WEIGHTS = ("mmd", "reconstruction", "similarity")
GREEDY = {"mmd": 0.2, "reconstruction": 0.2, "similarity": 2.0}


class Weights(Experiment):
    """Each weight over 0.1 to 10 with the others at 1, and the paper's greedy combination."""

    title = "Weights of the objectives"

    def plan(self, request: Request) -> list[PlannedRun]:
        config = request.config.replace(algorithm="manydg")
        runs = []
        for seed in range(request.seeds):
            for weight in WEIGHTS:
                runs += [
                    PlannedRun(
                        "weights",
                        config.replace(settings={**config.settings, weight: value}, seed=seed),
                        {"changed": weight, "weight": value},
                    )
                    for value in VALUES
                ]
            greedy = config.replace(settings={**config.settings, **GREEDY}, seed=seed)
            runs.append(PlannedRun("weights", greedy, {"changed": "greedy combination 0.2, 0.2, 2.0"}))
        return runs
