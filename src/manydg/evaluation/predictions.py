"""Predictions of a trained model on samples whose truth is known, and what is decided from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from manydg.targets import Target

Array = npt.NDArray[Any]
DEFAULT_THRESHOLD = 0.5


def decide(target: Target, probabilities: Array, threshold: float | None = None) -> npt.NDArray[np.int64]:
    """Class codes ``(rows,)`` or label indicators ``(rows, K)`` from probabilities ``(rows, K)``.

    Exclusive classes take the most probable one, a binary target the second class from ``threshold`` upwards, and
    every label of a multi-label target is present from ``threshold`` upwards. Without a threshold it is 0.5.
    """
    if target.exclusive and target.kind != "binary":
        return np.asarray(probabilities.argmax(axis=1), np.int64)
    scores = probabilities[:, 1] if target.kind == "binary" else probabilities
    # In float64, lest a threshold between two neighbouring float32 scores be rounded onto one of them.
    chosen = np.asarray(scores, np.float64) >= (DEFAULT_THRESHOLD if threshold is None else threshold)
    return np.asarray(chosen, np.int64)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities and truth of some patients' samples.

    Parameters
    ----------
    target : Target
    truth : (rows,) class codes, or (rows, K) indicators for multi-label
    probabilities : (rows, K)
    patients : (rows,)
        Pseudonyms or codes; where runs are compared, the same name means the same person in each.
    threshold : float, optional
        Decision threshold of binary and multi-label targets; 0.5 if not given.
    """

    target: Target
    truth: Array
    probabilities: Array
    patients: Array
    threshold: float | None = None
    names: Array = field(init=False, repr=False)
    """The distinct patients, sorted."""
    groups: npt.NDArray[np.intp] = field(init=False, repr=False)
    """Index of each row's patient in ``names``."""

    def __post_init__(self) -> None:
        names, groups = np.unique(self.patients, return_inverse=True)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "groups", groups)

    def decisions(self) -> npt.NDArray[np.int64]:
        """Class codes ``(rows,)`` or label indicators ``(rows, K)``."""
        return decide(self.target, self.probabilities, self.threshold)
