"""The paper's experiments and further ones: every class with a name is an entry."""

from __future__ import annotations

from manydg.registry import NamedRegistry
from manydg.studies.study import Experiment

__all__ = ["EXPERIMENTS", "Experiment"]

EXPERIMENTS: NamedRegistry[Experiment] = NamedRegistry("experiment", __name__, Experiment)
