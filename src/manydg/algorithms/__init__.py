"""Algorithms: one file each, registered by its name. See ``CONTRIBUTING.md`` for how to add one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from manydg.algorithms._algorithm import Algorithm, Hyperparameters, Objective, Optimizers, choice, descend, setting
from manydg.backbones import Backbone
from manydg.errors import ConfigError
from manydg.files import Json
from manydg.registry import Registry
from manydg.targets import Target

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Hyperparameters",
    "Objective",
    "Optimizers",
    "algorithm_order",
    "build_algorithm",
    "choice",
    "controls",
    "descend",
    "paper_methods",
    "setting",
]

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", __name__, Algorithm)


def build_algorithm(
    name: str, backbone: Backbone, target: Target, n_domains: int, settings: Mapping[str, Json] | None = None
) -> Algorithm:
    """Build an algorithm by name and check its settings."""
    cls = ALGORITHMS.get(name)
    return cls(backbone, target, n_domains, cls.settings_from(settings or {}))


def paper_methods() -> tuple[str, ...]:
    """The algorithms that the paper's main tables compare, in their order."""
    return _in_order(name for name in ALGORITHMS.names() if ALGORITHMS.get(name).in_paper)


def controls() -> tuple[str, ...]:
    """The algorithms that show what an idea of ManyDG is worth, in their order."""
    return _in_order(name for name in ALGORITHMS.names() if ALGORITHMS.get(name).is_control)


def algorithm_order(name: str) -> int:
    """Where an algorithm stands in a table; one that is not installed stands among those of other packages."""
    try:
        return ALGORITHMS.get(name).order
    except ConfigError:
        return Algorithm.order


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=algorithm_order))
