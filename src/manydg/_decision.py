"""How a run decides, in words and numbers, for those who read its predictions without having seen its training."""

from __future__ import annotations

from typing import Any

import numpy as np

from manydg.evaluation.metrics import decide
from manydg.training.record import VAL, Predictions
from manydg.training.run import Run

_NEARLY_ALL = 0.9
_COLUMNS = {
    "predicted": "what the model decides: the most probable class or, where a threshold is given, every label whose "
    "probability reaches it",
    "stage": "the most probable stage of an epoch",
    "threshold": "the probability from which a label counts as present",
    "p_NAME": "the model's probability of a class or label",
    "calibrated_NAME": "the same after temperature scaling on validation patients",
    "set_LEVEL": "what cannot be ruled out, separated by |: sets of a new patient hold the truth in LEVEL per cent of "
    "the samples, on average over patients",
    "set_LEVEL_of_SHARE": "the same, so that it is true of SHARE per cent of new patients",
    "unlike_training": "whether the patient lies farther from the training patients than nearly all validation "
    "patients do",
    "distance": "how far, 1 being that limit",
}


def about(run: Run) -> dict[str, Any]:
    """What a file of predictions should be read with, as JSON values."""
    record = run.record
    unseen = {"patients": record["patients"]["test"], "samples": record["samples"]["test"], **record["test"]}
    return {
        "run": record["run"],
        "algorithm": record["algorithm"],
        "trained on": record["dataset"],
        "classes or labels": record["target"]["names"],
        "how well it did on patients it had not seen": unseen,
        "decision": _decision(run),
        "columns": _COLUMNS,
    }


def _decision(run: Run) -> dict[str, Any]:
    record = run.record
    threshold, rule = record["threshold"], record["threshold_rule"]
    if threshold is None:
        return {"rule": rule, "in words": f"the {rule} decides"}
    target, labels = run.algorithm.target, record["target"]["names"]
    found = {"rule": rule, "threshold": threshold}
    what = f"'{labels[1]}'" if target.kind == "binary" else "every label"
    words = f"{what} counts as predicted from a probability of {threshold:.4g} upwards ({rule}"
    counts = None if run.folder is None else _on_validation(run, threshold)
    if counts is None:
        return found | {"in words": words + ")"}
    things = "samples" if target.kind == "binary" else "labels"
    words += f"; {counts['predicted']:.0%} of their {things} are predicted so, {counts['true']:.0%} are true)"
    if counts["predicted"] > _NEARLY_ALL:
        words += (
            ". Nearly everything is predicted: the model hardly tells what is true from what is not on those patients, "
            "and then F1 is highest so. Train it longer or on more patients, or choose a threshold of your own"
        )
    return found | {"on validation patients": counts, "in words": words}


def _on_validation(run: Run, threshold: float) -> dict[str, float] | None:
    """Which share of the validation patients' samples (or of their labels) is predicted, and which is true."""
    assert run.folder is not None
    path = run.folder / "predictions.npz"
    if not path.exists():
        return None
    truth, probabilities, _ = Predictions.read(path).side(VAL)
    decided = decide(run.algorithm.target, probabilities, threshold)
    return {"predicted": float(np.mean(decided != 0)), "true": float(np.mean(np.asarray(truth) != 0))}
