"""The paper's experiments: one file each."""

from __future__ import annotations

from manydg.experiments._experiment import Experiment
from manydg.registry import Registry

__all__ = ["EXPERIMENTS", "Experiment"]

EXPERIMENTS: Registry[Experiment] = Registry("experiment", __name__, Experiment)
