"""The paper's experiments: one file each."""

from __future__ import annotations

from manydg.registry import Registry
from manydg.studies.experiment import Experiment

__all__ = ["EXPERIMENTS", "Experiment"]

EXPERIMENTS: Registry[Experiment] = Registry("experiment", __name__, Experiment)
