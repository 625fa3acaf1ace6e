"""Algorithms: one file each, registered by its name. See ``CONTRIBUTING.md`` for how to add one."""

from __future__ import annotations

from collections.abc import Mapping

from manydg.algorithms._algorithm import Algorithm, Hyperparameters, Objective, Optimizers, choice, descend, setting
from manydg.backbones import Backbone
from manydg.files import Json
from manydg.registry import Registry
from manydg.targets import Target

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Hyperparameters",
    "Objective",
    "Optimizers",
    "build_algorithm",
    "choice",
    "descend",
    "setting",
]

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", __name__, Algorithm)


def build_algorithm(
    name: str, backbone: Backbone, target: Target, n_domains: int, settings: Mapping[str, Json] | None = None
) -> Algorithm:
    """Build an algorithm by name and check its settings."""
    cls = ALGORITHMS.get(name)
    return cls(backbone, target, n_domains, cls.settings_from(settings or {}))
